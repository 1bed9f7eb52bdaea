// One decode step of one layer: attention of 1 to 8 new tokens a row over FP4 pages, 16-bit sink and 16-bit recent
// tokens, with the query's rotation, the append of the new tokens and the join of split rows in the same launch.
//
// A CTA has a loader warp, which brings units (an FP4 page, or 32 16-bit tokens) into a ring of slots by bulk copies,
// and pairs of consumer warps, each pair working on one unit at a time, each warp on half of it with its own running
// maximum. Warps meet at the end of a segment only. See decode_work.cuh for who does what.
#include "ptx.cuh"

#include "decode_chunk.cuh"
#include "decode_config.cuh"
#include "decode_page.cuh"
#include "decode_query.cuh"
#include "decode_softmax.cuh"
#include "decode_work.cuh"

static_assert(SHARED_BYTES == BD_SHARED_BYTES, "bitdecoding.kernels.decode counts shared memory differently");

constexpr uint32_t CONSUMERS_BARRIER = 1;

// A 16-bit tensor [rows, tokens, heads, HEAD_DIM], strides in elements; the last dim is contiguous.
struct Strided {
    int64_t row, token, head;
};

struct Parameters {
    const uint8_t* pages;
    const uint16_t* means;
    uint16_t* tail;
    const uint16_t* sink;
    const uint16_t* query;
    const uint16_t* new_keys;
    const uint16_t* new_values;
    uint16_t* output;
    float* lse;
    const float* key_mean;
    const RowState* rows;
    const int* item_prefix;
    const void* table;
    float* partial_output;  // [parts, COLUMNS, HEAD_DIM]
    float* partial_stats;   // [parts, COLUMNS, 2]: maximum, sum
    int* arrived;           // [tiles], zero between launches
    Strided query_stride, key_stride, value_stride, output_stride;
    int64_t page_stride;  // bytes from block to block
    int64_t table_stride;
    int num_rows, num_tokens, heads, group, column_groups;
    int table_is_64, window, sink_tokens, granule;
    float score_scale, score_cap;  // base 2
    float cap_inverse;
    float fold, tau;               // native: log2 c and the threshold of the probability scale

    __device__ __forceinline__ int64_t block(int row, int page) const {
        const int64_t index = row * table_stride + page;
        return table_is_64 ? static_cast<const int64_t*>(table)[index] : static_cast<const int*>(table)[index];
    }
};

// What units are, by their index in the row.
enum class Unit { page, sink, recent };

__device__ __forceinline__ Unit kind_of(const RowUnits& units, int unit) {
    return unit < units.pages ? Unit::page : unit < units.pages + units.sink_chunks ? Unit::sink : Unit::recent;
}

// First token of a 16-bit chunk.
__device__ __forceinline__ int chunk_start(const RowUnits& units, int unit) {
    const int chunk = unit - units.pages;
    return chunk < units.sink_chunks ? chunk * CHUNK_TOKENS
                                     : units.recent_start + (chunk - units.sink_chunks) * CHUNK_TOKENS;
}

// The query row in an output column: its token among the step's and its head in the group. token < 0: a column without
// one.
struct Column {
    int token, head;

    __device__ __forceinline__ Column(const Parameters& p, const Segment& segment, int column) {
        const int row = segment.column_group * COLUMNS + column / COLUMN_STEP;
        const bool used = column % COLUMN_STEP == 0 && row < p.num_tokens * p.group;
        token = used ? row / p.group : -1;
        head = used ? row % p.group : 0;
    }
    __device__ __forceinline__ int64_t offset(const Parameters& p, const Segment& segment, const Strided& stride) const {
        return segment.row * stride.row + token * stride.token +
               static_cast<int64_t>(segment.head * p.group + head) * stride.head;
    }
    // Its query, or null for a column without one and for a token in front of a row that is shorter than the step, of
    // which nothing is read.
    __device__ __forceinline__ const uint16_t* query(const Parameters& p, const Task& task) const {
        if (token < 0 || position(p, task) < 0) return nullptr;
        return p.query + offset(p, task.segment, p.query_stride);
    }
    __device__ __forceinline__ int position(const Parameters& p, const Task& task) const {
        return task.state.length - p.num_tokens + token;
    }
};

// --- Loader

struct Ring {
    int unit = 0;  // units so far
    __device__ __forceinline__ int slot() const { return unit % SLOTS; }
    __device__ __forceinline__ uint32_t parity() const { return (unit / SLOTS) & 1; }
};

