"""benchmarks/kernels.py and kernels_plots.py without a GPU: what is counted, noted and drawn."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from bitdecoding.kernels import buffers as buffers_module
from bitdecoding.kernels import decode as decode_module
from bitdecoding.kernels.compile import Kernel
from bitdecoding.kernels.layout import unpack_page
from bitdecoding.kernels.schedule import items_of_row, units_of_row
from bitdecoding.numerics.blocks import BlockFormat

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
K = 1024
ISSUE_COLUMNS = [
    *("kernel", "kv_format", "mode", "batch", "num_q_heads", "num_kv_heads", "head_dim", "context"),
    *("us", "tb_per_s", "pct_of_read", "speedup_vs_best_bf16"),
]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


bench = load("kernels")
TINY = bench.Shape("tiny", 4, 2, 64)
MUST_SHOW, OTHERS = bench.must_show_groups(), bench.other_groups()
NVFP4, MXFP4 = BlockFormat.NVFP4, BlockFormat.MXFP4


@pytest.fixture
def recorder(tmp_path: Path) -> Any:
    recorder = bench.Recorder(tmp_path / "results.json")
    recorder.result = {"gpu": "H200", "date": "2026-12-01", "plain_read_tb_per_s": 4.0, "rows": []}
    return recorder


def test_bytes_of_a_decode_step() -> None:
    point = bench.Point(bench.QWEN3_4B, 2, 256)
    query = 2 * 2 * 2 * 32 * 128  # q and out, 16 bits, two rows
    sixteen_bit = (16 + 64) * 2 * 2 * 128
    for variant, page in (
        (bench.Variant(), 18432),
        (bench.Variant(plus=True), 18432 + 256),
        (bench.Variant(BlockFormat.MXFP4), 16384 + 1024),
    ):
        assert bench.decode_bytes(point, variant) == 2 * 8 * (2 * page + sixteen_bit) + query
    assert bench.contiguous_bytes(point, 16) == 2 * 8 * 256 * 512 + query
    assert bench.contiguous_bytes(point, 4.5) == 2 * 8 * 256 * 144 + query


def test_bytes_of_a_conversion() -> None:
    assert bench.conversion_bytes(bench.QWEN3_4B, 256, bench.Variant()) == 8 * (2 * 18432 + 256 * 512)


def test_layers_exceed_the_cache_and_fit_memory() -> None:
    for group in [*MUST_SHOW, *OTHERS]:
        point = group.point
        for size in (*(bench.decode_bytes(point, v) for v in group.variants), bench.contiguous_bytes(point, 16)):
            total = bench.layers_for(size) * size
            assert 100e6 < total < 0.7 * 140e9


def variants_at(groups: list[Any]) -> dict[Any, set[tuple[str, str, bool]]]:
    found: dict[Any, set[tuple[str, str, bool]]] = {}
    for group in groups:
        found.setdefault(group.point, set()).update((v.kv_format.value, v.mode, v.plus) for v in group.variants)
    return found


def test_rows_of_a_run() -> None:
    shown, found = variants_at(MUST_SHOW), variants_at([*MUST_SHOW, *OTHERS])
    assert shown.keys() == {
        *(bench.Point(bench.QWEN3_4B, *at) for at in ((64, 128 * K), (16, 128 * K), (1, 128 * K), (1, 8 * K))),
        bench.Point(bench.QWEN3_30B, 64, 128 * K),
    }
    few = {("nvfp4", "w16", False), ("mxfp4", "w16", False), ("nvfp4", "native", False), ("nvfp4", "w16", True)}
    assert all(variants == few for variants in shown.values())
    assert all(group.all_peers for group in MUST_SHOW)
    assert not any(group.all_peers for group in OTHERS)
    assert {(p.batch, p.context) for p in found if p.shape == bench.QWEN3_4B} == {
        *((b, c) for b in (1, 16, 64) for c in (K, 8 * K, 32 * K, 128 * K)),
        (1, K * K),
    }
    for batch, context in ((1, 128 * K), (16, 128 * K), (1, 8 * K)):
        assert found[bench.Point(bench.QWEN3_4B, batch, context)] == few | {
            ("mxfp4", "native", False),
            ("mxfp4", "w16", True),
        }
    assert {(p.batch, p.context) for p in found if p.shape == bench.QWEN3_30B} == {
        (64, 128 * K),
        (1, 128 * K),
        (16, 8 * K),
    }
    for shape in (bench.HEAD_DIM_64, bench.HEAD_DIM_256):
        assert {(p.batch, p.context) for p in found if p.shape == shape} == {(1, 32 * K), (16, 32 * K)}
    keys = [
        bench.row_key(bench.point_row(group.point, kernel="bitdecoding", **bench.variant_fields(v)))
        for group in [*MUST_SHOW, *OTHERS]
        for v in group.variants
    ]
    assert len(set(keys)) == len(keys)
    assert len(keys) + 2 * len(found) < 100  # with the BF16 kernels; each takes about a third of a second


# --- Our kernels, launched on nothing


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of launched kernels; wrappers check their arguments as ever, with everything on the CPU."""
    names: list[str] = []

    def launch(kernel: Any, device: Any, grid: Any, threads: int, *arguments: Any) -> None:
        assert all(isinstance(x, torch.Tensor) or x is None or hasattr(x, "dtype") for x in arguments)
        assert all(size > 0 for size in grid)
        names.append(kernel._name)

    monkeypatch.setattr(bench, "DEVICE", "cpu")
    monkeypatch.setattr(Kernel, "launch", launch)
    monkeypatch.setattr(buffers_module, "require_cuda", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    decode_module._multiprocessors.cache_clear()
    yield names
    decode_module._multiprocessors.cache_clear()


SMALL = (TINY, bench.Shape("wide", 16, 1, 128), bench.Shape("large", 4, 2, 256))


@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.model)
@pytest.mark.parametrize("mode", ["w16", "native"])
@pytest.mark.parametrize("plus", [False, True])
@pytest.mark.parametrize("fmt", BlockFormat)
def test_decode_calls_pass_the_checks(launches: list[str], fmt: BlockFormat, plus: bool, mode: str, shape: Any) -> None:
    calls, schedule = bench.make_decode_case(bench.Point(shape, 3, 256, q_len=2), bench.Variant(fmt, mode, plus), 2)
    for call in calls:
        call()
    assert launches == ["decode"] * 2
    assert schedule.endswith("5 units a row")


