// Tokens to packed pages, in place: `store_chunk` after a (chunked) prefill of one layer, `promote_pages` at the end of
// a decode step for all layers. A CTA turns one page of one KV head, gathered token by token, into its packed bytes.
//
// Compiled with BD_BF16 (model dtype), BD_KEY_SEARCH (scale search for keys, or the standard rule), BD_ROTATE,
// BD_CENTERED (keys less their page's mean), BD_LDLQ and BD_SHARED_BYTES.
#include "ptx.cuh"

#include "quantize_keys.cuh"
#include "quantize_ldlq.cuh"
#include "quantize_values.cuh"
#include "schedule.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr bool LDLQ = BD_LDLQ;
constexpr int ROW_UNITS = HEAD_DIM / 8;  // 16-byte units of a token's row
constexpr int USED_BYTES = BD_VALUE_SCALES + PAGE_TOKENS * HEAD_DIM / BLOCK_SIZE;

static_assert(SPLIT * LDLQ_TOKENS == THREADS, "quantize_keys_ldlq is written for 256 threads");

// --- Shared memory

// The page's bytes from IMAGE_START on are put together in shared memory. LDLQ writes keys on its own, and its values
// come first, in the place of the keys.
constexpr int IMAGE_START = LDLQ ? BD_VALUE_CODES : 0;
constexpr int IMAGE_BYTES = USED_BYTES - IMAGE_START;
constexpr int PARTIAL_BYTES = BD_CENTERED ? THREADS / OCTETS * HEAD_DIM * 4 : 0;
constexpr int ROWS_BYTES = LDLQ ? ROWS_FLOATS * 4 : 0;
constexpr int FACTOR_BYTES = LDLQ ? FACTOR_BUFFERS * FACTOR_FLOATS * 4 : 0;
constexpr int POINTER_BYTES = PAGE_TOKENS * 8;

__device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int SHARED_VALUE_ROWS = larger(IMAGE_BYTES, larger(PARTIAL_BYTES, ROWS_BYTES));  // factors take their place
constexpr int SHARED_KEY_ROWS = SHARED_VALUE_ROWS + larger(POINTER_BYTES, FACTOR_BYTES);
constexpr int SHARED_KEY_MEAN = SHARED_KEY_ROWS + POINTER_BYTES;
constexpr int SHARED_PAGE_MEAN = SHARED_KEY_MEAN + 4 * HEAD_DIM;
constexpr int SHARED_BYTES = SHARED_PAGE_MEAN + (BD_CENTERED ? 4 * HEAD_DIM : 0);
static_assert(SHARED_BYTES == BD_SHARED_BYTES, "bitdecoding.kernels.quantize counts shared memory differently");
static_assert(SHARED_VALUE_ROWS % 16 == 0 && SHARED_KEY_ROWS % 16 == 0, "alignment");

struct Space {
    uint8_t* base;
    __device__ __forceinline__ uint8_t* image() const { return base - IMAGE_START; }
    __device__ __forceinline__ float* floats(int offset) const { return reinterpret_cast<float*>(base + offset); }
    // Rows of the page's 128 tokens
    __device__ __forceinline__ const uint16_t** rows(int values) const {
        return reinterpret_cast<const uint16_t**>(base + (values ? SHARED_VALUE_ROWS : SHARED_KEY_ROWS));
    }
};

// --- One layer, one page

// Its addresses: parameters of the launch, or an entry of a table of layers, read where they are needed, because
// registers are scarce in between.
struct LayerArguments {
    uint8_t* pages_;
    uint16_t *means_, *tail_, *sink_;
    const float *key_mean_, *c_, *d_;  // LDLQ factors C and D
    int64_t page_stride_;              // bytes from block to block
    __device__ __forceinline__ uint8_t* pages() const { return pages_; }
    __device__ __forceinline__ uint16_t* means() const { return means_; }
    __device__ __forceinline__ uint16_t* tail() const { return tail_; }
    __device__ __forceinline__ uint16_t* sink() const { return sink_; }
    __device__ __forceinline__ const float* key_mean() const { return key_mean_; }
    __device__ __forceinline__ const float* c() const { return c_; }
    __device__ __forceinline__ const float* d() const { return d_; }
    __device__ __forceinline__ int64_t page_stride() const { return page_stride_; }
};

struct LayerEntry {
    const int64_t* words;
    template <typename T>
    __device__ __forceinline__ T* address(int i) const {
        return reinterpret_cast<T*>(load_global_word(words + i));
    }
    __device__ __forceinline__ uint8_t* pages() const { return address<uint8_t>(0); }
    __device__ __forceinline__ uint16_t* means() const { return address<uint16_t>(1); }
    __device__ __forceinline__ uint16_t* tail() const { return address<uint16_t>(2); }
    __device__ __forceinline__ uint16_t* sink() const { return address<uint16_t>(3); }
    __device__ __forceinline__ const float* key_mean() const { return address<const float>(4); }
    __device__ __forceinline__ const float* c() const { return address<const float>(5); }
    __device__ __forceinline__ const float* d() const { return address<const float>(6); }
    __device__ __forceinline__ int64_t page_stride() const { return load_global_word(words + 7); }
};