// The slot of the ring's next unit, when its consumers have let it go.
__device__ __forceinline__ int wait_for_slot(const Ring& ring, Scalars& scalars) {
    const int slot = ring.slot();
    if (ring.unit >= SLOTS) mbarrier_wait(shared_address(&scalars.empty[slot]), ring.parity() ^ 1);
    return slot;
}

// Where a recent token lies: among the step's new ones or in the tail ring. values: 0 keys, 1 values.
__device__ __forceinline__ const uint16_t* recent_token(const Parameters& p, const RowState& state, int row, int head,
                                                        int position, int values) {
    if (position >= state.before) {
        const int token = position - (state.length - p.num_tokens);
        const Strided& stride = values ? p.value_stride : p.key_stride;
        return (values ? p.new_values : p.new_keys) + row * stride.row + token * stride.token + head * stride.head;
    }
    return p.tail +
           (((static_cast<int64_t>(state.tail_slot) * 2 + values) * p.heads + head) * TAIL_TOKENS + position % TAIL_TOKENS) *
               HEAD_DIM;
}

__device__ __forceinline__ void load_chunk(const Parameters& p, const Segment& segment, const RowState& state, Unit kind,
                                           int start, uint32_t target, uint32_t barrier, uint64_t policy, int lane) {
    const int stop = kind == Unit::sink ? p.sink_tokens : state.length;
    // The last chunk is filled up with a token of its own: what lies there must be finite where the token is
    const int position = min(start + lane, stop - 1);
    const uint16_t* source[2];
#pragma unroll
    for (int values = 0; values < 2; ++values)
        source[values] = kind == Unit::sink
                             ? p.sink + (((static_cast<int64_t>(state.sink_slot) * 2 + values) * p.heads + segment.head) *
                                             p.sink_tokens +
                                         position) *
                                            HEAD_DIM
                             : recent_token(p, state, segment.row, segment.head, position, values);
    if (lane == 0) mbarrier_arrive_expect(barrier, 2 * CHUNK_TOKENS * ROW_BYTES);
    __syncwarp();
    bulk_copy(target + lane * ROW_PITCH, source[0], ROW_BYTES, barrier, policy);
    bulk_copy(target + CHUNK_VALUES + lane * ROW_PITCH, source[1], ROW_BYTES, barrier, policy);
    if (kind == Unit::recent && segment.column_group == 0) {
        // Append the new tokens of this chunk; nobody reads these places of the ring in this step
        constexpr int UNITS = ROW_BYTES / 16;
        for (int token = max(start, state.before); token < min(start + CHUNK_TOKENS, stop); ++token)
            for (int i = lane; i < 2 * UNITS; i += 32) {
                const int values = i / UNITS;
                const int64_t place = ((static_cast<int64_t>(state.tail_slot) * 2 + values) * p.heads + segment.head) *
                                          TAIL_TOKENS +
                                      token % TAIL_TOKENS;
                reinterpret_cast<Words4*>(p.tail + place * HEAD_DIM)[i % UNITS] = reinterpret_cast<const Words4*>(
                    recent_token(p, state, segment.row, segment.head, token, values))[i % UNITS];
            }
    }
}

// Base-2 scores of page means: BF16 products of the rotated query with the mean, which a page's keys lack. The loader
// has the time for it.
struct MeanScores {
    uint32_t query[8 * TILES][LANE_CHANNELS / 2];  // BF16 pairs of the lane's channels
    uint32_t mean[LANE_CHANNELS / 2];              // of the page loaded last
    int slot;                                      // where it lies, or -1

    __device__ __forceinline__ void start_segment(const Parameters& p, const Task& task, int lane) {
#pragma unroll
        for (int column = 0; column < 8 * TILES; column += COLUMN_STEP) {
            const uint16_t* row = Column(p, task.segment, column).query(p, task);
            float x[LANE_CHANNELS] = {};
            if (row != nullptr) {
                load_row(row, lane, x);
                if (BD_ROTATE) warp_hadamard<HEAD_DIM>(x, lane);
            }
#pragma unroll
            for (int i = 0; i < LANE_CHANNELS / 2; ++i) query[column][i] = f32x2_to_bf16x2(x[2 * i], x[2 * i + 1]);
        }
    }

    __device__ __forceinline__ void load(const uint16_t* page_mean, int of_slot, int lane) {
        slot = of_slot;
#pragma unroll
        for (int i = 0; i < LANE_CHANNELS / 2; ++i)
            mean[i] = reinterpret_cast<const uint32_t*>(page_mean)[lane * (LANE_CHANNELS / 2) + i];
    }

