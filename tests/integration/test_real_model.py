"""The method on real weights: SmolLM2-135M-Instruct on trajectories that are kept with the benchmark results."""

from pathlib import Path

import pytest
import torch
from transformers.cache_utils import DynamicCache

from bitdecoding.calibration import Calibration
from bitdecoding.calibration.compute import calibrate, tau_candidates
from bitdecoding.calibration.storage import check_calibration
from bitdecoding.evaluation import KLReport, TeacherForcing, Trajectory, generate_trajectory, load_trajectories, run_kl
from bitdecoding.evaluation.logit_error import logit_error
from bitdecoding.integrations.transformers import FP4Cache
from bitdecoding.integrations.transformers.attention import attention_of
from bitdecoding.integrations.transformers.forward import cache_argument, forward
from bitdecoding.models import LoadedModel
from bitdecoding.recipe import QueryFormat, get_recipe

TRAJECTORIES = Path(__file__).parents[2] / "benchmarks" / "results" / "accuracy-smollm2-135m.trajectories.json"
STEPS = 48
RECIPES = (
    "bitdecoding-nvfp4",
    "bitdecoding-nvfp4-plus",
    "native-nvfp4-plain",
    "trtllm-nvfp4",
    "fp8",
    "bitdecoding-mxfp4",
    "native-mxfp4-plain",
)


@pytest.fixture(autouse=True)
def plain_attention_afterwards(smollm2: LoadedModel):
    """Other tests use the same model without an FP4 cache."""
    yield
    smollm2.model.set_attn_implementation("sdpa")


@pytest.fixture(scope="module")
def calibration(smollm2: LoadedModel) -> Calibration:
    return calibrate(smollm2, window=1024, new_tokens=64)


@pytest.fixture(scope="module")
def trajectory(smollm2: LoadedModel) -> Trajectory:
    """The kept interview trajectory, cut to fewer steps."""
    (kept,) = [t for t in load_trajectories(TRAJECTORIES, smollm2) if t.name == "interview"]
    return Trajectory(kept.name, kept.prompt_length, kept.token_ids[: kept.prompt_length + STEPS])


@pytest.fixture(scope="module")
def report(smollm2: LoadedModel, calibration: Calibration, trajectory: Trajectory) -> KLReport:
    recipes = [get_recipe("bf16"), *map(get_recipe, RECIPES)]
    recipes.append(get_recipe("bitdecoding-nvfp4").replace(name="no sink", sink_tokens=0))
    return run_kl(smollm2, [trajectory], recipes, calibration=calibration)


def test_calibration(smollm2, calibration):
    assert calibration.key_mean.shape == (30, 3, 64)
    assert calibration.query_mean.shape == (30, 9, 64)
    assert calibration.tau in tau_candidates().tolist()
    check_calibration(calibration, smollm2, window=1024)


def test_kept_trajectory_is_this_models_greedy_continuation(smollm2, trajectory):
    again = generate_trajectory(smollm2, "again", trajectory.token_ids[: trajectory.prompt_length], 8)
    assert again.token_ids == trajectory.token_ids[: trajectory.prompt_length + 8]


def test_recipe_is_far_closer_than_its_peers(report):
    kl = {name: report.summary(name).mean_kl for name in ("bf16", "no sink", *RECIPES)}
    assert kl["bf16"] == 0
    assert 4 * kl["bitdecoding-nvfp4"] < kl["native-nvfp4-plain"]
    assert 2 * kl["bitdecoding-nvfp4"] < kl["trtllm-nvfp4"]
    assert kl["bitdecoding-nvfp4"] < kl["no sink"]
    assert kl["bitdecoding-nvfp4-plus"] < 0.8 * kl["bitdecoding-nvfp4"]
    assert kl["fp8"] < kl["bitdecoding-nvfp4"]
    assert kl["bitdecoding-mxfp4"] < kl["native-mxfp4-plain"]
    assert report.summary("bitdecoding-nvfp4").mean_mismatch < 0.1


def test_dual_query_adds_little_to_the_logit_error_and_a_single_one_much(smollm2, calibration, trajectory):
    forcing = TeacherForcing(smollm2, calibration)
    dual = get_recipe("bitdecoding-nvfp4")
    assert logit_error(forcing, trajectory, dual).query_share < 0.02
    single = dual.replace(query_format=QueryFormat.FP4)
    assert 0.45 < logit_error(forcing, trajectory, single).query_share < 0.65


@torch.inference_mode()
def test_teacher_forcing_at_once_equals_decoding_one_by_one(smollm2, calibration, trajectory):
    recipe, start = get_recipe("bitdecoding-nvfp4-w16"), trajectory.prompt_length
    short = Trajectory("short", start, trajectory.token_ids[: start + 4])
    at_once = TeacherForcing(smollm2, calibration).observe(short, recipe)
    cache = FP4Cache.for_model(smollm2.model, recipe, calibration)
    forward(smollm2.model, torch.tensor([short.token_ids[:start]]), cache, last_only=True)
    for step, token in enumerate(short.token_ids[start:]):
        logits = forward(smollm2.model, torch.tensor([[token]]), cache, last_only=True)[0, -1]
        assert (logits - at_once[step]).norm() < 0.01 * at_once[step].norm()


def test_generate_over_the_fp4_cache(smollm2, calibration, trajectory):
    ids = torch.tensor([trajectory.token_ids[:600]])
    texts = []
    for recipe in (None, "bf16", "bitdecoding-nvfp4-plus-w16"):
        cache = DynamicCache() if recipe is None else FP4Cache.for_model(smollm2.model, recipe, calibration)
        with attention_of(smollm2.model, "sdpa" if recipe is None else "bitdecoding"):
            output = smollm2.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                **{cache_argument(smollm2.model): cache},
                do_sample=False,
                max_new_tokens=24,
                min_new_tokens=24,
            )
        texts.append(output[0, 600:].tolist())
    assert texts[0] == texts[1]
    assert texts[0][:4] == texts[2][:4]  # later, one near-tie sends greedy texts apart
    memory = cache.memory()
    assert memory.tokens == 623
    assert memory.used < 0.5 * memory.bf16
