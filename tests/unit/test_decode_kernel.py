"""Every instance of the decode kernel compiles within its registers, and to the instructions that make it fast."""

import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import PackageNotFoundError, files
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from bitdecoding.errors import InvalidInputError, UnsupportedError
from bitdecoding.kernels.compile import KernelResources, compile_kernel, kernel_cache_folder
from bitdecoding.kernels.decode import MAX_GROUP
from bitdecoding.kernels.decode_config import FEW_TILES, DecodeConfig, DecodeShape, choose_config, choose_shape
from bitdecoding.kernels.layout import SUPPORTED_HEAD_DIMS, ArchFamily, PageLayout
from bitdecoding.kernels.schedule import (
    CHUNK_TOKENS,
    TILE_OVERHEAD,
    UNITS_PER_OVERHEAD,
    items_of_row,
    max_units,
    units_of_row,
)
from bitdecoding.numerics.blocks import BlockFormat
from bitdecoding.recipe import MAX_DECODE_TOKENS, Arithmetic

pytest.importorskip("cuda.core", reason="cuda-core is not installed: pip install 'bitdecoding-fp4[cuda]'")

ARCH_OF = {ArchFamily.SM90: "sm_90a", ArchFamily.SM120: "sm_120a"}
LAYOUTS = [PageLayout(*choice) for choice in product(ArchFamily, BlockFormat, SUPPORTED_HEAD_DIMS)]
ROWS = {Arithmetic.W16: (8, 16, 24), Arithmetic.NATIVE: (4, 8)}
SHARED_BYTES = {ArchFamily.SM90: 227 * 1024, ArchFamily.SM120: 99 * 1024}


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One kernel cache for the module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BITDECODING_CACHE", str(tmp_path_factory.mktemp("kernels")))
        yield kernel_cache_folder()


def shapes(layout: PageLayout) -> list[DecodeShape]:
    """All shapes of the main path, and of soft-capped and FP16 models the first."""
    made = []
    for arithmetic, centered in product(Arithmetic, (False, True)):
        for rows in ROWS[arithmetic]:
            made.append(
                choose_shape(
                    layout, arithmetic, centered=centered, rotate=True, capped=False, bf16=True, query_rows=rows
                )
            )
        made.append(
            choose_shape(layout, arithmetic, centered=centered, rotate=False, capped=True, bf16=False, query_rows=1)
        )
    return list(dict.fromkeys(made))


def configs(shape: DecodeShape) -> set[DecodeConfig]:
    """For few and for many tiles of work."""
    return {choose_config(shape, FEW_TILES), choose_config(shape, FEW_TILES + 1)}


def compiled_resources(shape: DecodeShape, config: DecodeConfig) -> KernelResources:
    return compile_kernel("decode.cu", ARCH_OF[shape.layout.arch], config.defines(shape)).resources["decode"]