struct Table {
    const void* blocks;
    int64_t stride;
    int is_64;
    __device__ __forceinline__ int block(int row, int page) const {
        const int64_t index = row * stride + page;
        return is_64 ? static_cast<int>(static_cast<const int64_t*>(blocks)[index]) : static_cast<const int*>(blocks)[index];
    }
};

__device__ __forceinline__ uint16_t* tail_token(uint16_t* tail, int slot, int heads, int head, int position, int values) {
    return tail +
           (((static_cast<int64_t>(slot) * 2 + values) * heads + head) * TAIL_TOKENS + position % TAIL_TOKENS) * HEAD_DIM;
}

__device__ __forceinline__ void copy_row_unit(uint16_t* target, const uint16_t* source, int unit) {
    reinterpret_cast<Words4*>(target)[unit] = reinterpret_cast<const Words4*>(source)[unit];
}

// Copies the first tokens of page 0, as they are, to a slot of the sink.
__device__ __forceinline__ void fill_sink(uint16_t* sink, const Space& space, int slot, int sink_tokens, int heads,
                                          int head) {
#pragma unroll 1
    for (int i = thread_index_again(); i < 2 * sink_tokens * ROW_UNITS; i += THREADS) {
        const int unit = i % ROW_UNITS, token = i / ROW_UNITS % sink_tokens, values = i / ROW_UNITS / sink_tokens;
        uint16_t* target =
            sink + (((static_cast<int64_t>(slot) * 2 + values) * heads + head) * sink_tokens + token) * HEAD_DIM;
        copy_row_unit(target, space.rows(values)[token], unit);
    }
}

// Writes the page's bytes from IMAGE_START on; zeros for padding.
__device__ __forceinline__ void write_image(const Space& space, uint8_t* page) {
    constexpr int VALUE_UNITS = BD_VALUE_CODES / 16, VALUE_UNITS_END = BD_VALUE_SCALES / 16;
#pragma unroll 1
    for (int unit = IMAGE_START / 16 + thread_index_again(); unit < PAGE_BYTES / 16; unit += THREADS) {
        Words4 words = {};
        const bool is_value_code = unit >= VALUE_UNITS && unit < VALUE_UNITS_END;
        const int place = is_value_code ? VALUE_UNITS + image_unit(unit - VALUE_UNITS) : unit;
        if (unit < USED_BYTES / 16) words = *reinterpret_cast<const Words4*>(space.image() + 16 * place);
        reinterpret_cast<Words4*>(page)[unit] = words;
    }
}

// Quantizes one page, whose rows are in shared memory. All threads of the CTA, and a barrier before and after.
template <typename Layer>
__device__ __forceinline__ void quantize_page(const Layer& layer, const Space& space, int block, int heads, int head,
                                              int skipped) {
    const int thread = thread_index_again(), warp = thread / 32, lane = thread % 32;
    float *key_mean = space.floats(SHARED_KEY_MEAN), *page_mean = space.floats(SHARED_PAGE_MEAN);
    if (threadIdx.x < HEAD_DIM) {
        const float* source = layer.key_mean();
        key_mean[threadIdx.x] = source == nullptr ? 0.f : source[head * HEAD_DIM + threadIdx.x];
    }
    __syncthreads();
    if (BD_CENTERED)
        page_mean_of<THREADS>(space.rows(0), key_mean, skipped, space.floats(0), page_mean,
                              layer.means() + (static_cast<int64_t>(block) * heads + head) * HEAD_DIM);
    if (!LDLQ) {
#pragma unroll 1
        for (int tile = warp; tile < 2 * KEY_TILES; tile += WARPS)
            quantize_key_tile(tile / KEY_TILES, tile % KEY_TILES, space.rows(0), key_mean, page_mean, space.image(), lane);
    }
#pragma unroll 1
    for (int strip = warp; strip < STRIPS; strip += WARPS)
        quantize_value_strip(strip, space.rows(1), space.image(), lane);
    __syncthreads();
    uint8_t* page = layer.pages() + block * layer.page_stride() + static_cast<int64_t>(head) * PAGE_BYTES;
    write_image(space, page);
    if (LDLQ) {
        const float* c = layer.c() + static_cast<int64_t>(head) * HEAD_DIM * HEAD_DIM;
#pragma unroll 1
        for (int start = 0; start < PAGE_TOKENS; start += LDLQ_TOKENS) {
            __syncthreads();
            stage_keys(space.rows(0), start, key_mean, page_mean, space.floats(0));
            quantize_keys_ldlq(space.floats(0), space.floats(SHARED_VALUE_ROWS), c, layer.d() + head * HEAD_DIM, start,
                               page);
        }
    }
    __syncthreads();
}

