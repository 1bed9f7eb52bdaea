"""Algorithm 2: multi-head latent attention over an FP4 latent cache."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bitdecoding.calibration.data import LayerCalibration
from bitdecoding.errors import CalibrationError, InvalidInputError, UnsupportedError
from bitdecoding.recipe import PAGE_SIZE, Recipe, get_recipe
from bitdecoding.reference import (
    MlaCodec,
    MlaSequence,
    Partial,
    build_mla_sequence,
    exact_attention,
    exact_mla,
    mla_decode_step,
)

pytestmark = pytest.mark.usefixtures("one_thread")

LATENT, ROPE, NOPE, VALUE, HEADS = 512, 64, 32, 32, 4
SCALE = (NOPE + ROPE) ** -0.5
RECIPES = [f"bitdecoding-{fmt}{arithmetic}" for fmt in ("nvfp4", "mxfp4") for arithmetic in ("", "-w16")]


@dataclass
class Case:
    """Latents [N, d_c], positional keys [N, d_r] (both bf16) and this step's queries."""

    latents: Tensor
    k_rope: Tensor
    q_nope: Tensor
    q_rope: Tensor
    w_k: Tensor
    w_v: Tensor

    def exact(self) -> Partial:
        return exact_mla(self.q_nope, self.q_rope, self.latents, self.k_rope, w_k=self.w_k, w_v=self.w_v, scale=SCALE)

    def step(self, codec: MlaCodec, *, num_splits: int = 1, **options: Any) -> Partial:
        sequence = build_mla_sequence(
            self.latents, self.k_rope, codec, new_tokens=min(self.q_nope.shape[1], max(len(self.latents), 1)), **options
        )
        return self.run(sequence, codec, num_splits=num_splits)

    def run(self, sequence: MlaSequence, codec: MlaCodec, *, num_splits: int = 1) -> Partial:
        return mla_decode_step(
            self.q_nope,
            self.q_rope,
            sequence,
            codec,
            w_k=self.w_k,
            w_v=self.w_v,
            scale=SCALE,
            num_splits=num_splits,
        )


def latent_mean() -> Tensor:
    mean = torch.randn(LATENT, generator=torch.Generator().manual_seed(1))
    mean[::31] *= 5
    return mean


def make_codec(recipe: Recipe | str) -> MlaCodec:
    recipe = get_recipe(recipe) if isinstance(recipe, str) else recipe
    calibration = LayerCalibration(latent_mean()[None]) if recipe.key_smoothing else None
    return MlaCodec(recipe, LATENT, calibration)


def make_case(length: int, q_len: int = 1, seed: int = 0) -> Case:
    g = torch.Generator().manual_seed(1000 * seed + length)
    return Case(
        (latent_mean() + torch.randn(length, LATENT, generator=g)).bfloat16(),
        torch.randn(length, ROPE, generator=g).bfloat16(),
        torch.randn(HEADS, q_len, NOPE, generator=g).bfloat16(),
        torch.randn(HEADS, q_len, ROPE, generator=g).bfloat16(),
        torch.randn(HEADS, NOPE, LATENT, generator=g) * LATENT**-0.5,
        torch.randn(HEADS, LATENT, VALUE, generator=g) * LATENT**-0.5,
    )


def stored_exactly(case: Case, codec: MlaCodec, keep_sink: bool) -> tuple[Partial, Tensor]:
    """Fp64 attention over what the cache stores with the query as it is rounded, P unrounded; and the largest change
    that rounding P to 16 bits may cause."""
    length, q_len = len(case.latents), case.q_nope.shape[1]
    n = max(length - q_len, 0) // PAGE_SIZE * PAGE_SIZE
    sink = codec.layer.recipe.sink_tokens if keep_sink and n else 0
    smooth = codec.smooth(case.latents).double()
    rotated = smooth.clone()  # in the pages' space: a rotation apart
    values = case.latents.double().clone()
    if n:
        stored = codec.decode(codec.encode(case.latents[:n].unflatten(0, (-1, PAGE_SIZE)))).flatten(0, 1)
        rotated[sink:n] = stored[sink:].double()
        values[sink:n] = codec.restore(stored[sink:]).double()
    paged = ((torch.arange(length) >= sink) & (torch.arange(length) < n)).double()[:, None]
    absorbed = case.q_nope.float() @ case.w_k
    # Channels: rounded query · stored latent | raw query · (C - µ_c) | positions.
    q = torch.cat((torch.stack(codec.query_parts(absorbed)).sum(0), absorbed, case.q_rope.float()), -1)
    k = torch.cat((paged * rotated, (1 - paged) * smooth, case.k_rope.double()), -1)
    p, lse = exact_attention(
        q,
        k[None],
        torch.eye(length)[None],
        scale=SCALE,
        query_pos=torch.arange(length - q_len, length),
        key_pos=torch.arange(length),
    )
    w_v = case.w_v.double()
    centred = (values - codec.restore(torch.zeros(LATENT)).double()) @ w_v  # what P multiplies in pages
    return Partial(p @ (values @ w_v), lse), 2.0**-11 * (p * paged[:, 0]) @ centred.abs()


