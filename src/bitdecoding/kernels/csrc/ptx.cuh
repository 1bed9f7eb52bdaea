// PTX instructions behind plain functions. No CUDA header is included anywhere: NVRTC's wheel ships none.
#pragma once

typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;

struct __align__(16) Words4 {
    uint32_t x[4];
};

// --- Shared memory, bulk copies and barriers

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    uint64_t address;
    asm("cvta.to.shared.u64 %0, %1;" : "=l"(address) : "l"(pointer));
    return static_cast<uint32_t>(address);
}

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the bulk copy engine; before the first copy.
__device__ __forceinline__ void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    do {
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n"
            "}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!done);
}

// Orders this thread's stores to shared memory before later bulk copies to the same place.
__device__ __forceinline__ void fence_shared_for_bulk_copies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Cache policy of data that is read once: what else is in L2 stays there.
__device__ __forceinline__ uint64_t evict_first_policy() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Copies bytes (a multiple of 16, both addresses aligned to 16) and completes on the barrier.
__device__ __forceinline__ void bulk_copy(uint32_t target, const void* source, uint32_t bytes, uint32_t barrier,
                                          uint64_t policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            target),
        "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_transposed(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// Stores the transposes of four 8x8 matrices of 16-bit elements, of each of which a lane holds two of a row. Lanes
// 8i..8i+7 give the addresses of the rows stored of matrix i.
__device__ __forceinline__ void stmatrix_x4_transposed(uint32_t address, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

// Transposes an 8x8 matrix of 16-bit elements that the warp holds, two of a row in each lane.
__device__ __forceinline__ uint32_t movmatrix(uint32_t x) {
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// --- Tensor cores

__device__ __forceinline__ void mma_f16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                        uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_bf16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                         uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// --- Barriers of some warps of a CTA, and loads that see other CTAs' stores

__device__ __forceinline__ void named_barrier(uint32_t id, uint32_t threads) {
    asm volatile("barrier.sync.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void load_l2(float (&x)[4], const float* p) {
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "l"(p)
                 : "memory");
}

__device__ __forceinline__ void load_l2(float (&x)[2], const float* p) {
    asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(x[0]), "=f"(x[1]) : "l"(p) : "memory");
}

__device__ __forceinline__ void store_f32x4(float* p, const float (&x)[4]) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
                 : "memory");
}

// A load that stays where it is written, so that its registers are not taken long before.
__device__ __forceinline__ Words4 load_in_place(const void* p) {
    Words4 r;
    asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x[0]), "=r"(r.x[1]), "=r"(r.x[2]), "=r"(r.x[3])
                 : "l"(p)
                 : "memory");
    return r;
}

// --- Arithmetic

// 2^x to about 2 ulp; 0 for -inf.
__device__ __forceinline__ float exp2_fast(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// 1 / x to about 1 ulp.
__device__ __forceinline__ float reciprocal_fast(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// --- Conversions; a pair is two 16-bit values in a word, the first in the low half

__device__ __forceinline__ uint32_t mul_f16x2(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

// The low (high) half of a pair twice; the compiler makes it an operand modifier of fp16 instructions, at no cost.
__device__ __forceinline__ uint32_t both_low(uint32_t pair) {
    uint32_t r;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {low, low};\n}" : "=r"(r) : "r"(pair));
    return r;
}

__device__ __forceinline__ uint32_t both_high(uint32_t pair) {
    uint32_t r;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {high, high};\n}" : "=r"(r) : "r"(pair));
    return r;
}

// Two E4M3 bytes to a pair of fp16, exact.
__device__ __forceinline__ uint32_t e4m3x2_to_f16x2(uint32_t bytes) {
    uint32_t r;
    asm("{\n.reg .b16 t;\ncvt.u16.u32 t, %1;\ncvt.rn.f16x2.e4m3x2 %0, t;\n}" : "=r"(r) : "r"(bytes));
    return r;
}

__device__ __forceinline__ float f16_low_to_f32(uint32_t pair) {
    float r;
    asm("{\n.reg .b16 t;\ncvt.u16.u32 t, %1;\ncvt.f32.f16 %0, t;\n}" : "=f"(r) : "r"(pair));
    return r;
}

__device__ __forceinline__ float f16_high_to_f32(uint32_t pair) {
    return f16_low_to_f32(pair >> 16);
}

__device__ __forceinline__ uint32_t f32x2_to_f16x2(float low, float high) {
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

__device__ __forceinline__ uint32_t f32x2_to_bf16x2(float low, float high) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

__device__ __forceinline__ float bits_to_f32(uint32_t bits) {
    float r;
    asm("mov.b32 %0, %1;" : "=f"(r) : "r"(bits));
    return r;
}

__device__ __forceinline__ uint32_t f32_to_bits(float x) {
    uint32_t r;
    asm("mov.b32 %0, %1;" : "=r"(r) : "f"(x));
    return r;
}

// To nearest even, saturating at 448.
__device__ __forceinline__ uint32_t f32_to_e4m3(float x) {
    uint32_t r;
    asm("{\n.reg .b16 t;\ncvt.rn.satfinite.e4m3x2.f32 t, %1, %2;\ncvt.u32.u16 %0, t;\n}" : "=r"(r) : "f"(0.f), "f"(x));
    return r;
}

// Two values to E4M3 bytes, to nearest even, saturating at 448.
__device__ __forceinline__ uint32_t f32x2_to_e4m3x2(float low, float high) {
    uint32_t r;
    asm("{\n.reg .b16 t;\ncvt.rn.satfinite.e4m3x2.f32 t, %1, %2;\ncvt.u32.u16 %0, t;\n}" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

// --- Arithmetic on pairs of 16-bit values, and an approximate reciprocal (1 ulp)

__device__ __forceinline__ uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t r;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

// The one that is a number, where the other is NaN.
__device__ __forceinline__ uint32_t min_f16x2(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("min.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

__device__ __forceinline__ uint32_t max_f16x2(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("max.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

// max(|a|, |b|) with the sign of a · b.
__device__ __forceinline__ uint32_t max_magnitude_f16x2(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("max.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

__device__ __forceinline__ uint32_t max_magnitude_bf16x2(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

__device__ __forceinline__ float reciprocal_approximate(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// Bytes of two words by the four selectors of `prmt`.
__device__ __forceinline__ uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selectors) {
    uint32_t r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selectors));
    return r;
}

// --- Asynchronous copies of 16 bytes to shared memory, completed in groups of the thread

__device__ __forceinline__ void async_copy_16(uint32_t target, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}

__device__ __forceinline__ void async_copies_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

__device__ __forceinline__ void async_copies_wait() {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
}

// --- Loads from global memory through addresses that the compiler cannot tell the space of

__device__ __forceinline__ void load_global(uint32_t (&x)[2], const void* source) {
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "l"(source) : "memory");
}

__device__ __forceinline__ void load_global(Words4& x, const void* source) {
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x[0]), "=r"(x.x[1]), "=r"(x.x[2]), "=r"(x.x[3])
                 : "l"(source)
                 : "memory");
}

__device__ __forceinline__ int64_t load_global_word(const int64_t* source) {
    int64_t x;
    asm volatile("ld.global.s64 %0, [%1];" : "=l"(x) : "l"(source) : "memory");
    return x;
}

// threadIdx.x, read anew: what follows from it is computed where it is used instead of taking registers before.
__device__ __forceinline__ int thread_index_again() {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}
