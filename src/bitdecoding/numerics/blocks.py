"""Block quantizers: NVFP4 (16 elements, E4M3 scale) and MXFP4 (32 elements, E8M0 scale) with every scale rule.

A block's scale is rounded to its format first and the codes are computed against the rounded scale with a true fp32
division. The error that the searching rules minimise is summed in fp32 by a binary tree over neighbours, so that
every implementation can reproduce it bit for bit.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from bitdecoding.errors import InvalidInputError
from bitdecoding.names import Choice
from bitdecoding.numerics.elements import (
    E2M1_MAX,
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    encode_e8m0,
    floor_log2,
)
from bitdecoding.numerics.validation import check_finite

__all__ = [
    "BlockFormat",
    "QuantizedBlocks",
    "ScaleRule",
    "candidate_scales",
    "decode_blocks",
    "decode_scales",
    "dequantize_blocks",
    "encode_against",
    "quantize_blocks",
    "quantize_dequantize",
    "tree_sum",
]


class BlockFormat(Choice):
    """A microscaling FP4 format."""

    NVFP4 = "nvfp4"
    MXFP4 = "mxfp4"

    @property
    def block_size(self) -> int:
        """Elements that share a scale."""
        return 16 if self is BlockFormat.NVFP4 else 32

    @property
    def rules(self) -> tuple["ScaleRule", ...]:
        """Scale rules that this format knows."""
        return _RULES[self]

    @property
    def standard_rule(self) -> "ScaleRule":
        """The rule of the format's specification, used for values and queries."""
        return self.rules[0]

    @property
    def search_rule(self) -> "ScaleRule":
        """The rule that tries two scales a block and keeps the better, used for keys."""
        return ScaleRule.FOUR_OVER_SIX if self is BlockFormat.NVFP4 else ScaleRule.SEARCH


class ScaleRule(Choice):
    """How a block's scale follows from its largest magnitude ``amax``."""

    MAX6 = "max6"
    """NVFP4 standard: E4M3(amax/6)."""
    MAX4 = "max4"
    """NVFP4: E4M3(amax/4)."""
    MAX2 = "max2"
    """NVFP4: E4M3(amax/2), for blocks whose scale would underflow."""
    FOUR_OVER_SIX = "4over6"
    """NVFP4: the better of max6 and max4 by squared error; max4 only when strictly better."""
    OCP = "ocp"
    """MXFP4 standard: 2^(floor(log2 amax) - 2); a block maximum above 6·scale clips."""
    UP = "up"
    """MXFP4: the smallest power of two that does not clip the maximum."""
    SEARCH = "search"
    """MXFP4: the better of the OCP exponent and the next; the next only when strictly better."""


_RULES = {
    BlockFormat.NVFP4: (ScaleRule.MAX6, ScaleRule.MAX4, ScaleRule.MAX2, ScaleRule.FOUR_OVER_SIX),
    BlockFormat.MXFP4: (ScaleRule.OCP, ScaleRule.UP, ScaleRule.SEARCH),
}
_DIVISOR = {ScaleRule.MAX6: 6.0, ScaleRule.MAX4: 4.0, ScaleRule.MAX2: 2.0}


class QuantizedBlocks(NamedTuple):
    """A block-quantized tensor.

    ``codes``: uint8 E2M1 codes (0..15), one a byte, shape of the input. ``scale_bytes``: uint8 E4M3 or E8M0 bytes, one
    a block, the blocked dim divided by the block size. ``scales``: their fp32 values.
    """

    codes: torch.Tensor
    scale_bytes: torch.Tensor
    scales: torch.Tensor


