"""Key outliers and probability underflow: by hand, against a direct computation, and as charts."""

import math
import sys
from pathlib import Path

import pytest
import torch
from tiny_model import CONTEXT, HEAD_DIM, KV_HEADS, LAYERS, QUERY_HEADS, save_tiny_model
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from bitdecoding.calibration import Calibration
from bitdecoding.errors import CalibrationError, InvalidInputError, UnsupportedError
from bitdecoding.evaluation.inspection import QUERIES, LayerInspection, Underflow, crest_factor, inspect_model
from bitdecoding.evaluation.plots import save_plots
from bitdecoding.integrations.transformers.forward import forward
from bitdecoding.models import LoadedModel, load_model
from bitdecoding.numerics.elements import decode_e4m3, encode_e4m3
from bitdecoding.numerics.rotation import hadamard_matrix
from bitdecoding.recipe import PAGE_SIZE, SINK_TOKENS, get_recipe

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = 500
RECIPE = get_recipe("bitdecoding-nvfp4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def loaded(folder) -> LoadedModel:
    """With attention sharp enough for underflow."""
    loaded = load_model(folder)
    for layer in loaded.model.model.layers:
        layer.self_attn.q_proj.weight.data *= 3
    return loaded


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return Calibration(torch.randn(LAYERS, KV_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(1)), tau=0.02)


@pytest.fixture(scope="module")
def token_ids() -> list[int]:
    return torch.randint(0, 256, (TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()


# --- Crest factor


def test_crest_factor_by_hand():
    alike, alone = torch.full((16,), -3.0), torch.zeros(16)
    alone[5] = -7
    assert crest_factor(alike) == 1
    assert crest_factor(alone) == 4
    assert crest_factor(torch.cat((alike, alone))) == 2.5
    assert crest_factor(torch.zeros(3, 16)) == 1
    assert crest_factor(torch.tensor([3.0, 4.0, 1.0, 1.0]), block=2) == pytest.approx((4 / math.sqrt(12.5) + 1) / 2)


def test_crest_factor_of_gaussian_channels_is_as_documented():
    assert crest_factor(torch.randn(20000, 16, generator=torch.Generator().manual_seed(0))) == pytest.approx(
        2.1, abs=0.03
    )


# --- A model


@torch.inference_mode()
def keys_and_queries(loaded: LoadedModel, token_ids: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Post-RoPE keys and queries [heads, tokens, head_dim] of each layer, by Transformers alone."""
    projected: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.q_proj.register_forward_hook(lambda module, args, output: projected.append(output))
        for layer in loaded.model.model.layers
    ]
    cache = DynamicCache(config=loaded.model.config)
    forward(loaded.model, torch.tensor([token_ids]), cache)
    rotary = loaded.model.model.rotary_emb(projected[0], torch.arange(len(token_ids))[None])
    for hook in hooks:
        hook.remove()
    heads = [q.unflatten(-1, (QUERY_HEADS, HEAD_DIM)).transpose(1, 2) for q in projected]
    return [
        (layer.keys[0], apply_rotary_pos_emb(q, q, *rotary)[0][0]) for layer, q in zip(cache.layers, heads, strict=True)
    ]


def test_key_outliers_are_those_of_a_plain_prefill(loaded, calibration, token_ids):
    captured = keys_and_queries(loaded, token_ids[:-QUERIES])
    for layer in inspect_model(loaded, token_ids, RECIPE, calibration):
        keys = captured[layer.layer][0][:, SINK_TOKENS:]
        smoothed = keys - calibration.key_mean[layer.layer][:, None]
        assert layer.raw_keys == pytest.approx(crest_factor(keys), rel=1e-3)
        assert layer.smoothed_keys == pytest.approx(crest_factor(smoothed), rel=1e-3)
        assert layer.rotated_keys == pytest.approx(crest_factor(smoothed @ hadamard_matrix(HEAD_DIM)), rel=1e-3)


def lost_by_loops(keys: torch.Tensor, queries: torch.Tensor, c: float, tau: float | None) -> tuple[float, float]:
    """Blocks and probability lost, block by block with exact logits; the first layer has no earlier error."""
    lost = blocks = 0
    mass = []
    for head in range(QUERY_HEADS):
        for position in range(TOKENS - QUERIES, TOKENS):
            logits = (keys[head // 2, : position + 1] @ queries[head, position]) / math.sqrt(HEAD_DIM)
            p = logits.double().softmax(-1)
            gone = 0.0
            for start in range(0, position // PAGE_SIZE * PAGE_SIZE, 16):
                visible = range(max(start, SINK_TOKENS), start + 16)
                if not visible:
                    continue
                page_end = (start // PAGE_SIZE + 1) * PAGE_SIZE
                largest = c * torch.exp(logits[visible].max() - logits[SINK_TOKENS:page_end].max())
                kappa = 2 if tau is not None and largest <= tau else 6
                blocks += 1
                if decode_e4m3(encode_e4m3(largest / kappa)) == 0:
                    lost += 1
                    gone += p[visible].sum().item()
            mass.append(gone)
    return lost / blocks, sum(mass) / len(mass)


def test_underflow_is_that_of_exact_logits(loaded, calibration, token_ids):
    """Up to the quantization of keys and queries, which moves some blocks across the threshold."""
    keys, queries = keys_and_queries(loaded, token_ids)[0]
    first = inspect_model(loaded, token_ids, RECIPE, calibration)[0]
    for actual, (c, tau) in ((first.plain, (1.0, None)), (first.recipe, (8.0, calibration.tau))):
        blocks, mass = lost_by_loops(keys, queries, c, tau)
        assert blocks > 0.01
        assert actual.blocks == pytest.approx(blocks, rel=0.05)
        assert actual.mass == pytest.approx(mass, rel=0.2)
    assert first.recipe.blocks < first.plain.blocks
    assert first.recipe.mass < first.plain.mass / 10


def test_nothing_underflows_where_attention_is_flat(folder, calibration, token_ids):
    loaded = load_model(folder)
    for layer in loaded.model.model.layers:
        layer.self_attn.q_proj.weight.data *= 0
    for layer in inspect_model(loaded, token_ids, RECIPE, calibration):
        assert layer.plain == layer.recipe == Underflow(0, 0)


def test_shortest_and_longest_text(loaded, calibration, token_ids):
    shortest = PAGE_SIZE + QUERIES
    assert len(inspect_model(loaded, token_ids[:shortest], RECIPE, calibration)) == LAYERS
    for wrong in (token_ids[: shortest - 1], token_ids * (CONTEXT // TOKENS + 1)):
        with pytest.raises(InvalidInputError, match=f"at least {shortest} .*{CONTEXT}"):
            inspect_model(loaded, wrong, RECIPE, calibration)


@pytest.mark.parametrize("name", ["bf16", "bitdecoding-mxfp4", "bitdecoding-nvfp4-w16", "nvfp4-two-level-p"])
def test_other_recipes_are_refused(loaded, calibration, token_ids, name):
    with pytest.raises(InvalidInputError, match="no NVFP4 probabilities"):
        inspect_model(loaded, token_ids, get_recipe(name), calibration)


def test_recipe_without_smoothing_and_rotation_leaves_keys_alone(loaded, token_ids):
    plain = get_recipe("native-nvfp4-plain")
    for layer in inspect_model(loaded, token_ids, plain):
        assert layer.raw_keys == layer.smoothed_keys == layer.rotated_keys
        assert layer.plain == layer.recipe
    with pytest.raises(CalibrationError, match="needs one"):
        inspect_model(loaded, token_ids, RECIPE)


# --- Charts


LAYER_ROWS = [LayerInspection(i, 2.5, 2.0, 1.9, Underflow(0.4, 0.01), Underflow(0.1, 0.0)) for i in range(3)]


def test_plots_are_png_files(tmp_path):
    files = save_plots(LAYER_ROWS, tmp_path / "new" / "charts", "a model")
    assert sorted(file.name for file in files) == ["key_outliers.png", "probability_underflow.png"]
    for file in files:
        assert file.read_bytes().startswith(b"\x89PNG")


def test_missing_matplotlib_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UnsupportedError, match=r"bitdecoding-fp4\[plots\]"):
        save_plots(LAYER_ROWS, tmp_path, "a model")
