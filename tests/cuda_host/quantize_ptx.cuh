// What the quantize kernels need besides cuda_host/ptx.cuh, to which the tests append this file.

struct __align__(16) float4 {
    float x, y, z, w;
};

inline int thread_index_again() { return threadIdx.x; }
inline void __syncwarp() {}
inline float __fsub_rn(float a, float b) { return a - b; }

inline void async_copy_16(uint32_t target, const void* source) { std::memcpy(shared_pointer(target), source, 16); }
inline void async_copies_commit() {}
inline void async_copies_wait() {}
inline void load_global(uint32_t (&x)[2], const void* source) { std::memcpy(x, source, 8); }
inline void load_global(Words4& x, const void* source) { std::memcpy(&x, source, 16); }
inline int64_t load_global_word(const int64_t* source) { return *source; }

// The hardware's is off by up to an ulp, and no result may depend on it
#ifndef HOST_RECIPROCAL_ERROR
#define HOST_RECIPROCAL_ERROR 0
#endif
inline float reciprocal_approximate(float x) { return bits_to_f32(f32_to_bits(1.f / x) + HOST_RECIPROCAL_ERROR); }

inline uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
    return each_half([=](int h) { return half_of(a, h) * half_of(b, h) + half_of(c, h); });
}
inline uint32_t min_f16x2(uint32_t a, uint32_t b) {
    return each_half([=](int h) { return std::fmin(half_of(a, h), half_of(b, h)); });
}
inline uint32_t max_f16x2(uint32_t a, uint32_t b) {
    return each_half([=](int h) { return std::fmax(half_of(a, h), half_of(b, h)); });
}
inline uint32_t max_magnitude_f16x2(uint32_t a, uint32_t b) {
    return max_f16x2(a & 0x7FFF7FFFu, b & 0x7FFF7FFFu) | ((a ^ b) & 0x80008000u);
}
inline uint32_t max_magnitude_bf16x2(uint32_t a, uint32_t b) {
    const auto high = [](uint32_t x) { return std::fabs(bits_to_f32(x & 0xFFFF0000u)); };
    return f32x2_to_bf16x2(std::fmax(high(a << 16), high(b << 16)), std::fmax(high(a), high(b))) | ((a ^ b) & 0x80008000u);
}
inline uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selectors) {
    const uint64_t both = a | static_cast<uint64_t>(b) << 32;
    uint32_t r = 0;
    for (int i = 0; i < 4; ++i) r |= static_cast<uint32_t>(both >> (8 * (selectors >> (4 * i) & 7)) & 0xFF) << (8 * i);
    return r;
}
