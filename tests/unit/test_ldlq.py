"""LDLQ key rounding: the factorisation, a brute-force scalar version, what it reduces to and what it gains."""

import pytest
import torch
from scalar_reference import quantize_row_ldlq

from bitdecoding.errors import InvalidInputError
from bitdecoding.numerics import (
    BlockFormat,
    LdlqFactors,
    decode_e2m1,
    dequantize_blocks,
    ldlq_factors,
    quantize_blocks,
    quantize_blocks_ldlq,
    quantize_dequantize,
)
from bitdecoding.numerics.ldlq import DEFAULT_DAMPING

each_format = pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])


def second_moments(heads: int, head_dim: int, rank: int | None = None, seed: int = 0) -> torch.Tensor:
    """Means of outer products of correlated queries [heads, head_dim, head_dim]."""
    generator = torch.Generator().manual_seed(seed)
    rank = rank or 2 * head_dim
    spread = torch.rand(heads, 1, head_dim, generator=generator) * 3 + 0.1
    queries = torch.randn(heads, rank, head_dim, generator=generator) * spread + spread
    return queries.transpose(-1, -2) @ queries / rank


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def exact_problem(heads: int, rows: int, head_dim: int, seed: int = 0) -> tuple[torch.Tensor, LdlqFactors]:
    """Keys and factors with so few bits that every fp32 feed-forward sum is exact, whatever its order."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-256, 257, (heads, rows, head_dim), generator=generator) / 64
    c = torch.randint(-1, 2, (heads, head_dim, head_dim), generator=generator) / 8
    d = torch.exp2(torch.randint(-1, 2, (heads, head_dim), generator=generator).float())
    return x, LdlqFactors(c.triu(1), d)


def error_against(second_moment: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """eᵀAe of each row [heads, rows] in fp64."""
    error = error.double()
    return ((error @ second_moment.double()) * error).sum(-1)


def values_of(quantized, fmt: str) -> torch.Tensor:
    return dequantize_blocks(quantized.codes, quantized.scale_bytes, fmt)


@pytest.mark.parametrize("damping", [0.02, 0.5])
@pytest.mark.parametrize("rank", [None, 3])
def test_factorisation(damping: float, rank: int | None):
    """A + λ·mean(diag A)·I = R·Rᵀ with R upper triangular, from C_ij = R_ij/R_jj and D_j = R_jj²."""
    a = second_moments(3, 48, rank)
    factors = ldlq_factors(a, damping)
    assert factors.c.shape == (3, 48, 48)
    assert factors.c.dtype == factors.d.dtype == torch.float32
    assert torch.equal(factors.c, factors.c.triu(1))
    assert (factors.d > 0).all()
    upper = (factors.c.double() + torch.eye(48)) * factors.d.double().sqrt().unsqueeze(-2)
    damped = a.double() + damping * a.double().diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None] * torch.eye(48)
    torch.testing.assert_close(upper @ upper.transpose(-1, -2), damped, rtol=1e-5, atol=1e-5)


def test_default_damping():
    a = second_moments(1, 32)
    assert DEFAULT_DAMPING == 0.5
    for got, expected in zip(ldlq_factors(a), ldlq_factors(a, 0.5), strict=True):
        assert torch.equal(got, expected)


def test_two_by_two_by_hand():
    """[[5, 2], [2, 4]] = R·Rᵀ with R = [[2, 1], [0, 2]]: C_01 = 1/2, D = (4, 4)."""
    lam = 1e-12
    factors = ldlq_factors(torch.tensor([[5.0, 2.0], [2.0, 4.0]]), lam)
    torch.testing.assert_close(factors.c, torch.tensor([[0.0, 0.5], [0.0, 0.0]]))
    torch.testing.assert_close(factors.d, torch.tensor([4.0, 4.0]))


def test_zero_moment_gives_plain_factors():
    moments = torch.zeros(2, 32, 32)
    moments[1] = second_moments(1, 32)[0]
    factors = ldlq_factors(moments)
    assert not factors.c[0].any()
    assert torch.equal(factors.d[0], torch.ones(32))
    assert torch.equal(factors.c[1], ldlq_factors(moments[1]).c)


@each_format
@pytest.mark.parametrize("damping", [0.02, 0.5])
def test_identity_moment_reduces_to_the_search_rule(fmt: str, damping: float):
    x = normal(200, 64) / normal(200, 64, seed=1).abs().clamp(min=0.02)
    quantized = quantize_blocks_ldlq(x, ldlq_factors(torch.eye(64), damping), fmt)
    for got, expected in zip(quantized, quantize_blocks(x, fmt, BlockFormat(fmt).search_rule), strict=True):
        assert torch.equal(got, expected)


@each_format
@pytest.mark.parametrize("seed", range(4))
def test_equals_the_scalar_version(fmt: str, seed: int):
    x, factors = exact_problem(2, 6, 64, seed)
    quantized = quantize_blocks_ldlq(x, factors, fmt)
    rule = BlockFormat(fmt).search_rule.value
    for head in range(2):
        c, d = factors.c[head].numpy(), factors.d[head].numpy()
        for row in range(6):
            blocks = quantize_row_ldlq(x[head, row].tolist(), c, d, fmt, rule)
            assert quantized.scale_bytes[head, row].tolist() == [block.scale_byte for block in blocks]
            assert quantized.codes[head, row].tolist() == [code for block in blocks for code in block.codes]


@each_format
def test_exact_problem_is_exact_and_not_plain_rounding(fmt: str):
    """The premise of the comparison with the scalar version: fp64 feed-forward gives the same fp32 targets."""
    x, factors = exact_problem(2, 6, 64)
    error = (values_of(quantize_blocks_ldlq(x, factors, fmt), fmt) - x).double()
    targets = x.double() - error @ factors.c.double()
    assert torch.equal(targets.float().double(), targets)
    assert targets.abs().max() < 64
    assert not torch.equal(values_of(quantize_blocks_ldlq(x, factors, fmt), fmt), quantize_dequantize(x, fmt))


@each_format
def test_every_code_is_the_nearest_to_its_target(fmt: str):
    """Codes against t_j = x_j − Σ_{i<j} e_i·C_ij recomputed from the result in fp64."""
    a = second_moments(2, 64)
    x, factors = normal(2, 50, 64), ldlq_factors(a)
    quantized = quantize_blocks_ldlq(x, factors, fmt)
    error = (values_of(quantized, fmt) - x).double()
    targets = x.double() - error @ factors.c.double()
    scales = quantized.scales.repeat_interleave(BlockFormat(fmt).block_size, -1).double()
    grid = decode_e2m1(torch.arange(16, dtype=torch.uint8)).double()
    nearest = (scales[..., None] * grid - targets[..., None]).abs().amin(-1)
    chosen = (scales * decode_e2m1(quantized.codes) - targets).abs()
    assert (chosen <= nearest + 1e-5).all()


@each_format
def test_error_is_the_weighted_rounding_error(fmt: str):
    """eᵀ(A + λI)e = Σ D_j·(s·code_j − t_j)²: the cost that the search minimises is the error itself."""
    a = second_moments(1, 64)[0]
    factors = ldlq_factors(a, 0.1)
    x = normal(50, 64)
    error = (values_of(quantize_blocks_ldlq(x, factors, fmt), fmt) - x).double()
    residual = error + error @ factors.c.double()
    damped = a.double() + 0.1 * a.diagonal().double().mean() * torch.eye(64)
    torch.testing.assert_close((factors.d * residual.square()).sum(-1), error_against(damped, error), rtol=1e-4, atol=0)


@each_format
@pytest.mark.parametrize(("rank", "most"), [(None, 0.9), (8, 0.8)])
def test_error_against_the_moment_is_lower_than_plain(fmt: str, rank: int | None, most: float):
    a = second_moments(2, 64, rank)
    x = normal(2, 256, 64)
    ldlq = error_against(a, values_of(quantize_blocks_ldlq(x, ldlq_factors(a), fmt), fmt) - x)
    plain = error_against(a, quantize_dequantize(x, fmt, BlockFormat(fmt).search_rule) - x)
    assert (ldlq.mean(-1) < most * plain.mean(-1)).all()
    assert (ldlq < plain).float().mean() > 0.6


@each_format
def test_less_damping_fits_the_moment_closer(fmt: str):
    a = second_moments(2, 64, 8)
    x = normal(2, 256, 64)
    errors = [
        error_against(a, values_of(quantize_blocks_ldlq(x, ldlq_factors(a, damping), fmt), fmt) - x).mean()
        for damping in (0.02, 0.5, 100.0)
    ]
    assert errors[0] < errors[1] < errors[2]


@each_format
def test_rows_heads_and_pages_are_independent(fmt: str):
    x, factors = exact_problem(3, 8, 64)
    pages = torch.stack([x, x.flip(1), x * 2])
    batch = quantize_blocks_ldlq(pages, factors, fmt)
    for head in range(3):
        alone = quantize_blocks_ldlq(x[head], LdlqFactors(factors.c[head], factors.d[head]), fmt)
        one_row = quantize_blocks_ldlq(x[head, 5:6], LdlqFactors(factors.c[head], factors.d[head]), fmt)
        for got, expected, single in zip(batch, alone, one_row, strict=True):
            assert torch.equal(got[0, head], expected)
            assert torch.equal(got[1, head], expected.flip(0))
            assert torch.equal(expected[5:6], single)


@each_format
def test_factors_broadcast_to_keys_and_keys_to_factors(fmt: str):
    x, factors = exact_problem(3, 4, 64)
    shared = LdlqFactors(factors.c[0], factors.d[0])
    repeated = LdlqFactors(shared.c.expand(3, -1, -1), shared.d.expand(3, -1))
    for got, expected in (
        (quantize_blocks_ldlq(x, shared, fmt), quantize_blocks_ldlq(x, repeated, fmt)),
        (quantize_blocks_ldlq(x[0], factors, fmt), quantize_blocks_ldlq(x[0].expand(3, -1, -1), factors, fmt)),
    ):
        assert torch.equal(got.codes, expected.codes)
        assert torch.equal(got.scale_bytes, expected.scale_bytes)


@pytest.mark.parametrize(("fmt", "rule"), [("nvfp4", "max6"), ("nvfp4", "max4"), ("mxfp4", "ocp"), ("mxfp4", "up")])
def test_a_single_scale_rule(fmt: str, rule: str):
    """Before any error is fed forward, the first block's scale is the plain one."""
    x, factors = exact_problem(2, 16, 64)
    quantized = quantize_blocks_ldlq(x, factors, fmt, rule)
    assert torch.equal(quantized.scale_bytes[..., 0], quantize_blocks(x, fmt, rule).scale_bytes[..., 0])


