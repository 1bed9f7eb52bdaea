// Keys of a page: smoothing, rotation, page mean, scale search, packing. Four lanes t = 0..3 share a token; a lane owns
// channels 64c + 16t .. 64c + 16t + 15 of every c: one NVFP4 block, or half an MXFP4 block whose other half lane t ^ 1
// has.
#pragma once

#include "hadamard.cuh"
#include "quantize_rounding.cuh"

constexpr int CHUNKS = HEAD_DIM / 64;
constexpr int OWN = HEAD_DIM / 4;  // channels of a lane

__device__ __forceinline__ void load_key(const uint16_t* row, int t, Words4 (&raw)[OWN / 8]) {
#pragma unroll
    for (int i = 0; i < OWN / 8; ++i) load_global(raw[i], row + 64 * (i / 2) + 16 * t + i % 2 * 8);
}

// fp32 key less the key mean (in shared memory).
__device__ __forceinline__ void smooth_key(const Words4 (&raw)[OWN / 8], const float* key_mean, int t, float (&x)[OWN]) {
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const uint32_t pair = raw[i / 8].x[i % 8 / 2];
        x[i] = (i % 2 ? high_to_f32(pair) : low_to_f32(pair)) - key_mean[64 * (i / 16) + 16 * t + i % 16];
    }
}

template <int STRIDE>
__device__ __forceinline__ void butterfly(float (&x)[OWN]) {
#pragma unroll
    for (int i = 0; i < OWN; ++i)
        if (!(i & STRIDE)) {
            const float low = x[i], high = x[i + STRIDE];
            x[i] = __fadd_rn(low, high);
            x[i + STRIDE] = __fsub_rn(low, high);
        }
}

// With the lane whose t differs in this bit; ±x + other, which rounds as the sum or difference does.
__device__ __forceinline__ void butterfly_lanes(float (&x)[OWN], int bit, int lane) {
    const float sign = lane & bit ? -1.f : 1.f;
#pragma unroll
    for (int i = 0; i < OWN; ++i) x[i] = fmaf(sign, x[i], __shfl_xor_sync(ALL_LANES, x[i], bit));
}

// warp_hadamard for this split of the channels: strides 1, 2, 4, ... and the product, the same bits.
__device__ __forceinline__ void rotate_key(float (&x)[OWN], int lane) {
    butterfly<1>(x);
    butterfly<2>(x);
    butterfly<4>(x);
    butterfly<8>(x);
    butterfly_lanes(x, 1, lane);
    butterfly_lanes(x, 2, lane);
    if constexpr (CHUNKS >= 2) butterfly<16>(x);
    if constexpr (CHUNKS >= 4) butterfly<32>(x);
#pragma unroll
    for (int i = 0; i < OWN; ++i) x[i] = __fmul_rn(x[i], hadamard_norm(HEAD_DIM));
}

__device__ __forceinline__ void transform_key(const Words4 (&raw)[OWN / 8], const float* key_mean, const float* page_mean,
                                              int lane, float (&x)[OWN]) {
    const int t = lane % 4;
    smooth_key(raw, key_mean, t, x);
    if (BD_ROTATE) rotate_key(x, lane);
    if (BD_CENTERED) {
#pragma unroll
        for (int i = 0; i < OWN; ++i) x[i] = __fsub_rn(x[i], page_mean[64 * (i / 16) + 16 * t + i % 16]);
    }
}

// --- One block

// Rounds 16 values and returns their squared error. EXACT: saturating, and with the error of the reference to the bit;
// otherwise of fewer instructions, and for quotients below 7 unless SATURATE.
template <bool EXACT, bool SATURATE>
__device__ __forceinline__ float round_values(const float (&x)[16], const Divisor& divisor, uint32_t (&pairs)[8]) {
    float sum[2];
#pragma unroll
    for (int w = 0; w < 2; ++w) {
        float error[8] = {};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float rounded[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int i = j + 4 * h;
                const float value = x[8 * w + i];
                const float q = quotient(value, divisor);
                rounded[h] = round_quotient(EXACT || SATURATE ? saturate(q) : q);
                const float difference = fmaf(divisor.value, rounded[h], -value);  // the product is exact
                error[EXACT ? i : i % 2] =
                    EXACT ? __fmul_rn(difference, difference) : fmaf(difference, difference, error[i % 2]);
            }
            pairs[4 * w + j] = code_pair(rounded[0], rounded[1]);
        }
#pragma unroll
        for (int stride = 1; stride < (EXACT ? 8 : 2); stride *= 2)
#pragma unroll
            for (int i = 0; i < (EXACT ? 8 : 2); i += 2 * stride) error[i] = __fadd_rn(error[i], error[i + stride]);
        sum[w] = error[0];
    }
    const float total = __fadd_rn(sum[0], sum[1]);
    return NVFP4 ? total : __fadd_rn(total, __shfl_xor_sync(ALL_LANES, total, 1));
}

struct KeyBlock {
    uint32_t words[2];  // codes of values 0..7 and 8..15
    uint32_t byte;
};

