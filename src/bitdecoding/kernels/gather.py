"""All cached tokens of each row as plain 16-bit keys and values, on the GPU."""

import functools

import numpy as np
import torch

from bitdecoding.kernels.buffers import LayerBuffers
from bitdecoding.kernels.checks import check_block_table, check_heads, check_states, check_vector
from bitdecoding.kernels.compile import Kernel
from bitdecoding.kernels.layout import PageLayout, cuda_constants
from bitdecoding.recipe import PAGE_SIZE

__all__ = ["gather"]

_THREADS = 256


@functools.cache
def _kernel(layout: PageLayout, bf16: bool, rotate: bool) -> Kernel:
    return Kernel("gather.cu", "gather", {**cuda_constants(layout), "BD_BF16": int(bf16), "BD_ROTATE": int(rotate)})


def gather(
    buffers: LayerBuffers,
    rows: torch.Tensor,
    block_table: torch.Tensor,
    out_start: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    start_position: torch.Tensor | None = None,
    rotate: bool = True,
) -> None:
    """Write the tokens that each row had cached before this step, in order, on torch's current stream.

    What a chunk of prefill attends to, with ordinary attention and its queries as they are: keys from pages have
    their mean added, the rotation undone and µ_k added in fp32, and are rounded once; the first tokens come from the
    row's sink slot where it has one, recent tokens from its tail slot, as they are.

    Nothing waits for the device. A row's tokens start_position .. before - 1 go to out_start[row] and on, at most up to
    out_start[row + 1]; everything else is left alone. Launch it before the step's own tokens are stored.

    Args:
        buffers: the layer's cache.
        rows: row states of this step, int32 [rows, 8] (`StepPlan.rows`).
        block_table: int32 or int64 [rows, blocks]; entries behind a row's pages may be anything.
        out_start: int32 or int64 [rows + 1], ascending from 0: where each row's tokens start in the results.
        keys, values: 16-bit [tokens, num_kv_heads, head_dim] to write to, as many tokens as all rows have together (or
            more, at some cost). Any strides that are multiples of 8 elements.
        start_position: int32 [rows], the first token wanted, for sliding windows; default the first.
        rotate: keys were rotated by the normalised Hadamard matrix.

    Raises:
        InvalidInputError: another shape, dtype, stride or device.
        UnsupportedError: not a CUDA device, or one without kernels.
    """
    device, dtype = buffers.device, buffers.dtype
    heads, dim = buffers.num_kv_heads, buffers.layout.head_dim
    count = rows.shape[0] if rows.dim() == 2 else 0
    check_states("rows", rows, count, device)
    check_block_table("block_table", block_table, count, device)
    check_vector("out_start", out_start, (torch.int32, torch.int64), count + 1, device)
    if start_position is not None:
        check_vector("start_position", start_position, (torch.int32,), count, device)
    tokens = keys.shape[0] if keys.dim() == 3 else 0
    check_heads("keys", keys, (tokens, heads, dim), dtype, device)
    check_heads("values", values, (tokens, heads, dim), dtype, device)
    # At least the pages that the tokens of all rows touch, however they are spread over the rows
    pieces = tokens // PAGE_SIZE + 2 * count
    _kernel(buffers.layout, dtype == torch.bfloat16, rotate).launch(
        device,
        (pieces if tokens and count else 0, heads),
        _THREADS,
        buffers.pages,
        buffers.means,
        buffers.key_mean,
        buffers.tail,
        buffers.sink,
        rows,
        block_table,
        out_start,
        start_position,
        keys,
        values,
        np.int64(buffers.pages.stride(0)),
        np.int64(block_table.stride(0)),
        np.int64(keys.stride(0)),
        np.int64(keys.stride(1)),
        np.int64(values.stride(0)),
        np.int64(values.stride(1)),
        np.int64(tokens),
        np.int32(count),
        np.int32(block_table.dtype == torch.int64),
        np.int32(out_start.dtype == torch.int64),
        np.int32(buffers.sink_tokens),
    )
