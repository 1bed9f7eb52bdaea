"""The custom ops on a GPU: under `torch.compile`, and a whole step in one CUDA graph."""

import shutil

import pytest
import torch
from ops_cases import DIM, KV_HEADS, Cache, Ops, Wrappers, decode_step, prefill, step_inputs

pytestmark = pytest.mark.gpu
pytest.importorskip("cuda.core", reason="cuda-core is not installed: pip install 'bitdecoding-fp4[cuda]'")

RECIPES = ["bitdecoding-nvfp4", "bitdecoding-mxfp4-plus"]
LENGTHS = [120, 250, 3]


def check_same(one: Cache, other: Cache) -> None:
    for name, memory in one.memory.items():
        assert torch.equal(memory, other.memory[name]), name


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_decode_equals_the_wrapper(recipe: str, backend: str) -> None:
    if backend == "inductor" and not (shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")):
        pytest.skip("Triton needs a C compiler")
    eager, compiled = Wrappers(Cache(3, recipe=recipe)), Ops(Cache(3, recipe=recipe))
    x = step_inputs(3, 3, 1)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return compiled.decode(1, q * 2, k, v) + 1

    for steps in (eager, compiled):
        prefill(steps, LENGTHS)
        steps.cache.lengths.add_(1)
        steps.control()
    expected = eager.decode(1, x.q[1] * 2, x.k[1], x.v[1]) + 1
    found = torch.compile(attend, fullgraph=True, backend=backend)(x.q[1], x.k[1], x.v[1])
    torch._dynamo.reset()
    assert bool(expected.isfinite().all())
    assert torch.equal(found, expected)
    check_same(eager.cache, compiled.cache)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_step_equals_the_wrappers(backend: str) -> None:
    """Control, all layers and promotion in one compiled function, over a page boundary."""
    if backend == "inductor" and not (shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")):
        pytest.skip("Triton needs a C compiler")
    eager, ops = Wrappers(Cache(3)), Ops(Cache(3))
    for steps in (eager, ops):
        prefill(steps, LENGTHS)
    compiled = torch.compile(decode_step, fullgraph=True, backend=backend)
    for seed in range(12):
        x = step_inputs(3, 3, seed)
        expected, found = decode_step(eager, x.q, x.k, x.v), compiled(ops, x.q, x.k, x.v)
        assert torch.equal(torch.stack(found), torch.stack(expected)), seed
    torch._dynamo.reset()
    check_same(eager.cache, ops.cache)
    assert eager.cache.tables.read_counters().pages_promoted == 3  # 250 // 128 pages in the prefill


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_graph_of_a_step_serves_growing_rows(recipe: str) -> None:
    """Control, three layers and promotion, captured once and replayed over page boundaries."""
    eager, ops = Wrappers(Cache(3, recipe=recipe)), Ops(Cache(3, recipe=recipe))
    x = step_inputs(3, 3, 0)
    # The first calls compile, load, and copy a table of addresses, which a capture cannot; then begin anew
    decode_step(ops, x.q, x.k, x.v)
    torch.cuda.synchronize()
    ops.cache.tables.clear()
    for name in ("pages", "tail", "sink", "means"):
        getattr(ops.cache, name).zero_()
    for steps in (eager, ops):
        prefill(steps, LENGTHS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = decode_step(ops, x.q, x.k, x.v)
    for seed in range(140):
        new = step_inputs(3, 3, seed)
        for name in ("q", "k", "v"):
            getattr(x, name).copy_(getattr(new, name))
        graph.replay()
        expected = decode_step(eager, new.q, new.k, new.v)
        assert bool(torch.stack(expected).isfinite().all())
        assert torch.equal(torch.stack(outputs), torch.stack(expected)), seed
    check_same(eager.cache, ops.cache)
    assert ops.cache.lengths.tolist() == [260, 390, 143]
    counters = ops.cache.tables.read_counters()
    assert counters.lost_tails == 0
    assert counters.pages_promoted == 1 + 2 + 2 + 1


def test_gather_equals_the_wrapper() -> None:
    eager, ops = Wrappers(Cache(3)), Ops(Cache(3))
    start = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).to(torch.int32)
    results = []
    for steps in (eager, ops):
        prefill(steps, LENGTHS)
        steps.cache.lengths.add_(1)
        steps.control()
        keys, values = torch.zeros(2, sum(LENGTHS), KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda")
        steps.gather(2, start, keys, values)
        results.append((keys, values))
    for a, b in zip(*results, strict=True):
        assert bool(a.any())
        assert torch.equal(a, b)
