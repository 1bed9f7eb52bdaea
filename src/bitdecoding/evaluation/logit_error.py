"""Where the error of logits comes from: the query's format or the keys' (paper Table 6)."""

from dataclasses import dataclass

import torch

from bitdecoding.evaluation.kl import TeacherForcing
from bitdecoding.evaluation.trajectories import Trajectory
from bitdecoding.integrations.transformers.probing import DecodeView
from bitdecoding.recipe import QueryFormat, QuerySmoothing, Recipe
from bitdecoding.reference.vectorized import LogitRule, page_scores

__all__ = ["LogitError", "logit_error"]


@dataclass(frozen=True)
class LogitError:
    """Mean squared errors of logits against 16-bit keys and queries, over layers, heads, queries and visible tokens.

    Attributes:
        total: query and keys in the recipe's formats.
        keys_only: keys in the recipe's format, query in 16 bits.
        signal: mean squared 16-bit logit (after smoothing).
    """

    total: float
    keys_only: float
    signal: float

    @property
    def query_share(self) -> float:
        """Share of the error that the query's format adds, 1 - keys_only/total; 0 where there is no error."""
        return 1 - self.keys_only / self.total if self.total else 0.0


class _Sums:
    def __init__(self) -> None:
        self.total = self.keys_only = self.signal = 0.0
        self.count = 0


def logit_error(forcing: TeacherForcing, trajectory: Trajectory, recipe: Recipe) -> LogitError:
    """Measure logit errors on a trajectory's decode queries against its quantized pages.

    Every layer is measured on the queries and keys that the model has under ``recipe``; logits are in natural units,
    softmax scale included.
    """
    exact_query = recipe.replace(query_format=QueryFormat.BITS16, query_smoothing=QuerySmoothing.NONE)
    exact_codecs = forcing.codecs(exact_query)
    sums = _Sums()

    def observe(layer: int, view: DecodeView, q: torch.Tensor, logits: LogitRule) -> None:
        if not view.num_pages:
            return
        visible = view.page_visible
        mask = visible[:, None, None].expand(*q.shape[:-1], -1)
        linear = LogitRule(logits.scale)
        exact = linear(view.exact_products(q))
        quantized = page_scores(view.codec, q, view.keys, view.page_means, visible, linear)
        keys_only = page_scores(exact_codecs[layer], q, view.keys, view.page_means, visible, linear)
        base_2_to_natural = torch.log(torch.tensor(2.0)).item() ** 2
        sums.total += base_2_to_natural * (quantized - exact)[mask].double().square().sum().item()
        sums.keys_only += base_2_to_natural * (keys_only - exact)[mask].double().square().sum().item()
        sums.signal += base_2_to_natural * exact[mask].double().square().sum().item()
        sums.count += int(mask.sum())

    forcing.observe(trajectory, recipe, observe)
    count = max(sums.count, 1)
    return LogitError(sums.total / count, sums.keys_only / count, sums.signal / count)
