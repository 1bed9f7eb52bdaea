"""The control kernel on the GPU: histories of an engine against the model, and inside a CUDA graph."""

import random

import pytest
import torch
from control_model import Batch, Engine, EngineOptions, KernelControl

from bitdecoding.kernels.control import SlotTables, StepPlan, control_step

pytestmark = pytest.mark.gpu
pytest.importorskip("cuda.core", reason="cuda-core is not installed: pip install 'bitdecoding-fp4[cuda]'")

HISTORIES = {
    "as many slots as rows": EngineOptions(),
    "few blocks": EngineOptions(num_blocks=14, sink_slots=2),
    "rows left out": EngineOptions(num_blocks=60, tail_slots=40, skip=0.3, sink_slots=16),
    "one row": EngineOptions(num_blocks=8, rows=1, tail_slots=1, sink_slots=1),
    "no null block": EngineOptions(null_block=None),
    "many": EngineOptions(num_blocks=900, rows=100, tail_slots=120, sink_slots=60),
    "very many slots": EngineOptions(num_blocks=900, rows=100, tail_slots=2000, sink_slots=2048),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_kernel_follows_the_rules(name: str) -> None:
    options = HISTORIES[name]
    for seed in range(3):
        both = KernelControl(options.num_blocks, options.tail_slots, options.sink_slots, options.rows, device="cuda")
        engine = Engine(options, seed)
        for _ in range(120):
            engine.play(both.step)
        assert not both.model.lost


@pytest.mark.parametrize(("blocks", "rows"), [(4, 6), (12, 9), (40, 60), (300, 600)])
def test_any_input_gives_one_result(blocks: int, rows: int) -> None:
    generator = random.Random(rows)
    both = KernelControl(blocks, rows + 3, 3, rows, device="cuda")
    for _ in range(60):
        count = generator.randint(0, rows)
        lengths = [generator.choice((-3, 0, 1, 100, 127, 128, 129, 256, 257, 384, 500, 700)) for _ in range(count)]
        tokens = [generator.choice((0, 1, 1, 1, 4, 8, 130, 1000)) for _ in range(count)]
        table = [[generator.randrange(blocks) for _ in range(5)] for _ in range(count)]
        both.step(Batch(lengths, tokens, table, rows % 2))


def test_one_graph_serves_growing_rows() -> None:
    """Decode from 100 to 300 tokens by replays of one captured step, beside the same steps launched one by one."""
    rows, blocks = 5, 40
    lengths = torch.zeros(rows, dtype=torch.int32, device="cuda")
    table = torch.randperm(blocks, device="cuda")[: rows * 4].view(rows, 4).to(torch.int32)
    pairs = []
    for _ in range(2):
        tables = SlotTables(blocks, rows, 3)
        pairs.append((tables, StepPlan(tables, rows, windows=(None, 64), sink_tokens=16)))
    (_, captured), (_, eager) = pairs
    control_step(eager, lengths, table)  # compiles and loads, which a capture cannot
    control_step(captured, lengths, table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        control_step(captured, lengths, table)
    assert captured.tables.read_counters().steps == 1  # capturing changes nothing
    for length in range(100, 300):
        lengths.fill_(length)
        lengths[0] = 0 if length % 7 == 0 else length - 50
        control_step(eager, lengths, table)
        graph.replay()
        assert torch.equal(captured.states, eager.states)
        assert torch.equal(captured.item_prefix, eager.item_prefix)
    for name in ("tail_of_block", "tail_keys", "tail_stamps", "sink_of_block", "sink_keys", "counters"):
        assert torch.equal(getattr(captured.tables, name), getattr(eager.tables, name))
