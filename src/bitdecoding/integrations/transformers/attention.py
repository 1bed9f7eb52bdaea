"""The attention function that Transformers calls: it hands queries, keys and values to whoever made the cache layer.

Transformers passes a cache layer's ``update`` result straight to the attention function, but not the cache. So a layer
returns this step's keys with itself attached (`bind`), and the attention function calls its ``attend``. One function
serves the FP4 cache, calibration and teacher-forced evaluation.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from bitdecoding.errors import UnsupportedError
from bitdecoding.reference.vectorized import LogitRule

__all__ = [
    "ATTENTION_NAME",
    "AttendingLayer",
    "attention_of",
    "bind",
    "reference_implementation",
    "register_attention",
    "use_attention",
]

ATTENTION_NAME = "bitdecoding"
"""Value of ``attn_implementation`` that selects this function."""
_LAYER = "_bitdecoding_layer"
# What models pass to the attention function besides the arguments that it takes, and which changes the result
_UNSUPPORTED_ARGUMENTS = {
    "s_aux": "learned attention sinks",
    "sinks": "learned attention sinks",
    "position_bias": "a position bias",
    "indices": "sparse attention",
    "block_indices": "sparse attention",
}


class AttendingLayer(Protocol):
    """A cache layer that computes its own attention."""

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        logits: LogitRule,
        window: int | None,
    ) -> torch.Tensor:
        """Attention of this step's queries.

        Args:
            q: post-RoPE queries [batch, num_q_heads, tokens, head_dim].
            k, v: this step's keys and values [batch, num_kv_heads, tokens, head_dim].
            mask: 2-D padding mask [batch, cached + tokens] (true for real tokens), or None where nothing is padded.
            logits: softmax scale and soft-cap.
            window: sliding window in tokens, or None.

        Returns:
            [batch, num_q_heads, tokens, head_dim].
        """
        ...


def bind(keys: torch.Tensor, layer: AttendingLayer) -> torch.Tensor:
    """This step's keys as a tensor that leads the attention function back to ``layer``."""
    bound = keys.view_as(keys)  # an own tensor object: the caller's must not keep the layer alive
    setattr(bound, _LAYER, layer)
    return bound


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    layer: AttendingLayer | None = getattr(key, _LAYER, None)
    if layer is None:
        raise UnsupportedError(
            "past_key_values: attn_implementation='bitdecoding' needs a cache of this library; "
            "pass past_key_values=FP4Cache.for_model(model, recipe), or go back to a 16-bit cache with "
            "model.set_attn_implementation('sdpa')"
        )
    if dropout:
        raise UnsupportedError(f"dropout: attention dropout {dropout} is for training; call model.eval() first")
    for argument, feature in _UNSUPPORTED_ARGUMENTS.items():
        if kwargs.get(argument) is not None:
            raise UnsupportedError(f"{argument}: {type(module).__name__} has {feature}, which is not supported")
    if not getattr(module, "is_causal", True):
        raise UnsupportedError(f"{type(module).__name__}: only causal self-attention is supported")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise UnsupportedError("attention_mask: only 2-D padding masks are supported, not custom 4-D masks")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    output = layer.attend(query, key, value, attention_mask, LogitRule(scale, softcap), sliding_window)
    return output.to(query.dtype).transpose(1, 2).contiguous(), None


def _padding_mask(
    *args: Any, attention_mask: torch.Tensor | None = None, allow_is_causal_skip: bool = True, **kwargs: Any
) -> torch.Tensor | None:
    """The 2-D mask itself: layers work out causality, windows and padding from it."""
    # Transformers forbids the skip where the mask is more than causal, such as bidirectional among image tokens.
    if not allow_is_causal_skip:
        raise UnsupportedError("attention_mask: only causal attention is supported, the model asks for another mask")
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return attention_mask


def register_attention() -> None:
    """Make ``attn_implementation="bitdecoding"`` known to Transformers; calling it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _padding_mask)


def use_attention(model: PreTrainedModel) -> None:
    """Switch a loaded model to the ``bitdecoding`` attention function."""
    register_attention()
    model.set_attn_implementation(ATTENTION_NAME)


@contextmanager
def attention_of(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Use another attention implementation meanwhile."""
    previous = model.config._attn_implementation
    if previous == implementation:
        yield
        return
    register_attention()
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(previous)


def reference_implementation(model: PreTrainedModel) -> str:
    """Transformers' own exact attention: ``sdpa``, or ``eager`` for soft-capped logits, which sdpa leaves uncapped."""
    soft_capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    return "eager" if soft_capped else "sdpa"
