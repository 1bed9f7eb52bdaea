"""Reference attention: exact, literal (Algorithms 1 and 2), vectorised, and the plain causal prefill."""

from bitdecoding.reference.algorithm1 import PagedSequence, attention_step, build_sequence, decode_step_reference
from bitdecoding.reference.causal import causal_attention
from bitdecoding.reference.exact import exact_attention
from bitdecoding.reference.mla import MlaCodec, MlaSequence, build_mla_sequence, exact_mla, mla_decode_step
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

__all__ = [
    "LogitRule",
    "MlaCodec",
    "MlaSequence",
    "PagedSequence",
    "Partial",
    "attention_step",
    "bits16_partial",
    "bits16_visible",
    "build_mla_sequence",
    "build_sequence",
    "causal_attention",
    "combine_partials",
    "decode_step_reference",
    "exact_attention",
    "exact_mla",
    "mla_decode_step",
    "page_partial",
    "page_visible",
    "quantized_tokens",
]
