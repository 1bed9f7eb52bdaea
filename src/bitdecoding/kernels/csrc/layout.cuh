// Index arithmetic of packed pages. The constants BD_* come from bitdecoding.kernels.layout.cuda_constants, which is
// where the layout is defined; the tests compare these functions with that definition at compile time.
#pragma once

constexpr int PAGE_TOKENS = BD_PAGE_TOKENS;
constexpr int HALF_TOKENS = PAGE_TOKENS / 2;
constexpr int HEAD_DIM = BD_HEAD_DIM;
constexpr int BLOCK_SIZE = BD_BLOCK_SIZE;
constexpr int PAGE_BYTES = BD_PAGE_BYTES;

constexpr int KEY_TILES = HALF_TOKENS / 16;   // 16 tokens each, of one half
constexpr int KEY_STEPS = HEAD_DIM / 64;      // 64 channels each
constexpr int VALUE_TILES = HEAD_DIM / 16;    // 16 channels each
constexpr int KEY_ROW_BLOCKS = HEAD_DIM / BLOCK_SIZE;

// decode_e2m1 has the bit order in its shifts
static_assert(!BD_HOPPER_BITS ||
                  (BD_SIGN_BIT_0 == 15 && BD_MAGNITUDE_BIT_0 == 9 && BD_SIGN_BIT_1 == 12 && BD_MAGNITUDE_BIT_1 == 6 &&
                   BD_SIGN_BIT_2 == 14 && BD_MAGNITUDE_BIT_2 == 3 && BD_SIGN_BIT_3 == 13 && BD_MAGNITUDE_BIT_3 == 0),
              "decode_e2m1 is written for another bit order");

// Token (of a half) in a row of a key tile.
__device__ __forceinline__ constexpr int key_row_token(int tile, int row) {
    return 32 * (tile >> 1) + 16 * ((row >> 2) & 1) + 8 * (tile & 1) + 4 * (row >> 3) + (row & 3);
}

// Token (of a half) at a k of a value tile.
__device__ __forceinline__ constexpr int value_k_token(int k) {
    const int b = k >> 5, t = (k >> 3) & 3, e = (k >> 2) & 1, j = k & 3;
    return 32 * b + 16 * (t >> 1) + 4 * j + 2 * (t & 1) + e;
}

// Offsets in a page. Of a lane's four operand words:
__device__ __forceinline__ constexpr int key_operand(int half, int tile, int step, int lane) {
    return BD_KEY_CODES + (((half * KEY_TILES + tile) * KEY_STEPS + step) * 32 + lane) * 16;
}

__device__ __forceinline__ constexpr int value_operand(int half, int tile, int lane) {
    return BD_VALUE_CODES + ((half * VALUE_TILES + tile) * 32 + lane) * 16;
}

// Of the first scale byte of row g + 8r: for keys that of K step `step`, for values that of the half. The bytes behind
// it are the next blocks along k.
__device__ __forceinline__ constexpr int key_scale(int half, int tile, int step, int g, int r) {
    constexpr int tiles = BD_KEY_SCALE_TILES, width = BD_KEY_SCALE_WIDTH, columns = KEY_ROW_BLOCKS / width;
    const int block = step * (64 / BLOCK_SIZE);
    const int unit = ((half * (KEY_TILES / tiles) + tile / tiles) * columns + block / width) * 8 + g;
    return BD_KEY_SCALES + unit * 16 + (2 * (tile % tiles) + r) * width + block % width;
}

__device__ __forceinline__ constexpr int value_scale(int half, int tile, int g, int r) {
    constexpr int tiles = BD_VALUE_SCALE_TILES, width = BD_VALUE_SCALE_WIDTH;
    const int unit = (half * (VALUE_TILES / tiles) + tile / tiles) * 8 + g;
    return BD_VALUE_SCALES + unit * 16 + (2 * (tile % tiles) + r) * width;
}
