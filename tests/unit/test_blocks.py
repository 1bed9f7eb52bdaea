"""Block quantizers: scale rules against a scalar implementation, invariances, range ends, packing and messages."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scalar_reference import E4M3_MAGNITUDES, quantize_block, tree_sum

from bitdecoding.errors import InvalidInputError
from bitdecoding.numerics import (
    BlockFormat,
    ScaleRule,
    decode_e2m1,
    dequantize_blocks,
    encode_e4m3,
    pack_nibbles,
    quantize_blocks,
    quantize_dequantize,
    unpack_nibbles,
)
from bitdecoding.numerics.blocks import candidate_scales
from bitdecoding.numerics.blocks import tree_sum as library_tree_sum

RULES = [(fmt.value, rule.value) for fmt in BlockFormat for rule in fmt.rules]
DIVISORS = {"max6": 6, "max4": 4, "max2": 2}
FORMATS = [fmt.value for fmt in BlockFormat]
each_rule = pytest.mark.parametrize(("fmt", "rule"), RULES)
each_format = pytest.mark.parametrize("fmt", FORMATS)

# Quarters meet the ties of E2M1 against scales 1, 2, 1/2, ...; the others fill the fp32 range.
any_fp32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
moderate = st.floats(width=32, min_value=-3000, max_value=3000)
quarters = st.integers(-48, 48).map(lambda n: n / 4)
half_precision = st.floats(width=16, allow_nan=False, allow_infinity=False)


def block_of(elements: st.SearchStrategy[float], size: int) -> st.SearchStrategy[list[float]]:
    return st.lists(elements, min_size=size, max_size=size)


def blocks_for(fmt: str) -> st.SearchStrategy[list[float]]:
    size = BlockFormat(fmt).block_size
    return st.one_of(*(block_of(elements, size) for elements in (any_fp32, moderate, quarters, half_precision)))


def heavy_tailed(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) / torch.rand(shape, generator=generator).clamp(min=0.01)


def block_errors(x: torch.Tensor, fmt: str, rule: str) -> torch.Tensor:
    """Squared errors of the blocks along the last dim, summed in fp32 in the library's order."""
    size = BlockFormat(fmt).block_size
    squares = (quantize_dequantize(x, fmt, rule) - x).square().reshape(-1, size).numpy()
    return torch.tensor(np.array([tree_sum(list(block)) for block in squares]))


@each_rule
@given(data=st.data())
@settings(max_examples=60)
def test_rule_equals_the_scalar_implementation(fmt: str, rule: str, data: st.DataObject):
    block = data.draw(blocks_for(fmt))
    quantized = quantize_blocks(torch.tensor(block), fmt, rule)
    expected = quantize_block(block, fmt, rule)
    assert quantized.codes.tolist() == expected.codes
    assert quantized.scale_bytes.tolist() == [expected.scale_byte]
    assert quantized.scales.tolist() == [expected.scale]


@each_rule
def test_rule_equals_the_scalar_implementation_on_heavy_tails(fmt: str, rule: str):
    size = BlockFormat(fmt).block_size
    x = (heavy_tailed(40, size) * torch.exp2(torch.arange(40) - 20.0)[:, None]).bfloat16().float()
    quantized = quantize_blocks(x, fmt, rule)
    expected = [quantize_block(block, fmt, rule) for block in x.tolist()]
    assert quantized.codes.tolist() == [block.codes for block in expected]
    assert quantized.scale_bytes[:, 0].tolist() == [block.scale_byte for block in expected]


def scale_tie_maxima(divisor: int) -> torch.Tensor:
    """Block maxima at every tie of the E4M3 scale, and the fp32 numbers beside them.

    A multiplication by the reciprocal of 6 takes the ones below for the tie itself.
    """
    scales = torch.tensor(E4M3_MAGNITUDES)
    ties = (scales[1:] + scales[:-1]) / 2 * divisor
    return torch.cat([torch.nextafter(ties, torch.tensor(0.0)), ties, torch.nextafter(ties, torch.tensor(torch.inf))])