def tree_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum the last dim (a power of two) by adding neighbours pairwise: the fixed fp32 order of all block errors."""
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x.squeeze(-1)


def decode_scales(scale_bytes: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    """Fp32 values of scale bytes of the format."""
    return decode_e4m3(scale_bytes) if fmt is BlockFormat.NVFP4 else decode_e8m0(scale_bytes)


def candidate_scales(amax: torch.Tensor, fmt: BlockFormat, rule: ScaleRule) -> tuple[torch.Tensor, ...]:
    """Scale bytes that the rule allows for blocks of maximum ``amax`` (fp32): one tensor, or two, the preferred first.

    A zero MXFP4 block gets byte 0 in every candidate.
    """
    if rule not in fmt.rules:
        raise InvalidInputError(
            f"rule: {rule.value} is not a {fmt.value} rule; use one of {[r.value for r in fmt.rules]}"
        )
    if rule is ScaleRule.FOUR_OVER_SIX:
        return encode_e4m3(_divide(amax, 6.0)), encode_e4m3(_divide(amax, 4.0))
    if fmt is BlockFormat.NVFP4:
        return (encode_e4m3(_divide(amax, _DIVISOR[rule])),)
    exponent = (floor_log2(amax) - 2).clamp(-127, 127)
    if rule is ScaleRule.UP:
        exponent = exponent + (amax > E2M1_MAX * decode_e8m0(encode_e8m0(exponent))).int()
    exponents = (exponent, exponent + 1) if rule is ScaleRule.SEARCH else (exponent,)
    return tuple(torch.where(amax == 0, 0, encode_e8m0(e)).to(torch.uint8) for e in exponents)


def _divide(x: torch.Tensor, divisor: float) -> torch.Tensor:
    """``x / divisor`` by a true fp32 division; CUDA torch multiplies by a Python number's reciprocal instead."""
    return x / torch.full_like(x, divisor)