@pytest.mark.parametrize("plus", [False, True])
@pytest.mark.parametrize("fmt", BlockFormat)
@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.model)
def test_other_calls_pass_the_checks(launches: list[str], shape: Any, fmt: BlockFormat, plus: bool) -> None:
    variant, point = bench.Variant(fmt, plus=plus), bench.Point(shape, 2, 256)
    steps = bench.make_step_calls(point, variant, 3)
    assert [len(steps[name]) for name in ("128 steps", "no page fills", "pages fill")] == [128, 127, 1]
    for call in (*steps["no page fills"][:2], *steps["pages fill"]):
        call()
    assert launches == ["control", "promote_pages"] * 3
    launches.clear()
    for calls in bench.make_append_calls(point, variant, 3).values():
        calls[-1]()
    assert launches == ["decode"] * 2
    launches.clear()
    for make in (bench.make_quantize, bench.make_gather):
        (call,) = make(shape, 256, variant)
        call()
    assert launches == ["store_chunk", "gather"]


def test_step_calls_cover_one_page(monkeypatch: pytest.MonkeyPatch, launches: list[str]) -> None:
    lengths: list[list[int]] = []
    monkeypatch.setattr(bench, "control_step", lambda plan, of_rows, table: lengths.append(of_rows.tolist()))
    for call in bench.make_step_calls(bench.Point(TINY, 2, 256), bench.PLAIN, 1)["128 steps"]:
        call()
    assert lengths == [[length, length] for length in range(257, 385)]


def test_rows_without_append_have_the_same_work(monkeypatch: pytest.MonkeyPatch, launches: list[str]) -> None:
    plans = []
    monkeypatch.setattr(bench, "decode", lambda q, k, v, buffers, plan, *rest, **options: plans.append(plan))
    for calls in bench.make_append_calls(bench.APPEND_POINT, bench.PLAIN, 1).values():
        calls[0]()
    states = [plan.rows.tolist()[0] for plan in plans]
    assert [state[:2] for state in states] == [[192, 191], [192, 192]]
    units = [units_of_row(length, before, True, None, 16) for length, before, *_ in states]
    assert units[0] == units[1]
    assert plans[0].item_prefix.tolist() == plans[1].item_prefix.tolist() == [0, items_of_row(units[0], 1)]


