"""Vectorised attention over quantized pages and 16-bit tokens (Algorithm 1), any number of queries and rows at once.

Every partial sum keeps its own maximum; partials are joined by log-sum-exp. Scores are in base 2. Within the quantized
pages of a split the running maximum advances page by page, as in a kernel: quantized probabilities depend on it.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from bitdecoding.cache.codec import LayerCodec
from bitdecoding.errors import InvalidInputError
from bitdecoding.numerics.blocks import decode_blocks
from bitdecoding.numerics.elements import E4M3_MAX, decode_e4m3, encode_e4m3
from bitdecoding.numerics.probability import quantize_probabilities, two_level_probabilities
from bitdecoding.recipe import PAGE_SIZE, ProbabilityFormat

__all__ = [
    "LogitRule",
    "Partial",
    "bits16_partial",
    "bits16_visible",
    "combine_partials",
    "in_window",
    "page_partial",
    "page_scores",
    "page_visible",
    "quantized_probabilities",
    "quantized_tokens",
    "running_maximum",
    "smoothing_shift",
    "stream_partial",
]

FP16_P_EXPONENT = 15
"""w16: 2^15 folded into the exponent of a 16-bit P, so that fp16 keeps probabilities down to 2^-39 of the maximum."""


class Partial(NamedTuple):
    """Attention over a subset of tokens: ``output`` fp32 [..., queries, head_dim] and base-2 ``lse`` [..., queries].

    A query that sees none of the tokens has output 0 and lse -inf.
    """

    output: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True)
class LogitRule:
    """How products become logits: softmax ``scale`` (1/sqrt(head_dim) usually) and optional tanh ``softcap``.

    Raises:
        InvalidInputError: a scale that is not finite, a soft-cap that is not positive and finite.
    """

    scale: float
    softcap: float | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise InvalidInputError(f"scale: must be finite, got {self.scale}")
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise InvalidInputError(f"softcap: must be positive and finite, or None, got {self.softcap}")

    def __call__(self, products: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
        """Base-2 scores of q·(k - µ) products; ``shift`` = q·µ restores true logits where the soft-cap needs them."""
        if self.softcap is None:
            return products * (self.scale * math.log2(math.e))
        if shift is not None:
            products = products + shift
        return torch.tanh(products * (self.scale / self.softcap)) * (self.softcap * math.log2(math.e))


def quantized_tokens(tokens_cached: torch.Tensor | int) -> torch.Tensor | int:
    """Tokens that lie in quantized pages when ``tokens_cached`` are cached, the current one included: the newest 1..128
    stay 16-bit. 0 for an empty row."""
    pages = (tokens_cached - 1) // PAGE_SIZE
    return pages.clamp(min=0) * PAGE_SIZE if isinstance(pages, torch.Tensor) else max(pages, 0) * PAGE_SIZE


def in_window(query_pos: torch.Tensor, key_pos: torch.Tensor, window: int | None) -> torch.Tensor:
    """Which keys are at or before a query and, with a window, at most window-1 positions before it; broadcasts."""
    if window is not None and window < 1:
        raise InvalidInputError(f"window: must be at least 1 token, or None, got {window}")
    causal = key_pos <= query_pos
    return causal if window is None else causal & (query_pos - key_pos < window)


def page_visible(
    query_pos: torch.Tensor, n_quantized: torch.Tensor, num_pages: int, sink: torch.Tensor | int, window: int | None
) -> torch.Tensor:
    """Which tokens of the pages each query reads.

    Args:
        query_pos: positions of the queries [batch, queries].
        n_quantized: tokens in quantized pages as each query sees them [batch, queries].
        num_pages: pages at hand.
        sink: leading tokens read in 16 bits instead ([batch, 1] or a number), 0 where no 16-bit sink is at hand.
        window: sliding window in tokens, or None.

    Returns:
        Bool [batch, queries, num_pages·PAGE_SIZE].
    """
    key_pos = torch.arange(num_pages * PAGE_SIZE, device=query_pos.device)
    first = torch.as_tensor(sink).to(key_pos.device).unsqueeze(-1)
    quantized = (key_pos < n_quantized.unsqueeze(-1)) & (key_pos >= first)
    return quantized & in_window(query_pos.unsqueeze(-1), key_pos, window)


def bits16_visible(
    query_pos: torch.Tensor,
    n_quantized: torch.Tensor,
    key_pos: torch.Tensor,
    sink: torch.Tensor | int,
    window: int | None,
) -> torch.Tensor:
    """Which 16-bit tokens each query reads: those not in quantized pages, and the sink. Bool [batch, queries, tokens].

    Arguments as in `page_visible`; ``key_pos`` [batch, tokens] are the positions of the 16-bit tokens, -1 for padding.
    """
    key_pos = key_pos.unsqueeze(-2)
    is_sink = key_pos < torch.as_tensor(sink).to(key_pos.device).unsqueeze(-1)
    unquantized = (key_pos >= n_quantized.unsqueeze(-1)) | is_sink
    return unquantized & (key_pos >= 0) & in_window(query_pos.unsqueeze(-1), key_pos, window)


def page_partial(
    codec: LayerCodec,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_means: torch.Tensor | None,
    visible: torch.Tensor,
    logits: LogitRule,
    num_splits: int = 1,
) -> Partial:
    """Attention over decoded quantized pages.

    Args:
        codec: the layer's codec; its recipe decides the formats of the query and of P.
        q: post-RoPE queries [batch, num_kv_heads, group, queries, head_dim].
        keys: decoded keys (`LayerCodec.decode_keys`) [batch, num_kv_heads, pages·PAGE_SIZE, head_dim].
        values: decoded values, same shape.
        page_means: 16-bit means of page-centred keys [batch, num_kv_heads, pages, head_dim], or None.
        visible: bool [batch, queries, pages·PAGE_SIZE].
        logits: softmax scale and soft-cap.
        num_splits: parts the pages are cut into, each with its own maximum, before they are joined.

    Returns:
        `Partial` with shapes [batch, num_kv_heads, group, queries(, head_dim)].
    """
    if num_splits < 1:
        raise InvalidInputError(f"num_splits: must be at least 1, got {num_splits}")
    num_pages = keys.shape[-2] // PAGE_SIZE
    scores = page_scores(codec, q, keys, page_means, visible, logits)
    values = _only_read(values, visible)
    per_split = max(1, -(-num_pages // num_splits))
    partials = []
    for start in range(0, num_pages, per_split):
        tokens = slice(start * PAGE_SIZE, (start + per_split) * PAGE_SIZE)
        partials.append(stream_partial(codec, scores[..., tokens], values[..., tokens, :]))
    return combine_partials(partials) if partials else _empty_partial(q)


def page_scores(
    codec: LayerCodec,
    q: torch.Tensor,
    keys: torch.Tensor,
    page_means: torch.Tensor | None,
    visible: torch.Tensor,
    logits: LogitRule,
) -> torch.Tensor:
    """Base-2 scores of decoded quantized pages, -inf where not visible; arguments as in `page_partial`.

    Returns:
        Fp32 [batch, num_kv_heads, group, queries, pages·PAGE_SIZE].
    """
    query = torch.stack(codec.query_parts(q)).sum(0)
    products = _grouped_matmul(query, keys.transpose(-1, -2))
    if page_means is not None:
        offsets = _grouped_matmul(codec.page_mean_query(q), page_means.float().transpose(-1, -2))
        products = products + offsets.repeat_interleave(PAGE_SIZE, -1)
    return logits(products, smoothing_shift(codec, q)).masked_fill(~visible[:, None, None], -torch.inf)


def running_maximum(paged: torch.Tensor) -> torch.Tensor:
    """Maximum of each step and those before it, -inf before any score: [..., steps, tokens] -> [..., steps]."""
    return paged.amax(-1).cummax(-1).values


def stream_partial(codec: LayerCodec, scores: torch.Tensor, values: torch.Tensor, step: int = PAGE_SIZE) -> Partial:
    """Attention over tokens that are read in order, ``step`` at a time, under one running maximum.

    Args:
        codec: its recipe gives the format of P.
        scores: base-2 scores [batch, num_kv_heads, group, queries, tokens], -inf where masked.
        values: decoded values [batch, num_kv_heads, tokens, head_dim].
        step: tokens after which the maximum advances, a multiple of the block; a page, or what a warp reads of it.
    """
    paged = scores.unflatten(-1, (-1, step))
    running = running_maximum(paged)
    final = running[..., -1:]
    # A page before anything visible has maximum -inf: any finite stand-in gives p = 0.
    stand_in = running.masked_fill(running == -torch.inf, 0.0)
    p = torch.exp2(paged - stand_in.unsqueeze(-1))
    weight = torch.exp2(stand_in - final.masked_fill(final == -torch.inf, 0.0)).masked_fill(running == -torch.inf, 0.0)
    denominator = (p.sum(-1) * weight).sum(-1)
    quantized = quantized_probabilities(codec, paged, stand_in.unsqueeze(-1), p)
    output = _grouped_matmul((quantized * weight.unsqueeze(-1)).flatten(-2), values)
    return _normalised(output, denominator, final.squeeze(-1))


def quantized_probabilities(
    codec: LayerCodec, scores: torch.Tensor, maximum: torch.Tensor, p: torch.Tensor
) -> torch.Tensor:
    """Probabilities relative to the running maximum as the second product sees them.

    Args:
        codec: its recipe gives the format of P.
        scores: base-2 scores of whole pages [..., PAGE_SIZE], -inf where masked.
        maximum: running maximum, finite, [..., 1].
        p: exp2(scores - maximum), fp32.

    Returns:
        Fp32, shape of ``p``, factor c divided out.
    """
    recipe = codec.recipe
    if recipe.probability_format is ProbabilityFormat.BITS16:
        fold = 2.0**FP16_P_EXPONENT
        return (p * fold).half().float() / fold
    if recipe.probability_format is ProbabilityFormat.FP8:
        return decode_e4m3(encode_e4m3(p * E4M3_MAX)) / E4M3_MAX
    blocks = recipe.kv_format.blocks
    assert blocks is not None
    if recipe.probability_format is ProbabilityFormat.FP4_TWO_LEVEL:
        return two_level_probabilities(p, blocks)
    c = recipe.probability_c
    quantized = quantize_probabilities(scores, maximum, blocks, recipe.probability_rule, c=c, tau=codec.tau)
    return decode_blocks(quantized.codes, quantized.scale_bytes, blocks) / c


def bits16_partial(
    codec: LayerCodec,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    logits: LogitRule,
) -> Partial:
    """Attention over 16-bit tokens (sink and recent), computed in fp32 on k - µ_k.

    Args and result as `page_partial`, with raw ``keys`` and ``values`` [batch, num_kv_heads, tokens, head_dim] and
    ``visible`` [batch, queries, tokens].
    """
    if keys.shape[-2] == 0:
        return _empty_partial(q)
    products = _grouped_matmul(q.float(), codec.smooth(keys).transpose(-1, -2))
    scores = logits(products, smoothing_shift(codec, q)).masked_fill(~visible[:, None, None], -torch.inf)
    maximum = scores.amax(-1)
    p = torch.exp2(scores - maximum.masked_fill(maximum == -torch.inf, 0.0).unsqueeze(-1))
    output = _grouped_matmul(p, _only_read(values.float(), visible))
    return _normalised(output, p.sum(-1), maximum)


def _only_read(values: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Values with 0 in tokens that no query reads: they may hold NaN, and 0·NaN must not reach the output."""
    return values.masked_fill(~visible.any(-2)[:, None, :, None], 0.0)


