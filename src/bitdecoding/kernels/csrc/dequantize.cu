// Pages of a block table to 16-bit keys and values as they are stored (smoothed and rotated), to check other kernels.
#include "page_rows.cuh"

constexpr int WARPS = 8;

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
    __shared__ Words4 staged[STAGED_WORDS4];
    const int page_index = blockIdx.x, head = blockIdx.y, heads = gridDim.y, row = blockIdx.z;
    if (page_index >= page_counts[row]) return;
    const int64_t block = table[static_cast<int64_t>(row) * table_pages + page_index];
    const uint8_t* page = cache + (block * heads + head) * PAGE_BYTES;
    const uint16_t* mean = means == nullptr ? nullptr : means + (block * heads + head) * HEAD_DIM;
    const int64_t first_token =
        (static_cast<int64_t>(row) * heads + head) * table_pages * PAGE_TOKENS + page_index * PAGE_TOKENS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    for (int unit = warp; unit < 2 * KEY_TILES; unit += WARPS) {
        const int half = unit / KEY_TILES, tile = unit % KEY_TILES;
        const KeyTile operands(page, half, tile, lane);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int64_t token = first_token + HALF_TOKENS * half + key_row_token(tile, 8 * r + lane / 4);
#pragma unroll
            for (int c = 0; c < KEY_CHUNKS; ++c) {
                float x[8];
                operands.decode(page, mean, half, tile, r, c, lane, x);
                *reinterpret_cast<Words4*>(keys + token * HEAD_DIM + key_channel(c, lane)) = to_words(x);
            }
        }
    }

    for (int half = 0; half < 2; ++half) {
        for (int tile = warp; tile < VALUE_TILES; tile += WARPS) stage_values(page, half, tile, lane, staged);
        __syncthreads();
        for (int i = threadIdx.x; i < HALF_TOKENS * ROW_UNITS; i += 32 * WARPS) {
            const int token = i / ROW_UNITS, unit = i % ROW_UNITS;
            *reinterpret_cast<Words4*>(values + (first_token + HALF_TOKENS * half + token) * HEAD_DIM + 8 * unit) =
                staged[staged_unit(token, unit)];
        }
        __syncthreads();  // the next half overwrites what was staged
    }
}