def test_instances_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(bench, "compile_kernel", lambda source, arch, defines: compiled.append((source, arch)))
    bench.compile_all([*MUST_SHOW, *OTHERS])
    assert {arch for _, arch in compiled} == {"sm_90a"}
    sources = [source for source, _ in compiled]
    assert sources.count("control.cu") == 1
    assert sources.count("quantize.cu") == 2
    assert 10 < sources.count("decode.cu") < 40


def test_the_script_is_not_the_package_kernels() -> None:
    """Python puts a script's folder first in sys.path, and transformers looks for a package of that name."""
    result = subprocess.run([sys.executable, BENCHMARKS / "kernels.py", "--help"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "--must-show" in result.stdout


def test_pools_grow_and_keep_what_they_have() -> None:
    pool = bench.Pool(torch.float32, lambda memory: memory.fill_(1))
    first = pool.take(2, 3, device="cpu")
    first[0, 0] = 5
    assert pool.take(4, device="cpu").tolist() == [5, 1, 1, 1]
    assert pool.take(4, 4, device="cpu").tolist() == [[1] * 4] * 4
    for random in (bench.RANDOM_BYTES, bench.RANDOM_16BIT):
        assert len(random.take(1000, device="cpu").unique()) > 100


@pytest.mark.parametrize("fmt", list(BlockFormat))
@pytest.mark.parametrize("plus", [False, True])
def test_buffers(fmt: BlockFormat, plus: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "DEVICE", "cpu")
    point = bench.Point(TINY, 3, 256, q_len=2)
    b = bench.decode_buffers(point, bench.Variant(fmt, plus=plus), layers=2)
    assert b.layers == 2
    assert sorted(b.block_table.flatten().tolist()) == list(range(b.pages.shape[1]))
    assert b.state.tolist() == [[320, 318, row, row, -1, 0, 0, 0] for row in range(3)]
    assert b.lengths.tolist() == [320] * 3
    assert b.item_prefix.tolist() == [0, 5, 10, 15]  # 2 pages, a chunk of sink tokens, 2 of recent ones
    assert b.tail.shape == (2, 3, 2, 2, 136, 64)
    assert b.sink.shape == (2, 3, 2, 2, 16, 64)
    assert (b.means is not None) is plus
    pages = unpack_page(b.pages[0, :2], b.layout)
    first, last = bench.SCALE_BYTES[fmt]
    for scales in (pages.key_scales, pages.value_scales):
        assert first <= int(scales.min()) < int(scales.max()) <= last
    for codes in (pages.key_codes, pages.value_codes):
        assert codes.unique().tolist() == list(range(16))


def test_schedule_counts_the_end_of_long_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "DEVICE", "cpu")
    b = bench.decode_buffers(bench.Point(TINY, 2, 128 * 20), bench.PLAIN, 1)
    assert b.units.total == 20 + 1 + 2
    assert b.item_prefix.tolist() == [0, 24, 48]


def test_rows_have_the_columns_of_the_issue() -> None:
    row = bench.point_row(bench.Point(TINY, 1, 8 * K), kernel="bitdecoding", **bench.variant_fields(bench.Variant()))
    assert list(row) == list(bench.COLUMNS)
    assert list(row)[: len(ISSUE_COLUMNS)] == ISSUE_COLUMNS
    assert bench.row_label(row) == "bitdecoding nvfp4 w16 tiny batch 1 8K"
    with pytest.raises(KeyError, match="no such columns"):
        bench.new_row(TINY, microseconds=1)


def test_speedups_compare_with_the_fastest_bf16_kernel_of_the_point() -> None:
    def row(kernel: str, kv_format: str, context: int, us: float | None) -> dict[str, Any]:
        return bench.point_row(bench.Point(TINY, 1, context), kernel=kernel, kv_format=kv_format, us=us)

    rows = [
        row("a", "bf16", K, 30.0),
        row("b", "bf16", K, 20.0),
        row("c", "bf16", K, None),
        row("ours", "nvfp4", K, 5.0),
        row("ours", "nvfp4", 8 * K, 5.0),
        row("quantize", "nvfp4", K, 5.0),
    ]
    bench.fill_speedups(rows)
    assert [r["speedup_vs_best_bf16"] for r in rows] == [0.667, 1.0, None, 4.0, None, None]


def test_graphs_are_long_enough_and_bounded() -> None:
    assert bench.calls_of_graph(1, 50.0) == 20
    assert bench.calls_of_graph(4, 50.0) == 5
    assert bench.calls_of_graph(1, 0.1) == 500
    assert bench.calls_of_graph(512, 0.1) == 1
    assert bench.calls_of_graph(1, 1e6) == 1
    assert [bench.replays(us) for us in (100.0, 5e3, 1e4, 1e6)] == [30, 20, 10, 10]


def test_errors_take_one_line_and_name_no_folders() -> None:
    error = RuntimeError("cannot open\n /home/someone/site-packages/x.py: no")
    assert bench.one_line(error) == "RuntimeError: cannot open x.py: no"
    assert len(bench.one_line(ValueError("x" * 1000))) == 300


def test_a_failing_row_is_noted_and_the_others_go_on(recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "time_calls", lambda calls, expected_us: 10.0)
    monkeypatch.setattr(bench, "device_works", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**12, 10**12))
    monkeypatch.setattr(bench, "gpu_state", lambda: {"sm_mhz": 1980.0, "power_w": 600.0})

    def decode_case(point: Any, variant: Any, layers: int) -> Any:
        if variant.mode == "native":
            raise NotImplementedError("no\nsuch kernel")
        return [lambda: None] * layers, "33 splits"

    monkeypatch.setattr(bench, "make_decode_case", decode_case)
    driver = bench.Driver(recorder, "w16|native")
    driver.peers = [
        bench.Peer("peer", "bf16", 16, lambda point, layers: [lambda: None], baseline=True),
        bench.Peer("another peer", "fp8", 8, lambda point, layers: pytest.fail("not wanted here")),
    ]
    point = bench.Point(TINY, 4, 128 * K)
    group = bench.Group(point, (*bench.WITH_NATIVE, bench.Variant(MXFP4, "native")))
    driver.decode_group(group)
    result = json.loads(recorder._path.read_text())
    assert result["gpu"] == "H200"
    assert result["gpu_state"] == [{"after": "batch 4, 128K, tiny", "sm_mhz": 1980.0, "power_w": 600.0}]
    rows = result["rows"]
    assert [list(row) for row in rows] == [list(bench.COLUMNS)] * 5
    assert [row["error"] for row in rows] == [None] * 3 + ["NotImplementedError: no such kernel"] * 2
    ours = rows[1]
    assert ours["us"] == 10.0
    assert ours["schedule"] == "33 splits"
    assert ours["tb_per_s"] == pytest.approx(bench.decode_bytes(point, bench.Variant()) / 10.0 / 1e6, rel=1e-3)
    assert ours["pct_of_read"] == pytest.approx(25 * ours["tb_per_s"], rel=1e-3)
    assert ours["speedup_vs_best_bf16"] == 1.0
    driver.decode_group(group)
    assert len(recorder.rows) == 5  # nothing is measured twice


