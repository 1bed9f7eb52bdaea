"""Calibration from the model's own words (paper App. B, C).

Eight one-sentence prompts, continued greedily, joined and tiled to the window; one prefill gives the key mean µ_k, the
query mean and the query second moment; decode queries that continue it give the probability threshold τ.
"""

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers

from bitdecoding import __version__
from bitdecoding.cache.codec import kept_dtype, layer_codecs
from bitdecoding.calibration.data import Calibration
from bitdecoding.calibration.prompts import CALIBRATION_PROMPTS
from bitdecoding.errors import InvalidInputError
from bitdecoding.integrations.transformers.attention import (
    attention_of,
    reference_implementation,
)
from bitdecoding.integrations.transformers.probing import DecodeView, RecordingCache, TeacherForcedCache, probe
from bitdecoding.models import LoadedModel, ModelShape, model_shape
from bitdecoding.numerics.blocks import BlockFormat, dequantize_blocks
from bitdecoding.numerics.elements import decode_e4m3
from bitdecoding.numerics.ldlq import DEFAULT_DAMPING, ldlq_factors
from bitdecoding.numerics.probability import DEFAULT_C, ProbabilityRule, quantize_probabilities
from bitdecoding.numerics.rotation import hadamard_transform
from bitdecoding.recipe import PAGE_SIZE, Recipe, get_recipe
from bitdecoding.reference.vectorized import LogitRule, page_scores, running_maximum

__all__ = ["DEFAULT_WINDOW", "calibrate", "calibration_tokens", "tau_candidates"]

DEFAULT_WINDOW = 8192
"""Window used when the model allows more; µ_k of longer windows differs little and costs much."""
NEW_TOKENS = 256
TAU_QUERIES = 64
"""Decode queries, continuing the window, that choose τ."""

Progress = Callable[[str], None]


