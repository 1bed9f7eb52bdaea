// Rounding of FP4 blocks, bit for bit as bitdecoding.numerics has it.
#pragma once

#include "ptx.cuh"

struct Scale {
    float value;
    uint32_t byte;
};

// x / y, correctly rounded.
__device__ __forceinline__ float divide(float x, float y) { return __fdiv_rn(x, y); }

// floor(log2 |x|) from the exponent bits; -127 for zero and subnormals.
__device__ __forceinline__ int floor_log2(float x) { return static_cast<int>((f32_to_bits(x) >> 23) & 0xFF) - 127; }

// x >= 0 to E4M3, to nearest even, saturating at 448; what rounds to 0 gives scale 0.
__device__ __forceinline__ Scale scale_e4m3(float x) {
    const uint32_t byte = f32_to_e4m3(x);
    return {f16_low_to_f32(e4m3x2_to_f16x2(byte)), byte};
}

// 2^exponent, clamped to what E8M0 holds.
__device__ __forceinline__ Scale scale_e8m0(int exponent) {
    const uint32_t byte = static_cast<uint32_t>(max(-127, min(127, exponent)) + 127);
    return {bits_to_f32(byte == 0 ? 0x00400000u : byte << 23), byte};
}

// The nearest E2M1 magnitude to x >= 0: ties to the even index, saturating at 6. Adding and taking away 1.5 · 2^22,
// 2^23 or 2^24 rounds to multiples of 0.5 below 2, of 1 below 4, of 2 above, ties to even multiples.
__device__ __forceinline__ float round_e2m1(float x) {
    const float clamped = fminf(x, 6.f);
    const uint32_t binade = max(f32_to_bits(clamped) & 0x7F800000u, 0x3F800000u);
    const float grid = bits_to_f32(binade + (22u << 23) + 0x00400000u);
    return (clamped + grid) - grid;
}

// Index 0..7 of an E2M1 magnitude.
__device__ __forceinline__ uint32_t e2m1_index(float value) {
    return value < 1.f ? static_cast<uint32_t>(2.f * value) : (f32_to_bits(value) >> 22) - 252;
}