@pytest.mark.parametrize("must_show", [True, False])
def test_the_whole_run_survives_missing_kernels(
    recorder: Any, monkeypatch: pytest.MonkeyPatch, must_show: bool
) -> None:
    def fail(*args: Any) -> Any:
        raise RuntimeError("no GPU")

    monkeypatch.setattr(bench, "device_works", lambda: True)
    monkeypatch.setattr(bench, "gpu_state", dict)
    makers = ("make_decode_case", "make_step_calls", "make_append_calls", "make_quantize", "make_gather")
    for name in (*makers, "time_calls"):
        monkeypatch.setattr(bench, name, fail)
    driver = bench.Driver(recorder, "")
    driver.peers = []
    driver.run(must_show)
    groups = MUST_SHOW if must_show else [*MUST_SHOW, *OTHERS]
    others = 6 if must_show else 6 + 4
    assert len(recorder.rows) == sum(len(group.variants) for group in groups) + others
    assert {row["error"] for row in recorder.rows} == {"RuntimeError: no GPU"}
    assert recorder.rows[0]["batch"] == 64


def test_overhead_of_a_step(recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"128 steps": 12.0, "no page fills": 11.0, "pages fill": 40.0, "with": 4.5, "without": 4.25}
    monkeypatch.setattr(bench, "make_step_calls", lambda *args: {name: [name] for name in times})
    monkeypatch.setattr(bench, "make_append_calls", lambda *args: {name: [name] for name in times})
    monkeypatch.setattr(bench, "time_calls", lambda calls, expected_us: times[calls[0]])
    monkeypatch.setattr(bench, "gpu_state", dict)
    bench.Driver(recorder, "").overhead_group(bench.PLAIN)
    assert {row["mode"]: row["us"] for row in recorder.rows} == {
        "control+promotion+append": 12.0 + 36 * 0.25,
        "control+promotion, no page fills": 11.0,
        "control+promotion, pages fill": 40.0,
    }
    assert {(row["kernel"], row["batch"], row["schedule"]) for row in recorder.rows} == {
        ("step_overhead", 1, "36 layers")
    }
    assert "append 9.00 us: part of the decode kernel" in recorder.rows[0]["note"]
    assert recorder.rows[1]["note"] == "127 of 128 steps"