class TestAgainstExact:
    @pytest.mark.parametrize("recipe", RECIPES)
    @pytest.mark.parametrize("keep_sink", [True, False])
    def test_only_rounding_of_p_separates_it_from_fp64_on_what_is_stored(self, recipe: str, keep_sink: bool) -> None:
        codec = make_codec(recipe)
        for i, length in enumerate((1, 16, 17, 127, 128, 129, 255, 256, 257, 300, 385)):
            case = make_case(length, q_len=min(1 + i % 4, length))
            result = case.step(codec, num_splits=1 + i % 5, keep_sink=keep_sink)
            expected, bound = stored_exactly(case, codec, keep_sink)
            assert ((result.output - expected.output).abs() <= bound + 2e-5).all()
            torch.testing.assert_close(result.lse.double(), expected.lse, rtol=1e-5, atol=2e-5)

    @pytest.mark.parametrize("recipe", ["bf16", "bitdecoding-nvfp4"])
    def test_16bit_tokens_alone_are_exact(self, recipe: str) -> None:
        for length in (1, 17, 128):
            case = make_case(length)
            result = case.step(make_codec(recipe))
            torch.testing.assert_close(result.output.double(), case.exact().output, rtol=1e-5, atol=1e-5)

    def test_absorbed_form_with_16bit_pages(self) -> None:
        codec = make_codec("bf16")
        case = make_case(300, q_len=2)
        result, expected = case.step(codec, num_splits=2), case.exact()
        torch.testing.assert_close(result.output.double(), expected.output, rtol=0, atol=2e-3)
        torch.testing.assert_close(result.lse.double(), expected.lse, rtol=0, atol=2e-3)

    def test_error_of_the_paper_recipe(self) -> None:
        """Smoothing and rotation are what makes 4-bit latents usable; 16-bit queries are a little better still."""
        cases = [make_case(500, seed=seed) for seed in range(4)]
        errors = {}
        for name in ("bitdecoding-nvfp4-w16", "bitdecoding-nvfp4", "native-nvfp4-plain"):
            codec = make_codec(name)
            errors[name] = sum(
                float((c.step(codec).output - c.exact().output).norm() / c.exact().output.norm()) for c in cases
            ) / len(cases)
        assert list(errors.values()) == sorted(errors.values())
        assert errors["bitdecoding-nvfp4"] < 0.05 and errors["native-nvfp4-plain"] > 1.5 * errors["bitdecoding-nvfp4"]


class TestAlgorithm2:
    def test_mean_comes_back_once_with_or_without_sink_and_recents(self) -> None:
        """All latents equal µ_c: every page stores zeros, so only µ_c itself can give the right output."""
        codec = make_codec("bitdecoding-nvfp4")
        assert codec.layer.key_mean is not None
        case = make_case(300, q_len=2)
        case.latents = codec.layer.key_mean.expand(300, -1).bfloat16()
        codec.layer.key_mean = case.latents[:1].float()
        expected = (case.latents[0].float() @ case.w_v)[:, None].expand(-1, 2, -1)
        for keep_sink in (True, False):
            torch.testing.assert_close(case.step(codec, keep_sink=keep_sink).output, expected, rtol=1e-5, atol=1e-5)

    def test_probabilities_stay_16bit_whatever_the_recipe_says(self) -> None:
        case = make_case(400)
        native = get_recipe("bitdecoding-nvfp4")
        other = native.replace(probability_format="16bit")
        assert torch.equal(case.step(make_codec(native)).output, case.step(make_codec(other)).output)

    def test_dual_query_is_closer_than_a_single_one(self) -> None:
        recipe = get_recipe("bitdecoding-nvfp4")
        codecs = [make_codec(recipe.replace(query_format=f)) for f in ("16bit", "dual-fp4", "fp4")]
        distances = [0.0, 0.0]
        for seed in range(4):
            full, dual, single = (make_case(400, seed=seed).step(codec).lse for codec in codecs)
            distances[0] += float((dual - full).abs().mean())
            distances[1] += float((single - full).abs().mean())
        assert 5 * distances[0] < distances[1]

    @pytest.mark.parametrize("num_splits", [2, 3, 7])
    def test_splits_change_only_the_rounding_of_p(self, num_splits: int) -> None:
        codec, case = make_codec("bitdecoding-nvfp4"), make_case(600, q_len=3)
        one, many = case.step(codec), case.step(codec, num_splits=num_splits)
        torch.testing.assert_close(many.output, one.output, rtol=0, atol=1e-3)
        torch.testing.assert_close(many.lse, one.lse)

    def test_new_tokens_attend_causally(self) -> None:
        codec, case = make_codec("bitdecoding-nvfp4"), make_case(300, q_len=3)
        together = case.step(codec)
        for i in range(3):
            alone = replace(
                case,
                latents=case.latents[: 298 + i],
                k_rope=case.k_rope[: 298 + i],
                q_nope=case.q_nope[:, i : i + 1],
                q_rope=case.q_rope[:, i : i + 1],
            )
            torch.testing.assert_close(together.output[:, i : i + 1], alone.step(codec).output, rtol=1e-4, atol=1e-4)

    def test_empty_sequence(self) -> None:
        result = make_case(0, q_len=2).step(make_codec("bitdecoding-nvfp4"), num_splits=3)
        assert torch.equal(result.output, torch.zeros(HEADS, 2, VALUE))
        assert torch.equal(result.lse, torch.full((HEADS, 2), -torch.inf))


