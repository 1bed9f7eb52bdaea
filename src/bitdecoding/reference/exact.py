"""Exact attention in fp64: the ground truth that every other implementation is tested against."""

import math

import torch

from bitdecoding.errors import InvalidInputError
from bitdecoding.numerics.validation import check_floating
from bitdecoding.reference.vectorized import LogitRule, Partial

__all__ = ["exact_attention"]


def exact_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    query_pos: torch.Tensor,
    key_pos: torch.Tensor,
) -> Partial:
    """softmax(scale·q·kᵀ)·v with grouped query heads, causal by positions, all in fp64.

    Args:
        q: queries [..., num_q_heads, queries, head_dim], floating point.
        k: keys [..., num_kv_heads, tokens, head_dim]; num_q_heads is a multiple of num_kv_heads.
        v: values [..., num_kv_heads, tokens, value_dim].
        scale: softmax scale on q·k.
        softcap: logits become softcap·tanh(scale·q·k / softcap), or None.
        window: a query at position i reads keys at i-window+1 .. i, or None for all up to i.
        query_pos: integer positions [queries] or [..., queries].
        key_pos: integer positions [tokens] or [..., tokens], in any order; negative for tokens that nobody reads, which
            may hold NaN.

    Returns:
        `Partial` in fp64: output [..., num_q_heads, queries, value_dim] and base-2 log-sum-exp of the logits
        [..., num_q_heads, queries]. A query that reads nothing has output 0 and lse -inf.

    Raises:
        InvalidInputError: shapes that do not fit together, positions that are not integers, a bad soft-cap or window.
    """
    _check(q, k, v, softcap, window, query_pos, key_pos)
    group = q.shape[-3] // k.shape[-3]
    queries, keys, values = q.double(), k.double(), v.double()
    positions = query_pos.unsqueeze(-1)
    visible = (key_pos.unsqueeze(-2) >= 0) & (key_pos.unsqueeze(-2) <= positions)
    if window is not None:
        visible = visible & (positions - key_pos.unsqueeze(-2) < window)
    visible = visible.unsqueeze(-3)  # the same for every head
    read = visible.any(-2).unsqueeze(-1)
    keys = keys.masked_fill(~read, 0.0).repeat_interleave(group, -3)
    values = values.masked_fill(~read, 0.0).repeat_interleave(group, -3)
    scores = LogitRule(scale, softcap)(queries @ keys.transpose(-1, -2)).masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(scores * math.log(2), -1) / math.log(2)
    p = torch.exp2(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
    return Partial(p @ values, lse)


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softcap: float | None,
    window: int | None,
    query_pos: torch.Tensor,
    key_pos: torch.Tensor,
) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_floating(name, x)
        if x.dim() < 3:
            raise InvalidInputError(f"{name}: expected [..., heads, tokens, channels], got {tuple(x.shape)}")
    if k.shape[:-1] != v.shape[:-1]:
        raise InvalidInputError(f"k, v: shapes {tuple(k.shape)} and {tuple(v.shape)} differ before the last dim")
    if q.shape[-1] != k.shape[-1]:
        raise InvalidInputError(f"q, k: head_dim {q.shape[-1]} of q differs from {k.shape[-1]} of k")
    if q.shape[:-3] != k.shape[:-3]:
        raise InvalidInputError(f"q, k: batch dims {tuple(q.shape[:-3])} and {tuple(k.shape[:-3])} differ")
    if k.shape[-3] == 0 or q.shape[-3] % k.shape[-3]:
        raise InvalidInputError(f"q: {q.shape[-3]} query heads are not a multiple of {k.shape[-3]} KV heads")
    for name, positions, tokens in (("query_pos", query_pos, q.shape[-2]), ("key_pos", key_pos, k.shape[-2])):
        if positions.is_floating_point() or positions.dtype == torch.bool:
            raise InvalidInputError(f"{name}: expected integers, got {positions.dtype}")
        if tuple(positions.shape) not in ((tokens,), (*q.shape[:-3], tokens)):
            raise InvalidInputError(f"{name}: expected [..., {tokens}], one a token, got {tuple(positions.shape)}")
    if softcap is not None and not softcap > 0:
        raise InvalidInputError(f"softcap: must be positive, got {softcap}")
    if window is not None and window < 1:
        raise InvalidInputError(f"window: must be at least 1, got {window}")
