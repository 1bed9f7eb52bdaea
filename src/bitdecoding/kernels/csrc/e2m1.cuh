// Decoding of a 32-bit word of 8 E2M1 codes.
#pragma once

struct ShiftLeft {
    __device__ __forceinline__ constexpr unsigned int operator()(unsigned int x, int n) const { return x << n; }
};

// Codes j and j + 4 of a word (Hopper bit order) as a pair of fp16, each value · 2^-14: placing sign and magnitude bits
// at bits 15 and 11..9 of a half gives exactly that, subnormals included. The factor is the caller's to fold in.
// Six LOP3 and five shifts for 8 codes. left(x, n) is x << n, by whatever means.
template <class Left = ShiftLeft>
__device__ __forceinline__ constexpr unsigned int decode_e2m1(unsigned int word, int j, const Left& left = Left()) {
    return j == 0   ? word & 0x8E008E00u
           : j == 1 ? left(word, 3) & 0x8E008E00u
           : j == 2 ? (left(word, 1) & 0x80008000u) | (left(word, 6) & 0x0E000E00u)
                    : (left(word, 2) & 0x80008000u) | (left(word, 9) & 0x0E000E00u);
}

// The same result from the plain nibble order (code i at bits 4i+3..4i), for code that is not worth another layout.
__device__ __forceinline__ constexpr unsigned int decode_e2m1_plain(unsigned int word, int j) {
    const unsigned int codes = word >> (4 * j);  // code j at bits 3..0, code j + 4 at bits 19..16
    return ((codes << 12) & 0x80008000u) | ((codes << 9) & 0x0E000E00u);
}
