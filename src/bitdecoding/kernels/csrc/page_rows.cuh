// Packed pages to 16-bit rows of tokens, by warps: keys in registers, values turned round in shared memory.
// Compiled with BD_BF16 = 1 for BF16 results, 0 for FP16.
#pragma once

#include "ptx.cuh"

#include "e2m1.cuh"
#include "layout.cuh"

constexpr int ROW_UNITS = HEAD_DIM / 8;     // 16-byte units of a row of results
constexpr int KEY_VALUES = HEAD_DIM / 4;    // channels of a key that a lane holds
constexpr int KEY_CHUNKS = KEY_VALUES / 8;  // of 8 consecutive channels
constexpr int STAGED_WORDS4 = HALF_TOKENS * (ROW_UNITS + 1);

__device__ __forceinline__ uint32_t to_pair(float low, float high) {
    return BD_BF16 ? f32x2_to_bf16x2(low, high) : f32x2_to_f16x2(low, high);
}

__device__ __forceinline__ Words4 to_words(const float* x) {
    Words4 words;
#pragma unroll
    for (int i = 0; i < 4; ++i) words.x[i] = to_pair(x[2 * i], x[2 * i + 1]);
    return words;
}

__device__ __forceinline__ float decode_scale(uint8_t byte) {
    if (BD_NVFP4) return f16_low_to_f32(e4m3x2_to_f16x2(byte));
    // E8M0: an fp32 whose exponent field is the byte, except that 0 is 2^-127 and 255 NaN
    return bits_to_f32(byte == 0 ? 0x00400000u : byte == 255 ? 0x7FC00000u : static_cast<uint32_t>(byte) << 23);
}

// Codes j and j + 4 of a word, without the block scale.
__device__ __forceinline__ void decode_two(uint32_t word, int j, float& low, float& high) {
    const uint32_t pair = BD_HOPPER_BITS ? decode_e2m1(word, j, ShiftLeft()) : decode_e2m1_plain(word, j);
    low = f16_low_to_f32(pair) * 16384.f;
    high = f16_high_to_f32(pair) * 16384.f;
}

// First channel of chunk c of a lane's key.
__device__ __forceinline__ int key_channel(int c, int lane) { return 32 * c + 8 * (lane % 4); }

// A key tile: lane 4g + t holds key_channel(0..) of the tokens in rows g and g + 8.
struct KeyTile {
    Words4 operands[KEY_STEPS];

    __device__ __forceinline__ KeyTile(const uint8_t* page, int half, int tile, int lane) {
#pragma unroll
        for (int step = 0; step < KEY_STEPS; ++step)
            operands[step] = *reinterpret_cast<const Words4*>(page + key_operand(half, tile, step, lane));
    }

    // Chunk c of row g + 8r: 8 channels as stored, and the page's mean (BF16, or null) added.
    __device__ __forceinline__ void decode(const uint8_t* page, const uint16_t* mean, int half, int tile, int r, int c,
                                           int lane, float* x) const {
        const int step = c / 2, b = c % 2;
        const int block = (32 * b + 8 * (lane % 4)) / BLOCK_SIZE;  // of the step
        const float scale = decode_scale(page[key_scale(half, tile, step, lane / 4, r) + block]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            decode_two(r ? operands[step].x[2 * b + 1] : operands[step].x[2 * b], j, x[j], x[j + 4]);
            x[j] *= scale;
            x[j + 4] *= scale;
        }
        if (mean == nullptr) return;
        const Words4 pairs = load_in_place(mean + key_channel(c, lane));
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] += bits_to_f32((pairs.x[i / 2] >> (16 * (i % 2))) << 16);
    }
};

// Where a unit of a token of a half is staged: no two of the 8 rows of a matrix below share a bank.
__device__ __forceinline__ int staged_unit(int token, int unit) {
    return token * (ROW_UNITS + 1) + (unit ^ ((token >> 4 & 1) << 2));
}

// Decodes a value tile (16 channels of a half) to staged rows of tokens. A pair (j, j + 4) of a word is two consecutive
// tokens of one channel: a fragment of an 8x8 matrix, channels by tokens 4j.. and 16 + 4j.., that is stored transposed.
__device__ __forceinline__ void stage_values(const uint8_t* page, int half, int tile, int lane, Words4* staged) {
    const Words4 operand = *reinterpret_cast<const Words4*>(page + value_operand(half, tile, lane));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int r = i & 1, k = 32 * (i >> 1) + 8 * (lane % 4);
        const float scale = decode_scale(page[value_scale(half, tile, lane / 4, r) + k / BLOCK_SIZE]);
        uint32_t pairs[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float low, high;
            decode_two(operand.x[i], j, low, high);
            pairs[j] = to_pair(low * scale, high * scale);
        }
        // This lane's row: matrix j = lane / 8, token column lane % 8
        const int column = lane % 8;
        const int token = value_k_token(32 * (i >> 1) + 8 * (column >> 1) + 4 * (column & 1) + lane / 8);
        stmatrix_x4_transposed(shared_address(staged + staged_unit(token, 2 * tile + r)), pairs);
    }
}
