// CUDA kernels on the CPU, for tests of their logic: stands in for csrc/ptx.cuh. Threads are fibers that switch at
// barriers only, in an order that a seed permutes; a result that depends on the seed shows a race between phases. CTAs
// run one after the other.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __shared__ static
#define __constant__ static
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

typedef unsigned long long u64;  // the kernels' typedefs, by macro: <cstdint> has others
typedef long long i64;
#define int64_t i64
#define uint64_t u64

struct __align__(16) Words4 {
    uint32_t x[4];
};

struct Index {
    unsigned x, y, z;
};

namespace host {

struct Random {  // xorshift
    uint32_t state;
    explicit Random(unsigned seed) : state(seed * 2654435761u + 1) {
        for (int i = 0; i < 8; ++i) (*this)();
    }
    uint32_t operator()() {
        state ^= state << 13;
        state ^= state >> 17;
        return state ^= state << 5;
    }
    template <class T>
    void shuffle(std::vector<T>& x) {
        for (size_t i = x.size(); i > 1; --i) std::swap(x[i - 1], x[(*this)() % i]);
    }
};

// What a fiber waits for: met(object, seen).
struct Condition {
    bool (*met)(const void*, unsigned) = nullptr;
    const void* object = nullptr;
    unsigned seen = 0;
};

struct Fiber {
    ucontext_t context;  // for the start; then jumps, which do without system calls
    jmp_buf jump;
    std::unique_ptr<char[]> stack;
    bool started = false, done = false;
    Condition condition;
};

struct Barrier {
    int alive = 0, arrived = 0;
    unsigned generation = 0;
    void release_if_complete() {
        if (alive > 0 && arrived == alive) arrived = 0, ++generation;
    }
};

constexpr unsigned ALL_LANES = 0xFFFFFFFFu;

// Lanes that meet, and what they show each other: twice, as nobody writes the next but one before all have read this one
struct Lanes {
    unsigned mask;
    Barrier barrier;
    u64 values[2][32];
    float operands[2][2][16][16];
};

constexpr int SHARED_LIMIT = 256 * 1024, POISON = 0xFF;  // NaN in every format

inline Index thread_index, block_index, block_dim, grid_dim;
inline std::vector<Fiber> fibers;
inline std::vector<std::vector<std::unique_ptr<Lanes>>> warps;  // all lanes of each, then others as they come
inline Barrier cta, named[16];
inline std::vector<std::function<void()>> events;  // what the hardware does at some later time
inline jmp_buf scheduler;
inline int current;
inline const char* failure;
inline std::function<void()> body;
alignas(128) inline char dynamic_shared[SHARED_LIMIT];

// Out of a fiber into the scheduler, until the condition holds
__attribute__((noinline)) inline void pause(const Condition& condition = {}) {
    fibers[current].condition = condition;
    if (!_setjmp(fibers[current].jump)) _longjmp(scheduler, 1);
}

__attribute__((noinline)) inline void resume(int fiber) {
    current = fiber;
    thread_index = {static_cast<unsigned>(fiber), 0, 0};
    if (_setjmp(scheduler)) return;
    if (fibers[fiber].started) _longjmp(fibers[fiber].jump, 1);
    fibers[fiber].started = true;
    setcontext(&fibers[fiber].context);
}

// Ends the launch
inline void require(bool condition, const char* message) {
    if (condition) return;
    failure = message;
    pause();
}

inline bool is_past(const void* generation, unsigned seen) {
    return *static_cast<const unsigned*>(generation) != seen;
}

inline void wait(Barrier& barrier) {
    const unsigned generation = barrier.generation;
    ++barrier.arrived;
    barrier.release_if_complete();
    if (barrier.generation == generation) pause({is_past, &barrier.generation, generation});
}

inline Lanes& lanes_of(unsigned mask) {
    auto& warp = warps[current / 32];
    for (auto& lanes : warp)
        if (lanes->mask == mask) return *lanes;
    require(mask >> (current % 32) & 1, "a lane is not in its own mask");
    warp.emplace_back(new Lanes{mask});
    warp.back()->barrier.alive = __builtin_popcount(mask);
    return *warp.back();
}

inline void wait_for_warp() { wait(lanes_of(ALL_LANES).barrier); }

inline void run_fiber() {
    body();
    Fiber& fiber = fibers[current];
    fiber.done = true;
    for (Barrier* barrier : {&cta, &warps[current / 32][0]->barrier}) {
        --barrier->alive;
        barrier->release_if_complete();
    }
    pause();
}

inline bool deliver_events(Random& random, unsigned one_of) {
    bool any = false;
    for (size_t i = 0; i < events.size();) {
        if (random() % one_of) {
            ++i;
            continue;
        }
        any = true;
        const std::function<void()> event = std::move(events[i]);
        events[i] = std::move(events.back());
        events.pop_back();
        event();
    }
    return any;
}

// Some warp that may run; now and then one stands still for long, and copies take their time
inline void run_cta(int threads, Random& random) {
    constexpr int STACK = 64 * 1024;
    if (static_cast<int>(fibers.size()) < threads) fibers.resize(threads);
    const int num_warps = (threads + 31) / 32;
    warps.clear();
    warps.resize(num_warps);
    for (auto& warp : warps) warp.emplace_back(new Lanes{ALL_LANES});
    cta = Barrier();
    for (Barrier& barrier : named) barrier = Barrier();
    events.clear();
    std::vector<int> order(threads), asleep(num_warps, 0);
    std::iota(order.begin(), order.end(), 0);
    for (int i : order) {
        Fiber& fiber = fibers[i];
        if (!fiber.stack) fiber.stack.reset(new char[STACK]);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, run_fiber, 0);
        fiber.started = fiber.done = false;
        fiber.condition = {};
        ++cta.alive;
        ++warps[i / 32][0]->barrier.alive;
    }
    std::memset(dynamic_shared, POISON, sizeof dynamic_shared);
    while (cta.alive > 0) {
        if (random() % 32 == 0) asleep[random() % num_warps] = random() % 256;
        bool busy = deliver_events(random, 8);
        random.shuffle(order);
        for (int i : order) {
            const Fiber& fiber = fibers[i];
            const Condition& condition = fiber.condition;
            if (fiber.done || asleep[i / 32]) continue;
            if (condition.met && !condition.met(condition.object, condition.seen)) continue;
            busy = true;
            resume(i);
            if (failure) return;
        }
        bool slept = false;
        for (int& passes : asleep) {
            slept = slept || passes > 0;
            passes = busy && passes > 0 ? passes - 1 : 0;
        }
        if (!busy && !slept && !deliver_events(random, 1)) {
            failure = "deadlock: every thread waits";
            return;
        }
    }
    if (!events.empty()) failure = "a CTA ended before its copies";
#ifdef BD_SHARED_BYTES
    for (int i = BD_SHARED_BYTES; i < SHARED_LIMIT; ++i)
        if (static_cast<uint8_t>(dynamic_shared[i]) != POISON) failure = "written behind the CTA's shared memory";
#endif
}

