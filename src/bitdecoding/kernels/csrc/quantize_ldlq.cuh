// LDLQ rounding of keys (bitdecoding.numerics.ldlq), blocks of channels in order. SPLIT lanes share a token: they share
// the sums over finished channels, and each of two tries one candidate scale.
#pragma once

#include "quantize_keys.cuh"

constexpr int LDLQ_TOKENS = HEAD_DIM == 256 ? 64 : 128;  // at once; what fits beside the factors
constexpr int SPLIT = 256 / LDLQ_TOKENS;
constexpr int FACTOR_BUFFERS = HEAD_DIM == 256 ? 1 : 2;
constexpr int FACTOR_FLOATS = HEAD_DIM * BLOCK_SIZE;     // a buffer: C of one block's channels
constexpr int ROWS_FLOATS = HEAD_DIM * LDLQ_TOKENS;      // keys, and errors of finished channels

// Keys lie [channel][token], the tokens shuffled so that neither lanes of several channels nor the lanes that store keys
// meet in a bank: bits 4 and 3 of the token are flipped by bits 0 and 1 of the channel, and both by bits 4 and 5.
__device__ __forceinline__ constexpr int ldlq_shuffle(int channel) {
    return (channel & 1) << 4 ^ (channel >> 1 & 1) << 3 ^ (channel >> 4 & 3) << 3;
}

// A token's keys from a multiple of 16 channels on: four addresses for the four ways to shuffle, the rest constant offsets.
struct BlockKeys {
    float* ways[4];
    __device__ __forceinline__ BlockKeys(float* rows, int channel, int token) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            ways[i] = rows + channel * LDLQ_TOKENS + (token ^ (channel >> 4 & 3) << 3 ^ i << 3);
    }
    // Channel j + more; `more` is 4 or a multiple of 64, which do not change the way.
    __device__ __forceinline__ float& operator()(int j, int more = 0) const {
        return ways[ldlq_shuffle(j) >> 3][(j + more) * LDLQ_TOKENS];
    }
};

// Brings rows 0 .. of C, up to and with the block's own, cut to the block's columns.
__device__ __forceinline__ void load_factors(const float* c, int block, float* buffer) {
    constexpr int UNITS = BLOCK_SIZE / 4;
#pragma unroll 1
    for (int i = thread_index_again(); i < (block + 1) * BLOCK_SIZE * UNITS; i += 256)
        async_copy_16(shared_address(buffer + 4 * i), c + i / UNITS * HEAD_DIM + block * BLOCK_SIZE + i % UNITS * 4);
    async_copies_commit();
}

// Σ over finished channels of their error times C, for the block's columns; the same in all lanes of a token.
__device__ __forceinline__ void feed_forward(const float* rows, const float* factors, int finished, int token, int part,
                                             float (&sum)[BLOCK_SIZE]) {
#pragma unroll
    for (int j = 0; j < BLOCK_SIZE; ++j) sum[j] = 0.f;
#pragma unroll 1
    for (int first = 0; first < finished; first += 16) {
        const float* errors = rows + (first + part) * LDLQ_TOKENS;
        const int place = token ^ (first >> 4 & 3) << 3 ^ ldlq_shuffle(part);
#pragma unroll
        for (int i = 0; i < 16; i += SPLIT) {
            const float error = errors[i * LDLQ_TOKENS + (place ^ ldlq_shuffle(i))];
            const float4* row = reinterpret_cast<const float4*>(factors + (first + part + i) * BLOCK_SIZE);
#pragma unroll
            for (int j = 0; j < BLOCK_SIZE; j += 4) {
                const float4 c = row[j / 4];
                sum[j] = fmaf(error, c.x, sum[j]);
                sum[j + 1] = fmaf(error, c.y, sum[j + 1]);
                sum[j + 2] = fmaf(error, c.z, sum[j + 2]);
                sum[j + 3] = fmaf(error, c.w, sum[j + 3]);
            }
        }
    }
#pragma unroll
    for (int distance = 1; distance < SPLIT; distance *= 2)
#pragma unroll
        for (int j = 0; j < BLOCK_SIZE; ++j) sum[j] += __shfl_xor_sync(ALL_LANES, sum[j], distance);
}