    // Scores of the page loaded last, and the arrival that its slot still waits for.
    __device__ __forceinline__ void finish(const Parameters& p, Scalars& scalars, int lane) {
        if (slot < 0) return;
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            float sum[8] = {};
#pragma unroll
            for (int column = 0; column < 8; column += COLUMN_STEP)
#pragma unroll
                for (int i = 0; i < LANE_CHANNELS / 2; ++i) {
                    const uint32_t q = query[8 * n + column][i];
                    sum[column] = fmaf(bits_to_f32(q << 16), bits_to_f32(mean[i] << 16), sum[column]);
                    sum[column] = fmaf(bits_to_f32(q & 0xFFFF0000u), bits_to_f32(mean[i] & 0xFFFF0000u), sum[column]);
                }
            // Sums over the warp: in each of three exchanges a lane gives away half of its columns
#pragma unroll
            for (int d = 4; d > 0; d /= 2)
#pragma unroll
                for (int k = 0; k < d; ++k) {
                    const bool upper = lane & (4 * d);
                    const float mine = upper ? sum[k + d] : sum[k], other = upper ? sum[k] : sum[k + d];
                    sum[k] = mine + __shfl_xor_sync(0xFFFFFFFFu, other, 4 * d);
                }
            sum[0] += __shfl_xor_sync(0xFFFFFFFFu, sum[0], 2);
            sum[0] += __shfl_xor_sync(0xFFFFFFFFu, sum[0], 1);
            if (lane % 4 == 0) scalars.mean[slot][8 * n + lane / 4] = sum[0] * p.score_scale;
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(shared_address(&scalars.full[slot]));
        slot = -1;
    }
};

// Arrivals that fill a slot: of the copy, and with page-centred keys of the mean's scores.
constexpr int FULL_ARRIVALS = CENTERED ? 2 : 1;

__device__ __forceinline__ void run_loader(const Parameters& p, uint32_t slots, Scalars& scalars, int lane) {
    Work work(p.item_prefix, p.rows, p.num_rows, p.heads, p.column_groups, p.granule);
    const uint64_t policy = evict_first_policy();
    Ring ring;
    MeanScores means;
    means.slot = -1;
    for (int count = 0;; ++count) {
        const int place = count % 2;
        if (count >= 2) mbarrier_wait(shared_address(&scalars.task_empty[place]), (count / 2 - 1) & 1);
        bool more;
        {
            Task next;
            more = work.next(p.window, p.sink_tokens, next);
            if (!more) next.segment.row = -1;
            if (lane == 0) scalars.tasks[place] = next;
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(shared_address(&scalars.task_full[place]));
        if (!more) return;
        const Task& task = scalars.tasks[place];  // here as for the consumers, registers are dearer than loads
        const RowState& state = task.state;
        const RowUnits& units = task.units;
        const Segment& segment = task.segment;
        int blocks = 0;  // of 32 pages, one a lane
        for (int unit = segment.unit_begin; unit < segment.unit_end; ++unit, ++ring.unit) {
            const Unit kind = kind_of(units, unit);
            const int ahead = (unit - segment.unit_begin) % 32;
            if (kind == Unit::page && ahead == 0 && unit + lane < min(units.pages, segment.unit_end))
                blocks = static_cast<int>(p.block(segment.row, units.first_page + unit + lane));
            const int slot = wait_for_slot(ring, scalars);
            const uint32_t full = shared_address(&scalars.full[slot]), target = slots + slot * SLOT_BYTES;
            if (kind == Unit::page) {
                const int64_t block = __shfl_sync(0xFFFFFFFFu, blocks, ahead);
                if (lane == 0) {
                    mbarrier_arrive_expect(full, KV_BLOCKS_BYTES);
                    bulk_copy(target, p.pages + block * p.page_stride + static_cast<int64_t>(segment.head) * PAGE_BYTES,
                              KV_BLOCKS_BYTES, full, policy);
                }
                if (CENTERED) {
                    if (unit == segment.unit_begin) means.start_segment(p, task, lane);
                    means.finish(p, scalars, lane);  // of the page before, whose mean has come by now
                    means.load(p.means + (block * p.heads + segment.head) * HEAD_DIM, slot, lane);
                }
            } else {
                load_chunk(p, segment, state, kind, chunk_start(units, unit), target, full, policy, lane);
                if (CENTERED && lane == 0) mbarrier_arrive(full);
                if (CENTERED) means.finish(p, scalars, lane);
            }
            __syncwarp();
        }
        if (CENTERED) means.finish(p, scalars, lane);
        if (lane == 0) work.number_parts(scalars.tasks[place].segment);  // before the consumers get their scratch
        for (int i = 0; i < SCRATCH_UNITS; ++i, ++ring.unit) {
            const int slot = wait_for_slot(ring, scalars);
            if (lane < FULL_ARRIVALS) mbarrier_arrive(shared_address(&scalars.full[slot]));
        }
    }
}

// --- Consumers

__device__ __forceinline__ float capped(const Parameters& p, float score) {
    // cap · tanh(score / cap), both in base 2
    const float x = exp2_fast(score * p.cap_inverse * 2.8853900817779268f);
    return p.score_cap - 2.f * p.score_cap * reciprocal_fast(x + 1.f);
}

// Turns scores into capped ones.
template <int ROW_TILES>
__device__ __forceinline__ void cap_scores(const Parameters& p, Scores<ROW_TILES>& s) {
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int e = 0; e < 2 / COLUMN_STEP; ++e) {
#pragma unroll
            for (int i = 0; i < ROW_TILES; ++i)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    float& x = s.product[i][n][2 * r + e];
                    x = capped(p, fmaf(x, s.scale[n][e], s.offset[n][e]));
                }
            s.scale[n][e] = 1.f;
            s.offset[n][e] = 0.f;
        }
}