@pytest.mark.parametrize("rule", DIVISORS)
def test_scale_is_rounded_from_a_true_division(rule: str):
    maxima = scale_tie_maxima(DIVISORS[rule])
    (scale_bytes,) = candidate_scales(maxima, BlockFormat.NVFP4, ScaleRule(rule))
    expected = maxima.numpy() / np.float32(DIVISORS[rule])
    assert torch.equal(scale_bytes, encode_e4m3(torch.tensor(expected)))
    below, tie, above = scale_bytes.long().chunk(3)
    assert torch.equal(above - below, torch.ones_like(tie))
    assert torch.equal(tie % 2, torch.zeros_like(tie))


def test_scale_ties_tell_a_division_from_a_reciprocal():
    maxima = scale_tie_maxima(6)
    reciprocal = encode_e4m3(maxima * (torch.tensor(1.0) / 6))
    assert not torch.equal(reciprocal, encode_e4m3(maxima / 6))


def test_codes_come_from_a_true_division():
    """4.6875 / 1.875 is a tie that goes to 2; multiplied by fl(1/1.875) it would exceed the tie and give 3."""
    x = torch.zeros(16)
    x[:2] = torch.tensor([11.25, 4.6875])
    assert np.float32(4.6875) * (np.float32(1) / np.float32(1.875)) > 2.5
    assert quantize_blocks(x, "nvfp4", "max6").codes[:2].tolist() == [7, 4]


@each_rule
@given(data=st.data())
@settings(max_examples=25)
def test_power_of_two_scaling_moves_only_the_scale(fmt: str, rule: str, data: st.DataObject):
    """Away from the ends of the scale's range: NVFP4 scales stay within E4M3's normal numbers."""
    size = BlockFormat(fmt).block_size
    block = data.draw(block_of(st.integers(-1023, 1023).map(lambda n: n / 1024), size))
    block[data.draw(st.integers(0, size - 1))] = 1.0
    exponent = data.draw(st.integers(-3, 8) if fmt == "nvfp4" else st.integers(-40, 40))
    x = torch.tensor(block)
    original, scaled = quantize_blocks(x, fmt, rule), quantize_blocks(x * 2.0**exponent, fmt, rule)
    assert torch.equal(scaled.codes, original.codes)
    assert torch.equal(scaled.scales, original.scales * 2.0**exponent)
    step = 8 if fmt == "nvfp4" else 1  # the exponent field of E4M3 stands above three mantissa bits
    assert (scaled.scale_bytes.int() - original.scale_bytes.int()).tolist() == [step * exponent]


@each_rule
@given(data=st.data())
@settings(max_examples=25)
def test_negation_flips_signs_and_nothing_else(fmt: str, rule: str, data: st.DataObject):
    x = torch.tensor(data.draw(blocks_for(fmt)))
    positive, negative = quantize_blocks(x, fmt, rule), quantize_blocks(-x, fmt, rule)
    assert torch.equal(positive.scale_bytes, negative.scale_bytes)
    assert torch.equal(positive.codes & 7, negative.codes & 7)
    flushed = bool((positive.scales == 0).all()) or not bool(x.any())
    assert torch.equal(positive.codes ^ negative.codes, torch.full_like(positive.codes, 0 if flushed else 8))


@each_format
@given(data=st.data())
@settings(max_examples=60)
def test_search_is_never_worse_than_a_single_scale(fmt: str, data: st.DataObject):
    x = torch.tensor(data.draw(st.one_of(block_of(s, BlockFormat(fmt).block_size) for s in (moderate, quarters))))
    single = ("max6", "max4") if fmt == "nvfp4" else ("ocp",)
    search = block_errors(x, fmt, BlockFormat(fmt).search_rule.value)
    for rule in single:
        assert search <= block_errors(x, fmt, rule)


