// Online softmax over score fragments of one warp: running maximum, sum, and probabilities as B operands.
#pragma once

#include "blocks.cuh"
#include "decode_page.cuh"

constexpr float NO_SCORE = __builtin_bit_cast(float, 0xFF800000u);  // -inf

// Probabilities are computed times 2^fold. w16: fp16 then keeps those down to 2^-39 of the maximum. Native NVFP4: c of
// the recipe. Native MXFP4, whose c changes nothing: as w16. 16-bit tokens: only fp16 needs it.
constexpr float W16_FOLD = 15.f;
constexpr float CHUNK_FOLD = BD_BF16 ? 0.f : W16_FOLD;

// Factor on sums relative to `maximum` when they join others relative to `top`. Sums that saw nothing are 0, or NaN that
// must not get lost.
__device__ __forceinline__ float weight(float maximum, float top) {
    return maximum == NO_SCORE ? 1.f : exp2_fast(maximum - top);
}

// State of one warp. Lane 4g+t holds columns 2t and 2t+1 of each tile; sums only over its own rows g and g + 8.
struct Softmax {
    float maximum[TILES][2];
    float sum[TILES][2];
    float output[OUTPUT_TILES / IN_TURNS][IN_TURNS][TILES][4];  // row tile m is [m / IN_TURNS][m % IN_TURNS]

    __device__ __forceinline__ float (&tile(int m, int n))[4] { return output[m / IN_TURNS][m % IN_TURNS][n]; }
    __device__ __forceinline__ const float (&tile(int m, int n) const)[4] {
        return output[m / IN_TURNS][m % IN_TURNS][n];
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                maximum[n][e] = NO_SCORE;
                sum[n][e] = 0.f;
            }
#pragma unroll
        for (int m = 0; m < OUTPUT_TILES; ++m)
#pragma unroll
            for (int n = 0; n < TILES; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) tile(m, n)[i] = 0.f;
    }

    __device__ __forceinline__ void scale(int n, int e, float factor) {
        sum[n][e] *= factor;
#pragma unroll
        for (int m = 0; m < OUTPUT_TILES; ++m) {
            tile(m, n)[e] *= factor;
            tile(m, n)[2 + e] *= factor;
        }
    }

    // Raises the maximum to that of new scores (whole columns' maxima), rescaling what was summed so far.
    __device__ __forceinline__ void raise(const float (&top)[TILES][2]) {
        bool higher = false;
#pragma unroll
        for (int n = 0; n < TILES; ++n) higher = higher || top[n][0] > maximum[n][0] || top[n][1] > maximum[n][1];
        if (!__any_sync(0xFFFFFFFFu, higher)) return;
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (top[n][e] > maximum[n][e]) {
                    scale(n, e, exp2_fast(maximum[n][e] - top[n][e]));
                    maximum[n][e] = top[n][e];
                }
    }

    // What to subtract from scores; finite, also before anything was seen.
    __device__ __forceinline__ float reference(int n, int e, float fold) const {
        return (maximum[n][e] == NO_SCORE ? 0.f : maximum[n][e]) - fold;
    }

    // From the scale of page products (2^fold from probabilities, 2^-14 from decoded values) to that of 16-bit tokens.
    __device__ __forceinline__ void finish_pages(float fold) {
        const float of_sum = exp2_fast(CHUNK_FOLD - fold), of_output = exp2_fast(CHUNK_FOLD - fold + 14.f);
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                sum[n][e] *= of_sum;
#pragma unroll
                for (int m = 0; m < OUTPUT_TILES; ++m) {
                    tile(m, n)[e] *= of_output;
                    tile(m, n)[2 + e] *= of_output;
                }
            }
    }
};

// Maximum over the lanes g whose bits are in `over` (lane distances 4, 8, 16).
template <int FIRST, int LAST>
__device__ __forceinline__ float max_over_rows(float x) {
#pragma unroll
    for (int d = FIRST; d <= LAST; d *= 2) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, d));
    return x;
}

// Scores of ROW_TILES tiles of 16 tokens, of one warp: the base-2 score of row g + 8r of tile i, column 2t + e of column
// tile n is product[i][n][2r + e] · scale[n][e] + offset[n][e], scale > 0; -inf where the column does not see the row.
template <int ROW_TILES>
struct Scores {
    float product[ROW_TILES][TILES][4];
    float scale[TILES][2], offset[TILES][2];