// Scores of half a page.
__device__ __forceinline__ void page_scores(const Parameters& p, const uint8_t* shared, const Scalars& scalars, int slot,
                                            int half, int lane, Scores<KEY_TILES>& s) {
    const int t = lane % 4;
    float c[KEY_TILES / IN_TURNS][IN_TURNS][QUERY_TILES][4] = {};
    key_products(shared + slot * SLOT_BYTES, shared + SHARED_QUERY, half, lane, c);
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            s.scale[n][e] = 1.f;
            s.offset[n][e] = 0.f;
            if (COLUMN_STEP == 2 && e == 1) continue;
            const int q = NATIVE && COLUMN_STEP == 1 ? 2 * n + e : n;  // column tile of the first product
            float offset = CENTERED ? scalars.mean[slot][8 * n + 2 * t + e] : 0.f;
            if (CAPPED) offset += scalars.shift[8 * n + 2 * t + e];
            const float scale = scalars.query_scale[8 * q + 2 * t + (NATIVE ? 0 : e)];
            const float scale2 = NATIVE ? scalars.query_scale[8 * q + 2 * t + 1] : 0.f;
#pragma unroll
            for (int i = 0; i < KEY_TILES; ++i)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const float(&x)[4] = c[i / IN_TURNS][i % IN_TURNS][q];
                    s.product[i][n][2 * r + e] =
                        NATIVE ? fmaf(x[2 * r], scale, fmaf(x[2 * r + 1], scale2, offset)) : x[2 * r + e];
                }
            if (!NATIVE) {
                s.scale[n][e] = scale;
                s.offset[n][e] = offset;
            }
        }
    if (CAPPED) cap_scores(p, s);
}

// Takes away what a column does not see of a page: 16-bit sink tokens, and tokens before its window.
__device__ __forceinline__ void mask_page(const Parameters& p, const Task& task, const Scalars& scalars, int unit, int half,
                                          int lane, Scores<KEY_TILES>& s) {
    const int g = lane / 4, t = lane % 4;
    const int start = (task.units.first_page + unit) * PAGE_TOKENS + half * HALF_TOKENS;
    asm volatile("");  // keeps this a branch: few pages need it, selects would run for all
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int e = 0; e < 2 / COLUMN_STEP; ++e) {
            int low = task.units.sink_chunks > 0 ? p.sink_tokens : 0;
            if (p.window > 0) low = max(low, scalars.position[8 * n + 2 * t + e] - p.window + 1);
#pragma unroll
            for (int i = 0; i < KEY_TILES; ++i)
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    if (start + key_row_token(i, 8 * r + g) < low) s.product[i][n][2 * r + e] = NO_SCORE;
        }
}

// Units before this one are pages of which not every column sees everything.
__device__ __forceinline__ int masked_pages(const Parameters& p, const Task& task) {
    const int sink = task.units.sink_chunks > 0 ? p.sink_tokens : 0;
    const int unseen = max(sink, p.window > 0 ? task.state.length - p.window : 0);
    return (unseen + PAGE_TOKENS - 1) / PAGE_TOKENS - task.units.first_page;
}

