// Prologue of a segment: query rows to operand fragments in shared memory.
#pragma once

#include "blocks.cuh"
#include "decode_config.cuh"
#include "hadamard.cuh"

constexpr int LANE_CHANNELS = HEAD_DIM / 32;  // consecutive channels that a lane holds of one query row

// 16-bit model values, BF16 or FP16 as the kernel is compiled
__device__ __forceinline__ float model_low(uint32_t pair) {
    return BD_BF16 ? bits_to_f32(pair << 16) : f16_low_to_f32(pair);
}
__device__ __forceinline__ float model_high(uint32_t pair) {
    return BD_BF16 ? bits_to_f32(pair & 0xFFFF0000u) : f16_high_to_f32(pair);
}
__device__ __forceinline__ uint32_t model_pair(float low, float high) {
    return BD_BF16 ? f32x2_to_bf16x2(low, high) : f32x2_to_f16x2(low, high);
}

// A lane's channels of a row.
__device__ __forceinline__ void load_row(const uint16_t* row, int lane, float (&x)[LANE_CHANNELS]) {
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS / 2; ++i) {
        const uint32_t pair = reinterpret_cast<const uint32_t*>(row)[lane * (LANE_CHANNELS / 2) + i];
        x[2 * i] = model_low(pair);
        x[2 * i + 1] = model_high(pair);
    }
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, d);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, d));
    return x;
}

// Where channel k of a column lies in the B fragments of the first product, in 16-bit units. Word j of a lane holds
// channels j and j + 4 of its eight, as the decoded keys do; the two words that go into one product are neighbours.
__device__ __forceinline__ int query_position(int tile, int column, int k) {
    const int step = k >> 6, b = (k >> 5) & 1, t = (k >> 3) & 3, high = (k >> 2) & 1, j = k & 3;
    const int word = query_word(b, j);
    return ((((tile * KEY_STEPS + step) * 2 + word / 4) * 32 + 4 * column + t) * 4 + word % 4) * 2 + high;
}

// Rounds a row to fp16 after scaling it by a power of two to below 2, and stores it; returns the power of two.
__device__ __forceinline__ float store_scaled_row(const float (&x)[LANE_CHANNELS], uint16_t* fragments, int tile, int column,
                                                  int lane) {
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; ++i) largest = fmaxf(largest, fabsf(x[i]));
    const int exponent = max(-126, min(126, floor_log2(warp_max(largest))));
    const float down = bits_to_f32(static_cast<uint32_t>(127 - exponent) << 23);
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; ++i)
        fragments[query_position(tile, column, LANE_CHANNELS * lane + i)] =
            static_cast<uint16_t>(f32x2_to_f16x2(x[i] * down, 0.f));
    return bits_to_f32(static_cast<uint32_t>(127 + exponent) << 23);
}

// Quantizes a row in FP4 blocks by the standard rule and gives the dequantized values.
__device__ __forceinline__ void quantize_row(const float (&x)[LANE_CHANNELS], float (&q)[LANE_CHANNELS]) {
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; ++i) largest = fmaxf(largest, fabsf(x[i]));
#pragma unroll
    for (int d = 1; d < BLOCK_SIZE / LANE_CHANNELS; d *= 2)
        largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, d));
    const float scale = BD_NVFP4 ? scale_e4m3(divide(largest, 6.f)).value
                                 : (largest == 0.f ? 0.f : scale_e8m0(floor_log2(largest) - 2).value);
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; ++i) {
        const float magnitude = scale == 0.f ? 0.f : round_e2m1(divide(fabsf(x[i]), scale)) * scale;
        q[i] = x[i] < 0.f ? -magnitude : magnitude;
    }
}

// One query row, by one warp. raw: its channels, or null for a token in front of its row, which gets zeros. key_mean:
// of the head, or null where nobody asks for its score. column: of the output. score_scale: softmax scale · log2(e).
__device__ __forceinline__ void prepare_query_row(const uint16_t* raw, const float* key_mean, float score_scale, int column,
                                                  uint8_t* shared, Scalars& scalars, int lane) {
    uint16_t* fragments = reinterpret_cast<uint16_t*>(shared + SHARED_QUERY);
    float x[LANE_CHANNELS] = {};
    float shift = 0.f;
    if (raw != nullptr) {
        load_row(raw, lane, x);
        if (key_mean != nullptr) {
#pragma unroll
            for (int i = 0; i < LANE_CHANNELS; ++i) shift = fmaf(x[i], key_mean[lane * LANE_CHANNELS + i], shift);
        }
    }
    if (key_mean != nullptr) shift = warp_sum(shift);
    if (BD_ROTATE && raw != nullptr) warp_hadamard<HEAD_DIM>(x, lane);

    const int tile = NATIVE && COLUMN_STEP == 1 ? 2 * (column >> 3) + (column & 1) : column >> 3;
    const int first = NATIVE ? column & 6 : column & 7;
    float scale[2];
    if (NATIVE) {
        float part[LANE_CHANNELS];
        quantize_row(x, part);
        scale[0] = store_scaled_row(part, fragments, tile, first, lane);
#pragma unroll
        for (int i = 0; i < LANE_CHANNELS; ++i) x[i] -= part[i];
        quantize_row(x, part);
        scale[1] = store_scaled_row(part, fragments, tile, first + 1, lane);
    } else {
        scale[0] = store_scaled_row(x, fragments, tile, first, lane);
    }
    if (lane == 0) {
        // Decoded codes are values · 2^-14
        scalars.query_scale[8 * tile + first] = scale[0] * (16384.f * score_scale);
        if (NATIVE) scalars.query_scale[8 * tile + first + 1] = scale[1] * (16384.f * score_scale);
        scalars.shift[column] = shift * score_scale;
    }
}
