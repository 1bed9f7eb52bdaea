"""The kernels as torch custom ops, for code under `torch.compile`: importing this module registers them.

``torch.ops.bitdecoding.decode``, ``control_step``, ``store_chunk``, ``promote_pages`` and ``gather`` (or the functions
here, which are the same) launch what the wrappers of `bitdecoding.kernels` do, after the same checks. Arguments are
flat: the tensors of `LayerBuffers`, `DecodePlan`, `StepPlan` and so on one by one, and a page layout as its
``layout_id``. Each op declares what it writes to, and traces with fake tensors, so that a compiled graph needs no break
around it. Objects that belong together must still be made by their classes: their tensors' contents are not checked.

A backend that does not write in place where it may ("aot_eager"; "inductor" does) copies all that an op writes to.

As the wrappers, ops can be captured in CUDA graphs once they have run before (a first call compiles the kernel).
"""

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from bitdecoding.errors import InvalidInputError
from bitdecoding.kernels import control as _control
from bitdecoding.kernels import decode as _decode
from bitdecoding.kernels import gather as _gather
from bitdecoding.kernels import quantize as _quantize
from bitdecoding.kernels.buffers import LayerBuffers
from bitdecoding.kernels.checks import ROW_STATE_FIELDS, check_tensor
from bitdecoding.kernels.layout import SUPPORTED_HEAD_DIMS, ArchFamily, PageLayout
from bitdecoding.numerics.blocks import BlockFormat
from bitdecoding.numerics.ldlq import LdlqFactors
from bitdecoding.recipe import Arithmetic
from bitdecoding.reference.vectorized import LogitRule

__all__ = ["control_step", "decode", "gather", "promote_pages", "store_chunk"]

_LAYOUTS = {
    layout.layout_id: layout
    for layout in (
        *(PageLayout(*choice) for choice in product(ArchFamily, BlockFormat, SUPPORTED_HEAD_DIMS)),
        *(PageLayout(arch, BlockFormat.MXFP4, dim, True) for arch, dim in product(ArchFamily, SUPPORTED_HEAD_DIMS)),
    )
}


def _layout(layout_id: str) -> PageLayout:
    if layout_id not in _LAYOUTS:
        raise InvalidInputError(f"layout: {layout_id!r} is unknown; supported are {', '.join(_LAYOUTS)}")
    return _LAYOUTS[layout_id]


def _factors(c: Tensor | None, d: Tensor | None) -> LdlqFactors | None:
    if c is None and d is None:
        return None
    if c is None or d is None:
        raise InvalidInputError("factor_c, factor_d: both or neither are needed")
    return LdlqFactors(c, d)


# --- Decode


