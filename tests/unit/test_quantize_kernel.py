"""The quantize kernels without a GPU: resources of every instance, results of their code on the host, arguments."""

import functools
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import host_kernels
import pytest
import torch
from host_kernels import HostKernel, needs_compiler
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

from bitdecoding.errors import InvalidInputError, UnsupportedError
from bitdecoding.kernels import buffers as kernel_buffers
from bitdecoding.kernels import quantize
from bitdecoding.kernels.compile import ARCHS, compile_kernel
from bitdecoding.kernels.layout import SUPPORTED_HEAD_DIMS, ArchFamily, PageLayout
from bitdecoding.kernels.quantize import Promotion, QuantizeConfig, promote_pages, store_chunk
from bitdecoding.numerics.blocks import BlockFormat
from bitdecoding.recipe import get_recipe

NVFP4, MXFP4 = BlockFormat
LAYOUTS = [PageLayout(*choice) for choice in product(ArchFamily, BlockFormat, SUPPORTED_HEAD_DIMS)]
SHARED_LIMIT = {ArchFamily.SM90: 227 * 1024, ArchFamily.SM120: 99 * 1024}
RECIPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "standard": {"search": False, "rotate": False},
    "centered": {"centered": True},
    "ldlq": {"ldlq": True},
    "plus": {"centered": True, "ldlq": True},
}


# --- Compilation


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.layout_id)
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiles_without_spills(layout: PageLayout, recipe: str) -> None:
    pytest.importorskip("cuda.core", reason="cuda-core is not installed: pip install 'bitdecoding-fp4[cuda]'")
    for bf16 in (True, False) if layout.head_dim == 128 else (True,):
        config = QuantizeConfig(layout, bf16, **RECIPES[recipe])
        assert config.shared_bytes <= SHARED_LIMIT[layout.arch]
        for arch in ARCHS[:2]:
            if arch.startswith("sm_90") != (layout.arch is ArchFamily.SM90):
                continue
            compiled = compile_kernel("quantize.cu", arch, config.defines)
            for name in ("store_chunk", "promote_pages"):
                resources = compiled.resources[name]
                assert (resources.stack_bytes, resources.spill_store_bytes, resources.spill_load_bytes) == (0, 0, 0)
                assert 0 < resources.registers <= (128 if config.min_ctas == 2 else 255)


