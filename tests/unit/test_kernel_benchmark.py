"""benchmarks/kernels.py and kernels_plots.py without a GPU: what is counted, noted and drawn."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from bitdecoding.kernels.layout import unpack_page
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
    for point, variants in bench.decode_points().items():
        for size in (*(bench.decode_bytes(point, v) for v in variants), bench.contiguous_bytes(point, 16)):
            total = bench.layers_for(size) * size
            assert 100e6 < total < 130e9


def test_targets_come_first_and_every_case_is_there() -> None:
    points = bench.decode_points()
    targets = bench.decode_points(quick=True)
    assert list(points)[: len(targets)] == list(targets)
    assert bench.Point(bench.QWEN3_4B, 1, 8 * K) in targets
    assert {p.shape.head_dim for p in points} == {64, 128, 256}
    assert {(p.batch, p.context) for p in points if p.shape == bench.QWEN3_4B and p.q_len == 1} == {
        *((b, c) for b in (1, 4, 16, 64) for c in (K, 8 * K, 32 * K, 128 * K)),
        (1, K * K),
    }
    for point, variants in targets.items():
        assert {(v.kv_format.value, v.mode) for v in variants} == {
            (f, m) for f in ("nvfp4", "mxfp4") for m in ("w16", "native")
        }, point
    keys = [
        bench.row_key(bench.point_row(p, kernel="bitdecoding", **bench.variant_fields(v)))
        for p, variants in points.items()
        for v in variants
    ]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("fmt", list(BlockFormat))
@pytest.mark.parametrize("plus", [False, True])
def test_buffers(fmt: BlockFormat, plus: bool) -> None:
    point = bench.Point(TINY, 3, 256, q_len=2)
    b = bench.decode_buffers(point, bench.Variant(fmt, plus=plus), layers=2, device="cpu")
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
    assert [bench.replays(us) for us in (100.0, 1e4, 1e5, 1e6)] == [100, 20, 10, 3]


def test_errors_take_one_line_and_name_no_folders() -> None:
    error = RuntimeError("cannot open\n /home/someone/site-packages/x.py: no")
    assert bench.one_line(error) == "RuntimeError: cannot open x.py: no"
    assert len(bench.one_line(ValueError("x" * 1000))) == 300


def test_a_failing_row_is_noted_and_the_others_go_on(recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "time_calls", lambda calls, expected_us: 10.0)
    monkeypatch.setattr(bench, "device_works", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**12, 10**12))

    def decode_case(point: Any, variant: Any, layers: int) -> Any:
        if variant.mode == "native":
            raise NotImplementedError("no\nsuch kernel")
        return [lambda: None] * layers, "33 splits"

    monkeypatch.setattr(bench, "make_decode_case", decode_case)
    driver = bench.Driver(recorder, "w16|native")
    driver.peers = [bench.Peer("peer", "bf16", 16, lambda point, layers: [lambda: None])]
    point = bench.Point(TINY, 4, 128 * K)
    driver.decode_group(point, bench.FOUR)
    result = json.loads(recorder._path.read_text())
    assert result["gpu"] == "H200"
    rows = result["rows"]
    assert [list(row) for row in rows] == [list(bench.COLUMNS)] * 5
    assert [row["error"] for row in rows] == [None] * 3 + ["NotImplementedError: no such kernel"] * 2
    ours = rows[1]
    assert ours["us"] == 10.0
    assert ours["schedule"] == "33 splits"
    assert ours["tb_per_s"] == pytest.approx(bench.decode_bytes(point, bench.Variant()) / 10.0 / 1e6, rel=1e-3)
    assert ours["pct_of_read"] == pytest.approx(25 * ours["tb_per_s"], rel=1e-3)
    assert ours["speedup_vs_best_bf16"] == 1.0
    driver.decode_group(point, bench.FOUR)
    assert len(recorder.rows) == 5  # nothing is measured twice


def test_the_whole_run_survives_missing_kernels(recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise RuntimeError("no GPU")

    monkeypatch.setattr(bench, "device_works", lambda: True)
    for maker in ("make_decode_case", "make_step_overhead", "make_quantize", "make_gather", "time_calls"):
        monkeypatch.setattr(bench, maker, fail)
    driver = bench.Driver(recorder, "")
    driver.peers = []
    driver.run(quick=False)
    variants = sum(len(v) for v in bench.decode_points().values())
    assert len(recorder.rows) == variants + 6 + 8
    assert {row["error"] for row in recorder.rows} == {"RuntimeError: no GPU"}


def test_only_selects_rows_and_the_peers_of_their_points(recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "attempt", lambda recorder, row, measure: recorder.add({**row, "error": "-"}))
    driver = bench.Driver(recorder, "bitdecoding mxfp4 w16 Qwen3-4B batch 1 8K")
    driver.peers = [bench.Peer("peer", "bf16", 16, lambda point, layers: [])]
    driver.run(quick=True)
    assert [bench.row_label(row) for row in recorder.rows] == [
        "peer bf16 peer Qwen3-4B batch 1 8K",
        "bitdecoding mxfp4 w16 Qwen3-4B batch 1 8K",
    ]


def test_rows_behind_the_deadline_are_skipped(recorder: Any) -> None:
    recorder.deadline = 0.0
    bench.attempt(recorder, bench.new_row(TINY, kernel="gather", batch=1, context=K), dict)
    assert recorder.rows[0]["error"] == "skipped: the time budget was used up"


def test_a_peer_that_does_not_fit_is_not_tried(recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**9, 10**12))
    peer = bench.Peer("peer", "bf16", 16, lambda point, layers: pytest.fail("allocates"))
    with pytest.raises(MemoryError, match="K and V need 34 GB, 1 GB are free"):
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
    for point, variants in bench.decode_points().items():
        size = bench.contiguous_bytes(point, 16)
        rows.append(
            bench.point_row(
                point, kernel="torch SDPA cuDNN", kv_format="bf16", mode="peer", us=size / 4e6, tb_per_s=4.0
            )
        )
        for variant in variants:
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
