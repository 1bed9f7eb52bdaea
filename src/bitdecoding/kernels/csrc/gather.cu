// All cached tokens of each row, in order, as plain 16-bit keys and values: pages with rotation and smoothing undone,
// sink and recent tokens as they are. For ordinary attention with unrotated queries (chunked prefill).
// Compiled with BD_BF16 = 1 for BF16, 0 for FP16, and BD_ROTATE = 1 where keys were rotated.
#include "hadamard.cuh"
#include "page_rows.cuh"
#include "schedule.cuh"

constexpr int WARPS = 8;
// As many as have the registers; more warps hide more latency
constexpr int MIN_CTAS = HEAD_DIM == 64 ? 4 : HEAD_DIM == 128 ? 3 : BD_HOPPER_BITS ? 2 : 1;

// Tokens [begin, end) of a row that lie in one of its pages.
struct Piece {
    int row, page;
    int begin, end;
    int64_t offset;  // of position 0 in the results, in tokens
    RowState state;
};

struct Results {
    uint16_t* keys;  // of position 0 and the CTA's head
    uint16_t* values;
    int64_t key_stride, value_stride;

    __device__ __forceinline__ void store_key(int position, int channel, const Words4& words) const {
        *reinterpret_cast<Words4*>(keys + position * key_stride + channel) = words;
    }
    __device__ __forceinline__ void store_value(int position, int channel, const Words4& words) const {
        *reinterpret_cast<Words4*>(values + position * value_stride + channel) = words;
    }
};

struct Rows {
    const RowState* states;
    const void* out_start;
    bool wide;  // int64 out_start
    const int* start_position;
    int rows;
    int64_t total;

    __device__ __forceinline__ int64_t start(int row) const {
        return wide ? static_cast<const int64_t*>(out_start)[row] : static_cast<const int*>(out_start)[row];
    }
    // Pieces before a row: at least as many as the pages that tokens of earlier rows touch.
    __device__ __forceinline__ int64_t first_piece(int row) const { return start(row) / PAGE_TOKENS + 2 * row; }

    // The last row whose first piece is not behind this one, by the whole warp, 32 rows at a time.
    __device__ __forceinline__ int find(int piece) const {
        const int lane = threadIdx.x % 32;
        int first = 0, count = rows;
        while (count > 1) {
            const int step = (count + 31) / 32, mine = lane * step;
            const bool before = mine < count && first_piece(first + mine) <= piece;
            const int last = __popc(__ballot_sync(0xFFFFFFFFu, before)) - 1;
            first += last * step;
            count = min(step, count - last * step);
        }
        return first;
    }

    // begin == end where there is nothing to do.
    __device__ __forceinline__ Piece piece(int index) const {
        Piece piece;
        piece.row = find(index);
        piece.state = states[piece.row];
        const int before = piece.state.before;
        const int from = start_position == nullptr ? 0 : max(0, min(start_position[piece.row], before));
        const int64_t first = start(piece.row), room = min(start(piece.row + 1), total) - first;
        const int64_t wanted = before - from;
        const int end = from + static_cast<int>(max(static_cast<int64_t>(0), min(room, wanted)));
        const int64_t page = from / PAGE_TOKENS + (index - first_piece(piece.row));
        piece.page = static_cast<int>(min(page, static_cast<int64_t>(end / PAGE_TOKENS + 1)));
        piece.begin = max(from, piece.page * PAGE_TOKENS);
        piece.end = max(piece.begin, min(end, (piece.page + 1) * PAGE_TOKENS));
        piece.offset = first - from;
        return piece;
    }
};

// The normalised Walsh-Hadamard transform of keys as `KeyTile` holds them, in the order of additions of hadamard.cuh.
// Four lanes share a key, so that all but two of its steps stay in a lane.
__device__ __forceinline__ void unrotate(float (&x)[KEY_VALUES], int lane) {
#pragma unroll
    for (int stride = 1; stride < HEAD_DIM; stride *= 2) {
        const bool across = stride == 8 || stride == 16;
        const int distance = stride / 8;                     // of lanes
        const int near = stride < 8 ? stride : stride / 4;   // of values of a lane
#pragma unroll
        for (int i = 0; i < KEY_VALUES; ++i) {
            if (across) {
                const float other = __shfl_xor_sync(0xFFFFFFFFu, x[i], distance);
                x[i] = lane & distance ? other - x[i] : x[i] + other;
            } else if (!(i & near)) {
                const float low = x[i], high = x[i + near];
                x[i] = low + high;
                x[i + near] = low - high;
            }
        }
    }
    constexpr float NORM = hadamard_norm(HEAD_DIM);
#pragma unroll
    for (int i = 0; i < KEY_VALUES; ++i) x[i] = __fmul_rn(x[i], NORM);
}

// Adds 8 fp32 numbers; never contracted with the product before, which the reference rounds too.
__device__ __forceinline__ void add_key_mean(const float* mean, float* x) {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
        const Words4 words = load_in_place(mean + i);
#pragma unroll
        for (int j = 0; j < 4; ++j) x[i + j] = __fadd_rn(x[i + j], bits_to_f32(words.x[j]));
    }
}

