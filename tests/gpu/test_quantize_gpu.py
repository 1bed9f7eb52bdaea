"""The quantize kernels on a GPU against the reference: every bit, but for a few LDLQ codes next to a tie."""

from itertools import product
from typing import Any

import pytest
import torch
from quantize_cases import (
    Layer,
    Row,
    adversarial,
    block_table,
    check_batch,
    check_chunks,
    check_nan,
    check_prefill,
    check_promotion,
    extreme,
    ordinary,
)

from bitdecoding.kernels.layout import SUPPORTED_HEAD_DIMS, ArchFamily, PageLayout
from bitdecoding.kernels.quantize import Promotion, promote_pages
from bitdecoding.numerics.blocks import BlockFormat
from bitdecoding.recipe import PAGE_SIZE

pytestmark = pytest.mark.gpu

NVFP4, MXFP4 = BlockFormat
RECIPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "standard": {"search": False, "rotate": False, "smooth": False},
    "unrotated": {"rotate": False},
    "centered": {"centered": True},
    "ldlq": {"ldlq": True},
    "plus": {"centered": True, "ldlq": True},
}


def layer(fmt: BlockFormat = NVFP4, dim: int = 128, padded: bool = False, **choice: Any) -> Layer:
    arch = ArchFamily.of_capability(*torch.cuda.get_device_capability())
    return Layer(PageLayout(arch, fmt, dim, padded), device="cuda", **choice)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("fmt", BlockFormat)
