// Rounding of FP4 blocks at the speed of memory, with the codes and scales of bitdecoding.numerics.blocks.
//
// A quotient needs to lie on the right side of the seven midpoints of E2M1, and on them exactly when the true quotient
// does; it need not be the nearest fp32. A scale has 4 significant bits and a midpoint 3, so a value of p bits that is
// off a midpoint times the scale is off by more than 2^-p (1 + 2^-7), relatively. So for fp32 values a quotient within
// 2^-31 before its rounding to fp32 will do, and for 16-bit values one within 2^-18 before its rounding to fp16.
#pragma once

#include "blocks.cuh"
#include "layout.cuh"

constexpr bool NVFP4 = BD_NVFP4;
constexpr bool KEY_SEARCH = BD_KEY_SEARCH;
constexpr bool BF16 = BD_BF16;

constexpr uint32_t ALL_LANES = 0xFFFFFFFFu;
constexpr uint32_t F16_ONE = 0x3C003C00u, F16_SIX = 0x46004600u, F16_TINY = 0x04000400u;  // pairs of 1, 6, 2^-14
constexpr uint32_t F16_GRID = 0x62006200u, F16_MINUS_GRID = 0xE200E200u;                  // of ±1.5 · 2^9

// E2M1 magnitudes · 2^-14 are fp16 numbers with nothing but the code in bits 11..9. NVFP4 keys are divided by
// scale · 2^14 to come out like that; E8M0 scales have no room for the factor.
constexpr float UNIT = NVFP4 ? 1.f / 16384.f : 1.f;

__device__ __forceinline__ float low_to_f32(uint32_t pair) {
    return BF16 ? bits_to_f32(pair << 16) : f16_low_to_f32(pair);
}

__device__ __forceinline__ float high_to_f32(uint32_t pair) {
    return BF16 ? bits_to_f32(pair & 0xFFFF0000u) : f16_high_to_f32(pair);
}

// x / 6, correctly rounded where it matters: the quotient from a rounded reciprocal, and one correction of it.
__device__ __forceinline__ float sixth(float x) {
    constexpr float RECIPROCAL = 1.f / 6.f;
    const float q = __fmul_rn(x, RECIPROCAL);
    return fmaf(fmaf(-q, 6.f, x), RECIPROCAL, q);
}

// A block's scale, ready to be divided by. x / scale · UNIT = x · inverse + x · correction, to 2^-45.
struct Divisor {
    float value;  // scale / UNIT
    float inverse, correction;
};

__device__ __forceinline__ Divisor divisor_e4m3(float scale) {
    const float value = scale * (1.f / UNIT);
    const float divided = fmaxf(value, 16.f);  // scale 0: any codes do, they are cleared at the end
    const float inverse = reciprocal_approximate(divided);
    return {value, inverse, inverse * fmaf(-divided, inverse, 1.f)};
}

// exponent: -127..127.
__device__ __forceinline__ Divisor divisor_e8m0(int exponent) {
    const uint32_t inverse = exponent == 127 ? 0x00400000u : static_cast<uint32_t>(127 - exponent) << 23;
    return {scale_e8m0(exponent).value, bits_to_f32(inverse), 0.f};
}

__device__ __forceinline__ float quotient(float x, const Divisor& divisor) {
    return NVFP4 ? fmaf(x, divisor.inverse, __fmul_rn(x, divisor.correction)) : __fmul_rn(x, divisor.inverse);
}

// ±6 at most. NaN gives 6.
__device__ __forceinline__ float saturate(float quotient) {
    return fmaxf(fminf(quotient, 6.f * UNIT), -6.f * UNIT);
}

// The nearest E2M1 value to a quotient, ties to the even index, what is below 7: adding 1.5 · 2^22 of the quotient's
// power of two (at least 1) leaves multiples of 0.5 below 2, of 1 below 4, of 2 above. 0 is always +0.
__device__ __forceinline__ float round_quotient(float quotient) {
    constexpr float GRID = 6291456.f;
    const float power = bits_to_f32(f32_to_bits(fmaxf(fabsf(quotient), UNIT)) & 0x7F800000u);
    return fmaf(power, -GRID, fmaf(power, GRID, quotient));
}

