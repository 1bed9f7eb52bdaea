"""Teacher-forced KL divergence from the 16-bit cache (paper App. A).

The reference's own greedy trajectory is fed token by token to the model under each recipe; at every step the divergence
of the next-token distributions is taken over the reference's 128 most likely tokens.
"""

from dataclasses import dataclass

import torch

from bitdecoding.cache.codec import LayerCodec, kept_dtype, layer_codecs
from bitdecoding.calibration.data import Calibration
from bitdecoding.errors import InvalidInputError
from bitdecoding.evaluation.trajectories import Trajectory
from bitdecoding.integrations.transformers.probing import PageObserver, RecordingCache, TeacherForcedCache, probe
from bitdecoding.models import LoadedModel, model_shape
from bitdecoding.recipe import Recipe, get_recipe

__all__ = ["TOP_TOKENS", "KLSteps", "TeacherForcing", "top_kl", "truncated_kl"]

TOP_TOKENS = 128


@dataclass(frozen=True)
class KLSteps:
    """One trajectory under one recipe, a value a step.

    Attributes:
        kl: `top_kl`, nats.
        truncated_kl: `truncated_kl`, nats; the other common reading of "KL over the top tokens", for comparisons with
            results that use it.
        mismatch: whether the most likely token differs.
    """

    kl: tuple[float, ...]
    truncated_kl: tuple[float, ...]
    mismatch: tuple[bool, ...]

    @property
    def mean_kl(self) -> float:
        """Mean KL over the steps, nats."""
        return sum(self.kl) / len(self.kl)

    @property
    def mean_truncated_kl(self) -> float:
        """Mean truncated KL over the steps, nats."""
        return sum(self.truncated_kl) / len(self.truncated_kl)

    @property
    def mismatch_rate(self) -> float:
        """Share of steps whose most likely token differs."""
        return sum(self.mismatch) / len(self.mismatch)


def top_kl(reference: torch.Tensor, other: torch.Tensor, top: int = TOP_TOKENS) -> torch.Tensor:
    """KL(reference || other) over the reference's ``top`` most likely tokens, both renormalised over them.

    Args:
        reference, other: logits [steps, vocabulary].
        top: tokens compared; the whole vocabulary if it is smaller.

    Returns:
        Nats, fp64 [steps], never negative beyond rounding.
    """
    top = min(top, reference.shape[-1])
    values, ids = reference.double().topk(top, -1)
    log_p = values.log_softmax(-1)
    log_q = other.double().gather(-1, ids).log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def truncated_kl(reference: torch.Tensor, other: torch.Tensor, top: int = TOP_TOKENS) -> torch.Tensor:
    """Sum of p·log(p/q) over the reference's ``top`` most likely tokens, p and q normalised over the whole vocabulary.

    The part of KL(reference || other) that these tokens contribute: no divergence of its own, a step may be negative.
    Arguments and result as `top_kl`.
    """
    log_p, ids = reference.double().log_softmax(-1).topk(min(top, reference.shape[-1]), -1)
    log_q = other.double().log_softmax(-1).gather(-1, ids)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


class TeacherForcing:
    """Runs recipes over trajectories of one model; prefills and reference logits are made once a trajectory.

    Args:
        loaded: the model; each run switches it to this library's attention function and back.
        calibration: statistics for recipes that need them, or None.
    """

    def __init__(self, loaded: LoadedModel, calibration: Calibration | None = None) -> None:
        self._loaded = loaded
        self._shape = model_shape(loaded.model.config)
        self._calibration = calibration
        self._trajectory: Trajectory | None = None
        self._prompt: RecordingCache | None = None
        self._reference: torch.Tensor | None = None

    def codecs(self, recipe: Recipe) -> list[LayerCodec]:
        """One codec a layer for a recipe."""
        return layer_codecs(
            recipe,
            self._shape.num_layers,
            self._shape.num_kv_heads,
            self._shape.head_dim,
            self._calibration,
            device=self._loaded.model.device,
            model_dtype=self._loaded.model.dtype,
        )

    def run(self, trajectory: Trajectory, recipe: Recipe) -> KLSteps:
        """Teacher-force one trajectory under one recipe.

        Raises:
            InvalidInputError: trajectory longer than the model's context.
            CalibrationError: the recipe needs statistics that are not there.
        """
        logits = self.observe(trajectory, recipe)
        assert self._reference is not None
        kl, truncated = top_kl(self._reference, logits), truncated_kl(self._reference, logits)
        mismatch = self._reference.argmax(-1) != logits.argmax(-1)
        return KLSteps(tuple(kl.tolist()), tuple(truncated.tolist()), tuple(mismatch.tolist()))

    def observe(self, trajectory: Trajectory, recipe: Recipe, observer: PageObserver | None = None) -> torch.Tensor:
        """Logits [steps, vocabulary] of the steps under a recipe; ``observer`` sees every layer's pages and queries.

        Raises as `run`.
        """
        codecs = self.codecs(recipe)
        if trajectory != self._trajectory:
            self._start(trajectory)
        return self._decode(trajectory, codecs, observer)

    @torch.inference_mode()
    def _start(self, trajectory: Trajectory) -> None:
        if len(trajectory.token_ids) > self._shape.max_context:
            raise InvalidInputError(
                f"trajectory {trajectory.name}: {len(trajectory.token_ids)} tokens exceed the model's context of "
                f"{self._shape.max_context}"
            )
        prompt = torch.tensor([trajectory.token_ids[: trajectory.prompt_length]])
        cache = RecordingCache(self._shape.num_layers, kept_dtype(self._loaded.model.dtype))
        probe(self._loaded.model, prompt, cache, last_only=True)
        self._trajectory, self._prompt = trajectory, cache
        self._reference = self._decode(trajectory, self.codecs(get_recipe("bf16")))

    @torch.inference_mode()
    def _decode(
        self, trajectory: Trajectory, codecs: list[LayerCodec], observer: PageObserver | None = None
    ) -> torch.Tensor:
        """Logits [steps, vocabulary] after each token of the continuation."""
        assert self._prompt is not None
        tokens = torch.tensor([trajectory.token_ids[trajectory.prompt_length :]])
        cache = TeacherForcedCache(self._prompt, codecs, observer)
        return probe(self._loaded.model, tokens, cache)[0]