@pytest.mark.parametrize("dim", SUPPORTED_HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pages_have_the_reference_bits(fmt: BlockFormat, dim: int, dtype: torch.dtype, recipe: str) -> None:
    for seed, tokens in enumerate((ordinary, adversarial)):
        made = layer(fmt, dim, dtype=dtype, blocks=40, heads=3, seed=seed, **RECIPES[recipe])
        if made.ldlq and tokens is adversarial:
            continue  # ties by the dozen, which another order of sums breaks elsewhere
        check_prefill(made, tokens(128 * 30 + 77, made, seed), allowed=0.001 if made.ldlq else 0.0)


@pytest.mark.parametrize("fmt", BlockFormat)
def test_values_of_every_size(fmt: BlockFormat) -> None:
    made = layer(fmt, rotate=False, smooth=False, blocks=40)
    check_prefill(made, extreme(128 * 30, made))


@pytest.mark.parametrize("first", [1, 15, 16, 17, 100, 127, 128, 129, 130, 135, 136, 137, 200, 255, 256, 257])
@pytest.mark.parametrize("chunk", [1, 7, 128, 136, 200, 1000])
def test_chunks_equal_one_prefill(first: int, chunk: int) -> None:
    """Every chunk after the first has as many tokens; the ring wraps at 136."""
    steps = 20 if chunk < 128 else 3
    check_chunks(lambda: layer(dim=64, blocks=40), [first + chunk * step for step in range(steps)])


@pytest.mark.parametrize("table_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("fmt", BlockFormat)
def test_rows_of_mixed_lengths(fmt: BlockFormat, table_dtype: torch.dtype) -> None:
    check_batch(layer(fmt), table_dtype)


@pytest.mark.parametrize("table_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("fmt", "recipe", "dim"), list(product(BlockFormat, ["plain", "plus"], SUPPORTED_HEAD_DIMS)))
def test_promotion_of_layers(fmt: BlockFormat, recipe: str, dim: int, table_dtype: torch.dtype) -> None:
    check_promotion([layer(fmt, dim, seed=seed, **RECIPES[recipe]) for seed in range(3)], table_dtype)


def test_promotion_of_a_large_batch() -> None:
    """More rows than CTAs of a layer and head."""
    made = layer(dim=64, slots=90, blocks=100)
    rows = [Row(127, 128 + slot % 2, slot, -1, (99 - slot,)) for slot in range(90)]
    tokens = [ordinary(row.length, made, row.tail_slot) for row in rows]
    for row, of_row in zip(rows, tokens, strict=True):
        made.fill_ring(row, of_row)
    states = torch.tensor([row.state for row in rows], dtype=torch.int32, device="cuda")
    promote_pages(Promotion([made.buffers], made.config), states, block_table(rows, torch.int32, "cuda"))
    for row, of_row in zip(rows, tokens, strict=True):
        made.check_pages(row, of_row, range(1))
    made.check_untouched({*range(10, 100)})


def test_promotion_equals_prefill() -> None:
    made, other = layer(centered=True, ldlq=True), layer(centered=True, ldlq=True)
    row = Row(250, 257, 1, -1, (5, 8))
    tokens = ordinary(257, made)
    made.fill_ring(row, tokens)
    other.store([Row(0, 257, 1, 2, (5, 8))], [tokens])
    states = torch.tensor([row.state], dtype=torch.int32, device="cuda")
    assert made.factors is not None
    promotion = Promotion([made.buffers], made.config, [made.factors])
    promote_pages(promotion, states, block_table([row], torch.int32, "cuda"))
    assert torch.equal(made.buffers.pages[8], other.buffers.pages[8])
    assert made.buffers.means is not None and other.buffers.means is not None
    assert torch.equal(made.buffers.means[8], other.buffers.means[8])


@pytest.mark.parametrize("recipe", ["plain", "standard", "centered"])
@pytest.mark.parametrize("fmt", BlockFormat)
def test_nan_stays_where_it_is(fmt: BlockFormat, recipe: str) -> None:
    check_nan(layer(fmt, **RECIPES[recipe]))


def test_padded_pages_end_in_zeros() -> None:
    made = layer(MXFP4, padded=True)
    check_prefill(made, ordinary(128, made))
    assert not made.buffers.pages[3, :, made.layout.value_scales.end :].any()


def test_blocks_beyond_four_gigabytes() -> None:
    dim, heads = 64, 2
    page = PageLayout(ArchFamily.of_capability(*torch.cuda.get_device_capability()), NVFP4, dim).page_bytes
    blocks = (2**32 + 2**28) // (page * heads)
    if torch.cuda.mem_get_info()[0] < 3 * 2**32:
        pytest.skip("needs 12 GiB of GPU memory")
    made = layer(dim=dim, blocks=blocks, heads=heads)
    row = Row(0, 256, 1, -1, (blocks - 1, blocks - 7))
    tokens = ordinary(256, made)
    made.store([row], [tokens], torch.int64)
    made.check_pages(row, tokens, range(2))
    assert bool((made.buffers.pages[:1000] == 0xAA).all())


def test_capture_and_replay() -> None:
    """A captured launch reads row states and tokens of the replay, and runs repeatedly with the same bits."""
    made = layer()
    tokens = ordinary(256, made)
    rows = [Row(255, 256, 1, -1, (3, 6))]
    made.fill_ring(rows[0], tokens)
    states = torch.zeros(1, 8, dtype=torch.int32, device="cuda")
    table = block_table(rows, torch.int32, "cuda")
    promotion = Promotion([made.buffers], made.config)
    promote_pages(promotion, states, table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        promote_pages(promotion, states, table)
    graph.replay()
    made.check_untouched(set())
    states.copy_(torch.tensor([rows[0].state], dtype=torch.int32))
    graph.replay()
    made.check_pages(rows[0], tokens, range(1, 2))
    made.check_untouched({6})


def test_many_sequences_in_one_launch() -> None:
    """As many CTAs as a real prefill has, compared with the same rows one by one."""
    together, alone = layer(blocks=400, slots=16, heads=8), layer(blocks=400, slots=16, heads=8)
    rows, first = [], 0
    for slot in range(16):
        length = 128 * (5 + slot) + 37 * slot
        pages = length // PAGE_SIZE
        rows.append(Row(0, length, slot, -1, tuple(range(first, first + pages))))
        first += pages
    tokens = [ordinary(row.length, together, row.tail_slot) for row in rows]
    together.store(rows, tokens)
    for row, of_row in zip(rows, tokens, strict=True):
        alone.store([row], [of_row])
    assert torch.equal(together.buffers.pages, alone.buffers.pages)
    assert torch.equal(together.buffers.tail.nan_to_num(9), alone.buffers.tail.nan_to_num(9))
