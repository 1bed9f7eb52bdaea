// Which work a CTA of the decode kernel does, segment by segment.
//
// A tile is one row, KV head and column group (query rows that are read together). The items of all tiles stand in one
// line, row by row, and are dealt out evenly. Balanced: an item is a unit, and a CTA's items of one tile make one
// segment. Fixed splits (granule > 1): every item is a segment, cut the same way whatever else is in the batch, so that
// a row's result does not depend on it.
#pragma once

#include "schedule.cuh"

struct Segment {
    int row, head, column_group;
    int unit_begin, unit_end;  // of the row's units
    int parts;                 // segments that the tile is cut into
    int64_t tile;
    int64_t part, first_part;  // where this segment, and the tile's first, leave their partial results
};

class Work {
public:
    __device__ __forceinline__ Work(const int* item_prefix, int rows, int heads, int column_groups, int granule)
        : prefix_(item_prefix), rows_(rows), heads_(heads), groups_(column_groups), granule_(granule) {
        const int tiles = heads * column_groups;
        total_ = static_cast<int64_t>(item_prefix[rows]) * tiles;
        // Where there are fewer items than CTAs each takes one, so that no CTA before the last is without
        ctas_ = min(static_cast<int64_t>(gridDim.x), total_);
        if (blockIdx.x >= ctas_) {
            next_ = end_ = 0;
            return;
        }
        next_ = blockIdx.x * total_ / ctas_;
        end_ = (blockIdx.x + 1) * total_ / ctas_;
        row_ = find_row(static_cast<int>(next_ / tiles));
    }

    __device__ __forceinline__ bool done() const { return next_ >= end_; }

    // Every lane of the warp gets the same segment. units: of the segment's row, for the caller.
    __device__ __forceinline__ Segment next(const RowState* rows, int window, int sink_tokens, RowState& state,
                                            RowUnits& units) {
        const int64_t tiles = heads_ * groups_;
        int64_t begin = prefix_[row_] * tiles, end = prefix_[row_ + 1] * tiles;
        while (next_ >= end) {
            ++row_;
            begin = end;
            end = prefix_[row_ + 1] * tiles;
        }
        state = rows[row_];
        units = units_of_row(state, window, sink_tokens);
        const int items = static_cast<int>((end - begin) / tiles);
        const int tile_of_row = static_cast<int>((next_ - begin) / items);
        const int64_t first = begin + static_cast<int64_t>(tile_of_row) * items;  // of the tile
        const int item = static_cast<int>(next_ - first);
        const int taken = granule_ > 1 ? 1 : static_cast<int>(min(static_cast<int64_t>(items - item), end_ - next_));

        Segment segment;
        segment.row = row_;
        segment.head = tile_of_row / groups_;
        segment.column_group = tile_of_row % groups_;
        segment.unit_begin = item * granule_;
        segment.unit_end = min(units.total(), (item + taken) * granule_);
        segment.tile = row_ * tiles + tile_of_row;
        if (granule_ > 1) {
            segment.parts = items;
            segment.part = next_;
            segment.first_part = first;
        } else {
            // CTA + tile is unique: from one segment to the next in line, either goes up
            const int64_t first_cta = cta_of(first);
            segment.parts = static_cast<int>(cta_of(first + items - 1) - first_cta) + 1;
            segment.part = blockIdx.x + segment.tile;
            segment.first_part = first_cta + segment.tile;
        }
        next_ += taken;
        return segment;
    }

private:
    __device__ __forceinline__ int64_t cta_of(int64_t item) const { return ((item + 1) * ctas_ - 1) / total_; }

    // The row r with prefix[r] <= item < prefix[r + 1], by the whole warp, 32 rows at a time.
    __device__ __forceinline__ int find_row(int item) const {
        const int lane = threadIdx.x % 32;
        int first = 0, count = rows_;
        while (count > 1) {
            const int step = (count + 31) / 32, mine = lane * step;
            const bool before = mine < count && prefix_[first + mine] <= item;
            const int last = __popc(__ballot_sync(0xFFFFFFFFu, before)) - 1;
            first += last * step;
            count = min(step, count - last * step);
        }
        return first;
    }

    const int* prefix_;
    int rows_, heads_, groups_, granule_, row_;
    int64_t total_, ctas_, next_, end_;
};