__device__ __forceinline__ void attend_page(const Parameters& p, const Task& task, int unit, bool masked, int slot,
                                            const uint8_t* shared, const Scalars& scalars, int half, int lane,
                                            Softmax& softmax) {
    Scores<KEY_TILES> s;
    page_scores(p, shared, scalars, slot, half, lane, s);
    if (masked) mask_page(p, task, scalars, unit, half, lane, s);
    uint32_t probabilities[TILES][KEY_TILES][2];
    if (NATIVE)
        page_probabilities_native(softmax, s, p.fold, p.tau, probabilities);
    else
        page_probabilities_w16(softmax, s, probabilities);
    value_products(shared + slot * SLOT_BYTES, half, lane, probabilities, softmax.output);
}

// The raw query rows of a lane's columns 8n + g.
struct RawQuery {
    const uint16_t* row[TILES];

    __device__ __forceinline__ RawQuery(const Parameters& p, const Task& task, int lane) {
#pragma unroll
        for (int n = 0; n < TILES; ++n) row[n] = Column(p, task.segment, 8 * n + lane / 4).query(p, task);
    }
};

__device__ __forceinline__ void attend_chunk(const Parameters& p, const Task& task, const RawQuery& raw, int unit,
                                             const uint8_t* chunk, const Scalars& scalars, int half, int lane,
                                             Softmax& softmax) {
    const int g = lane / 4, t = lane % 4;
    const int start = chunk_start(task.units, unit);
    const int stop = kind_of(task.units, unit) == Unit::sink ? p.sink_tokens : task.state.length;
    Scores<1> s = {};
    chunk_products(chunk, raw.row, half, lane, s.product[0]);
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            s.scale[n][e] = p.score_scale;
            // Raw keys give true logits; without a cap, all logits of a query are those of keys less their mean
            s.offset[n][e] = CAPPED ? 0.f : -scalars.shift[8 * n + 2 * t + e];
        }
    if (CAPPED) cap_scores(p, s);
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int position = scalars.position[8 * n + 2 * t + e], low = p.window > 0 ? position - p.window + 1 : 0;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int token = start + 16 * half + 8 * r + g;
                if (token >= stop || token > position || token < low) s.product[0][n][2 * r + e] = NO_SCORE;
            }
        }
    chunk_accumulate(softmax, s, chunk, half, lane);
}

// Maximum and sum of a column over the CTA's warps.
__device__ __forceinline__ void merged_stats(const Scalars& scalars, int column, float& maximum, float& sum) {
    maximum = NO_SCORE;
    sum = 0.f;
#pragma unroll
    for (int w = 0; w < CONSUMER_WARPS; ++w) maximum = fmaxf(maximum, scalars.maximum[w][column]);
#pragma unroll
    for (int w = 0; w < CONSUMER_WARPS; ++w)
        sum = fmaf(scalars.sum[w][column], weight(scalars.maximum[w][column], maximum), sum);
}

// Four channels of one query row's final output, and its log-sum-exp. sum carries 2^CHUNK_FOLD, as x does.
__device__ __forceinline__ void write_output(const Parameters& p, const Segment& segment, const Scalars& scalars,
                                             const Column& column, int output_column, int channel, const float (&x)[4],
                                             float maximum, float sum) {
    const float inverse = sum > 0.f ? 1.f / sum : sum == 0.f ? 0.f : sum;  // NaN stays
    uint32_t* target =
        reinterpret_cast<uint32_t*>(p.output + column.offset(p, segment, p.output_stride) + channel);
    target[0] = model_pair(x[0] * inverse, x[1] * inverse);
    target[1] = model_pair(x[2] * inverse, x[3] * inverse);
    if (p.lse != nullptr && channel == 0) {
        const float shift = CAPPED ? 0.f : scalars.shift[output_column];
        const int64_t row = (static_cast<int64_t>(segment.row) * p.num_tokens + column.token) * (p.heads * p.group) +
                            segment.head * p.group + column.head;
        const float lse = sum == 0.f ? NO_SCORE : maximum + log2f(sum) - CHUNK_FOLD + shift;
        p.lse[row] = lse * 0.69314718055994531f;
    }
}

constexpr int CHANNEL_QUADS = HEAD_DIM / 4;

