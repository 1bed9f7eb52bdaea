"""Slots of the 16-bit buffers and the schedule of a step, settled on the device by one launch before the first layer.

Pages hold FP4 tokens only; a row's recent tokens and its sink live in slots of two pools (`LayerBuffers.tail`,
`LayerBuffers.sink`), the same slot in every layer. `SlotTables` remembers whose they are from step to step:

- A *tail* slot is keyed by the cache block that holds the row's newest token. A block that is not full belongs to one
  row. A row that has just filled a page keeps its slot, whose key then moves to the next block. Where a step enters a
  new page, the block before it stays a second key for one step, so that a row whose drafted tokens are rejected still
  finds its tokens.
- A *sink* slot is keyed by the first block of the row. Rows that share their first block share it. It is filled when
  page 0 becomes full, and outlives the row. A row that finds none reads the FP4 copy in page 0.

Free slots are given out in a fixed order: those without a key, then the least recently used one. A slot that a row of
the step uses is never taken, so there must be at least as many tail slots as rows. Padding rows claim nothing.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bitdecoding.errors import InvalidInputError
from bitdecoding.kernels.checks import ROW_STATE_FIELDS, check_block_table, check_vector
from bitdecoding.kernels.compile import Kernel
from bitdecoding.recipe import PAGE_SIZE

__all__ = ["Counters", "SlotTables", "StepPlan", "control_step"]

_SHARED_BYTES = 99 * 1024 - 256
"""Shared memory that a CTA may have on every GPU with kernels, less what the kernel declares itself."""
_ROW_BYTES = 32
_MAX_KINDS = 16
_MAX_INT = 2**31 - 1


@dataclass(frozen=True)
class Counters:
    """What has happened since the tables were made or cleared, in the order of csrc/control.cu.

    Attributes:
        steps: launches.
        tail_claims: rows that got another tail slot.
        tail_evictions: of these, slots whose key still was an older row's.
        lost_tails: rows that needed tokens of a slot and found none: another row has taken it (too few slots for the
            rows that are alive), or two rows wrote to one block. Their output is wrong from then on.
        sink_claims, sink_evictions: the same for sinks.
        sink_misses: rows, step by step, that read the FP4 copy of their sink.
        sink_refusals: sinks that were not kept because every slot was in use.
        pages_promoted: pages that became full.
        invalid_rows: rows taken for padding because their block table is too short or holds an id that is no block.
    """

    steps: int
    tail_claims: int
    tail_evictions: int
    lost_tails: int
    sink_claims: int
    sink_evictions: int
    sink_misses: int
    sink_refusals: int
    pages_promoted: int
    invalid_rows: int


_NUM_COUNTERS = len(Counters.__dataclass_fields__)


class SlotTables:
    """Which cache block owns which slot, on the device. One for all layers that share a block table.

    Args:
        num_blocks: blocks of the cache.
        tail_slots: slots of `LayerBuffers.tail`. As many as rows that are alive at a time, at least; a row that waits
            (preempted with its blocks kept, or not scheduled) while others claim slots can lose its own otherwise.
        sink_slots: slots of `LayerBuffers.sink`; 0 without sinks.
        device: of the cache.

    Attributes:
        counters: int64 on the device, in the order of `Counters`.

    Raises:
        InvalidInputError: no blocks or tail slots, or too many.
    """

    def __init__(self, num_blocks: int, tail_slots: int, sink_slots: int, device: torch.device | str = "cuda") -> None:
        for name, value, least in (("num_blocks", num_blocks, 1), ("tail_slots", tail_slots, 1)):
            if not least <= value < _MAX_INT:
                raise InvalidInputError(f"{name}: must be within {least}..{_MAX_INT - 1}, got {value}")
        if sink_slots < 0:
            raise InvalidInputError(f"sink_slots: must be at least 0, got {sink_slots}")
        _check_shared(1, tail_slots, sink_slots)
        self.device = torch.empty(0, device=device).device  # with its index, as tensors have it
        self.num_blocks = num_blocks
        self.tail_slots = tail_slots
        self.sink_slots = sink_slots

        def none(count: int) -> torch.Tensor:
            return torch.full((count,), -1, dtype=torch.int32, device=self.device)

        self.tail_of_block = none(num_blocks)
        self.tail_keys = none(tail_slots)
        self.tail_older_keys = none(tail_slots)
        self.tail_stamps = torch.zeros(tail_slots, dtype=torch.int64, device=self.device)
        self.sink_of_block = none(num_blocks if sink_slots else 0)
        self.sink_keys = none(sink_slots)
        self.sink_stamps = torch.zeros(sink_slots, dtype=torch.int64, device=self.device)
        self.counters = torch.zeros(_NUM_COUNTERS, dtype=torch.int64, device=self.device)

    def clear(self) -> None:
        """Forget all rows and sinks and set the counters to zero, on torch's current stream."""
        for keys in (self.tail_of_block, self.tail_keys, self.tail_older_keys, self.sink_of_block, self.sink_keys):
            keys.fill_(-1)
        for numbers in (self.tail_stamps, self.sink_stamps, self.counters):
            numbers.zero_()

    def take_over(self, smaller: "SlotTables") -> None:
        """Become what tables of fewer blocks and slots were, on torch's current stream."""
        for name in (
            "tail_of_block", "tail_keys", "tail_older_keys", "tail_stamps",
            "sink_of_block", "sink_keys", "sink_stamps", "counters",
        ):  # fmt: skip
            old: torch.Tensor = getattr(smaller, name)
            getattr(self, name)[: old.shape[0]] = old

    def read_counters(self) -> Counters:
        """The counters' values; waits for the device."""
        return Counters(*self.counters.tolist())


