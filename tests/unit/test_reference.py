"""Literal Algorithm 1, the vectorised attention and exact fp64 attention against each other."""

import math
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bitdecoding.cache.codec import LayerCodec
from bitdecoding.calibration.data import LayerCalibration
from bitdecoding.errors import InvalidInputError
from bitdecoding.recipe import (
    PAGE_SIZE,
    KVFormat,
    ProbabilityFormat,
    Recipe,
    get_recipe,
    preset_names,
)
from bitdecoding.reference import (
    LogitRule,
    PagedSequence,
    Partial,
    attention_step,
    bits16_partial,
    bits16_visible,
    build_sequence,
    combine_partials,
    decode_step_reference,
    exact_attention,
    page_partial,
    page_visible,
    quantized_tokens,
)

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (1, 15, 16, 17, 127, 128, 129, 255, 256, 257, 300, 384, 385)
KV_HEADS = 2


def all_recipes() -> list[str]:
    names = preset_names()
    return names + [f"{name}-w16" for name in names if get_recipe(name).kv_format.blocks is not None]


def make_codec(recipe: Recipe, group: int, head_dim: int, kv_heads: int = KV_HEADS) -> LayerCodec:
    """A codec with a calibration that looks like real keys: a mean with outlier channels, correlated queries."""
    g = torch.Generator().manual_seed(head_dim + group)
    mean = torch.randn(kv_heads, head_dim, generator=g)
    mean[:, ::17] *= 8
    x = torch.randn(kv_heads, 4 * head_dim, head_dim, generator=g) @ torch.randn(head_dim, head_dim, generator=g)
    calibration = LayerCalibration(
        key_mean=mean,
        query_second_moment=x.transpose(-1, -2) @ x / x.shape[1],
        query_mean=torch.randn(kv_heads * group, head_dim, generator=g) / 4,
    )
    return LayerCodec(recipe, kv_heads, head_dim, calibration)


@dataclass
class Row:
    """One sequence and its queries: q [q_heads, q_len, d], keys and values [kv_heads, N, d], bf16."""

    q: Tensor
    keys: Tensor
    values: Tensor

    @property
    def length(self) -> int:
        return self.keys.shape[1]


def make_row(codec: LayerCodec, length: int, *, q_len: int = 1, group: int = 1, seed: int = 0) -> Row:
    g = torch.Generator().manual_seed(seed * 1000 + length)
    heads, d = codec.num_kv_heads, codec.head_dim
    mean = torch.zeros(heads, d) if codec.key_mean is None else codec.key_mean
    keys = torch.randn(heads, length, d, generator=g) + mean[:, None]
    values = torch.randn(heads, length, d, generator=g)
    q = 1.5 * torch.randn(heads * group, q_len, d, generator=g)
    return Row(q.bfloat16(), keys.bfloat16(), values.bfloat16())