@each_format
def test_search_takes_both_scales_and_gains_by_it(fmt: str):
    x = heavy_tailed(500, 32)
    standard, search = BlockFormat(fmt).standard_rule, BlockFormat(fmt).search_rule
    same = quantize_blocks(x, fmt, search).scale_bytes == quantize_blocks(x, fmt, standard).scale_bytes
    assert 0.1 < same.float().mean() < 0.9
    assert block_errors(x, fmt, search.value).sum() < 0.97 * block_errors(x, fmt, standard.value).sum()


@given(data=st.data())
@settings(max_examples=60)
def test_up_never_clips_and_is_the_smallest_scale_that_does_not(data: st.DataObject):
    x = torch.tensor(data.draw(blocks_for("mxfp4")))
    quantized = quantize_blocks(x, "mxfp4", "up")
    amax, scale = x.abs().max().double(), quantized.scales.double()
    assert amax <= 6 * scale
    if quantized.scale_bytes > 0:
        assert amax > 6 * scale / 2


def test_block_errors_are_summed_over_neighbours():
    """2^24 + (1 + 1) keeps the small terms, (2^24 + 1) + (0 + 1) loses them."""
    assert library_tree_sum(torch.tensor([2.0**24, 0.0, 1.0, 1.0])).item() == 2.0**24 + 2
    terms = heavy_tailed(50, 32).square()
    assert library_tree_sum(terms).tolist() == [float(tree_sum(list(row))) for row in terms.numpy()]


def test_mxfp4_candidates_at_the_ends_of_the_exponent_range():
    """e_ocp is clamped before the search adds 1; a zero block has byte 0 twice."""
    maxima = torch.tensor([0.0, 2.0**-149, 2.0**-126, 2.0**-125, 2.0**-124, 2.0**127])
    first, second = candidate_scales(maxima, BlockFormat.MXFP4, ScaleRule.SEARCH)
    assert first.tolist() == [0, 0, 0, 0, 1, 252]
    assert second.tolist() == [0, 1, 1, 1, 2, 253]


def test_defaults_are_the_standard_rules():
    x = heavy_tailed(4, 64)
    assert torch.equal(quantize_blocks(x).codes, quantize_blocks(x, "nvfp4", "max6").codes)
    assert torch.equal(quantize_blocks(x, "mxfp4").codes, quantize_blocks(x, "mxfp4", "ocp").codes)
    assert not torch.equal(quantize_blocks(x, "mxfp4").codes, quantize_blocks(x, "mxfp4", "up").codes)


@pytest.mark.parametrize("rule", DIVISORS)
def test_nvfp4_underflow_floor(rule: str):
    """Blocks with amax/κ <= 2^-10 flush, the tie included, negative elements to code 0 too."""
    floor = DIVISORS[rule] * 2.0**-10
    at_floor = torch.full((16,), floor)
    at_floor[1::2] *= -1
    flushed = quantize_blocks(at_floor, "nvfp4", rule)
    assert (flushed.scale_bytes.item(), flushed.scales.item(), flushed.codes.tolist()) == (0, 0.0, [0] * 16)
    above = torch.full((16,), np.nextafter(np.float32(floor), np.float32(1)).item())
    kept = quantize_blocks(above, "nvfp4", rule)
    assert (kept.scale_bytes.item(), kept.scales.item()) == (1, 2.0**-9)
    assert 0 not in kept.codes.tolist()


def test_mxfp4_has_no_floor_above_the_last_exponent():
    x = torch.full((32,), 2.0**-126)
    x[1::2] *= -1
    quantized = quantize_blocks(x, "mxfp4")
    assert quantized.scale_bytes.item() == 0
    assert torch.equal(dequantize_blocks(quantized.codes, quantized.scale_bytes, "mxfp4"), x)


@each_rule
def test_zero_block_has_zero_codes_even_for_minus_zero(fmt: str, rule: str):
    x = torch.zeros(32)
    x[::3] = -0.0
    quantized = quantize_blocks(x, fmt, rule)
    assert not quantized.codes.any()
    assert not quantized.scale_bytes.any()
    assert not dequantize_blocks(quantized.codes, quantized.scale_bytes, fmt).any()


