// Attention over 16-bit tokens (sink and recent), by one warp: 16 tokens of a chunk.
#pragma once

#include "decode_query.cuh"
#include "decode_softmax.cuh"

__device__ __forceinline__ void mma_model(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                          uint32_t b1) {
    if (BD_BF16)
        mma_bf16(c, a0, a1, a2, a3, b0, b1);
    else
        mma_f16(c, a0, a1, a2, a3, b0, b1);
}

// Products of the keys of rows 16·half.. with raw queries. raw[n]: query row of column 8n + g, or null.
__device__ __forceinline__ void chunk_products(const uint8_t* chunk, const uint16_t* const (&raw)[TILES], int half, int lane,
                                               float (&c)[TILES][4]) {
    const int g = lane / 4, t = lane % 4;
    const uint8_t* row = chunk + (16 * half + g) * ROW_PITCH;
#pragma unroll
    for (int b = 0; b < HEAD_DIM / 32; ++b) {
        const int channel = 32 * b + 8 * t;
        const Words4 k = load_words(row + 2 * channel), k8 = load_words(row + 8 * ROW_PITCH + 2 * channel);
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            Words4 q = {};
            if (raw[n] != nullptr) q = *reinterpret_cast<const Words4*>(raw[n] + channel);
            mma_model(c[n], k.x[0], k8.x[0], k.x[1], k8.x[1], q.x[0], q.x[1]);
            mma_model(c[n], k.x[2], k8.x[2], k.x[3], k8.x[3], q.x[2], q.x[3]);
        }
    }
}

// Takes 16 tokens into the softmax. Probabilities are split into two 16-bit parts, which
// together are as good as fp32.
__device__ __forceinline__ void chunk_accumulate(Softmax& state, const Scores<1>& s, const uint8_t* chunk, int half,
                                                 int lane) {
    float top[TILES][2];
    s.maxima(top);
    state.raise(top);
    uint32_t high[TILES][2], low[TILES][2];
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float p[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float offset = s.offset[n][e] - state.reference(n, e, CHUNK_FOLD);
                p[e] = exp2_fast(fmaf(s.product[0][n][2 * r + e], s.scale[n][e], offset));
                state.sum[n][e] += p[e];
            }
            const uint32_t rounded = model_pair(p[0], p[1]);
            high[n][r] = movmatrix(rounded);
            low[n][r] = movmatrix(model_pair(p[0] - model_low(rounded), p[1] - model_high(rounded)));
        }
    // Lanes 8i..8i+7 give the rows of matrix i: tokens 8 (i%2).., channels 8 (i/2)..
    const int token = 16 * half + (lane & 7) + 8 * ((lane >> 3) & 1);
    const uint32_t values = shared_address(chunk) + CHUNK_VALUES + token * ROW_PITCH + 16 * (lane >> 4);
#pragma unroll
    for (int m = 0; m < OUTPUT_TILES; ++m) {
        uint32_t v[4];
        ldmatrix_x4_transposed(v, values + 32 * m);
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            mma_model(state.tile(m, n), v[0], v[2], v[1], v[3], high[n][0], high[n][1]);
            mma_model(state.tile(m, n), v[0], v[2], v[1], v[3], low[n][0], low[n][1]);
        }
    }
}
