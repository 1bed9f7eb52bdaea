"""Trajectories, teacher-forced KL, its statistics and the runner, on a tiny random model."""

import json
import math
from pathlib import Path

import pytest
import torch
from scipy import stats
from tiny_model import CONTEXT, HEAD_DIM, KV_HEADS, LAYERS, VOCABULARY, save_tiny_model

from bitdecoding.calibration import Calibration
from bitdecoding.errors import CalibrationError, InvalidInputError
from bitdecoding.evaluation import (
    TeacherForcing,
    Trajectory,
    generate_trajectory,
    load_trajectories,
    paired_comparison,
    run_kl,
    save_trajectories,
    top_kl,
    truncated_kl,
)
from bitdecoding.evaluation.logit_error import logit_error
from bitdecoding.evaluation.runner import hadamard_draws
from bitdecoding.integrations.transformers import FP4Cache
from bitdecoding.integrations.transformers.forward import forward
from bitdecoding.models import LoadedModel, load_model
from bitdecoding.recipe import QueryFormat, get_recipe

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT, STEPS = 250, 12  # the steps cross a page boundary


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def loaded(folder) -> LoadedModel:
    return load_model(folder)


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    generator = torch.Generator().manual_seed(1)
    return Calibration(
        key_mean=torch.randn(LAYERS, KV_HEADS, HEAD_DIM, generator=generator) * 0.2,
        query_second_moment=torch.eye(HEAD_DIM).expand(LAYERS, KV_HEADS, HEAD_DIM, HEAD_DIM).contiguous(),
        tau=0.02,
    )


def random_trajectory(name: str = "random", seed: int = 0) -> Trajectory:
    generator = torch.Generator().manual_seed(seed)
    return Trajectory(name, PROMPT, tuple(torch.randint(0, 256, (PROMPT + STEPS,), generator=generator).tolist()))


# --- Trajectories


def test_generated_trajectory_is_transformers_greedy_search(loaded):
    prompt = list(random_trajectory().token_ids[:20])
    tokens = []
    trajectory = generate_trajectory(loaded, "a", prompt, 8, on_token=lambda: tokens.append(1))
    expected = loaded.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=8, min_new_tokens=8)
    assert list(trajectory.token_ids) == expected[0].tolist()
    assert (trajectory.prompt_length, trajectory.steps, len(tokens)) == (20, 8, 8)


@pytest.mark.parametrize(
    ("prompt", "steps", "message"),
    [([], 3, "empty"), ([1], 0, "at least 1"), ([1] * CONTEXT, 1, f"context of {CONTEXT}")],
)
def test_trajectories_that_cannot_be_generated(loaded, prompt, steps, message):
    with pytest.raises(InvalidInputError, match=message):
        generate_trajectory(loaded, "a", prompt, steps)


def test_trajectories_round_trip(loaded, tmp_path):
    trajectories = [random_trajectory("a"), random_trajectory("b", 1)]
    path = tmp_path / "new" / "trajectories.json"
    save_trajectories(trajectories, path, loaded)
    assert load_trajectories(path, loaded) == trajectories
    content = json.loads(path.read_text())
    assert (content["model_id"], content["revision"]) == (loaded.model_id, loaded.revision)
    path.write_text(json.dumps(content["trajectories"]))  # the bare list of another implementation
    assert load_trajectories(path) == trajectories


def test_trajectories_of_other_weights_are_warned_of(loaded, tmp_path, caplog):
    path = tmp_path / "trajectories.json"
    save_trajectories([random_trajectory()], path, loaded)
    load_trajectories(path, loaded)
    assert not caplog.records
    path.write_text(path.read_text().replace(loaded.revision, "another"))
    load_trajectories(path, loaded)
    assert "made by other weights" in caplog.text


def test_digest_tells_trajectories_apart():
    a = Trajectory("a", 2, (1, 2, 3))
    assert a.digest == Trajectory("b", 2, (1, 2, 3)).digest
    assert len({a.digest, Trajectory("a", 1, (1, 2, 3)).digest, Trajectory("a", 2, (1, 2, 4)).digest}) == 3


