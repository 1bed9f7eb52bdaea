"""`dequantize_pages` on the GPU: bit-equal to unpacking and decoding in PyTorch."""

from itertools import product

import pytest
import torch

from bitdecoding.errors import InvalidInputError
from bitdecoding.kernels.dequantize import dequantize_pages
from bitdecoding.kernels.layout import SUPPORTED_HEAD_DIMS, ArchFamily, LogicalPages, PageLayout, pack_page
from bitdecoding.numerics.blocks import BlockFormat, dequantize_blocks
from bitdecoding.recipe import PAGE_SIZE

pytestmark = pytest.mark.gpu
pytest.importorskip("cuda.core", reason="cuda-core is not installed: pip install 'bitdecoding-fp4[cuda]'")

BLOCKS, HEADS = 5, 2
GARBAGE = 10**6
TABLE = [[3, 0, GARBAGE], [GARBAGE, GARBAGE, GARBAGE], [4, 2, 1]]
COUNTS = [2, 0, 3]
CHOICES = list(product(BlockFormat, SUPPORTED_HEAD_DIMS, (torch.bfloat16, torch.float16), (False, True)))


def device_family() -> ArchFamily:
    return ArchFamily.of_capability(*torch.cuda.get_device_capability())


def random_pages(layout: PageLayout) -> LogicalPages:
    generator = torch.Generator().manual_seed(layout.head_dim)
    scales = (0x08, 0x68) if layout.block_format is BlockFormat.NVFP4 else (110, 134)
    pages = (
        torch.randint(
            *((0, 16) if name.endswith("codes") else scales),
            (BLOCKS, HEADS, *shape),
            dtype=torch.uint8,
            generator=generator,
        )
        for name, shape in layout.logical_shapes()._asdict().items()
    )
    return LogicalPages(*(tensor.cuda() for tensor in pages))


@pytest.mark.parametrize(("fmt", "head_dim", "dtype", "with_means"), CHOICES)
def test_equals_decoding_in_pytorch(fmt: BlockFormat, head_dim: int, dtype: torch.dtype, with_means: bool) -> None:
    layout = PageLayout(device_family(), fmt, head_dim)
    pages = random_pages(layout)
    means = torch.randn(BLOCKS, HEADS, head_dim, device="cuda").bfloat16() if with_means else None
    table = torch.tensor(TABLE, dtype=torch.int32, device="cuda")
    counts = torch.tensor(COUNTS, dtype=torch.int32, device="cuda")
    result = dequantize_pages(pack_page(pages, layout), table, counts, layout, means=means, dtype=dtype)
    keys = dequantize_blocks(pages.key_codes, pages.key_scales, fmt, dim=-1)
    if means is not None:
        keys = keys + means.float().unsqueeze(-2)
    values = dequantize_blocks(pages.value_codes, pages.value_scales, fmt, dim=-2)
    for actual, blocks in ((result.keys, keys), (result.values, values)):
        expected = torch.zeros_like(actual)
        for row, page in product(range(len(TABLE)), range(len(TABLE[0]))):
            if page < COUNTS[row]:
                expected[row, :, page * PAGE_SIZE : (page + 1) * PAGE_SIZE] = blocks[TABLE[row][page]].to(dtype)
        assert torch.equal(actual, expected)


def test_runs_on_the_current_stream_and_in_a_graph() -> None:
    layout = PageLayout(device_family(), BlockFormat.NVFP4, 128)
    cache = pack_page(random_pages(layout), layout)
    table = torch.tensor(TABLE, dtype=torch.int32, device="cuda")
    counts = torch.tensor(COUNTS, dtype=torch.int32, device="cuda")
    expected = dequantize_pages(cache, table, counts, layout)  # compiles and loads, which a capture cannot
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = dequantize_pages(cache, table, counts, layout)
    captured.keys.fill_(7)
    graph.replay()
    assert torch.equal(captured.keys, expected.keys)
    assert torch.equal(captured.values, expected.values)


def test_layout_of_another_architecture_is_refused() -> None:
    other = next(family for family in ArchFamily if family is not device_family())
    layout = PageLayout(other, BlockFormat.NVFP4, 64)
    cache = torch.zeros(1, 1, layout.page_bytes, dtype=torch.uint8, device="cuda")
    table, counts = (torch.zeros(shape, dtype=torch.int32, device="cuda") for shape in ((1, 1), (1,)))
    with pytest.raises(InvalidInputError, match=r"layout: .* is not for"):
        dequantize_pages(cache, table, counts, layout)
