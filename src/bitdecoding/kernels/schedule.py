"""How the decode kernel cuts a row into units of work: csrc/schedule.cuh in Python, for tests and for sizing memory."""

from typing import NamedTuple

from bitdecoding.recipe import PAGE_SIZE

__all__ = [
    "CHUNK_TOKENS",
    "TILE_OVERHEAD",
    "UNITS_PER_OVERHEAD",
    "RowUnits",
    "items_of_row",
    "max_units",
    "units_of_row",
]

CHUNK_TOKENS = 32
"""16-bit tokens in a unit."""
TILE_OVERHEAD = 8
"""What the end of a tile costs beside its units, in units, at most."""
UNITS_PER_OVERHEAD = 16
"""Units that a tile must have for each unit of that."""


class RowUnits(NamedTuple):
    """Units of a row in the order of their work.

    Attributes:
        first_page, pages: FP4 pages.
        sink_chunks: chunks of 16-bit sink tokens.
        recent_start, recent_chunks: first visible recent token, and chunks of recent tokens.
    """

    first_page: int = 0
    pages: int = 0
    sink_chunks: int = 0
    recent_start: int = 0
    recent_chunks: int = 0

    @property
    def total(self) -> int:
        """All units."""
        return self.pages + self.sink_chunks + self.recent_chunks


def units_of_row(length: int, before: int, has_sink: bool, window: int | None, sink_tokens: int) -> RowUnits:
    """Units of a row.

    Args:
        length: cached tokens at the end of the step; 0 for a padding row.
        before: cached tokens before the step.
        has_sink: whether a 16-bit sink is at hand.
        window: sliding window in tokens, or None.
        sink_tokens: of the recipe.
    """
    if length == 0:
        return RowUnits()
    low = before - window + 1 if window is not None and before >= window else 0
    full = before // PAGE_SIZE
    first_page = min(low // PAGE_SIZE, full)
    sink_chunks = -(-sink_tokens // CHUNK_TOKENS) if has_sink and full and low < sink_tokens else 0
    recent_start = max(full * PAGE_SIZE, low)
    return RowUnits(
        first_page, full - first_page, sink_chunks, recent_start, -(-(length - recent_start) // CHUNK_TOKENS)
    )


def items_of_row(units: RowUnits, granule: int) -> int:
    """Items of work of one tile; with fixed splits (``granule`` > 1) one item is that many units."""
    if granule > 1:
        return max(1, -(-units.total // granule))
    return max(1, units.total) + min(TILE_OVERHEAD, units.total // UNITS_PER_OVERHEAD)


def max_units(length: int, sink_tokens: int, max_tokens: int) -> int:
    """Most units of a row of at most ``length`` tokens, ``max_tokens`` of them new."""
    recent = PAGE_SIZE - 1 + max_tokens
    return length // PAGE_SIZE + -(-sink_tokens // CHUNK_TOKENS) + -(-recent // CHUNK_TOKENS)