// Rounds the block's channels one after the other; `pending` are what is asked of them, less what is fed forward.
// Returns the weighted squared error. pairs: codes with their signs.
__device__ __forceinline__ float round_in_order(const BlockKeys& keys, const float* inner, const float* weights,
                                                const Divisor& divisor, float (&pending)[BLOCK_SIZE],
                                                uint32_t (&pairs)[BLOCK_SIZE / 2]) {
    float rounded[BLOCK_SIZE], cost = 0.f;
    Words4 four_weights;  // loaded together where single loads would take too many registers
#pragma unroll
    for (int j = 0; j < BLOCK_SIZE; ++j) {
        // Keeps loads from moving up so far that the 128 registers of two CTAs run out
        if (HEAD_DIM < 256 && (!NVFP4 || j % 4 == 0)) __syncwarp();
        if (!NVFP4 && j % 4 == 0) four_weights = *reinterpret_cast<const Words4*>(weights + j);
        const float value = round_quotient(saturate(quotient(pending[j], divisor)));
        const float off = fmaf(divisor.value, value, -pending[j]);
        const float weight = NVFP4 ? weights[j] : bits_to_f32(four_weights.x[j % 4]);
        cost = fmaf(weight * off, off, cost);
        rounded[j] = bits_to_f32((f32_to_bits(value) & 0x7FFFFFFFu) | (f32_to_bits(pending[j]) & 0x80000000u));
        if (j + 1 == BLOCK_SIZE) break;
        const float error = fmaf(divisor.value, value, -keys(j));
        const float4* row = reinterpret_cast<const float4*>(inner + j * BLOCK_SIZE);
#pragma unroll
        for (int i = (j + 1) / 4 * 4; i < BLOCK_SIZE; i += 4) {
            const float4 c = row[i / 4];  // zero up to j
            pending[i] = fmaf(-error, c.x, pending[i]);
            pending[i + 1] = fmaf(-error, c.y, pending[i + 1]);
            pending[i + 2] = fmaf(-error, c.z, pending[i + 2]);
            pending[i + 3] = fmaf(-error, c.w, pending[i + 3]);
        }
    }
#pragma unroll
    for (int i = 0; i < BLOCK_SIZE / 2; ++i) pairs[i] = code_pair(rounded[i / 4 * 8 + i % 4], rounded[i / 4 * 8 + i % 4 + 4]);
    return cost;
}

// Where a token's codes and scales start in a page.
struct KeyRow {
    uint8_t *codes, *scales;
    __device__ __forceinline__ KeyRow(uint8_t* page, int token) {
        const int half = token / HALF_TOKENS, n = token % HALF_TOKENS;
        // The inverse of key_row_token
        const int tile = 2 * (n >> 5) + (n >> 3 & 1), r = n >> 2 & 1, g = 4 * (n >> 4 & 1) + (n & 3);
        codes = page + key_operand(half, tile, 0, 4 * g) + 4 * r;
        scales = page + key_scale(half, tile, 0, g, r);
    }
    // Of 8 codes.
    __device__ __forceinline__ uint32_t& word(int channel) const {
        return *reinterpret_cast<uint32_t*>(codes + channel / 64 * 512 + channel / 32 % 2 * 8 + channel / 8 % 4 * 16);
    }
    __device__ __forceinline__ uint8_t& scale(int block) const {
        return scales[block / BD_KEY_SCALE_WIDTH * 128 + block % BD_KEY_SCALE_WIDTH];
    }
};

