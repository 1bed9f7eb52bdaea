"""Pages of a block table to contiguous 16-bit keys and values, on the GPU."""

import functools
from typing import NamedTuple

import numpy as np
import torch

from bitdecoding.errors import InvalidInputError
from bitdecoding.kernels.compile import Kernel, require_cuda
from bitdecoding.kernels.layout import ArchFamily, PageLayout, cuda_constants
from bitdecoding.recipe import PAGE_SIZE

__all__ = ["DequantizedPages", "dequantize_pages"]

_THREADS = 256


class DequantizedPages(NamedTuple):
    """Keys as stored (smoothed and rotated) and values, 16-bit [rows, kv_heads, pages · 128, head_dim]."""

    keys: torch.Tensor
    values: torch.Tensor


@functools.cache
def _kernel(layout: PageLayout, dtype: torch.dtype) -> Kernel:
    defines = {**cuda_constants(layout), "BD_BF16": int(dtype == torch.bfloat16)}
    return Kernel("dequantize.cu", "dequantize_pages", defines)


def dequantize_pages(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    page_counts: torch.Tensor,
    layout: PageLayout,
    *,
    means: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> DequantizedPages:
    """Dequantize the pages of each row on torch's current stream, without waiting for the device.

    Args:
        cache: packed pages, contiguous uint8 [blocks, kv_heads, layout.page_bytes].
        block_table: int32 [rows, pages], the block of each page; entries behind a row's pages may be anything.
        page_counts: int32 [rows], pages of each row.
        layout: of the cache; its architecture must be the device's.
        means: BF16 [blocks, kv_heads, head_dim], page means to add to the keys.
        dtype: bfloat16 or float16 (in which large MXFP4 values overflow to infinity).

    Returns:
        Keys and values; zeros behind a row's pages.

    Raises:
        InvalidInputError: another dtype, shape, stride or device, or the layout of another architecture.
        UnsupportedError: not a CUDA device, or one without kernels.
    """
    device = cache.device
    blocks, heads = cache.shape[:2] if cache.dim() == 3 else (0, 0)
    rows, pages = block_table.shape if block_table.dim() == 2 else (0, 0)
    _check("cache", cache, torch.uint8, (blocks, heads, layout.page_bytes), device)
    _check("block_table", block_table, torch.int32, (rows, pages), device)
    _check("page_counts", page_counts, torch.int32, (rows,), device)
    if means is not None:
        _check("means", means, torch.bfloat16, (blocks, heads, layout.head_dim), device)
    if dtype not in (torch.bfloat16, torch.float16):
        raise InvalidInputError(f"dtype: expected torch.bfloat16 or torch.float16, got {dtype}")
    require_cuda(device)
    if layout.arch is not ArchFamily.of_capability(*torch.cuda.get_device_capability(device)):
        raise InvalidInputError(f"layout: {layout.layout_id!r} is not for {torch.cuda.get_device_name(device)}")
    shape = (rows, heads, pages * PAGE_SIZE, layout.head_dim)
    keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
    _kernel(layout, dtype).launch(
        device,
        (pages, heads, rows),
        _THREADS,
        cache,
        block_table,
        page_counts,
        means,
        keys,
        values,
        np.int32(pages),
    )
    return DequantizedPages(keys, values)


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or tensor.device != device or not tensor.is_contiguous():
        raise InvalidInputError(
            f"{name}: expected contiguous {dtype} {list(shape)} on {device}, got {tensor.dtype} {list(tensor.shape)} "
            f"on {tensor.device}"
        )
