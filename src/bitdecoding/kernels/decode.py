"""Attention of a decode step over FP4 pages, 16-bit sink and 16-bit recent tokens, in one launch."""

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch

from bitdecoding.errors import InvalidInputError, UnsupportedError
from bitdecoding.kernels.buffers import LayerBuffers
from bitdecoding.kernels.checks import check_block_table, check_heads, check_states, check_tensor, check_vector
from bitdecoding.kernels.compile import Kernel
from bitdecoding.kernels.decode_config import DecodeConfig, DecodeShape, choose_config, choose_shape
from bitdecoding.kernels.schedule import max_units
from bitdecoding.numerics.probability import DEFAULT_C, DEFAULT_TAU
from bitdecoding.recipe import MAX_DECODE_TOKENS, Arithmetic
from bitdecoding.reference.vectorized import LogitRule

__all__ = ["DecodeArithmetic", "DecodePlan", "DecodeWorkspace", "decode"]

MAX_GROUP = 32
"""Query heads a KV head."""


@dataclass(frozen=True)
class DecodeArithmetic:
    """How pages are read.

    Attributes:
        arithmetic: ``native`` (FP4 query and probabilities, emulated exactly) or ``w16``.
        rotate: keys were rotated by the normalised Hadamard matrix, and the query is.
        c, tau: factor and threshold of native NVFP4 probabilities (paper Sec. 4).
    """

    arithmetic: Arithmetic = Arithmetic.W16
    rotate: bool = True
    c: float = DEFAULT_C
    tau: float = DEFAULT_TAU


@dataclass(frozen=True)
class DecodePlan:
    """What the control kernel found for this step.

    Attributes:
        rows: row states, int32 [rows, 8].
        item_prefix: items of work of the rows before each row, int32 [rows + 1]; for this layer's window.
        block_table: int32 or int64 [rows, blocks of a row]; entries behind a row's pages may be anything.
        granule: units of work that stay together. 1: all units are dealt out evenly. More: fixed splits of so many
            units, so that a row's result does not depend on the other rows.
    """

    rows: torch.Tensor
    item_prefix: torch.Tensor
    block_table: torch.Tensor
    granule: int = 1


