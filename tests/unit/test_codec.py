"""`LayerCodec`: bytes a token, round trips, page means, query parts, peer formats and calibration checks."""

from dataclasses import replace

import pytest
import torch

from bitdecoding.cache.codec import LayerCodec, round_to_fp16_row
from bitdecoding.cache.formats import EncodedPages, lloyd_max_levels
from bitdecoding.calibration.data import LayerCalibration
from bitdecoding.errors import CalibrationError, UnsupportedError
from bitdecoding.numerics import (
    decode_e4m3,
    dual_residual_query,
    encode_e4m3,
    hadamard_transform,
    ldlq_factors,
    quantize_blocks_ldlq,
    quantize_dequantize,
    random_rotation,
    unpack_nibbles,
)
from bitdecoding.recipe import PAGE_SIZE, SINK_TOKENS, Recipe, get_recipe, preset_names

HEADS, GROUP, HEAD_DIM = 2, 3, 64
FP4_PRESETS = [name for name in preset_names() if get_recipe(name).kv_format.blocks is not None]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def keys_and_values(pages: int = 2, head_dim: int = HEAD_DIM) -> tuple[torch.Tensor, torch.Tensor]:
    """BF16 pages; keys have an offset a channel, as real ones do."""
    offset = normal(HEADS, 1, head_dim, seed=9) * 2
    k = normal(pages, HEADS, PAGE_SIZE, head_dim, seed=1) + offset
    return k.bfloat16(), normal(pages, HEADS, PAGE_SIZE, head_dim, seed=2).bfloat16()


def calibration(head_dim: int = HEAD_DIM) -> LayerCalibration:
    queries = normal(HEADS, 500, head_dim, seed=3) * (1 + normal(HEADS, 1, head_dim, seed=4).abs() * 3)
    return LayerCalibration(
        key_mean=normal(HEADS, head_dim, seed=9) * 2,
        query_second_moment=queries.transpose(-1, -2) @ queries / 500,
        query_mean=normal(HEADS * GROUP, head_dim, seed=5),
    )


def codec_of(recipe: Recipe | str, head_dim: int = HEAD_DIM) -> LayerCodec:
    recipe = get_recipe(recipe) if isinstance(recipe, str) else recipe
    return LayerCodec(recipe, HEADS, head_dim, calibration(head_dim))


def no_first_page(pages: int = 2) -> torch.Tensor:
    return torch.zeros(pages, dtype=torch.bool)


def bytes_a_token(pages: EncodedPages) -> float:
    """Bytes a token and head, all tensors of the page together."""
    first = next(iter(pages.values()))
    return sum(t.numel() * t.element_size() for t in pages.values()) / (first.shape[0] * first.shape[1] * PAGE_SIZE)


