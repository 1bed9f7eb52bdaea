"""`dequantize_pages`: what it refuses, and its kernel built for the CPU; the results of both are checked on a GPU."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from host_kernels import HostKernel, needs_compiler

from bitdecoding.errors import InvalidInputError, UnsupportedError
from bitdecoding.kernels.dequantize import dequantize_pages
from bitdecoding.kernels.layout import ArchFamily, LogicalPages, PageLayout, cuda_constants, pack_page
from bitdecoding.numerics.blocks import BlockFormat, dequantize_blocks

LAYOUT = PageLayout(ArchFamily.SM90, BlockFormat.NVFP4, 64)


def arguments(**changes: Any) -> dict[str, Any]:
    return {
        "cache": torch.zeros(3, 2, LAYOUT.page_bytes, dtype=torch.uint8),
        "block_table": torch.zeros(2, 3, dtype=torch.int32),
        "page_counts": torch.zeros(2, dtype=torch.int32),
        "layout": LAYOUT,
        **changes,
    }


def test_needs_a_cuda_device() -> None:
    with pytest.raises(UnsupportedError, match="device: kernels run on CUDA devices, got 'cpu'"):
        dequantize_pages(**arguments())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cache", torch.zeros(3, 2, LAYOUT.page_bytes + 16, dtype=torch.uint8)),
        ("cache", torch.zeros(3, LAYOUT.page_bytes, dtype=torch.uint8)),
        ("cache", torch.zeros(2, 3, LAYOUT.page_bytes, dtype=torch.uint8).transpose(0, 1)),
        ("block_table", torch.zeros(2, 3, dtype=torch.int64)),
        ("block_table", torch.zeros(2, dtype=torch.int32)),
        ("page_counts", torch.zeros(3, dtype=torch.int32)),
        ("means", torch.zeros(3, 2, 128, dtype=torch.bfloat16)),
        ("means", torch.zeros(3, 2, 64, dtype=torch.float16)),
    ],
)
def test_other_tensors_are_refused_by_name(name: str, value: torch.Tensor) -> None:
    with pytest.raises(InvalidInputError, match=f"{name}: expected contiguous"):
        dequantize_pages(**arguments(**{name: value}))


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"dtype: expected torch.bfloat16 or torch.float16, got torch.float32"):
        dequantize_pages(**arguments(dtype=torch.float32))


@needs_compiler
@pytest.mark.parametrize(("arch", "fmt", "head_dim"), list(product(ArchFamily, BlockFormat, (64, 128))))
def test_kernel_finds_every_code_and_scale(arch: ArchFamily, fmt: BlockFormat, head_dim: int) -> None:
    layout = PageLayout(arch, fmt, head_dim)
    generator = torch.Generator().manual_seed(1)
    scales = (0x08, 0x68) if fmt is BlockFormat.NVFP4 else (110, 134)
    pages = LogicalPages(
        *(
            torch.randint(*((0, 16) if name.endswith("codes") else scales), (3, 2, *shape), generator=generator).to(
                torch.uint8
            )
            for name, shape in layout.logical_shapes()._asdict().items()
        )
    )
    means = torch.randn(3, 2, head_dim, generator=generator).bfloat16()
    table = torch.tensor([[2, 0]], dtype=torch.int32)
    results = [torch.zeros(1, 2, 256, head_dim, dtype=torch.bfloat16) for _ in range(2)]
    kernel = HostKernel("dequantize.cu", "dequantize_pages", {**cuda_constants(layout), "BD_BF16": 1})
    counts = torch.tensor([2], dtype=torch.int32)
    cache = pack_page(pages, layout)
    kernel.launch(cache.device, (2, 2, 1), 256, cache, table, counts, means, *results, np.int32(2))
    keys = dequantize_blocks(pages.key_codes, pages.key_scales, fmt, dim=-1) + means.float().unsqueeze(-2)
    values = dequantize_blocks(pages.value_codes, pages.value_scales, fmt, dim=-2)
    for actual, blocks in zip(results, (keys, values), strict=True):
        assert torch.equal(actual[0], torch.cat((blocks[2], blocks[0]), -2).bfloat16())