// Two rounded quotients as fp16 · 2^-14.
__device__ __forceinline__ uint32_t code_pair(float low, float high) {
    const uint32_t pair = f32x2_to_f16x2(low, high);
    return NVFP4 ? pair : mul_f16x2(pair, F16_TINY);
}

// The same for pairs of fp16 quotients >= 0 (of 16-bit values), with saturation.
__device__ __forceinline__ uint32_t round_pair(uint32_t quotients) {
    const uint32_t clamped = min_f16x2(quotients, F16_SIX);
    const uint32_t power = max_f16x2(clamped, F16_ONE) & 0x7C007C00u;
    const uint32_t sum = fma_f16x2(power, F16_GRID, clamped);
    return mul_f16x2(fma_f16x2(power, F16_MINUS_GRID, sum), F16_TINY);
}

__device__ __forceinline__ constexpr uint32_t shift_right(uint32_t x, int by) { return by >= 0 ? x >> by : x << -by; }

// A word of 8 codes. Pair j holds codes j and j + 4: magnitudes in bits 11..9 of its halves, signs in bit 15.
__device__ __forceinline__ uint32_t pack_word(uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3, uint32_t s0, uint32_t s1,
                                              uint32_t s2, uint32_t s3) {
    constexpr uint32_t MAGNITUDE = 0x00070007u, SIGN = 0x00010001u;
    uint32_t word = shift_right(m0, 9 - BD_MAGNITUDE_BIT_0) & (MAGNITUDE << BD_MAGNITUDE_BIT_0);
    word |= shift_right(m1, 9 - BD_MAGNITUDE_BIT_1) & (MAGNITUDE << BD_MAGNITUDE_BIT_1);
    word |= shift_right(m2, 9 - BD_MAGNITUDE_BIT_2) & (MAGNITUDE << BD_MAGNITUDE_BIT_2);
    word |= shift_right(m3, 9 - BD_MAGNITUDE_BIT_3) & (MAGNITUDE << BD_MAGNITUDE_BIT_3);
    word |= shift_right(s0, 15 - BD_SIGN_BIT_0) & (SIGN << BD_SIGN_BIT_0);
    word |= shift_right(s1, 15 - BD_SIGN_BIT_1) & (SIGN << BD_SIGN_BIT_1);
    word |= shift_right(s2, 15 - BD_SIGN_BIT_2) & (SIGN << BD_SIGN_BIT_2);
    word |= shift_right(s3, 15 - BD_SIGN_BIT_3) & (SIGN << BD_SIGN_BIT_3);
    return word;
}

// A scale that a block may get.
struct Candidate {
    Divisor divisor;
    uint32_t byte;
    bool flushed;  // every code is 0
};

// Candidates of the search rule; the standard rule takes the first. amax: of the block.
__device__ __forceinline__ void candidates(float amax, Candidate& first, Candidate& second) {
    if (NVFP4) {
        const uint32_t bytes = f32x2_to_e4m3x2(sixth(amax), amax * 0.25f);
        const uint32_t scales = e4m3x2_to_f16x2(bytes);
        first = {divisor_e4m3(f16_low_to_f32(scales)), bytes & 0xFF, (bytes & 0xFF) == 0};
        second = {divisor_e4m3(f16_high_to_f32(scales)), bytes >> 8, bytes >> 8 == 0};
    } else {
        const int exponent = max(floor_log2(amax) - 2, -127);
        first = {divisor_e8m0(exponent), amax == 0.f ? 0u : static_cast<uint32_t>(exponent + 127), amax == 0.f};
        second = {divisor_e8m0(exponent + 1), amax == 0.f ? 0u : static_cast<uint32_t>(exponent + 128), amax == 0.f};
    }
}
