"""Recipes: which techniques a 4-bit KV cache uses, each named separately so that any can be switched off.

A `Recipe` is immutable, validated when made and serialisable (`Recipe.to_json`, `Recipe.from_json`). Presets are the
functions below and, by name, `get_recipe`; variants come from `Recipe.replace`.
"""

import json
import math
import re
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from bitdecoding.errors import InvalidInputError, UnsupportedError
from bitdecoding.names import Choice
from bitdecoding.numerics.blocks import BlockFormat, ScaleRule
from bitdecoding.numerics.ldlq import DEFAULT_DAMPING
from bitdecoding.numerics.probability import DEFAULT_C, DEFAULT_TAU, ProbabilityRule
from bitdecoding.numerics.rotation import hadamard_block

__all__ = [
    "MAX_DECODE_TOKENS",
    "PAGE_SIZE",
    "SINK_TOKENS",
    "Arithmetic",
    "KVFormat",
    "KeyRounding",
    "ProbabilityFormat",
    "QueryFormat",
    "QuerySmoothing",
    "Recipe",
    "Rotation",
    "ValueBlocks",
    "get_recipe",
    "preset_names",
    "presets",
]

PAGE_SIZE = 128
"""Tokens a page; full pages are quantized, the newest 1..128 tokens stay 16-bit."""
MIN_C, MAX_C = 2.0**-10, 2.0**10
"""Range of the factor c: its products with probabilities stay far from the ends of fp32."""
SINK_TOKENS = 16
"""First tokens of a sequence that stay 16-bit in the paper's recipe."""
MAX_DECODE_TOKENS = 8
"""A step of more tokens over a filled cache is a chunk of a prefill: it reads FP4 pages with 16-bit query and P."""


class KVFormat(Choice):
    """How the tokens of a full page are stored."""

    BF16 = "bf16"
    FP8 = "fp8"
    NVFP4 = "nvfp4"
    MXFP4 = "mxfp4"
    INT4 = "int4"
    LLOYD4 = "lloyd4"

    @property
    def blocks(self) -> BlockFormat | None:
        """The microscaling format, or None for a format without FP4 blocks."""
        return BlockFormat(self.value) if self in (KVFormat.NVFP4, KVFormat.MXFP4) else None


class Rotation(Choice):
    """Orthogonal rotation of keys and queries."""

    NONE = "none"
    HADAMARD = "hadamard"
    RANDOM = "random"


class KeyRounding(Choice):
    """How key codes are chosen."""

    NEAREST = "nearest"
    LDLQ = "ldlq"


class ValueBlocks(Choice):
    """The dim that value blocks lie along."""

    TOKENS = "tokens"
    CHANNELS = "channels"


class QueryFormat(Choice):
    """Format of the query in products with quantized pages."""

    BITS16 = "16bit"
    FP8 = "fp8"
    FP4 = "fp4"
    DUAL_FP4 = "dual-fp4"


class QuerySmoothing(Choice):
    """Mean taken off the query before it is quantized and multiplied in 16 bits (SageAttention3's smoothing-Q)."""

    NONE = "none"
    TOKEN = "token"
    GQA = "gqa"


class ProbabilityFormat(Choice):
    """Format of the probabilities in products with quantized values."""

    BITS16 = "16bit"
    FP8 = "fp8"
    FP4 = "fp4"
    FP4_TWO_LEVEL = "fp4-two-level"


class Arithmetic(Choice):
    """``native``: query and probabilities in FP4, as FP4 tensor cores compute. ``w16``: both stay 16-bit."""

    NATIVE = "native"
    W16 = "w16"