def test_instances_compile_without_spills(folder: Path) -> None:
    instances = [(shape, config) for layout in LAYOUTS for shape in shapes(layout) for config in configs(shape)]
    # Spawned: NVRTC and torch have threads. Each compiles for itself, the cache on disk is common
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        found = list(pool.map(compiled_resources, *zip(*instances, strict=True), chunksize=4))
    for (shape, config), resources in zip(instances, found, strict=True):
        what = (shape, config, resources)
        assert (resources.stack_bytes, resources.spill_store_bytes, resources.spill_load_bytes) == (0, 0, 0), what
        assert config.shared_bytes(shape) <= SHARED_BYTES[shape.layout.arch], what
        # So many CTAs fit the registers of a multiprocessor; warps come in fours
        warps = -(-config.threads * config.min_ctas // 128) * 4
        assert warps * 32 * resources.registers <= 65536, what


def disassemble(cubin: bytes, folder: Path) -> str:
    try:
        installed = [file.locate() for file in files("nvidia-cuda-nvdisasm") or [] if file.name == "nvdisasm"]
    except PackageNotFoundError:
        pytest.skip("nvdisasm is not installed: pip install nvidia-cuda-nvdisasm")
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    Path(str(installed[0])).chmod(0o755)
    command = [str(installed[0]), "-c", str(path)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.layout_id)
def test_instructions(layout: PageLayout, tmp_path: Path) -> None:
    shape = choose_shape(layout, Arithmetic.W16, centered=False, rotate=True, capped=False, bf16=True, query_rows=8)
    compiled = compile_kernel("decode.cu", ARCH_OF[layout.arch], choose_config(shape, 1000).defines(shape))
    text = disassemble(compiled.cubin, tmp_path)
    opcodes = count_opcodes(text)
    assert opcodes["UBLKCP"] >= 3  # pages, 16-bit keys, 16-bit values
    dim = layout.head_dim
    # Keys and values of half a page: 4 products of 16 deep a K step and row tile; and of 16-bit tokens, P in two parts
    assert opcodes["HMMA"] == 4 * (4 * dim // 64 + dim // 16) + 2 * dim // 32 + 2 * dim // 16
    assert not opcodes["LDL"] and not opcodes["STL"]
    if layout.arch is ArchFamily.SM90 and layout.block_format is BlockFormat.NVFP4:
        loops = [count_opcodes(block) for block in text.split("\n.L_")]
        pages = sum((block for block in loops if block["HMUL2"]), Counter())
        words = 4 * (4 * dim // 64 + dim // 16)
        assert pages["HMUL2"] == 4 * words
        # Left shifts of decoding run on the multiplier, as the integer pipe has enough to do; scales of a block are
        # operand modifiers of the products, not instructions
        assert pages["SHF"] < words // 2, pages
        assert pages["PRMT"] <= words, pages


def count_opcodes(text: str) -> Counter[str]:
    """Instructions of a disassembly by name, without modifiers."""
    return Counter(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+)", text, re.MULTILINE))


# --- Choices


def test_columns_hold_the_query_rows() -> None:
    layout = PageLayout(ArchFamily.SM90, BlockFormat.NVFP4, 128)
    for arithmetic, rows in product(Arithmetic, range(1, MAX_GROUP * MAX_DECODE_TOKENS + 1)):
        shape = choose_shape(layout, arithmetic, centered=False, rotate=True, capped=False, bf16=True, query_rows=rows)
        assert 4 <= shape.columns <= 24
        assert shape.columns >= min(rows, 8)
        assert shape.native == (arithmetic is Arithmetic.NATIVE)


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from bitdecoding.kernels import decode_config

    monkeypatch.setattr(decode_config, "_SHARED_PER_SM", {ArchFamily.SM90: 20_000})
    layout = PageLayout(ArchFamily.SM90, BlockFormat.NVFP4, 128)
    shape = choose_shape(layout, Arithmetic.W16, centered=False, rotate=True, capped=False, bf16=True, query_rows=1)
    with pytest.raises(UnsupportedError, match="head_dim: a page of 128 channels does not fit"):
        choose_config(shape, 1)


def test_configs_are_consistent() -> None:
    for layout in LAYOUTS:
        for shape in shapes(layout):
            config = choose_config(shape, 1)
            assert config.slots % config.pairs == 0 and config.slots >= config.pairs
            assert config.threads == 64 * config.pairs + 32
            assert DecodeConfig(**vars(config)) == config


# --- Schedule


def test_constants_are_those_of_the_kernels() -> None:
    header = (Path(__file__).parents[2] / "src/bitdecoding/kernels/csrc/schedule.cuh").read_text()
    for name, value in (
        ("CHUNK_TOKENS", CHUNK_TOKENS),
        ("TILE_OVERHEAD", TILE_OVERHEAD),
        ("UNITS_PER_OVERHEAD", UNITS_PER_OVERHEAD),
    ):
        found = re.search(rf"constexpr int {name} = (\d+);", header)
        assert found and int(found[1]) == value


@pytest.mark.parametrize(
    ("length", "before", "sink", "window", "expected"),
    [
        (0, 0, False, None, (0, 0, 0, 0, 0)),
        (1, 0, False, None, (0, 0, 0, 0, 1)),
        (128, 127, False, None, (0, 0, 0, 0, 4)),
        (129, 128, True, None, (0, 1, 1, 128, 1)),
        (129, 128, False, None, (0, 1, 0, 128, 1)),
        (300, 299, True, None, (0, 2, 1, 256, 2)),
        (300, 299, True, 100, (1, 1, 0, 256, 2)),  # sees 200..299
        (300, 299, True, 10, (2, 0, 0, 290, 1)),
        (300, 299, True, 290, (0, 2, 1, 256, 2)),  # sees 10.., part of the sink
        (1031, 1023, True, None, (0, 7, 1, 896, 5)),  # 8 new tokens: 135 recent ones
    ],
)
def test_units(length: int, before: int, sink: bool, window: int | None, expected: tuple[int, ...]) -> None:
    units = units_of_row(length, before, sink, window, 16)
    assert tuple(units) == expected
    assert units.total <= max_units(length, 16, max(1, length - before))
    assert items_of_row(units, 4) == max(1, -(-units.total // 4))
    assert items_of_row(units, 1) == max(1, units.total) + min(TILE_OVERHEAD, units.total // UNITS_PER_OVERHEAD)


def test_long_rows() -> None:
    units = units_of_row(2**20, 2**20 - 1, True, None, 16)
    assert units.pages == 2**20 // 128 - 1
    assert items_of_row(units, 1) == units.total + TILE_OVERHEAD


# --- Arguments


def test_wrong_arguments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is launched; on the CPU with the device checks taken out."""
    from bitdecoding.kernels import buffers as buffers_module
    from bitdecoding.kernels import decode as decode_module
    from bitdecoding.kernels.buffers import TAIL_TOKENS, LayerBuffers
    from bitdecoding.kernels.decode import DecodeArithmetic, DecodePlan, DecodeWorkspace, decode
    from bitdecoding.reference.vectorized import LogitRule

    launched: list[str] = []
    monkeypatch.setattr(buffers_module, "require_cuda", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(decode_module, "_multiprocessors", lambda device: 132)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: type("Properties", (), {"multi_processor_count": 132})
    )
    monkeypatch.setattr(decode_module.Kernel, "launch", lambda self, *a: launched.append("decode"))
    layout = PageLayout(ArchFamily.SM90, BlockFormat.NVFP4, 64)
    made = LayerBuffers(
        layout,
        torch.zeros(4, 2, layout.page_bytes, dtype=torch.uint8),
        torch.zeros(3, 2, 2, TAIL_TOKENS, 64, dtype=torch.bfloat16),
    )
    plan = DecodePlan(
        torch.zeros(3, 8, dtype=torch.int32), torch.arange(4, dtype=torch.int32), torch.zeros(3, 5, dtype=torch.int32)
    )
    workspace = DecodeWorkspace(3, 8, 2, 64, device="cpu")
    q = torch.zeros(3, 1, 8, 64, dtype=torch.bfloat16)
    kv = torch.zeros(3, 1, 2, 64, dtype=torch.bfloat16)
    good: dict[str, object] = {
        "query": q,
        "new_keys": kv,
        "new_values": kv,
        "buffers": made,
        "plan": plan,
        "workspace": workspace,
        "logits": LogitRule(0.125),
    }
    decode(**good)  # type: ignore[arg-type]
    assert launched == ["decode"]
    many = torch.zeros(3, 9, 8, 64, dtype=torch.bfloat16)
    wrong: list[tuple[dict[str, object], str]] = [
        ({"query": q[0]}, r"query: expected \[rows, tokens, num_q_heads, head_dim\]"),
        ({"query": many}, "1 to 8 tokens"),
        ({"query": q[:, :, :7]}, "7 query heads are no multiple of 2"),
        ({"query": q.half()}, r"query: expected torch.bfloat16"),
        ({"query": torch.zeros(3, 1, 8, 128, dtype=torch.bfloat16)[..., ::2]}, "query: rows of head_dim must be"),
        ({"new_keys": kv[:2]}, r"new_keys: expected torch.bfloat16 \[3, 1, 2, 64\]"),
        ({"new_values": kv.float()}, "new_values"),
        ({"output": q.float()}, "output"),
        ({"lse": torch.zeros(3, 8)}, "lse"),
        ({"window": 0}, "window: must be at least 1"),
        ({"logits": LogitRule(-1.0)}, "scale: must be positive"),
        ({"arithmetic": DecodeArithmetic(c=3.0)}, "c must be a power of two"),
        ({"plan": DecodePlan(plan.rows[:2], plan.item_prefix, plan.block_table)}, "plan.rows"),
        ({"plan": DecodePlan(plan.rows, plan.item_prefix[:3], plan.block_table)}, "plan.item_prefix"),
        ({"plan": DecodePlan(plan.rows, plan.item_prefix, plan.block_table.float())}, "plan.block_table"),
        ({"plan": DecodePlan(plan.rows, plan.item_prefix, plan.block_table, 0)}, "granule"),
        ({"plan": DecodePlan(plan.rows, plan.item_prefix, plan.block_table, 4)}, "workspace: made for granule 1"),
        ({"workspace": DecodeWorkspace(1, 8, 2, 64, device="cpu")}, "workspace: too small"),
    ]
    for change, message in wrong:
        with pytest.raises(InvalidInputError, match=message):
            decode(**{**good, **change})  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="40 query heads a KV head; at most 32"):
        decode(**{**good, "query": torch.zeros(3, 1, 80, 64, dtype=torch.bfloat16)})  # type: ignore[arg-type]
    assert launched == ["decode"]