def relative_error(values: torch.Tensor, expected: torch.Tensor) -> float:
    return ((values - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(
    ("name", "key_bytes", "value_bytes"),
    [
        ("bitdecoding-nvfp4", 72, 72),
        ("bitdecoding-mxfp4", 68, 68),
        ("bitdecoding-nvfp4-ldlq", 72, 72),
        ("bitdecoding-nvfp4-plus", 72 + 2, 72),  # a BF16 mean of 256 bytes a page
        ("bitdecoding-mxfp4-plus", 68 + 2, 68),
        ("trtllm-nvfp4", 72, 72),
        ("bf16", 256, 256),
        ("fp8", 128, 128),
        ("saw-int4", 64 + 4, 64 + 4),
        ("turboquant-4bit", 64 + 2, 64 + 2),
    ],
)
def test_bytes_a_token_and_head_at_head_dim_128(name: str, key_bytes: int, value_bytes: int):
    k, v = keys_and_values(head_dim=128)
    codec = codec_of(name, 128)
    assert bytes_a_token(codec.encode_keys(k, no_first_page())) == key_bytes
    assert bytes_a_token(codec.encode_values(v)) == value_bytes


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_layout_of_fp4_pages(fmt: str):
    """Key scales lie along channels, value scales along tokens; codes are packed along channels in both."""
    size = 16 if fmt == "nvfp4" else 32
    k, v = keys_and_values()
    codec = codec_of(f"bitdecoding-{fmt}")
    keys, values = codec.encode_keys(k, no_first_page()), codec.encode_values(v)
    for pages, scales in ((keys, (PAGE_SIZE, HEAD_DIM // size)), (values, (PAGE_SIZE // size, HEAD_DIM))):
        assert set(pages) == {"codes", "scales"}
        assert pages["codes"].dtype == pages["scales"].dtype == torch.uint8
        assert pages["codes"].shape == (2, HEADS, PAGE_SIZE, HEAD_DIM // 2)
        assert pages["scales"].shape == (2, HEADS, *scales)
        assert pages["scales"].is_contiguous()


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_papers_recipe_equals_direct_quantization(fmt: str):
    k, v = keys_and_values()
    codec = codec_of(f"bitdecoding-{fmt}")
    keys = codec.decode_keys(codec.encode_keys(k, no_first_page()))
    smoothed = hadamard_transform(k.float() - calibration().key_mean[:, None])
    assert torch.equal(keys, quantize_dequantize(smoothed, fmt, "4over6" if fmt == "nvfp4" else "search"))
    values = codec.decode_values(codec.encode_values(v))
    assert torch.equal(values, quantize_dequantize(v, fmt, dim=-2))
    assert not torch.equal(values, quantize_dequantize(v, fmt, dim=-1))


def test_plain_recipe_equals_direct_quantization():
    k, v = keys_and_values()
    codec = codec_of("trtllm-nvfp4")
    keys = codec.decode_keys(codec.encode_keys(k, no_first_page()))
    assert torch.equal(keys, quantize_dequantize(k, "nvfp4", "max6"))
    assert torch.equal(codec.decode_values(codec.encode_values(v)), quantize_dequantize(v, "nvfp4", dim=-1))


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_ldlq_recipe_rounds_against_the_rotated_moment(fmt: str):
    k, _ = keys_and_values(1)
    codec = codec_of(f"bitdecoding-{fmt}-ldlq")
    moment = calibration().query_second_moment
    hadamard = hadamard_transform(torch.eye(HEAD_DIM))
    factors = ldlq_factors(hadamard @ moment @ hadamard.T, 0.5)
    for got, expected in zip(codec.ldlq_factors(calibration()), factors, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
    smoothed = hadamard_transform(k.float() - calibration().key_mean[:, None])
    expected = quantize_blocks_ldlq(smoothed, codec.ldlq_factors(calibration()), fmt)
    encoded = codec.encode_keys(k, no_first_page(1))
    assert torch.equal(unpack_nibbles(encoded["codes"]), expected.codes)
    assert torch.equal(encoded["scales"], expected.scale_bytes)


def test_ldlq_lowers_the_logit_error_of_typical_queries():
    k, _ = keys_and_values()
    statistics = calibration()
    expected = hadamard_transform(k.float() - statistics.key_mean[:, None])
    moment = statistics.query_second_moment
    hadamard = hadamard_transform(torch.eye(HEAD_DIM))
    rotated = hadamard @ moment @ hadamard.T
    errors = {}
    for name in ("bitdecoding-nvfp4", "bitdecoding-nvfp4-ldlq"):
        codec = codec_of(name)
        error = codec.decode_keys(codec.encode_keys(k, no_first_page())) - expected
        errors[name] = ((error @ rotated) * error).sum(-1).mean().item()
    assert errors["bitdecoding-nvfp4-ldlq"] < 0.9 * errors["bitdecoding-nvfp4"]


def test_stored_factors_serve_only_their_damping_and_rotation():
    statistics = calibration()
    stored = ldlq_factors(torch.eye(HEAD_DIM).expand(HEADS, -1, -1) * 7, 0.5)
    statistics = replace(statistics, ldlq=stored, ldlq_damping=0.5)
    recipe = get_recipe("bitdecoding-nvfp4-ldlq")

    def uses_stored(recipe: Recipe) -> bool:
        return torch.equal(LayerCodec(recipe, HEADS, HEAD_DIM, statistics).ldlq_factors(statistics).d, stored.d)

    assert uses_stored(recipe)
    assert not uses_stored(recipe.replace(ldlq_damping=0.25))
    assert not uses_stored(recipe.replace(rotation_block=16))
    assert not uses_stored(recipe.replace(rotation_seed=1))
    assert not uses_stored(recipe.replace(rotation="random", rotation_seed=1))


@pytest.mark.parametrize("sink_tokens", [0, SINK_TOKENS, PAGE_SIZE])
def test_page_mean_leaves_the_sink_of_first_pages_out(sink_tokens: int):
    k, _ = keys_and_values()
    k[:, :, :SINK_TOKENS] += 50  # a sink unlike the other keys
    codec = codec_of(get_recipe("bitdecoding-nvfp4-page-centered").replace(sink_tokens=sink_tokens))
    encoded = codec.encode_keys(k, torch.tensor([True, False]))
    smoothed = hadamard_transform(k.float() - calibration().key_mean[:, None])
    left_out = 0 if sink_tokens == PAGE_SIZE else sink_tokens  # a page that is all sink keeps its whole mean
    assert encoded["mean"].dtype == torch.bfloat16
    assert torch.equal(encoded["mean"][0], smoothed[0, :, left_out:].mean(-2).bfloat16())
    assert torch.equal(encoded["mean"][1], smoothed[1].mean(-2).bfloat16())


def test_page_centered_keys_are_relative_to_the_rounded_mean():
    k, _ = keys_and_values()
    codec = codec_of("bitdecoding-nvfp4-page-centered")
    encoded = codec.encode_keys(k, no_first_page())
    smoothed = hadamard_transform(k.float() - calibration().key_mean[:, None])
    mean = encoded["mean"].float().unsqueeze(-2)
    assert torch.equal(codec.decode_keys(encoded), quantize_dequantize(smoothed - mean, "nvfp4", "4over6"))
    assert relative_error(codec.decode_keys(encoded) + mean, smoothed) < 0.1


def test_pages_are_encoded_one_by_one():
    k, v = keys_and_values(3)
    codec = codec_of("bitdecoding-nvfp4-page-centered")
    first_page = torch.tensor([True, False, False])
    keys, values = codec.encode_keys(k, first_page), codec.encode_values(v)
    for page in range(3):
        one = slice(page, page + 1)
        for name, tensor in codec.encode_keys(k[one], first_page[one]).items():
            assert torch.equal(tensor, keys[name][one])
        for name, tensor in codec.encode_values(v[one]).items():
            assert torch.equal(tensor, values[name][one])


@pytest.mark.parametrize("name", preset_names())
def test_no_pages(name: str):
    codec = codec_of(name)
    empty = torch.empty(0, HEADS, PAGE_SIZE, HEAD_DIM, dtype=torch.bfloat16)
    assert codec.decode_keys(codec.encode_keys(empty, no_first_page(0))).shape == empty.shape
    assert codec.decode_values(codec.encode_values(empty)).shape == empty.shape


def queries(tokens: int = 2) -> torch.Tensor:
    return (normal(HEADS, GROUP, tokens, HEAD_DIM, seed=7) * 3).bfloat16()


@pytest.mark.parametrize("name", [*preset_names(), *(f"{name}-w16" for name in FP4_PRESETS)])
def test_query_parts_add_up_to_the_rotated_query(name: str):
    codec = codec_of(name)
    parts = codec.query_parts(queries())
    rotated = codec.rotate(queries())
    bound = {"16bit": 5e-4, "fp8": 0.03, "fp4": 0.15, "dual-fp4": 0.02}[codec.recipe.query_format.value]
    assert relative_error(sum(parts), rotated) < bound
    smoothed = codec.recipe.query_smoothing.value != "none"
    assert len(parts) == {"dual-fp4": 2}.get(codec.recipe.query_format.value, 1) + smoothed
    for part in parts:
        assert part.dtype == torch.float32
        assert part.shape == rotated.shape


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_query_parts_by_format(fmt: str):
    recipe = get_recipe(f"bitdecoding-{fmt}")
    rotated = hadamard_transform(queries())
    first, second = codec_of(recipe).query_parts(queries())
    dual = dual_residual_query(rotated, fmt)
    assert torch.equal(first, dual.first_values)
    assert torch.equal(second, dual.residual_values)
    (single,) = codec_of(recipe.replace(query_format="fp4")).query_parts(queries())
    assert torch.equal(single, dual.first_values)
    (fp8,) = codec_of(recipe.replace(query_format="fp8")).query_parts(queries())
    assert torch.equal(fp8, decode_e4m3(encode_e4m3(rotated)))
    (bits16,) = codec_of(recipe.replace(query_format="16bit")).query_parts(queries())
    assert torch.equal(bits16, rotated.half().float())


def test_smoothing_means_of_the_query():
    """``gqa`` takes the mean of the query heads that share a KV head, ``token`` the calibrated mean of each head."""
    rotated = hadamard_transform(queries())
    residual, mean = codec_of("nvfp4-query-gqa-mean").query_parts(queries())
    rounded = rotated.mean(1, keepdim=True).bfloat16().float()
    assert torch.equal(mean, rounded.expand_as(rotated))
    assert torch.equal(residual, quantize_dequantize(rotated - rounded, "nvfp4"))
    _, mean = codec_of("nvfp4-query-token-mean").query_parts(queries())
    expected = hadamard_transform(calibration().query_mean).reshape(HEADS, GROUP, 1, HEAD_DIM)
    assert torch.equal(mean, expected.bfloat16().float().expand_as(mean))


def test_query_of_page_means():
    codec = codec_of("bitdecoding-nvfp4-plus")
    assert torch.equal(codec.page_mean_query(queries()), hadamard_transform(queries()).bfloat16().float())


def test_rows_of_any_magnitude_round_to_fp16():
    x = normal(6, 64)
    assert torch.equal(round_to_fp16_row(x), x.half().float())
    for factor in (2.0**20, 2.0**100, 2.0**-60):
        assert torch.equal(round_to_fp16_row(x * factor), x.half().float() * factor)
    mixed = torch.stack([x[0] * 1e30, torch.zeros(64), x[1]])
    assert torch.equal(round_to_fp16_row(mixed)[2], x[1].half().float())
    assert not round_to_fp16_row(mixed)[1].any()
    assert relative_error(round_to_fp16_row(mixed)[0] / 1e30, x[0]) < 5e-4
    assert torch.isfinite(round_to_fp16_row(torch.full((1, 64), 3.4e38))).all()


@pytest.mark.parametrize(
    "changes",
    [
        {"rotation": "none"},
        {"rotation": "hadamard"},
        {"rotation": "hadamard", "rotation_block": 16},
        {"rotation": "hadamard", "rotation_seed": 3},
        {"rotation": "random", "rotation_seed": 3},
    ],
)
def test_rotations_are_undone_and_keep_products(changes: dict[str, object]):
    codec = LayerCodec(Recipe(name="mine", kv_format="nvfp4", **changes), HEADS, HEAD_DIM)
    x, y = normal(5, HEAD_DIM), normal(7, HEAD_DIM, seed=1)
    torch.testing.assert_close(codec.unrotate(codec.rotate(x)), x, atol=1e-5, rtol=0)
    torch.testing.assert_close(codec.rotate(x) @ codec.rotate(y).T, x @ y.T, atol=5e-5, rtol=0)
    assert torch.equal(codec.rotate(x), x) is (changes["rotation"] == "none")
    if changes["rotation"] == "random":
        torch.testing.assert_close(codec.rotate(x), x @ random_rotation(HEAD_DIM, 3).T)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("bf16", 0.0, 0.0),  # the pages are BF16 already
        ("fp8", 0.02, 0.03),
        ("saw-int4", 0.08, 0.12),
        ("turboquant-4bit", 0.09, 0.105),
        ("trtllm-nvfp4", 0.085, 0.1),
        ("native-mxfp4-plain", 0.1, 0.13),
    ],
)
def test_errors_of_the_formats_on_normal_data(name: str, low: float, high: float):
    _, x = keys_and_values()
    codec = LayerCodec(get_recipe(name), HEADS, HEAD_DIM)
    keys = codec.unrotate(codec.decode_keys(codec.encode_keys(x, no_first_page())))
    values = codec.decode_values(codec.encode_values(x))
    assert low <= relative_error(values, x.float()) <= high
    assert low <= relative_error(keys, x.float()) <= (high or 1e-6)


def test_int4_keeps_the_ends_and_offsets():
    """Min-max codes: an offset costs nothing but the 16-bit rounding of the minimum, and constant rows survive."""
    _, x = keys_and_values()
    codec = LayerCodec(Recipe(name="int4", kv_format="int4"), HEADS, HEAD_DIM)
    x = x.float()
    error = (codec.decode_values(codec.encode_values(x)) - x).abs().amax(-1)
    step = (x.amax(-1) - x.amin(-1)) / 15
    assert (error < 0.6 * step).all()
    offset = codec.decode_values(codec.encode_values(x + 64)) - 64
    assert relative_error(offset, x) < 0.13
    constant = torch.full((1, HEADS, PAGE_SIZE, HEAD_DIM), -3.0)
    assert torch.equal(codec.decode_values(codec.encode_values(constant)), constant)


def test_lloyd_max_levels_are_those_of_max_1960():
    levels = torch.tensor(lloyd_max_levels())
    published = torch.tensor([0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733])
    torch.testing.assert_close(levels[8:], published, atol=1e-3, rtol=0)
    torch.testing.assert_close(levels, -levels.flip(0), atol=1e-5, rtol=0)


def test_lloyd_codes_keep_scale_and_zero_vectors():
    _, x = keys_and_values()
    codec = LayerCodec(get_recipe("turboquant-4bit"), HEADS, HEAD_DIM)
    x = x.float()
    x[0, 0, 0] = 0
    values = codec.decode_values(codec.encode_values(x))
    assert not values[0, 0, 0].any()
    torch.testing.assert_close(codec.decode_values(codec.encode_values(x * 64)), values * 64, atol=1e-3, rtol=1e-4)


def test_calibrated_threshold():
    statistics = replace(calibration(), tau=0.03)
    assert LayerCodec(get_recipe("bitdecoding-nvfp4"), HEADS, HEAD_DIM, statistics).tau == 0.03
    assert codec_of("bitdecoding-nvfp4").tau == 21 / 1024


@pytest.mark.parametrize("name", ["bitdecoding-nvfp4", "bitdecoding-nvfp4-plus", "nvfp4-query-token-mean"])
def test_calibration_is_missing(name: str):
    with pytest.raises(CalibrationError, match=rf"^calibration: recipe {name} needs one; run `bitdecoding calibrate`"):
        LayerCodec(get_recipe(name), HEADS, HEAD_DIM)


@pytest.mark.parametrize(("heads", "head_dim"), [(HEADS + 1, HEAD_DIM), (HEADS, 128)])
def test_calibration_of_another_model(heads: int, head_dim: int):
    with pytest.raises(CalibrationError, match=r"^calibration: its key mean has shape \(2, 64\), the layer's KV heads"):
        LayerCodec(get_recipe("bitdecoding-nvfp4"), heads, head_dim, calibration())


@pytest.mark.parametrize(
    ("name", "field", "message"),
    [
        ("bitdecoding-nvfp4-plus", "query_second_moment", r"^calibration: holds no query second moment"),
        ("nvfp4-query-token-mean", "query_mean", r"^calibration: holds no query mean"),
    ],
)
def test_calibration_lacks_a_statistic(name: str, field: str, message: str):
    with pytest.raises(CalibrationError, match=message):
        LayerCodec(get_recipe(name), HEADS, HEAD_DIM, replace(calibration(), **{field: None}))


@pytest.mark.parametrize("shape", [(HEADS * GROUP - 1, HEAD_DIM), (HEADS * GROUP, 128)])
def test_query_mean_of_another_model(shape: tuple[int, int]):
    statistics = replace(calibration(), query_mean=normal(*shape))
    with pytest.raises(CalibrationError, match=r"^calibration: (its query mean has shape|made for 5 query heads)"):
        LayerCodec(get_recipe("nvfp4-query-token-mean"), HEADS, HEAD_DIM, statistics)


def test_query_mean_of_another_group():
    """A mean of one query head a KV head must not be broadcast over a larger group."""
    statistics = replace(calibration(), query_mean=normal(HEADS, HEAD_DIM))
    codec = LayerCodec(get_recipe("nvfp4-query-token-mean"), HEADS, HEAD_DIM, statistics)
    with pytest.raises(CalibrationError, match=r"^calibration: query mean made for 1 query heads a KV head"):
        codec.query_parts(queries())


@pytest.mark.parametrize("heads", [1, HEADS + 1])
def test_second_moment_of_another_model(heads: int):
    statistics = replace(calibration(), query_second_moment=torch.eye(HEAD_DIM).expand(heads, HEAD_DIM, HEAD_DIM))
    with pytest.raises(CalibrationError, match=r"^calibration: its query second moment has shape"):
        LayerCodec(get_recipe("bitdecoding-nvfp4-plus"), HEADS, HEAD_DIM, statistics)


def test_head_dim_80():
    """80 is a multiple of NVFP4's 16 but not of MXFP4's 32; its Hadamard blocks are 16."""
    k, v = keys_and_values(head_dim=80)
    codec = codec_of("bitdecoding-nvfp4-plus", 80)
    encoded = codec.encode_keys(k, no_first_page())
    assert bytes_a_token(encoded) == 40 + 5 + 160 / 128
    assert relative_error(codec.decode_values(codec.encode_values(v)), v.float()) < 0.1
    with pytest.raises(UnsupportedError, match=r"^head_dim: 80 is not a multiple of 32, the mxfp4 block"):
        codec_of("bitdecoding-mxfp4", 80)