class Recipe(BaseModel):
    """One way to store and use a quantized KV cache.

    Attributes:
        name: shown in tables.
        kv_format: storage of full pages.
        key_rule: scale rule of FP4 keys; None takes the format's search rule.
        key_rounding: nearest codes, or LDLQ (needs a calibration with the query second moment).
        ldlq_damping: λ of LDLQ.
        key_smoothing: subtract the calibrated key mean µ_k from all keys (needs a calibration).
        page_centered_keys: store keys of a page less their 16-bit mean; one logit a query and page is added back.
        rotation: rotation of keys and queries.
        rotation_block: size of the Hadamard blocks; None is the largest power of two that divides head_dim.
        rotation_seed: seed of random Hadamard signs (None: no signs) or of the random rotation.
        value_rule: scale rule of FP4 values; None takes the format's standard rule.
        value_blocks: whether value blocks lie along tokens or along channels.
        query_format: format of the query against quantized pages; the FP4 formats follow ``kv_format``.
        query_smoothing: SageAttention3's smoothing-Q; ``token`` needs a calibration with the query mean.
        probability_format: format of P against quantized values.
        probability_rule: scale rule of FP4 probabilities; None takes the format's default.
        probability_c: factor folded into the exponent.
        probability_tau: threshold of the ``underflow`` rule; None takes the calibrated one, else 21/1024.
        sink_tokens: first tokens kept in 16 bits, 0..128.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    kv_format: KVFormat
    key_rule: ScaleRule | None = None
    key_rounding: KeyRounding = KeyRounding.NEAREST
    ldlq_damping: float = DEFAULT_DAMPING
    key_smoothing: bool = False
    page_centered_keys: bool = False
    rotation: Rotation = Rotation.NONE
    rotation_block: int | None = None
    rotation_seed: int | None = None
    value_rule: ScaleRule | None = None
    value_blocks: ValueBlocks = ValueBlocks.TOKENS
    query_format: QueryFormat = QueryFormat.BITS16
    query_smoothing: QuerySmoothing = QuerySmoothing.NONE
    probability_format: ProbabilityFormat = ProbabilityFormat.BITS16
    probability_rule: ProbabilityRule | None = None
    probability_c: float = DEFAULT_C
    probability_tau: float | None = None
    sink_tokens: int = 0

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            if first["type"] == "extra_forbidden":
                raise InvalidInputError(
                    f"recipe: unknown field {where!r}; known fields are {', '.join(type(self).model_fields)}"
                ) from None
            message = first["msg"].removeprefix("Value error, ")
            raise InvalidInputError(f"recipe: {where + ': ' if where else ''}{message}") from None

    @model_validator(mode="after")
    def _check(self) -> "Recipe":
        if not self.name.strip():
            raise ValueError("name: must not be empty")
        blocks = self.kv_format.blocks
        if blocks is None:
            uses = {
                "key_rule": self.key_rule is not None,
                "value_rule": self.value_rule is not None,
                "key_rounding": self.key_rounding is not KeyRounding.NEAREST,
                "query_format": self.query_format in (QueryFormat.FP4, QueryFormat.DUAL_FP4),
                "probability_format": self.probability_format
                in (ProbabilityFormat.FP4, ProbabilityFormat.FP4_TWO_LEVEL),
                "probability_rule": self.probability_rule is not None,
            }
            for field, used in uses.items():
                if used:
                    raise ValueError(f"{field}: needs FP4 blocks, kv_format is {self.kv_format.value}")
        else:
            for field, rule in (("key_rule", self.key_rule), ("value_rule", self.value_rule)):
                if rule is not None and rule not in blocks.rules:
                    known = ", ".join(r.value for r in blocks.rules)
                    raise ValueError(f"{field}: {rule.value} is not a {blocks.value} rule; use {known}")
            known_p = ProbabilityRule.for_format(blocks)
            if self.probability_rule is not None and self.probability_rule not in known_p:
                raise ValueError(
                    f"probability_rule: {self.probability_rule.value} is not a {blocks.value} rule; "
                    f"use {', '.join(r.value for r in known_p)}"
                )
        if not 0 <= self.sink_tokens <= PAGE_SIZE:
            raise ValueError(f"sink_tokens: must be within 0..{PAGE_SIZE}, got {self.sink_tokens}")
        if not 0 < self.ldlq_damping < math.inf:
            raise ValueError(f"ldlq_damping: must be positive and finite, got {self.ldlq_damping}")
        if not MIN_C <= self.probability_c <= MAX_C or math.frexp(self.probability_c)[0] != 0.5:
            raise ValueError(f"probability_c: must be a power of two within 1/1024..1024, got {self.probability_c}")
        if self.probability_tau is not None and not 0 < self.probability_tau < math.inf:
            raise ValueError(f"probability_tau: must be positive and finite, got {self.probability_tau}")
        if self.rotation_seed is not None and not 0 <= self.rotation_seed < 2**63:
            raise ValueError(f"rotation_seed: must be within 0..2^63-1, got {self.rotation_seed}")
        if self.rotation_block is not None:
            if self.rotation is not Rotation.HADAMARD:
                raise ValueError("rotation_block: only the hadamard rotation has blocks")
            if self.rotation_block < 1 or self.rotation_block & (self.rotation_block - 1):
                raise ValueError(f"rotation_block: must be a power of two, got {self.rotation_block}")
        if self.rotation is Rotation.RANDOM and self.rotation_seed is None:
            raise ValueError("rotation_seed: the random rotation needs a seed")
        return self

    @property
    def effective_key_rule(self) -> ScaleRule | None:
        """The key scale rule in force (None without FP4 blocks)."""
        blocks = self.kv_format.blocks
        return None if blocks is None else self.key_rule or blocks.search_rule

    @property
    def effective_value_rule(self) -> ScaleRule | None:
        """The value scale rule in force (None without FP4 blocks)."""
        blocks = self.kv_format.blocks
        return None if blocks is None else self.value_rule or blocks.standard_rule

    @property
    def needs_calibration(self) -> bool:
        """Whether the recipe cannot run without a calibration file."""
        return (
            self.key_smoothing or self.key_rounding is KeyRounding.LDLQ or self.query_smoothing is QuerySmoothing.TOKEN
        )

    def tau(self, calibrated: float | None = None) -> float:
        """The threshold τ in force: the recipe's own, else the calibrated one, else 21/1024."""
        if self.probability_tau is not None:
            return self.probability_tau
        return DEFAULT_TAU if calibrated is None else calibrated

    def replace(self, **changes: Any) -> "Recipe":
        """A validated copy with some fields changed.

        Raises:
            InvalidInputError: unknown field, or a combination that makes no sense.
        """
        return Recipe(**{**self.model_dump(), **changes})

    def with_arithmetic(self, arithmetic: Arithmetic | str) -> "Recipe":
        """The same FP4 cache read with ``native`` (FP4 query and P) or ``w16`` (16-bit query and P) arithmetic.

        A recipe that already computes so comes back unchanged. The name of a w16 copy gains the suffix ``-w16``.

        Raises:
            InvalidInputError: unknown mode.
            UnsupportedError: the recipe's format has no FP4 blocks.
        """
        arithmetic = Arithmetic(arithmetic)
        if self.kv_format.blocks is None:
            raise UnsupportedError(f"arithmetic: recipe {self.name} has no FP4 blocks; only FP4 recipes have two modes")
        base = self.name.removesuffix("-w16")
        is_w16 = self.query_format is QueryFormat.BITS16 and self.probability_format is ProbabilityFormat.BITS16
        if is_w16 == (arithmetic is Arithmetic.W16):
            return self
        if arithmetic is Arithmetic.W16:
            return self.replace(
                name=f"{base}-w16",
                query_format=QueryFormat.BITS16,
                query_smoothing=QuerySmoothing.NONE,
                probability_format=ProbabilityFormat.BITS16,
            )
        return self.replace(name=base, query_format=QueryFormat.DUAL_FP4, probability_format=ProbabilityFormat.FP4)

    def check_head_dim(self, head_dim: int) -> None:
        """Raise `UnsupportedError` if heads of this size cannot be stored under the recipe."""
        blocks = self.kv_format.blocks
        if blocks is not None and head_dim % blocks.block_size:
            raise UnsupportedError(
                f"head_dim: {head_dim} is not a multiple of {blocks.block_size}, the {blocks.value} block; "
                f"use a model whose head_dim is, or another format"
            )
        if head_dim < 2 or head_dim % 2:
            raise UnsupportedError(f"head_dim: {head_dim} is no positive even number; two 4-bit codes share a byte")
        if self.rotation_block is not None and hadamard_block(head_dim) % self.rotation_block:
            raise UnsupportedError(f"rotation_block: {self.rotation_block} does not divide head_dim {head_dim}")

    def to_json(self) -> str:
        """JSON text that `from_json` reads back to an equal recipe."""
        return self.model_dump_json(indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Recipe":
        """Read a recipe written by `to_json`.

        Raises:
            InvalidInputError: not JSON, not an object, an unknown field or a bad value.
        """
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise InvalidInputError(f"recipe: not valid JSON ({error})") from None
        if not isinstance(fields, dict):
            raise InvalidInputError(f"recipe: expected a JSON object, got {type(fields).__name__}")
        return cls(**fields)


def _paper(fmt: KVFormat) -> Recipe:
    return Recipe(
        name=f"bitdecoding-{fmt.value}",
        kv_format=fmt,
        key_smoothing=True,
        rotation=Rotation.HADAMARD,
        query_format=QueryFormat.DUAL_FP4,
        probability_format=ProbabilityFormat.FP4,
        sink_tokens=SINK_TOKENS,
    )


def _plus(fmt: KVFormat) -> Recipe:
    return _paper(fmt).replace(
        name=f"bitdecoding-{fmt.value}-plus", page_centered_keys=True, key_rounding=KeyRounding.LDLQ
    )


def _native_plain(fmt: KVFormat) -> Recipe:
    blocks = fmt.blocks
    assert blocks is not None
    return Recipe(
        name=f"native-{fmt.value}-plain",
        kv_format=fmt,
        key_rule=blocks.standard_rule,
        query_format=QueryFormat.FP4,
        probability_format=ProbabilityFormat.FP4,
        probability_rule=ProbabilityRule(blocks.standard_rule.value),
        probability_c=1.0,
    )


def bitdecoding_nvfp4() -> Recipe:
    """The paper's recipe in NVFP4 (Sec. 4): all four techniques, native arithmetic."""
    return _paper(KVFormat.NVFP4)


def bitdecoding_mxfp4() -> Recipe:
    """The paper's recipe in MXFP4 (Sec. 4); c changes nothing with E8M0 scales, P rounds its exponent up."""
    return _paper(KVFormat.MXFP4)


def bitdecoding_nvfp4_plus() -> Recipe:
    """`bitdecoding_nvfp4` with page-centred keys and LDLQ key rounding (ours, beyond the paper)."""
    return _plus(KVFormat.NVFP4)


def bitdecoding_mxfp4_plus() -> Recipe:
    """`bitdecoding_mxfp4` with page-centred keys and LDLQ key rounding (ours, beyond the paper)."""
    return _plus(KVFormat.MXFP4)


def bitdecoding_nvfp4_page_centered() -> Recipe:
    """`bitdecoding_nvfp4` with page-centred keys alone."""
    return bitdecoding_nvfp4().replace(name="bitdecoding-nvfp4-page-centered", page_centered_keys=True)


def bitdecoding_mxfp4_page_centered() -> Recipe:
    """`bitdecoding_mxfp4` with page-centred keys alone."""
    return bitdecoding_mxfp4().replace(name="bitdecoding-mxfp4-page-centered", page_centered_keys=True)


def bitdecoding_nvfp4_ldlq() -> Recipe:
    """`bitdecoding_nvfp4` with LDLQ key rounding alone."""
    return bitdecoding_nvfp4().replace(name="bitdecoding-nvfp4-ldlq", key_rounding=KeyRounding.LDLQ)


def bitdecoding_mxfp4_ldlq() -> Recipe:
    """`bitdecoding_mxfp4` with LDLQ key rounding alone."""
    return bitdecoding_mxfp4().replace(name="bitdecoding-mxfp4-ldlq", key_rounding=KeyRounding.LDLQ)


def bf16() -> Recipe:
    """The reference: keys and values stay 16-bit."""
    return Recipe(name="bf16", kv_format=KVFormat.BF16)


def fp8() -> Recipe:
    """E4M3 keys and values with unit scale, 16-bit query and probabilities: the default of serving engines' FP8 cache.

    Follows vLLM's ``kv_cache_dtype=fp8`` without calibrated scales. Simplified: as under every recipe here, the
    newest tokens that do not fill a page stay 16-bit.
    """
    return Recipe(name="fp8", kv_format=KVFormat.FP8)


def trtllm_nvfp4() -> Recipe:
    """Vanilla NVFP4 keys and values, FP8 query and probabilities, as TensorRT-LLM's NVFP4 KV cache computes.

    Both K and V have their blocks along channels and the standard rule; query and P are E4M3. Simplified: no per-tensor
    second-level scale (all scales are 1), and the newest tokens that do not fill a page stay 16-bit.
    """
    return Recipe(
        name="trtllm-nvfp4",
        kv_format=KVFormat.NVFP4,
        key_rule=ScaleRule.MAX6,
        value_blocks=ValueBlocks.CHANNELS,
        query_format=QueryFormat.FP8,
        probability_format=ProbabilityFormat.FP8,
    )


def native_nvfp4_plain() -> Recipe:
    """NVFP4 everywhere by the standard rule and nothing else: FP4 tensor cores without the paper's techniques.

    One NVFP4 query, max6 keys, values and probabilities, no smoothing, rotation, sink or factor c.
    """
    return _native_plain(KVFormat.NVFP4)


def native_mxfp4_plain() -> Recipe:
    """MXFP4 everywhere by the OCP rule and nothing else; see `native_nvfp4_plain`."""
    return _native_plain(KVFormat.MXFP4)


def saw_int4() -> Recipe:
    """Token-wise INT4 with block-diagonal Hadamard rotation of the keys, after SAW-INT4 (arXiv 2604.19157).

    Asymmetric min-max codes 0..15 with a 16-bit scale and minimum a token and head. Simplified: one rotation block size
    (the largest power of two that divides head_dim) and no rotation of values.
    """
    return Recipe(name="saw-int4", kv_format=KVFormat.INT4, rotation=Rotation.HADAMARD)


def turboquant_4bit() -> Recipe:
    """Random rotation, Lloyd-Max codebook and norm, after TurboQuant's MSE quantizer (arXiv 2504.19874).

    Every key and value vector is normalised, rotated by a fixed random orthogonal matrix and each coordinate coded by
    the 16-level Lloyd-Max quantizer of a Gaussian of variance 1/head_dim; its norm is kept in 16 bits. Simplified: the
    Gaussian limit replaces the exact Beta law of a coordinate, and there is no residual QJL bit.
    """
    return Recipe(name="turboquant-4bit", kv_format=KVFormat.LLOYD4, rotation=Rotation.RANDOM, rotation_seed=0)


def sage_token_mean() -> Recipe:
    """`bitdecoding_nvfp4` with a single NVFP4 query smoothed by its token mean instead of the dual query.

    Follows SageAttention3's smoothing-Q. Simplified: decoding has one query token, so the mean over tokens is the
    calibrated mean of a head's queries; mean·k is computed in 16 bits.
    """
    return bitdecoding_nvfp4().replace(
        name="nvfp4-query-token-mean", query_format=QueryFormat.FP4, query_smoothing=QuerySmoothing.TOKEN
    )


def sage_gqa_mean() -> Recipe:
    """`bitdecoding_nvfp4` with a single NVFP4 query smoothed by the mean of its GQA group instead of the dual query.

    SageAttention3's smoothing-Q with the query heads that share a KV head in place of a tile of tokens.
    """
    return bitdecoding_nvfp4().replace(
        name="nvfp4-query-gqa-mean", query_format=QueryFormat.FP4, query_smoothing=QuerySmoothing.GQA
    )


def sage_two_level_p() -> Recipe:
    """`bitdecoding_nvfp4` with SageAttention3's two-level quantization of P instead of c and τ.

    Simplified: the first-level scale is taken per row and 128-token page.
    """
    return bitdecoding_nvfp4().replace(name="nvfp4-two-level-p", probability_format=ProbabilityFormat.FP4_TWO_LEVEL)


_PRESETS: tuple[Callable[[], Recipe], ...] = (
    bf16,
    bitdecoding_nvfp4,
    bitdecoding_mxfp4,
    bitdecoding_nvfp4_plus,
    bitdecoding_mxfp4_plus,
    bitdecoding_nvfp4_page_centered,
    bitdecoding_mxfp4_page_centered,
    bitdecoding_nvfp4_ldlq,
    bitdecoding_mxfp4_ldlq,
    fp8,
    trtllm_nvfp4,
    native_nvfp4_plain,
    native_mxfp4_plain,
    saw_int4,
    turboquant_4bit,
    sage_token_mean,
    sage_gqa_mean,
    sage_two_level_p,
)
_BY_NAME = {make().name: make for make in _PRESETS}


def preset_names() -> list[str]:
    """Names that `get_recipe` knows."""
    return list(_BY_NAME)


def presets() -> dict[str, str]:
    """Preset names with the first line of their documentation, which calls other presets by name too."""
    return {
        name: re.sub(r"`(\w+)`", lambda match: match[1].replace("_", "-"), (make.__doc__ or "").strip().splitlines()[0])
        for name, make in _BY_NAME.items()
    }


def get_recipe(name: str) -> Recipe:
    """A preset by name; the suffix ``-w16`` selects 16-bit arithmetic (``bitdecoding-nvfp4-w16``).

    Raises:
        InvalidInputError: unknown name.
        UnsupportedError: ``-w16`` on a recipe without FP4 blocks.
    """
    base = name.removesuffix("-w16")
    if base not in _BY_NAME:
        raise InvalidInputError(f"recipe: unknown preset {name!r}; use one of {', '.join(_BY_NAME)}")
    recipe = _BY_NAME[base]()
    return recipe.with_arithmetic(Arithmetic.W16) if name.endswith("-w16") else recipe