// Null, or what went wrong.
template <class... A, size_t... I>
const char* launch(void (*kernel)(A...), const int* grid, int threads, unsigned seed, void** arguments,
                   std::index_sequence<I...>) {
    Random random(seed);
    body = [=] { kernel(*static_cast<std::remove_reference_t<A>*>(arguments[I])...); };
    block_dim = {static_cast<unsigned>(threads), 1, 1};
    grid_dim = {static_cast<unsigned>(grid[0]), static_cast<unsigned>(grid[1]), static_cast<unsigned>(grid[2])};
    failure = nullptr;
    std::vector<unsigned> blocks(grid_dim.x * grid_dim.y * grid_dim.z);  // one after the other, in any order
    std::iota(blocks.begin(), blocks.end(), 0);
    random.shuffle(blocks);
    for (unsigned block : blocks) {
        block_index = {block % grid_dim.x, block / grid_dim.x % grid_dim.y, block / grid_dim.x / grid_dim.y};
        run_cta(threads, random);
        if (failure) break;
    }
    return failure;
}

template <class... A>
const char* launch(void (*kernel)(A...), const int* grid, int threads, unsigned seed, void** arguments) {
    return launch(kernel, grid, threads, seed, arguments, std::index_sequence_for<A...>());
}

// Shows x to the lanes of the mask and gives all of theirs.
inline const u64* share(unsigned mask, u64 x) {
    Lanes& lanes = lanes_of(mask);
    u64* values = lanes.values[lanes.barrier.generation % 2];
    values[current % 32] = x;
    wait(lanes.barrier);
    return values;
}

template <class T>
T shuffle(unsigned mask, T x, int lane) {
    require(mask >> lane & 1, "a shuffle from a lane that does not take part");
    u64 bits = 0;
    std::memcpy(&bits, &x, sizeof x);
    const u64 other = share(mask, bits)[lane];
    std::memcpy(&x, &other, sizeof x);
    return x;
}

}  // namespace host

#define threadIdx host::thread_index
#define blockIdx host::block_index
#define blockDim host::block_dim
#define gridDim host::grid_dim

