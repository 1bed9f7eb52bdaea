"""One forward pass with a cache, under the argument names of every supported Transformers version."""

import inspect

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

__all__ = ["cache_argument", "forward"]


def cache_argument(model: PreTrainedModel) -> str:
    """Name of the cache argument of a model's forward: ``cache`` since 5.24 or so, ``past_key_values`` before."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def forward(model: PreTrainedModel, input_ids: torch.Tensor, cache: Cache, *, last_only: bool = False) -> torch.Tensor:
    """Logits (fp32) of ``input_ids`` [batch, tokens] fed after what ``cache`` holds.

    Returns:
        [batch, tokens, vocabulary], or [batch, 1, vocabulary] of the last token only, which saves memory.
    """
    arguments = {cache_argument(model): cache, "logits_to_keep": 1 if last_only else 0}
    logits: torch.Tensor = model(input_ids.to(model.device), use_cache=True, **arguments).logits
    return logits.float()