def test_gpu_state_is_given_up_where_it_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_NO_GPU_STATE", [])
    answers = [["1980", "512.25"], []]
    monkeypatch.setattr(bench, "query_gpu", lambda fields, timeout: answers.pop(0))
    assert bench.gpu_state() == {"sm_mhz": 1980.0, "power_w": 512.25}
    assert bench.gpu_state() == {}
    assert bench.gpu_state() == {}
    assert not answers


def test_only_selects_rows_and_the_peers_of_their_points(recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "attempt", lambda recorder, row, measure: recorder.add({**row, "error": "-"}))
    monkeypatch.setattr(bench, "gpu_state", dict)
    driver = bench.Driver(recorder, "bitdecoding mxfp4 w16 Qwen3-4B batch 1 8K")
    driver.peers = [bench.Peer("peer", "bf16", 16, lambda point, layers: [])]
    driver.run(must_show=True)
    assert [bench.row_label(row) for row in recorder.rows] == [
        "peer bf16 peer Qwen3-4B batch 1 8K",
        "bitdecoding mxfp4 w16 Qwen3-4B batch 1 8K",
    ]


def test_rows_behind_the_deadline_are_skipped(recorder: Any) -> None:
    recorder.deadline = 0.0
    bench.attempt(recorder, bench.new_row(TINY, kernel="gather", batch=1, context=K), dict)
    assert recorder.rows[0]["error"] == "skipped: the time budget was used up"


def test_a_peer_that_does_not_fit_is_not_tried(recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**9, 10**9))
    peer = bench.Peer("peer", "bf16", 16, lambda point, layers: pytest.fail("allocates"))
    with pytest.raises(MemoryError, match="K and V need 34 GB, the GPU has 1 GB"):
        bench.Driver(recorder, "").peer(bench.Point(bench.QWEN3_4B, 64, 128 * K), peer)


def test_a_lost_context_starts_a_new_process_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statuses = [bench.RESTART, bench.RESTART, 0]
    commands = []

    def run(command: list[str], check: bool) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=statuses.pop(0))

    monkeypatch.setattr(bench.subprocess, "run", run)
    recorder = bench.Recorder(tmp_path / "results.json")
    good = bench.new_row(TINY, kernel="gather", batch=1, context=K, us=1.0)
    recorder.add(good)
    recorder.add(bench.new_row(TINY, kernel="gather", batch=2, context=K, error="failed"))
    recorder.save()
    args = SimpleNamespace(output=tmp_path / "results.json", resume=True, budget=1.0)
    assert bench.supervise(args) == 0
    assert len(commands) == 3
    assert bench.Recorder(args.output).rows == [good]
    args.resume, statuses[:] = False, [0]
    assert bench.supervise(args) == 0
    assert not args.output.exists()


def test_plots_of_made_up_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plots = load("kernels_plots")
    rows = []
    for group in [*MUST_SHOW, *OTHERS]:
        point, size = group.point, bench.contiguous_bytes(group.point, 16)
        rows.append(
            bench.point_row(
                point, kernel="torch SDPA cuDNN", kv_format="bf16", mode="peer", us=size / 4e6, tb_per_s=4.0
            )
        )
        for variant in group.variants:
            us = bench.decode_bytes(point, variant) / 3.5e6
            fields = bench.variant_fields(variant)
            rows.append(bench.point_row(point, kernel="bitdecoding", us=us, tb_per_s=3.5, **fields))
    rows.append(bench.new_row(TINY, kernel="gather", batch=1, context=K, error="failed"))
    bench.fill_speedups(rows)
    result = {"gpu": "H200", "date": "2026-12-01", "plain_read_tb_per_s": 4.6, "rows": rows}
    for drawn in (result, {**result, "rows": []}):
        files = plots.save_plots(drawn, tmp_path, "fake")
        assert [file.name for file in files] == ["fake-roofline.png", "fake-speedup.png"]
        assert all(file.stat().st_size > 5000 for file in files)
