"""The numerics against other people's implementations, with every known disagreement named and shown.

ml_dtypes and torchao run here. fouroversix and NVIDIA Model Optimizer are too heavy to install for tests; what they
make of fixed blocks is recorded in tests/cases/peers.json by tests/cases/record_peers.py.
"""

import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from cases_table import load

from bitdecoding.numerics import (
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    encode_e8m0,
    quantize_blocks,
    unpack_nibbles,
)
from bitdecoding.numerics.elements import floor_log2

PEERS = load("peers.json")


def all_finite(dtype: torch.dtype) -> torch.Tensor:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return values[torch.isfinite(values)]


def cast(x: torch.Tensor, dtype: type) -> torch.Tensor:
    """Bytes of an ml_dtypes cast."""
    with np.errstate(all="ignore"):
        return torch.from_numpy(x.float().numpy().astype(dtype).view(np.uint8))


each_16_bit_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


@each_16_bit_dtype
def test_e2m1_equals_ml_dtypes(dtype: torch.dtype):
    x = all_finite(dtype)
    assert torch.equal(encode_e2m1(x), cast(x, ml_dtypes.float4_e2m1fn))


@each_16_bit_dtype
def test_e4m3_equals_ml_dtypes_up_to_464(dtype: torch.dtype):
    x = all_finite(dtype)
    within = x.abs() <= 464
    assert torch.equal(encode_e4m3(x[within]), cast(x[within], ml_dtypes.float8_e4m3fn))


def test_beyond_464_ml_dtypes_gives_nan_where_we_saturate():
    x = torch.nextafter(torch.tensor([464.0]), torch.tensor(1e9))
    assert np.isnan(cast(x, ml_dtypes.float8_e4m3fn).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)).all()
    assert decode_e4m3(encode_e4m3(x)).tolist() == [448.0]


def test_decoders_equal_ml_dtypes():
    for decode, dtype, count in (
        (decode_e2m1, ml_dtypes.float4_e2m1fn, 16),
        (decode_e4m3, ml_dtypes.float8_e4m3fn, 256),
        (decode_e8m0, ml_dtypes.float8_e8m0fnu, 256),
    ):
        codes = np.arange(count, dtype=np.uint8)
        expected = codes.view(dtype).astype(np.float32)
        values = decode(torch.from_numpy(codes)).numpy()
        np.testing.assert_array_equal(values, expected)
        number = ~np.isnan(expected)
        np.testing.assert_array_equal(np.signbit(values[number]), np.signbit(expected[number]))


def test_e8m0_of_powers_of_two_equals_ml_dtypes():
    exponents = torch.arange(-127, 128)
    powers = torch.exp2(exponents.double())
    assert torch.equal(encode_e8m0(exponents), cast(powers, ml_dtypes.float8_e8m0fnu))


def import_torchao() -> None:
    """Import torchao from the folder beside the environment where scripts/setup puts it."""
    folder = str(Path(sys.prefix) / "crosschecks")
    if folder not in sys.path:
        sys.path.append(folder)
    pytest.importorskip("torchao", reason="scripts/setup installs torchao apart from the environment")