    __device__ __forceinline__ void maxima(float (&top)[TILES][2]) const {
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float x = NO_SCORE;
#pragma unroll
                for (int i = 0; i < ROW_TILES; ++i) x = fmaxf(x, fmaxf(product[i][n][e], product[i][n][2 + e]));
                top[n][e] = fmaf(max_over_rows<4, 16>(x), scale[n][e], offset[n][e]);
            }
    }
};

// 16-bit probabilities of a page half.
__device__ __forceinline__ void page_probabilities_w16(Softmax& state, const Scores<KEY_TILES>& s,
                                                       uint32_t (&p)[TILES][KEY_TILES][2]) {
    float top[TILES][2];
    s.maxima(top);
    state.raise(top);
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
        const float scale0 = s.scale[n][0], offset0 = s.offset[n][0] - state.reference(n, 0, W16_FOLD);
        const float scale1 = s.scale[n][1], offset1 = s.offset[n][1] - state.reference(n, 1, W16_FOLD);
#pragma unroll
        for (int i = 0; i < KEY_TILES; ++i)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float p0 = exp2_fast(fmaf(s.product[i][n][2 * r], scale0, offset0));
                const float p1 = exp2_fast(fmaf(s.product[i][n][2 * r + 1], scale1, offset1));
                state.sum[n][0] += p0;
                state.sum[n][1] += p1;
                p[n][i][r] = movmatrix(f32x2_to_f16x2(p0, p1));
            }
    }
}

// Scale of a block of probabilities with maximum `largest` (numerics: probability.py).
__device__ __forceinline__ float probability_scale(float largest, float tau) {
    if (BD_NVFP4) return scale_e4m3(largest <= tau ? 0.5f * largest : divide(largest, 6.f)).value;
    if (largest == 0.f) return 0.f;
    const int exponent = floor_log2(largest) - 2;
    const float scale = scale_e8m0(exponent).value;
    return largest > 6.f * scale ? 2.f * scale : scale;
}

// FP4 probabilities of a page half, as the fp16 values that their codes and scales stand for. A block's 16 tokens lie
// in the tiles 2b and 2b + 1 of four lanes g; the butterfly over them leaves the block's maximum, on the way to that of
// all rows.
__device__ __forceinline__ void page_probabilities_native(Softmax& state, const Scores<KEY_TILES>& scores, float fold,
                                                          float tau, uint32_t (&p)[TILES][KEY_TILES][2]) {
    constexpr int BLOCKS = KEY_TILES / 2;
    const auto& s = scores.product;  // with scale 1 and offset 0
    float largest[TILES][BLOCKS][2], top[TILES][2];
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int e = 0; e < 2 / COLUMN_STEP; ++e) {
            top[n][e] = NO_SCORE;
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) {
                const float x = fmaxf(fmaxf(s[2 * b][n][e], s[2 * b][n][2 + e]), fmaxf(s[2 * b + 1][n][e], s[2 * b + 1][n][2 + e]));
                largest[n][b][e] = max_over_rows<4, BD_NVFP4 ? 8 : 16>(x);
                top[n][e] = fmaxf(top[n][e], largest[n][b][e]);
            }
            if (BD_NVFP4) top[n][e] = max_over_rows<16, 16>(top[n][e]);
        }
    if (COLUMN_STEP == 2) top[0][1] = NO_SCORE;
    state.raise(top);
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) {
            float value[4][2] = {};  // of tile 2b + i/2, row g + 8 (i%2)
#pragma unroll
            for (int e = 0; e < 2 / COLUMN_STEP; ++e) {
                const float m = state.reference(n, e, fold);
                const float scale = probability_scale(exp2_fast(largest[n][b][e] - m), tau);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float x = exp2_fast(s[2 * b + i / 2][n][2 * (i % 2) + e] - m);
                    state.sum[n][e] += x;
                    value[i][e] = scale == 0.f ? 0.f : round_e2m1(divide(x, scale)) * scale;
                }
            }
#pragma unroll
            for (int i = 0; i < 4; ++i)
                p[n][2 * b + i / 2][i % 2] = movmatrix(f32x2_to_f16x2(value[i][0], value[i][1]));
        }
    }
}
