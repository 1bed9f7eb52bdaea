// The normalised Walsh-Hadamard transform of one head, bit for bit as bitdecoding.numerics.rotation has it.
#pragma once

#include "ptx.cuh"

// fp32 of D^-0.5; 64 and 256 are exact.
__device__ __forceinline__ constexpr float hadamard_norm(int dim) {
    return dim == 64 ? 0.125f : dim == 128 ? 0.08838834764831845f : 0.0625f;
}

// Lane l owns channels l·(D/32) .. of a row. Butterflies with strides 1, 2, 4, ..., then one product with D^-0.5.
template <int D>
__device__ __forceinline__ void warp_hadamard(float (&x)[D / 32], int lane) {
    static_assert(D == 64 || D == 128 || D == 256, "head_dim");
    constexpr int OWN = D / 32;
#pragma unroll
    for (int stride = 1; stride < OWN; stride *= 2)
#pragma unroll
        for (int i = 0; i < OWN; ++i)
            if (!(i & stride)) {
                const float low = x[i], high = x[i + stride];
                x[i] = low + high;
                x[i + stride] = low - high;
            }
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2)
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const float other = __shfl_xor_sync(0xFFFFFFFFu, x[i], distance);
            x[i] = lane & distance ? other - x[i] : x[i] + other;
        }
    constexpr float NORM = hadamard_norm(D);
#pragma unroll
    // Never contracted with what the caller subtracts
    for (int i = 0; i < OWN; ++i) x[i] = __fmul_rn(x[i], NORM);
}
