// Once a step, before the first layer: which slots of the 16-bit buffers each row uses, and the decode kernel's
// schedule. One CTA; every phase is a loop over rows or slots, phases are parted by barriers, and no result depends on
// the order of threads. See bitdecoding.kernels.control for the rules; tests/control_model.py states them once more.
//
// An entry of a table maps a block to a slot, and holds only where the slot's key is that block (or, for tails, its
// older key): a slot that gets another key thereby drops out of its old block's entry, and nothing needs clearing.
//
// Keys that outlive their request do no harm. A block that is given out again is filled from its start, so the first
// step that touches it reads no recent token of it (before % 128 == 0, or it is entered in mid-step) and makes it the
// key of the slot that the row then owns. Likewise its sink entry is read only once page 0 is full, and the step that
// fills page 0 overwrites the entry.
#include "ptx.cuh"

#include "schedule.cuh"

constexpr int NONE = -1;
constexpr int WANTED = -2;            // WANTED - n: the n-th free slot is wanted
constexpr int UNOWNED = 0x7FFFFFFF;
constexpr int RESERVED = -0x7FFFFFFF - 1;  // RESERVED + row: an entry that this row is about to write; lowest row wins
constexpr int SLOT_BITS = 16;
constexpr uint64_t IN_USE = ~0ull;
constexpr int MAX_KINDS = 16;

// Of the array `counters`; bitdecoding.kernels.control.Counter has the same order.
enum Counter {
    STEPS,
    TAIL_CLAIMS,
    TAIL_EVICTIONS,
    LOST_TAILS,
    SINK_CLAIMS,
    SINK_EVICTIONS,
    SINK_MISSES,
    SINK_REFUSALS,
    PAGES_PROMOTED,
    INVALID_ROWS,
    COUNTERS,
    MOVED = COUNTERS,  // rows whose slot gets another key; not kept
    TALLIES,
};

// A row while the kernel works on it, in shared memory.
struct __align__(16) Row {
    int length, before;  // length 0: padding
    int first, last;     // blocks of the first and the last token
    int own, previous;   // tail slots found at the block of the first new token, and at the one before it
    int tail;            // tail slot
    int sink;            // sink slot, to read (before >= 128) or to fill
    __device__ __forceinline__ int page() const { return before / TOKENS_OF_PAGE; }
    __device__ __forceinline__ int last_page() const { return (length - 1) / TOKENS_OF_PAGE; }
    __device__ __forceinline__ bool partial() const { return before % TOKENS_OF_PAGE != 0; }
    __device__ __forceinline__ bool reads_sink() const { return before >= TOKENS_OF_PAGE; }
    __device__ __forceinline__ bool fills_sink() const { return before < TOKENS_OF_PAGE && length >= TOKENS_OF_PAGE; }
    // The block's entry needs no writing
    __device__ __forceinline__ bool stays() const { return tail == own && page() == last_page(); }
};

struct SlotTable {
    int* slot_of_block;
    int* keys;        // block, or NONE
    int* older_keys;  // tails only
    int64_t* stamps;  // step of the last use
    int slots;
    int* owners;      // in shared memory: who uses the slot in this step
};

struct Inputs {
    const int* lengths;
    const int* query_start;  // or null
    const void* blocks;
    int64_t stride;
    int width;
    bool wide;  // int64 block table
    int rows, query_tokens, num_blocks, null_block;

    // Blocks of some pages of a row; NONE for a page < 0 and for an id that is no block.
    template <int N>
    __device__ __forceinline__ void load_blocks(int row, const int (&pages)[N], int (&ids)[N]) const {
        int64_t loaded[N];
        const int64_t start = row * stride;
        if (wide) {
#pragma unroll
            for (int i = 0; i < N; ++i) loaded[i] = static_cast<const int64_t*>(blocks)[start + max(0, pages[i])];
        } else {
#pragma unroll
            for (int i = 0; i < N; ++i) loaded[i] = static_cast<const int*>(blocks)[start + max(0, pages[i])];
        }
#pragma unroll
        for (int i = 0; i < N; ++i)
            ids[i] = pages[i] < 0 || loaded[i] < 0 || loaded[i] >= num_blocks ? NONE : static_cast<int>(loaded[i]);
    }
    __device__ __forceinline__ bool usable(int id) const { return id != NONE && id != null_block; }
};

