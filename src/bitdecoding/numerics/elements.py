"""FP4 elements and their block scales: E2M1, E4M3 and E8M0 codes.

Encoders take any floating-point tensor and compute in fp32; decoders return fp32. All are elementwise, keep the shape
and run on the device of their input. Source: OCP Microscaling Formats v1.0 (E2M1, E8M0), OCP FP8 v1.0 (E4M3).
"""

import torch

__all__ = [
    "E2M1_MAX",
    "E2M1_VALUES",
    "E4M3_MAX",
    "E8M0_BIAS",
    "E8M0_MAX_EXPONENT",
    "E8M0_MIN_EXPONENT",
    "decode_e2m1",
    "decode_e4m3",
    "decode_e8m0",
    "encode_e2m1",
    "encode_e4m3",
    "encode_e8m0",
    "floor_log2",
]

E2M1_VALUES: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes by index; a code is ``sign << 3 | index``."""
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E8M0_BIAS = 127
E8M0_MIN_EXPONENT = -127
E8M0_MAX_EXPONENT = 127


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Round to E2M1 codes (uint8, 0..15): to nearest, ties to the even index, saturating at ±6, -0 keeps its sign.

    Each binade is a uniform grid, so `torch.round` (ties to even) on the index does all the work.
    """
    x = x.float()
    a = x.abs()
    index = torch.where(a < 2, (2 * a).round(), torch.where(a < 4, 2 + a.round(), 4 + (a / 2).round()))
    return index.clamp_(max=7).to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << 3)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Values (fp32) of E2M1 codes 0..15; code 8 gives -0.0."""
    table = torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), dtype=torch.float32, device=codes.device)
    return table[codes.int()]


def encode_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Round to E4M3 bytes (uint8): to nearest even, saturating at ±448, never the NaN code for a finite input."""
    # Clamped first: torch's cast saturates or gives NaN above 464, depending on its version.
    return x.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """Values (fp32) of E4M3 bytes."""
    return codes.view(torch.float8_e4m3fn).float()


def encode_e8m0(exponent: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes (uint8) of integer exponents, clamped to [-127, 127]."""
    return (exponent.clamp(E8M0_MIN_EXPONENT, E8M0_MAX_EXPONENT) + E8M0_BIAS).to(torch.uint8)


def decode_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """Values 2^e (fp32) of E8M0 bytes 0..254, exact; byte 0 is the subnormal 2^-127. Byte 255 (NaN) decodes to NaN."""
    byte = codes.to(torch.int32)
    # 2^e is an fp32 whose exponent field is the byte itself, except at the two ends.
    bits = torch.where(byte == 0, 0x00400000, torch.where(byte == 255, 0x7FC00000, byte << 23))
    return bits.to(torch.int32).view(torch.float32)


def floor_log2(x: torch.Tensor) -> torch.Tensor:
    """floor(log2 |x|) (int32) read from the fp32 exponent bits; zero and subnormals give -127."""
    return ((x.float().contiguous().view(torch.int32) >> 23) & 0xFF) - 127
