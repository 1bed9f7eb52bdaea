"""E2M1, E4M3 and E8M0: every code, and the encoders against brute force over every 16-bit input."""

import numpy as np
import pytest
import torch
from scalar_reference import E2M1_MAGNITUDES, E4M3_MAGNITUDES

from bitdecoding.numerics import (
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    encode_e8m0,
)
from bitdecoding.numerics.elements import floor_log2

ENCODERS = {"e2m1": (encode_e2m1, E2M1_MAGNITUDES, 8), "e4m3": (encode_e4m3, E4M3_MAGNITUDES, 128)}
each_encoder = pytest.mark.parametrize("name", ENCODERS)


def all_finite(dtype: torch.dtype) -> torch.Tensor:
    """Every finite value of a 16-bit dtype, both zeros included."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return values[torch.isfinite(values)]


def brute_force(x: torch.Tensor, grid: tuple[float, ...], sign_bit: int) -> np.ndarray:
    """Codes of the nearest grid values, ties to the even index, saturating; distances are exact in fp64."""
    values = x.double().numpy()
    magnitudes = np.minimum(np.abs(values), grid[-1])
    distances = np.abs(magnitudes[:, None] - np.array(grid))
    closest = distances == distances.min(axis=1, keepdims=True)
    # Indices in order of preference: even before odd; a tie is between neighbours, so at most one of each.
    order = np.argsort(np.arange(len(grid)) % 2, kind="stable")
    index = order[closest[:, order].argmax(axis=1)]
    return index + np.where(np.signbit(values), sign_bit, 0)


def midpoints(grid: tuple[float, ...]) -> torch.Tensor:
    values = torch.tensor(grid)
    return (values[1:] + values[:-1]) / 2


def test_e2m1_codes():
    codes = torch.arange(16, dtype=torch.uint8)
    values = decode_e2m1(codes)
    assert values.dtype == torch.float32
    assert values.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert torch.signbit(values).tolist() == [False] * 8 + [True] * 8
    assert torch.equal(encode_e2m1(values), codes)


def test_e4m3_bytes():
    bytes_ = torch.arange(256, dtype=torch.uint8)
    values = decode_e4m3(bytes_)
    expected = [*E4M3_MAGNITUDES, float("nan")]
    torch.testing.assert_close(values, torch.tensor(expected + [-v for v in expected]), rtol=0, atol=0, equal_nan=True)
    finite = ~torch.isnan(values)
    assert int(finite.sum()) == 254
    assert torch.equal(encode_e4m3(values[finite]), bytes_[finite])
    assert torch.signbit(values[finite]).tolist() == (bytes_[finite] >= 128).tolist()


def test_e8m0_bytes():
    bytes_ = torch.arange(255, dtype=torch.uint8)
    assert decode_e8m0(bytes_).tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert torch.isnan(decode_e8m0(torch.tensor([255], dtype=torch.uint8))).all()
    assert torch.equal(encode_e8m0(torch.arange(-127, 128)), bytes_)


@pytest.mark.parametrize(("exponent", "byte"), [(-1000, 0), (-128, 0), (-127, 0), (127, 254), (128, 254), (1000, 254)])
def test_e8m0_exponents_are_clamped(exponent: int, byte: int):
    assert encode_e8m0(torch.tensor(exponent)).item() == byte


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@each_encoder
def test_every_16_bit_input_rounds_to_nearest_even(name: str, dtype: torch.dtype):
    encode, grid, sign_bit = ENCODERS[name]
    x = all_finite(dtype)
    assert len(x) > 63_000
    codes = encode(x)
    assert codes.dtype == torch.uint8
    np.testing.assert_array_equal(codes.numpy(), brute_force(x, grid, sign_bit))


@each_encoder
def test_midpoints_and_their_fp32_neighbours(name: str):
    encode, grid, sign_bit = ENCODERS[name]
    middle = midpoints(grid)
    lower = torch.arange(len(middle))
    even = lower + lower % 2
    below, above = (torch.nextafter(middle, torch.tensor(end)) for end in (-torch.inf, torch.inf))
    for x, expected in ((below, lower), (middle, even), (above, lower + 1)):
        assert torch.equal(encode(x).long(), expected)
        assert torch.equal(encode(-x).long(), expected + sign_bit)


def test_e2m1_ties_of_the_contract():
    ties = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}
    assert decode_e2m1(encode_e2m1(torch.tensor(list(ties)))).tolist() == list(ties.values())


@each_encoder
def test_saturation(name: str):
    encode, grid, sign_bit = ENCODERS[name]
    top = grid[-1]
    beyond = torch.tensor([top, top * 1.01, top * 1.04, top * 1.08, top * 2, 1e6, 1e38, torch.finfo(torch.float32).max])
    assert encode(beyond).tolist() == [len(grid) - 1] * len(beyond)
    assert encode(-beyond).tolist() == [len(grid) - 1 + sign_bit] * len(beyond)


@each_encoder
def test_minus_zero_and_what_rounds_to_it_keep_their_sign(name: str):
    encode, grid, sign_bit = ENCODERS[name]
    small = torch.tensor([0.0, 1e-45, grid[1] / 4, grid[1] / 2])
    assert encode(small).tolist() == [0] * 4
    assert encode(-small).tolist() == [sign_bit] * 4


def test_products_of_elements_and_scales_are_exact_in_16_bits():
    elements = decode_e2m1(torch.arange(16, dtype=torch.uint8))
    scales = decode_e4m3(torch.arange(256, dtype=torch.uint8))
    scales = scales[torch.isfinite(scales)]
    products = (elements[:, None].double() * scales.double()).flatten()
    assert len(products) == 4064
    assert torch.equal(products.float().double(), products)
    assert torch.equal(products.bfloat16().double(), products)
    assert torch.equal(products.half().double(), products)
    nonzero = products[products != 0].abs()
    assert (nonzero.min().item(), nonzero.max().item()) == (2.0**-10, 2688.0)


def test_floor_log2_is_exact_by_exponent_bits():
    powers = torch.tensor([2.0**e for e in range(-126, 128)])
    exponents = torch.arange(-126, 128, dtype=torch.int32)
    assert torch.equal(floor_log2(powers), exponents)
    assert torch.equal(floor_log2(-torch.nextafter(powers, torch.tensor(torch.inf))), exponents)
    assert torch.equal(floor_log2(torch.nextafter(powers, torch.tensor(0.0)))[1:], exponents[:-1])
    assert floor_log2(torch.tensor([0.0, 1e-45, 1e-39])).tolist() == [-127] * 3


def test_any_shape_and_memory_layout():
    x = torch.randn(6, 10, generator=torch.Generator().manual_seed(0)) * 3
    for name, (encode, _, _) in ENCODERS.items():
        assert torch.equal(encode(x.T), encode(x).T), name
        assert torch.equal(encode(x[:, ::2]), encode(x)[:, ::2]), name
    strided = encode_e4m3(x)[:, ::2]
    assert torch.equal(decode_e4m3(strided), decode_e4m3(strided.contiguous()))
    assert torch.equal(floor_log2(x.T), floor_log2(x).T)
