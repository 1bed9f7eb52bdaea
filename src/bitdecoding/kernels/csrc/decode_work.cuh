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
    int tile;
    // From `Work::number_parts` on: segments that the tile is cut into, and where this one and the tile's first leave
    // their partial results
    int parts, part, first_part;
};

// A segment and its row, as the loader tells the consumers. row < 0: the end.
struct Task {
    RowState state;
    RowUnits units;
    Segment segment;
};

class Work {
public:
    // All lanes of a warp together. rows >= 1.
    __device__ __forceinline__ Work(const int* item_prefix, const RowState* states, int rows, int heads,
                                    int column_groups, int granule)
        : prefix_(item_prefix), states_(states), rows_(rows), groups_(column_groups), tiles_(heads * column_groups),
          granule_(granule), row_(0) {
        load_window();
        const int total = (rows < 32 ? __shfl_sync(ALL_LANES, window_prefix_, rows) : item_prefix[rows]) * tiles_;
        // Where there are fewer items than CTAs each takes one, so that no CTA before the last is without
        const int ctas = min(static_cast<int>(gridDim.x), total), cta = blockIdx.x;
        share_ = quotient(total, ctas);
        larger_ = total - ctas * share_;  // so many CTAs take one more
        next_ = end_ = 0;
        if (cta >= ctas) return;
        next_ = cta * share_ + min(cta, larger_);
        end_ = next_ + share_ + (cta < larger_);
        find_row(quotient(next_, tiles_));
    }

    // The next segment; false when there is none. Every lane of the warp gets the same.
    __device__ __forceinline__ bool next(int window, int sink_tokens, Task& task) {
        int first, item, tile_of_row, items, working;
        do {
            if (next_ >= end_) return false;
            if (next_ >= prefix(row_ + 1) * tiles_) {
                ++row_;
                if (row_ - window_row_ > 30) load_window();
            }
            task.state = state();
            task.units = units_of_row(task.state, window, sink_tokens);
            items = prefix(row_ + 1) - prefix(row_);
            working = granule_ > 1 ? items : max(1, task.units.total());  // the rest stands for the tile's end
            const int begin = prefix(row_) * tiles_;
            tile_of_row = quotient(next_ - begin, items);
            first = begin + tile_of_row * items;  // of the tile
            item = next_ - first;
            if (item >= working) next_ = min(end_, first + items);
        } while (item >= working);
        const int taken = granule_ > 1 ? 1 : min(items - item, end_ - next_);

        Segment& segment = task.segment;
        segment.row = row_;
        segment.head = groups_ == 1 ? tile_of_row : quotient(tile_of_row, groups_);
        segment.column_group = tile_of_row - segment.head * groups_;
        segment.unit_begin = item * granule_;
        segment.unit_end = min(task.units.total(), (item + taken) * granule_);
        segment.tile = row_ * tiles_ + tile_of_row;
        segment.parts = working;
        segment.part = next_;
        segment.first_part = first;
        next_ += taken;
        return true;
    }

    // Balanced work is cut by CTAs, not by items: from items to parts, which only the segment's end needs.
    __device__ __forceinline__ void number_parts(Segment& segment) const {
        if (granule_ > 1) return;
        const int first_cta = cta_of(segment.first_part);
        segment.parts = cta_of(segment.first_part + segment.parts - 1) - first_cta + 1;
        // CTA + tile is unique: from one segment to the next in line, either goes up
        segment.part = blockIdx.x + segment.tile;
        segment.first_part = first_cta + segment.tile;
    }

private:
    static constexpr unsigned int ALL_LANES = 0xFFFFFFFFu;

    // Of numbers that are not negative: signs make a division longer.
    __device__ __forceinline__ static int quotient(int a, int b) {
        return static_cast<int>(static_cast<uint32_t>(a) / static_cast<uint32_t>(b));
    }

    __device__ __forceinline__ int cta_of(int item) const {
        const int of_larger = larger_ * (share_ + 1);
        return item < of_larger ? quotient(item, share_ + 1) : larger_ + quotient(item - of_larger, share_);
    }

    // Prefixes and states of 32 rows from row_ on, one a lane: one round trip to memory instead of one a step.
    __device__ __forceinline__ void load_window() {
        const int lane = threadIdx.x % 32;
        window_row_ = row_;
        window_prefix_ = prefix_[min(row_ + lane, rows_)];
        const RowState& mine = states_[min(row_ + lane, rows_ - 1)];
        window_length_ = mine.length;
        window_before_ = mine.before;
        window_tail_ = mine.tail_slot;
        window_sink_ = mine.sink_slot;
    }

    __device__ __forceinline__ int prefix(int row) const {
        return __shfl_sync(ALL_LANES, window_prefix_, row - window_row_);
    }

    __device__ __forceinline__ RowState state() const {
        const int lane = row_ - window_row_;
        return {__shfl_sync(ALL_LANES, window_length_, lane), __shfl_sync(ALL_LANES, window_before_, lane),
                __shfl_sync(ALL_LANES, window_tail_, lane), __shfl_sync(ALL_LANES, window_sink_, lane)};
    }

    // Makes row_ the row r with prefix[r] <= item < prefix[r + 1], by the whole warp, 32 rows at a time.
    __device__ __forceinline__ void find_row(int item) {
        const int lane = threadIdx.x % 32;
        if (rows_ < 32) {
            row_ = __popc(__ballot_sync(ALL_LANES, lane < rows_ && window_prefix_ <= item)) - 1;
            return;
        }
        int count = rows_;
        while (count > 1) {
            const int step = (count + 31) / 32, mine = lane * step;
            const bool before = mine < count && prefix_[row_ + mine] <= item;
            const int last = __popc(__ballot_sync(ALL_LANES, before)) - 1;
            row_ += last * step;
            count = min(step, count - last * step);
        }
        load_window();
    }

    const int* prefix_;
    const RowState* states_;
    int rows_, groups_, tiles_, granule_;
    int share_, larger_;
    int row_, next_, end_;
    int window_row_, window_prefix_, window_length_, window_before_, window_tail_, window_sink_;
};
