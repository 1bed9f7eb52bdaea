"""Shape of the decode kernel for each architecture, format, head_dim and number of query rows: one place to tune."""

from dataclasses import dataclass

from bitdecoding.errors import UnsupportedError
from bitdecoding.kernels.layout import ArchFamily, PageLayout, cuda_constants
from bitdecoding.kernels.schedule import CHUNK_TOKENS
from bitdecoding.numerics.blocks import BlockFormat
from bitdecoding.recipe import Arithmetic

__all__ = ["COLUMN_TILE", "DecodeConfig", "DecodeShape", "choose_config", "choose_shape"]

COLUMN_TILE = 8
"""Columns of a tensor-core tile."""
_TASK_BYTES = 96
"""Of a struct Task (decode_work.cuh)."""
_SHARED_PER_SM = {ArchFamily.SM90: 228 * 1024, ArchFamily.SM120: 100 * 1024}
_SHARED_RESERVED = 1024
"""Taken from every CTA by the system."""


@dataclass(frozen=True)
class DecodeShape:
    """What a decode kernel is compiled for.

    Attributes:
        layout: of the pages.
        native: query and probabilities in FP4.
        centered: pages hold keys less their mean.
        rotate: keys are rotated.
        capped: logits are soft-capped.
        bf16: the model's dtype is BF16, else FP16.
        tiles: column tiles of the output.
        query_tiles: column tiles of the first product; native ones hold two columns a query row.
    """

    layout: PageLayout
    native: bool
    centered: bool
    rotate: bool
    capped: bool
    bf16: bool
    tiles: int
    query_tiles: int

    @property
    def columns(self) -> int:
        """Query rows (heads of a group times new tokens) that are read together."""
        return COLUMN_TILE * self.query_tiles // 2 if self.native else COLUMN_TILE * self.tiles


@dataclass(frozen=True)
class DecodeConfig:
    """How a decode kernel fills a multiprocessor.

    Attributes:
        pairs: pairs of consumer warps.
        slots: units in flight, a multiple of ``pairs``.
        min_ctas: CTAs a multiprocessor.
        in_turns: row tiles (of 4 of keys, head_dim / 16 of values) whose products a warp interleaves: 1, 2 or 4.
    """

    pairs: int
    slots: int
    min_ctas: int
    in_turns: int = 2

    @property
    def threads(self) -> int:
        """Threads of a CTA: the consumers and the loader."""
        return 64 * self.pairs + 32

    def shared_bytes(self, shape: DecodeShape) -> int:
        """Dynamic shared memory of a CTA; the kernel asserts that it counts the same (decode_config.cuh)."""
        row = 2 * shape.layout.head_dim
        slot = _align(max(shape.layout.value_scales.end, 2 * CHUNK_TOKENS * (row + 16)), 128)
        query = shape.query_tiles * shape.layout.head_dim * 16
        columns = COLUMN_TILE * shape.tiles
        floats = COLUMN_TILE * shape.query_tiles + 2 * columns + 4 * self.pairs * columns
        floats += self.slots * columns if shape.centered else 1
        return self.slots * slot + query + _align(16 * self.slots + 32 + 2 * _TASK_BYTES + 4 * floats + 4, 16)

    def defines(self, shape: DecodeShape) -> dict[str, int]:
        """Macros to compile with."""
        return {
            **cuda_constants(shape.layout),
            "BD_NATIVE": int(shape.native),
            "BD_CENTERED": int(shape.centered),
            "BD_ROTATE": int(shape.rotate),
            "BD_CAPPED": int(shape.capped),
            "BD_BF16": int(shape.bf16),
            "BD_TILES": shape.tiles,
            "BD_QUERY_TILES": shape.query_tiles,
            "BD_PAIRS": self.pairs,
            "BD_SLOTS": self.slots,
            "BD_MIN_CTAS": self.min_ctas,
            "BD_IN_TURNS": self.in_turns,
            "BD_SHARED_BYTES": self.shared_bytes(shape),
        }


def _align(size: int, to: int) -> int:
    return -(-size // to) * to


def choose_shape(
    layout: PageLayout,
    arithmetic: Arithmetic,
    *,
    centered: bool,
    rotate: bool,
    capped: bool,
    bf16: bool,
    query_rows: int,
) -> DecodeShape:
    """The kernel for this many query rows a KV head (group · new tokens); more than it takes are read in turns."""
    if arithmetic is Arithmetic.NATIVE:
        # Where 256 registers do not hold two column tiles of a long head, rows are read 4 by 4
        small = query_rows <= COLUMN_TILE // 2 or (layout.arch is ArchFamily.SM120 and layout.head_dim == 256)
        tiles, query_tiles = (1, 1) if small else (1, 2)
        return DecodeShape(layout, True, centered, rotate, capped, bf16, tiles, query_tiles)
    # As many as the registers hold
    most = 1 if layout.head_dim == 256 else 2 if layout.block_format is BlockFormat.MXFP4 else 3
    tiles = min(most, -(-query_rows // COLUMN_TILE))
    return DecodeShape(layout, False, centered, rotate, capped, bf16, tiles, tiles)


FEW_TILES = 32
"""Up to so many tiles of work (rows · KV heads · column groups), a launch is short, and fewer CTAs start faster."""


def choose_config(shape: DecodeShape, tiles: int) -> DecodeConfig:
    """The tuned shape of a kernel for so many tiles of work: as many slots as shared memory holds for the wanted CTAs.

    Raises:
        UnsupportedError: not even one unit a pair fits.
    """
    arch, dim = shape.layout.arch, shape.layout.head_dim
    mxfp4 = shape.layout.block_format is BlockFormat.MXFP4
    # Chosen by measurement, within what the registers hold without spilling
    pairs, min_ctas, in_turns = 2, 1, 4
    if arch is ArchFamily.SM120:
        in_turns = 2
    elif dim == 256:
        pairs = 4 if shape.query_tiles == 1 and not shape.capped else 3
    elif shape.tiles > 1 or (shape.query_tiles > 1 and mxfp4 and shape.centered):
        pairs = 3  # 7 warps: the most that may have 255 registers a thread
    elif shape.query_tiles > 1:
        min_ctas, in_turns = 2, 2
    elif tiles <= FEW_TILES or (mxfp4 and (shape.capped or (shape.native and shape.centered))):
        min_ctas = 2
    else:
        min_ctas = 3
        in_turns = 2 if mxfp4 and not shape.native and not shape.centered else 4
    most = 12
    budget = _SHARED_PER_SM[arch] // min_ctas - _SHARED_RESERVED
    for slots in range(most - most % pairs, 0, -pairs):
        config = DecodeConfig(pairs, slots, min_ctas, in_turns)
        if config.shared_bytes(shape) <= budget:
            return config
    raise UnsupportedError(f"head_dim: a page of {dim} channels does not fit the shared memory of {arch.value}")