// Joins all parts of a tile, always in the same order. The lanes that share a column load its maxima and sums once, one
// part a lane; each lane then adds up four channels.
__device__ __forceinline__ void combine_parts(const Parameters& p, const Segment& segment, const Scalars& scalars,
                                              int thread) {
    constexpr int LANES = CHANNEL_QUADS < 32 ? CHANNEL_QUADS : 32;  // of one column
    // Loads in flight, as many as the registers allow
    constexpr int AT_ONCE = TILES > 1 || !BD_NVFP4 ? 8 : 16;
    static_assert(LANES % AT_ONCE == 0, "parts at once");
    const int lane = thread % LANES;
    const uint32_t together = LANES == 32 ? 0xFFFFFFFFu : ((1u << LANES) - 1) << (thread % 32 - lane);
    for (int i = thread; i < COLUMNS * CHANNEL_QUADS; i += CONSUMER_THREADS) {
        const int column = i / CHANNEL_QUADS, channel = 4 * (i % CHANNEL_QUADS);
        const Column target(p, segment, column * COLUMN_STEP);
        if (target.token < 0) continue;
        const auto place = [&](int part) { return static_cast<int64_t>(segment.first_part + part) * COLUMNS + column; };
        const auto load_stats = [&](int part, float(&stats)[2]) {
            stats[0] = NO_SCORE;
            stats[1] = 0.f;
            if (part < segment.parts) load_l2(stats, p.partial_stats + 2 * place(part));
        };
        float maximum = NO_SCORE, sum = 0.f, output[4] = {};
        for (int part = lane; part < segment.parts; part += LANES) {
            float stats[2];
            load_stats(part, stats);
            maximum = fmaxf(maximum, stats[0]);
        }
#pragma unroll
        for (int d = LANES / 2; d > 0; d /= 2) maximum = fmaxf(maximum, __shfl_xor_sync(together, maximum, d));
        for (int first = 0; first < segment.parts; first += LANES) {
            float stats[2];
            load_stats(first + lane, stats);
            const float factor = weight(stats[0], maximum);
            sum = fmaf(stats[1], factor, sum);
#pragma unroll 1
            for (int start = 0; start < LANES && first + start < segment.parts; start += AT_ONCE) {
                float x[AT_ONCE][4];
#pragma unroll
                for (int k = 0; k < AT_ONCE; ++k) {
                    x[k][0] = x[k][1] = x[k][2] = x[k][3] = 0.f;
                    const int part = first + start + k;
                    if (part < segment.parts) load_l2(x[k], p.partial_output + place(part) * HEAD_DIM + channel);
                }
#pragma unroll
                for (int k = 0; k < AT_ONCE; ++k) {
                    const float of_part = __shfl_sync(together, factor, start + k, LANES);
#pragma unroll
                    for (int c = 0; c < 4; ++c) output[c] = fmaf(x[k][c], of_part, output[c]);
                }
            }
        }
#pragma unroll
        for (int d = LANES / 2; d > 0; d /= 2) sum += __shfl_xor_sync(together, sum, d);
        write_output(p, segment, scalars, target, column * COLUMN_STEP, channel, output, maximum, sum);
    }
}

// Query rows of a segment, each by one warp.
__device__ __forceinline__ void prepare_query(const Parameters& p, const Task& task, uint8_t* shared, Scalars& scalars,
                                              int warp, int lane) {
    const Segment& segment = task.segment;
    // Scores of the key mean: for true logits, and for 16-bit keys, from which it was not taken
    const bool shifted = CAPPED || p.lse != nullptr || segment.unit_end > task.units.pages;
    const float* key_mean = shifted && p.key_mean != nullptr ? p.key_mean + segment.head * HEAD_DIM : nullptr;
#pragma unroll 1
    for (int column = warp * COLUMN_STEP; column < 8 * TILES; column += CONSUMER_WARPS * COLUMN_STEP) {
        const Column row(p, segment, column);
        if (row.token < 0) continue;
        prepare_query_row(row.query(p, task), key_mean, p.score_scale, column, shared, scalars, lane);
        if (lane == 0) scalars.position[column] = row.position(p, task);
    }
}

// What the warps leave each other at the end of a segment, in slots of the ring, four warps in each.
struct Merge {
    uint8_t* slots;
    int unit;  // the first of the ring's units that are lent for it

    __device__ __forceinline__ float* place(int warp, int column) const {
        uint8_t* slot = slots + (unit + warp / MERGE_WARPS) % SLOTS * SLOT_BYTES;
        return reinterpret_cast<float*>(slot) + ((warp % MERGE_WARPS) * 8 + column) * MERGE_PITCH;
    }