@pytest.mark.parametrize("rule", ["max6", "4over6"])
@pytest.mark.parametrize("value", [2688.0, 2689.0, 3000.0, 65504.0, 1e20, 3e38])
def test_nvfp4_saturates_at_2688(value: float, rule: str):
    x = torch.full((16,), value)
    x[0] = -value
    values = quantize_dequantize(x, "nvfp4", rule)
    assert values.tolist() == [-2688.0] + [2688.0] * 15


def test_mxfp4_reaches_the_largest_fp32():
    largest = torch.finfo(torch.float32).max
    quantized = quantize_blocks(torch.full((32,), largest), "mxfp4")
    assert quantized.scale_bytes.item() == 125 + 127
    assert decode_e2m1(quantized.codes).tolist() == [6.0] * 32


@each_rule
def test_values_are_fixed_points(fmt: str, rule: str):
    """What a block decodes to under any rule, the search rule represents without error."""
    once = quantize_dequantize(heavy_tailed(64, 32), fmt, rule)
    again = quantize_dequantize(once, fmt, BlockFormat(fmt).search_rule)
    assert torch.equal(once, again)


@each_format
@pytest.mark.parametrize("dim", [-1, -2, 0])
def test_blocks_along_any_dim(fmt: str, dim: int):
    x = heavy_tailed(32, 64, 32)
    size = BlockFormat(fmt).block_size
    quantized = quantize_blocks(x, fmt, dim=dim)
    moved = quantize_blocks(x.movedim(dim, -1).contiguous(), fmt)
    for got, expected in zip(quantized, moved, strict=True):
        assert torch.equal(got, expected.movedim(-1, dim))
    shape = list(x.shape)
    shape[dim] //= size
    assert list(quantized.scale_bytes.shape) == shape
    assert quantized.codes.shape == x.shape
    values = dequantize_blocks(quantized.codes, quantized.scale_bytes, fmt, dim=dim)
    assert torch.equal(values, quantize_dequantize(x, fmt, dim=dim))
    for position in itertools.product((0, 17), (0, 33), (0, 31)):
        block_position = list(position)
        block_position[dim] //= size
        scale = quantized.scales[tuple(block_position)]
        assert values[position] == scale * decode_e2m1(quantized.codes[position])


@each_rule
def test_a_block_does_not_see_the_rest_of_the_batch(fmt: str, rule: str):
    x = heavy_tailed(6, 5, 64)
    whole = quantize_blocks(x, fmt, rule)
    polluted = x * 1e4
    for row, column in itertools.product(range(6), range(5)):
        polluted[row, column] = x[row, column]
        alone, among = quantize_blocks(x[row, column], fmt, rule), quantize_blocks(polluted, fmt, rule)
        for got, other, expected in zip(alone, among, whole, strict=True):
            assert torch.equal(got, expected[row, column])
            assert torch.equal(other[row, column], expected[row, column])


@each_format
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_inputs_equal_their_fp32_values(fmt: str, dtype: torch.dtype):
    x = heavy_tailed(8, 64).to(dtype)
    for got, expected in zip(quantize_blocks(x, fmt), quantize_blocks(x.float(), fmt), strict=True):
        assert torch.equal(got, expected)


