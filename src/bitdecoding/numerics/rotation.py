"""Orthogonal rotations of the channels of one head: Walsh-Hadamard, block-diagonal, with random signs, or random.

Keys and queries are multiplied by the same orthogonal matrix R, which leaves their products unchanged and spreads
outlier channels over all. Source: paper Sec. 4 (key smoothing and Hadamard rotation).
"""

from functools import lru_cache

import torch

from bitdecoding.errors import InvalidInputError
from bitdecoding.numerics.validation import check_floating

__all__ = [
    "apply_signs",
    "hadamard_block",
    "hadamard_matrix",
    "hadamard_signs",
    "hadamard_transform",
    "random_rotation",
]


def hadamard_block(head_dim: int) -> int:
    """Largest power of two 2^a that divides head_dim = 2^a·odd: the block of the block-diagonal I_odd ⊗ H_{2^a}."""
    if head_dim < 1:
        raise InvalidInputError(f"head_dim: must be positive, got {head_dim}")
    return head_dim & -head_dim


def hadamard_transform(x: torch.Tensor, block: int | None = None) -> torch.Tensor:
    """Multiply the last dim by the normalised Walsh-Hadamard matrix (Sylvester order); its own inverse.

    Args:
        x: floating point [..., head_dim].
        block: size of the diagonal blocks, a power of two dividing head_dim; default `hadamard_block`.

    Returns:
        Fp32 tensor of the same shape. Butterflies run in fp32 with strides 1, 2, 4, ... and one final product with
        1/sqrt(block), a fixed order of additions on every device.
    """
    check_floating("x", x)
    if x.dim() == 0:
        raise InvalidInputError("x: expected [..., head_dim], got a scalar")
    head_dim = x.shape[-1]
    block = hadamard_block(head_dim) if block is None else block
    if block < 1 or block & (block - 1) or head_dim % block:
        raise InvalidInputError(f"block: {block} is not a power of two that divides head_dim {head_dim}")
    y = x.float()
    stride = 1
    while stride < block:
        pairs = y.reshape(*x.shape[:-1], head_dim // (2 * stride), 2, stride)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack((low + high, low - high), dim=-2).reshape(x.shape)
        stride *= 2
    return y * block**-0.5


def hadamard_matrix(head_dim: int, block: int | None = None) -> torch.Tensor:
    """The matrix H [head_dim, head_dim] (fp32, symmetric) that `hadamard_transform` multiplies by."""
    return hadamard_transform(torch.eye(head_dim), block)


@lru_cache(maxsize=64)
def hadamard_signs(head_dim: int, seed: int) -> torch.Tensor:
    """Random ±1 per channel (fp32 [head_dim], CPU) drawn from ``seed``; H·diag(signs) is a randomised Hadamard."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (head_dim,), generator=generator).float() * 2 - 1


def apply_signs(x: torch.Tensor, seed: int | None) -> torch.Tensor:
    """Flip channels of ``x`` [..., head_dim] by `hadamard_signs`; unchanged when ``seed`` is None."""
    return x if seed is None else x * hadamard_signs(x.shape[-1], seed).to(x.device)


@lru_cache(maxsize=64)
def random_rotation(head_dim: int, seed: int) -> torch.Tensor:
    """A Haar-random orthogonal matrix (fp32 [head_dim, head_dim], CPU) drawn from ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    q, r = torch.linalg.qr(torch.randn(head_dim, head_dim, generator=generator, dtype=torch.float64))
    return (q * r.diagonal().sign()).float()
