"""The control kernel: its rules in random histories of an engine, the real source built for the CPU, and what the
wrapper refuses."""

import random
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from control_model import Batch, ControlModel, Engine, EngineOptions, KernelControl, RowState
from host_kernels import HostKernel, needs_compiler
from hypothesis import given
from hypothesis import strategies as st

from bitdecoding.errors import InvalidInputError, UnsupportedError
from bitdecoding.kernels import control
from bitdecoding.kernels.compile import ARCHS, compile_kernel
from bitdecoding.kernels.control import Counters, SlotTables, StepPlan, control_step

pytestmark = pytest.mark.usefixtures("one_thread")

HISTORIES = {
    "as many slots as rows": EngineOptions(),
    "few blocks": EngineOptions(num_blocks=14, sink_slots=2),
    "rows left out": EngineOptions(num_blocks=60, tail_slots=40, skip=0.3, sink_slots=16),
    "one row": EngineOptions(num_blocks=8, rows=1, tail_slots=1, sink_slots=1),
    "no null block": EngineOptions(null_block=None),
}


# --- The rules


def model_step(model: ControlModel, batch: Batch) -> list[RowState]:
    return model.step(batch.lengths, batch.tokens, batch.table, 16, batch.null_block)


@given(st.sampled_from(sorted(HISTORIES)), st.integers(0, 2**32))
def test_every_row_finds_its_own_tokens(name: str, seed: int) -> None:
    options = HISTORIES[name]
    model = ControlModel(options.num_blocks, options.tail_slots, options.sink_slots)
    engine = Engine(options, seed)
    for _ in range(60):
        engine.play(lambda batch: model_step(model, batch))
        assert not model.lost and not model.invalid


# --- The kernel's source on the CPU


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> HostKernel:
    kernel = HostKernel("control.cu", "control", {})
    monkeypatch.setattr(control, "_kernel", lambda _: kernel)
    return kernel


def kernel_control(options: EngineOptions, **changes: Any) -> KernelControl:
    return KernelControl(options.num_blocks, options.tail_slots, options.sink_slots, options.rows, **changes)


@needs_compiler
@pytest.mark.parametrize("threads", [1, 3, 64])
@pytest.mark.parametrize("name", HISTORIES)
def test_kernel_follows_the_rules(on_cpu: HostKernel, name: str, threads: int) -> None:
    on_cpu.threads = threads
    options = HISTORIES[name]
    for seed in range(3):
        engine, both = Engine(options, seed), kernel_control(options)
        for step in range(80):
            on_cpu.seed = step
            engine.play(both.step)
        assert not both.model.lost


@needs_compiler
@pytest.mark.parametrize("threads", [1, 32])
def test_any_input_gives_one_result(on_cpu: HostKernel, threads: int) -> None:
    """Tables that no engine makes, with blocks shared at random: no crash, and no result that depends on the order of
    threads."""
    on_cpu.threads = threads
    generator = random.Random(threads)
    for blocks, rows in ((4, 6), (12, 9), (40, 30)):
        both = KernelControl(blocks, rows + generator.randrange(3), 3, rows)
        for step in range(150):
            on_cpu.seed = step
            both.step(random_batch(generator, blocks, rows, rows % 2))


def random_batch(generator: random.Random, blocks: int, rows: int, null_block: int) -> Batch:
    count = generator.randint(0, rows)
    lengths = [
        generator.choice((-3, 0, 1, 100, 127, 128, 129, 130, 256, 257, 384, 500, 512, 700)) for _ in range(count)
    ]
    tokens = [generator.choice((-1, 0, 1, 1, 1, 4, 8, 130, 1000)) for _ in range(count)]
    width = generator.choice((4, 5, 6))
    table = [
        [
            generator.randrange(-1, blocks + 1) if generator.random() < 0.05 else generator.randrange(blocks)
            for _ in range(width)
        ]
        for _ in range(count)
    ]
    return Batch(lengths, tokens, table, null_block)


@needs_compiler
def test_many_rows(on_cpu: HostKernel) -> None:
    """More rows than threads, all admitted at once, then decoded across a page."""
    rows = 150
    both = KernelControl(3 * rows, rows + 50, 70, rows)
    on_cpu.threads = 64
    table = [[row, rows + row, 2 * rows + row] for row in range(rows)]
    for length, tokens in ((127, 127), (128, 1), (129, 1), (259, 130)):
        both.step(Batch([length] * rows, [tokens] * rows, table))
    assert both.model.counters().sink_refusals == rows - 70 and both.model.lost == 0