inline void __syncthreads() { host::wait(host::cta); }
template <class T>
T __shfl_xor_sync(unsigned mask, T x, int distance) {
    return host::shuffle(mask, x, host::current % 32 ^ distance);
}
template <class T>
T __shfl_sync(unsigned mask, T x, int lane, int width = 32) {
    return host::shuffle(mask, x, (host::current % 32 & ~(width - 1)) | (lane & (width - 1)));
}
inline unsigned __ballot_sync(unsigned mask, bool x) {
    const u64* all = host::share(mask, x);
    unsigned votes = 0;
    for (int i = 0; i < 32; ++i)
        if (mask >> i & 1) votes |= static_cast<unsigned>(all[i]) << i;
    return votes;
}
inline bool __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline uint32_t min(uint32_t a, uint32_t b) { return a < b ? a : b; }
inline uint32_t max(uint32_t a, uint32_t b) { return a > b ? a : b; }
inline i64 min(i64 a, i64 b) { return a < b ? a : b; }
inline i64 max(i64 a, i64 b) { return a > b ? a : b; }
template <class T, class U>
T atomicAdd(T* p, U x) {
    const T old = *p;
    *p = static_cast<T>(old + x);
    return old;
}
inline int atomicMin(int* p, int x) {
    const int old = *p;
    *p = min(old, x);
    return old;
}

// A 32-bit address is a distance from an anchor; all shared memory is static here
inline uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(static_cast<const char*>(pointer) - host::dynamic_shared);
}
inline char* shared_pointer(uint32_t address) { return host::dynamic_shared + static_cast<int>(address); }

// Lane 8i + c gives the address of row c of matrix i; a lane holds row lane/4, columns 2(lane%4).. of each, and the
// transposed matrix is stored
inline void stmatrix_x4_transposed(uint32_t address, const uint32_t (&r)[4]) {
    const int lane = host::current % 32;
    const u64* addresses = host::share(host::ALL_LANES, address);
    for (int i = 0; i < 4; ++i)
        for (int e = 0; e < 2; ++e) {
            const uint16_t x = static_cast<uint16_t>(r[i] >> (16 * e));
            const uint32_t row = static_cast<uint32_t>(addresses[8 * i + 2 * (lane % 4) + e]);
            std::memcpy(shared_pointer(row) + 2 * (lane / 4), &x, 2);
        }
    host::wait_for_warp();
}

inline Words4 load_in_place(const void* p) { return *static_cast<const Words4*>(p); }

// --- Conversions

inline float bits_to_f32(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
inline uint32_t f32_to_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
inline float f16_low_to_f32(uint32_t pair) {
    const uint16_t bits = static_cast<uint16_t>(pair);
    _Float16 x;
    std::memcpy(&x, &bits, 2);
    return static_cast<float>(x);
}
inline float f16_high_to_f32(uint32_t pair) { return f16_low_to_f32(pair >> 16); }
inline uint32_t f16_bits(float x) {
    const _Float16 h = static_cast<_Float16>(x);
    uint16_t bits;
    std::memcpy(&bits, &h, 2);
    return bits;
}
inline uint32_t bf16_bits(float x) {
    const uint32_t bits = f32_to_bits(x);
    if (std::isnan(x)) return 0x7FFF;
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}
inline uint32_t f32x2_to_f16x2(float low, float high) { return f16_bits(low) | f16_bits(high) << 16; }
inline uint32_t f32x2_to_bf16x2(float low, float high) { return bf16_bits(low) | bf16_bits(high) << 16; }
inline const std::vector<float> E4M3 = [] {
    std::vector<float> values;
    for (int byte = 0; byte < 127; ++byte) {
        const int exponent = byte >> 3, mantissa = byte & 7;
        values.push_back(exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10));
    }
    values.push_back(NAN);
    for (int byte = 0; byte < 128; ++byte) values.push_back(-values[byte]);
    return values;
}();
inline float e4m3_to_f32(uint32_t byte) { return E4M3[byte]; }
inline uint32_t e4m3x2_to_f16x2(uint32_t bytes) {
    return f32x2_to_f16x2(e4m3_to_f32(bytes & 0xFF), e4m3_to_f32((bytes >> 8) & 0xFF));
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }

inline double half_of(uint32_t pair, int high) { return high ? f16_high_to_f32(pair) : f16_low_to_f32(pair); }
template <typename F>
uint32_t each_half(F f) {
    uint32_t result = 0;
    for (int h = 0; h < 2; ++h) {
        const _Float16 x = static_cast<_Float16>(f(h));  // from fp64, which holds every product and sum
        uint16_t bits;
        std::memcpy(&bits, &x, 2);
        result |= static_cast<uint32_t>(bits) << (16 * h);
    }
    return result;
}
inline uint32_t mul_f16x2(uint32_t a, uint32_t b) {
    return each_half([=](int h) { return half_of(a, h) * half_of(b, h); });
}

inline uint32_t f32_to_e4m3(float x) {  // x >= 0
    if (std::isnan(x)) return 127;
    uint32_t byte = 0;
    while (byte < 126 && e4m3_to_f32(byte + 1) <= x) ++byte;
    if (byte == 126) return byte;
    const float below = x - e4m3_to_f32(byte), above = e4m3_to_f32(byte + 1) - x;
    return below > above || (below == above && byte % 2) ? byte + 1 : byte;
}
inline uint32_t f32x2_to_e4m3x2(float low, float high) { return f32_to_e4m3(low) | f32_to_e4m3(high) << 8; }