GOOD_ROW = {"name": "a", "prompt_length": 1, "token_ids": [1, 2]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[]", "holds none"),
        ('{"trajectories": 3}', "holds none"),
        ("[3]", "entry 0: expected an object"),
        (json.dumps([{**GOOD_ROW, "token_ids": [1, -2]}]), "non-negative"),
        (json.dumps([{**GOOD_ROW, "token_ids": "ab"}]), "non-negative"),
        (json.dumps([{**GOOD_ROW, "prompt_length": 2}]), "within 1..1, got 2"),
        (json.dumps([{**GOOD_ROW, "prompt_length": 0}]), "within 1..1, got 0"),
        (json.dumps([GOOD_ROW, {**GOOD_ROW, "token_ids": [1, VOCABULARY]}]), "entry 1: token .* vocabulary"),
        (json.dumps([GOOD_ROW, GOOD_ROW]), "same name"),
    ],
)
def test_malformed_trajectory_files(loaded, tmp_path, content, message):
    path = tmp_path / "trajectories.json"
    path.write_text(content)
    with pytest.raises(InvalidInputError, match=message) as error:
        load_trajectories(path, loaded)
    assert "\n" not in str(error.value)


def test_missing_trajectory_file_and_one_that_is_no_text(tmp_path):
    with pytest.raises(InvalidInputError, match="no file"):
        load_trajectories(tmp_path / "nowhere.json")
    path = tmp_path / "binary.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidInputError, match="not JSON"):
        load_trajectories(path)


# --- KL


@pytest.mark.parametrize("top", [1, 5, 128, 1000])
def test_top_kl_is_the_formula(top):
    generator = torch.Generator().manual_seed(0)
    reference, other = torch.randn(2, 7, 200, generator=generator) * 4
    for step, kl in enumerate(top_kl(reference, other, top)):
        ids = sorted(range(200), key=lambda token: -reference[step, token].item())[:top]
        p, q = ([math.exp(logits[step, token]) for token in ids] for logits in (reference, other))
        expected = sum(a / sum(p) * math.log((a / sum(p)) / (b / sum(q))) for a, b in zip(p, q, strict=True))
        assert kl.item() == pytest.approx(expected, rel=1e-10, abs=1e-14)


@pytest.mark.parametrize("top", [1, 5, 128, 500])
def test_truncated_kl_is_the_formula(top):
    """Probabilities of the whole vocabulary, summed over the reference's top tokens; all tokens give the plain KL."""
    reference, other = torch.randn(2, 7, 200, generator=torch.Generator().manual_seed(0)).double() * 4
    p, q = reference.softmax(-1), other.softmax(-1)
    terms = p * (p / q).log()
    for step, kl in enumerate(truncated_kl(reference, other, top)):
        ids = p[step].argsort(descending=True)[:top]
        assert kl.item() == pytest.approx(terms[step, ids].sum().item(), rel=1e-9)
    assert torch.allclose(truncated_kl(reference, other, 200), top_kl(reference, other, 200))


def test_top_kl_of_identical_logits_is_zero_and_shifts_do_not_count():
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    assert torch.equal(top_kl(logits, logits), torch.zeros(5, dtype=torch.float64))
    assert top_kl(logits, logits + 8).abs().max() < 1e-6
    assert (top_kl(logits, logits.flip(-1)) > 0.1).all()


# --- Teacher forcing


@torch.inference_mode()
def one_by_one(loaded: LoadedModel, trajectory: Trajectory, recipe: str, calibration: Calibration) -> torch.Tensor:
    cache = FP4Cache.for_model(loaded.model, recipe, calibration)
    ids = torch.tensor([trajectory.token_ids])
    forward(loaded.model, ids[:, :PROMPT], cache, last_only=True)
    return torch.cat([forward(loaded.model, ids[:, i : i + 1], cache)[0] for i in range(PROMPT, PROMPT + STEPS)])


@pytest.mark.parametrize(
    "recipe", ["bf16", "fp8", "bitdecoding-nvfp4", "bitdecoding-mxfp4-plus", "bitdecoding-nvfp4-w16", "trtllm-nvfp4"]
)
def test_parallel_steps_are_steps_one_by_one(loaded, calibration, recipe):
    trajectory = random_trajectory()
    expected = one_by_one(loaded, trajectory, recipe, calibration)
    actual = TeacherForcing(loaded, calibration).observe(trajectory, get_recipe(recipe))
    assert actual.shape == (STEPS, VOCABULARY)
    errors = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    # fp32 sums in another order now and then round a cached key to another 16-bit number
    assert (errors <= 1e-4).sum() >= STEPS - 2, errors
    assert errors.max() < 0.01