// --- Look-up. Loads that do not depend on each other stand side by side: the kernel is one chain of latencies.

// What the table of entries says, true or not.
__device__ __forceinline__ int entry_of(const SlotTable& table, bool usable, int block) {
    return usable ? table.slot_of_block[block] : NONE;
}

__device__ __forceinline__ int key_of(const int* keys, int slot) { return slot >= 0 ? keys[slot] : NONE; }

__device__ __forceinline__ Row read_row(const Inputs& in, const SlotTable& tails, const SlotTable& sinks, int row,
                                        int* tally) {
    Row state = {0, 0, NONE, NONE, NONE, NONE, NONE, NONE};
    const int length = in.lengths[row];
    const int tokens = in.query_start != nullptr ? in.query_start[row + 1] - in.query_start[row] : in.query_tokens;
    if (length <= 0) return state;
    const int last_page = (length - 1) / TOKENS_OF_PAGE;
    if (last_page >= in.width) {
        atomicAdd(tally + INVALID_ROWS, 1);
        return state;
    }
    const int before = max(0, length - max(0, tokens)), page = before / TOKENS_OF_PAGE;
    const bool starts_page = before % TOKENS_OF_PAGE == 0;
    // Without new tokens the entry of a page that is about to start is none of the row's
    const int pages[] = {0, last_page, page <= last_page ? page : NONE, starts_page ? page - 1 : NONE};
    int ids[4];
    in.load_blocks(row, pages, ids);
    const int first = ids[0], last = ids[1], own = ids[2], previous = ids[3];
    if (!in.usable(first) || !in.usable(last)) {
        if (first == NONE || last == NONE) atomicAdd(tally + INVALID_ROWS, 1);
        return state;
    }
    state.length = length;
    state.before = before;
    state.first = first;
    state.last = last;
    const int own_slot = entry_of(tails, in.usable(own), own);
    const int previous_slot = entry_of(tails, in.usable(previous), previous);
    const int sink_slot = entry_of(sinks, sinks.slots > 0 && length >= TOKENS_OF_PAGE, first);
    const int own_key = key_of(tails.keys, own_slot), older_key = key_of(tails.older_keys, own_slot);
    const int previous_key = key_of(tails.keys, previous_slot), sink_key = key_of(sinks.keys, sink_slot);
    if (own_slot >= 0 && (own_key == own || older_key == own)) state.own = own_slot;
    // A full block may be shared, and a slot that has it as its older key holds tokens of the next one
    if (previous_slot >= 0 && previous_key == previous) state.previous = previous_slot;
    if (sink_slot >= 0 && sink_key == first) state.sink = sink_slot;
    return state;
}

// --- Claims

// Inclusive prefix sums; `values` and `spare` have room for n and n. Returns where the sums are.
__device__ __forceinline__ int* prefix_sums(int* values, int* spare, int n) {
    __syncthreads();
    for (int distance = 1; distance < n; distance *= 2) {
        for (int i = threadIdx.x; i < n; i += blockDim.x)
            spare[i] = values[i] + (i >= distance ? values[i - distance] : 0);
        __syncthreads();
        int* const sums = spare;
        spare = values;
        values = sums;
    }
    return values;
}

// Ascending; count is a power of two.
__device__ __forceinline__ void bitonic_sort(uint64_t* keys, int count) {
    for (int size = 2; size <= count; size *= 2)
        for (int distance = size / 2; distance > 0; distance /= 2) {
            __syncthreads();
            for (int i = threadIdx.x; i < count / 2; i += blockDim.x) {
                const int low = 2 * i - (i & (distance - 1)), high = low + distance;
                const uint64_t a = keys[low], b = keys[high];
                if ((a > b) == ((low & size) == 0)) {
                    keys[low] = b;
                    keys[high] = a;
                }
            }
        }
    __syncthreads();
}