@pytest.fixture(scope="module")
def to_mx():
    """torchao's MXFP4 quantizer: rows of 32 and a scaling mode -> scale bytes [rows], codes [rows, 32]."""
    import_torchao()
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    def quantize(x: torch.Tensor, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
        scales, packed = to_mx(x, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode(mode))
        return scales.view(torch.uint8).flatten(), unpack_nibbles(packed)

    return quantize


def mx_rows(exponents: tuple[int, int] = (-124, 127), count: int = 6000) -> torch.Tensor:
    """Rows of 32 whose maxima cover a range of exponents and, with few mantissa bits, every decision of the rules."""
    generator = torch.Generator().manual_seed(0)
    mantissa = 1 + torch.randint(0, 32, (count, 1), generator=generator) / 32
    mantissa[count // 2 :] = 1 + torch.rand(count - count // 2, 1, generator=generator)
    exponent = torch.randint(*exponents, (count, 1), generator=generator)
    fractions = torch.randint(-16, 17, (count, 32), generator=generator) / 16  # these meet the ties of E2M1
    fractions[::2] = torch.rand(len(fractions[::2]), 32, generator=generator) * 2 - 1
    fractions[:, 0] = 1.0
    return (fractions.double() * mantissa * 2.0 ** exponent.double()).float()


def ours(x: torch.Tensor, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    quantized = quantize_blocks(x, "mxfp4", rule)
    return quantized.scale_bytes.flatten(), quantized.codes


def assert_same(got: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


@pytest.mark.parametrize(("mode", "rule"), [("floor", "ocp"), ("rceil", "up")])
def test_mxfp4_equals_torchao(to_mx, mode: str, rule: str):
    x = mx_rows()
    assert_same(ours(x, rule), to_mx(x, mode))


def test_torchao_even_takes_the_next_exponent_from_mantissa_1_75(to_mx):
    """EVEN rounds the maximum to E2M1's one mantissa bit first; our search has the same two candidates."""
    x = mx_rows()
    amax = x.abs().amax(-1)
    mantissa = amax / torch.exp2(floor_log2(amax).float())
    next_one = mantissa >= 1.75
    assert 0.1 < next_one.float().mean() < 0.9
    scales, codes = to_mx(x, "even")
    assert_same((scales[~next_one], codes[~next_one]), ours(x[~next_one], "ocp"))
    assert_same((scales[next_one], codes[next_one]), ours(x[next_one], "up"))
    between = (mantissa > 1.5) & ~next_one  # the largest element clips in EVEN, `up` does not let it
    assert between.any()
    assert torch.equal(ours(x[between], "up")[0], scales[between] + 1)


def test_torchao_ceil_takes_the_next_exponent_for_all_but_powers_of_two(to_mx):
    """CEIL wastes a binade for maxima of mantissa up to 1.5, where `up` stays with the OCP exponent."""
    x = mx_rows()
    amax = x.abs().amax(-1)
    power = amax == torch.exp2(floor_log2(amax).float())
    scales, codes = to_mx(x, "ceil")
    assert power.any()
    assert_same((scales[power], codes[power]), ours(x[power], "ocp"))
    assert torch.equal(scales[~power], ours(x[~power], "ocp")[0] + 1)
    clips = ~power & (ours(x, "up")[0] == scales)
    assert_same((scales[clips], codes[clips]), ours(x[clips], "up"))


def test_torchao_rceil_clips_maxima_just_above_6_scales(to_mx):
    """Its log2 of amax/6 = 2^k(1 + 2^-23) rounds to k; ours compares exactly and goes on to k+1."""
    x = torch.zeros(1, 32)
    x[0, 0] = torch.nextafter(torch.tensor(6 * 2.0**20), torch.tensor(torch.inf))
    assert ours(x, "up")[0].item() == 127 + 21
    assert to_mx(x, "rceil")[0].item() == 127 + 20


def test_torchao_divides_by_another_scale_than_byte_0_stands_for(to_mx):
    """Byte 0 is 2^-127; torchao's codes are against 2^-126 (floor) or against 1 (rceil)."""
    x = torch.full((1, 32), 3 * 2.0**-127)
    (scale,), codes = ours(x, "ocp")
    assert scale == to_mx(x, "floor")[0] == to_mx(x, "rceil")[0] == 0
    assert decode_e2m1(codes)[0].tolist() == [3.0] * 32
    assert decode_e2m1(to_mx(x, "floor")[1])[0].tolist() == [1.5] * 32
    assert decode_e2m1(to_mx(x, "rceil")[1])[0].tolist() == [0.0] * 32


def test_torchao_keeps_minus_zero_in_zero_blocks(to_mx):
    x = torch.zeros(1, 32)
    x[0, 3] = -0.0
    assert ours(x, "ocp")[1].tolist() == [[0] * 32]
    assert to_mx(x, "floor")[1][0, 3].item() == 8


@pytest.fixture(scope="module")
def torchao_nvfp4():
    """torchao's NVFP4 quantizer without its tensor scale: rows of 16 -> scale bytes [rows], codes [rows, 16]."""
    import_torchao()
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales, packed = nvfp4_quantize(x)
        return scales.view(torch.uint8).flatten(), unpack_nibbles(packed)

    return quantize


def test_nvfp4_equals_torchao_from_its_smallest_scale_on(torchao_nvfp4):
    """Scales of 2^-6 and more, up to saturation at 448; random fp32 meets no tie of the codes."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4000, 16, generator=generator) * torch.exp2(torch.arange(4000) % 16 - 3.0)[:, None]
    x = x[x.abs().amax(-1) / 6 >= 2.0**-6]
    quantized = quantize_blocks(x)
    assert 126 in quantized.scale_bytes
    assert_same((quantized.scale_bytes.flatten(), quantized.codes), torchao_nvfp4(x))


def test_torchao_nvfp4_multiplies_by_the_reciprocal(torchao_nvfp4):
    x = torch.zeros(1, 16)
    x[0, :2] = torch.tensor([11.25, 4.6875])
    assert decode_e2m1(quantize_blocks(x).codes)[0, :2].tolist() == [6.0, 2.0]
    assert decode_e2m1(torchao_nvfp4(x)[1])[0, :2].tolist() == [6.0, 3.0]


def test_torchao_nvfp4_has_no_subnormal_scales_and_flushes_nothing(torchao_nvfp4):
    x = torch.stack([torch.full((16,), 6 * 2.0**-8), torch.full((16,), 2.0**-10), torch.zeros(16)])
    assert quantize_blocks(x).scales[:, 0].tolist() == [2.0**-8, 0.0, 0.0]
    assert decode_e4m3(torchao_nvfp4(x)[0]).tolist() == [2.0**-6] * 3


def peer(by: str, fmt: str, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Recorded E2M1 values [rows, 32] and scale bytes [rows, blocks]."""
    found = [
        result
        for result in PEERS["results"]
        if result["by"].split()[0] == by and (result["format"], result["scale_rule"]) == (fmt, rule)
    ]
    assert len(found) == 1
    return torch.tensor(found[0]["elements"]), torch.tensor(found[0]["scale_bytes"], dtype=torch.uint8)


@pytest.mark.parametrize(
    ("by", "fmt", "rule"),
    [
        ("fouroversix", "nvfp4", "4over6"),
        ("fouroversix", "nvfp4", "max6"),
        ("fouroversix", "mxfp4", "up"),
        ("nvidia-modelopt", "nvfp4", "max6"),
    ],
)
def test_equals_the_recorded_peer(by: str, fmt: str, rule: str):
    elements, scale_bytes = peer(by, fmt, rule)
    quantized = quantize_blocks(torch.tensor(PEERS["rows"]), fmt, rule)
    assert torch.equal(quantized.scale_bytes, scale_bytes)
    assert torch.equal(decode_e2m1(quantized.codes), elements)


def test_recorded_search_takes_both_scales():
    four_over_six, max6 = peer("fouroversix", "nvfp4", "4over6")[1], peer("fouroversix", "nvfp4", "max6")[1]
    assert 0.2 < (four_over_six == max6).float().mean() < 0.8


def test_model_optimizer_rounds_mxfp4_ties_toward_zero():
    """Its scales equal ours; its codes do not at ties that go up to an even index."""
    elements, scale_bytes = peer("nvidia-modelopt", "mxfp4", "up")
    rows = torch.tensor(PEERS["rows"])
    quantized = quantize_blocks(rows, "mxfp4", "up")
    assert torch.equal(quantized.scale_bytes, scale_bytes)
    different = decode_e2m1(quantized.codes) != elements
    ratios = (rows / quantized.scales.repeat_interleave(32, -1)).abs()
    assert different.any()
    assert torch.equal(different, (ratios == 0.75) | (ratios == 1.75) | (ratios == 3.5))
    assert (elements[different].abs() < decode_e2m1(quantized.codes)[different].abs()).all()
