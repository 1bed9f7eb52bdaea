"""Storage formats of one page: encode fp32 [pages, heads, PAGE_SIZE, head_dim] to compact tensors and back.

Encoded pages are plain dicts of tensors whose first two dims are pages and heads, so that a pool can store them without
knowing the format. Decoding gives fp32. The FP4 formats are the product; the others are the paper's peers.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Protocol

import torch

from bitdecoding.numerics.blocks import BlockFormat, QuantizedBlocks, ScaleRule, decode_blocks, quantize_blocks
from bitdecoding.numerics.elements import decode_e4m3, encode_e4m3
from bitdecoding.numerics.ldlq import LdlqFactors, quantize_blocks_ldlq
from bitdecoding.numerics.packing import pack_nibbles, unpack_nibbles

__all__ = [
    "BitsFormat",
    "EncodedPages",
    "Fp4Format",
    "Fp8Format",
    "Int4Format",
    "LloydFormat",
    "PageFormat",
    "RotatedFormat",
    "lloyd_max_levels",
]

EncodedPages = dict[str, torch.Tensor]


class PageFormat(Protocol):
    """Encodes pages to bytes and back."""

    def encode(self, x: torch.Tensor) -> EncodedPages:
        """Compact tensors of fp32 pages [pages, heads, PAGE_SIZE, head_dim]."""
        ...

    def decode(self, pages: EncodedPages) -> torch.Tensor:
        """Fp32 pages [pages, heads, PAGE_SIZE, head_dim]."""
        ...


class Fp4Format:
    """NVFP4 or MXFP4: ``codes`` two a byte along channels, ``scales`` one byte a block along ``dim`` (-1 or -2)."""

    def __init__(self, fmt: BlockFormat, rule: ScaleRule, dim: int, ldlq: LdlqFactors | None = None) -> None:
        self._fmt = fmt
        self._rule = rule
        self._dim = dim
        self._ldlq = ldlq

    def encode(self, x: torch.Tensor) -> EncodedPages:
        quantized = self._quantize(x)
        return {"codes": pack_nibbles(quantized.codes), "scales": quantized.scale_bytes.contiguous()}

    def _quantize(self, x: torch.Tensor) -> QuantizedBlocks:
        if self._ldlq is None:
            return quantize_blocks(x, self._fmt, self._rule, dim=self._dim)
        return quantize_blocks_ldlq(x, self._ldlq, self._fmt, self._rule)

    def decode(self, pages: EncodedPages) -> torch.Tensor:
        return decode_blocks(unpack_nibbles(pages["codes"]), pages["scales"], self._fmt, self._dim)


class BitsFormat:
    """Pages kept in a 16-bit dtype: ``values``."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def encode(self, x: torch.Tensor) -> EncodedPages:
        return {"values": x.to(self._dtype)}

    def decode(self, pages: EncodedPages) -> torch.Tensor:
        return pages["values"].float()


class Fp8Format:
    """E4M3 with unit scale: ``values`` one byte an element."""

    def encode(self, x: torch.Tensor) -> EncodedPages:
        return {"values": encode_e4m3(x)}

    def decode(self, pages: EncodedPages) -> torch.Tensor:
        return decode_e4m3(pages["values"])


class Int4Format:
    """Asymmetric INT4 a token and head: ``codes`` 0..15, 16-bit ``scale`` and ``minimum``."""

    def encode(self, x: torch.Tensor) -> EncodedPages:
        low, high = x.aminmax(dim=-1)
        minimum = low.bfloat16()
        # bf16 shares fp32's range; the scale is taken from the stored minimum so that both ends stay representable.
        scale = ((high - minimum.float()) / 15).clamp(min=0).bfloat16()
        step = scale.float().unsqueeze(-1)
        codes = ((x - minimum.float().unsqueeze(-1)) / torch.where(step == 0, 1.0, step)).round().clamp(0, 15)
        return {"codes": pack_nibbles(codes.to(torch.uint8)), "scale": scale, "minimum": minimum}

    def decode(self, pages: EncodedPages) -> torch.Tensor:
        codes = unpack_nibbles(pages["codes"]).float()
        return codes * pages["scale"].float().unsqueeze(-1) + pages["minimum"].float().unsqueeze(-1)


class LloydFormat:
    """A 16-level Lloyd-Max code a coordinate of the normalised vector: ``codes`` and a 16-bit ``norm``."""

    def encode(self, x: torch.Tensor) -> EncodedPages:
        levels = torch.tensor(lloyd_max_levels(), device=x.device)
        norm = x.norm(dim=-1).bfloat16()
        unit = norm.float().unsqueeze(-1) * x.shape[-1] ** -0.5
        coordinates = x / torch.where(unit == 0, 1.0, unit)
        codes = torch.bucketize(coordinates, (levels[1:] + levels[:-1]) / 2)
        return {"codes": pack_nibbles(codes.to(torch.uint8)), "norm": norm}

    def decode(self, pages: EncodedPages) -> torch.Tensor:
        codes = unpack_nibbles(pages["codes"])
        levels = torch.tensor(lloyd_max_levels(), device=codes.device)
        return levels[codes.int()] * (pages["norm"].float().unsqueeze(-1) * codes.shape[-1] ** -0.5)


class RotatedFormat:
    """Another format behind a rotation that is undone when decoding."""

    def __init__(
        self,
        inner: PageFormat,
        rotate: Callable[[torch.Tensor], torch.Tensor],
        unrotate: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._inner = inner
        self._rotate = rotate
        self._unrotate = unrotate

    def encode(self, x: torch.Tensor) -> EncodedPages:
        return self._inner.encode(self._rotate(x))

    def decode(self, pages: EncodedPages) -> torch.Tensor:
        return self._unrotate(self._inner.decode(pages))


@lru_cache(maxsize=1)
def lloyd_max_levels(count: int = 16, iterations: int = 4000) -> tuple[float, ...]:
    """Levels of a standard Gaussian's Lloyd-Max quantizer: each the mean of its cell, cells split halfway."""

    def density(z: float) -> float:
        return math.exp(-z * z / 2) / math.sqrt(2 * math.pi)

    def cumulative(z: float) -> float:
        return 0.5 * (1 + math.erf(z / math.sqrt(2)))

    levels = [-3 + 6 * (i + 0.5) / count for i in range(count)]
    for _ in range(iterations):
        edges = [-math.inf, *((a + b) / 2 for a, b in pairwise(levels)), math.inf]
        levels = [(density(a) - density(b)) / (cumulative(b) - cumulative(a)) for a, b in pairwise(edges)]
    return tuple(levels)
