// The two products over half an FP4 page (64 tokens), by one warp: scores K·q^T and output V^T·p^T, both transposed, so
// that the page is the A operand in the order in which it lies in memory. Codes are decoded to fp16 values · 2^-14;
// block scales of NVFP4 are multiplied in (exactly), those of MXFP4 scale the fp32 sum over their block.
#pragma once

#include "decode_config.cuh"
#include "e2m1.cuh"

__device__ __forceinline__ uint32_t load_word(const uint8_t* p) { return *reinterpret_cast<const uint32_t*>(p); }
__device__ __forceinline__ uint32_t load_half_word(const uint8_t* p) { return *reinterpret_cast<const uint16_t*>(p); }
__device__ __forceinline__ Words4 load_words(const uint8_t* p) { return *reinterpret_cast<const Words4*>(p); }

__device__ __forceinline__ uint32_t same_low(uint32_t pair) { return __byte_perm(pair, 0, 0x1010); }
__device__ __forceinline__ uint32_t same_high(uint32_t pair) { return __byte_perm(pair, 0, 0x3232); }

// 2^(byte - 127) of byte i. Byte 0 (2^-127) gives 0: it only occurs with codes whose products vanish in fp32.
__device__ __forceinline__ float e8m0(uint32_t bytes, int i) {
    return bits_to_f32(((bytes >> (8 * i)) & 0xFF) << 23);
}

__device__ __forceinline__ void decode_words(const Words4& a, uint32_t (&h)[4][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (BD_HOPPER_BITS)
            decode_e2m1(a.x[i], h[i]);
        else
            decode_e2m1_plain(a.x[i], h[i]);
    }
}

// Multiplies A words 2b + r by the scales of their block and row. scales: 4 bytes of row g and of row g + 8.
// select: picks the lane's blocks, that of word b = 0 and that of b = 1.
__device__ __forceinline__ void scale_words(uint32_t (&h)[4][4], uint32_t scales, uint32_t scales8, uint32_t select) {
    const uint32_t s = e4m3x2_to_f16x2(__byte_perm(scales, 0, select));
    const uint32_t s8 = e4m3x2_to_f16x2(__byte_perm(scales8, 0, select));
    const uint32_t factors[4] = {same_low(s), same_low(s8), same_high(s), same_high(s8)};
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) h[i][j] = mul_f16x2(h[i][j], factors[i]);
}

// c += A·B over one K step. b(tile, register, j): word j of B register 0 or 1 of a column tile.
template <int N, class B>
__device__ __forceinline__ void multiply_nvfp4(float (&c)[N][4], const uint32_t (&h)[4][4], const B& b) {
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int n = 0; n < N; ++n) mma_f16(c[n], h[0][j], h[1][j], h[2][j], h[3][j], b(n, 0, j), b(n, 1, j));
}

template <int N, class B>
__device__ __forceinline__ void multiply_mxfp4(float (&c)[N][4], const uint32_t (&h)[4][4], uint32_t scales,
                                               uint32_t scales8, const B& b) {
#pragma unroll
    for (int block = 0; block < 2; ++block) {
        const float s = e8m0(scales, block), s8 = e8m0(scales8, block);
        const auto& row = h[2 * block];
        const auto& row8 = h[2 * block + 1];
#pragma unroll
        for (int n = 0; n < N; ++n) {
            float sum[4] = {};
            mma_f16(sum, row[0], row8[0], row[1], row8[1], b(n, block, 0), b(n, block, 1));
            mma_f16(sum, row[2], row8[2], row[3], row8[3], b(n, block, 2), b(n, block, 3));
            c[n][0] = fmaf(sum[0], s, c[n][0]);
            c[n][1] = fmaf(sum[1], s, c[n][1]);
            c[n][2] = fmaf(sum[2], s8, c[n][2]);
            c[n][3] = fmaf(sum[3], s8, c[n][3]);
        }
    }
}