# --- Results, from the code built for the host


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cuda_host/ptx.cuh with the additions for these kernels."""
    additions = host_kernels.SHIM.with_name("quantize_ptx.cuh")
    combined = tmp_path_factory.mktemp("shim") / "ptx.cuh"
    combined.write_text(host_kernels.SHIM.read_text() + additions.read_text())
    return combined


@functools.cache
def _host_kernel(name: str, config: QuantizeConfig, reciprocal_error: int) -> HostKernel:
    defines = {**config.defines, "HOST_RECIPROCAL_ERROR": reciprocal_error}
    return HostKernel("quantize.cu", name, defines)


Host = Callable[..., Any]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, shim: Path) -> Iterator[Host]:
    """Puts the kernels on the host; called with an ulp, makes their reciprocals wrong by so much."""

    def choose(reciprocal_error: int) -> None:
        monkeypatch.setattr(quantize, "_kernel", lambda name, config: _host_kernel(name, config, reciprocal_error))

    monkeypatch.setattr(host_kernels, "SHIM", shim)
    monkeypatch.setattr(kernel_buffers, "require_cuda", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    choose(0)
    yield choose


def layer(fmt: BlockFormat = NVFP4, dim: int = 64, arch: ArchFamily = ArchFamily.SM90, **choice: Any) -> Layer:
    return Layer(PageLayout(arch, fmt, dim), **choice)


@needs_compiler
@pytest.mark.parametrize("fmt", BlockFormat)
@pytest.mark.parametrize("dim", SUPPORTED_HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pages_have_the_reference_bits(host: Host, fmt: BlockFormat, dim: int, dtype: torch.dtype) -> None:
    check_prefill(layer(fmt, dim, dtype=dtype), adversarial(300, layer(fmt, dim, dtype=dtype)))


@needs_compiler
@pytest.mark.parametrize("fmt", BlockFormat)
def test_standard_rule_without_rotation_in_the_other_bit_order(
    host: Host, fmt: BlockFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    made = layer(fmt, arch=ArchFamily.SM120, search=False, rotate=False, smooth=False)
    check_prefill(made, adversarial(300, made))


@needs_compiler
@pytest.mark.parametrize("fmt", BlockFormat)
def test_values_of_every_size(host: Host, fmt: BlockFormat) -> None:
    made = layer(fmt, rotate=False, smooth=False, blocks=30)
    check_prefill(made, extreme(128 * 20, made))


@needs_compiler
@pytest.mark.parametrize("ulp", [-1, 1])
def test_no_bit_depends_on_the_hardware_reciprocal(host: Host, ulp: int) -> None:
    host(ulp)
    made = layer(dim=128, smooth=False)
    check_prefill(made, adversarial(1000, made))


@needs_compiler
@pytest.mark.parametrize("fmt", BlockFormat)
@pytest.mark.parametrize("dim", SUPPORTED_HEAD_DIMS)
def test_plus_pages(host: Host, fmt: BlockFormat, dim: int) -> None:
    made = layer(fmt, dim, centered=True, ldlq=True)
    check_prefill(made, ordinary(260, made), allowed=0.001)


@needs_compiler
def test_centered_pages(host: Host) -> None:
    made = layer(centered=True)
    check_prefill(made, adversarial(260, made))


@needs_compiler
@pytest.mark.parametrize(
    "bounds",
    [[1, 127, 128, 129, 300], [100, 256, 257, 400], [128, 256, 384], [130, 140, 150, 390], [50, 60, 70]],
    ids=str,
)
def test_chunks_equal_one_prefill(host: Host, bounds: list[int]) -> None:
    check_chunks(layer, bounds)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_of_mixed_lengths(host: Host, dtype: torch.dtype) -> None:
    check_batch(layer(), dtype)


@needs_compiler
@pytest.mark.parametrize("recipe", ["plain", "plus"])
def test_promotion_of_layers(host: Host, recipe: str) -> None:
    check_promotion([layer(seed=seed, **RECIPES[recipe]) for seed in range(2)])


@needs_compiler
@pytest.mark.parametrize("choice", [{}, {"centered": True}], ids=str)
@pytest.mark.parametrize("fmt", BlockFormat)
def test_nan_stays_where_it_is(host: Host, fmt: BlockFormat, choice: dict[str, Any]) -> None:
    check_nan(layer(fmt, **choice))


@needs_compiler
def test_padded_pages_end_in_zeros(host: Host) -> None:
    made = Layer(PageLayout(ArchFamily.SM90, MXFP4, 64, padded=True))
    check_prefill(made, ordinary(128, made))
    assert not made.buffers.pages[3, :, made.layout.value_scales.end :].any()


# --- Arguments


def arguments(made: Layer, **changes: Any) -> dict[str, Any]:
    rows = [Row(0, 130, 0, -1, (1,))]
    new = torch.zeros(130, 2, 64, dtype=torch.bfloat16)
    return {
        "buffers": made.buffers,
        "config": made.config,
        "rows": torch.tensor([row.state for row in rows], dtype=torch.int32),
        "block_table": block_table(rows, torch.int32, "cpu"),
        "new_keys": new,
        "new_values": new,
        "query_start": torch.tensor([0, 130], dtype=torch.int32),
        "max_tokens": 130,
        **changes,
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rows", torch.zeros(1, 8)),
        ("rows", torch.zeros(1, 5, dtype=torch.int32)),
        ("block_table", torch.zeros(1, 3)),
        ("block_table", torch.zeros(2, 3, dtype=torch.int32)),
        ("block_table", torch.zeros(3, 4, dtype=torch.int32).T[:1]),
        ("new_keys", torch.zeros(130, 2, 64)),
        ("new_keys", torch.zeros(130, 3, 64, dtype=torch.bfloat16)),
        ("new_values", torch.zeros(129, 2, 64, dtype=torch.bfloat16)),
        ("new_values", torch.zeros(130, 2, 128, dtype=torch.bfloat16)[..., ::2]),
        ("new_values", torch.zeros(130, 2, 72, dtype=torch.bfloat16)[..., 4:68]),
        ("query_start", torch.zeros(3, dtype=torch.int32)),
        ("query_start", torch.zeros(2, dtype=torch.int64)),
        ("max_tokens", 131),
        ("max_tokens", -1),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_arguments_are_refused_by_name(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_buffers, "require_cuda", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(InvalidInputError, match=f"^{name}: "):
        store_chunk(**arguments(layer(), **{name: value}))


def test_parts_must_belong_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_buffers, "require_cuda", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    plain, plus = layer(), layer(centered=True, ldlq=True)
    with pytest.raises(InvalidInputError, match=r"^buffers: page means are needed"):
        store_chunk(**arguments(plain, config=plus.config))
    with pytest.raises(InvalidInputError, match=r"^buffers: page means are not used"):
        store_chunk(**arguments(plus, config=plain.config))
    with pytest.raises(InvalidInputError, match=r"^factors: LDLQ factors are needed"):
        store_chunk(**arguments(plus))
    with pytest.raises(InvalidInputError, match=r"^factors: LDLQ factors are not used"):
        store_chunk(**arguments(plain, factors=plus.factors))
    with pytest.raises(InvalidInputError, match=r"^buffers: holds .* the kernel was chosen for"):
        store_chunk(**arguments(plain, config=layer(dtype=torch.float16).config))
    with pytest.raises(InvalidInputError, match=r"^layers: between 1 and"):
        Promotion([], plain.config)
    with pytest.raises(InvalidInputError, match=r"^layers\[1\]: .* promote them apart"):
        Promotion([plain.buffers, layer(heads=3).buffers], plain.config)
    with pytest.raises(InvalidInputError, match=r"^factors: expected those of 1 layers"):
        Promotion([plus.buffers], plus.config, [])
    with pytest.raises(InvalidInputError, match=r"^rows: "):
        promote_pages(Promotion([plain.buffers], plain.config), torch.zeros(3), torch.zeros(3, 1, dtype=torch.int32))


def test_recipes_choose_their_kernel() -> None:
    layout = PageLayout(ArchFamily.SM90, NVFP4, 64)
    plus = QuantizeConfig.of_recipe(get_recipe("bitdecoding-nvfp4-plus"), layout, torch.float16)
    assert plus == QuantizeConfig(layout, False, True, True, True, True)
    plain = QuantizeConfig.of_recipe(get_recipe("native-nvfp4-plain"), layout, torch.bfloat16)
    assert plain == QuantizeConfig(layout, True, False, False, False, False)
    with pytest.raises(InvalidInputError, match="layout: "):
        QuantizeConfig.of_recipe(get_recipe("bitdecoding-mxfp4"), layout, torch.bfloat16)
    recipe = get_recipe("bitdecoding-nvfp4")
    for field, value in (("rotation_seed", 1), ("rotation_block", 16), ("key_rule", "max4"), ("value_rule", "4over6")):
        with pytest.raises(UnsupportedError, match=f"^{field}: no kernel encodes"):
            QuantizeConfig.of_recipe(recipe.replace(**{field: value}), layout, torch.bfloat16)