    __device__ __forceinline__ void put_stats(const Softmax& softmax, Scalars& scalars, int warp, int lane) const {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float sum = softmax.sum[n][e];
#pragma unroll
                for (int d = 4; d < 32; d *= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, d);
                if (g == 0) {
                    scalars.maximum[warp][8 * n + 2 * t + e] = softmax.maximum[n][e];
                    scalars.sum[warp][8 * n + 2 * t + e] = sum;
                }
            }
    }

    __device__ __forceinline__ void put_output(const Softmax& softmax, int n, int warp, int lane) const {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int m = 0; m < OUTPUT_TILES; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                place(warp, 2 * t + i % 2)[16 * m + 8 * (i / 2) + g] = softmax.tile(m, n)[i];
    }

    // Four channels of a column of tile n, summed over the warps in their order.
    __device__ __forceinline__ void take_output(const Scalars& scalars, int n, int column, int channel, float maximum,
                                                float (&x)[4]) const {
        x[0] = x[1] = x[2] = x[3] = 0.f;
#pragma unroll
        for (int w = 0; w < CONSUMER_WARPS; ++w) {
            const float factor = weight(scalars.maximum[w][8 * n + column], maximum);
            const Words4 part = *reinterpret_cast<const Words4*>(place(w, column) + channel);
#pragma unroll
            for (int k = 0; k < 4; ++k) x[k] = fmaf(bits_to_f32(part.x[k]), factor, x[k]);
        }
    }
};

__device__ __forceinline__ void finish_segment(const Parameters& p, const Segment& segment, const Softmax& softmax,
                                               const Merge& merge, Scalars& scalars, int warp, int lane) {
    const int thread = 32 * warp + lane;
    merge.put_stats(softmax, scalars, warp, lane);
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
        if (n > 0) named_barrier(CONSUMERS_BARRIER, CONSUMER_THREADS);
        merge.put_output(softmax, n, warp, lane);
        named_barrier(CONSUMERS_BARRIER, CONSUMER_THREADS);
        for (int i = thread; i < 8 / COLUMN_STEP * CHANNEL_QUADS; i += CONSUMER_THREADS) {
            const int in_tile = i / CHANNEL_QUADS * COLUMN_STEP, column = 8 * n + in_tile;
            const int channel = 4 * (i % CHANNEL_QUADS);
            const Column target(p, segment, column);
            if (target.token < 0) continue;
            float maximum, sum, x[4];
            merged_stats(scalars, column, maximum, sum);
            merge.take_output(scalars, n, in_tile, channel, maximum, x);
            if (segment.parts == 1) {
                write_output(p, segment, scalars, target, column, channel, x, maximum, sum);
            } else {
                const int64_t place = segment.part * COLUMNS + column / COLUMN_STEP;
                store_f32x4(p.partial_output + place * HEAD_DIM + channel, x);
                if (channel == 0) {
                    p.partial_stats[2 * place] = maximum;
                    p.partial_stats[2 * place + 1] = sum;
                }
            }
        }
    }
    if (segment.parts > 1) {
        __threadfence();
        named_barrier(CONSUMERS_BARRIER, CONSUMER_THREADS);
        if (thread == 0) {
            const int before = atomicAdd(p.arrived + segment.tile, 1);
            scalars.is_last = before == segment.parts - 1;
            if (scalars.is_last) p.arrived[segment.tile] = 0;  // for the next launch
        }
        named_barrier(CONSUMERS_BARRIER, CONSUMER_THREADS);
        if (scalars.is_last) {
            __threadfence();
            combine_parts(p, segment, scalars, thread);
        }
    }
    fence_shared_for_bulk_copies();
    named_barrier(CONSUMERS_BARRIER, CONSUMER_THREADS);  // the next segment overwrites all this
}

