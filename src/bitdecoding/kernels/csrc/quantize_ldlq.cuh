// LDLQ rounding of keys (bitdecoding.numerics.ldlq), blocks of channels in order. SPLIT lanes share a token: they share
// the sums over finished channels, and each of two tries one candidate scale.
#pragma once

#include "quantize_keys.cuh"

constexpr int LDLQ_TOKENS = HEAD_DIM == 256 ? 64 : 128;  // at once; what fits beside the factors
constexpr int SPLIT = 256 / LDLQ_TOKENS;
constexpr int FACTOR_BUFFERS = HEAD_DIM == 256 ? 1 : 2;
constexpr int FACTOR_FLOATS = HEAD_DIM * BLOCK_SIZE;     // a buffer: C of one block's channels
constexpr int ROWS_FLOATS = HEAD_DIM * LDLQ_TOKENS;      // keys, and errors of finished channels

// Place of a channel of a token among the keys. The tokens are shuffled so that neither lanes of several channels nor
// the lanes that store keys meet in a bank.
__device__ __forceinline__ int ldlq_place(int channel, int token) {
    const int shuffle = (channel & 1) << 4 ^ (channel >> 1 & 1) << 3 ^ (channel >> 4 & 3) << 3;
    return channel * LDLQ_TOKENS + (token ^ shuffle);
}

// Brings rows 0 .. of C, up to and with the block's own, cut to the block's columns.
__device__ __forceinline__ void load_factors(const float* c, int block, float* buffer) {
    constexpr int UNITS = BLOCK_SIZE / 4;
    for (int i = threadIdx.x; i < (block + 1) * BLOCK_SIZE * UNITS; i += blockDim.x)
        async_copy_16(shared_address(buffer + 4 * i), c + i / UNITS * HEAD_DIM + block * BLOCK_SIZE + i % UNITS * 4);
    async_copies_commit();
}

// Σ over finished channels of their error times C, for the block's columns; the same in all lanes of a token.
__device__ __forceinline__ void feed_forward(const float* rows, const float* factors, int finished, int token, int part,
                                             float (&sum)[BLOCK_SIZE]) {
#pragma unroll
    for (int j = 0; j < BLOCK_SIZE; ++j) sum[j] = 0.f;
#pragma unroll 2
    for (int i = part; i < finished; i += SPLIT) {
        const float error = rows[ldlq_place(i, token)];
        const float4* row = reinterpret_cast<const float4*>(factors + i * BLOCK_SIZE);
#pragma unroll
        for (int j = 0; j < BLOCK_SIZE; j += 4) {
            const float4 c = row[j / 4];
            sum[j] = fmaf(error, c.x, sum[j]);
            sum[j + 1] = fmaf(error, c.y, sum[j + 1]);
            sum[j + 2] = fmaf(error, c.z, sum[j + 2]);
            sum[j + 3] = fmaf(error, c.w, sum[j + 3]);
        }
    }
#pragma unroll
    for (int distance = 1; distance < SPLIT; distance *= 2)
#pragma unroll
        for (int j = 0; j < BLOCK_SIZE; ++j) sum[j] += __shfl_xor_sync(ALL_LANES, sum[j], distance);
}

