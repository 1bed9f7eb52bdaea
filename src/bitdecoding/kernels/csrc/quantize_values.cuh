// Values of a page: blocks along tokens, standard rule. A warp takes a strip of 64 channels and 32 tokens; a lane owns 4
// channels of 16 tokens: NVFP4 blocks, or halves of MXFP4 blocks whose other halves lane ^ 16 has.
#pragma once

#include "quantize_rounding.cuh"

constexpr int STRIPS = HEAD_DIM / 64 * (PAGE_TOKENS / 32);

// Where a 16-byte unit of value codes lies in the page's image in shared memory: shuffled inside groups of 8, against
// bank conflicts.
__device__ __forceinline__ int image_unit(int unit) {
    const int tile = unit / 32;
    return unit ^ ((tile & 1) << 2 | (tile >> 1 & 1));
}

__device__ __forceinline__ uint32_t larger_magnitudes(uint32_t a, uint32_t b) {
    return BF16 ? max_magnitude_bf16x2(a, b) : max_magnitude_f16x2(a, b);
}

// Largest magnitude of 16 pairs, for each half on its own; its sign is anything.
__device__ __forceinline__ uint32_t largest(const uint32_t (&pairs)[16]) {
    uint32_t result = pairs[0];
#pragma unroll
    for (int i = 1; i < 16; ++i) result = larger_magnitudes(result, pairs[i]);
    return NVFP4 ? result : larger_magnitudes(result, __shfl_xor_sync(ALL_LANES, result, 16));
}

struct ValueScale {
    float inverse;
    uint32_t byte;
    bool flushed;
};

__device__ __forceinline__ ValueScale value_block_scale(float amax) {
    if (NVFP4) {
        const Scale scale = scale_e4m3(sixth(amax));
        return {reciprocal_approximate(fmaxf(scale.value, 1.f / 1024.f)), scale.byte, scale.byte == 0};
    }
    const int exponent = max(floor_log2(amax) - 2, -127);
    return {divisor_e8m0(exponent).inverse, amax == 0.f ? 0u : static_cast<uint32_t>(exponent + 127), amax == 0.f};
}

// Channel `high` of 16 channel pairs, one a token, to two words of codes.
__device__ __forceinline__ void pack_values(const uint32_t (&pairs)[16], bool high, const ValueScale& scale,
                                            uint32_t (&words)[2]) {
    uint32_t m[8], s[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        // Tokens 2i and 2i + 1 are codes j and j + 4 of word i % 2, j = i / 2
        s[i] = permute_bytes(pairs[2 * i], pairs[2 * i + 1], high ? 0x7632 : 0x5410);
        const float x = fabsf(low_to_f32(s[i])) * scale.inverse, y = fabsf(high_to_f32(s[i])) * scale.inverse;
        m[i] = round_pair(f32x2_to_f16x2(x, y));
    }
#pragma unroll
    for (int w = 0; w < 2; ++w) {
        const uint32_t word = pack_word(m[w], m[2 + w], m[4 + w], m[6 + w], s[w], s[2 + w], s[4 + w], s[6 + w]);
        words[w] = scale.flushed ? 0 : word;
    }
}

// image: such that image + value_operand(...) is a place in it.
__device__ __forceinline__ void quantize_value_strip(int strip, const uint16_t* const* rows, uint8_t* image, int lane) {
    const int upper = lane / 16;  // which 16 tokens
    const int tokens = strip / (HEAD_DIM / 64), half = tokens / 2, b = tokens % 2;
    const int first_channel = 64 * (strip % (HEAD_DIM / 64)) + 4 * (lane % 16);
    uint32_t raw[2][16];  // channels 0 and 1, 2 and 3
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        uint32_t words[2];
        load_global(words, rows[32 * tokens + 16 * upper + i] + first_channel);
        raw[0][i] = words[0];
        raw[1][i] = words[1];
    }
    // Of the lane's four channels, tile and r are the same, and g goes up by one
    const int tile = first_channel / 16, r = first_channel / 8 % 2, g = first_channel % 8;
    uint8_t* scales = image + value_scale(half, tile, g, r) + (NVFP4 ? 2 * b + upper : b);
    constexpr int SCALE_STEP = value_scale(0, 0, 1, 0) - value_scale(0, 0, 0, 0);
    const int unit = (value_operand(half, tile, 4 * g + 2 * upper) - BD_VALUE_CODES) / 16;
    uint8_t* places[2][2];  // of the words of even and odd channels
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int w = 0; w < 2; ++w)
            places[h][w] = image + BD_VALUE_CODES + 16 * image_unit(unit + 4 * h + w) + 4 * (2 * b + r);
#pragma unroll
    for (int p = 0; p < 2; ++p) {
        __syncwarp();  // one after the other, for the sake of registers
        const uint32_t amax = largest(raw[p]);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const ValueScale scale = value_block_scale(fabsf(h ? high_to_f32(amax) : low_to_f32(amax)));
            uint32_t words[2];
            pack_values(raw[p], h, scale, words);
            // Two channels are 8 units, a group of image_unit
#pragma unroll
            for (int w = 0; w < 2; ++w) *reinterpret_cast<uint32_t*>(places[h][w] + 128 * p) = words[w];
            if (NVFP4 || upper == 0) scales[(2 * p + h) * SCALE_STEP] = static_cast<uint8_t>(scale.byte);
        }
    }
}
