"""The numerics on CUDA tensors: the same cases, and the CPU's bits wherever no transcendental is involved."""

import pytest
import torch
from cases_table import LDLQ_CASES, PROBABILITY_CASES, QUANTIZE_CASES

from bitdecoding.numerics import (
    dequantize_blocks,
    dual_residual_query,
    hadamard_transform,
    ldlq_factors,
    quantize_blocks,
    quantize_blocks_ldlq,
    quantize_probabilities,
)
from bitdecoding.numerics.elements import (
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    floor_log2,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", QUANTIZE_CASES)
def test_quantize_cases(case):
    result = quantize_blocks(case.block.cuda(), case.fmt, case.rule)
    assert result.codes.tolist() == case.codes
    assert result.scale_bytes.item() == case.scale_byte
    assert result.scales.item() == case.scale


@pytest.mark.parametrize("case", PROBABILITY_CASES)
def test_probability_cases(case):
    result = quantize_probabilities(case.scores.cuda(), 0.0, case.fmt, case.rule, c=case.c)
    assert result.codes.tolist() == case.codes
    assert result.scales.item() == case.scale


@pytest.mark.parametrize("case", LDLQ_CASES)
def test_ldlq_cases(case):
    factors = ldlq_factors(case.second_moment.cuda(), case.damping)
    result = quantize_blocks_ldlq(case.rows.cuda(), factors, case.fmt, case.rule)
    assert torch.equal(dequantize_blocks(result.codes, result.scale_bytes, case.fmt).cpu(), case.dequantized)


def test_elements_equal_cpu_for_all_16_bit_inputs():
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        x = bits.view(dtype)
        x = x[torch.isfinite(x)]
        for function in (encode_e2m1, encode_e4m3, floor_log2):
            assert torch.equal(function(x.cuda()).cpu(), function(x)), (dtype, function.__name__)


def test_decoders_equal_cpu():
    byte = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(decode_e2m1(byte[:16].cuda()).cpu(), decode_e2m1(byte[:16]))
    for function in (decode_e4m3, decode_e8m0):
        cpu, gpu = function(byte), function(byte.cuda()).cpu()
        assert torch.equal(cpu.isnan(), gpu.isnan())
        assert torch.equal(cpu.nan_to_num(), gpu.nan_to_num())


@pytest.mark.parametrize(
    ("fmt", "rule"),
    [("nvfp4", r) for r in ("max6", "max4", "max2", "4over6")] + [("mxfp4", r) for r in ("ocp", "up", "search")],
)
@pytest.mark.parametrize("spread", [1e-4, 1.0, 300.0])
def test_random_blocks_equal_cpu_bit_for_bit(fmt, rule, spread):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(4096, 128, generator=generator) * spread * torch.rand(4096, 1, generator=generator).exp2()
    for dim in (-1, 0):
        cpu, gpu = quantize_blocks(x, fmt, rule, dim=dim), quantize_blocks(x.cuda(), fmt, rule, dim=dim)
        assert torch.equal(cpu.codes, gpu.codes.cpu())
        assert torch.equal(cpu.scale_bytes, gpu.scale_bytes.cpu())


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_hadamard_equal_cpu_bit_for_bit(head_dim):
    x = torch.randn(257, head_dim, generator=torch.Generator().manual_seed(3)).bfloat16()
    assert torch.equal(hadamard_transform(x.cuda()).cpu(), hadamard_transform(x))


def test_dual_query_equal_cpu_bit_for_bit():
    q = torch.randn(333, 128, generator=torch.Generator().manual_seed(5)) * 4
    cpu, gpu = dual_residual_query(q), dual_residual_query(q.cuda())
    assert torch.equal(cpu.first_values, gpu.first_values.cpu())
    assert torch.equal(cpu.residual_values, gpu.residual_values.cpu())


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_ldlq_agrees_with_cpu_but_for_near_ties(fmt):
    generator = torch.Generator().manual_seed(11)
    q = torch.randn(2, 2048, 128, generator=generator) * torch.logspace(-1, 1, 128)
    factors = ldlq_factors(q.transpose(-1, -2) @ q / 2048)
    x = torch.randn(2, 4096, 128, generator=generator)
    cpu, gpu = quantize_blocks_ldlq(x, factors, fmt), quantize_blocks_ldlq(x.cuda(), factors, fmt)
    assert (cpu.codes == gpu.codes.cpu()).float().mean() >= 0.999
