"""Plain causal attention over 16-bit (or fp32) keys and values: the prefill, where nothing is quantized yet."""

import math

import torch
import torch.nn.functional as F

from bitdecoding.reference.vectorized import LogitRule

__all__ = ["causal_attention"]

_CHUNK = 512
"""Queries at a time on the soft-cap path, which must hold the scores."""


def causal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    logits: LogitRule,
    *,
    window: int | None = None,
    padding: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal GQA attention of the last ``queries`` of ``tokens`` positions.

    Args:
        q: [batch, num_q_heads, queries, head_dim].
        k, v: [batch, num_kv_heads, tokens, head_dim], tokens >= queries.
        logits: softmax scale and soft-cap.
        window: sliding window in tokens, or None.
        padding: int [batch], leading tokens of each row that are padding, or None. Queries in the padding get an
            arbitrary finite output.

    Returns:
        [batch, num_q_heads, queries, head_dim] in the dtype of ``q``.
    """
    queries, tokens = q.shape[-2], k.shape[-2]
    plain = window is None or window >= tokens
    if logits.softcap is None and padding is None and plain and queries == tokens:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=logits.scale, enable_gqa=True)
    outputs = []
    for start in range(0, queries, _CHUNK):
        part = q[..., start : start + _CHUNK, :]
        position = torch.arange(start, start + part.shape[-2], device=q.device) + tokens - queries
        mask = _mask(position, tokens, window, padding)
        if logits.softcap is None:
            outputs.append(
                F.scaled_dot_product_attention(part, k, v, attn_mask=mask, scale=logits.scale, enable_gqa=True)
            )
        else:
            outputs.append(_soft_capped(part, k, v, logits, mask))
    return torch.cat(outputs, -2)


def _mask(position: torch.Tensor, tokens: int, window: int | None, padding: torch.Tensor | None) -> torch.Tensor:
    """Bool [batch or 1, 1, queries, tokens]; a padding query sees itself, so that no row is empty."""
    key = torch.arange(tokens, device=position.device)
    mask = key <= position[:, None]
    if window is not None:
        mask = mask & (position[:, None] - key < window)
    if padding is None:
        return mask[None, None]
    real = key >= padding[:, None]
    itself = key == position[:, None]
    return ((mask[None] & real[:, None]) | itself[None])[:, None]


def _soft_capped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, logits: LogitRule, mask: torch.Tensor
) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1).float(), v.repeat_interleave(group, 1).float()
    scores = logits(q.float() @ k.transpose(-1, -2)).masked_fill(~mask, -torch.inf)
    return (torch.softmax(scores * math.log(2), -1) @ v).to(q.dtype)
