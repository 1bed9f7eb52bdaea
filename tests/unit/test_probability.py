"""FP4 probabilities: scalar implementation, underflow floors, the threshold τ, masked blocks, MXFP4 and two levels."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scalar_reference import codes_against, e4m3_byte, quantize_block, scale_value

from bitdecoding.errors import InvalidInputError
from bitdecoding.numerics import (
    BlockFormat,
    ProbabilityRule,
    decode_e2m1,
    dequantize_blocks,
    quantize_dequantize,
    quantize_probabilities,
    two_level_probabilities,
)
from bitdecoding.numerics.probability import DEFAULT_C, DEFAULT_TAU

RULES = [(fmt.value, rule.value) for fmt in BlockFormat for rule in ProbabilityRule.for_format(fmt)]
each_rule = pytest.mark.parametrize(("fmt", "rule"), RULES)
each_format = pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])


def values_of(quantized, fmt: str) -> torch.Tensor:
    return dequantize_blocks(quantized.codes, quantized.scale_bytes, fmt)


def softmax_scores(*shape: int, spread: float = 2.0, seed: int = 0) -> torch.Tensor:
    """Base-2 scores less their row maximum."""
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread
    return scores - scores.amax(-1, keepdim=True)


@each_rule
@given(data=st.data())
@settings(max_examples=40)
def test_equals_the_scalar_implementation(fmt: str, rule: str, data: st.DataObject):
    size = BlockFormat(fmt).block_size
    score = st.one_of(st.integers(-14, 0).map(float), st.floats(-40, 0, width=32), st.just(-math.inf))
    scores = torch.tensor(data.draw(st.lists(score, min_size=size, max_size=size)))
    c = data.draw(st.sampled_from([1.0, 2.0, 8.0, 64.0]))
    quantized = quantize_probabilities(scores, 0.0, fmt, rule, c=c)
    p = list(torch.exp2(scores + math.log2(c)).numpy())
    if rule == "underflow":
        divisor = 2 if max(p) <= DEFAULT_TAU else 6
        byte = e4m3_byte(max(p) / type(p[0])(divisor))
        codes = codes_against(p, scale_value(byte, "nvfp4"), max(p))
    else:
        byte, _, codes = quantize_block([float(x) for x in p], fmt, rule)
    assert quantized.scale_bytes.tolist() == [byte]
    assert quantized.codes.tolist() == codes


@pytest.mark.parametrize(
    ("rule", "c", "floor"),
    [
        ("max6", 1.0, 6 * 2.0**-10),
        ("max6", 8.0, 6 * 2.0**-13),
        ("underflow", 1.0, 2.0**-9),
        ("underflow", 8.0, 2.0**-12),
    ],
)
def test_underflow_floors_of_the_contract(rule: str, c: float, floor: float):
    """Blocks just below the floor flush, blocks just above it keep their largest p."""
    scores = (math.log2(floor) + torch.tensor([-1e-5, 1e-5]))[:, None].expand(-1, 16)
    quantized = quantize_probabilities(scores, 0.0, "nvfp4", rule, c=c)
    assert quantized.scales[:, 0].tolist() == [0.0, 2.0**-9]
    assert not quantized.codes[0].any()
    assert quantized.codes[1].all()


@pytest.mark.parametrize(("c", "exponent"), [(1.0, -9.0), (8.0, -12.0)])
def test_floor_itself_flushes(c: float, exponent: float):
    assert not quantize_probabilities(torch.full((16,), exponent), c=c).scales.any()


def test_c_and_the_small_divisor_lower_the_floor_24_times():
    def floor(rule: str, c: float) -> float:
        scores = torch.arange(-16.0, 0.0, 1 / 64)[:, None].expand(-1, 16)
        kept = quantize_probabilities(scores, 0.0, "nvfp4", rule, c=c).scales[:, 0] > 0
        assert kept.int().diff().min() >= 0  # nothing above the floor flushes
        return 2.0 ** scores[kept][0, 0].item()

    assert abs(floor("max6", 1.0) / floor("underflow", DEFAULT_C) / 24 - 1) < 0.02


def test_default_threshold_lies_between_its_e4m3_neighbours():
    """c·p_max = 20/1024 maps to 2, 22/1024 to 6; both scales are far from the other rule's."""
    scores = torch.log2(torch.tensor([20.0, 22.0]) / 1024 / DEFAULT_C)[:, None].expand(-1, 16)
    quantized = quantize_probabilities(scores)
    assert quantized.scales[:, 0].tolist() == [10 / 1024, 4 / 1024]
    assert decode_e2m1(quantized.codes)[:, 0].tolist() == [2.0, 6.0]


