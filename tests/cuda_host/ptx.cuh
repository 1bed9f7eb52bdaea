// CUDA kernels on the CPU, for tests of their logic: stands in for csrc/ptx.cuh. Threads are fibers that switch at
// barriers only, in an order that a seed permutes; a result that depends on the seed shows a race between phases.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __shared__ static
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

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    bool done = false;
};

struct Barrier {
    int alive = 0, arrived = 0, generation = 0;
    void release_if_complete() {
        if (alive > 0 && arrived == alive) arrived = 0, ++generation;
    }
};

inline Index thread_index, block_index, block_dim, grid_dim;
inline std::vector<Fiber> fibers;
inline std::vector<Barrier> warps;
inline Barrier cta;
inline ucontext_t scheduler;
inline int current;
inline u64 exchange[64][32];
inline std::function<void()> body;
alignas(128) inline char dynamic_shared[256 * 1024];

inline void pause() { swapcontext(&fibers[current].context, &scheduler); }

inline void wait(Barrier& barrier) {
    const int generation = barrier.generation;
    ++barrier.arrived;
    barrier.release_if_complete();
    while (barrier.generation == generation) pause();
}

inline void run_fiber() {
    body();
    Fiber& fiber = fibers[current];
    fiber.done = true;
    for (Barrier* barrier : {&cta, &warps[current / 32]}) {
        --barrier->alive;
        barrier->release_if_complete();
    }
    pause();
}

inline void run_cta(int threads, std::mt19937& random) {
    constexpr int STACK = 64 * 1024;
    if (static_cast<int>(fibers.size()) < threads) fibers.resize(threads);
    warps.assign((threads + 31) / 32, Barrier());
    cta = Barrier();
    std::vector<int> order(threads);
    std::iota(order.begin(), order.end(), 0);
    for (int i : order) {
        Fiber& fiber = fibers[i];
        if (!fiber.stack) fiber.stack.reset(new char[STACK]);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, run_fiber, 0);
        fiber.done = false;
        ++cta.alive;
        ++warps[i / 32].alive;
    }
    std::memset(dynamic_shared, 0xA5, sizeof dynamic_shared);
    for (bool busy = true; busy;) {
        busy = false;
        std::shuffle(order.begin(), order.end(), random);
        for (int i : order)
            if (!fibers[i].done) {
                busy = true;
                current = i;
                thread_index = {static_cast<unsigned>(i), 0, 0};
                swapcontext(&scheduler, &fibers[i].context);
            }
    }
}

template <class... A, size_t... I>
void launch(void (*kernel)(A...), const int* grid, int threads, unsigned seed, void** arguments,
            std::index_sequence<I...>) {
    std::mt19937 random(seed);
    body = [=] { kernel(*static_cast<std::remove_reference_t<A>*>(arguments[I])...); };
    block_dim = {static_cast<unsigned>(threads), 1, 1};
    grid_dim = {static_cast<unsigned>(grid[0]), static_cast<unsigned>(grid[1]), static_cast<unsigned>(grid[2])};
    for (int z = 0; z < grid[2]; ++z)
        for (int y = 0; y < grid[1]; ++y)
            for (int x = 0; x < grid[0]; ++x) {
                block_index = {static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z)};
                run_cta(threads, random);
            }
}

template <class... A>
void launch(void (*kernel)(A...), const int* grid, int threads, unsigned seed, void** arguments) {
    launch(kernel, grid, threads, seed, arguments, std::index_sequence_for<A...>());
}

template <class T>
T shuffle_xor(T x, int mask) {
    const int warp = current / 32, lane = current % 32;
    std::memcpy(&exchange[warp][lane], &x, sizeof x);
    wait(warps[warp]);
    T y;
    std::memcpy(&y, &exchange[warp][lane ^ mask], sizeof y);
    wait(warps[warp]);
    return y;
}

}  // namespace host

#define threadIdx host::thread_index
#define blockIdx host::block_index
#define blockDim host::block_dim
#define gridDim host::grid_dim

inline void __syncthreads() { host::wait(host::cta); }
template <class T>
T __shfl_xor_sync(unsigned, T x, int mask) {
    return host::shuffle_xor(x, mask);
}
inline unsigned __ballot_sync(unsigned, bool x) {
    const int warp = host::current / 32, lane = host::current % 32;
    host::exchange[warp][lane] = x;
    host::wait(host::warps[warp]);
    unsigned votes = 0;
    for (int i = 0; i < 32; ++i) votes |= static_cast<unsigned>(host::exchange[warp][i]) << i;
    host::wait(host::warps[warp]);
    return votes;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
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
    const int lane = host::current % 32, warp = host::current / 32;
    static uint32_t addresses[64][32];
    addresses[warp][lane] = address;
    host::wait(host::warps[warp]);
    for (int i = 0; i < 4; ++i)
        for (int e = 0; e < 2; ++e) {
            const uint16_t x = static_cast<uint16_t>(r[i] >> (16 * e));
            std::memcpy(shared_pointer(addresses[warp][8 * i + 2 * (lane % 4) + e]) + 2 * (lane / 4), &x, 2);
        }
    host::wait(host::warps[warp]);
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
inline float e4m3_to_f32(uint32_t byte) {
    const int exponent = (byte >> 3) & 15, mantissa = byte & 7;
    if ((byte & 0x7F) == 0x7F) return NAN;
    const float x = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
    return byte & 0x80 ? -x : x;
}
inline uint32_t e4m3x2_to_f16x2(uint32_t bytes) {
    return f32x2_to_f16x2(e4m3_to_f32(bytes & 0xFF), e4m3_to_f32((bytes >> 8) & 0xFF));
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
