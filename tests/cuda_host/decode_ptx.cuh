// What the decode kernel needs besides cuda_host/ptx.cuh, behind which the build puts this file.

inline void __syncwarp() { host::wait_for_warp(); }
inline void __threadfence() {}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selectors) {
    const u64 both = a | static_cast<u64>(b) << 32;
    uint32_t r = 0;
    for (int i = 0; i < 4; ++i) r |= static_cast<uint32_t>(both >> (8 * (selectors >> (4 * i) & 7)) & 0xFF) << (8 * i);
    return r;
}

// --- Barriers and bulk copies

namespace host {

struct MBarrier {
    uint16_t phase, expected, pending;
    uint16_t valid;
    static constexpr uint16_t VALID = 0xBA55;
};
static_assert(sizeof(MBarrier) == 8, "a barrier is one word");

// Bytes that a barrier's phase still waits for; beside it, as they may be negative for a while
inline std::vector<std::pair<uint32_t, i64>> bytes_awaited;

inline i64& bytes_of(uint32_t barrier) {
    for (auto& [address, bytes] : bytes_awaited)
        if (address == barrier) return bytes;
    bytes_awaited.emplace_back(barrier, 0);
    return bytes_awaited.back().second;
}

inline MBarrier& mbarrier(uint32_t address) {
    MBarrier& barrier = *reinterpret_cast<MBarrier*>(shared_pointer(address));
    require(barrier.valid == MBarrier::VALID, "a barrier is used that was not initialised, or was overwritten");
    return barrier;
}

inline void complete_if_due(uint32_t address) {
    MBarrier& barrier = *reinterpret_cast<MBarrier*>(shared_pointer(address));
    if (barrier.pending || bytes_of(address)) return;
    barrier.phase ^= 1;
    barrier.pending = barrier.expected;
}

inline bool is_complete(const void* barrier, unsigned parity) {
    return static_cast<const MBarrier*>(barrier)->phase != parity;
}

}  // namespace host

inline void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
    const uint16_t count = static_cast<uint16_t>(arrivals);
    *reinterpret_cast<host::MBarrier*>(shared_pointer(barrier)) = {0, count, count, host::MBarrier::VALID};
    host::bytes_of(barrier) = 0;
}
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
    host::MBarrier& b = host::mbarrier(barrier);
    host::require(b.pending > 0, "more arrivals in a phase than its barrier expects");
    host::bytes_of(barrier) += bytes;
    --b.pending;
    host::complete_if_due(barrier);
}
inline void mbarrier_arrive(uint32_t barrier) { mbarrier_arrive_expect(barrier, 0); }
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    const host::MBarrier& b = host::mbarrier(barrier);
    if (!host::is_complete(&b, parity)) host::pause({host::is_complete, &b, parity});
}

inline uint64_t evict_first_policy() { return 0; }
inline void fence_shared_for_bulk_copies() {}

// Reads and writes at some later time; till then the target holds NaN
inline void bulk_copy(uint32_t target, const void* source, uint32_t bytes, uint32_t barrier, uint64_t) {
    const bool aligned = (target | bytes | reinterpret_cast<uintptr_t>(source)) % 16 == 0;
    host::require(aligned, "a copy is not aligned to 16 bytes");
    std::memset(shared_pointer(target), host::POISON, bytes);
    host::events.push_back([=] {
        std::memcpy(shared_pointer(target), source, bytes);
        host::bytes_of(barrier) -= bytes;
        host::complete_if_due(barrier);
    });
}

inline void named_barrier(uint32_t id, uint32_t threads) {
    host::Barrier& barrier = host::named[id];
    host::require(barrier.arrived == 0 || barrier.alive == static_cast<int>(threads), "a barrier of two sizes");
    barrier.alive = threads;
    host::wait(barrier);
}

// --- Global memory

inline void load_l2(float (&x)[4], const float* p) { std::memcpy(x, p, 16); }
inline void load_l2(float (&x)[2], const float* p) { std::memcpy(x, p, 8); }
inline void store_f32x4(float* p, const float (&x)[4]) { std::memcpy(p, x, 16); }

// --- Matrices. An 8x8 matrix of 16-bit elements: lane 4g + t holds row g, columns 2t and 2t + 1

inline uint32_t movmatrix(uint32_t x) {
    const u64* all = host::share(host::ALL_LANES, x);
    const int g = host::current % 32 / 4, t = host::current % 4;
    const auto element = [=](int row, int column) {
        return static_cast<uint32_t>(all[4 * row + column / 2] >> (16 * (column % 2)) & 0xFFFF);
    };
    return element(2 * t, g) | element(2 * t + 1, g) << 16;
}

inline void ldmatrix_x4_transposed(uint32_t (&r)[4], uint32_t address) {
    const u64* addresses = host::share(host::ALL_LANES, address);
    const int g = host::current % 32 / 4, t = host::current % 4;
    for (int i = 0; i < 4; ++i) {
        uint16_t pair[2];
        for (int e = 0; e < 2; ++e)
            std::memcpy(&pair[e], shared_pointer(static_cast<uint32_t>(addresses[8 * i + 2 * t + e])) + 2 * g, 2);
        r[i] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
    }
}

namespace host {

// c += A·B, m16n8k16; products and their sum are exact or nearly so
template <class Low>
void multiply(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Low low) {
    Lanes& lanes = lanes_of(ALL_LANES);
    auto& [left, right] = lanes.operands[lanes.barrier.generation % 2];
    const int g = current % 32 / 4, t = current % 4;
    for (int i = 0; i < 4; ++i)
        for (int e = 0; e < 2; ++e) left[g + 8 * (i % 2)][2 * t + e + 8 * (i / 2)] = low(a[i] >> (16 * e));
    for (int i = 0; i < 2; ++i)
        for (int e = 0; e < 2; ++e) right[2 * t + e + 8 * i][g] = low(b[i] >> (16 * e));
    wait(lanes.barrier);
    for (int i = 0; i < 4; ++i) {
        double sum = c[i];
        for (int k = 0; k < 16; ++k) sum += static_cast<double>(left[g + 8 * (i / 2)][k]) * right[k][2 * t + i % 2];
        c[i] = static_cast<float>(sum);
    }
}

}  // namespace host

inline void mma_f16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    host::multiply(c, {a0, a1, a2, a3}, {b0, b1}, [](uint32_t x) { return f16_low_to_f32(x); });
}
inline void mma_bf16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    host::multiply(c, {a0, a1, a2, a3}, {b0, b1}, [](uint32_t x) { return bits_to_f32(x << 16); });
}

// --- Arithmetic

inline float flush(float x) { return std::fabs(x) < 0x1p-126f ? 0.f : x; }
inline float exp2_fast(float x) { return flush(std::exp2(x)); }
inline float reciprocal_fast(float x) { return flush(1.f / x); }
inline uint32_t both_low(uint32_t pair) { return (pair & 0xFFFF) * 0x10001u; }
inline uint32_t both_high(uint32_t pair) { return (pair >> 16) * 0x10001u; }