__device__ __forceinline__ KeyBlock quantize_key_values(const float (&x)[16]) {
    float amax = fabsf(x[0]);
#pragma unroll
    for (int i = 1; i < 16; ++i) amax = fmaxf(amax, fabsf(x[i]));
    if (!NVFP4) amax = fmaxf(amax, __shfl_xor_sync(ALL_LANES, amax, 1));
    Candidate first, second;
    candidates(amax, first, second);

    uint32_t pairs[8], other[8];
    float error = round_values<false, !NVFP4>(x, first.divisor, pairs), other_error = 0.f;
    // Only a scale that is subnormal or saturates lets quotients reach 7
    bool exact = NVFP4 && amax > first.divisor.value * (6.5f * UNIT);
    if (KEY_SEARCH) {
        other_error = round_values<false, false>(x, second.divisor, other);
        // Too close for sums in another order, or for squares that are subnormal
        exact |= fabsf(other_error - error) <= fmaf(error, 1.f / 131072.f, 1e-30f);
    }
    if (__any_sync(ALL_LANES, exact)) {
        error = round_values<true, true>(x, first.divisor, pairs);
        if (KEY_SEARCH) other_error = round_values<true, true>(x, second.divisor, other);
    }
    const bool better = KEY_SEARCH && other_error < error;
    const bool flushed = better ? second.flushed : first.flushed;
    KeyBlock block;
    block.byte = better ? second.byte : first.byte;
#pragma unroll
    for (int w = 0; w < 2; ++w) {
        uint32_t m[4], s[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            m[j] = better ? other[4 * w + j] : pairs[4 * w + j];
            s[j] = permute_bytes(f32_to_bits(x[8 * w + j]), f32_to_bits(x[8 * w + j + 4]), 0x7632);
        }
        const uint32_t word = pack_word(m[0], m[1], m[2], m[3], s[0], s[1], s[2], s[3]);
        block.words[w] = flushed ? 0 : word;
    }
    return block;
}

// --- A tile: 16 tokens, in the order of the page

__device__ __forceinline__ void quantize_key_tile(int half, int tile, const uint16_t* const* rows, const float* key_mean,
                                                  const float* page_mean, uint8_t* image, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll 1
    for (int r = 0; r < 2; ++r) {
        Words4 raw[OWN / 8];
        load_key(rows[HALF_TOKENS * half + key_row_token(tile, 8 * r + g)], t, raw);
        float x[OWN];
        transform_key(raw, key_mean, page_mean, lane, x);
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            float values[16];
#pragma unroll
            for (int i = 0; i < 16; ++i) values[i] = x[16 * c + i];
            const KeyBlock block = quantize_key_values(values);
#pragma unroll
            for (int w = 0; w < 2; ++w)
                *reinterpret_cast<uint32_t*>(image + key_operand(half, tile, c, 4 * g + 2 * (t % 2) + w) +
                                             4 * (2 * (t / 2) + r)) = block.words[w];
            if (NVFP4 || t % 2 == 0) image[key_scale(half, tile, c, g, r) + (NVFP4 ? t : t / 2)] = block.byte;
        }
    }
}

// --- Page mean

constexpr int OCTETS = HEAD_DIM / 8;

// Mean over tokens skip..127 of the rotated keys, by way of the mean of the unrotated ones: rounded to BF16, to shared
// and global memory. Where it is not finite it is 0, so that a bad token spoils no other. partial: [threads / OCTETS,
// HEAD_DIM] floats.
template <int THREADS>
__device__ __forceinline__ void page_mean_of(const uint16_t* const* rows, const float* key_mean, int skip, float* partial,
                                             float* page_mean, uint16_t* stored) {
    constexpr int GROUPS = THREADS / OCTETS, LANE_OWN = HEAD_DIM / 32;
    const int octet = threadIdx.x % OCTETS, group = threadIdx.x / OCTETS, lane = threadIdx.x % 32;
    float sum[8] = {}, shift[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) shift[i] = key_mean[8 * octet + i];
#pragma unroll 4
    for (int token = group; token < PAGE_TOKENS; token += GROUPS) {
        Words4 raw;
        load_global(raw, rows[token] + 8 * octet);
        if (token >= skip) {
#pragma unroll
            for (int i = 0; i < 8; ++i) sum[i] += (i % 2 ? high_to_f32(raw.x[i / 2]) : low_to_f32(raw.x[i / 2])) - shift[i];
        }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) partial[group * HEAD_DIM + 8 * octet + i] = sum[i];
    __syncthreads();
    if (threadIdx.x < 32) {
        float x[LANE_OWN] = {};
        for (int from = 0; from < GROUPS; ++from)
#pragma unroll
            for (int i = 0; i < LANE_OWN; ++i) x[i] += partial[from * HEAD_DIM + lane * LANE_OWN + i];
#pragma unroll
        for (int i = 0; i < LANE_OWN; ++i) x[i] = divide(x[i], static_cast<float>(PAGE_TOKENS - skip));
        if (BD_ROTATE) warp_hadamard<HEAD_DIM>(x, lane);
#pragma unroll
        for (int i = 0; i < LANE_OWN; i += 2) {
            const bool good = fabsf(x[i]) < 3e38f, next_good = fabsf(x[i + 1]) < 3e38f;
            const uint32_t pair = f32x2_to_bf16x2(good ? x[i] : 0.f, next_good ? x[i + 1] : 0.f);
            *reinterpret_cast<uint32_t*>(stored + lane * LANE_OWN + i) = pair;
            page_mean[lane * LANE_OWN + i] = bits_to_f32(pair << 16);
            page_mean[lane * LANE_OWN + i + 1] = bits_to_f32(pair & 0xFFFF0000u);
        }
    }
    __syncthreads();
}
