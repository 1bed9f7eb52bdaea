"""Probabilities in FP4 without underflow (paper Sec. 4): c folded into the exponent, block maximum mapped to 2 or 6.

NVFP4 has no tensor scale, so a block of small probabilities would round its E4M3 scale to zero. Multiplying by c = 8
inside the exponent and mapping the maximum of a low block to code 2 instead of 6 lowers that floor 24 times.
"""

from collections.abc import Callable

import torch

from bitdecoding.errors import InvalidInputError
from bitdecoding.names import Choice
from bitdecoding.numerics.blocks import (
    BlockFormat,
    QuantizedBlocks,
    ScaleRule,
    blockwise,
    candidate_scales,
    check_blocks,
    decode_blocks,
    decode_scales,
    encode_against,
)
from bitdecoding.numerics.elements import E2M1_MAX, E4M3_MAX
from bitdecoding.numerics.validation import check_floating

__all__ = ["DEFAULT_C", "DEFAULT_TAU", "ProbabilityRule", "quantize_probabilities", "two_level_probabilities"]

DEFAULT_C = 8.0
"""Factor on the probabilities; a power of two."""
DEFAULT_TAU = 21 / 1024
"""Largest c·p_max that still maps to 2: halfway between the E4M3 neighbours 20/1024 and 22/1024."""


class ProbabilityRule(Choice):
    """Scale rule of a probability block."""

    UNDERFLOW = "underflow"
    """NVFP4: κ = 2 where c·p_max <= τ, else 6; scale E4M3(c·p_max/κ)."""
    MAX6 = "max6"
    """NVFP4 standard rule: κ = 6 everywhere."""
    UP = "up"
    """MXFP4: the power of two that does not clip the largest probability."""
    OCP = "ocp"
    """MXFP4 standard rule: floor exponent, the largest probability may clip."""

    @classmethod
    def for_format(cls, fmt: BlockFormat) -> tuple["ProbabilityRule", ...]:
        """Rules that a format knows."""
        return (cls.UNDERFLOW, cls.MAX6) if fmt is BlockFormat.NVFP4 else (cls.UP, cls.OCP)


def quantize_probabilities(
    scores: torch.Tensor,
    maximum: torch.Tensor | float = 0.0,
    fmt: BlockFormat | str = BlockFormat.NVFP4,
    rule: ProbabilityRule | str | None = None,
    *,
    c: float = DEFAULT_C,
    tau: float = DEFAULT_TAU,
) -> QuantizedBlocks:
    """Quantize c·exp2(scores - maximum) to FP4 in blocks of tokens along the last dim.

    Args:
        scores: base-2 logits S (softmax scale · log2 e included), fp32 [..., tokens]; -inf where masked.
        maximum: running maximum m of the row, broadcastable to [..., 1], finite, not below any score.
        fmt: ``"nvfp4"`` (16 tokens a block) or ``"mxfp4"`` (32).
        rule: a `ProbabilityRule`; default ``underflow`` for NVFP4, ``up`` for MXFP4.
        c: factor folded into the exponent. The caller divides it out of the output once.
        tau: threshold on c·p_max under which a block maps its maximum to 2 (rule ``underflow``).

    Returns:
        `QuantizedBlocks` of c·p. A wholly masked block has scale 0 (MXFP4: byte 0) and codes 0. The softmax denominator
        uses the unquantized p and is the caller's.

    Raises:
        InvalidInputError: NaN or +inf scores, a score above the maximum, a rule of the other format, a length that is
            no multiple of the block, ``c`` or ``tau`` not positive.
    """
    fmt = BlockFormat(fmt)
    rule = ProbabilityRule.for_format(fmt)[0] if rule is None else ProbabilityRule(rule)
    if rule not in ProbabilityRule.for_format(fmt):
        raise InvalidInputError(
            f"rule: {rule.value} is not a probability rule of {fmt.value}; use one of "
            f"{[r.value for r in ProbabilityRule.for_format(fmt)]}"
        )
    if not (0 < c < torch.inf and 0 < tau < torch.inf):
        raise InvalidInputError(f"c, tau: must be positive and finite, got c={c}, tau={tau}")
    check_floating("scores", scores)
    check_blocks("scores", scores, fmt, -1)
    top = torch.as_tensor(maximum, device=scores.device)
    if not bool(torch.isfinite(top).all()):
        raise InvalidInputError("maximum: must be finite; give rows that see nothing any finite number")
    shifted = scores.float() - top
    if shifted.shape != scores.shape:
        raise InvalidInputError(f"maximum: shape {tuple(top.shape)} does not broadcast to scores {tuple(scores.shape)}")
    if bool(torch.isnan(shifted).any()) or bool((shifted == torch.inf).any()):
        raise InvalidInputError(
            "scores: NaN or +inf minus the maximum; scores are finite or -inf, the maximum is finite"
        )
    if bool((shifted > 0).any()):
        raise InvalidInputError("maximum: lies below a score; it is the running maximum of the row")
    log2_c = torch.log2(torch.tensor(c)).item()
    p = torch.exp2(shifted + log2_c)

    return _quantize_non_negative(p, fmt, lambda amax: _scale_bytes(amax, fmt, rule, tau))


def _quantize_non_negative(
    p: torch.Tensor, fmt: BlockFormat, scale_rule: Callable[[torch.Tensor], torch.Tensor]
) -> QuantizedBlocks:
    """Quantize fp32 [..., tokens] >= 0, the scale bytes given by the block maxima."""

    def quantize(blocks: torch.Tensor) -> QuantizedBlocks:
        scale_bytes = scale_rule(blocks.amax(-1))
        scales = decode_scales(scale_bytes, fmt)
        return QuantizedBlocks(encode_against(blocks, scales.unsqueeze(-1)), scale_bytes, scales)

    return blockwise(p, fmt.block_size, -1, quantize)


def _scale_bytes(amax: torch.Tensor, fmt: BlockFormat, rule: ProbabilityRule, tau: float) -> torch.Tensor:
    """Scale bytes of blocks whose largest c·p is ``amax``."""
    if rule is ProbabilityRule.UNDERFLOW:
        (two,) = candidate_scales(amax, fmt, ScaleRule.MAX2)
        (six,) = candidate_scales(amax, fmt, ScaleRule.MAX6)
        return torch.where(amax <= tau, two, six)
    (scale_bytes,) = candidate_scales(amax, fmt, ScaleRule(rule.value))
    return scale_bytes


def two_level_probabilities(p: torch.Tensor, fmt: BlockFormat | str = BlockFormat.NVFP4) -> torch.Tensor:
    """Two-level quantization of P: a fp32 scale a row first, then FP4 blocks (SageAttention3, Sec. 3.2).

    Each row of a page is divided by s1 = rowmax/(448·6), so that the E4M3 block scales use their whole range.
    Simplified: rows are those of one 128-token page, and MXFP4, whose scales need no help, uses the same s1.

    Args:
        p: probabilities relative to the running maximum, fp32 [..., tokens], non-negative.
        fmt: block format of the second level.

    Returns:
        Dequantized fp32 probabilities, same shape; an all-zero row stays zero.
    """
    fmt = BlockFormat(fmt)
    check_blocks("p", p, fmt, -1)
    first = p.amax(-1, keepdim=True) / (E4M3_MAX * E2M1_MAX)
    first = torch.where(first > 0, first, 1.0)  # also where it underflows to 0: such a row flushes
    second = _quantize_non_negative(p / first, fmt, lambda amax: candidate_scales(amax, fmt, fmt.standard_rule)[0])
    return decode_blocks(second.codes, second.scale_bytes, fmt) * first