def test_tie_takes_the_first_candidate():
    x = torch.zeros(1, 16)
    x[0, :4] = torch.tensor([6.0, 3.0, 1.5, -6.0])
    quantized = quantize_blocks_ldlq(x, ldlq_factors(torch.eye(16)))
    assert quantized.scales.tolist() == [[1.0]]


@each_format
def test_zero_rows(fmt: str):
    x = torch.zeros(3, 64)
    x[1, ::5] = -0.0
    x[2] = 1.0
    quantized = quantize_blocks_ldlq(x, ldlq_factors(second_moments(1, 64)[0]), fmt)
    assert not quantized.codes[:2].any()
    assert not quantized.scale_bytes[:2].any()
    assert quantized.codes[2].all()


def test_rows_below_the_scale_floor_flush():
    x = torch.full((1, 64), 2.0**-9)
    quantized = quantize_blocks_ldlq(x, ldlq_factors(torch.eye(64)))
    assert not quantized.scale_bytes.any()
    assert not quantized.codes.any()


def test_large_keys_saturate():
    x = normal(8, 64) * 1e4
    values = values_of(quantize_blocks_ldlq(x, ldlq_factors(second_moments(1, 64)[0])), "nvfp4")
    assert torch.isfinite(values).all()
    assert values.abs().max() == 2688