@pytest.mark.parametrize(("offset", "largest_code"), [(-1e-3, 2.0), (0.0, 2.0), (1e-3, 6.0)])
def test_threshold_itself_maps_to_2(offset: float, largest_code: float):
    """τ = 2^-6 is met exactly by c·p_max = 8·2^-9."""
    scores = torch.full((16,), -9.0 + offset)
    quantized = quantize_probabilities(scores, tau=2.0**-6)
    assert decode_e2m1(quantized.codes).tolist() == [largest_code] * 16


def test_threshold_is_on_c_times_p():
    """p_max = 2^-7: c·p_max is 2^-7 for c = 1, below τ = 2^-6, and 2^-4 for c = 8, above it."""
    scores = torch.full((16,), -7.0)
    assert decode_e2m1(quantize_probabilities(scores, tau=2.0**-6, c=1.0).codes)[0] == 2
    assert decode_e2m1(quantize_probabilities(scores, tau=2.0**-6, c=8.0).codes)[0] == 6


@each_rule
def test_wholly_masked_block(fmt: str, rule: str):
    scores = torch.full((2, 64), -torch.inf)
    scores[0, 40:50] = 0.0
    quantized = quantize_probabilities(scores, 0.0, fmt, rule)
    values = values_of(quantized, fmt)
    assert not quantized.codes[1].any()
    assert not quantized.scale_bytes[1].any()
    assert not values[0, :32].any()
    assert (values[0, 40:50] > 0).all()
    assert not values[0, 50:].any()
    if fmt == "nvfp4":
        assert not quantized.scales[1].any()


@each_rule
def test_masked_tokens_do_not_change_the_others(fmt: str, rule: str):
    scores = softmax_scores(8, 64)
    scores[:, 5::7] = -20.0
    masked = scores.clone()
    masked[:, 5::7] = -torch.inf
    with_small, with_masked = (quantize_probabilities(s, 0.0, fmt, rule) for s in (scores, masked))
    assert torch.equal(with_small.scale_bytes, with_masked.scale_bytes)
    assert torch.equal(with_small.codes, with_masked.codes)


@each_rule
def test_maximum_is_subtracted_and_broadcast(fmt: str, rule: str):
    scores = torch.randint(-40, 1, (3, 4, 64), generator=torch.Generator().manual_seed(1)) / 4
    maximum = torch.tensor([5.0, -30.0, 7.5, 100.0])[None, :, None]
    shifted = quantize_probabilities(scores + maximum, maximum, fmt, rule)
    for got, expected in zip(shifted, quantize_probabilities(scores, 0.0, fmt, rule), strict=True):
        assert torch.equal(got, expected)


@each_rule
def test_accuracy_on_softmax_scores(fmt: str, rule: str):
    scores = softmax_scores(32, 128, spread=1.0)
    p = torch.exp2(scores)
    values = values_of(quantize_probabilities(scores, 0.0, fmt, rule), fmt) / DEFAULT_C
    assert (values - p).norm() / p.norm() < (0.1 if fmt == "nvfp4" else 0.2)


def test_small_probabilities_survive_by_c_and_tau_alone():
    """Flat rows of 2^-10, as in long contexts: the standard rule loses them all."""
    scores = torch.full((1, 128), -10.0)
    standard = values_of(quantize_probabilities(scores, 0.0, "nvfp4", "max6", c=1.0), "nvfp4")
    assert not standard.any()
    values = values_of(quantize_probabilities(scores), "nvfp4") / DEFAULT_C
    assert torch.equal(values, torch.exp2(scores))


@pytest.mark.parametrize("rule", ["up", "ocp"])
def test_c_changes_nothing_in_mxfp4(rule: str):
    scores = torch.randint(-400, 1, (16, 64), generator=torch.Generator().manual_seed(2)) / 8
    one, eight = (quantize_probabilities(scores, 0.0, "mxfp4", rule, c=c) for c in (1.0, 8.0))
    assert torch.equal(one.codes, eight.codes)
    assert torch.equal(one.scale_bytes.int() + 3, eight.scale_bytes.int())


