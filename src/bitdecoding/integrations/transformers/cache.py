"""`FP4Cache`: the paged cache as a Transformers cache, for ``model.generate`` and plain forward passes."""

from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from bitdecoding.cache.paged import CacheLayer, CacheMemory, PagedFP4Cache
from bitdecoding.calibration.data import Calibration
from bitdecoding.errors import InvalidInputError, UnsupportedError
from bitdecoding.integrations.transformers.attention import ATTENTION_NAME, bind, use_attention
from bitdecoding.models import ModelShape, model_shape
from bitdecoding.recipe import Recipe, get_recipe
from bitdecoding.reference.vectorized import LogitRule

__all__ = ["FP4Cache", "check_model"]

_LAYER_TYPES = ("full_attention", "sliding_attention")


class FP4Cache(Cache):
    """A quantized KV cache for `transformers`; make it with `for_model`.

    Works with greedy search, sampling, beam search, left-padded batches, chunked prefill and several turns on one
    cache. One cache serves one batch at a time: call `reset` before another one. It cannot be cropped, which rules
    out assisted generation.

    Args:
        paged: the cache of the model's layers.
        config: of the decoder that feeds it.
    """

    def __init__(self, paged: PagedFP4Cache, config: PretrainedConfig) -> None:
        super().__init__(layers=[_FP4Layer(layer, config) for layer in paged.layers])
        self.paged = paged

    @classmethod
    def for_model(
        cls, model: PreTrainedModel, recipe: Recipe | str, calibration: Calibration | None = None
    ) -> "FP4Cache":
        """A cache for a model, which is switched to this library's attention function.

        Args:
            model: a decoder in evaluation mode, on one device.
            recipe: a recipe or the name of a preset.
            calibration: the model's statistics; may be left out where the recipe needs none.

        Raises:
            InvalidInputError: unknown preset.
            UnsupportedError: a model that the cache cannot serve, or a head_dim that the recipe cannot store.
            CalibrationError: the recipe needs statistics that ``calibration`` lacks, or they are of another shape.
        """
        shape = check_model(model)
        paged = PagedFP4Cache(
            recipe if isinstance(recipe, Recipe) else get_recipe(recipe),
            shape.num_layers,
            shape.num_kv_heads,
            shape.head_dim,
            calibration,
            windows=[shape.sliding_window if kind == "sliding_attention" else None for kind in shape.layer_types],
            device=model.device,
            dtype=model.dtype,
        )
        use_attention(model)
        config = model.config.get_text_config(decoder=True)
        if config._attn_implementation != ATTENTION_NAME:
            raise UnsupportedError(f"model: {type(model).__name__} does not use Transformers' attention interface")
        return cls(paged, config)

    def memory(self) -> CacheMemory:
        """Bytes in use and allocated, over all layers."""
        return self.paged.memory()


def check_model(model: PreTrainedModel) -> ModelShape:
    """The shape of a model's cache, if this library can serve the model.

    Raises:
        UnsupportedError: names the model and what it has that is not supported.
    """
    config = model.config.get_text_config(decoder=True)

    def refuse(feature: str) -> None:
        raise UnsupportedError(f"model: {type(model).__name__} has {feature}, which is not supported")

    if model.config.is_encoder_decoder:
        refuse("an encoder")
    if getattr(config, "kv_lora_rank", None):
        refuse("latent attention (kv_lora_rank)")
    if getattr(model, "_is_stateful", False):
        refuse("recurrent or linear-attention layers")
    if getattr(config, "attention_chunk_size", None):
        refuse("chunked attention (attention_chunk_size)")
    if any(hasattr(module, "sinks") for module in model.modules()):
        refuse("learned attention sinks")
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", None):
        refuse("bidirectional attention")
    if len({parameter.device for parameter in model.parameters()}) > 1:
        refuse("weights on several devices")
    shape = model_shape(model.config)
    for kind in sorted(set(shape.layer_types) - set(_LAYER_TYPES)):
        refuse(f"layers of type {kind}")
    return shape


