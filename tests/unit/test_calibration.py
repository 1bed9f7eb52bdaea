"""Calibration of a tiny random model: what is measured, and the files that keep it."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_model import CONTEXT, HEAD_DIM, KV_HEADS, LAYERS, QUERY_HEADS, save_tiny_model
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from bitdecoding.calibration import CALIBRATION_PROMPTS, Calibration
from bitdecoding.calibration import storage as storage_module
from bitdecoding.calibration.compute import TAU_QUERIES, calibrate, calibration_tokens, tau_candidates
from bitdecoding.calibration.storage import check_calibration, load_calibration, save_calibration
from bitdecoding.errors import CalibrationError, InvalidInputError
from bitdecoding.integrations.transformers.forward import forward
from bitdecoding.models import LoadedModel, load_model
from bitdecoding.numerics.ldlq import ldlq_factors
from bitdecoding.numerics.rotation import hadamard_matrix

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOW, NEW_TOKENS = 400, 20
PROMPTS = CALIBRATION_PROMPTS[:2]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> LoadedModel:
    return load_model(save_tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def calibration(loaded) -> Calibration:
    return calibrate(loaded, window=WINDOW, prompts=PROMPTS, new_tokens=NEW_TOKENS)


@pytest.fixture
def file(calibration, tmp_path) -> Path:
    path = tmp_path / "calibration.safetensors"
    save_calibration(calibration, path)
    return path


# --- Measuring


@pytest.fixture(scope="module")
def prefill(loaded) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Post-RoPE keys and queries [heads, tokens, head_dim] of each layer, by Transformers alone."""
    tokens = calibration_tokens(loaded, PROMPTS, NEW_TOKENS)
    tokens = tokens.repeat(WINDOW // len(tokens) + 1)[: WINDOW - TAU_QUERIES][None]
    projected: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.q_proj.register_forward_hook(lambda module, args, output: projected.append(output))
        for layer in loaded.model.model.layers
    ]
    cache = DynamicCache(config=loaded.model.config)
    with torch.inference_mode():
        forward(loaded.model, tokens, cache)
        rotary = loaded.model.model.rotary_emb(projected[0], torch.arange(tokens.shape[1])[None])
        heads = [q.unflatten(-1, (QUERY_HEADS, HEAD_DIM)).transpose(1, 2) for q in projected]
        queries = [apply_rotary_pos_emb(q, q, *rotary)[0][0] for q in heads]
    for hook in hooks:
        hook.remove()
    return [layer.keys[0] for layer in cache.layers], queries


def test_key_mean_is_that_of_a_plain_prefill(calibration, prefill):
    keys, _ = prefill
    assert calibration.key_mean.shape == (LAYERS, KV_HEADS, HEAD_DIM)
    assert calibration.num_layers == LAYERS
    for layer, expected in enumerate(keys):
        torch.testing.assert_close(calibration.key_mean[layer], expected.mean(-2), rtol=1e-4, atol=1e-5)


def test_query_moments_are_those_of_a_plain_prefill(calibration, prefill):
    _, queries = prefill
    for layer, q in enumerate(queries):
        torch.testing.assert_close(calibration.query_mean[layer], q.mean(-2), rtol=1e-4, atol=1e-5)
        for head in range(KV_HEADS):
            group = q[2 * head : 2 * head + 2].flatten(0, 1)
            expected = group.T @ group / len(group)
            torch.testing.assert_close(calibration.query_second_moment[layer, head], expected, rtol=1e-3, atol=1e-4)


def test_second_moment_is_symmetric_and_positive_semidefinite(calibration):
    moment = calibration.query_second_moment.double()
    torch.testing.assert_close(moment, moment.transpose(-1, -2), rtol=1e-5, atol=1e-6)
    eigenvalues = torch.linalg.eigvalsh(moment)
    assert (eigenvalues >= -1e-6 * eigenvalues.amax(-1, keepdim=True)).all()


def test_stored_ldlq_factors_are_those_of_the_rotated_moment(calibration):
    rotation = hadamard_matrix(HEAD_DIM)
    expected = ldlq_factors(rotation @ calibration.query_second_moment @ rotation.T, calibration.ldlq_damping)
    for stored, computed in zip(calibration.ldlq, expected, strict=True):
        torch.testing.assert_close(stored, computed, rtol=1e-3, atol=1e-4)


def test_threshold_is_one_of_the_candidates(calibration):
    candidates = tau_candidates()
    assert (candidates.diff() > 0).all()
    assert 21 / 1024 in candidates.tolist()
    assert calibration.tau in candidates.tolist()


def test_metadata_says_what_was_measured(calibration, loaded):
    metadata = calibration.metadata
    assert (metadata["model_id"], metadata["revision"]) == (loaded.model_id, loaded.revision)
    assert (metadata["window"], metadata["new_tokens"]) == (WINDOW, NEW_TOKENS)
    assert metadata["prompts"] == list(PROMPTS)
    assert metadata["versions"]["torch"] == torch.__version__
    json.dumps(metadata)


