"""The gather kernel on the GPU, bit for bit against the codec, with poison in every place that it must not read."""

from itertools import product

import pytest
import torch
from decode_cases import Spec
from gather_cases import gather_case

from bitdecoding.kernels.gather import gather

pytestmark = pytest.mark.gpu
pytest.importorskip("cuda.core", reason="cuda-core is not installed: pip install 'bitdecoding-fp4[cuda]'")

LENGTHS = [0, 1, 15, 17, 127, 128, 129, 130, 256, 257, 300, 1025, 128 * 33 + 5]
RECIPES = ["bitdecoding-nvfp4", "bitdecoding-mxfp4", "bitdecoding-nvfp4-plus", "bitdecoding-mxfp4-plus"]
CHOICES = list(product(RECIPES, (64, 128, 256), (torch.bfloat16, torch.float16)))


@pytest.mark.parametrize(("recipe", "head_dim", "dtype"), CHOICES)
def test_equals_the_codec(recipe: str, head_dim: int, dtype: torch.dtype) -> None:
    gather_case(Spec(LENGTHS, recipe, head_dim=head_dim, dtype=dtype)).check()


@pytest.mark.parametrize("rotate", [True, False])
@pytest.mark.parametrize("sink", [True, False])
@pytest.mark.parametrize("table_dtype", [torch.int32, torch.int64])
def test_windows_sinks_and_options(rotate: bool, sink: bool, table_dtype: torch.dtype) -> None:
    lengths = [260, 260, 260, 300, 300, 300, 0, 300, 2000]
    starts = [5, 16, 100, 128, 261, 280, 4, 299, 1000]
    spec = Spec(lengths, "bitdecoding-nvfp4-plus", tokens=3, sink_at_hand=sink, table_dtype=table_dtype, seed=3)
    case = gather_case(spec, starts, rotate=rotate, use_means=not rotate, use_key_mean=sink)
    case.check(wide_start=sink, spare=5000)


def test_many_short_rows() -> None:
    gather_case(Spec([n % 5 * 40 for n in range(1100)], head_dim=64, kv_heads=1)).check(spare=0)


def test_page_pool_of_more_than_2_gib() -> None:
    gather_case(Spec([1, 700, 300], kv_heads=8, high_blocks=2**31 // 147456 + 5)).check()


def test_runs_in_a_graph() -> None:
    case = gather_case(Spec(LENGTHS))
    start = torch.tensor([0, *case.counts], device="cuda").cumsum(0)
    shape = (int(start[-1]), 2, 128)
    results = [[torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2)] for _ in range(2)]
    plan, buffers = case.case.plan, case.buffers()
    gather(buffers, plan.rows, plan.block_table, start, *results[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gather(buffers, plan.rows, plan.block_table, start, *results[1])
    assert not results[1][0].any()
    graph.replay()
    for eager, replayed in zip(*results, strict=True):
        assert torch.equal(eager, replayed)
