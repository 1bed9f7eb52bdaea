"""LDLQ key rounding (ours, beyond the paper): round keys against what queries will ask of them.

The error of a rounded key x̂ is eᵀAe with A = E[q'q'ᵀ], the second moment of the rotated queries, instead of eᵀe. With
A = R·Rᵀ, R upper triangular, channels are rounded in order and each rounding error is fed forward to the channels after
it. Only the encoder changes: same bytes, same decode. Source: QuIP's LDLQ rounding, turned from weights to keys.
"""

from typing import NamedTuple

import torch

from bitdecoding.errors import InvalidInputError
from bitdecoding.numerics.blocks import (
    BlockFormat,
    QuantizedBlocks,
    ScaleRule,
    candidate_scales,
    check_blocks,
    decode_scales,
    encode_against,
)
from bitdecoding.numerics.elements import decode_e2m1
from bitdecoding.numerics.validation import check_finite

__all__ = ["DEFAULT_DAMPING", "LdlqFactors", "ldlq_factors", "quantize_blocks_ldlq"]

DEFAULT_DAMPING = 0.5
"""λ: 0.02 overfits where A is nearly low-rank; 0.5 costs nothing elsewhere."""


class LdlqFactors(NamedTuple):
    """Feed-forward ``c``, strictly upper R_ij/R_jj (fp32 [..., head_dim, head_dim]), and weights ``d`` = R_jj²."""

    c: torch.Tensor
    d: torch.Tensor


def ldlq_factors(second_moment: torch.Tensor, damping: float = DEFAULT_DAMPING) -> LdlqFactors:
    """Factor A + λ·mean(diag A)·I = R·Rᵀ with R upper triangular.

    Args:
        second_moment: A [..., head_dim, head_dim], symmetric positive semidefinite.
        damping: λ > 0.

    Returns:
        `LdlqFactors` in fp32 on the device of ``second_moment``; the factorisation runs in fp64. An all-zero A gives
        plain rounding (C = 0, D = 1).

    Raises:
        InvalidInputError: NaN, not square, ``damping`` not positive, or A not positive semidefinite.
    """
    check_finite("second_moment", second_moment)
    if second_moment.dim() < 2 or second_moment.shape[-1] != second_moment.shape[-2]:
        raise InvalidInputError(f"second_moment: expected [..., d, d], got {tuple(second_moment.shape)}")
    if not 0 < damping < torch.inf:
        raise InvalidInputError(f"damping: must be positive and finite, got {damping}")
    a = second_moment.double()
    # Only one triangle is factored, and damping can hide a negative diagonal.
    if not torch.allclose(a, a.transpose(-1, -2), rtol=1e-3, atol=1e-3 * float(a.abs().max()) if a.numel() else 0.0):
        raise InvalidInputError("second_moment: not symmetric; it must be a mean of outer products q·qᵀ")
    if bool((a.diagonal(dim1=-2, dim2=-1) < 0).any()):
        raise InvalidInputError("second_moment: negative on the diagonal; it must be a mean of outer products q·qᵀ")
    mean_diagonal = a.diagonal(dim1=-2, dim2=-1).mean(-1)
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    zero = (mean_diagonal == 0)[..., None, None]
    a = torch.where(zero, eye, a + damping * mean_diagonal[..., None, None] * eye)
    # Reversing rows and columns turns the lower Cholesky factor into an upper one.
    lower, info = torch.linalg.cholesky_ex(a.flip(-1, -2))
    if bool((info != 0).any()):
        raise InvalidInputError("second_moment: not positive semidefinite; it must be a mean of outer products q·qᵀ")
    upper = lower.flip(-1, -2)
    diagonal = upper.diagonal(dim1=-2, dim2=-1)
    c = (upper / diagonal.unsqueeze(-2)).triu(1)
    return LdlqFactors(c.float(), diagonal.square().float())


