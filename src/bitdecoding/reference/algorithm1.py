"""Algorithm 1 written out: one decode step of one sequence, with a loop a KV head, a split and a page.

Meant to be read next to the paper (Algorithm 1) and to test the fast implementations; nothing here is quick. Rounding
rules are the shared ones of `LayerCodec` and `quantized_probabilities`; everything between them stands here.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from bitdecoding.cache.codec import LayerCodec
from bitdecoding.cache.formats import EncodedPages
from bitdecoding.errors import InvalidInputError
from bitdecoding.numerics.validation import check_finite, check_fits
from bitdecoding.recipe import PAGE_SIZE
from bitdecoding.reference.vectorized import (
    LogitRule,
    Partial,
    combine_partials,
    in_window,
    quantized_probabilities,
    quantized_tokens,
    smoothing_shift,
)

__all__ = [
    "PagedSequence",
    "RunningSoftmax",
    "attention_step",
    "build_sequence",
    "check_block_table",
    "decode_step_reference",
    "put_in_pool",
    "split_pages",
    "tokens_in_pages",
]

RoundProbabilities = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Rounds probabilities given scores [rows, tokens], running maximum [rows, 1] and p [rows, tokens]."""


@dataclass(frozen=True)
class PagedSequence:
    """One sequence's cache of one layer.

    Tokens below n_fp4 = 128·floor((N_first - 1)/128) lie in pages, where N_first counts the tokens up to the first new
    one of the step; the others are recent. Pages hold the sink tokens, too.

    Attributes:
        key_pages: encoded pages of the pool; every tensor is [num_pool_pages, num_kv_heads, ...]. Empty where no page
            is used.
        value_pages: the same for values.
        block_table: int [at least the pages used]; entry i is the pool page of tokens 128·i .. 128·i+127. Entries past
            the pages used are never read.
        recent_keys: raw 16-bit keys after the pages [num_kv_heads, at least length - n_fp4, head_dim]; more are unread.
        recent_values: the same for values.
        length: N, tokens cached with the new ones of the step; 0 for a padding row.
        sink_keys: raw 16-bit first tokens [num_kv_heads, up to 128, head_dim], or None where they are not at hand and
            the quantized copies in page 0 are read instead.
        sink_values: the same for values.
    """

    key_pages: EncodedPages
    value_pages: EncodedPages
    block_table: torch.Tensor
    recent_keys: torch.Tensor
    recent_values: torch.Tensor
    length: int
    sink_keys: torch.Tensor | None = None
    sink_values: torch.Tensor | None = None


class RunningSoftmax:
    """Softmax over tokens that arrive in pieces: maximum m, denominator l and output O of Algorithm 1, in fp32.

    Args:
        rows: queries.
        channels: channels of the values.
    """

    def __init__(self, rows: int, channels: int) -> None:
        self._maximum = torch.full((rows, 1), -torch.inf)
        self._denominator = torch.zeros(rows, 1)
        self._output = torch.zeros(rows, channels)

    def add(self, scores: torch.Tensor, values: torch.Tensor, round_p: RoundProbabilities | None = None) -> None:
        """Take in some tokens.

        Args:
            scores: base-2 scores fp32 [rows, tokens], -inf where a row doesn't read a token.
            values: fp32 [tokens, channels]; tokens that no row reads may hold NaN.
            round_p: rounds the probabilities that multiply the values; the denominator takes the unrounded ones.
        """
        maximum = torch.maximum(self._maximum, scores.amax(-1, keepdim=True))
        # A row that has read nothing yet has maximum -inf: any finite stand-in gives p = 0.
        finite = maximum.masked_fill(maximum == -torch.inf, 0.0)
        p = torch.exp2(scores - finite)
        rescale = torch.exp2(self._maximum - finite)
        rounded = p if round_p is None else round_p(scores, finite, p)
        read = (scores > -torch.inf).any(0)
        self._denominator = self._denominator * rescale + p.sum(-1, keepdim=True)
        self._output = self._output * rescale + rounded @ values.masked_fill(~read.unsqueeze(-1), 0.0)
        self._maximum = maximum

    def partial(self) -> Partial:
        """O/l [rows, channels] and log2 l + m [rows]; 0 and -inf for a row that read nothing."""
        safe = torch.where(self._denominator > 0, self._denominator, 1.0)
        return Partial(self._output / safe, (torch.log2(self._denominator) + self._maximum).squeeze(-1))