class _FP4Layer(CacheLayerMixin):
    """One layer: `update` takes a step's keys and values, `attend` stores them and computes their attention."""

    # Windows are this layer's own business: Transformers must make the same, unsliced padding mask for all layers.
    is_sliding = False

    def __init__(self, paged: CacheLayer, config: PretrainedConfig) -> None:
        super().__init__()
        self._paged = paged
        self._config = config
        self._seen = 0  # tokens of the batch, padding included
        self._updated = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """This step's keys, bound to this layer, and values; the attention function hands them to `attend`.

        Raises:
            UnsupportedError: the model's attention function is not this library's, so that nothing would be cached.
        """
        if self._config._attn_implementation != ATTENTION_NAME or self._updated:
            raise UnsupportedError(
                f"attn_implementation: {self._config._attn_implementation!r} does not read an FP4Cache; after "
                f"model.set_attn_implementation or a failed step make the cache again with FP4Cache.for_model"
            )
        self.is_initialized = True
        self._updated = True
        return bind(key_states, self), value_states

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        logits: LogitRule,
        window: int | None,
    ) -> torch.Tensor:
        """As `AttendingLayer.attend`.

        Raises:
            InvalidInputError: a mask that is not left padding, or does not fit what is cached; NaN or Inf.
            UnsupportedError: the window differs from the configuration's.
        """
        if window != self._paged.store.window:
            raise UnsupportedError(
                f"{self._paged.name}: attends in a window of {window} tokens, its configuration says "
                f"{self._paged.store.window}"
            )
        padding = self._new_padding(mask, q.shape[0], q.shape[-2])
        output = self._paged.attend(q, k, v, logits, padding)
        self._seen += q.shape[-2]
        self._updated = False
        return output

    def _new_padding(self, mask: torch.Tensor | None, rows: int, tokens: int) -> list[int]:
        """Leading tokens of this step that are padding, of each row."""
        padding = _left_padding(mask, rows, self._seen + tokens)
        cached = self._paged.store.lengths
        if cached and cached != [self._seen - min(pad, self._seen) for pad in padding]:
            raise InvalidInputError(
                f"attention_mask: it pads the rows by {padding} tokens, but of the {self._seen} before, {cached} "
                f"are cached; pass the mask of all cached and new tokens"
            )
        return [max(0, pad - self._seen) for pad in padding]

    def get_seq_length(self) -> int:
        """Tokens seen, padding included."""
        return self._seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the mask: all cached and new tokens."""
        return self._seen + query_length, 0

    def get_max_length(self) -> int:
        """-1: no limit."""
        return -1

    get_max_cache_shape = get_max_length  # its name in earlier releases of Transformers

    def reset(self) -> None:
        """Forget everything; the memory of the pages is kept."""
        self._paged.store.free()
        self._seen = 0
        self._updated = False

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes a copy of row ``beam_idx[i]``."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self._select_rows([row for row in range(self._paged.store.num_rows) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows, given by int64 indices or a bool mask."""
        self._select_rows((indices.nonzero()[:, 0] if indices.dtype is torch.bool else indices).tolist())

    def _select_rows(self, rows: list[int]) -> None:
        if self._paged.store.num_rows:
            self._paged.store.select_rows(rows)

    def crop(self, tokens_to_remove: int) -> None:
        """Nothing for 0 tokens.

        Raises:
            UnsupportedError: for any other number: quantized tokens cannot be taken back to 16 bits.
        """
        if tokens_to_remove:
            raise UnsupportedError("crop: an FP4Cache cannot be rolled back; assisted generation is not supported")


def _left_padding(mask: torch.Tensor | None, rows: int, tokens: int) -> list[int]:
    """Leading padding tokens of each row of a 2-D mask (None: no padding)."""
    if mask is None:
        return [0] * rows
    if tuple(mask.shape) != (rows, tokens):
        raise InvalidInputError(
            f"attention_mask: shape {tuple(mask.shape)} is not that of the cached and new tokens, {(rows, tokens)}"
        )
    real = mask.bool()
    if bool((real[:, :-1] & ~real[:, 1:]).any()):
        raise InvalidInputError("attention_mask: only left padding is supported; set tokenizer.padding_side = 'left'")
    return (~real).sum(-1).tolist()