// Gives the rows that want a slot (field == WANTED) the free ones, unkeyed first, then least recently used, in the
// order of the rows; NONE when there are no more. buffer: for 2 · rows ints, and for 64-bit keys as many as a power of
// two >= slots.
__device__ __forceinline__ void claim_slots(Row* states, int rows, int Row::*field, const SlotTable& table,
                                            void* buffer, int* evictions) {
    int* flags = static_cast<int*>(buffer);
    for (int row = threadIdx.x; row < rows; row += blockDim.x) flags[row] = states[row].*field == WANTED;
    const int* ranks = prefix_sums(flags, flags + rows, rows);
    for (int row = threadIdx.x; row < rows; row += blockDim.x)
        if (states[row].*field == WANTED) states[row].*field = WANTED - (ranks[row] - 1);
    __syncthreads();

    int count = 1;
    while (count < table.slots) count *= 2;
    uint64_t* order = static_cast<uint64_t*>(buffer);
    for (int slot = threadIdx.x; slot < count; slot += blockDim.x) {
        uint64_t key = IN_USE;
        if (slot < table.slots && table.owners[slot] == UNOWNED) {
            const int block = table.keys[slot];
            const bool keyed = block >= 0 && table.slot_of_block[block] == slot;
            key = (keyed ? static_cast<uint64_t>(table.stamps[slot]) << SLOT_BITS : 0) + slot;
        }
        order[slot] = key;
    }
    bitonic_sort(order, count);
    for (int row = threadIdx.x; row < rows; row += blockDim.x) {
        const int rank = WANTED - states[row].*field;
        if (rank < 0) continue;
        const uint64_t key = rank < count ? order[rank] : IN_USE;
        states[row].*field = key == IN_USE ? NONE : static_cast<int>(key & ((1 << SLOT_BITS) - 1));
        if (key != IN_USE && key >> SLOT_BITS != 0) atomicAdd(evictions, 1);
    }
    __syncthreads();
}

// --- Phases of one row, in their order

// Rows that need the tokens of a slot go first, then those whose block has a slot. A reserved entry is none to a thread
// that still looks it up, as it was before: its slot had another key.
__device__ __forceinline__ void ask(const Row& state, int row, int rows, const SlotTable& tails, const SlotTable& sinks,
                                    int* tally) {
    if (state.length == 0) return;
    if (state.own >= 0) atomicMin(tails.owners + state.own, state.partial() ? row : rows + row);
    if (sinks.slots == 0) return;
    if (state.reads_sink()) {
        if (state.sink >= 0)
            atomicMin(sinks.owners + state.sink, rows);
        else
            atomicAdd(tally + SINK_MISSES, 1);
    } else if (state.fills_sink()) {
        if (state.sink >= 0)
            atomicMin(sinks.owners + state.sink, row);
        else
            atomicMin(sinks.slot_of_block + state.first, RESERVED + row);
    }
}

// Then rows that have filled a page and would like to keep their slot. They ask with numbers above all of the first
// round, so that they change no answer that another thread still has to read.
__device__ __forceinline__ void ask_again(Row& state, int row, int rows, const SlotTable& tails,
                                          const SlotTable& sinks) {
    if (state.length == 0) return;
    // An atomic that changes nothing: other threads ask at the same time
    if (state.own >= 0 && atomicMin(tails.owners + state.own, UNOWNED) == (state.partial() ? row : rows + row))
        state.tail = state.own;
    else if (state.previous >= 0)
        atomicMin(tails.owners + state.previous, 2 * rows + row);
    if (sinks.slots > 0 && state.fills_sink()) {
        if (state.sink >= 0)
            state.sink = sinks.owners[state.sink] == row ? state.sink : NONE;
        else
            state.sink = sinks.slot_of_block[state.first] == RESERVED + row ? WANTED : NONE;
    }
}

