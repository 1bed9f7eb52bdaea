"""The dual-residual query: what its two parts are, and how much of a single FP4 query's error it removes."""

import pytest
import torch

from bitdecoding.errors import InvalidInputError
from bitdecoding.numerics import (
    BlockFormat,
    dual_residual_query,
    hadamard_transform,
    quantize_blocks,
    quantize_dequantize,
)

each_format = pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])


def heavy_tailed(*shape: int, seed: int) -> torch.Tensor:
    """Student-t with three degrees of freedom."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(*shape, 3, generator=generator).square().mean(-1).sqrt()
    return torch.randn(shape, generator=generator) / spread


def relative(error: torch.Tensor, of: torch.Tensor) -> float:
    return (error.norm() / of.norm()).item()


@each_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_the_query_and_its_fp32_residual(fmt: str, dtype: torch.dtype):
    q = heavy_tailed(3, 4, 128, seed=0).to(dtype)
    dual = dual_residual_query(q, fmt)
    assert torch.equal(dual.first_values, quantize_dequantize(q, fmt))
    assert torch.equal(dual.residual_values, quantize_dequantize(q.float() - dual.first_values, fmt))
    for got, expected in zip(dual.first, quantize_blocks(q, fmt), strict=True):
        assert torch.equal(got, expected)
    assert dual.first_values.dtype == dual.residual_values.dtype == torch.float32


@pytest.mark.parametrize(("fmt", "rule"), [("nvfp4", "4over6"), ("mxfp4", "up")])
def test_a_rule_holds_for_both_parts(fmt: str, rule: str):
    q = heavy_tailed(8, 128, seed=1)
    dual = dual_residual_query(q, fmt, rule)
    assert torch.equal(dual.first_values, quantize_dequantize(q, fmt, rule))
    assert torch.equal(dual.residual_values, quantize_dequantize(q - dual.first_values, fmt, rule))


@each_format
@pytest.mark.parametrize("rotated", [False, True])
def test_residual_removes_most_of_the_query_error(fmt: str, rotated: bool):
    q = heavy_tailed(64, 128, seed=2)
    q = hadamard_transform(q) if rotated else q
    dual = dual_residual_query(q, fmt)
    single_error = relative(dual.first_values - q, q)
    dual_error = relative(dual.first_values + dual.residual_values - q, q)
    assert 0.03 < single_error < 0.15
    assert dual_error < single_error / 5


@each_format
def test_logit_error_against_quantized_keys(fmt: str):
    """Rotated heavy-tailed queries and keys; the error is relative to the logits of the exact query."""
    q = hadamard_transform(heavy_tailed(64, 128, seed=3))
    keys = hadamard_transform(heavy_tailed(512, 128, seed=4))
    keys = quantize_dequantize(keys, fmt, BlockFormat(fmt).search_rule)
    logits = q @ keys.T
    dual = dual_residual_query(q, fmt)
    single_error = relative(dual.first_values @ keys.T - logits, logits)
    dual_error = relative(dual.first_values @ keys.T + dual.residual_values @ keys.T - logits, logits)
    assert 0.05 < single_error < 0.15
    assert dual_error < 0.015


def test_residual_takes_over_what_saturates():
    """A query of 4000 saturates at 2688 in the first part; the second carries the other 1312."""
    dual = dual_residual_query(torch.full((16,), 4000.0))
    assert dual.first_values.tolist() == [2688.0] * 16
    assert relative(dual.residual_values - 1312, torch.full((16,), 1312.0)) < 0.05


@each_format
def test_zero_query(fmt: str):
    dual = dual_residual_query(torch.zeros(2, 64), fmt)
    assert not dual.first_values.any()
    assert not dual.residual_values.any()


def test_refused_inputs():
    with pytest.raises(InvalidInputError, match="NaN or Inf"):
        dual_residual_query(torch.full((16,), torch.nan))
    with pytest.raises(InvalidInputError, match="length 24"):
        dual_residual_query(torch.zeros(24))