class DecodeWorkspace:
    """Memory for partial results, allocated once and good for every step up to these limits.

    One workspace serves all layers of a stream. Its counters are zero between launches.

    Args:
        max_rows: rows of a batch.
        num_kv_heads, num_q_heads: heads of a layer.
        head_dim: channels of a head.
        max_tokens: new tokens a row.
        max_length: longest row; only fixed splits need it.
        granule: as in `DecodePlan`.
        sink_tokens: of the recipe; only fixed splits need it.
    """

    def __init__(
        self,
        max_rows: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        device: torch.device | str = "cuda",
        max_tokens: int = 1,
        max_length: int = 0,
        granule: int = 1,
        sink_tokens: int = 0,
    ) -> None:
        device = torch.device(device)
        query_rows = num_q_heads // num_kv_heads * max_tokens
        # The fewest columns a kernel takes is 4 (native), which makes the most tiles
        tiles = max_rows * num_kv_heads * -(-query_rows // 4)
        self.max_tiles = tiles
        if granule > 1:
            parts = tiles * -(-max_units(max_length, sink_tokens, max_tokens) // granule)
        else:
            parts = tiles + 4 * torch.cuda.get_device_properties(device).multi_processor_count
        # The most columns is 24
        columns = min(24, max(8, -(-query_rows // 8) * 8))
        self.max_floats = parts * columns * head_dim
        self.granule = granule
        self.output = torch.empty(self.max_floats, dtype=torch.float32, device=device)
        self.stats = torch.empty(2 * parts * columns, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(tiles, dtype=torch.int32, device=device)


@functools.cache
def _kernel(shape: DecodeShape, config: DecodeConfig) -> Kernel:
    return Kernel("decode.cu", "decode", config.defines(shape), config.shared_bytes(shape))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def decode(
    query: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    buffers: LayerBuffers,
    plan: DecodePlan,
    workspace: DecodeWorkspace,
    logits: LogitRule,
    arithmetic: DecodeArithmetic = DecodeArithmetic(),
    *,
    window: int | None = None,
    output: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    config: DecodeConfig | None = None,
) -> torch.Tensor:
    """Append a step's new tokens to the tail and compute their attention, on torch's current stream.

    Nothing waits for the device, and all sizes that differ from step to step are read there: a launch can be captured
    in a CUDA graph and replayed while the rows grow.

    Args:
        query: post-RoPE queries, 16-bit [rows, tokens, num_q_heads, head_dim]; 1 to 8 tokens a row, causal among
            themselves. Any strides that are multiples of 8 elements, as for the next two.
        new_keys, new_values: of the same tokens [rows, tokens, num_kv_heads, head_dim].
        buffers: the layer's cache.
        plan: of this step.
        workspace: for partial results.
        logits: softmax scale and soft-cap.
        arithmetic: how pages are read.
        window: sliding window in tokens, or None.
        output: where to write, like ``query``; default a new tensor.
        lse: fp32 [rows, tokens, num_q_heads] to fill with the natural log-sum-exp of the (scaled, capped) logits; -inf
            for a padding row.
        config: shape of the kernel; default the tuned one.

    Returns:
        ``output``; zeros for padding rows.

    Raises:
        InvalidInputError: another shape, dtype, stride or device, more tokens or a smaller workspace than needed.
        UnsupportedError: more than 32 query heads a KV head; not a CUDA device, or one without kernels.
    """
    device, dtype = buffers.device, buffers.dtype
    if query.dim() != 4:
        raise InvalidInputError(f"query: expected [rows, tokens, num_q_heads, head_dim], got {list(query.shape)}")
    rows, tokens, q_heads, dim = query.shape
    heads = buffers.num_kv_heads
    if not 1 <= tokens <= MAX_DECODE_TOKENS:
        raise InvalidInputError(f"query: a decode step has 1 to {MAX_DECODE_TOKENS} tokens a row, got {tokens}")
    if q_heads % heads or not q_heads:
        raise InvalidInputError(f"query: {q_heads} query heads are no multiple of {heads} KV heads")
    group = q_heads // heads
    if group > MAX_GROUP:
        raise UnsupportedError(f"query: {group} query heads a KV head; at most {MAX_GROUP} are supported")
    check_heads("query", query, (rows, tokens, q_heads, buffers.layout.head_dim), dtype, device)
    check_heads("new_keys", new_keys, (rows, tokens, heads, dim), dtype, device)
    check_heads("new_values", new_values, (rows, tokens, heads, dim), dtype, device)
    if output is None:
        output = torch.empty((rows, tokens, q_heads, dim), dtype=dtype, device=device)
    check_heads("output", output, (rows, tokens, q_heads, dim), dtype, device)
    if lse is not None:
        check_tensor("lse", lse, torch.float32, (rows, tokens, q_heads), device)
    _check_plan(plan, rows, device)
    if window is not None and window < 1:
        raise InvalidInputError(f"window: must be at least 1 token, or None, got {window}")
    if not logits.scale > 0:
        raise InvalidInputError(f"scale: must be positive, got {logits.scale}")
    if math.frexp(arithmetic.c)[0] != 0.5 or not arithmetic.tau > 0:
        raise InvalidInputError(
            f"arithmetic: c must be a power of two and tau positive, got {arithmetic.c} and {arithmetic.tau}"
        )

    shape = choose_shape(
        buffers.layout,
        Arithmetic(arithmetic.arithmetic),
        centered=buffers.means is not None,
        rotate=arithmetic.rotate,
        capped=logits.softcap is not None,
        bf16=dtype == torch.bfloat16,
        query_rows=group * tokens,
    )
    tiles = rows * heads * -(-group * tokens // shape.columns)
    config = choose_config(shape, tiles) if config is None else config
    ctas = _multiprocessors(device) * config.min_ctas
    _check_workspace(workspace, plan, shape, tiles, ctas)
    native_nvfp4 = shape.native and shape.layout.block_format.block_size == 16
    log2_e = math.log2(math.e)
    _kernel(shape, config).launch(
        device,
        (ctas,) if rows else (0,),
        config.threads,
        buffers.pages,
        buffers.means,
        buffers.tail,
        buffers.sink,
        query,
        new_keys,
        new_values,
        output,
        lse,
        buffers.key_mean,
        plan.rows,
        plan.item_prefix,
        plan.block_table,
        workspace.output,
        workspace.stats,
        workspace.arrived,
        *(np.int64(t.stride(i)) for t in (query, new_keys, new_values, output) for i in range(3)),
        np.int64(buffers.pages.stride(0)),
        np.int64(plan.block_table.stride(0)),
        np.int32(rows),
        np.int32(tokens),
        np.int32(heads),
        np.int32(group),
        np.int32(plan.block_table.dtype == torch.int64),
        np.int32(window or 0),
        np.int32(buffers.sink_tokens),
        np.int32(plan.granule),
        np.float32(logits.scale * log2_e),
        np.float32(0.0 if logits.softcap is None else logits.softcap * log2_e),
        np.float32(0.0 if logits.softcap is None else 1 / (logits.softcap * log2_e)),
        np.float32(math.log2(arithmetic.c) if native_nvfp4 else 15.0),
        np.float32(arithmetic.tau),
    )
    return output


def _check_plan(plan: DecodePlan, rows: int, device: torch.device) -> None:
    check_states("plan.rows", plan.rows, rows, device)
    check_vector("plan.item_prefix", plan.item_prefix, (torch.int32,), rows + 1, device)
    check_block_table("plan.block_table", plan.block_table, rows, device)
    if plan.granule < 1:
        raise InvalidInputError(f"plan.granule: must be at least 1, got {plan.granule}")


def _check_workspace(workspace: DecodeWorkspace, plan: DecodePlan, shape: DecodeShape, tiles: int, ctas: int) -> None:
    if workspace.output.device != plan.rows.device:
        raise InvalidInputError(f"workspace: on {workspace.output.device}, the cache is on {plan.rows.device}")
    if workspace.granule != plan.granule:
        raise InvalidInputError(f"workspace: made for granule {workspace.granule}, the plan has {plan.granule}")
    needed = (tiles + ctas) * shape.columns * shape.layout.head_dim if plan.granule == 1 else 0
    if tiles > workspace.max_tiles or needed > workspace.max_floats:
        raise InvalidInputError(
            f"workspace: too small for {tiles} tiles of work ({workspace.max_tiles} fit); make it for more rows, heads "
            "or tokens"
        )
