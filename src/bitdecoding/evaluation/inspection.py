"""What makes a model hard for a 4-bit cache, layer by layer: outliers in the keys and probabilities that underflow."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from bitdecoding.cache.codec import LayerCodec
from bitdecoding.calibration.data import Calibration
from bitdecoding.errors import InvalidInputError
from bitdecoding.evaluation.kl import TeacherForcing
from bitdecoding.integrations.transformers.probing import DecodeView, RecordingCache, TeacherForcedCache, probe
from bitdecoding.models import LoadedModel, model_shape
from bitdecoding.numerics.blocks import BlockFormat
from bitdecoding.numerics.probability import ProbabilityRule, quantize_probabilities
from bitdecoding.recipe import PAGE_SIZE, KVFormat, ProbabilityFormat, Recipe
from bitdecoding.reference.vectorized import LogitRule, page_scores, running_maximum

__all__ = ["QUERIES", "LayerInspection", "Underflow", "crest_factor", "inspect_model"]

QUERIES = 64
"""Last tokens of the text, whose queries read the pages of those before."""

_BLOCK = BlockFormat.NVFP4.block_size


class Underflow(NamedTuple):
    """NVFP4 probability blocks whose scale rounds to 0, so that all their probabilities are lost.

    Attributes:
        blocks: their share of all blocks of 16 tokens in quantized pages that a query sees.
        mass: attention probability that lies in them, of 1 a query; mean over queries and heads.
    """

    blocks: float
    mass: float


@dataclass(frozen=True)
class LayerInspection:
    """One layer.

    Attributes:
        layer: its index.
        raw_keys: `crest_factor` of the keys as the model makes them.
        smoothed_keys: the same less the calibrated key mean, where the recipe smooths.
        rotated_keys: the same, smoothed and rotated: what the recipe quantizes.
        plain: probabilities lost under the standard rule (c = 1, block maximum mapped to 6).
        recipe: probabilities lost under the recipe's rule.
    """

    layer: int
    raw_keys: float
    smoothed_keys: float
    rotated_keys: float
    plain: Underflow
    recipe: Underflow


def crest_factor(keys: torch.Tensor, block: int = _BLOCK) -> float:
    """Largest magnitude over root mean square of each block of channels, averaged over all blocks.

    1 where all channels of a block are equally large, sqrt(block) where one channel has it all, about 2.1 for 16
    Gaussian channels. A block's largest magnitude sets its FP4 scale, so the more it towers over the rest, the coarser
    the grid is for the rest. An all-zero block counts as 1.

    Args:
        keys: [..., head_dim], head_dim a multiple of ``block``.
        block: channels that share a scale.
    """
    blocks = keys.float().unflatten(-1, (-1, block))
    rms = blocks.square().mean(-1).sqrt()
    crest = torch.where(rms > 0, blocks.abs().amax(-1) / rms, 1.0)
    return float(crest.double().mean())


@torch.inference_mode()
def inspect_model(
    loaded: LoadedModel, token_ids: Sequence[int], recipe: Recipe, calibration: Calibration | None = None
) -> tuple[LayerInspection, ...]:
    """Measure every layer of a model on a text: its keys in the prefill, and its last `QUERIES` tokens' probabilities.

    Args:
        loaded: the model; it is switched to this library's attention function.
        token_ids: the text.
        recipe: an NVFP4 recipe with FP4 probabilities.
        calibration: the model's statistics; may be None where the recipe needs none.

    Raises:
        InvalidInputError: another kind of recipe, a text that fills no page or exceeds the model's context.
        CalibrationError: the recipe needs statistics that are not there.
    """
    if recipe.kv_format is not KVFormat.NVFP4 or recipe.probability_format is not ProbabilityFormat.FP4:
        raise InvalidInputError(f"recipe: {recipe.name} has no NVFP4 probabilities, the only ones that underflow")
    shape = model_shape(loaded.model.config)
    if not PAGE_SIZE + QUERIES <= len(token_ids) <= shape.max_context:
        raise InvalidInputError(
            f"text: has {len(token_ids)} tokens; need at least {PAGE_SIZE + QUERIES} and no more than the model's "
            f"context of {shape.max_context}"
        )
    codecs = TeacherForcing(loaded, calibration).codecs(recipe)
    outliers, underflows = _KeyOutliers(codecs), _Underflows()
    tokens = torch.tensor([list(token_ids)])
    prompt = RecordingCache(shape.num_layers, codecs[0].dtype, outliers.observe)
    probe(loaded.model, tokens[:, :-QUERIES], prompt, last_only=True)
    probe(loaded.model, tokens[:, -QUERIES:], TeacherForcedCache(prompt, codecs, underflows.observe), last_only=True)
    return tuple(
        LayerInspection(layer, *outliers.layers[layer], *underflows.layers[layer]) for layer in range(shape.num_layers)
    )


class _KeyOutliers:
    """Crest factors of each layer's keys outside the sink: raw, smoothed, rotated."""

    def __init__(self, codecs: Sequence[LayerCodec]) -> None:
        self._codecs = codecs
        self.layers: list[tuple[float, float, float]] = []

    def observe(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        codec = self._codecs[layer]
        keys = k[..., codec.recipe.sink_tokens :, :]
        smoothed = codec.smooth(keys)
        self.layers.append((crest_factor(keys), crest_factor(smoothed), crest_factor(codec.rotate(smoothed))))


class _Underflows:
    """Lost probabilities of each layer: under the plain rule and under the recipe's."""

    def __init__(self) -> None:
        self.layers: list[tuple[Underflow, Underflow]] = []

    def observe(self, layer: int, view: DecodeView, q: torch.Tensor, logits: LogitRule) -> None:
        scores = page_scores(view.codec, q, view.keys, view.page_means, view.page_visible, logits)
        lse = torch.logaddexp2(_logsumexp2(scores), view.bits16(q, logits).lse)
        recipe = view.codec.recipe
        rule = recipe.probability_rule or ProbabilityRule.UNDERFLOW
        self.layers.append(
            (
                _underflow(scores, lse, ProbabilityRule.MAX6, c=1.0, tau=view.codec.tau),
                _underflow(scores, lse, rule, c=recipe.probability_c, tau=view.codec.tau),
            )
        )


def _logsumexp2(scores: torch.Tensor) -> torch.Tensor:
    maximum = scores.amax(-1)
    finite = maximum.masked_fill(maximum == -torch.inf, 0.0)
    return torch.exp2(scores - finite.unsqueeze(-1)).sum(-1).log2() + finite


def _underflow(scores: torch.Tensor, lse: torch.Tensor, rule: ProbabilityRule, *, c: float, tau: float) -> Underflow:
    """What a rule loses of probabilities exp2(scores - lse); scores [..., pages·PAGE_SIZE], lse [...]."""
    paged = scores.unflatten(-1, (-1, PAGE_SIZE))
    maximum = running_maximum(paged).unsqueeze(-1)
    maximum = maximum.masked_fill(maximum == -torch.inf, 0.0)
    quantized = quantize_probabilities(paged, maximum, BlockFormat.NVFP4, rule, c=c, tau=tau)
    blocks = scores.unflatten(-1, (-1, _BLOCK))
    visible = (blocks > -torch.inf).any(-1)
    lost = visible & (quantized.scale_bytes.flatten(-2) == 0)
    mass = torch.exp2(blocks - lse[..., None, None]).sum(-1) * lost
    return Underflow(float(lost.sum() / visible.sum().clamp(min=1)), float(mass.sum(-1).double().mean()))
