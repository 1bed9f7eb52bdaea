"""Caches for looking at a model: `RecordingCache` keeps a prefill's keys and values, `TeacherForcedCache` decodes many
given tokens at once exactly as one-by-one decoding over a quantized cache would."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from bitdecoding.cache.codec import LayerCodec
from bitdecoding.integrations.transformers.attention import ATTENTION_NAME, attention_of, bind
from bitdecoding.integrations.transformers.forward import forward
from bitdecoding.recipe import PAGE_SIZE
from bitdecoding.reference.causal import causal_attention
from bitdecoding.reference.vectorized import (
    LogitRule,
    Partial,
    bits16_partial,
    bits16_visible,
    combine_partials,
    page_partial,
    page_visible,
    quantized_tokens,
)

__all__ = ["DecodeView", "PageObserver", "RecordingCache", "TeacherForcedCache", "probe"]

Observer = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Called with layer index, queries, keys and values of a prefill (shapes as in `AttendingLayer.attend`)."""


class _ProbeLayer(CacheLayerMixin):
    """A cache layer that computes its own attention on the tokens of one forward pass."""

    is_sliding = False

    def __init__(self, cached: int) -> None:
        super().__init__()
        self._cached = cached

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return bind(key_states, self), value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cached + query_length, 0

    def get_seq_length(self) -> int:
        return self._cached

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in earlier releases of Transformers


class _RecordingLayer(_ProbeLayer):
    def __init__(self, index: int, dtype: torch.dtype | None, observer: Observer | None) -> None:
        super().__init__(0)
        self._index = index
        self._dtype = dtype
        self._observer = observer
        self.recorded: tuple[torch.Tensor, torch.Tensor] | None = None

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        logits: LogitRule,
        window: int | None,
    ) -> torch.Tensor:
        if self._observer is not None:
            self._observer(self._index, q, k, v)
        if self._dtype is not None:
            self.recorded = (k.to(self._dtype), v.to(self._dtype))
        return causal_attention(q, k, v, logits, window=window)