def test_kl_of_the_16_bit_cache_is_zero_and_that_of_fp4_is_not(loaded, calibration):
    forcing = TeacherForcing(loaded, calibration)
    exact = forcing.run(random_trajectory(), get_recipe("bf16"))
    assert exact.kl == (0.0,) * STEPS
    assert exact.mismatch == (False,) * STEPS
    quantized = forcing.run(random_trajectory(), get_recipe("bitdecoding-nvfp4"))
    assert quantized.mean_kl > 1e-4
    assert quantized.mean_kl == pytest.approx(sum(quantized.kl) / STEPS)
    assert quantized.mismatch_rate == sum(quantized.mismatch) / STEPS


def test_another_trajectory_gets_its_own_prompt(loaded, calibration):
    forcing, recipe = TeacherForcing(loaded, calibration), get_recipe("bitdecoding-nvfp4")
    first = forcing.run(random_trajectory("a"), recipe)
    assert forcing.run(random_trajectory("b", 1), recipe) != first
    assert forcing.run(random_trajectory("a"), recipe) == first


def test_teacher_forcing_refuses_long_trajectories_and_missing_calibrations(loaded):
    forcing = TeacherForcing(loaded)
    with pytest.raises(InvalidInputError, match=f"context of {CONTEXT}"):
        forcing.run(Trajectory("a", CONTEXT, (1,) * (CONTEXT + 1)), get_recipe("bf16"))
    with pytest.raises(CalibrationError, match="bitdecoding-nvfp4 needs one"):
        forcing.run(random_trajectory(), get_recipe("bitdecoding-nvfp4"))


def test_logit_errors_come_from_keys_where_the_query_is_exact(loaded, calibration):
    forcing, recipe = TeacherForcing(loaded, calibration), get_recipe("bitdecoding-nvfp4")
    formats = (QueryFormat.BITS16, QueryFormat.DUAL_FP4, QueryFormat.FP4)
    bits16, dual, single = (
        logit_error(forcing, random_trajectory(), recipe.replace(query_format=query)) for query in formats
    )
    assert bits16.query_share == 0
    assert 0 < dual.query_share < 0.1 < single.query_share < 1
    assert single.signal > single.total > dual.total > 0
    none = logit_error(forcing, random_trajectory(), get_recipe("bf16"))
    assert none.total < 1e-6 * none.signal


# --- Runner


def test_hadamard_draws():
    rotated, plain = get_recipe("bitdecoding-nvfp4"), get_recipe("fp8")
    assert hadamard_draws(rotated, 0) == [rotated]
    assert [recipe.rotation_seed for recipe in hadamard_draws(rotated, 3)] == [0, 1, 2]
    assert {recipe.name for recipe in hadamard_draws(rotated, 3)} == {rotated.name}
    assert hadamard_draws(plain, 3) == [plain]
    assert hadamard_draws(get_recipe("turboquant-4bit"), 2) == [get_recipe("turboquant-4bit")]
    with pytest.raises(InvalidInputError, match="negative"):
        hadamard_draws(rotated, -1)


def test_run_kl_averages_draws_and_compares(loaded, calibration):
    trajectories = [random_trajectory("a"), random_trajectory("b", 1)]
    recipes = [get_recipe("bitdecoding-nvfp4"), get_recipe("fp8")]
    cells = []
    report = run_kl(loaded, trajectories, recipes, calibration=calibration, draws=2, on_cell=lambda: cells.append(1))
    assert len(cells) == 2 * (2 + 1)
    assert report.trajectories == ("a", "b")
    nvfp4, fp8 = report.summaries
    assert (nvfp4.draws, fp8.draws) == (2, 1)
    forcing = TeacherForcing(loaded, calibration)
    expected = [forcing.run(trajectories[1], draw).mean_kl for draw in hadamard_draws(recipes[0], 2)]
    assert nvfp4.kl[1] == pytest.approx(sum(expected) / 2)
    comparison = report.compare("fp8", "bitdecoding-nvfp4")
    assert comparison.ratio == pytest.approx(fp8.mean_kl / nvfp4.mean_kl)
    assert report.to_dict()["recipes"][0]["kl_per_trajectory"] == list(nvfp4.kl)
    with pytest.raises(InvalidInputError, match="not in this report"):
        report.compare("fp8", "bf16")