def test_mxfp4_rounds_its_scale_up_so_that_the_largest_p_does_not_clip():
    scores = softmax_scores(64, 128)
    largest = (torch.exp2(scores) * DEFAULT_C).reshape(64, -1, 32).amax(-1)
    up = quantize_probabilities(scores, 0.0, "mxfp4")
    assert (largest <= 6 * up.scales).all()
    assert (largest > 3 * up.scales).all()
    ocp = quantize_probabilities(scores, 0.0, "mxfp4", "ocp")
    assert (largest > 6 * ocp.scales).any()


@each_format
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_bad_scores(fmt: str, bad: float):
    scores = torch.zeros(32)
    scores[3] = bad
    with pytest.raises(InvalidInputError, match=r"^scores: NaN or \+inf"):
        quantize_probabilities(scores, 0.0, fmt)


def test_running_maximum_of_a_wholly_masked_row_is_refused():
    """exp2(-inf - -inf) must never appear."""
    with pytest.raises(InvalidInputError, match="maximum: must be finite"):
        quantize_probabilities(torch.full((16,), -torch.inf), -torch.inf)


@pytest.mark.parametrize(("fmt", "rule"), [("nvfp4", "up"), ("nvfp4", "ocp"), ("mxfp4", "underflow")])
def test_rule_of_the_other_format(fmt: str, rule: str):
    with pytest.raises(InvalidInputError, match=rf"^rule: {rule} is not a probability rule of {fmt}"):
        quantize_probabilities(torch.zeros(32), 0.0, fmt, rule)


@pytest.mark.parametrize("changes", [{"c": 0.0}, {"c": -1.0}, {"c": math.nan}, {"tau": 0.0}, {"tau": math.nan}])
def test_c_and_tau_must_be_positive(changes: dict[str, float]):
    with pytest.raises(InvalidInputError, match=r"^c, tau: must be positive"):
        quantize_probabilities(torch.zeros(16), **changes)


def test_wrong_lengths():
    with pytest.raises(InvalidInputError, match=r"^scores: length 24 along dim -1"):
        quantize_probabilities(torch.zeros(24))
    with pytest.raises(InvalidInputError, match=r"^p: length 16 along dim -1"):
        two_level_probabilities(torch.zeros(16), "mxfp4")


@each_format
def test_two_level_error_does_not_depend_on_the_size_of_a_row(fmt: str):
    p = torch.softmax(softmax_scores(8, 128), -1)
    errors = []
    for factor in (1.0, 1e-3, 1e-6):
        values = two_level_probabilities(p * factor, fmt)
        errors.append(((values - p * factor).norm() / (p * factor).norm()).item())
    assert max(errors) < (0.06 if fmt == "nvfp4" else 0.2)
    assert max(errors) - min(errors) < 1e-3


def test_two_level_keeps_what_one_level_flushes():
    p = torch.softmax(softmax_scores(8, 128), -1) * 1e-4
    assert not quantize_dequantize(p, "nvfp4").any()
    assert (two_level_probabilities(p) - p).norm() < 0.06 * p.norm()


def test_two_level_first_scale_puts_the_row_maximum_at_448_times_6():
    p = torch.rand(4, 128, generator=torch.Generator().manual_seed(3)) + 0.1
    values = two_level_probabilities(p)
    torch.testing.assert_close(values.amax(-1), p.amax(-1), rtol=1e-6, atol=0)


@each_format
@pytest.mark.parametrize("largest", [0.0, 1e-45, 2.0**-145, 2.0**-130])
def test_two_level_rows_of_next_to_nothing(fmt: str, largest: float):
    """The first-level scale of such a row is zero or subnormal; the row may flush but gives no NaN."""
    p = torch.zeros(2, 128)
    p[0, 5], p[1] = largest, 0.25
    values = two_level_probabilities(p, fmt)
    assert torch.isfinite(values).all()
    assert (values[0] <= 2 * largest).all()
    assert not values[0, 6:].any()
    torch.testing.assert_close(values[1], p[1], rtol=1e-6 if fmt == "nvfp4" else 0.15, atol=0)
