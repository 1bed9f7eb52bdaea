"""`dequantize_pages`: what it refuses; the results are checked on a GPU."""

from typing import Any

import pytest
import torch

from bitdecoding.errors import InvalidInputError, UnsupportedError
from bitdecoding.kernels.dequantize import dequantize_pages
from bitdecoding.kernels.layout import ArchFamily, PageLayout
from bitdecoding.numerics.blocks import BlockFormat

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
