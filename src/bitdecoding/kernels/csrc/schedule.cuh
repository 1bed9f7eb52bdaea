// How the tokens of a row are cut into units of work, and which CTA takes which. Shared by the control kernel, which
// sums the work up, and the decode kernel, which does it.
#pragma once

#include "ptx.cuh"

constexpr int TAIL_TOKENS = 136;   // ring of 16-bit tokens: a page and the tokens of one decode step
constexpr int CHUNK_TOKENS = 32;   // 16-bit tokens in a unit; about the bytes of an FP4 page
constexpr int TILE_OVERHEAD = 8;   // what the end of a tile costs beside its units, in units, at most
constexpr int UNITS_PER_OVERHEAD = 16;
constexpr int TOKENS_OF_PAGE = 128;

// One row of the step's state; see bitdecoding.kernels.control.
struct __align__(16) RowState {
    int length;        // cached tokens at the end of the step, the new ones included; 0 for a padding row
    int before;        // cached tokens before the step
    int tail_slot;     // -1 for a padding row
    int sink_slot;     // to read; -1: the FP4 copy in page 0 serves
    int promote_sink;  // to fill when page 0 is promoted; -1: none
    int reserved[3];
};

// Units of a row in the order of their work: FP4 pages, then chunks of sink tokens, then chunks of recent tokens.
// All kinds are cut by what the earliest query of the step can see.
struct RowUnits {
    int first_page, pages;      // FP4 pages first_page .. first_page + pages - 1
    int sink_chunks;
    int recent_start;           // first visible recent token
    int recent_chunks;
    __device__ __forceinline__ int total() const { return pages + sink_chunks + recent_chunks; }
};

// window <= 0: no sliding window. sink_tokens: of the recipe.
__device__ __forceinline__ RowUnits units_of_row(const RowState& row, int window, int sink_tokens) {
    RowUnits units = {};
    if (row.length == 0) return units;
    const int low = window > 0 && row.before >= window ? row.before - window + 1 : 0;  // first visible position
    const int full = row.before / TOKENS_OF_PAGE;
    units.first_page = min(low / TOKENS_OF_PAGE, full);
    units.pages = full - units.first_page;
    if (row.sink_slot >= 0 && full > 0 && low < sink_tokens) units.sink_chunks = (sink_tokens + CHUNK_TOKENS - 1) / CHUNK_TOKENS;
    units.recent_start = max(full * TOKENS_OF_PAGE, low);
    units.recent_chunks = (row.length - units.recent_start + CHUNK_TOKENS - 1) / CHUNK_TOKENS;
    return units;
}

// Items of one tile (row, KV head, column group): what CTAs take. With fixed splits (granule > 1) an item is so many
// units. Else it is one unit, and a long tile has some more of them that stand for the cost of its end. A tile without
// tokens has an item too, so that some CTA writes its zeros.
__device__ __forceinline__ int items_of_row(const RowState& row, int window, int sink_tokens, int granule) {
    const int units = units_of_row(row, window, sink_tokens).total();
    if (granule > 1) return max(1, (units + granule - 1) / granule);
    return max(1, units) + min(TILE_OVERHEAD, units / UNITS_PER_OVERHEAD);
}