// Rounds the block's channels one after the other; `pending` are what is asked of them, less what is fed forward.
// Returns the weighted squared error. pairs: codes with their signs.
__device__ __forceinline__ float round_in_order(const float* rows, const float* inner, const float* weights, int channel,
                                                int token, const Divisor& divisor, float (&pending)[BLOCK_SIZE],
                                                uint32_t (&pairs)[BLOCK_SIZE / 2]) {
    float rounded[BLOCK_SIZE], cost = 0.f;
#pragma unroll
    for (int j = 0; j < BLOCK_SIZE; ++j) {
        const float value = round_quotient(saturate(quotient(pending[j], divisor)));
        const float off = fmaf(divisor.value, value, -pending[j]);
        cost = fmaf(weights[j] * off, off, cost);
        rounded[j] = bits_to_f32((f32_to_bits(value) & 0x7FFFFFFFu) | (f32_to_bits(pending[j]) & 0x80000000u));
        if (j + 1 == BLOCK_SIZE) break;
        const float error = fmaf(divisor.value, value, -rows[ldlq_place(channel + j, token)]);
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

// Places of a token's row in key tiles: the inverse of key_row_token.
struct KeyPlace {
    int half, tile, g, r;
    __device__ __forceinline__ explicit KeyPlace(int token) {
        const int n = token % HALF_TOKENS;
        half = token / HALF_TOKENS;
        tile = 2 * (n >> 5) + (n >> 3 & 1);
        r = n >> 2 & 1;
        g = 4 * (n >> 4 & 1) + (n & 3);
    }
};

// Rounds LDLQ_TOKENS keys, from token `start` of the page, that lie in `rows` (see ldlq_place), and writes their part of
// the page. Called by 256 threads. c: [HEAD_DIM, HEAD_DIM], d: [HEAD_DIM].
__device__ __forceinline__ void quantize_keys_ldlq(float* rows, float* factors, const float* c, const float* d, int start,
                                                   uint8_t* page) {
    const int token = threadIdx.x / SPLIT, part = threadIdx.x % SPLIT;
    const bool second = KEY_SEARCH && part % 2;
    const KeyPlace place(start + token);
    __syncthreads();  // all keys are there, and nobody reads the factors of an earlier call
    load_factors(c, 0, factors);
#pragma unroll 1
    for (int block = 0; block < KEY_ROW_BLOCKS; ++block) {
        const int channel = block * BLOCK_SIZE;
        const float* current = factors + block % FACTOR_BUFFERS * FACTOR_FLOATS;
        async_copies_wait();
        __syncthreads();
        if (FACTOR_BUFFERS == 2 && block + 1 < KEY_ROW_BLOCKS)
            load_factors(c, block + 1, factors + (block + 1) % 2 * FACTOR_FLOATS);

        float pending[BLOCK_SIZE];
        feed_forward(rows, current, channel, token, part, pending);
        float amax = 0.f;
#pragma unroll
        for (int j = 0; j < BLOCK_SIZE; ++j) {
            pending[j] = rows[ldlq_place(channel + j, token)] - pending[j];
            amax = fmaxf(amax, fabsf(pending[j]));
        }
        Candidate first, other;
        candidates(amax, first, other);
        Divisor divisor = second ? other.divisor : first.divisor;
        uint32_t byte = second ? other.byte : first.byte;
        bool flushed = second ? other.flushed : first.flushed;
        uint32_t pairs[BLOCK_SIZE / 2];
        const float cost = round_in_order(rows, current + channel * BLOCK_SIZE, d + channel, channel, token, divisor,
                                          pending, pairs);
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
            // Errors, one half of each pair in each lane, in the place of the keys; words in turn
#pragma unroll
            for (int i = 0; i < BLOCK_SIZE / 2; ++i) {
                if (flushed) pairs[i] = 0;
                const float value = f16_low_to_f32(pairs[i] >> (16 * part));
                float& key = rows[ldlq_place(channel + 8 * (i / 4) + i % 4 + 4 * part, token)];
                key = fmaf(divisor.value, NVFP4 ? value : value * 16384.f, -key);
            }
#pragma unroll
            for (int w = 0; w < BLOCK_SIZE / 8; ++w) {
                if (w % 2 != part) continue;
                const int first_channel = channel + 8 * w, k = first_channel % 64;
                const uint32_t word = pack_word(pairs[4 * w], pairs[4 * w + 1], pairs[4 * w + 2], pairs[4 * w + 3],
                                                pairs[4 * w], pairs[4 * w + 1], pairs[4 * w + 2], pairs[4 * w + 3]);
                *reinterpret_cast<uint32_t*>(
                    page + key_operand(place.half, place.tile, first_channel / 64, 4 * place.g + k % 32 / 8) +
                    4 * (2 * (k / 32) + place.r)) = word;
            }
            if (part == 0)
                page[key_scale(place.half, place.tile, channel / 64, place.g, place.r) + channel % 64 / BLOCK_SIZE] = byte;
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
    const int lane = threadIdx.x % 32, t = lane % 4;
#pragma unroll 1
    for (int token = threadIdx.x / 4; token < LDLQ_TOKENS; token += 64) {
        Words4 raw[OWN / 8];
        load_key(rows[start + token], t, raw);
        float x[OWN];
        transform_key(raw, key_mean, page_mean, lane, x);
#pragma unroll
        for (int i = 0; i < OWN; ++i) target[ldlq_place(64 * (i / 16) + 16 * t + i % 16, token)] = x[i];
    }
}