def test_calibrating_again_gives_the_same_and_leaves_the_model_as_it_was(calibration, loaded):
    stages = []
    implementation = loaded.model.config._attn_implementation
    again = calibrate(loaded, window=WINDOW, prompts=PROMPTS, new_tokens=NEW_TOKENS, progress=stages.append)
    assert loaded.model.config._attn_implementation == implementation
    assert torch.equal(again.key_mean, calibration.key_mean)
    assert again.tau == calibration.tau
    assert len(stages) == 3


def test_calibration_tokens_are_prompts_with_their_greedy_continuations(loaded):
    tokens = calibration_tokens(loaded, PROMPTS, 5)
    lengths = [len(prompt) + 5 for prompt in PROMPTS]  # a token is a byte
    assert len(tokens) == sum(lengths)
    assert loaded.tokenizer.decode(tokens[: lengths[0] - 5]) == PROMPTS[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": []}, "at least one"),
        ({"prompts": ["a", " "]}, "none of them empty"),
        ({"new_tokens": 0}, "new_tokens: must be at least 1"),
        ({"window": 319}, "too few; use at least 320"),
        ({"window": CONTEXT + 1}, f"context of {CONTEXT}"),
    ],
)
def test_wrong_arguments(loaded, arguments, message):
    with pytest.raises(InvalidInputError, match=message):
        calibrate(loaded, **arguments)


# --- Files


def assert_same(a: Calibration, b: Calibration) -> None:
    for field in dataclasses.fields(Calibration):
        left, right = getattr(a, field.name), getattr(b, field.name)
        if isinstance(left, torch.Tensor):
            assert torch.equal(left, right), field.name
        elif field.name == "ldlq" and left is not None:
            assert all(torch.equal(x, y) for x, y in zip(left, right, strict=True))
        else:
            assert left == right, field.name


def test_round_trip(calibration, file):
    assert_same(load_calibration(file), calibration)
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_round_trip_of_a_key_mean_alone(tmp_path):
    calibration = Calibration(torch.randn(3, 2, 8).bfloat16())
    path = tmp_path / "new" / "folder" / "mean.safetensors"
    save_calibration(calibration, path)
    assert_same(load_calibration(path), dataclasses.replace(calibration, key_mean=calibration.key_mean.float()))


def test_a_failed_save_leaves_the_old_file(file, calibration, monkeypatch):
    before = file.read_bytes()

    def fail(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(storage_module, "save_file", fail)
    with pytest.raises(OSError, match="no space"):
        save_calibration(calibration, file)
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize("kept", [0, 4, 200, -1])
def test_truncated_files(file, kept):
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CalibrationError, match=r"damaged.*calibrate again") as error:
        load_calibration(file)
    assert "\n" not in str(error.value)


def test_missing_file(tmp_path):
    with pytest.raises(CalibrationError, match=r"no file .*bitdecoding calibrate"):
        load_calibration(tmp_path / "nowhere")


def header(**fields) -> dict[str, str]:
    return {"bitdecoding_calibration": json.dumps({"format_version": 1, **fields})}


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({"key_mean": torch.ones(1, 1, 8)}, None, "not a calibration"),
        ({"weight": torch.ones(1, 1, 8)}, header(), "not a calibration"),
        ({"key_mean": torch.ones(1, 1, 8)}, {"bitdecoding_calibration": "{"}, "damaged"),
        ({"key_mean": torch.ones(1, 1, 8)}, header(format_version=2), "format 2, this version reads 1"),
        ({"key_mean": torch.ones(1, 8)}, header(), "wrong shape, NaN or Inf"),
        ({"key_mean": torch.full((1, 1, 8), torch.nan)}, header(), "wrong shape, NaN or Inf"),
    ],
)
def test_files_of_something_else(tmp_path, tensors, metadata, message):
    path = tmp_path / "file.safetensors"
    save_file(tensors, path, metadata)
    with pytest.raises(CalibrationError, match=message):
        load_calibration(path)


def test_calibration_fits_its_own_model(file, loaded):
    calibration = load_calibration(file)
    check_calibration(calibration, loaded)
    check_calibration(calibration, loaded, window=WINDOW)


@pytest.mark.parametrize("change", [{"model_id": "other"}, {"revision": "other"}])
def test_calibration_of_another_model(calibration, loaded, change):
    other = dataclasses.replace(loaded, **change)
    with pytest.raises(CalibrationError, match=f"{next(iter(change))} .*this is other.*--allow-mismatch"):
        check_calibration(calibration, other)
    check_calibration(calibration, other, allow_mismatch=True)


def test_calibration_of_another_window(calibration, loaded):
    with pytest.raises(CalibrationError, match=f"window {WINDOW}, this is 512"):
        check_calibration(calibration, loaded, window=512)
    check_calibration(calibration, loaded, window=512, allow_mismatch=True)


@pytest.mark.parametrize("shape", [(LAYERS + 1, KV_HEADS, HEAD_DIM), (LAYERS, 1, HEAD_DIM), (LAYERS, KV_HEADS, 16)])
def test_calibration_of_another_shape_is_never_taken(loaded, shape):
    with pytest.raises(CalibrationError, match="calibrate this model"):
        check_calibration(Calibration(torch.zeros(shape)), loaded, allow_mismatch=True)