// Tokens at the start of a page that its mean leaves out.
__device__ __forceinline__ int skipped_tokens(int page, int sink_tokens) {
    return page == 0 && sink_tokens < PAGE_TOKENS ? sink_tokens : 0;
}

// --- Kernels

struct Strided {
    int64_t token, head;  // elements
};

// New tokens of many rows: pages that become full are quantized, the tokens behind them go to the tail ring. Grid: pages
// a row can touch (x), KV heads (y), rows (z).
//
// new_keys, new_values  16-bit [tokens, heads, HEAD_DIM] of all rows
// query_start           int32 [rows + 1], where the new tokens of each row start
extern "C" __global__ void __launch_bounds__(THREADS, BD_CTAS)
    store_chunk(const uint16_t* new_keys, const uint16_t* new_values, const int* query_start, const RowState* rows,
                const void* table, uint8_t* pages, uint16_t* means, uint16_t* tail, uint16_t* sink, const float* key_mean,
                const float* c, const float* d, int64_t key_token, int64_t key_head, int64_t value_token,
                int64_t value_head, int64_t page_stride, int64_t table_stride, int table_is_64, int sink_tokens) {
    extern __shared__ __align__(16) uint8_t shared[];
    const Space space{shared};
    const int head = blockIdx.y, heads = gridDim.y, row = blockIdx.z;
    const auto new_token = [&](const RowState& state, int position, int values) {
        const int64_t token = query_start[row + 1] - (state.length - position);
        return values ? new_values + token * value_token + head * value_head
                      : new_keys + token * key_token + head * key_head;
    };
    {
        const RowState state = rows[row];
        const int page = state.before / PAGE_TOKENS + blockIdx.x, start = page * PAGE_TOKENS;
        if (page < state.length / PAGE_TOKENS) {
            const int position = start + threadIdx.x % PAGE_TOKENS, values = threadIdx.x / PAGE_TOKENS;
            space.rows(values)[position - start] =
                position < state.before ? tail_token(tail, state.tail_slot, heads, head, position, values)
                                        : new_token(state, position, values);
            __syncthreads();
            if (page == 0 && state.promote_sink >= 0) fill_sink(sink, space, state.promote_sink, sink_tokens, heads, head);
            const LayerArguments layer{pages, means, tail, sink, key_mean, c, d, page_stride};
            quantize_page(layer, space, Table{table, table_stride, table_is_64}.block(row, page), heads, head,
                          skipped_tokens(page, sink_tokens));
        }
    }
    // The first page's CTA alone reads the ring, so it is the one to write to it, and now
    if (blockIdx.x > 0) return;
    const RowState state = rows[row];
    const int start = max(state.before, state.length / PAGE_TOKENS * PAGE_TOKENS);
    for (int i = threadIdx.x; i < 2 * (state.length - start) * ROW_UNITS; i += THREADS) {
        const int values = i / ROW_UNITS % 2, position = start + i / ROW_UNITS / 2;
        copy_row_unit(tail_token(tail, state.tail_slot, heads, head, position, values), new_token(state, position, values),
                      i % ROW_UNITS);
    }
}

// Pages that became full in a decode step, from the tail ring, in all layers. Grid: KV heads (x), layers (y), some CTAs
// (z) that share the rows.
//
// layers  int64 [layers, 8]: pages, means, tail, sink, key mean, LDLQ C and D (addresses, 0: none), page stride
extern "C" __global__ void __launch_bounds__(THREADS, BD_CTAS)
    promote_pages(const RowState* rows, const void* table, const int64_t* layers, int64_t table_stride, int num_rows,
                  int table_is_64, int sink_tokens) {
    extern __shared__ __align__(16) uint8_t shared[];
    const Space space{shared};
    const int head = blockIdx.x, heads = gridDim.x;
    const LayerEntry layer{layers + 8 * blockIdx.y};
#pragma unroll 1
    for (int row = blockIdx.z; row < num_rows; row += gridDim.z) {
        const RowState state = rows[row];
        const int page = state.before / PAGE_TOKENS;
        if (page >= state.length / PAGE_TOKENS) continue;
        const int token = threadIdx.x % PAGE_TOKENS, values = threadIdx.x / PAGE_TOKENS;
        space.rows(values)[token] =
            tail_token(layer.tail(), state.tail_slot, heads, head, page * PAGE_TOKENS + token, values);
        __syncthreads();
        if (page == 0 && state.promote_sink >= 0)
            fill_sink(layer.sink(), space, state.promote_sink, sink_tokens, heads, head);
        quantize_page(layer, space, Table{table, table_stride, table_is_64}.block(row, page), heads, head,
                      skipped_tokens(page, sink_tokens));
    }
}
