// The two products over half an FP4 page (64 tokens), by one warp: scores K·q^T and output V^T·p^T, both transposed, so
// that the page is the A operand in the order in which it lies in memory. Codes are decoded to fp16 values · 2^-14;
// block scales of NVFP4 are multiplied in (exactly), those of MXFP4 scale the fp32 sum over their block.
#pragma once

#include "decode_config.cuh"
#include "e2m1.cuh"

__device__ __forceinline__ uint32_t load_word(const uint8_t* p) { return *reinterpret_cast<const uint32_t*>(p); }
__device__ __forceinline__ uint32_t load_half_word(const uint8_t* p) { return *reinterpret_cast<const uint16_t*>(p); }
__device__ __forceinline__ Words4 load_words(const uint8_t* p) { return *reinterpret_cast<const Words4*>(p); }

// 2^(byte - 127) of byte i. Byte 0 (2^-127) gives 0: it only occurs with codes whose products vanish in fp32.
__device__ __forceinline__ float e8m0(uint32_t bytes, int i) {
    return bits_to_f32(((bytes >> (8 * i)) & 0xFF) << 23);
}

// Powers of two that the compiler cannot see through. It would turn products with known ones into shifts, and those
// into work for the integer pipe, which decoding fills; products with these run beside it.
__constant__ uint32_t POWERS[10] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512};

struct MultiplyLeft {
    __device__ __forceinline__ uint32_t operator()(uint32_t x, int n) const { return x * POWERS[n]; }
};

__device__ __forceinline__ uint32_t decode_pair(uint32_t word, int j) {
    return BD_HOPPER_BITS ? decode_e2m1(word, j, MultiplyLeft()) : decode_e2m1_plain(word, j);
}

// Row tiles that are multiplied in turns, so that no product waits for the one before it.
constexpr int IN_TURNS = BD_IN_TURNS;

// Scales of one K step of a row tile, for a lane: of rows g and g + 8, each for the lane's words b = 0 and b = 1.
// NVFP4: pairs of fp16. MXFP4: two E8M0 bytes.
struct StepScales {
    uint32_t row, row8;

    StepScales() = default;
    __device__ __forceinline__ StepScales(const uint8_t* of_row, const uint8_t* of_row8, int t) {
        if (BD_NVFP4) {
            // Blocks of 16: byte t/2 is that of the lane's word b = 0, byte 2 + t/2 that of b = 1
            const uint32_t select = t / 2 ? 0x0031 : 0x0020;
            row = e4m3x2_to_f16x2(__byte_perm(load_word(of_row), 0, select));
            row8 = e4m3x2_to_f16x2(__byte_perm(load_word(of_row8), 0, select));
        } else {
            row = load_half_word(of_row);
            row8 = load_half_word(of_row8);
        }
    }
};

// c[i] += A[i]·B over one K step, for IN_TURNS row tiles. a: A words 2b + r. b(tile, register, j): word j of B register
// 0 or 1 of a column tile.
template <int N, class B>
__device__ __forceinline__ void multiply(float (&c)[IN_TURNS][N][4], const Words4 (&a)[IN_TURNS],
                                         const StepScales (&scales)[IN_TURNS], const B& b) {
    if (BD_NVFP4) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int i = 0; i < IN_TURNS; ++i) {
                const uint32_t s = scales[i].row, s8 = scales[i].row8;
                const uint32_t a0 = mul_f16x2(decode_pair(a[i].x[0], j), both_low(s));
                const uint32_t a1 = mul_f16x2(decode_pair(a[i].x[1], j), both_low(s8));
                const uint32_t a2 = mul_f16x2(decode_pair(a[i].x[2], j), both_high(s));
                const uint32_t a3 = mul_f16x2(decode_pair(a[i].x[3], j), both_high(s8));
#pragma unroll
                for (int n = 0; n < N; ++n) mma_f16(c[i][n], a0, a1, a2, a3, b(n, 0, j), b(n, 1, j));
            }
    } else {
        // One block of 32 at a time: its scales multiply the fp32 sum
#pragma unroll
        for (int block = 0; block < 2; ++block) {
            float sum[IN_TURNS][N][4] = {};
#pragma unroll
            for (int j = 0; j < 4; j += 2)
#pragma unroll
                for (int i = 0; i < IN_TURNS; ++i) {
                    const uint32_t word = a[i].x[2 * block], word8 = a[i].x[2 * block + 1];
                    const uint32_t a0 = decode_pair(word, j), a1 = decode_pair(word8, j);
                    const uint32_t a2 = decode_pair(word, j + 1), a3 = decode_pair(word8, j + 1);
#pragma unroll
                    for (int n = 0; n < N; ++n) mma_f16(sum[i][n], a0, a1, a2, a3, b(n, block, j), b(n, block, j + 1));
                }
#pragma unroll
            for (int i = 0; i < IN_TURNS; ++i) {
                const float s = e8m0(scales[i].row, block), s8 = e8m0(scales[i].row8, block);
#pragma unroll
                for (int n = 0; n < N; ++n)
#pragma unroll
                    for (int k = 0; k < 4; ++k) c[i][n][k] = fmaf(sum[i][n][k], k < 2 ? s : s8, c[i][n][k]);
            }
        }
    }
}

// Products of 64 keys with all query columns: c[i / IN_TURNS][i % IN_TURNS][n] is key tile i, column tile n.
__device__ __forceinline__ void key_products(const uint8_t* page, const uint8_t* query, int half, int lane,
                                             float (&c)[KEY_TILES / IN_TURNS][IN_TURNS][QUERY_TILES][4]) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int step = 0; step < KEY_STEPS; ++step) {
        Words4 q[QUERY_TILES][2];
#pragma unroll
        for (int n = 0; n < QUERY_TILES; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) q[n][i] = load_words(query + (((n * KEY_STEPS + step) * 2 + i) * 32 + lane) * 16);
#pragma unroll
        for (int turn = 0; turn < KEY_TILES / IN_TURNS; ++turn) {
            Words4 a[IN_TURNS];
            StepScales scales[IN_TURNS];
#pragma unroll
            for (int k = 0; k < IN_TURNS; ++k) {
                const int i = turn * IN_TURNS + k;
                a[k] = load_words(page + key_operand(half, i, step, lane));
                scales[k] = StepScales(page + key_scale(half, i, step, g, 0), page + key_scale(half, i, step, g, 1), t);
            }
            multiply(c[turn], a, scales, [&](int n, int b, int j) { return q[n][query_word(b, j) / 4].x[query_word(b, j) % 4]; });
        }
    }
}

// o += V^T·p^T over 64 tokens. p[n][i][r]: probabilities of column tile n, key tile i, rows 8r.., transposed.
__device__ __forceinline__ void value_products(const uint8_t* page, int half, int lane,
                                               const uint32_t (&p)[TILES][KEY_TILES][2],
                                               float (&o)[OUTPUT_TILES / IN_TURNS][IN_TURNS][TILES][4]) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int turn = 0; turn < OUTPUT_TILES / IN_TURNS; ++turn) {
        Words4 a[IN_TURNS];
        StepScales scales[IN_TURNS];
#pragma unroll
        for (int i = 0; i < IN_TURNS; ++i) {
            const int m = turn * IN_TURNS + i;
            a[i] = load_words(page + value_operand(half, m, lane));
            scales[i] = StepScales(page + value_scale(half, m, g, 0), page + value_scale(half, m, g, 1), t);
        }
        multiply(o[turn], a, scales, [&](int n, int b, int j) { return p[n][2 * b + (j >> 1)][j & 1]; });
    }
}