class RecordingCache(Cache):
    """Exact causal prefill from an empty cache; unpadded rows.

    Args:
        num_layers: layers of the model.
        dtype: 16-bit dtype in which keys and values are kept (`recorded`), or None to keep nothing.
        observer: called with every layer's queries, keys and values.
    """

    def __init__(
        self, num_layers: int, dtype: torch.dtype | None = torch.bfloat16, observer: Observer | None = None
    ) -> None:
        super().__init__(layers=[_RecordingLayer(i, dtype, observer) for i in range(num_layers)])

    def recorded(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, [batch, num_kv_heads, tokens, head_dim]."""
        recorded = self.layers[layer].recorded
        assert recorded is not None, "no prefill was run"
        return recorded


class DecodeView:
    """One layer's prompt and newly fed tokens, encoded once and seen by every new token as at its own decode step.

    A token at position p sees pages with tokens below 128·floor(p/128) quantized, the sink and the rest in 16 bits.

    Args:
        codec: the layer's codec.
        prompt_keys, prompt_values: 16-bit [batch, num_kv_heads, prompt, head_dim].
        keys, values: of the new tokens, any dtype; rounded to the prompt's.
        window: sliding window, or None.
    """

    def __init__(
        self,
        codec: LayerCodec,
        prompt_keys: torch.Tensor,
        prompt_values: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        window: int | None,
    ) -> None:
        self.codec = codec
        self._keys = torch.cat((prompt_keys, keys.to(prompt_keys.dtype)), -2)
        self._values = torch.cat((prompt_values, values.to(prompt_values.dtype)), -2)
        batch, prompt, new = keys.shape[0], prompt_keys.shape[-2], keys.shape[-2]
        self._position = torch.arange(prompt, prompt + new, device=keys.device).expand(batch, new)
        n_quantized = quantized_tokens(self._position + 1)
        assert isinstance(n_quantized, torch.Tensor)
        self._n_quantized = n_quantized
        self.num_pages = int(n_quantized.max()) // PAGE_SIZE
        self._window = window
        sink = codec.recipe.sink_tokens
        self.page_visible = page_visible(self._position, n_quantized, self.num_pages, sink, window)
        if self.num_pages:
            self._encode()

    def _encode(self) -> None:
        pages, batch = self.num_pages, self._keys.shape[0]

        def cut(x: torch.Tensor) -> torch.Tensor:  # [batch, heads, tokens, d] -> [batch·pages, heads, PAGE_SIZE, d]
            return x[..., : pages * PAGE_SIZE, :].unflatten(-2, (pages, PAGE_SIZE)).transpose(1, 2).flatten(0, 1)

        def join(x: torch.Tensor) -> torch.Tensor:
            return x.unflatten(0, (batch, pages)).transpose(1, 2).flatten(2, 3)

        first = torch.arange(batch * pages, device=self._keys.device) % pages == 0
        encoded = self.codec.encode_keys(cut(self._keys), first)
        mean = encoded.get("mean")
        self.keys = join(self.codec.decode_keys(encoded))
        self.page_means = None if mean is None else mean.unflatten(0, (batch, pages)).transpose(1, 2)
        self.values = join(self.codec.decode_values(self.codec.encode_values(cut(self._values))))

    def exact_products(self, q: torch.Tensor) -> torch.Tensor:
        """q·(k - µ_k) of grouped queries with the 16-bit keys of the quantized pages (fp32, last dim their tokens)."""
        keys = self.codec.smooth(self._keys[..., : self.num_pages * PAGE_SIZE, :])
        return (q.float().flatten(2, 3) @ keys.transpose(-1, -2)).unflatten(2, q.shape[2:4])

    def attend(self, q: torch.Tensor, logits: LogitRule) -> torch.Tensor:
        """Attention of grouped queries [batch, num_kv_heads, group, new tokens, head_dim], same shape, fp32."""
        partials = [self.bits16(q, logits)]
        if self.num_pages:
            partials.append(
                page_partial(self.codec, q, self.keys, self.values, self.page_means, self.page_visible, logits)
            )
        return combine_partials(partials).output

    def bits16(self, q: torch.Tensor, logits: LogitRule) -> Partial:
        """What the 16-bit tokens, sink and recent, add to the attention of grouped queries (shape as in `attend`)."""
        sink = self.codec.recipe.sink_tokens
        oldest = int(self._n_quantized.min())
        tokens = self._keys.shape[-2]
        key_position = torch.arange(tokens, device=q.device)
        key_position = key_position[(key_position < sink) | (key_position >= oldest)]
        visible = bits16_visible(
            self._position, self._n_quantized, key_position.expand(q.shape[0], -1), sink, self._window
        )
        keys, values = self._keys[..., key_position, :], self._values[..., key_position, :]
        return bits16_partial(self.codec, q, keys, values, visible, logits)


PageObserver = Callable[[int, DecodeView, torch.Tensor, LogitRule], None]
"""Called with layer index, the encoded view, grouped queries and the logit rule."""


class _TeacherForcedLayer(_ProbeLayer):
    def __init__(
        self,
        index: int,
        codec: LayerCodec,
        prompt: tuple[torch.Tensor, torch.Tensor],
        observer: PageObserver | None,
    ) -> None:
        super().__init__(prompt[0].shape[-2])
        self._index = index
        self._codec = codec
        self._prompt = prompt
        self._observer = observer

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        logits: LogitRule,
        window: int | None,
    ) -> torch.Tensor:
        view = DecodeView(self._codec, *self._prompt, k, v, window)
        grouped = q.unflatten(1, (k.shape[1], -1))
        if self._observer is not None:
            self._observer(self._index, view, grouped, logits)
        return view.attend(grouped, logits).flatten(1, 2)


class TeacherForcedCache(Cache):
    """Decodes all tokens of one forward pass at once over a recorded prompt, each as at its own decode step.

    Equal to feeding the tokens one by one into the FP4 cache, up to fp32 summation order.

    Args:
        prompt: the recorded prefill.
        codecs: one codec a layer.
        observer: called with every layer's encoded view and queries, or None.
    """

    def __init__(self, prompt: RecordingCache, codecs: list[LayerCodec], observer: PageObserver | None = None) -> None:
        super().__init__(
            layers=[_TeacherForcedLayer(i, codec, prompt.recorded(i), observer) for i, codec in enumerate(codecs)]
        )


def probe(model: PreTrainedModel, input_ids: torch.Tensor, cache: Cache, *, last_only: bool = False) -> torch.Tensor:
    """`forward` with a cache of this module; the model's attention is switched meanwhile and put back."""
    with attention_of(model, ATTENTION_NAME):
        return forward(model, input_ids, cache, last_only=last_only)
