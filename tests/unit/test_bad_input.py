"""Bad input to the public functions: one line, of the library's own error, naming the argument."""

from collections.abc import Callable

import pytest
import torch

from bitdecoding import (
    CalibrationError,
    InvalidInputError,
    LayerCalibration,
    LayerCodec,
    PagedFP4Cache,
    Trajectory,
    decode_step_reference,
    dequantize_blocks,
    get_recipe,
    hadamard_transform,
    ldlq_factors,
    quantize_blocks,
    quantize_probabilities,
)
from bitdecoding.reference.vectorized import LogitRule

RECIPE = get_recipe("native-nvfp4-plain")


def bytes_of(*shape: int, value: int = 0) -> torch.Tensor:
    return torch.full(shape, value, dtype=torch.uint8)


def step(**options: float) -> torch.Tensor:
    kv = torch.zeros(1, 130, 64)
    return decode_step_reference(kv[:, :1], kv, kv, LayerCodec(RECIPE, 1, 64), **{"scale": 0.1, **options})


def attend(rows: int, tokens: int) -> torch.Tensor:
    q = torch.zeros(rows, 2, tokens, 64)
    return PagedFP4Cache(RECIPE, 1, 2, 64).layers[0].attend(q, q, q, LogitRule(0.1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize_blocks(torch.ones(16), dim=3), r"^dim: 3 is out of range for x with 1 dims"),
        (lambda: quantize_blocks(torch.ones(16), "fp3"), r"^BlockFormat: 'fp3' is unknown; use one of nvfp4, mxfp4"),
        (lambda: quantize_blocks(torch.full((16,), 1e300, dtype=torch.float64)), r"^x: 16 of 16 values are NaN or Inf"),
        (
            lambda: dequantize_blocks(bytes_of(32), bytes_of(1), "nvfp4"),
            r"^scale_bytes: expected shape \(2,\), got \(1,\)",
        ),
        (lambda: dequantize_blocks(bytes_of(16, value=200), bytes_of(1), "nvfp4"), r"^codes: 200 is no E2M1 code"),
        (lambda: dequantize_blocks(torch.zeros(16), bytes_of(1), "nvfp4"), r"^codes, scale_bytes: expected uint8"),
        (lambda: hadamard_transform(torch.ones(64, dtype=torch.int64)), r"^x: expected a floating-point tensor"),
        (lambda: hadamard_transform(torch.tensor(1.0)), r"^x: expected \[..., head_dim\], got a scalar"),
        (lambda: quantize_probabilities(torch.full((16,), 3.0), 2.0), r"^maximum: lies below a score"),
        (lambda: quantize_probabilities(torch.zeros(16, dtype=torch.int32)), r"^scores: expected a floating-point"),
        (lambda: step(scale=float("nan")), r"^scale: must be finite, got nan"),
        (lambda: step(softcap=-1.0), r"^softcap: must be positive and finite, or None, got -1.0"),
        (lambda: step(window=0), r"^window: must be at least 1 token, or None, got 0"),
        (lambda: LayerCodec(RECIPE, 0, 64), r"^num_kv_heads: must be at least 1, got 0"),
        (lambda: attend(0, 5), r"^layer 0: keys and values must be"),
        (lambda: attend(1, 0), r"^layer 0: keys and values must be"),
    ],
)
def test_bad_input(call: Callable[[], object], message: str):
    with pytest.raises(InvalidInputError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_values_beyond_the_kept_dtype_are_refused_before_anything_is_stored():
    """1e6 is finite in fp32 but not in the fp16 that the cache keeps; it must not become Inf in a later step."""
    layer = PagedFP4Cache(RECIPE, 1, 2, 64, dtype=torch.float16).layers[0]
    ordinary = torch.ones(1, 2, 127, 64)
    layer.attend(ordinary, ordinary, ordinary, LogitRule(0.1))
    one = ordinary[..., :1, :]
    with pytest.raises(InvalidInputError, match=r"^layer 0 keys: values overflow torch.float16"):
        layer.attend(one, one * 1e6, one, LogitRule(0.1))
    with pytest.raises(InvalidInputError, match=r"^layer 0 values: values overflow torch.float16"):
        layer.attend(one, one, one * 1e6, LogitRule(0.1))
    assert layer.store.lengths == [127]
    assert torch.isfinite(layer.attend(one, one, one, LogitRule(0.1))).all()


@pytest.mark.parametrize(
    ("statistics", "message"),
    [
        (LayerCalibration(torch.full((1, 64), float("nan"))), "its key mean holds NaN or Inf"),
        (LayerCalibration(torch.zeros(1, 64), tau=float("nan")), "its tau is nan"),
        (LayerCalibration(torch.zeros(1, 64), tau=-1.0), "its tau is -1.0"),
    ],
)
def test_calibrations_with_bad_numbers(statistics: LayerCalibration, message: str):
    with pytest.raises(CalibrationError, match=message):
        LayerCodec(RECIPE, 1, 64, statistics)


@pytest.mark.parametrize(
    ("moment", "message"),
    [
        (torch.eye(16) + torch.ones(16, 16).tril(-1) * 5, "not symmetric"),
        (torch.diag(torch.tensor([1.0] * 8 + [-1.0] * 8)), "negative on the diagonal"),
    ],
)
def test_matrices_that_are_no_second_moment(moment: torch.Tensor, message: str):
    with pytest.raises(InvalidInputError, match=message):
        ldlq_factors(moment)


@pytest.mark.parametrize("prompt_length", [-1, 0, 3])
def test_trajectories_without_prompt_or_continuation(prompt_length: int):
    with pytest.raises(InvalidInputError, match=r"^trajectory a: prompt_length must be within 1..2"):
        Trajectory("a", prompt_length, (1, 2, 3))