__device__ __forceinline__ void run_consumer(const Parameters& p, uint8_t* shared, Scalars& scalars, int warp, int lane) {
    const int pair = warp / 2, half = warp % 2;
    Ring ring;
    for (int task_count = 0;; ++task_count) {
        mbarrier_wait(shared_address(&scalars.task_full[task_count & 1]), (task_count / 2) & 1);
        // Left in shared memory, for the registers' sake
        const Task& task = scalars.tasks[task_count & 1];
        if (task.segment.row < 0) return;
        const int first = ring.unit, pages = task.units.pages;
        const int begin = task.segment.unit_begin, count = task.segment.unit_end - begin;
        prepare_query(p, task, shared, scalars, warp, lane);
        named_barrier(CONSUMERS_BARRIER, CONSUMER_THREADS);

        Softmax softmax;
        softmax.clear();
        const int masked = masked_pages(p, task);
        int i = pair;
        for (; begin + i < pages && i < count; i += PAIRS) {
            ring.unit = first + i;
            const int slot = ring.slot();
            mbarrier_wait(shared_address(&scalars.full[slot]), ring.parity());
            attend_page(p, task, begin + i, begin + i < masked, slot, shared, scalars, half, lane, softmax);
            __syncwarp();
            if (lane == 0) mbarrier_arrive(shared_address(&scalars.empty[slot]));
        }
        softmax.finish_pages(NATIVE ? p.fold : W16_FOLD);
        const RawQuery raw(p, task, lane);
        for (; i < count; i += PAIRS) {
            ring.unit = first + i;
            const int slot = ring.slot();
            mbarrier_wait(shared_address(&scalars.full[slot]), ring.parity());
            attend_chunk(p, task, raw, begin + i, shared + slot * SLOT_BYTES, scalars, half, lane, softmax);
            __syncwarp();
            if (lane == 0) mbarrier_arrive(shared_address(&scalars.empty[slot]));
        }
        // Behind the barrier every earlier phase of every slot is over, so that waiting by parity is safe for all warps
        named_barrier(CONSUMERS_BARRIER, CONSUMER_THREADS);
        const Merge merge = {shared, first + count};
        ring.unit = first + count;
#pragma unroll
        for (int k = 0; k < SCRATCH_UNITS; ++k, ++ring.unit)
            mbarrier_wait(shared_address(&scalars.full[ring.slot()]), ring.parity());
        finish_segment(p, task.segment, softmax, merge, scalars, warp, lane);
        if (warp < 2 && lane < SCRATCH_UNITS)
            mbarrier_arrive(shared_address(&scalars.empty[(first + count + lane) % SLOTS]));
        if (warp == 0 && lane == 0) mbarrier_arrive(shared_address(&scalars.task_empty[task_count & 1]));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BD_MIN_CTAS)
    decode(const uint8_t* pages, const uint16_t* means, uint16_t* tail, const uint16_t* sink, const uint16_t* query,
           const uint16_t* new_keys, const uint16_t* new_values, uint16_t* output, float* lse, const float* key_mean,
           const RowState* rows, const int* item_prefix, const void* table, float* partial_output, float* partial_stats,
           int* arrived, int64_t query_row, int64_t query_token, int64_t query_head, int64_t key_row, int64_t key_token,
           int64_t key_head, int64_t value_row, int64_t value_token, int64_t value_head, int64_t output_row,
           int64_t output_token, int64_t output_head, int64_t page_stride, int64_t table_stride, int num_rows,
           int num_tokens, int heads, int group, int table_is_64, int window, int sink_tokens, int granule,
           float score_scale, float score_cap, float cap_inverse, float fold, float tau) {
    extern __shared__ __align__(128) uint8_t shared[];
    Scalars& scalars = *reinterpret_cast<Scalars*>(shared + SHARED_SCALARS);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Parameters p = {pages,
                          means,
                          tail,
                          sink,
                          query,
                          new_keys,
                          new_values,
                          output,
                          lse,
                          key_mean,
                          rows,
                          item_prefix,
                          table,
                          partial_output,
                          partial_stats,
                          arrived,
                          {query_row, query_token, query_head},
                          {key_row, key_token, key_head},
                          {value_row, value_token, value_head},
                          {output_row, output_token, output_head},
                          page_stride,
                          table_stride,
                          num_rows,
                          num_tokens,
                          heads,
                          group,
                          (group * num_tokens + COLUMNS - 1) / COLUMNS,
                          table_is_64,
                          window,
                          sink_tokens,
                          granule,
                          score_scale,
                          score_cap,
                          cap_inverse,
                          fold,
                          tau};
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; ++i) {
            mbarrier_init(shared_address(&scalars.full[i]), FULL_ARRIVALS);
            mbarrier_init(shared_address(&scalars.empty[i]), 2);
        }
        for (int i = 0; i < 2; ++i) {
            mbarrier_init(shared_address(&scalars.task_full[i]), 1);
            mbarrier_init(shared_address(&scalars.task_empty[i]), 1);
        }
        mbarrier_init_fence();
    }
    // Columns that never get a query row stay zero: they cost less power, and no new maxima
    for (int i = threadIdx.x; i < (SHARED_SCALARS - SHARED_QUERY) / 4; i += THREADS)
        reinterpret_cast<uint32_t*>(shared + SHARED_QUERY)[i] = 0;
    for (int i = threadIdx.x; i < 8 * QUERY_TILES; i += THREADS) scalars.query_scale[i] = 0.f;
    for (int i = threadIdx.x; i < 8 * TILES; i += THREADS) scalars.shift[i] = 0.f;
    __syncthreads();
    if (warp == CONSUMER_WARPS)
        run_loader(p, shared_address(shared), scalars, lane);
    else
        run_consumer(p, shared, scalars, warp, lane);
}