// Tokens [begin, end) of a page of FP4. mean, key_mean: of the CTA's head, or null.
__device__ __forceinline__ void gather_page(const uint8_t* page, const uint16_t* mean, const float* key_mean, int first,
                                            int begin, int end, const Results& results, Words4* staged) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int unit = warp; unit < 2 * KEY_TILES; unit += WARPS) {
        const int half = unit / KEY_TILES, tile = unit % KEY_TILES, half_first = first + HALF_TOKENS * half;
        if (half_first + HALF_TOKENS <= begin || half_first >= end) continue;
        const KeyTile operands(page, half, tile, lane);
#pragma unroll 1  // one row at a time leaves registers for more warps
        for (int r = 0; r < 2; ++r) {
            float x[KEY_VALUES];
#pragma unroll
            for (int c = 0; c < KEY_CHUNKS; ++c) operands.decode(page, mean, half, tile, r, c, lane, x + 8 * c);
            if (BD_ROTATE) unrotate(x, lane);
            const int position = half_first + key_row_token(tile, 8 * r + lane / 4);
            if (position < begin || position >= end) continue;
#pragma unroll
            for (int c = 0; c < KEY_CHUNKS; ++c) {
                const int channel = key_channel(c, lane);
                if (key_mean != nullptr) add_key_mean(key_mean + channel, x + 8 * c);
                results.store_key(position, channel, to_words(x + 8 * c));
            }
        }
    }
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
        const int half_first = first + HALF_TOKENS * half;
        if (half_first + HALF_TOKENS <= begin || half_first >= end) continue;
#pragma unroll 1
        for (int tile = warp; tile < VALUE_TILES; tile += WARPS) stage_values(page, half, tile, lane, staged);
        __syncthreads();
#pragma unroll 2
        for (int i = threadIdx.x; i < HALF_TOKENS * ROW_UNITS; i += 32 * WARPS) {
            const int token = i / ROW_UNITS, unit = i % ROW_UNITS, position = half_first + token;
            if (position >= begin && position < end)
                results.store_value(position, 8 * unit, staged[staged_unit(token, unit)]);
        }
        __syncthreads();  // the next half overwrites what was staged
    }
}

// Tokens [begin, end) from a slot [2, kv_heads, tokens, HEAD_DIM] where position p lies at p % tokens.
__device__ __forceinline__ void gather_slot(const uint16_t* slot, int tokens, int begin, int end,
                                            const Results& results) {
    const int head = blockIdx.y, heads = gridDim.y;
    const uint16_t* keys = slot + static_cast<int64_t>(head) * tokens * HEAD_DIM;
    const uint16_t* values = keys + static_cast<int64_t>(heads) * tokens * HEAD_DIM;
#pragma unroll 2
    for (int i = threadIdx.x; i < (end - begin) * ROW_UNITS; i += 32 * WARPS) {
        const int position = begin + i / ROW_UNITS, channel = 8 * (i % ROW_UNITS);
        const int at = position % tokens * HEAD_DIM + channel;
        results.store_key(position, channel, *reinterpret_cast<const Words4*>(keys + at));
        results.store_value(position, channel, *reinterpret_cast<const Words4*>(values + at));
    }
}

// One CTA a piece (x) and KV head (y).
//
// pages          packed pages, [blocks] at distance page_stride bytes, [kv_heads, PAGE_BYTES] each
// means          BF16 [blocks, kv_heads, HEAD_DIM], or null
// key_mean       fp32 [kv_heads, HEAD_DIM], or null
// tail, sink     16-bit [slots, 2, kv_heads, TAIL_TOKENS or sink_tokens, HEAD_DIM]
// table          int32 or (wide_table) int64 [rows, table_stride]
// out_start      int32 or (wide_start) int64 [rows + 1], where each row's tokens start in the results
// start_position int32 [rows], the first token wanted, or null: 0
// keys, values   16-bit [total, kv_heads, HEAD_DIM], strides in elements
extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_CTAS)
    gather(const uint8_t* __restrict__ pages, const uint16_t* means, const float* key_mean,
           const uint16_t* __restrict__ tail, const uint16_t* __restrict__ sink, const RowState* __restrict__ states,
           const void* __restrict__ table, const void* __restrict__ out_start, const int* __restrict__ start_position,
           uint16_t* __restrict__ keys, uint16_t* __restrict__ values, int64_t page_stride, int64_t table_stride,
           int64_t key_stride, int64_t key_head_stride, int64_t value_stride, int64_t value_head_stride, int64_t total,
           int rows, int wide_table, int wide_start, int sink_tokens) {
    __shared__ Words4 staged[STAGED_WORDS4];
    const int head = blockIdx.y, heads = gridDim.y;
    const Rows all = {states, out_start, wide_start != 0, start_position, rows, total};
    const Piece piece = all.piece(blockIdx.x);
    if (piece.begin == piece.end) return;
    const Results results = {keys + head * key_head_stride + piece.offset * key_stride,
                             values + head * value_head_stride + piece.offset * value_stride, key_stride, value_stride};
    if (piece.page >= piece.state.before / PAGE_TOKENS) {
        const int64_t slot = piece.state.tail_slot;
        gather_slot(tail + slot * 2 * heads * TAIL_TOKENS * HEAD_DIM, TAIL_TOKENS, piece.begin, piece.end, results);
        return;
    }
    int begin = piece.begin;
    if (piece.page == 0 && piece.state.sink_slot >= 0 && begin < sink_tokens) {
        const int64_t slot = piece.state.sink_slot;
        begin = min(piece.end, sink_tokens);
        gather_slot(sink + slot * 2 * heads * sink_tokens * HEAD_DIM, sink_tokens, piece.begin, begin, results);
        if (begin == piece.end) return;
    }
    const int64_t entry = piece.row * table_stride + piece.page;
    const int64_t block =
        wide_table ? static_cast<const int64_t*>(table)[entry] : static_cast<const int*>(table)[entry];
    gather_page(pages + block * page_stride + static_cast<int64_t>(head) * PAGE_BYTES,
                means == nullptr ? nullptr : means + (block * heads + head) * HEAD_DIM,
                key_mean == nullptr ? nullptr : key_mean + head * HEAD_DIM, piece.page * PAGE_TOKENS, begin, piece.end,
                results, staged);
}