class _Workspace(_decode.DecodeWorkspace):
    """A `DecodeWorkspace` from its tensors."""

    def __init__(self, output: Tensor, stats: Tensor, arrived: Tensor, granule: int, head_dim: int) -> None:
        self.max_tiles = arrived.numel()
        self.max_floats = output.numel()
        self.granule = granule
        check_tensor("workspace_output", output, torch.float32, (self.max_floats,), output.device)
        check_tensor("workspace_stats", stats, torch.float32, (2 * self.max_floats // head_dim,), output.device)
        check_tensor("workspace_arrived", arrived, torch.int32, (self.max_tiles,), output.device)
        self.output, self.stats, self.arrived = output, stats, arrived


@torch.library.custom_op(
    "bitdecoding::decode", mutates_args=("tail", "workspace_output", "workspace_stats", "workspace_arrived", "lse")
)
def decode(
    query: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    pages: Tensor,
    tail: Tensor,
    sink: Tensor | None,
    means: Tensor | None,
    key_mean: Tensor | None,
    rows: Tensor,
    item_prefix: Tensor,
    block_table: Tensor,
    workspace_output: Tensor,
    workspace_stats: Tensor,
    workspace_arrived: Tensor,
    layout: str,
    arithmetic: str,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    rotate: bool = True,
    c: float = _decode.DecodeArithmetic.c,
    tau: float = _decode.DecodeArithmetic.tau,
    granule: int = 1,
    lse: Tensor | None = None,
) -> Tensor:
    """`bitdecoding.kernels.decode.decode`: append new tokens to the tail ring, and return their attention.

    Args:
        query, new_keys, new_values: post-RoPE, 16-bit [rows, tokens, heads, head_dim].
        pages, tail, sink, means, key_mean: of `LayerBuffers`; ``tail`` is written to.
        rows, item_prefix, block_table, granule: of `DecodePlan`.
        workspace_output, workspace_stats, workspace_arrived: ``output``, ``stats`` and ``arrived`` of a
            `DecodeWorkspace` made for this granule; written to.
        layout: ``layout_id`` of the pages.
        arithmetic: "w16" or "native".
        scale, softcap: of the logits (`LogitRule`).
        window: sliding window in tokens, or None.
        rotate, c, tau: of `DecodeArithmetic`.
        lse: fp32 [rows, tokens, num_q_heads] to fill with the natural log-sum-exp, or None.

    Returns:
        A new contiguous tensor of the query's shape; zeros for padding rows.
    """
    modes = [mode.value for mode in Arithmetic]
    if arithmetic not in modes:
        raise InvalidInputError(f"arithmetic: {arithmetic!r} is unknown; use one of {', '.join(modes)}")
    page_layout = _layout(layout)
    return _decode.decode(
        query,
        new_keys,
        new_values,
        LayerBuffers(page_layout, pages, tail, sink, means, key_mean),
        _decode.DecodePlan(rows, item_prefix, block_table, granule),
        _Workspace(workspace_output, workspace_stats, workspace_arrived, granule, page_layout.head_dim),
        LogitRule(scale, softcap),
        _decode.DecodeArithmetic(Arithmetic(arithmetic), rotate, c, tau),
        window=window,
        lse=lse,
    )


@decode.register_fake
def _(query: Tensor, *arguments: object, **options: object) -> Tensor:
    return query.new_empty(query.shape)


# --- Control


class _Tables(_control.SlotTables):
    """`SlotTables` from their tensors."""

    def __init__(
        self,
        tail_of_block: Tensor,
        tail_keys: Tensor,
        tail_older_keys: Tensor,
        tail_stamps: Tensor,
        sink_of_block: Tensor,
        sink_keys: Tensor,
        sink_stamps: Tensor,
        counters: Tensor,
    ) -> None:
        self.device = tail_of_block.device
        self.num_blocks = tail_of_block.numel()
        self.tail_slots = tail_keys.numel()
        self.sink_slots = sink_keys.numel()
        sizes = {
            "tail_of_block": (tail_of_block, torch.int32, self.num_blocks),
            "tail_keys": (tail_keys, torch.int32, self.tail_slots),
            "tail_older_keys": (tail_older_keys, torch.int32, self.tail_slots),
            "tail_stamps": (tail_stamps, torch.int64, self.tail_slots),
            "sink_of_block": (sink_of_block, torch.int32, self.num_blocks if self.sink_slots else 0),
            "sink_keys": (sink_keys, torch.int32, self.sink_slots),
            "sink_stamps": (sink_stamps, torch.int64, self.sink_slots),
            "counters": (counters, torch.int64, len(_control.Counters.__dataclass_fields__)),
        }
        for name, (tensor, dtype, size) in sizes.items():
            check_tensor(name, tensor, dtype, (size,), self.device)
            setattr(self, name, tensor)


class _Plan(_control.StepPlan):
    """A `StepPlan` from its tensors."""

    def __init__(
        self,
        tables: _control.SlotTables,
        states: Tensor,
        item_prefix: Tensor,
        window_values: Tensor,
        granule_values: Tensor,
        sink_tokens: int,
    ) -> None:
        kinds = window_values.numel()
        self.tables = tables
        self.max_rows = states.shape[0]
        self.windows = (None,) * kinds  # only their number counts: the kernel reads window_values
        self.sink_tokens = sink_tokens
        self.shared_bytes = _control._check_shared(self.max_rows, tables.tail_slots, tables.sink_slots)
        device = tables.device
        check_tensor("states", states, torch.int32, (self.max_rows, ROW_STATE_FIELDS), device)
        check_tensor("item_prefix", item_prefix, torch.int32, (kinds, self.max_rows + 1), device)
        check_tensor("window_values", window_values, torch.int32, (kinds,), device)
        check_tensor("granule_values", granule_values, torch.int32, (kinds,), device)
        self.states, self.item_prefix = states, item_prefix
        self.window_values, self.granule_values = window_values, granule_values


@torch.library.custom_op(
    "bitdecoding::control_step",
    mutates_args=(
        *("states", "item_prefix", "tail_of_block", "tail_keys", "tail_older_keys", "tail_stamps"),
        *("sink_of_block", "sink_keys", "sink_stamps", "counters"),
    ),
)
def control_step(
    lengths: Tensor,
    block_table: Tensor,
    query_start: Tensor | None,
    states: Tensor,
    item_prefix: Tensor,
    window_values: Tensor,
    granule_values: Tensor,
    tail_of_block: Tensor,
    tail_keys: Tensor,
    tail_older_keys: Tensor,
    tail_stamps: Tensor,
    sink_of_block: Tensor,
    sink_keys: Tensor,
    sink_stamps: Tensor,
    counters: Tensor,
    sink_tokens: int,
    query_tokens: int = 1,
    null_block: int | None = None,
) -> None:
    """`bitdecoding.kernels.control.control_step`: settle a step's slots and schedule.

    Args:
        lengths, block_table, query_start, query_tokens, null_block: as there.
        states, item_prefix, window_values, granule_values, sink_tokens: of a `StepPlan`; the first two are written to.
        tail_of_block, tail_keys, tail_older_keys, tail_stamps, sink_of_block, sink_keys, sink_stamps, counters: of its
            `SlotTables`; written to.
    """
    tables = _Tables(
        tail_of_block, tail_keys, tail_older_keys, tail_stamps, sink_of_block, sink_keys, sink_stamps, counters
    )
    plan = _Plan(tables, states, item_prefix, window_values, granule_values, sink_tokens)
    _control.control_step(
        plan, lengths, block_table, query_start=query_start, query_tokens=query_tokens, null_block=null_block
    )


# --- Quantize


def _config(
    layout: str, tail: Tensor, search: bool, rotate: bool, centered: bool, ldlq: bool
) -> _quantize.QuantizeConfig:
    return _quantize.QuantizeConfig(_layout(layout), tail.dtype == torch.bfloat16, search, rotate, centered, ldlq)


@torch.library.custom_op("bitdecoding::store_chunk", mutates_args=("pages", "tail", "sink", "means"))
def store_chunk(
    new_keys: Tensor,
    new_values: Tensor,
    query_start: Tensor,
    rows: Tensor,
    block_table: Tensor,
    pages: Tensor,
    tail: Tensor,
    sink: Tensor | None,
    means: Tensor | None,
    key_mean: Tensor | None,
    factor_c: Tensor | None,
    factor_d: Tensor | None,
    layout: str,
    max_tokens: int,
    search: bool = True,
    rotate: bool = True,
) -> None:
    """`bitdecoding.kernels.quantize.store_chunk`: store a prefill step's tokens in one layer's cache.

    Args:
        new_keys, new_values, query_start, rows, block_table, max_tokens: as there.
        pages, tail, sink, means, key_mean: of `LayerBuffers`; all but the last are written to. Keys are centred where
            there are ``means``.
        factor_c, factor_d: of `LdlqFactors`, for LDLQ rounding; or None.
        layout: ``layout_id`` of the pages.
        search, rotate: of `QuantizeConfig`.
    """
    factors = _factors(factor_c, factor_d)
    _quantize.store_chunk(
        LayerBuffers(_layout(layout), pages, tail, sink, means, key_mean),
        _config(layout, tail, search, rotate, means is not None, factors is not None),
        rows,
        block_table,
        new_keys,
        new_values,
        query_start,
        max_tokens,
        factors=factors,
    )


_promotions: dict[tuple[object, ...], _quantize.Promotion] = {}
"""By all that goes into their tables. Never dropped, as a CUDA graph may hold a table's address; 64 bytes a layer."""


@torch.library.custom_op("bitdecoding::promote_pages", mutates_args=("pages", "sinks", "means"))
def promote_pages(
    rows: Tensor,
    block_table: Tensor,
    pages: Sequence[Tensor],
    tails: Sequence[Tensor],
    sinks: Sequence[Tensor],
    means: Sequence[Tensor],
    key_means: Sequence[Tensor],
    factors_c: Sequence[Tensor],
    factors_d: Sequence[Tensor],
    layout: str,
    search: bool = True,
    rotate: bool = True,
) -> None:
    """`bitdecoding.kernels.quantize.promote_pages`: quantize the pages that a decode step filled, in all layers.

    The first call with other tensors copies a table of their addresses to the device, which waits for it and cannot be
    captured in a CUDA graph.

    Args:
        rows, block_table: as there.
        pages, tails, sinks, means, key_means: of each layer's `LayerBuffers`; empty where layers have none. Pages,
            sinks and means are written to. Keys are centred where there are ``means``.
        factors_c, factors_d: of each layer's `LdlqFactors`, for LDLQ rounding; or empty.
        layout: ``layout_id`` of the pages.
        search, rotate: of `QuantizeConfig`.
    """
    parts = {"tails": tails, "sinks": sinks, "means": means, "key_means": key_means}
    parts |= {"factors_c": factors_c, "factors_d": factors_d}
    for name, tensors in parts.items():
        if len(tensors) != len(pages) and (tensors or name == "tails"):
            raise InvalidInputError(f"{name}: expected those of {len(pages)} layers, got {len(tensors)}")
    tensors = [tensor for of_layers in (pages, *parts.values()) for tensor in of_layers]
    flags = (layout, search, rotate, *(bool(of_layers) for of_layers in parts.values()))
    key = (flags, *((t.device, t.dtype, t.data_ptr(), t.shape, t.stride()) for t in tensors))
    if key not in _promotions:
        empty = [None] * len(pages)
        layers = [
            LayerBuffers(_layout(layout), *of_layer)
            for of_layer in zip(pages, tails, sinks or empty, means or empty, key_means or empty, strict=True)
        ]
        found = [_factors(c, d) for c, d in zip(factors_c or empty, factors_d or empty, strict=True)]
        factors = [of_layer for of_layer in found if of_layer is not None]
        if not layers:
            raise InvalidInputError("pages: expected those of at least one layer")
        config = _config(layout, tails[0], search, rotate, bool(means), bool(factors))
        promotion = _quantize.Promotion(layers, config, factors or None)
        promotion._kept = ((), None)  # the caller has the tensors; here only their addresses are kept
        _promotions[key] = promotion
    _quantize.promote_pages(_promotions[key], rows, block_table)


# --- Gather


@torch.library.custom_op("bitdecoding::gather", mutates_args=("keys", "values"))
def gather(
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    block_table: Tensor,
    out_start: Tensor,
    start_position: Tensor | None,
    pages: Tensor,
    tail: Tensor,
    sink: Tensor | None,
    means: Tensor | None,
    key_mean: Tensor | None,
    layout: str,
    rotate: bool = True,
) -> None:
    """`bitdecoding.kernels.gather.gather`: all tokens that were cached before a step, as 16-bit keys and values.

    Args:
        keys, values: 16-bit [tokens, num_kv_heads, head_dim] to write to.
        rows, block_table, out_start, start_position, rotate: as there.
        pages, tail, sink, means, key_mean: of `LayerBuffers`.
        layout: ``layout_id`` of the pages.
    """
    _gather.gather(
        LayerBuffers(_layout(layout), pages, tail, sink, means, key_mean),
        rows,
        block_table,
        out_start,
        keys,
        values,
        start_position=start_position,
        rotate=rotate,
    )


for _op in (control_step, store_chunk, promote_pages, gather):
    _op.register_fake(lambda *arguments, **options: None)