def calibrate(
    loaded: LoadedModel,
    *,
    window: int | None = None,
    prompts: Sequence[str] = CALIBRATION_PROMPTS,
    new_tokens: int = NEW_TOKENS,
    progress: Progress = lambda stage: None,
) -> Calibration:
    """Measure a model's key means, query moments and probability threshold.

    Args:
        loaded: the model; it is switched to this library's attention function meanwhile.
        window: tokens of the calibration prefill; default the model's context, at most 8192.
        prompts: one-sentence prompts that the model continues.
        new_tokens: greedy tokens a prompt.
        progress: called with the name of each stage.

    Returns:
        `Calibration` with fp32 tensors on CPU and metadata.

    Raises:
        InvalidInputError: no or empty prompts, window shorter than two pages or beyond the model's context.
    """
    shape = model_shape(loaded.model.config)
    if window is None:
        window = min(shape.max_context, DEFAULT_WINDOW)
    _check_arguments(window, shape, prompts, new_tokens)
    progress("continuing the prompts")
    with attention_of(loaded.model, reference_implementation(loaded.model)):
        tokens = calibration_tokens(loaded, prompts, new_tokens)
    tiled = tokens.repeat(-(-window // len(tokens)))[:window].to(loaded.model.device)
    progress("prefill")
    moments, prompt = _prefill(loaded, shape, tiled[: window - TAU_QUERIES])
    progress("probability threshold")
    tau = _calibrate_tau(loaded, shape, prompt, moments, tiled[window - TAU_QUERIES :])
    second = moments.second_moment()
    rotated = hadamard_transform(hadamard_transform(second).transpose(-1, -2))
    return Calibration(
        key_mean=moments.key_mean(),
        query_second_moment=second,
        query_mean=moments.query_mean(),
        tau=tau,
        ldlq=ldlq_factors(rotated, DEFAULT_DAMPING),
        ldlq_damping=DEFAULT_DAMPING,
        metadata=_metadata(loaded, window, prompts, new_tokens),
    )


def _check_arguments(window: int, shape: ModelShape, prompts: Sequence[str], new_tokens: int) -> None:
    if not prompts or any(not prompt.strip() for prompt in prompts):
        raise InvalidInputError("prompts: need at least one, none of them empty")
    if new_tokens < 1:
        raise InvalidInputError(f"new_tokens: must be at least 1, got {new_tokens}")
    least = 2 * PAGE_SIZE + TAU_QUERIES
    if window < least:
        raise InvalidInputError(f"window: {window} tokens are too few; use at least {least}")
    if window > shape.max_context:
        raise InvalidInputError(f"window: {window} tokens exceed the model's context of {shape.max_context}")


@torch.inference_mode()
def calibration_tokens(loaded: LoadedModel, prompts: Sequence[str], new_tokens: int) -> torch.Tensor:
    """Token ids (int64, 1-D, CPU) of all prompts, each followed by its greedy continuation."""
    tokenizer = loaded.tokenizer
    rows = [tokenizer(prompt).input_ids for prompt in prompts]
    longest = max(map(len, rows))
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    padded = torch.tensor([[pad] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    output = loaded.model.generate(
        padded.to(loaded.model.device),
        attention_mask=mask.to(loaded.model.device),
        do_sample=False,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        pad_token_id=pad,
    ).cpu()
    return torch.cat([line[longest - len(row) :] for row, line in zip(rows, output, strict=True)])


class _Moments:
    """Sums of post-RoPE keys and queries of every layer, kept in fp64."""

    def __init__(self) -> None:
        self._keys: list[torch.Tensor] = []
        self._queries: list[torch.Tensor] = []
        self._outer: list[torch.Tensor] = []

    def observe(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Add a layer's prefill; layers come in order."""
        self._keys.append(k[0].double().mean(-2).cpu())
        self._queries.append(q[0].double().mean(-2).cpu())
        grouped = q[0].float().unflatten(0, (k.shape[1], -1)).flatten(1, 2)
        self._outer.append((grouped.transpose(-1, -2) @ grouped).double().cpu() / grouped.shape[1])

    def key_mean(self) -> torch.Tensor:
        return torch.stack(self._keys).float()

    def query_mean(self) -> torch.Tensor:
        return torch.stack(self._queries).float()

    def second_moment(self) -> torch.Tensor:
        return torch.stack(self._outer).float()


@torch.inference_mode()
def _prefill(loaded: LoadedModel, shape: ModelShape, tokens: torch.Tensor) -> tuple[_Moments, RecordingCache]:
    moments = _Moments()
    cache = RecordingCache(shape.num_layers, kept_dtype(loaded.model.dtype), moments.observe)
    probe(loaded.model, tokens[None], cache, last_only=True)
    return moments, cache


def tau_candidates() -> torch.Tensor:
    """Thresholds (fp64, increasing) halfway between neighbouring E4M3 values up to 8, so that comparing c·p_max with
    one of them is comparing its E4M3 rounding with the grid."""
    grid = decode_e4m3(torch.arange(0, 127, dtype=torch.uint8)).double()
    grid = grid[grid <= DEFAULT_C]
    return (grid[1:] + grid[:-1]) / 2


class _TauErrors:
    """Squared errors of κ = 2 and κ = 6 for probability blocks, binned by where c·p_max lies among the candidates."""

    def __init__(self) -> None:
        self._candidates = tau_candidates()
        bins = len(self._candidates) + 1
        self._two = torch.zeros(bins, dtype=torch.float64)
        self._six = torch.zeros(bins, dtype=torch.float64)

    def observe(self, layer: int, view: DecodeView, q: torch.Tensor, logits: LogitRule) -> None:
        """Add all blocks of the quantized pages of one layer."""
        scores = page_scores(view.codec, q, view.keys, view.page_means, view.page_visible, logits)
        paged = scores.unflatten(-1, (-1, PAGE_SIZE))
        maximum = running_maximum(paged).unsqueeze(-1)
        maximum = maximum.masked_fill(maximum == -torch.inf, 0.0)
        p = torch.exp2(paged - maximum) * DEFAULT_C
        blocks = p.unflatten(-1, (-1, BlockFormat.NVFP4.block_size))
        # Same strict order as the rule: κ = 2 where c·p_max <= τ.
        position = torch.bucketize(blocks.amax(-1).double(), self._candidates.to(p.device)).flatten()
        for always, total in ((False, self._six), (True, self._two)):
            quantized = quantize_probabilities(
                paged,
                maximum,
                BlockFormat.NVFP4,
                ProbabilityRule.UNDERFLOW,
                c=DEFAULT_C,
                tau=1e9 if always else 1e-9,
            )
            values = dequantize_blocks(quantized.codes, quantized.scale_bytes, BlockFormat.NVFP4)
            error = (values - p).double().square().unflatten(-1, (-1, BlockFormat.NVFP4.block_size)).sum(-1)
            total.index_add_(0, position.cpu(), error.flatten().cpu())

    def best(self) -> float:
        """The candidate with the least total error; the smaller on a tie."""
        below_two = self._two.cumsum(0)[:-1]
        above_six = self._six.sum() - self._six.cumsum(0)[:-1]
        return float(self._candidates[torch.argmin(below_two + above_six)])


@torch.inference_mode()
def _calibrate_tau(
    loaded: LoadedModel, shape: ModelShape, prompt: RecordingCache, moments: _Moments, tokens: torch.Tensor
) -> float:
    recipe: Recipe = get_recipe("bitdecoding-nvfp4")
    if shape.head_dim % BlockFormat.NVFP4.block_size:
        recipe = get_recipe("bf16")
    codecs = layer_codecs(
        recipe,
        shape.num_layers,
        shape.num_kv_heads,
        shape.head_dim,
        Calibration(moments.key_mean()),
        device=loaded.model.device,
        model_dtype=loaded.model.dtype,
    )
    errors = _TauErrors()
    cache = TeacherForcedCache(prompt, codecs, errors.observe)
    probe(loaded.model, tokens[None], cache, last_only=True)
    return errors.best()


def _metadata(loaded: LoadedModel, window: int, prompts: Sequence[str], new_tokens: int) -> dict[str, Any]:
    return {
        "model_id": loaded.model_id,
        "revision": loaded.revision,
        "window": window,
        "prompts": list(prompts),
        "new_tokens": new_tokens,
        "tau_queries": TAU_QUERIES,
        "versions": {
            "bitdecoding-fp4": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