__device__ __forceinline__ void settle(Row& state, int row, int rows, const SlotTable& tails, int* tally) {
    if (state.length == 0) return;
    if (state.tail < 0 && state.previous >= 0 && tails.owners[state.previous] == 2 * rows + row)
        state.tail = state.previous;
    if (state.tail < 0) {
        state.tail = WANTED;
        atomicAdd(tally + TAIL_CLAIMS, 1);
        if (state.partial()) atomicAdd(tally + LOST_TAILS, 1);
    }
    if (!state.stays()) atomicAdd(tally + MOVED, 1);
    if (state.sink == WANTED) atomicAdd(tally + SINK_CLAIMS, 1);
    const int promoted = state.length / TOKENS_OF_PAGE - state.page();
    if (promoted > 0) atomicAdd(tally + PAGES_PROMOTED, promoted);
}

__device__ __forceinline__ int own_block(const Inputs& in, int row, const Row& state) {
    const int pages[] = {state.page()};
    int ids[1];
    in.load_blocks(row, pages, ids);
    return ids[0];
}

// The slot's key becomes the block of the last token. Where the step enters a new page, the old block stays as older
// key until the next step: drafted tokens may be rejected, and the row come back to it.
__device__ __forceinline__ void write_tail(const Row& state, int row, const Inputs& in, const SlotTable& tails,
                                           int64_t step) {
    if (state.length == 0) return;
    int key = state.last, older = NONE;
    if (!state.stays()) {
        // Of rows with the same last block, which only broken tables have, the lowest keeps it
        if (tails.slot_of_block[state.last] == RESERVED + row)
            tails.slot_of_block[state.last] = state.tail;
        else
            key = NONE;
        if (state.tail == state.own && state.partial() && state.last_page() == state.page() + 1)
            older = own_block(in, row, state);
    }
    tails.keys[state.tail] = key;
    tails.older_keys[state.tail] = older;
    tails.stamps[state.tail] = step;
}

__device__ __forceinline__ void write_sink(const Row& state, int row, const SlotTable& sinks, int64_t step,
                                           int* tally) {
    if (state.length == 0) return;
    int* const entry = sinks.slot_of_block + state.first;
    if (state.sink >= 0) {
        if (state.fills_sink()) {
            *entry = state.sink;
            sinks.keys[state.sink] = state.first;
        }
        sinks.stamps[state.sink] = step;
    } else if (state.fills_sink() && *entry == RESERVED + row) {
        *entry = NONE;
        atomicAdd(tally + SINK_REFUSALS, 1);
    }
}

__device__ __forceinline__ RowState row_state(const Row& state) {
    RowState result = {};
    result.length = state.length;
    result.before = state.before;
    result.tail_slot = state.tail;
    result.sink_slot = state.length > 0 && state.reads_sink() ? state.sink : NONE;
    result.promote_sink = state.length > 0 && state.fills_sink() ? state.sink : NONE;
    return result;
}

// --- The kernel

