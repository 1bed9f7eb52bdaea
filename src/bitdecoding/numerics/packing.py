"""Two 4-bit codes a byte, the lower index in the low nibble (logical order; a kernel's page layout may permute it)."""

import torch

from bitdecoding.errors import InvalidInputError

__all__ = ["pack_nibbles", "unpack_nibbles"]


def pack_nibbles(codes: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Pack uint8 codes 0..15 two to a byte along ``dim``: [..., n, ...] -> [..., n/2, ...].

    Raises `InvalidInputError` for another dtype, an odd length or codes above 15.
    """
    if codes.dtype != torch.uint8:
        raise InvalidInputError(f"codes: expected uint8, got {codes.dtype}")
    if codes.shape[dim] % 2:
        raise InvalidInputError(f"codes: length {codes.shape[dim]} along dim {dim} is odd; two codes share a byte")
    if codes.numel() and int(codes.max()) > 15:
        raise InvalidInputError(f"codes: {int(codes.max())} does not fit 4 bits; codes are 0..15")
    pairs = codes.movedim(dim, -1)
    return (pairs[..., 0::2] | (pairs[..., 1::2] << 4)).movedim(-1, dim)


def unpack_nibbles(packed: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Exact inverse of `pack_nibbles`: uint8 [..., n/2, ...] -> uint8 codes [..., n, ...]."""
    if packed.dtype != torch.uint8:
        raise InvalidInputError(f"packed: expected uint8, got {packed.dtype}")
    packed = packed.movedim(dim, -1)
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).movedim(-1, dim)