def smoothing_shift(codec: LayerCodec, q: torch.Tensor) -> torch.Tensor | None:
    """q·µ_k [..., queries, 1] in fp32: what smoothing takes off every logit of a query; None without smoothing."""
    if codec.key_mean is None:
        return None
    return (q.float() * codec.key_mean[:, None, None]).sum(-1, keepdim=True)


def combine_partials(partials: list[Partial]) -> Partial:
    """Join attention over disjoint sets of tokens by log-sum-exp."""
    lse = torch.stack([p.lse for p in partials])
    maximum = lse.amax(0)
    weights = torch.exp2(lse - maximum.masked_fill(maximum == -torch.inf, 0.0))
    total = weights.sum(0)
    output = (torch.stack([p.output for p in partials]) * weights.unsqueeze(-1)).sum(0)
    return _normalised(output, total, maximum)


def _normalised(output: torch.Tensor, denominator: torch.Tensor, maximum: torch.Tensor) -> Partial:
    safe = torch.where(denominator > 0, denominator, 1.0)
    return Partial(output / safe.unsqueeze(-1), torch.log2(denominator) + maximum)


def _empty_partial(q: torch.Tensor) -> Partial:
    return Partial(torch.zeros_like(q, dtype=torch.float32), q.new_full(q.shape[:-1], -torch.inf, dtype=torch.float32))


def _grouped_matmul(grouped: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """[..., heads, group, queries, n] @ [..., heads, n, m] without copying the matrix for each query head."""
    flat = grouped.flatten(-3, -2)
    return (flat @ matrix).unflatten(-2, grouped.shape[-3:-1])
