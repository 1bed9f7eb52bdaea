// Shape of the decode kernel, from macros that bitdecoding.kernels.decode sets; and its shared memory.
#pragma once

#include "layout.cuh"
#include "decode_work.cuh"

constexpr bool NATIVE = BD_NATIVE;       // query and probabilities in FP4
constexpr bool CENTERED = BD_CENTERED;   // pages hold keys less the page's mean
constexpr bool CAPPED = BD_CAPPED;       // logits are soft-capped
constexpr int TILES = BD_TILES;          // column tiles of scores and output, 8 columns each
// Column tiles of the first product. Native: columns 2t and 2t+1 of a tile are the two FP4 parts of one query row, so
// that a lane joins them without help; the tile 2n+e gives the columns 2t+e of output tile n. With at most 4 query rows
// one tile suffices, and half of the output columns stay unused.
constexpr int QUERY_TILES = BD_QUERY_TILES;
constexpr int COLUMN_STEP = NATIVE && QUERY_TILES == TILES ? 2 : 1;
constexpr int COLUMNS = 8 * TILES / COLUMN_STEP;  // query rows of a tile of work
static_assert(NATIVE ? QUERY_TILES == TILES || QUERY_TILES == 2 * TILES : QUERY_TILES == TILES, "column tiles");
static_assert(COLUMN_STEP == 1 || TILES == 1, "unused columns in more than one tile");

constexpr int PAIRS = BD_PAIRS;          // pairs of consumer warps; a pair takes a unit, each warp half of it
constexpr int CONSUMER_WARPS = 2 * PAIRS;
constexpr int CONSUMER_THREADS = 32 * CONSUMER_WARPS;
constexpr int THREADS = CONSUMER_THREADS + 32;  // and the loader
constexpr int SLOTS = BD_SLOTS;          // units in flight
// So that within a segment a slot always belongs to one pair, which has then seen all earlier phases of its barriers
static_assert(SLOTS % PAIRS == 0, "slots and pairs");
static_assert(!CENTERED || SLOTS > 1, "scores of a page's mean come after the wait for the next slot");

constexpr int OUTPUT_TILES = HEAD_DIM / 16;  // row tiles of the output: 16 channels each
constexpr int KV_BLOCKS_BYTES = BD_VALUE_SCALES + PAGE_TOKENS * HEAD_DIM / BLOCK_SIZE;  // of a page, padding left out
constexpr int ROW_BYTES = 2 * HEAD_DIM;      // of a 16-bit token
constexpr int ROW_PITCH = ROW_BYTES + 16;    // in shared memory: 4 banks on from row to row
constexpr int CHUNK_VALUES = CHUNK_TOKENS * ROW_PITCH;  // offset of the values in a chunk

__device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
__device__ constexpr int align_up(int bytes, int to) { return (bytes + to - 1) / to * to; }

constexpr int SLOT_BYTES = align_up(larger(KV_BLOCKS_BYTES, 2 * CHUNK_VALUES), 128);

// At the end of a segment the warps leave their sums of one column tile in slots of the ring, four warps in each.
constexpr int MERGE_PITCH = HEAD_DIM + 4;  // floats; conflict-free for accumulator fragments
constexpr int MERGE_WARPS = 4;
constexpr int SCRATCH_UNITS = (CONSUMER_WARPS + MERGE_WARPS - 1) / MERGE_WARPS;
static_assert(MERGE_WARPS * 8 * MERGE_PITCH * 4 <= SLOT_BYTES && SCRATCH_UNITS <= SLOTS, "merge scratch");

// Place of a lane's word j of register b among the eight of a K step. NVFP4 multiplies the two b of one j together,
// MXFP4 two j of one b.
__device__ constexpr int query_word(int b, int j) { return BD_NVFP4 ? 2 * j + b : 4 * b + j; }

// Offsets in dynamic shared memory
constexpr int SHARED_QUERY = SLOTS * SLOT_BYTES;  // rotated query fragments: 8 columns of 16-bit a tile
constexpr int SHARED_SCALARS = SHARED_QUERY + QUERY_TILES * HEAD_DIM * 16;

struct Scalars {
    uint64_t full[SLOTS], empty[SLOTS];
    uint64_t task_full[2], task_empty[2];
    Task tasks[2];
    float query_scale[8 * QUERY_TILES];  // base-2 score of one unit of a column's product
    float shift[8 * TILES];              // base-2 score of the key mean
    int position[8 * TILES];             // of the column's query token
    float mean[CENTERED ? SLOTS : 1][CENTERED ? 8 * TILES : 1];  // base-2 score of the mean of the page in a slot
    float maximum[CONSUMER_WARPS][8 * TILES], sum[CONSUMER_WARPS][8 * TILES];
    int is_last;
};
constexpr int SHARED_BYTES = SHARED_SCALARS + sizeof(Scalars);
