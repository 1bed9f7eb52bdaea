// Pages of a block table to 16-bit keys and values, for code that wants them contiguous (and to check other kernels).
// Compiled with BD_BF16 = 1 for BF16 results, 0 for FP16.
#include "ptx.cuh"

#include "e2m1.cuh"
#include "layout.cuh"

constexpr int WARPS = 8;
constexpr int VALUE_PITCH = HEAD_DIM + 8;  // a row starts 4 banks after the one before it

__device__ __forceinline__ uint32_t to_pair(float low, float high) {
    return BD_BF16 ? f32x2_to_bf16x2(low, high) : f32x2_to_f16x2(low, high);
}

__device__ __forceinline__ float decode_scale(uint8_t byte) {
    if (BD_NVFP4) return f16_low_to_f32(e4m3x2_to_f16x2(byte));
    // E8M0: an fp32 whose exponent field is the byte, except that 0 is 2^-127 and 255 NaN
    return bits_to_f32(byte == 0 ? 0x00400000u : byte == 255 ? 0x7FC00000u : static_cast<uint32_t>(byte) << 23);
}

// The 8 values of a word in the order of their codes, without the block scale.
__device__ __forceinline__ void decode_values(uint32_t word, float (&values)[8]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const uint32_t pair = BD_HOPPER_BITS ? decode_e2m1(word, j) : decode_e2m1_plain(word, j);
        values[j] = f16_low_to_f32(pair) * 16384.f;
        values[j + 4] = f16_high_to_f32(pair) * 16384.f;
    }
}

// One CTA a page (x), KV head (y) and row (z).
//
// cache       packed pages [blocks, kv_heads, PAGE_BYTES]
// table       int32 [rows, table_pages], block of each page; entries behind a row's pages may be anything
// page_counts int32 [rows]
// means       BF16 [blocks, kv_heads, HEAD_DIM] to add to the keys, or null
// keys,values 16-bit [rows, kv_heads, table_pages * 128, HEAD_DIM]; tokens behind a row's pages are left alone
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    dequantize_pages(const uint8_t* __restrict__ cache, const int32_t* __restrict__ table,
                     const int32_t* __restrict__ page_counts, const uint16_t* __restrict__ means,
                     uint16_t* __restrict__ keys, uint16_t* __restrict__ values, int table_pages) {
    __shared__ __align__(16) uint16_t staged[HALF_TOKENS * VALUE_PITCH];
    const int page_index = blockIdx.x, head = blockIdx.y, heads = gridDim.y, row = blockIdx.z;
    if (page_index >= page_counts[row]) return;
    const int64_t block = table[static_cast<int64_t>(row) * table_pages + page_index];
    const uint8_t* page = cache + (block * heads + head) * PAGE_BYTES;
    const uint16_t* mean = means == nullptr ? nullptr : means + (block * heads + head) * HEAD_DIM;
    const int64_t first_token =
        (static_cast<int64_t>(row) * heads + head) * table_pages * PAGE_TOKENS + page_index * PAGE_TOKENS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;

    // Keys: a word is 8 consecutive channels of one token, 16 bytes of the result
    for (int unit = warp; unit < 2 * KEY_TILES * KEY_STEPS; unit += WARPS) {
        const int step = unit % KEY_STEPS, tile = unit / KEY_STEPS % KEY_TILES, half = unit / KEY_STEPS / KEY_TILES;
        const Words4 operand = *reinterpret_cast<const Words4*>(page + key_operand(half, tile, step, lane));
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            const int channel = 64 * step + 32 * b + 8 * t;
            float shift[8] = {};
            if (mean != nullptr) {
                const Words4 pairs = *reinterpret_cast<const Words4*>(mean + channel);
#pragma unroll
                for (int i = 0; i < 8; ++i) shift[i] = bits_to_f32((pairs.x[i / 2] >> (16 * (i % 2))) << 16);
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float x[8];
                decode_values(operand.x[2 * b + r], x);
                const float scale = decode_scale(page[key_scale(half, tile, step, g, r) + (32 * b + 8 * t) / BLOCK_SIZE]);
                Words4 result;
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    result.x[i] = to_pair(x[2 * i] * scale + shift[2 * i], x[2 * i + 1] * scale + shift[2 * i + 1]);
                const int64_t token = first_token + HALF_TOKENS * half + key_row_token(tile, 8 * r + g);
                *reinterpret_cast<Words4*>(keys + token * HEAD_DIM + channel) = result;
            }
        }
    }

    // Values: a word is 8 tokens of one channel, so they are turned round in shared memory
    for (int half = 0; half < 2; ++half) {
        for (int tile = warp; tile < VALUE_TILES; tile += WARPS) {
            const Words4 operand = *reinterpret_cast<const Words4*>(page + value_operand(half, tile, lane));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int r = i & 1, k = 32 * (i >> 1) + 8 * t;
                float x[8];
                decode_values(operand.x[i], x);
                const float scale = decode_scale(page[value_scale(half, tile, g, r) + k / BLOCK_SIZE]);
#pragma unroll
                for (int n = 0; n < 8; ++n)
                    staged[value_k_token(k + n) * VALUE_PITCH + 16 * tile + 8 * r + g] =
                        static_cast<uint16_t>(to_pair(x[n] * scale, 0.f));
            }
        }
        __syncthreads();
        constexpr int ROW_UNITS = HEAD_DIM / 8;  // of 16 bytes
        for (int unit = threadIdx.x; unit < HALF_TOKENS * ROW_UNITS; unit += 32 * WARPS) {
            const int token = unit / ROW_UNITS, channel = 8 * (unit % ROW_UNITS);
            *reinterpret_cast<Words4*>(values + (first_token + HALF_TOKENS * half + token) * HEAD_DIM + channel) =
                *reinterpret_cast<const Words4*>(staged + token * VALUE_PITCH + channel);
        }
        __syncthreads();  // the next half overwrites what was staged
    }
}