# --- Single rules


def steps(*batches: tuple[list[int], list[int], list[list[int]]]) -> tuple[list[list[RowState]], ControlModel]:
    """States of every step by the model, which the kernel follows in every order of its threads."""
    model = ControlModel(20, 4, 2)
    results = [model_step(model, Batch(*batch, 0)) for batch in batches]
    if shutil.which("g++") is not None:
        kernel = HostKernel("control.cu", "control", {}, threads=4)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(control, "_kernel", lambda _: kernel)
            for kernel.seed in range(20):
                both = KernelControl(20, 4, 2, 4)
                assert [both.step(Batch(*batch, 0)) for batch in batches] == results
    return results, model


def test_rows_that_share_the_page_they_just_filled_part() -> None:
    (_, second), model = steps(
        ([256], [256], [[1, 2]]),
        ([257, 257], [1, 1], [[1, 2, 3], [1, 2, 4]]),
    )
    assert [state.tail_slot for state in second] == [0, 1]
    assert model.lost == 0


def test_rows_with_one_first_block_fill_one_sink() -> None:
    """No engine lets two rows fill the same block; the lowest does it."""
    (states,), model = steps(([128, 128, 128], [128, 128, 128], [[1, 2], [1, 3], [1, 4]]))
    assert [state.promote_sink for state in states] == [0, -1, -1]
    assert len({state.tail_slot for state in states}) == 3 and model.refusals == 0


def test_row_that_needs_its_tokens_goes_first() -> None:
    """Row 0 would like to keep the slot of block 2, whose tokens row 1 needs."""
    (_, second), model = steps(
        ([255], [255], [[1, 2]]),
        ([257, 256], [1, 1], [[1, 2, 3], [1, 2, -9]]),
    )
    assert [state.tail_slot for state in second] == [1, 0]
    assert model.lost == 0


def test_rejected_drafts_lead_back_to_the_page_before() -> None:
    results, model = steps(
        ([126], [126], [[1]]),
        ([130], [4], [[1, 2]]),
        ([128], [1], [[1]]),  # all four drafts were rejected but one
        ([129], [1], [[1, 2]]),
    )
    assert [states[0].tail_slot for states in results] == [0, 0, 0, 0]
    assert model.lost == 0


def test_sink_outlives_its_row_and_least_used_goes() -> None:
    results, model = steps(
        ([130], [130], [[1, 2]]),
        ([130], [130], [[3, 4]]),
        ([131], [1], [[1, 5]]),  # another row with the same first block
        ([130], [130], [[6, 7]]),
        ([131], [1], [[3, 4]]),
    )
    assert [states[0].promote_sink for states in results] == [0, 1, -1, 1, -1]
    assert [states[0].sink_slot for states in results] == [-1, -1, 0, -1, -1]
    assert model.misses == 1


def test_padding_claims_nothing() -> None:
    (states,), model = steps(([0, 5, 200, 5], [1, 1, 1, 5], [[9, 9], [0, 0], [0, 1], [3, 3]]))
    assert states[:3] == [RowState()] * 3 and states[3].tail_slot == 0
    assert model.invalid == 0


def test_row_without_a_usable_table_is_padding_and_counted() -> None:
    (states,), model = steps(([300, 5, 5, 5], [1, 1, 1, 1], [[3, 4], [-1, 4], [20, 4], [2147480000, 4]]))
    assert states == [RowState()] * 4
    assert model.invalid == 4


# --- Memory that stays


@needs_compiler
def test_clear_forgets_everything(on_cpu: HostKernel) -> None:
    options = EngineOptions()
    both = kernel_control(options)
    engine = Engine(options, 0)
    for _ in range(30):
        engine.play(both.step)
    assert both.tables.read_counters().steps == 30
    both.tables.clear()
    assert both.tables.read_counters() == Counters(*[0] * 10)
    both.model = ControlModel(options.num_blocks, options.tail_slots, options.sink_slots)
    engine = Engine(options, 1)
    for _ in range(30):
        engine.play(both.step)