// Rounds LDLQ_TOKENS keys, from token `start` of the page, that lie in `rows` (see ldlq_shuffle), and writes their part of
// the page. Called by 256 threads. c: [HEAD_DIM, HEAD_DIM], d: [HEAD_DIM].
__device__ __forceinline__ void quantize_keys_ldlq(float* rows, float* factors, const float* c, const float* d, int start,
                                                   uint8_t* page) {
    __syncthreads();  // all keys are there, and nobody reads the factors of an earlier call
    load_factors(c, 0, factors);
#pragma unroll 1
    for (int block = 0; block < KEY_ROW_BLOCKS; ++block) {
        const int channel = block * BLOCK_SIZE;
        const int thread = thread_index_again(), token = thread / SPLIT, part = thread % SPLIT;
        const bool second = KEY_SEARCH && part % 2;
        const float* current = factors + block % FACTOR_BUFFERS * FACTOR_FLOATS;
        async_copies_wait();
        __syncthreads();
        if (FACTOR_BUFFERS == 2 && block + 1 < KEY_ROW_BLOCKS)
            load_factors(c, block + 1, factors + (block + 1) % 2 * FACTOR_FLOATS);

        const BlockKeys keys(rows, channel, token);
        float pending[BLOCK_SIZE];
        feed_forward(rows, current, channel, token, part, pending);
        float amax = 0.f;
#pragma unroll
        for (int j = 0; j < BLOCK_SIZE; ++j) {
            pending[j] = keys(j) - pending[j];
            amax = fmaxf(amax, fabsf(pending[j]));
        }
        Candidate first, other;
        candidates(amax, first, other);
        Divisor divisor = second ? other.divisor : first.divisor;
        uint32_t byte = second ? other.byte : first.byte;
        bool flushed = second ? other.flushed : first.flushed;
        uint32_t pairs[BLOCK_SIZE / 2];
        const float cost =
            round_in_order(keys, current + channel * BLOCK_SIZE, d + channel, divisor, pending, pairs);
        if (KEY_SEARCH) {
            const float other_cost = __shfl_xor_sync(ALL_LANES, cost, 1);
            const bool lost = second ? !(cost < other_cost) : other_cost < cost;
            if (lost) {
                divisor.value = second ? first.divisor.value : other.divisor.value;
                byte = second ? first.byte : other.byte;
                flushed = second ? first.flushed : other.flushed;
            }
#pragma unroll
            for (int i = 0; i < BLOCK_SIZE / 2; ++i) {
                const uint32_t theirs = __shfl_xor_sync(ALL_LANES, pairs[i], 1);
                if (lost) pairs[i] = theirs;
            }
        }
        if (part < 2) {
            const KeyRow target(page, start + thread_index_again() / SPLIT);
            // Errors, one half of each pair in each lane, in the place of the keys; words in turn
#pragma unroll
            for (int i = 0; i < BLOCK_SIZE / 2; ++i) {
                if (flushed) pairs[i] = 0;
                const float value = f16_low_to_f32(pairs[i] >> (16 * part));
                float& key = keys(8 * (i / 4) + i % 4, 4 * part);
                key = fmaf(divisor.value, NVFP4 ? value : value * 16384.f, -key);
            }
#pragma unroll
            for (int w = 0; w < BLOCK_SIZE / 8; ++w) {
                if (w % 2 != part) continue;
                target.word(channel + 8 * w) =
                    pack_word(pairs[4 * w], pairs[4 * w + 1], pairs[4 * w + 2], pairs[4 * w + 3], pairs[4 * w],
                              pairs[4 * w + 1], pairs[4 * w + 2], pairs[4 * w + 3]);
            }
            if (part == 0) target.scale(block) = static_cast<uint8_t>(byte);
        }
        if (FACTOR_BUFFERS == 1 && block + 1 < KEY_ROW_BLOCKS) {
            __syncthreads();
            load_factors(c, block + 1, factors);
        }
    }
}

// Transforms LDLQ_TOKENS keys from token `start` of the page to `target`. Called by 256 threads.
__device__ __forceinline__ void stage_keys(const uint16_t* const* rows, int start, const float* key_mean,
                                           const float* page_mean, float* target) {
    const int thread = thread_index_again(), lane = thread % 32, t = lane % 4;
#pragma unroll 1
    for (int token = thread / 4; token < LDLQ_TOKENS; token += 64) {
        Words4 raw[OWN / 8];
        load_key(rows[start + token], t, raw);
        float x[OWN];
        transform_key(raw, key_mean, page_mean, lane, x);
        const BlockKeys keys(target, 16 * t, token);
#pragma unroll
        for (int i = 0; i < OWN; ++i) keys(i % 16, 64 * (i / 16)) = x[i];
    }
}