class TestMemory:
    @pytest.mark.parametrize("recipe", ["bf16", "bitdecoding-nvfp4", "bitdecoding-mxfp4"])
    def test_nan_in_unused_pages_and_slots_is_not_read(self, recipe: str) -> None:
        codec, case = make_codec(recipe), make_case(300)
        clean = build_mla_sequence(case.latents, case.k_rope, codec, block_table=torch.tensor([4, 1, 0, -1, 99]))
        byte = 255 if "mxfp4" in recipe else 127
        unused = torch.tensor([0, 2, 3])
        pages = {name: x.clone() for name, x in clean.latent_pages.items()}
        for x in pages.values():
            x[unused] = byte if x.dtype == torch.uint8 else torch.nan
        assert codec.decode(pages)[unused].isnan().all()
        rope = clean.rope_pages.clone()
        rope[unused] = torch.nan
        dirty = replace(
            clean,
            latent_pages=pages,
            rope_pages=rope,
            recent_latents=F.pad(clean.recent_latents, (0, 0, 0, 5), value=torch.nan),
            recent_rope=F.pad(clean.recent_rope, (0, 0, 0, 5), value=torch.nan),
        )
        result, expected = (case.run(s, codec, num_splits=2) for s in (dirty, clean))
        assert expected.output.isfinite().all()
        assert torch.equal(result.output, expected.output) and torch.equal(result.lse, expected.lse)

    def test_order_of_pages_in_the_pool_does_not_matter(self) -> None:
        codec, case = make_codec("bitdecoding-nvfp4"), make_case(400, q_len=2)
        tables = (None, torch.tensor([2, 1, 0]), torch.tensor([7, 0, 5, -3]))
        results = [case.step(codec, block_table=table) for table in tables]
        assert all(torch.equal(r.output, results[0].output) for r in results)

    def test_pages_are_4_bit(self) -> None:
        case = make_case(257)
        pages = build_mla_sequence(case.latents, case.k_rope, make_codec("bitdecoding-nvfp4")).latent_pages
        assert pages["codes"].shape == (2, 1, PAGE_SIZE, LATENT // 2)
        assert pages["scales"].shape == (2, 1, PAGE_SIZE, LATENT // 16)


class TestErrors:
    def test_codec(self) -> None:
        with pytest.raises(UnsupportedError, match="page_centered_keys"):
            make_codec("bitdecoding-nvfp4-page-centered")
        with pytest.raises(CalibrationError, match="needs one"):
            MlaCodec(get_recipe("bitdecoding-nvfp4"), LATENT)
        with pytest.raises(CalibrationError, match="its key mean has shape"):
            MlaCodec(get_recipe("bitdecoding-nvfp4"), LATENT, LayerCalibration(torch.zeros(2, LATENT)))

    def test_build(self) -> None:
        codec, case = make_codec("bitdecoding-nvfp4"), make_case(200)
        nan = torch.full_like(case.latents, torch.nan)
        for match, latents, k_rope in (
            ("latents: 102400 of", nan, case.k_rope),
            ("k_rope: 12800 of", case.latents, torch.full_like(case.k_rope, torch.inf)),
            ("latents: expected", case.latents[:, :256], case.k_rope),
            ("k_rope: expected", case.latents, case.k_rope[:1]),
        ):
            with pytest.raises(InvalidInputError, match=match):
                build_mla_sequence(latents, k_rope, codec)

    def test_step(self) -> None:
        codec, case = make_codec("bitdecoding-nvfp4"), make_case(200)
        sequence = build_mla_sequence(case.latents, case.k_rope, codec)
        for match, changes, sequence_changes in (
            ("q_nope: 128 of", {"q_nope": case.q_nope * torch.nan}, {}),
            ("q_rope: 256 of", {"q_rope": case.q_rope * torch.nan}, {}),
            ("q_nope: expected", {"q_nope": case.q_nope[0]}, {}),
            ("q_rope: expected", {"q_rope": case.q_rope[..., :32]}, {}),
            ("w_k: expected", {"w_k": case.w_k[..., :64]}, {}),
            ("w_v: expected", {"w_v": case.w_v[:1]}, {}),
            ("recent_latents, recent_rope: hold 72", {}, {"length": 210}),
            ("16-bit latents", {}, {"recent_latents": sequence.recent_latents * torch.nan}),
            ("16-bit positional keys", {}, {"recent_rope": sequence.recent_rope * torch.nan}),
            ("block_table: page 3", {}, {"block_table": torch.tensor([3])}),
        ):
            with pytest.raises(InvalidInputError, match=match):
                replace(case, **changes).run(replace(sequence, **sequence_changes), codec)
        with pytest.raises(InvalidInputError, match="num_splits"):
            case.run(sequence, codec, num_splits=0)