@needs_compiler
def test_without_sinks(on_cpu: HostKernel) -> None:
    options = replace(EngineOptions(), sink_slots=0, sink_tokens=0)
    both, engine = kernel_control(options, sink_tokens=0, windows=(None,), granules=(1,)), Engine(options, 0)
    for _ in range(60):
        engine.play(both.step)
    counters = both.tables.read_counters()
    assert counters.sink_claims == counters.sink_misses == 0


@pytest.mark.parametrize("arch", ARCHS)
def test_compiles_without_spills(arch: str) -> None:
    pytest.importorskip("cuda.core", reason="cuda-core is not installed: pip install 'bitdecoding-fp4[cuda]'")
    resources = compile_kernel("control.cu", arch).resources["control"]
    assert (resources.stack_bytes, resources.spill_store_bytes, resources.spill_load_bytes) == (0, 0, 0)
    assert resources.registers <= 64  # 1024 threads


# --- Errors


def tables(**changes: int) -> SlotTables:
    return SlotTables(**{"num_blocks": 10, "tail_slots": 4, "sink_slots": 2, "device": "cpu", **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_blocks": 0}, r"num_blocks: must be within 1\.\.\d+, got 0"),
        ({"tail_slots": 0}, r"tail_slots: must be within 1\.\.\d+, got 0"),
        ({"sink_slots": -1}, r"sink_slots: must be at least 0, got -1"),
        ({"tail_slots": 20000}, r"tail_slots, sink_slots, max_rows: 20000, 2 and 1 are too many .* 2048 slots"),
    ],
)
def test_bad_table_sizes_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        tables(**changes)


def test_sizes_that_the_message_names_fit() -> None:
    StepPlan(SlotTables(10, 2048, 2048, "cpu"), 1024)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_rows": 0}, r"max_rows: must be at least 1, got 0"),
        ({"max_rows": 5}, r"tail_slots: 4 are too few for 5 rows; set tail_slots to at least 5"),
        ({"windows": ()}, r"windows: expected 1 to 16, got 0"),
        ({"windows": (None, 0)}, r"windows: must be at least 1 token, or None, got \[None, 0\]"),
        ({"granules": 0}, r"granules: expected one number >= 1, or 1 .*, got \[0\]"),
        ({"granules": (1, 2)}, r"granules: expected one number >= 1, or 1 .*, got \[1, 2\]"),
        ({"sink_tokens": 129}, r"sink_tokens: must be within 0\.\.128, got 129"),
    ],
)
def test_bad_plans_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        StepPlan(tables(), **{"max_rows": 4, **changes})


def test_unknown_window_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"window: the plan was made for \[None\], got 7"):
        StepPlan(tables(), 4).items(1, 7)


def arguments(**changes: Any) -> dict[str, Any]:
    return {
        "plan": StepPlan(tables(), 3),
        "lengths": torch.zeros(2, dtype=torch.int32),
        "block_table": torch.zeros(2, 4, dtype=torch.int32),
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": torch.zeros(2, dtype=torch.int64)}, r"lengths: expected contiguous int32 \[2\]"),
        ({"lengths": torch.zeros(2, 1, dtype=torch.int32)}, r"lengths: expected contiguous int32 \[0\]"),
        ({"lengths": torch.zeros(4, dtype=torch.int32)[::2]}, r"lengths: expected contiguous int32 \[2\]"),
        ({"lengths": torch.zeros(4, dtype=torch.int32)}, r"lengths: 4 rows, the plan was made for 3"),
        ({"block_table": torch.zeros(3, 4, dtype=torch.int32)}, r"block_table: expected int32 or int64 \[2, blocks\]"),
        (
            {"block_table": torch.zeros(2, 4)},
            r"block_table: expected int32 or int64 \[2, blocks\] on cpu, got torch.float32",
        ),
        ({"block_table": torch.zeros(4, 2, dtype=torch.int32).T}, r"block_table: entries of a row must be contiguous"),
        ({"query_start": torch.zeros(2, dtype=torch.int32)}, r"query_start: expected contiguous int32 \[3\]"),
        ({"query_tokens": -1}, r"query_tokens: must be at least 0, got -1"),
        ({"null_block": 10}, r"null_block: must be a block 0\.\.9, or None, got 10"),
    ],
)
def test_bad_steps_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        control_step(**arguments(**changes))


def test_needs_a_cuda_device() -> None:
    with pytest.raises(UnsupportedError, match="device: kernels run on CUDA devices, got 'cpu'"):
        control_step(**arguments())