@each_format
def test_no_rows(fmt: str):
    quantized = quantize_blocks_ldlq(torch.empty(2, 0, 64), ldlq_factors(torch.eye(64)), fmt)
    assert quantized.codes.shape == (2, 0, 64)
    assert quantized.scale_bytes.shape == (2, 0, 64 // BlockFormat(fmt).block_size)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_inf(bad: float):
    x = torch.zeros(2, 64)
    x[1, 3] = bad
    with pytest.raises(InvalidInputError, match=r"^x: 1 of 128 values are NaN or Inf"):
        quantize_blocks_ldlq(x, ldlq_factors(torch.eye(64)))
    with pytest.raises(InvalidInputError, match=r"^second_moment: 64 of 4096 values are NaN or Inf"):
        ldlq_factors(torch.full((64, 64), bad).tril().triu())


def test_wrong_shapes():
    factors = ldlq_factors(torch.eye(64))
    with pytest.raises(InvalidInputError, match=r"^factors: made for head_dim 64, x has head_dim 32"):
        quantize_blocks_ldlq(torch.zeros(2, 32), factors)
    with pytest.raises(InvalidInputError, match=r"^x: length 80 along dim -1 is not a multiple of 32"):
        quantize_blocks_ldlq(torch.zeros(2, 80), ldlq_factors(torch.eye(80)), "mxfp4")
    with pytest.raises(InvalidInputError, match=r"^rule: ocp is not a nvfp4 rule"):
        quantize_blocks_ldlq(torch.zeros(2, 64), factors, "nvfp4", "ocp")
    for shape in ((64,), (64, 32)):
        with pytest.raises(InvalidInputError, match=r"^second_moment: expected \[..., d, d\]"):
            ldlq_factors(torch.zeros(shape))


@pytest.mark.parametrize("damping", [0.0, -1.0, float("nan")])
def test_damping_must_be_positive(damping: float):
    with pytest.raises(InvalidInputError, match=r"^damping: must be positive"):
        ldlq_factors(torch.eye(16), damping)


def test_moment_must_be_positive_semidefinite():
    a = torch.eye(16)
    a[3, 3] = -5.0
    with pytest.raises(InvalidInputError, match=r"^second_moment: negative on the diagonal"):
        ldlq_factors(torch.stack([torch.eye(16), a]))
