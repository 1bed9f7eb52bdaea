"""Dual-residual query: q ≈ FP4 + FP4 of what is left (paper Sec. 4, Table 6)."""

from typing import NamedTuple

import torch

from bitdecoding.numerics.blocks import BlockFormat, QuantizedBlocks, ScaleRule, decode_blocks, quantize_blocks

__all__ = ["DualQuery", "dual_residual_query"]


class DualQuery(NamedTuple):
    """Two FP4 tensors whose sum approximates the query: ``first`` = Q(q), ``residual`` = Q(q - first)."""

    first: QuantizedBlocks
    residual: QuantizedBlocks
    first_values: torch.Tensor
    residual_values: torch.Tensor


def dual_residual_query(
    q: torch.Tensor, fmt: BlockFormat | str = BlockFormat.NVFP4, rule: ScaleRule | str | None = None
) -> DualQuery:
    """Quantize a (rotated) query twice, the second time its fp32 residual.

    Args:
        q: floating point [..., head_dim], blocks along head_dim.
        fmt: ``"nvfp4"`` or ``"mxfp4"``.
        rule: scale rule of both steps; default the format's standard rule.

    Returns:
        `DualQuery`; ``*_values`` are the fp32 dequantized tensors. Logits: q1·k + q2·k, joined in fp32 before masking.

    Raises:
        InvalidInputError: as `quantize_blocks`.
    """
    fmt = BlockFormat(fmt)
    first = quantize_blocks(q, fmt, rule)
    first_values = decode_blocks(first.codes, first.scale_bytes, fmt)
    residual = quantize_blocks(q.float() - first_values, fmt, rule)
    return DualQuery(first, residual, first_values, decode_blocks(residual.codes, residual.scale_bytes, fmt))