def test_results_are_resumed(loaded, calibration, tmp_path, monkeypatch):
    path, recipes = tmp_path / "new" / "results.json", [get_recipe("bitdecoding-nvfp4"), get_recipe("fp8")]

    def run(trajectories, calibration=calibration):
        return run_kl(loaded, trajectories, recipes, calibration=calibration, results_path=path)

    first = run([random_trajectory()])
    content = json.loads(path.read_text())
    assert content["summary"] == first.to_dict()
    assert {cell["recipe"] for cell in content["cells"].values()} == {"bitdecoding-nvfp4", "fp8"}

    computed = []

    def count(forcing, trajectory, recipe, run=TeacherForcing.run):
        computed.append((trajectory.name, recipe.name))
        return run(forcing, trajectory, recipe)

    monkeypatch.setattr(TeacherForcing, "run", count)
    assert run([random_trajectory()]) == first
    assert computed == []
    # One more trajectory computes that alone; another calibration computes all again
    run([random_trajectory(), random_trajectory("new", 1)])
    assert computed == [("new", "bitdecoding-nvfp4"), ("new", "fp8")]
    run([random_trajectory()], Calibration(calibration.key_mean + 1, tau=calibration.tau))
    assert computed[2:] == [("random", "bitdecoding-nvfp4"), ("random", "fp8")]


def test_a_stopped_run_keeps_what_it_has(loaded, calibration, tmp_path, monkeypatch):
    path, recipes = tmp_path / "results.json", [get_recipe("fp8"), get_recipe("bitdecoding-nvfp4")]
    run = TeacherForcing.run

    def stop_at_second(forcing, trajectory, recipe):
        if recipe.name == "bitdecoding-nvfp4":
            raise KeyboardInterrupt
        return run(forcing, trajectory, recipe)

    monkeypatch.setattr(TeacherForcing, "run", stop_at_second)
    with pytest.raises(KeyboardInterrupt):
        run_kl(loaded, [random_trajectory()], recipes, calibration=calibration, results_path=path)
    assert [cell["recipe"] for cell in json.loads(path.read_text())["cells"].values()] == ["fp8"]
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.parametrize("content", ["{", "[]", '{"version": 99, "cells": {}}', '{"version": 1}'])
def test_files_that_hold_no_results_are_left_alone(loaded, tmp_path, content):
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(InvalidInputError, match="choose another file"):
        run_kl(loaded, [random_trajectory()], [get_recipe("bf16")], results_path=path)
    assert path.read_text() == content


def test_run_kl_checks_its_arguments_first(loaded, monkeypatch):
    monkeypatch.setattr(TeacherForcing, "run", lambda *_: pytest.fail("computed something"))
    fp8 = get_recipe("fp8")
    with pytest.raises(InvalidInputError, match="at least one"):
        run_kl(loaded, [], [fp8])
    with pytest.raises(InvalidInputError, match="names must differ"):
        run_kl(loaded, [random_trajectory()], [fp8, fp8])
    with pytest.raises(InvalidInputError, match="names must differ"):
        run_kl(loaded, [random_trajectory(), random_trajectory(seed=1)], [fp8])
    with pytest.raises(CalibrationError, match="bitdecoding-nvfp4 needs one"):
        run_kl(loaded, [random_trajectory()], [fp8, get_recipe("bitdecoding-nvfp4")])


# --- Statistics


def test_paired_comparison_by_hand():
    # Differences -1, -2, -3: mean -2, standard deviation 1, t = -2/(1/sqrt(3))
    comparison = paired_comparison([1.0, 2.0, 3.0], [2.0, 4.0, 6.0])
    assert comparison.mean_difference == -2
    assert comparison.ratio == 0.5
    assert (comparison.wins, comparison.count) == (3, 3)
    assert comparison.t == pytest.approx(-2 * math.sqrt(3))
    # Student's t with two degrees of freedom has the closed tail 1 - |t|/sqrt(t² + 2)
    assert comparison.p_value == pytest.approx(1 - math.sqrt(12 / 14))


def test_paired_comparison_is_scipys():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.rand(2, 9, generator=generator, dtype=torch.float64).tolist()
    comparison, expected = paired_comparison(a, b), stats.ttest_rel(a, b)
    assert (comparison.t, comparison.p_value) == pytest.approx((expected.statistic, expected.pvalue))
    assert comparison.wins == sum(x < y for x, y in zip(a, b, strict=True))


def test_paired_comparison_without_a_test():
    single, equal = paired_comparison([2.0], [1.0]), paired_comparison([1.0, 2.0], [1.0, 2.0])
    assert (single.t, single.p_value, single.wins, single.ratio) == (None, None, 0, 2)
    assert (equal.t, equal.p_value, equal.wins) == (None, None, 0)
    assert paired_comparison([1.0, 1.0], [0.0, 0.0]).ratio == math.inf
    for a, b in (([], []), ([1.0], [1.0, 2.0])):
        with pytest.raises(InvalidInputError, match="same, non-zero number"):
            paired_comparison(a, b)