def encode_against(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """E2M1 codes of ``x / scales`` (broadcast); a zero scale gives code 0, also for -0."""
    flushed = scales == 0
    codes = encode_e2m1(x / torch.where(flushed, 1.0, scales))
    return torch.where(flushed, 0, codes).to(torch.uint8)


def _quantize_last(x: torch.Tensor, fmt: BlockFormat, rule: ScaleRule) -> QuantizedBlocks:
    """Quantize fp32 [..., blocks, block_size] with one scale a row."""
    amax = x.abs().amax(-1)
    best: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    candidates = candidate_scales(amax, fmt, rule)
    if len(candidates) == 1:
        scales = decode_scales(candidates[0], fmt)
        return QuantizedBlocks(encode_against(x, _column(scales, amax)), candidates[0], scales)
    for scale_bytes in candidates:
        scales = decode_scales(scale_bytes, fmt)
        codes = encode_against(x, _column(scales, amax))
        difference = scales.unsqueeze(-1) * decode_e2m1(codes) - x
        error = tree_sum(difference * difference)
        if best is None:
            best = (codes, scale_bytes, error)
            continue
        better = error < best[2]
        best = (
            torch.where(better.unsqueeze(-1), codes, best[0]),
            torch.where(better, scale_bytes, best[1]),
            torch.minimum(error, best[2]),
        )
    assert best is not None
    return QuantizedBlocks(best[0], best[1], decode_scales(best[1], fmt))


def _column(scales: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """Scales ready to divide a block by; 0 where the block is all zero, so that -0 gets code 0 in both formats."""
    return torch.where(amax == 0, 0.0, scales).unsqueeze(-1)


def blockwise(
    x: torch.Tensor, block_size: int, dim: int, quantize: Callable[[torch.Tensor], QuantizedBlocks]
) -> QuantizedBlocks:
    """Apply a quantizer of [..., blocks, block_size] along any dim of ``x`` and put the results back in place."""
    moved = x.movedim(dim, -1)
    blocks = moved.reshape(*moved.shape[:-1], moved.shape[-1] // block_size, block_size)
    codes, scale_bytes, scales = quantize(blocks)
    return QuantizedBlocks(
        codes.reshape(moved.shape).movedim(-1, dim), scale_bytes.movedim(-1, dim), scales.movedim(-1, dim)
    )


def check_blocks(name: str, x: torch.Tensor, fmt: BlockFormat, dim: int) -> None:
    """Raise `InvalidInputError` unless ``dim`` of ``x`` divides into whole blocks of the format."""
    if not -x.dim() <= dim < x.dim():
        raise InvalidInputError(f"dim: {dim} is out of range for {name} with {x.dim()} dims")
    if x.shape[dim] % fmt.block_size:
        raise InvalidInputError(
            f"{name}: length {x.shape[dim]} along dim {dim} is not a multiple of {fmt.block_size}, "
            f"the {fmt.value} block"
        )


def quantize_blocks(
    x: torch.Tensor,
    fmt: BlockFormat | str = BlockFormat.NVFP4,
    rule: ScaleRule | str | None = None,
    *,
    dim: int = -1,
) -> QuantizedBlocks:
    """Quantize a tensor to FP4 in blocks along ``dim``.

    Args:
        x: floating-point tensor of any shape; ``x.shape[dim]`` a multiple of the block (16 NVFP4, 32 MXFP4).
        fmt: ``"nvfp4"`` or ``"mxfp4"``.
        rule: a `ScaleRule` of the format or its name; default the format's standard rule (``max6``, ``ocp``).
        dim: the dim that blocks lie along.

    Returns:
        `QuantizedBlocks`. There is no second-level tensor scale: NVFP4 saturates above 2688 and flushes blocks whose
        scale rounds to 0 (amax/κ <= 2^-10) to scale 0, codes 0.

    Raises:
        InvalidInputError: NaN or Inf, a length that is no multiple of the block, a rule of the other format.

    Source: paper Sec. 3; OCP MX v1.0 Sec. 6.3 (rule ``ocp``); Four Over Six (rule ``4over6``).
    """
    fmt = BlockFormat(fmt)
    rule = fmt.standard_rule if rule is None else ScaleRule(rule)
    check_finite("x", x)
    check_blocks("x", x, fmt, dim)
    return blockwise(x.float(), fmt.block_size, dim, lambda blocks: _quantize_last(blocks, fmt, rule))


def dequantize_blocks(
    codes: torch.Tensor, scale_bytes: torch.Tensor, fmt: BlockFormat | str, *, dim: int = -1
) -> torch.Tensor:
    """Fp32 values ``scale · code``; shapes and ``dim`` as in `quantize_blocks`.

    Raises:
        InvalidInputError: not uint8, shapes of codes and scale bytes that do not belong together, codes above 15.
    """
    fmt = BlockFormat(fmt)
    if codes.dtype != torch.uint8 or scale_bytes.dtype != torch.uint8:
        raise InvalidInputError(f"codes, scale_bytes: expected uint8, got {codes.dtype} and {scale_bytes.dtype}")
    check_blocks("codes", codes, fmt, dim)
    expected = list(codes.shape)
    expected[dim] //= fmt.block_size
    if list(scale_bytes.shape) != expected:
        raise InvalidInputError(f"scale_bytes: expected shape {tuple(expected)}, got {tuple(scale_bytes.shape)}")
    if codes.numel() and int(codes.max()) > 15:
        raise InvalidInputError(f"codes: {int(codes.max())} is no E2M1 code; codes are 0..15")
    return decode_blocks(codes, scale_bytes, fmt, dim)


def decode_blocks(codes: torch.Tensor, scale_bytes: torch.Tensor, fmt: BlockFormat, dim: int = -1) -> torch.Tensor:
    """`dequantize_blocks` without its checks, for tensors that this library made."""
    scales = decode_scales(scale_bytes, fmt).repeat_interleave(fmt.block_size, dim)
    return decode_e2m1(codes) * scales


def quantize_dequantize(
    x: torch.Tensor, fmt: BlockFormat | str, rule: ScaleRule | str | None = None, *, dim: int = -1
) -> torch.Tensor:
    """What ``x`` becomes after a round trip through the format (fp32); arguments as in `quantize_blocks`."""
    quantized = quantize_blocks(x, fmt, rule, dim=dim)
    return dequantize_blocks(quantized.codes, quantized.scale_bytes, fmt, dim=dim)
