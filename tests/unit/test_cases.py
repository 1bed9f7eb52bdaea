"""Every hand-made case of tests/cases, against the PyTorch reference."""

import torch
from cases_table import LDLQ_CASES, PROBABILITY_CASES, QUANTIZE_CASES, LdlqCase, ProbabilityCase, QuantizeCase, by_name
from scalar_reference import quantize_block

from bitdecoding.numerics import (
    dequantize_blocks,
    ldlq_factors,
    quantize_blocks,
    quantize_blocks_ldlq,
    quantize_dequantize,
    quantize_probabilities,
)


def error_against(second_moment: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """eᵀAe of each row, in fp64."""
    error = error.double()
    return ((error @ second_moment.double()) * error).sum(-1)


def test_tables_are_complete():
    assert (len(QUANTIZE_CASES), len(PROBABILITY_CASES), len(LDLQ_CASES)) == (17, 6, 2)


@by_name(QUANTIZE_CASES)
def test_quantize(case: QuantizeCase):
    quantized = quantize_blocks(case.block, case.fmt, case.rule)
    assert quantized.codes.tolist() == case.codes
    assert quantized.scale_bytes.tolist() == [case.scale_byte]
    assert quantized.scales.tolist() == [case.scale]


@by_name(QUANTIZE_CASES)
def test_scalar_reference_agrees(case: QuantizeCase):
    assert quantize_block(case.block.tolist(), case.fmt, case.rule) == (case.scale_byte, case.scale, case.codes)


@by_name(PROBABILITY_CASES)
def test_probability(case: ProbabilityCase):
    quantized = quantize_probabilities(case.scores, 0.0, case.fmt, case.rule, c=case.c)
    assert quantized.codes.tolist() == case.codes
    assert quantized.scales.tolist() == [case.scale]


@by_name(LDLQ_CASES)
def test_ldlq(case: LdlqCase):
    factors = ldlq_factors(case.second_moment, case.damping)
    quantized = quantize_blocks_ldlq(case.rows, factors, case.fmt, case.rule)
    values = dequantize_blocks(quantized.codes, quantized.scale_bytes, case.fmt)
    assert torch.equal(values, case.dequantized)
    error = error_against(case.second_moment, values - case.rows)
    torch.testing.assert_close(error, case.error, rtol=1e-6, atol=0)


@by_name(LDLQ_CASES)
def test_plain_rounding_of_the_ldlq_rows(case: LdlqCase):
    values = quantize_dequantize(case.rows, case.fmt, case.rule)
    error = error_against(case.second_moment, values - case.rows)
    torch.testing.assert_close(error, case.plain_error, rtol=1e-6, atol=0)