// lengths          int32 [rows], tokens at the end of the step; 0 for a padding row
// query_start      int32 [rows + 1], or null: query_tokens new tokens in every row
// block_table      int32 or (wide) int64 [rows, table_stride], of which table_width entries are there
// windows,granules int32 [kinds], kinds >= 1, of item_prefix
// item_prefix      int32 [kinds, prefix_stride]
// Shared memory: Row [rows], int [tail_slots + sink_slots], then the buffer of claim_slots
extern "C" __global__ void __launch_bounds__(1024)
    control(const int* lengths, const int* query_start, const void* block_table, const int* windows,
            const int* granules, int* tail_of_block, int* tail_keys, int* tail_older_keys, int64_t* tail_stamps,
            int* sink_of_block, int* sink_keys, int64_t* sink_stamps, int64_t* counters, RowState* row_states,
            int* item_prefix,
            int64_t table_stride, int table_width, int wide, int rows, int query_tokens, int num_blocks, int null_block,
            int tail_slots, int sink_slots, int sink_tokens, int kinds, int prefix_stride) {
    extern __shared__ __align__(16) uint8_t shared[];
    __shared__ int tally[TALLIES], kind_windows[MAX_KINDS], kind_granules[MAX_KINDS];
    Row* const states = reinterpret_cast<Row*>(shared);
    int* const owners = reinterpret_cast<int*>(states + rows);
    // To a multiple of 8 bytes
    int* const buffer = owners + (tail_slots + sink_slots + 1) / 2 * 2;
    const Inputs in = {lengths, query_start, block_table, table_stride, table_width, wide != 0,
                       rows, query_tokens, num_blocks, null_block};
    const SlotTable tails = {tail_of_block, tail_keys, tail_older_keys, tail_stamps, tail_slots, owners};
    const SlotTable sinks = {sink_of_block, sink_keys, nullptr, sink_stamps, sink_tokens > 0 ? sink_slots : 0,
                             owners + tail_slots};
    const int first = threadIdx.x, threads = blockDim.x;
    const int64_t step = counters[STEPS] + 1;  // slots that were never used have stamp 0

    for (int i = first; i < TALLIES; i += threads) tally[i] = 0;
    for (int i = first; i < tail_slots + sink_slots; i += threads) owners[i] = UNOWNED;
    __syncthreads();
    // By the last threads, which seldom have a row to wait for
    for (int i = threads - 1 - first; i < kinds; i += threads) {
        kind_windows[i] = windows[i];
        kind_granules[i] = granules[i];
    }
    for (int row = first; row < rows; row += threads) {
        states[row] = read_row(in, tails, sinks, row, tally);
        ask(states[row], row, rows, tails, sinks, tally);
    }
    __syncthreads();
    for (int row = first; row < rows; row += threads) ask_again(states[row], row, rows, tails, sinks);
    __syncthreads();
    for (int row = first; row < rows; row += threads) settle(states[row], row, rows, tails, tally);
    __syncthreads();
    if (tally[TAIL_CLAIMS] > 0) claim_slots(states, rows, &Row::tail, tails, buffer, tally + TAIL_EVICTIONS);
    if (tally[SINK_CLAIMS] > 0) claim_slots(states, rows, &Row::sink, sinks, buffer, tally + SINK_EVICTIONS);

    if (tally[MOVED] > 0) {
        for (int row = first; row < rows; row += threads)
            if (states[row].length > 0 && !states[row].stays())
                atomicMin(tail_of_block + states[row].last, RESERVED + row);
        __syncthreads();
    }
    for (int row = first; row < rows; row += threads) {
        write_tail(states[row], row, in, tails, step);
        if (sinks.slots > 0) write_sink(states[row], row, sinks, step, tally);
        row_states[row] = row_state(states[row]);
    }
    // From here on a thread reads what it has written itself, and sums
    for (int kind = 0; kind < kinds; ++kind) {
        for (int row = first; row < rows; row += threads)
            buffer[row] = items_of_row(row_state(states[row]), kind_windows[kind], sink_tokens, kind_granules[kind]);
        const int* sums = prefix_sums(buffer, buffer + rows, rows);
        int* const prefix = item_prefix + static_cast<int64_t>(kind) * prefix_stride;
        for (int row = first; row < rows; row += threads) prefix[row + 1] = sums[row];
        if (first == 0) prefix[0] = 0;
    }
    for (int i = first; i < COUNTERS; i += threads) {
        const int added = i == STEPS ? 1 : i == SINK_CLAIMS ? tally[i] - tally[SINK_REFUSALS] : tally[i];
        // An atomic addition does not wait for the old value
        if (added != 0) atomicAdd(reinterpret_cast<uint64_t*>(counters + i), static_cast<uint64_t>(added));
    }
}