class StepPlan:
    """What `control_step` finds out, in memory that stays where it is.

    Args:
        tables: slots to plan with.
        max_rows: rows of the largest batch, padding included.
        windows: the sliding windows that layers of the model have, each once; None for layers without.
        granules: units of work that stay together (see `DecodePlan`), one for all windows or one for each.
        sink_tokens: of the recipe.

    Attributes:
        states: row states, int32 [max_rows, ROW_STATE_FIELDS].
        item_prefix: items of work before each row, int32 [windows, max_rows + 1].

    Raises:
        InvalidInputError: more rows than tail slots, or a number out of range.
    """

    def __init__(
        self,
        tables: SlotTables,
        max_rows: int,
        *,
        windows: Sequence[int | None] = (None,),
        granules: int | Sequence[int] = 1,
        sink_tokens: int = 0,
    ) -> None:
        granules = [granules] * len(windows) if isinstance(granules, int) else list(granules)
        if max_rows < 1:
            raise InvalidInputError(f"max_rows: must be at least 1, got {max_rows}")
        if max_rows > tables.tail_slots:
            raise InvalidInputError(
                f"tail_slots: {tables.tail_slots} are too few for {max_rows} rows; set tail_slots to at least "
                f"{max_rows}"
            )
        if not 1 <= len(windows) <= _MAX_KINDS:
            raise InvalidInputError(f"windows: expected 1 to {_MAX_KINDS}, got {len(windows)}")
        if any(window is not None and not 1 <= window <= _MAX_INT for window in windows):
            raise InvalidInputError(f"windows: must be at least 1 token, or None, got {list(windows)}")
        if len(granules) != len(windows) or any(not 1 <= granule <= _MAX_INT for granule in granules):
            raise InvalidInputError(
                f"granules: expected one number >= 1, or {len(windows)} (one for each window), got {granules}"
            )
        if not 0 <= sink_tokens <= PAGE_SIZE:
            raise InvalidInputError(f"sink_tokens: must be within 0..{PAGE_SIZE}, got {sink_tokens}")
        self.shared_bytes = _check_shared(max_rows, tables.tail_slots, tables.sink_slots)
        self.tables = tables
        self.max_rows = max_rows
        self.windows = tuple(windows)
        self.granules = tuple(granules)
        self.sink_tokens = sink_tokens
        device = tables.device
        self.states = torch.zeros(max_rows, ROW_STATE_FIELDS, dtype=torch.int32, device=device)
        self.item_prefix = torch.zeros(len(windows), max_rows + 1, dtype=torch.int32, device=device)
        self.window_values = torch.tensor([window or 0 for window in windows], dtype=torch.int32, device=device)
        self.granule_values = torch.tensor(granules, dtype=torch.int32, device=device)

    def rows(self, count: int) -> torch.Tensor:
        """States of the first rows, int32 [count, ROW_STATE_FIELDS], as `DecodePlan` takes them."""
        return self.states[:count]

    def items(self, count: int, window: int | None = None) -> torch.Tensor:
        """Items of the first rows for layers with this window, int32 [count + 1], as `DecodePlan` takes them."""
        if window not in self.windows:
            raise InvalidInputError(f"window: the plan was made for {list(self.windows)}, got {window}")
        return self.item_prefix[self.windows.index(window), : count + 1]