def vectorised(
    rows: list[Row],
    codec: LayerCodec,
    *,
    scale: float,
    num_splits: int = 1,
    softcap: float | None = None,
    window: int | None = None,
    keep_sink: bool = True,
) -> list[Partial]:
    """All rows in one call; what no row may read is NaN. Each result has the shapes of `attention_step`'s."""
    heads, d, q_len = codec.num_kv_heads, codec.head_dim, rows[0].q.shape[1]
    n_fp4 = [int(quantized_tokens(max(r.length - q_len + 1, 0))) for r in rows]
    pages = max(n_fp4) // PAGE_SIZE
    sinks = [codec.recipe.sink_tokens if n and keep_sink else 0 for n in n_fp4]
    tokens = max(s + r.length - n for s, r, n in zip(sinks, rows, n_fp4, strict=True)) + 1
    shape = (len(rows), heads)
    page_keys, page_values = torch.full((2, *shape, pages * PAGE_SIZE, d), torch.nan)
    means = torch.full((*shape, pages, d), torch.nan) if codec.recipe.page_centered_keys else None
    keys, values = torch.full((2, *shape, tokens, d), torch.nan)
    key_pos = torch.full((len(rows), tokens), -1)
    for i, (row, n, sink) in enumerate(zip(rows, n_fp4, sinks, strict=True)):
        if n:
            k = row.keys[:, :n].unflatten(1, (-1, PAGE_SIZE)).transpose(0, 1)
            v = row.values[:, :n].unflatten(1, (-1, PAGE_SIZE)).transpose(0, 1)
            encoded = codec.encode_keys(k, torch.arange(n // PAGE_SIZE) == 0)
            page_keys[i, :, :n] = codec.decode_keys(encoded).transpose(0, 1).flatten(1, 2)
            page_values[i, :, :n] = codec.decode_values(codec.encode_values(v)).transpose(0, 1).flatten(1, 2)
            if means is not None:
                means[i, :, : n // PAGE_SIZE] = encoded["mean"].transpose(0, 1)
        at_hand = torch.cat((torch.arange(sink), torch.arange(n, row.length)))
        keys[i, :, : len(at_hand)], values[i, :, : len(at_hand)] = row.keys[:, at_hand], row.values[:, at_hand]
        key_pos[i, : len(at_hand)] = at_hand
    query_pos = torch.stack([torch.arange(r.length - q_len, r.length) for r in rows])
    n_quantized = torch.tensor(n_fp4)[:, None].expand(-1, q_len)
    sink_column = torch.tensor(sinks)[:, None]
    logits = LogitRule(scale, softcap)
    q = torch.stack([r.q for r in rows]).unflatten(1, (heads, -1))
    joined = combine_partials([
        page_partial(
            codec, q, page_keys, page_values, means,
            page_visible(query_pos, n_quantized, pages, sink_column, window), logits, num_splits,
        ),
        bits16_partial(
            codec, q, keys, values, bits16_visible(query_pos, n_quantized, key_pos, sink_column, window), logits
        ),
    ])  # fmt: skip
    return [Partial(o.flatten(0, 1), lse.flatten(0, 1)) for o, lse in zip(joined.output, joined.lse, strict=True)]


def assert_same(pairs: list[tuple[Partial, Partial]], *, few_flips: bool = True) -> None:
    """Equal to fp32 rounding.

    Rounding P is discontinuous: where fp32 sums of another order land on the other side of a rounding boundary, one
    code of a row changes. ``few_flips`` allows that for 1 % of the rows.
    """
    errors = torch.cat([
        ((a.output - b.output).norm(dim=-1) / b.output.norm(dim=-1).clamp(min=1e-30)).flatten() for a, b in pairs
    ])  # fmt: skip
    assert errors.isfinite().all()
    assert (errors > 1e-5).float().mean() <= (0.01 if few_flips else 0)
    assert errors.max() <= (0.05 if few_flips else 1e-5)
    for a, b in pairs:
        torch.testing.assert_close(a.lse, b.lse, rtol=1e-5, atol=1e-5)


def literal(
    row: Row, codec: LayerCodec, *, keep_sink: bool = True, block_table: Tensor | None = None, **options: Any
) -> Partial:
    sequence = build_sequence(
        row.keys,
        row.values,
        codec,
        new_tokens=min(row.q.shape[1], max(row.length, 1)),
        keep_sink=keep_sink,
        block_table=block_table,
    )
    return attention_step(row.q, sequence, codec, **options)


def shuffled_table(num_pages: int, seed: int) -> Tensor:
    """Distinct pages of a larger pool, then garbage."""
    g = torch.Generator().manual_seed(seed)
    return torch.cat((torch.randperm(num_pages + 3, generator=g)[:num_pages], torch.tensor([-7, 10**6])))


def compare(recipe: str, length: int, q_len: int, group: int, seed: str) -> tuple[Partial, Partial]:
    """Literal and vectorised result of one case, its other settings drawn from ``seed``."""
    rng = random.Random(seed)
    head_dim = rng.choice((64, 128))
    q_len = min(q_len, length)
    options: dict[str, Any] = {
        "scale": head_dim**-0.5,
        "num_splits": rng.choice((1, 2, 3, 5)),
        "softcap": rng.choice((None, None, 15.0)),
        "window": rng.choice((None, None, 40, 200)),
        "keep_sink": rng.random() < 0.75,
    }
    codec = make_codec(get_recipe(recipe), group, head_dim)
    row = make_row(codec, length, q_len=q_len, group=group, seed=rng.randrange(1000))
    table = shuffled_table(length // PAGE_SIZE, length) if rng.random() < 0.5 else None
    return literal(row, codec, block_table=table, **options), vectorised([row], codec, **options)[0]


class TestLiteralAgainstVectorised:
    @pytest.mark.parametrize("recipe", all_recipes())
    def test_every_preset_and_length(self, recipe: str) -> None:
        rng = random.Random(recipe)
        assert_same([
            compare(recipe, length, rng.choice((1, 1, 2, 3, 4)), rng.choice((1, 3, 8)), f"{recipe} {length}")
            for length in LENGTHS
        ])  # fmt: skip

    @pytest.mark.parametrize("recipe", ["bitdecoding-nvfp4", "bitdecoding-mxfp4-page-centered-w16"])
    @pytest.mark.parametrize("q_len", [1, 2, 3, 4])
    def test_every_query_length_group_and_length(self, recipe: str, q_len: int) -> None:
        assert_same([
            compare(recipe, length, q_len, group, f"{recipe} {q_len} {group} {length}")
            for length in LENGTHS
            for group in (1, 3, 8)
        ])  # fmt: skip

    @pytest.mark.parametrize("recipe", ["bf16", "bitdecoding-nvfp4", "bitdecoding-nvfp4-page-centered-w16"])
    @pytest.mark.parametrize("num_splits", [1, 2])
    def test_rows_of_mixed_length_equal_single_rows(self, recipe: str, num_splits: int) -> None:
        codec = make_codec(get_recipe(recipe), 2, 64)
        # One split: with more, a batch cuts at its longest row's pages. Rows of one page count can have more.
        lengths = (300, 1, 129, 0, 385, 128) if num_splits == 1 else (300, 260, 384)
        rows = [make_row(codec, length, group=2, seed=i) for i, length in enumerate(lengths)]
        options: dict[str, Any] = {"scale": 0.125, "window": 150, "num_splits": num_splits}
        together = vectorised(rows, codec, **options)
        assert_same([
            (one, vectorised([row], codec, **options)[0]) for one, row in zip(together, rows, strict=True) if row.length
        ])  # fmt: skip
        assert_same([(one, literal(row, codec, **options)) for one, row in zip(together, rows, strict=True)])

    def test_padding_rows_read_nothing(self) -> None:
        codec = make_codec(get_recipe("bitdecoding-nvfp4-page-centered"), 3, 64)
        rows = [make_row(codec, length, q_len=2, group=3) for length in (0, 300, 0)]
        results = [vectorised(rows, codec, scale=0.1)[0], literal(rows[0], codec, scale=0.1, num_splits=2)]
        results.append(vectorised(rows[:1], codec, scale=0.1)[0])
        for result in results:
            assert result.output.shape == (6, 2, 64)
            assert torch.equal(result.output, torch.zeros(6, 2, 64))
            assert torch.equal(result.lse, torch.full((6, 2), -torch.inf))

    def test_nan_of_one_row_stays_there(self) -> None:
        codec = make_codec(get_recipe("bitdecoding-nvfp4"), 1, 64)
        rows = [make_row(codec, 200, seed=i) for i in range(3)]
        clean = vectorised(rows, codec, scale=0.125)
        rows[1].values[0, 150, 3] = torch.nan
        rows[1].keys[1, 199, 0] = torch.nan
        dirty = vectorised(rows, codec, scale=0.125)
        for i in (0, 2):
            assert torch.equal(dirty[i].output, clean[i].output) and torch.equal(dirty[i].lse, clean[i].lse)
        assert dirty[1].output[0, 0].isnan().nonzero().flatten().tolist() == [3]
        assert dirty[1].output[1].isnan().all()


def stored_exactly(
    row: Row, codec: LayerCodec, *, keep_sink: bool, scale: float, softcap: float | None, window: int | None
) -> tuple[Partial, Tensor]:
    """Fp64 attention over what the cache stores with the query as it is rounded, P unrounded.

    Returns the partial (of k - µ without a soft-cap) and the largest change of the output that rounding P may cause,
    Σ_i δ_i·|v_i|, δ_i the rounding error of one probability.
    """
    heads, d, q_len = codec.num_kv_heads, codec.head_dim, row.q.shape[1]
    n = int(quantized_tokens(row.length - q_len + 1))
    sink = codec.recipe.sink_tokens if keep_sink and n else 0
    grouped = row.q.unflatten(0, (heads, -1))
    mean_keys = torch.zeros(heads, d) if codec.key_mean is None else codec.key_mean
    # Channels: rounded query · stored key | 16-bit query · page mean | raw query · (k - µ) | shift q·µ.
    shift = (grouped.double() * mean_keys.double()[:, None, None]).sum(-1, keepdim=True) * (softcap is not None)
    rounded = torch.stack(codec.query_parts(grouped)).sum(0)
    q = torch.cat((rounded, codec.page_mean_query(grouped), grouped.float(), shift), -1).flatten(0, 1)
    k16 = (row.keys.double() - mean_keys.double()[:, None])[:, n:]
    k = torch.cat((torch.zeros(heads, row.length - n, 2 * d), k16, torch.ones(heads, row.length - n, 1)), -1)
    v = row.values[:, n:].double()
    positions = torch.arange(n, row.length)
    if n:
        pages = n // PAGE_SIZE
        encoded = codec.encode_keys(row.keys[:, :n].unflatten(1, (pages, -1)).transpose(0, 1), torch.arange(pages) == 0)
        stored = codec.decode_keys(encoded).transpose(0, 1).flatten(1, 2)
        means = encoded.get("mean", torch.zeros(pages, heads, d)).double().transpose(0, 1)
        ones = torch.ones(heads, n, 1)
        paged = torch.cat((stored.double(), means.repeat_interleave(PAGE_SIZE, 1), 0 * stored, ones), -1)
        values = codec.encode_values(row.values[:, :n].unflatten(1, (pages, -1)).transpose(0, 1))
        v = torch.cat((codec.decode_values(values).transpose(0, 1).flatten(1, 2).double(), v), 1)
        raw = torch.cat((0 * paged[..., : 2 * d], row.keys[:, :n].double() - mean_keys[:, None], ones), -1)
        k = torch.cat((torch.where(torch.arange(n)[:, None] < sink, raw, paged), k), 1)
        v[:, :sink] = row.values[:, :sink].double()
        positions = torch.arange(row.length)
    p, lse = exact_attention(
        q,
        k,
        torch.eye(row.length).expand(heads, -1, -1),
        scale=scale,
        softcap=softcap,
        window=window,
        query_pos=torch.arange(row.length - q_len, row.length),
        key_pos=positions,
    )
    v = v.repeat_interleave(q.shape[0] // heads, 0)
    return Partial(p @ v, lse), rounding_bound(codec.recipe, p[..., :n].clone(), sink) @ v[:, :n].abs()


def rounding_bound(recipe: Recipe, p: Tensor, sink: int) -> Tensor:
    """Largest rounding error of each probability [..., tokens in pages]."""
    p[..., :sink] = 0
    if recipe.probability_format is ProbabilityFormat.BITS16:
        return 2.0**-11 * p
    blocks = recipe.kv_format.blocks
    assert blocks is not None and p.shape[-1] % blocks.block_size == 0
    if recipe.probability_format is ProbabilityFormat.FP8:
        return 2.0**-4 * p + 2.0**-10 / 448
    # Half the widest code step plus the scale's rounding stay below a quarter of the block maximum; a scale that
    # underflows takes away at most 6·2^-10 of c times the largest probability.
    block = p.unflatten(-1, (-1, blocks.block_size)).amax(-1).repeat_interleave(blocks.block_size, -1)
    largest = p.amax(-1, keepdim=True) if p.shape[-1] else p
    return 0.25 * block + 6 * 2.0**-10 / recipe.probability_c * largest


class TestLiteralAgainstExact:
    @pytest.mark.parametrize("recipe", all_recipes())
    def test_only_rounding_of_p_separates_it_from_fp64_on_what_is_stored(self, recipe: str) -> None:
        rng = random.Random(recipe)
        for length in (16, 129, 257, 300, 384):
            head_dim, group, q_len = rng.choice((64, 128)), rng.choice((1, 3)), rng.choice((1, 1, 3))
            codec = make_codec(get_recipe(recipe), group, head_dim)
            row = make_row(codec, length, q_len=q_len, group=group, seed=length)
            options: dict[str, Any] = {
                "scale": head_dim**-0.5,
                "softcap": rng.choice((None, 15.0)),
                "window": rng.choice((None, 40, 200)),
                "keep_sink": rng.random() < 0.75,
            }
            result = literal(row, codec, num_splits=rng.choice((1, 2, 3)), **options)
            expected, bound = stored_exactly(row, codec, **options)
            assert ((result.output - expected.output).abs() <= bound + 2e-5).all()
            torch.testing.assert_close(result.lse.double(), expected.lse, rtol=1e-5, atol=2e-5)

    def test_16bit_tokens_alone_are_exact(self) -> None:
        for recipe in ("bf16", "bitdecoding-nvfp4", "bitdecoding-mxfp4-plus-w16"):
            codec = make_codec(get_recipe(recipe), 3, 64)
            for length in (1, 17, 128):
                row = make_row(codec, length, group=3)
                result = decode_step_reference(row.q, row.keys, row.values, codec, scale=0.125, softcap=20.0)
                expected = exact_row(row, scale=0.125, softcap=20.0)
                torch.testing.assert_close(result.double(), expected.output, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("window", [None, 100, 1000])
    def test_bf16_recipe_is_exact_up_to_rounding_p(self, window: int | None) -> None:
        codec = make_codec(get_recipe("bf16"), 3, 64)
        for length in (129, 300, 385):
            row = make_row(codec, length, q_len=2, group=3)
            result = literal(row, codec, scale=0.125, window=window)
            expected = exact_row(row, scale=0.125, window=window)
            absolute = exact_row(replace(row, values=row.values.abs()), scale=0.125, window=window)
            assert ((result.output - expected.output).abs() <= 2.0**-11 * absolute.output + 1e-5).all()
            torch.testing.assert_close(result.lse.double(), expected.lse, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("recipe", ["bf16", "bitdecoding-nvfp4-w16", "bitdecoding-mxfp4-w16"])
    def test_w16_is_as_accurate_as_fp16_attention(self, recipe: str) -> None:
        codec = make_codec(get_recipe(recipe), 4, 128)
        row = make_row(codec, 385, group=4)
        sequence = build_sequence(row.keys, row.values, codec)
        keys = codec.unrotate(codec.decode_keys(sequence.key_pages)).transpose(0, 1).flatten(1, 2)
        values = codec.decode_values(sequence.value_pages).transpose(0, 1).flatten(1, 2)
        k = torch.cat((keys, codec.smooth(sequence.recent_keys)), 1)
        v = torch.cat((values, sequence.recent_values.float()), 1)
        sink = codec.recipe.sink_tokens
        k[:, :sink], v[:, :sink] = codec.smooth(row.keys[:, :sink]), row.values[:, :sink].float()
        expected = exact_row(Row(row.q, k, v), scale=128**-0.5).output
        result = attention_step(row.q, sequence, codec, scale=128**-0.5).output
        half = F.scaled_dot_product_attention(
            row.q.half()[None], k.half()[None], v.half()[None], scale=128**-0.5, enable_gqa=True
        )[0]
        assert (result - expected).norm() <= 2 * (half - expected).norm()

    @pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
    def test_presets_rank_as_the_paper_says(self, fmt: str) -> None:
        """Error against raw keys and values: 16-bit arithmetic least, then the paper's techniques, then none."""
        errors = {}
        for name in (f"bitdecoding-{fmt}-w16", f"bitdecoding-{fmt}", f"native-{fmt}-plain"):
            codec = make_codec(get_recipe(name), 4, 128)
            smoothed = make_codec(get_recipe(f"bitdecoding-{fmt}"), 4, 128)  # its key mean makes the rows
            rows = [make_row(smoothed, 385, group=4, seed=seed) for seed in range(6)]
            errors[name] = sum(
                float((literal(row, codec, scale=128**-0.5).output - exact_row(row, scale=128**-0.5).output).norm())
                for row in rows
            )
        assert list(errors.values()) == sorted(errors.values())
        assert errors[f"native-{fmt}-plain"] > 1.5 * errors[f"bitdecoding-{fmt}"]


def exact_row(row: Row, **options: Any) -> Partial:
    return exact_attention(
        row.q,
        row.keys,
        row.values,
        query_pos=torch.arange(row.length - row.q.shape[1], row.length),
        key_pos=torch.arange(row.length),
        **options,
    )


def poison(pool: dict[str, Tensor], codec: LayerCodec) -> dict[str, Tensor]:
    """The same tensors full of NaN: NaN floats, NaN scale or element bytes."""
    byte = 255 if codec.recipe.kv_format is KVFormat.MXFP4 else 127
    return {k: torch.full_like(x, byte if x.dtype == torch.uint8 else torch.nan) for k, x in pool.items()}


class TestUnusedMemory:
    @pytest.mark.parametrize(
        "recipe", ["bf16", "fp8", "bitdecoding-nvfp4-plus", "bitdecoding-mxfp4-page-centered-w16", "trtllm-nvfp4"]
    )
    def test_nan_in_unused_pages_and_slots_is_not_read(self, recipe: str) -> None:
        codec = make_codec(get_recipe(recipe), 2, 64)
        row = make_row(codec, 300, group=2)
        table = torch.tensor([4, 1, 0, 3, -1, 99])  # pages 0 and 3 are garbage, as are the later entries
        clean = build_sequence(row.keys, row.values, codec, block_table=table)
        key_pages, value_pages = poison(clean.key_pages, codec), poison(clean.value_pages, codec)
        assert codec.decode_keys(key_pages).isnan().all() and codec.decode_values(value_pages).isnan().all()
        for pool, source in ((key_pages, clean.key_pages), (value_pages, clean.value_pages)):
            for name in pool:
                pool[name][[4, 1]] = source[name][[4, 1]]
        nan = torch.full((KV_HEADS, 5, 64), torch.nan, dtype=torch.bfloat16)
        dirty = replace(
            clean,
            key_pages=key_pages,
            value_pages=value_pages,
            recent_keys=torch.cat((clean.recent_keys, nan), 1),
            recent_values=torch.cat((clean.recent_values, nan), 1),
        )
        result, expected = (attention_step(row.q, s, codec, scale=0.125, num_splits=2) for s in (dirty, clean))
        assert expected.output.isfinite().all()
        assert torch.equal(result.output, expected.output) and torch.equal(result.lse, expected.lse)

    def test_quantized_sink_is_not_read_where_the_16bit_one_is_at_hand(self) -> None:
        codec = make_codec(get_recipe("bitdecoding-nvfp4"), 2, 64)
        row = make_row(codec, 300, group=2)
        clean = build_sequence(row.keys, row.values, codec)
        key_pages, value_pages = ({k: x.clone() for k, x in p.items()} for p in (clean.key_pages, clean.value_pages))
        key_pages["scales"][0, :, :16] = 127
        value_pages["scales"][0, :, :1] = 127  # the first block of 16 tokens
        dirty = replace(clean, key_pages=key_pages, value_pages=value_pages)
        result, expected = (attention_step(row.q, s, codec, scale=0.125) for s in (dirty, clean))
        assert torch.equal(result.output, expected.output)

    def test_order_of_pages_in_the_pool_does_not_matter(self) -> None:
        codec = make_codec(get_recipe("bitdecoding-nvfp4-page-centered"), 2, 64)
        row = make_row(codec, 600, q_len=2, group=2)
        results = [
            literal(row, codec, scale=0.125, num_splits=3, block_table=table)
            for table in (None, torch.tensor([3, 2, 1, 0]), torch.tensor([9, 0, 5, 2]), shuffled_table(4, 1))
        ]
        for result in results[1:]:
            assert torch.equal(result.output, results[0].output) and torch.equal(result.lse, results[0].lse)


class TestDivision:
    @pytest.mark.parametrize(
        ("length", "new_tokens", "in_pages"),
        [
            *((1, 1, 0), (127, 1, 0), (128, 1, 0), (129, 1, 128), (130, 2, 128), (130, 3, 0), (131, 4, 0)),
            *((132, 4, 128), (256, 1, 128), (257, 1, 256), (259, 4, 128), (260, 4, 256), (385, 1, 384)),
        ],
    )
    def test_tokens_in_pages(self, length: int, new_tokens: int, in_pages: int) -> None:
        codec = make_codec(get_recipe("bitdecoding-nvfp4"), 1, 64)
        row = make_row(codec, length)
        sequence = build_sequence(row.keys, row.values, codec, new_tokens=new_tokens)
        assert sequence.recent_keys.shape[1] == length - in_pages
        assert 1 <= sequence.recent_keys.shape[1] <= 128 + new_tokens - 1
        assert sequence.key_pages.get("codes", torch.empty(0)).shape[0] == in_pages // PAGE_SIZE
        assert (sequence.sink_keys is not None) == (in_pages > 0)

    def test_new_tokens_attend_as_if_fed_one_by_one_within_a_page(self) -> None:
        codec = make_codec(get_recipe("bitdecoding-nvfp4-w16"), 2, 64)
        row = make_row(codec, 300, q_len=3, group=2)
        together = literal(row, codec, scale=0.125)
        for i in range(3):
            length = 298 + i
            alone = Row(row.q[:, i : i + 1], row.keys[:, :length], row.values[:, :length])
            one = literal(alone, codec, scale=0.125)
            assert_same([(Partial(together.output[:, i : i + 1], together.lse[:, i : i + 1]), one)])

    def test_missing_sink_reads_the_quantized_copy(self) -> None:
        codec = make_codec(get_recipe("bitdecoding-nvfp4-w16"), 1, 64)
        row = make_row(codec, 300)
        row.values[:, :16] += 64  # the sink cannot be missed
        with_sink, without = (literal(row, codec, scale=0.125, keep_sink=keep).output for keep in (True, False))
        difference = (with_sink - without).abs().max()
        assert 0 < difference < 1
        assert without.mean() > 1

    def test_sink_of_a_whole_page_with_page_centred_keys(self) -> None:
        recipe = get_recipe("bitdecoding-nvfp4-page-centered").replace(sink_tokens=128)
        codec = make_codec(recipe, 1, 64)
        row = make_row(codec, 300)
        assert_same([(literal(row, codec, scale=0.125), vectorised([row], codec, scale=0.125)[0])])

    @pytest.mark.parametrize("num_splits", [2, 3, 7])
    def test_splits_change_only_the_rounding_of_p(self, num_splits: int) -> None:
        codec = make_codec(get_recipe("bitdecoding-nvfp4-w16"), 2, 64)
        row = make_row(codec, 700, group=2)
        one, many = (literal(row, codec, scale=0.125, num_splits=n) for n in (1, num_splits))
        torch.testing.assert_close(many.output, one.output, rtol=0, atol=2e-3)
        torch.testing.assert_close(many.lse, one.lse)

    def test_huge_logits_stay_finite(self) -> None:
        codec = make_codec(get_recipe("bitdecoding-nvfp4"), 2, 64)
        row = make_row(codec, 300, group=2)
        row = replace(row, q=row.q * 1e3)
        for window in (None, 20):
            result = literal(row, codec, scale=10.0, window=window)
            assert result.output.isfinite().all() and result.lse.isfinite().all()


class TestSmoothingShift:
    """Adding one vector to all keys and to µ_k adds q·Δ to every logit of a query: softmax does not see it."""

    @staticmethod
    def shifted(recipe: Recipe, amount: int) -> tuple[LayerCodec, Row]:
        """Integer-valued data, so that shifted keys are exact in fp16 and in fp32."""
        g = torch.Generator().manual_seed(5)
        delta = amount * torch.randint(-20, 21, (KV_HEADS, 64), generator=g).float()
        mean = torch.randint(-8, 9, (KV_HEADS, 64), generator=g) / 4
        keys = mean[:, None] + torch.randint(-32, 33, (KV_HEADS, 300, 64), generator=g) / 16
        values = torch.randn(KV_HEADS, 300, 64, generator=g).half()
        q = torch.randint(-16, 17, (2 * KV_HEADS, 2, 64), generator=g) / 8
        codec = LayerCodec(recipe, KV_HEADS, 64, LayerCalibration(mean + delta), dtype=torch.float16)
        return codec, Row(q, (keys + delta[:, None]).half(), values)

    @pytest.mark.parametrize(
        "recipe", [*(f"bitdecoding-{f}{a}" for f in ("nvfp4", "mxfp4-page-centered") for a in ("", "-w16"))]
    )
    def test_it_cancels(self, recipe: str) -> None:
        (codec, row), (codec2, row2) = (self.shifted(get_recipe(recipe), amount) for amount in (0, 1))
        assert not torch.equal(row.keys, row2.keys)
        pair = literal(row, codec, scale=0.125, num_splits=2), literal(row2, codec2, scale=0.125, num_splits=2)
        assert_same([pair], few_flips=False)

    @pytest.mark.parametrize("softcap", [None, 12.0])
    def test_smoothed_16bit_pages_match_exact_attention_on_the_raw_keys(self, softcap: float | None) -> None:
        recipe = Recipe(name="smoothed", kv_format=KVFormat.BF16, key_smoothing=True, sink_tokens=16)
        codec, row = self.shifted(recipe, 1)
        result = literal(row, codec, scale=0.125, softcap=softcap)
        expected = exact_row(row, scale=0.125, softcap=softcap)
        absolute = exact_row(replace(row, values=row.values.abs()), scale=0.125, softcap=softcap)
        assert ((result.output - expected.output).abs() <= 2.0**-11 * absolute.output + 2e-5).all()
        assert codec.key_mean is not None
        shift = (row.q.unflatten(0, (KV_HEADS, -1)) * codec.key_mean[:, None, None]).sum(-1).flatten(0, 1)
        restored = result.lse + (shift * 0.125 * math.log2(math.e) if softcap is None else 0)
        torch.testing.assert_close(restored.double(), expected.lse, rtol=1e-5, atol=1e-4)


class TestErrors:
    def sequence(self) -> tuple[LayerCodec, Row, PagedSequence]:
        codec = make_codec(get_recipe("bitdecoding-nvfp4"), 1, 64)
        row = make_row(codec, 300)
        return codec, row, build_sequence(row.keys, row.values, codec)

    def test_build_sequence(self) -> None:
        codec, row, _ = self.sequence()
        nan = row.keys.clone()
        nan[0, 0, 0] = torch.nan
        for match, keys, options in (
            ("keys: 1 of", nan, {}),
            ("keys: expected", row.keys[:1], {}),
            ("keys: expected", row.keys[..., :32], {}),
            ("values: expected", row.keys[:, :299], {}),
            ("new tokens: 0", row.keys, {"new_tokens": 0}),
            ("new tokens: 301", row.keys, {"new_tokens": 301}),
            ("block_table: expected", row.keys, {"block_table": torch.tensor([0])}),
            ("block_table: expected", row.keys, {"block_table": torch.tensor([0.0, 1.0])}),
            ("block_table: the 2", row.keys, {"block_table": torch.tensor([1, 1])}),
            ("block_table: the 2", row.keys, {"block_table": torch.tensor([0, -1])}),
        ):
            with pytest.raises(InvalidInputError, match=match):
                build_sequence(keys, row.values, codec, **options)

    def test_attention_step(self) -> None:
        codec, row, sequence = self.sequence()
        nan = torch.full_like(sequence.recent_keys, torch.nan)
        for match, q, changes, num_splits in (
            ("q: 64 of", row.q * torch.tensor([1, torch.nan])[:, None, None], {}, 1),
            ("q: expected", row.q[:1], {}, 1),
            ("q: expected", row.q[0], {}, 1),
            ("q: expected", row.q[..., :32], {}, 1),
            ("num_splits: must", row.q, {}, 0),
            ("new tokens: 2", row.q.expand(-1, 2, -1), {"length": 1}, 1),
            ("recent_keys, recent_values: hold 44", row.q, {"length": 301}, 1),
            ("16-bit keys", row.q, {"recent_keys": nan}, 1),
            ("16-bit values", row.q, {"recent_values": nan}, 1),
            ("block_table: page 7", row.q, {"block_table": torch.tensor([0, 7])}, 1),
        ):
            with pytest.raises(InvalidInputError, match=match):
                attention_step(q, replace(sequence, **changes), codec, scale=0.125, num_splits=num_splits)


class TestExactAttention:
    @pytest.mark.parametrize("window", [None, 3])
    @pytest.mark.parametrize("softcap", [None, 2.0])
    def test_against_loops(self, window: int | None, softcap: float | None) -> None:
        g = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(h, t, d, generator=g).double() for h, t, d in ((6, 3, 8), (2, 7, 8), (2, 7, 5)))
        query_pos, key_pos = torch.tensor([2, 6, 9]), torch.tensor([5, 0, -1, 3, 9, 1, 6])
        output, lse = exact_attention(
            q, k, v, scale=0.3, softcap=softcap, window=window, query_pos=query_pos, key_pos=key_pos
        )
        for h in range(6):
            for i, position in enumerate(query_pos.tolist()):
                total, weighted = 0.0, torch.zeros(5, dtype=torch.float64)
                for j, other in enumerate(key_pos.tolist()):
                    if other < 0 or other > position or (window is not None and other <= position - window):
                        continue
                    logit = 0.3 * float(q[h, i] @ k[h // 3, j])
                    logit = logit if softcap is None else softcap * math.tanh(logit / softcap)
                    total, weighted = total + math.exp(logit), weighted + math.exp(logit) * v[h // 3, j]
                torch.testing.assert_close(output[h, i], weighted / total)
                assert float(lse[h, i]) == pytest.approx(math.log2(total))

    def test_against_torch(self) -> None:
        g = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(2, h, 20, 16, generator=g) for h in (4, 2, 2))
        expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True)
        positions = torch.arange(20)
        result = exact_attention(q, k, v, scale=0.25, query_pos=positions, key_pos=positions.expand(2, -1))
        torch.testing.assert_close(result.output, expected)
        assert result.output.dtype == result.lse.dtype == torch.float64

    def test_nothing_to_read(self) -> None:
        nan = torch.full((1, 2, 4), torch.nan)
        options = {"scale": 1.0, "query_pos": torch.tensor([5])}
        for tokens, key_pos in ((2, [-1, 6]), (0, [])):
            result = exact_attention(
                torch.ones(2, 1, 4), nan[:, :tokens], nan[:, :tokens],
                key_pos=torch.tensor(key_pos, dtype=torch.int64), **options,  # type: ignore[arg-type]
            )  # fmt: skip
            assert torch.equal(result.output, torch.zeros(2, 1, 4).double())
            assert torch.equal(result.lse, torch.full((2, 1), -torch.inf).double())

    def test_errors(self) -> None:
        good: dict[str, Any] = {
            "q": torch.ones(4, 3, 8),
            "k": torch.ones(2, 5, 8),
            "v": torch.ones(2, 5, 6),
            "scale": 1.0,
            "query_pos": torch.arange(3),
            "key_pos": torch.arange(5),
        }
        exact_attention(**good)
        for match, changes in (
            ("q: expected a floating", {"q": torch.ones(4, 3, 8, dtype=torch.int32)}),
            ("q: expected \\[", {"q": torch.ones(3, 8)}),
            ("k, v: shapes", {"v": torch.ones(2, 4, 6)}),
            ("q, k: head_dim 7", {"q": torch.ones(4, 3, 7)}),
            ("q, k: batch", {"q": torch.ones(2, 4, 3, 8)}),
            ("q: 3 query heads", {"q": torch.ones(3, 3, 8)}),
            ("query_pos: expected integers", {"query_pos": torch.ones(3)}),
            ("query_pos: expected", {"query_pos": torch.arange(4)}),
            ("key_pos: expected", {"key_pos": torch.arange(4)}),
            ("softcap", {"softcap": 0.0}),
            ("window", {"window": 0}),
        ):
            with pytest.raises(InvalidInputError, match=match):
                exact_attention(**{**good, **changes})