@each_format
@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (2, 0, 64)])
def test_empty_tensors_stay_empty(fmt: str, shape: tuple[int, ...]):
    quantized = quantize_blocks(torch.empty(shape), fmt)
    assert tuple(quantized.codes.shape) == shape
    assert tuple(quantized.scale_bytes.shape) == (*shape[:-1], shape[-1] // BlockFormat(fmt).block_size)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@each_format
def test_nan_and_inf_are_refused_by_name_and_count(fmt: str, bad: float):
    x = torch.zeros(2, 64)
    x[0, 3] = x[1, 60] = bad
    with pytest.raises(InvalidInputError, match=r"^x: 2 of 128 values are NaN or Inf"):
        quantize_blocks(x, fmt)


@pytest.mark.parametrize(
    ("fmt", "shape", "dim", "message"),
    [
        ("nvfp4", (4, 24), -1, r"^x: length 24 along dim -1 is not a multiple of 16, the nvfp4 block"),
        ("mxfp4", (4, 48), -1, r"^x: length 48 along dim -1 is not a multiple of 32, the mxfp4 block"),
        ("mxfp4", (16, 32), 0, r"^x: length 16 along dim 0 is not a multiple of 32, the mxfp4 block"),
        ("nvfp4", (), -1, r"^dim: -1 is out of range for x with 0 dims"),
    ],
)
def test_length_that_is_no_multiple_of_the_block(fmt: str, shape: tuple[int, ...], dim: int, message: str):
    with pytest.raises(InvalidInputError, match=message):
        quantize_blocks(torch.zeros(shape), fmt, dim=dim)


@pytest.mark.parametrize(
    ("fmt", "rule", "known"),
    [
        ("nvfp4", "ocp", r"\['max6', 'max4', 'max2', '4over6'\]"),
        ("mxfp4", "4over6", r"\['ocp', 'up', 'search'\]"),
        ("mxfp4", "max6", r"\['ocp', 'up', 'search'\]"),
    ],
)
def test_rule_of_the_other_format(fmt: str, rule: str, known: str):
    with pytest.raises(InvalidInputError, match=rf"^rule: {rule} is not a {fmt} rule; use one of {known}"):
        quantize_blocks(torch.zeros(32), fmt, rule)


def test_unknown_format_and_rule():
    with pytest.raises(ValueError, match="fp5"):
        quantize_blocks(torch.zeros(32), "fp5")
    with pytest.raises(ValueError, match="max5"):
        quantize_blocks(torch.zeros(32), "nvfp4", "max5")


def test_other_inputs_than_floating_tensors():
    with pytest.raises(InvalidInputError, match=r"^x: expected a floating-point tensor, got torch.int32"):
        quantize_blocks(torch.zeros(16, dtype=torch.int32))
    with pytest.raises(InvalidInputError, match=r"^x: expected a torch.Tensor, got list"):
        quantize_blocks([0.0] * 16)


@given(data=st.data())
@settings(max_examples=40)
def test_packing_round_trip(data: st.DataObject):
    shape = [2 * n for n in data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))]
    seed, dim = data.draw(st.integers(0, 1000)), data.draw(st.integers(-len(shape), len(shape) - 1))
    codes = torch.randint(0, 16, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    packed = pack_nibbles(codes, dim)
    assert packed.dtype == torch.uint8
    assert packed.shape[dim] == shape[dim] // 2
    assert torch.equal(unpack_nibbles(packed, dim), codes)


def test_every_byte_unpacks_and_packs_again():
    packed = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(pack_nibbles(unpack_nibbles(packed)), packed)


def test_lower_index_lies_in_the_low_nibble():
    codes = torch.tensor([[1, 2, 3, 4], [15, 0, 8, 7]], dtype=torch.uint8)
    assert pack_nibbles(codes).tolist() == [[0x21, 0x43], [0x0F, 0x78]]
    assert pack_nibbles(codes, 0).tolist() == [[0xF1, 0x02, 0x83, 0x74]]


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        (torch.zeros(4, dtype=torch.int32), r"^codes: expected uint8, got torch.int32"),
        (torch.zeros(3, dtype=torch.uint8), r"^codes: length 3 along dim -1 is odd"),
        (torch.tensor([3, 16], dtype=torch.uint8), r"^codes: 16 does not fit 4 bits"),
    ],
)
def test_pack_refuses(codes: torch.Tensor, message: str):
    with pytest.raises(InvalidInputError, match=message):
        pack_nibbles(codes)


def test_unpack_refuses_other_dtypes():
    with pytest.raises(InvalidInputError, match=r"^packed: expected uint8, got torch.int8"):
        unpack_nibbles(torch.zeros(2, dtype=torch.int8))