// Products of 64 keys with all query columns: c[i][n] is key tile i, column tile n.
__device__ __forceinline__ void key_products(const uint8_t* page, const uint8_t* query, int half, int lane,
                                             float (&c)[KEY_TILES][QUERY_TILES][4]) {
    const int g = lane / 4, t = lane % 4;
    const uint32_t select = t / 2 ? 0x0031 : 0x0020;
#pragma unroll
    for (int step = 0; step < KEY_STEPS; ++step) {
        Words4 q[QUERY_TILES][2];
#pragma unroll
        for (int n = 0; n < QUERY_TILES; ++n)
#pragma unroll
            for (int b = 0; b < 2; ++b) q[n][b] = load_words(query + (((n * KEY_STEPS + step) * 2 + b) * 32 + lane) * 16);
        const auto operand = [&](int n, int b, int j) { return q[n][b].x[j]; };
#pragma unroll
        for (int i = 0; i < KEY_TILES; ++i) {
            uint32_t h[4][4];
            decode_words(load_words(page + key_operand(half, i, step, lane)), h);
            const uint8_t* scales = page + key_scale(half, i, step, g, 0);
            const uint8_t* scales8 = page + key_scale(half, i, step, g, 1);
            if (BD_NVFP4) {
                scale_words(h, load_word(scales), load_word(scales8), select);
                multiply_nvfp4(c[i], h, operand);
            } else {
                multiply_mxfp4(c[i], h, load_half_word(scales), load_half_word(scales8), operand);
            }
        }
    }
}

// o += V^T·p^T over 64 tokens. p[n][i][r]: probabilities of column tile n, key tile i, rows 8r.., transposed.
__device__ __forceinline__ void value_products(const uint8_t* page, int half, int lane,
                                               const uint32_t (&p)[TILES][KEY_TILES][2],
                                               float (&o)[OUTPUT_TILES][TILES][4]) {
    const int g = lane / 4, t = lane % 4;
    const uint32_t select = t / 2 ? 0x0031 : 0x0020;
    const auto operand = [&](int n, int b, int j) { return p[n][2 * b + (j >> 1)][j & 1]; };
#pragma unroll
    for (int m = 0; m < OUTPUT_TILES; ++m) {
        uint32_t h[4][4];
        decode_words(load_words(page + value_operand(half, m, lane)), h);
        const uint8_t* scales = page + value_scale(half, m, g, 0);
        const uint8_t* scales8 = page + value_scale(half, m, g, 1);
        if (BD_NVFP4) {
            scale_words(h, load_word(scales), load_word(scales8), select);
            multiply_nvfp4(o[m], h, operand);
        } else {
            multiply_mxfp4(o[m], h, load_half_word(scales), load_half_word(scales8), operand);
        }
    }
}

// Products of the page's mean with all query columns: c[n][0] and c[n][1] of lane t are columns 2t and 2t + 1.
__device__ __forceinline__ void mean_products(const uint8_t* mean, const uint8_t* query, int lane,
                                              float (&c)[QUERY_TILES][2]) {
    const int t = lane % 4;
    float sum[QUERY_TILES][4] = {};
#pragma unroll
    for (int b = 0; b < HEAD_DIM / 32; ++b) {
        // Only row 0 of A is of use; what the other rows hold does not matter
        const Words4 a = load_words(mean + (32 * b + 8 * t) * 2);
#pragma unroll
        for (int n = 0; n < QUERY_TILES; ++n) {
            const Words4 q = load_words(query + ((n * (HEAD_DIM / 32) + b) * 32 + lane) * 16);
            mma_bf16(sum[n], a.x[0], 0, a.x[1], 0, q.x[0], q.x[1]);
            mma_bf16(sum[n], a.x[2], 0, a.x[3], 0, q.x[2], q.x[3]);
        }
    }
    // Every row of A was the mean, hence every lane g holds it
#pragma unroll
    for (int n = 0; n < QUERY_TILES; ++n) {
        c[n][0] = sum[n][0];
        c[n][1] = sum[n][1];
    }
}