def split_pages(num_pages: int, num_splits: int) -> list[range]:
    """Pages of each split: equal runs, the last ones shorter or empty. `InvalidInputError` unless num_splits >= 1."""
    if num_splits < 1:
        raise InvalidInputError(f"num_splits: must be at least 1, got {num_splits}")
    run = -(-num_pages // num_splits)
    return [range(min(s * run, num_pages), min((s + 1) * run, num_pages)) for s in range(num_splits)]


def check_block_table(block_table: torch.Tensor, num_pages: int, pool: EncodedPages | None = None) -> list[int]:
    """The first ``num_pages`` entries.

    Raises `InvalidInputError` if there are fewer, or one is negative, used twice or not in ``pool`` (where given).
    """
    if block_table.dim() != 1 or block_table.is_floating_point() or block_table.shape[0] < num_pages:
        raise InvalidInputError(
            f"block_table: expected a 1-D integer tensor of at least {num_pages} entries, "
            f"got {block_table.dtype} {tuple(block_table.shape)}"
        )
    used = [int(page) for page in block_table[:num_pages].tolist()]
    if any(page < 0 for page in used) or len(set(used)) < num_pages:
        raise InvalidInputError(f"block_table: the {num_pages} pages used must differ and not be negative, got {used}")
    pool_pages = None if pool is None else min((x.shape[0] for x in pool.values()), default=0)
    if pool_pages is not None and used and max(used) >= pool_pages:
        raise InvalidInputError(f"block_table: page {max(used)} is not in the pool of {pool_pages} pages")
    return used


def put_in_pool(encoded: EncodedPages, used: list[int]) -> EncodedPages:
    """A pool with page i of ``encoded`` at ``used[i]`` and zeros elsewhere; empty for no pages."""
    if not used:
        return {}
    pool = {name: x.new_zeros((max(used) + 1, *x.shape[1:])) for name, x in encoded.items()}
    for name, x in encoded.items():
        pool[name][used] = x
    return pool


def build_sequence(
    keys: torch.Tensor,
    values: torch.Tensor,
    codec: LayerCodec,
    *,
    new_tokens: int = 1,
    keep_sink: bool = True,
    block_table: torch.Tensor | None = None,
) -> PagedSequence:
    """The cache of a sequence as a step with ``new_tokens`` new tokens finds it.

    Args:
        keys: post-RoPE keys [num_kv_heads, N, head_dim], floating point, rounded to ``codec.dtype`` first. N may be 0.
        values: same shape.
        codec: encodes the pages.
        new_tokens: how many of the last tokens belong to this step.
        keep_sink: whether the 16-bit sink is at hand once there are pages.
        block_table: int [at least the pages used]; default 0, 1, 2, ...

    Raises:
        InvalidInputError: NaN or Inf, shapes that the codec or each other doesn't fit, ``new_tokens`` outside 1..N, a
            block table that is too short or names a page twice.
    """
    for name, x in (("keys", keys), ("values", values)):
        check_fits(name, x, codec.dtype)
        if x.dim() != 3 or x.shape[0] != codec.num_kv_heads or x.shape[-1] != codec.head_dim or x.shape != keys.shape:
            raise InvalidInputError(
                f"{name}: expected [{codec.num_kv_heads}, N, {codec.head_dim}] with one N, got {tuple(x.shape)}"
            )
    keys, values = keys.to(codec.dtype), values.to(codec.dtype)
    length = keys.shape[1]
    n_fp4 = tokens_in_pages(length, new_tokens)
    num_pages = n_fp4 // PAGE_SIZE
    block_table = torch.arange(num_pages) if block_table is None else block_table
    used = check_block_table(block_table, num_pages)
    key_pages: EncodedPages = {}
    value_pages: EncodedPages = {}
    if num_pages:
        key_pages = codec.encode_keys(_cut(keys, num_pages), torch.arange(num_pages) == 0)
        value_pages = codec.encode_values(_cut(values, num_pages))
    sink = codec.recipe.sink_tokens if keep_sink and num_pages else 0
    return PagedSequence(
        key_pages=put_in_pool(key_pages, used),
        value_pages=put_in_pool(value_pages, used),
        block_table=block_table,
        recent_keys=keys[:, n_fp4:],
        recent_values=values[:, n_fp4:],
        length=length,
        sink_keys=keys[:, :sink] if sink else None,
        sink_values=values[:, :sink] if sink else None,
    )


def _cut(x: torch.Tensor, num_pages: int) -> torch.Tensor:
    """[heads, N, channels] -> [num_pages, heads, PAGE_SIZE, channels]."""
    return x[:, : num_pages * PAGE_SIZE].unflatten(1, (num_pages, PAGE_SIZE)).transpose(0, 1)


def tokens_in_pages(length: int, new_tokens: int) -> int:
    """n_fp4 of a step: whole pages before the page of the first new token, 0 for an empty sequence.

    Raises `InvalidInputError` unless ``new_tokens`` is within 1..length.
    """
    if length and not 1 <= new_tokens <= length:
        raise InvalidInputError(f"new tokens: {new_tokens} of a sequence of length {length}; use 1..{length}")
    n_fp4 = quantized_tokens(length - new_tokens + 1)
    assert isinstance(n_fp4, int)
    return n_fp4


def attention_step(
    q: torch.Tensor,
    sequence: PagedSequence,
    codec: LayerCodec,
    *,
    scale: float,
    num_splits: int = 1,
    softcap: float | None = None,
    window: int | None = None,
) -> Partial:
    """One decode step of one sequence (paper, Algorithm 1).

    Args:
        q: post-RoPE queries of the last q_len tokens [num_q_heads, q_len, head_dim]; num_q_heads is a multiple of the
            codec's KV heads, the heads of a group adjacent.
        sequence: the cache, the new tokens' keys and values included.
        codec: the layer's codec; its recipe decides the formats of the query and of P.
        scale: softmax scale on q·k.
        num_splits: parts the pages are cut into; may exceed the pages.
        softcap: logits become softcap·tanh(scale·q·k / softcap), or None.
        window: sliding window in tokens, or None.

    Returns:
        `Partial` in fp32: output [num_q_heads, q_len, head_dim] and base-2 lse [num_q_heads, q_len]; 0 and -inf for a
        sequence of length 0. The lse is that of q·(k - µ_k), the query's shift scale·log2(e)·q·µ_k less than that of
        q·k, unless ``softcap`` is given.

    Raises:
        InvalidInputError: NaN or Inf in ``q`` or in 16-bit tokens, shapes that do not fit, fewer recent tokens than the
            step needs, ``num_splits`` below 1.
    """
    check_finite("q", q)
    heads, channels = codec.num_kv_heads, codec.head_dim
    if q.dim() != 3 or q.shape[0] == 0 or q.shape[0] % heads or q.shape[1] == 0 or q.shape[2] != channels:
        raise InvalidInputError(f"q: expected [a multiple of {heads}, q_len, {channels}], got {tuple(q.shape)}")
    q_len = q.shape[1]
    n_fp4 = tokens_in_pages(sequence.length, q_len)
    splits = split_pages(n_fp4 // PAGE_SIZE, num_splits)
    if sequence.length == 0:
        return Partial(torch.zeros(q.shape), torch.full(q.shape[:2], -torch.inf))
    table = check_block_table(sequence.block_table, n_fp4 // PAGE_SIZE, sequence.key_pages)
    bits16_keys, bits16_values, bits16_pos, sink = _bits16_tokens(sequence, n_fp4)
    logits = LogitRule(scale, softcap)

    # Rotate the query and quantize it: q1 = Q(H·q), q2 = Q(H·q - q1) (one part only where the recipe says so).
    grouped = q.unflatten(0, (heads, -1))  # [num_kv_heads, group, q_len, head_dim]
    parts = codec.query_parts(grouped)
    mean_query = codec.page_mean_query(grouped)
    shift = smoothing_shift(codec, grouped)
    row_pos = torch.arange(sequence.length - q_len, sequence.length).repeat(grouped.shape[1]).unsqueeze(-1)

    def round_p(scores: torch.Tensor, maximum: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return quantized_probabilities(codec, scores, maximum, p)

    outputs, lses = [], []
    for head in range(heads):
        head_parts = [part[head].flatten(0, 1) for part in parts]  # rows = group · q_len
        head_mean_query = mean_query[head].flatten(0, 1)
        head_shift = None if shift is None else shift[head].flatten(0, 1)
        partials = []
        for pages in splits:
            softmax = RunningSoftmax(row_pos.shape[0], channels)
            for page in pages:
                key_page = _page(sequence.key_pages, table[page], head)
                keys = codec.decode_keys(key_page)[0, 0]
                values = codec.decode_values(_page(sequence.value_pages, table[page], head))[0, 0]
                products = head_parts[0] @ keys.T
                for part in head_parts[1:]:
                    products = products + part @ keys.T  # q1·k + q2·k in fp32, before mask and maximum
                if "mean" in key_page:  # page-centred keys: one logit a row and page
                    products = products + head_mean_query @ key_page["mean"][0, 0, :, None].float()
                key_pos = torch.arange(page * PAGE_SIZE, (page + 1) * PAGE_SIZE)
                visible = in_window(row_pos, key_pos, window) & (key_pos >= sink)
                softmax.add(logits(products, head_shift).masked_fill(~visible, -torch.inf), values, round_p)
            partials.append(softmax.partial())

        # Sink and recent tokens in 16 bits: smoothed like all others, not rotated, P not quantized.
        products = grouped[head].flatten(0, 1).float() @ codec.smooth(bits16_keys)[head].T
        visible = in_window(row_pos, bits16_pos, window)
        softmax = RunningSoftmax(row_pos.shape[0], channels)
        softmax.add(logits(products, head_shift).masked_fill(~visible, -torch.inf), bits16_values[head].float())
        partials.append(softmax.partial())

        joined = combine_partials(partials)
        outputs.append(joined.output.unflatten(0, (-1, q_len)))
        lses.append(joined.lse.unflatten(0, (-1, q_len)))
    return Partial(torch.cat(outputs), torch.cat(lses))


def _page(pool: EncodedPages, page: int, head: int) -> EncodedPages:
    """One page of one head, both dims kept."""
    return {name: x[page : page + 1, head : head + 1] for name, x in pool.items()}


def _bits16_tokens(sequence: PagedSequence, n_fp4: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Keys, values [num_kv_heads, tokens, head_dim] and positions [tokens] of sink and recent tokens, and the sink's
    length, which is 0 where the pages' copy has to serve."""
    needed = sequence.length - n_fp4
    if min(sequence.recent_keys.shape[1], sequence.recent_values.shape[1]) < needed:
        raise InvalidInputError(
            f"recent_keys, recent_values: hold {sequence.recent_keys.shape[1]} and {sequence.recent_values.shape[1]} "
            f"tokens, the step needs {needed}; build the sequence for the same number of new tokens"
        )
    keys, values = sequence.recent_keys[:, :needed], sequence.recent_values[:, :needed]
    positions = torch.arange(n_fp4, sequence.length)
    sink = 0
    if n_fp4 and sequence.sink_keys is not None and sequence.sink_values is not None:
        sink = sequence.sink_keys.shape[1]
        keys, values = torch.cat((sequence.sink_keys, keys), 1), torch.cat((sequence.sink_values, values), 1)
        positions = torch.cat((torch.arange(sink), positions))
    check_finite("16-bit keys", keys)
    check_finite("16-bit values", values)
    return keys, values, positions, sink


def decode_step_reference(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    codec: LayerCodec,
    *,
    scale: float,
    num_splits: int = 1,
    softcap: float | None = None,
    window: int | None = None,
    block_table: torch.Tensor | None = None,
    keep_sink: bool = True,
) -> torch.Tensor:
    """Algorithm 1 from full keys and values: `build_sequence`, then `attention_step`.

    Args:
        q: [num_q_heads, q_len, head_dim], the queries of the last q_len tokens.
        keys: [num_kv_heads, N, head_dim], all keys, the new ones included.
        values: same shape.
        codec: the layer's codec.
        scale, num_splits, softcap, window: as `attention_step`.
        block_table, keep_sink: as `build_sequence`.

    Returns:
        Output fp32 [num_q_heads, q_len, head_dim].

    Raises:
        InvalidInputError: as `build_sequence` and `attention_step`.
    """
    new_tokens = q.shape[1] if q.dim() == 3 else 1
    sequence = build_sequence(keys, values, codec, new_tokens=new_tokens, keep_sink=keep_sink, block_table=block_table)
    return attention_step(q, sequence, codec, scale=scale, num_splits=num_splits, softcap=softcap, window=window).output