def quantize_blocks_ldlq(
    x: torch.Tensor,
    factors: LdlqFactors,
    fmt: BlockFormat | str = BlockFormat.NVFP4,
    rule: ScaleRule | str | None = None,
) -> QuantizedBlocks:
    """Quantize key rows to FP4 along the last dim with error feed-forward.

    Args:
        x: rotated keys [..., rows, head_dim]; leading dims broadcast against those of the factors.
        factors: `LdlqFactors` with c [..., head_dim, head_dim], d [..., head_dim].
        fmt: ``"nvfp4"`` or ``"mxfp4"``.
        rule: scale rule whose candidates are tried; default the format's search rule.

    Returns:
        `QuantizedBlocks`, as `quantize_blocks` along the last dim.

    Raises:
        InvalidInputError: NaN or Inf, head_dim no multiple of the block or different from the factors'.
    """
    fmt = BlockFormat(fmt)
    rule = fmt.search_rule if rule is None else ScaleRule(rule)
    check_finite("x", x)
    check_blocks("x", x, fmt, -1)
    head_dim, size = x.shape[-1], fmt.block_size
    if factors.c.shape[-2:] != (head_dim, head_dim) or factors.d.shape[-1] != head_dim:
        raise InvalidInputError(f"factors: made for head_dim {factors.d.shape[-1]}, x has head_dim {head_dim}")
    c, d = factors.c.to(x.device), factors.d.to(x.device)
    x = x.float().expand(*torch.broadcast_shapes(x.shape[:-2], c.shape[:-2]), *x.shape[-2:])
    error = torch.zeros_like(x)
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scale_bytes = torch.empty(*x.shape[:-1], head_dim // size, dtype=torch.uint8, device=x.device)
    for block, start in enumerate(range(0, head_dim, size)):
        span = slice(start, start + size)
        target = x[..., span]
        if start:
            target = target - error[..., :start] @ c[..., :start, span]
        amax = target.abs().amax(-1)
        candidates = torch.stack(candidate_scales(amax, fmt, rule))
        # Scale 0 makes every code of a zero block 0, also of -0 under MXFP4, whose byte 0 is not a zero scale.
        scales = torch.where(amax == 0, 0.0, decode_scales(candidates, fmt))
        tried_codes, tried_error, cost = _round_block(x[..., span], target, scales, c[..., span, span], d[..., span])
        # argmin takes the first of equals: a later candidate must be strictly better.
        best = cost.argmin(0, keepdim=True)
        codes[..., span] = tried_codes.take_along_dim(best.unsqueeze(-1), 0)[0]
        error[..., span] = tried_error.take_along_dim(best.unsqueeze(-1), 0)[0]
        scale_bytes[..., block] = candidates.take_along_dim(best, 0)[0]
    return QuantizedBlocks(codes, scale_bytes, decode_scales(scale_bytes, fmt))


def _round_block(
    x: torch.Tensor, target: torch.Tensor, scales: torch.Tensor, inner: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round one block channel by channel under several candidate scales at once.

    Args:
        x, target: the block and the block less the feed-forward of earlier blocks, [..., rows, size].
        scales: [candidates, ..., rows].
        inner: feed-forward within the block [..., size, size]; leading dims broadcast against those of ``x``.
        weight: D of the block's channels [..., size].

    Returns:
        Codes and errors against x [candidates, ..., rows, size], and costs [candidates, ..., rows].
    """
    *leading, _, size = x.shape
    inner = inner.expand(*leading, size, size)
    weight = weight.expand(*leading, size)
    # Channels first, so that every step works on contiguous memory.
    channels = x.movedim(-1, 0)
    # u_j less the feed-forward of the channels of this block rounded so far
    pending = target.movedim(-1, 0).unsqueeze(1).expand(size, *scales.shape).contiguous()
    codes = torch.empty_like(pending, dtype=torch.uint8)
    error = torch.empty_like(pending)
    cost = torch.zeros_like(scales)
    for j in range(size):
        t = pending[j]
        codes[j] = encode_against(t, scales)
        value = scales * decode_e2m1(codes[j])
        error[j] = value - channels[j]
        cost += weight[..., j, None] * (value - t).square()
        if j + 1 < size:
            pending[j + 1 :] -= error[j] * inner[..., j, j + 1 :].movedim(-1, 0)[:, None, ..., None]
    return codes.movedim(0, -1), error.movedim(0, -1), cost