def _check_shared(rows: int, tail_slots: int, sink_slots: int) -> int:
    """Dynamic shared memory of the kernel (the layout stands in csrc/control.cu)."""
    slots = max(tail_slots, sink_slots)
    padded = 1 << (slots - 1).bit_length()
    needed = _ROW_BYTES * rows + 4 * (tail_slots + sink_slots + 1) + 8 * max(rows, padded)
    if needed > _SHARED_BYTES:
        raise InvalidInputError(
            f"tail_slots, sink_slots, max_rows: {tail_slots}, {sink_slots} and {rows} are too many for the control "
            f"kernel ({needed} bytes of shared memory, {_SHARED_BYTES} are there); 2048 slots of each kind and 1024 "
            "rows fit"
        )
    return needed


@functools.cache
def _kernel(shared_bytes: int) -> Kernel:
    return Kernel("control.cu", "control", {}, shared_bytes)


def control_step(
    plan: StepPlan,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    *,
    query_start: torch.Tensor | None = None,
    query_tokens: int = 1,
    null_block: int | None = None,
) -> None:
    """Settle a step's slots and schedule on torch's current stream, without waiting for the device.

    Every step of the cache needs one call, before its first layer: decode steps, prefill chunks and mixed ones. A call
    can be captured in a CUDA graph; capturing changes nothing, replaying does what a call does.

    Blocks must be reserved up to the last token of the step. A row must not read, as a shared prefix, pages that
    another row fills in the same step.

    Args:
        plan: where the results go; its tables change.
        lengths: int32 [rows], tokens of each row at the end of the step, the new ones included; 0 for a padding row.
        block_table: int32 or int64 [rows, blocks], rows any distance apart; entries behind a row's last block may be
            anything.
        query_start: int32 [rows + 1], where each row's new tokens start among all rows'; None where all rows have the
            same number.
        query_tokens: that number.
        null_block: block that belongs to no row; a row whose first or last block it is counts as padding.

    Raises:
        InvalidInputError: another dtype, shape or device, more rows than planned for.
        UnsupportedError: not a CUDA device, or one without kernels.
    """
    tables = plan.tables
    rows = lengths.shape[0] if lengths.dim() == 1 else 0
    check_vector("lengths", lengths, (torch.int32,), rows, tables.device)
    if rows > plan.max_rows:
        raise InvalidInputError(f"lengths: {rows} rows, the plan was made for {plan.max_rows}")
    check_block_table("block_table", block_table, rows, tables.device)
    if query_start is not None:
        check_vector("query_start", query_start, (torch.int32,), rows + 1, tables.device)
    elif not 0 <= query_tokens <= _MAX_INT:
        raise InvalidInputError(f"query_tokens: must be at least 0, got {query_tokens}")
    if null_block is not None and not 0 <= null_block < tables.num_blocks:
        raise InvalidInputError(f"null_block: must be a block 0..{tables.num_blocks - 1}, or None, got {null_block}")
    most = max(plan.max_rows, tables.tail_slots, tables.sink_slots)
    _kernel(plan.shared_bytes).launch(
        tables.device,
        (1,),
        256 if most <= 512 else 1024,
        lengths,
        query_start,
        block_table,
        plan.window_values,
        plan.granule_values,
        tables.tail_of_block,
        tables.tail_keys,
        tables.tail_older_keys,
        tables.tail_stamps,
        tables.sink_of_block,
        tables.sink_keys,
        tables.sink_stamps,
        tables.counters,
        plan.states,
        plan.item_prefix,
        np.int64(block_table.stride(0)),
        np.int32(block_table.shape[1]),
        np.int32(block_table.dtype == torch.int64),
        np.int32(rows),
        np.int32(query_tokens),
        np.int32(tables.num_blocks),
        np.int32(-1 if null_block is None else null_block),
        np.int32(tables.tail_slots),
        np.int32(tables.sink_slots),
        np.int32(plan.sink_tokens),
        np.int32(len(plan.windows)),
        np.int32(plan.max_rows + 1),
    )
