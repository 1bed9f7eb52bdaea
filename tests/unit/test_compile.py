"""Compilation of the CUDA sources: every variant for every architecture, the disk cache, and layout checks in C++."""

import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from bitdecoding.errors import InvalidInputError, UnsupportedError
from bitdecoding.kernels import compile as kernel_compile
from bitdecoding.kernels.compile import (
    ARCHS,
    CompilationError,
    CompiledKernel,
    Kernel,
    KernelResources,
    _compile_text,
    arch_of_capability,
    compile_kernel,
    kernel_cache_folder,
)
from bitdecoding.kernels.layout import (
    SUPPORTED_HEAD_DIMS,
    ArchFamily,
    LogicalPages,
    PageLayout,
    cuda_constants,
    key_row_tokens,
    pack_page,
    value_k_tokens,
)
from bitdecoding.numerics.blocks import BlockFormat

pytest.importorskip("cuda.core", reason="cuda-core is not installed: pip install 'bitdecoding-fp4[cuda]'")

LAYOUTS = [PageLayout(*choice) for choice in product(ArchFamily, BlockFormat, SUPPORTED_HEAD_DIMS)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty kernel cache."""
    monkeypatch.setenv("BITDECODING_CACHE", str(tmp_path))
    return kernel_cache_folder()


def archs_of(layout: PageLayout) -> list[str]:
    return [arch for arch in ARCHS if arch.startswith("sm_90") == (layout.arch is ArchFamily.SM90)]


def dequantize_defines(layout: PageLayout | None = None) -> dict[str, int]:
    layout = layout or PageLayout(ArchFamily.SM90, BlockFormat.NVFP4, 128)
    return {**cuda_constants(layout), "BD_BF16": 1}


# --- Sources


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.layout_id)
@pytest.mark.parametrize("bf16", [0, 1])
def test_dequantize_compiles_without_spills(layout: PageLayout, bf16: int) -> None:
    for arch in archs_of(layout):
        compiled = compile_kernel("dequantize.cu", arch, {**cuda_constants(layout), "BD_BF16": bf16})
        assert compiled.arch == arch and compiled.cubin.startswith(b"\x7fELF")
        resources = compiled.resources["dequantize_pages"]
        assert (resources.stack_bytes, resources.spill_store_bytes, resources.spill_load_bytes) == (0, 0, 0)
        assert 0 < resources.registers <= 128


@pytest.mark.parametrize("arch", ARCHS)
def test_every_ptx_wrapper_assembles(arch: str) -> None:
    """Inline PTX is only looked at where it is used."""
    probe = """
    #include "ptx.cuh"
    extern "C" __global__ void probe(const void* in, uint32_t* out, float* sums) {
        __shared__ __align__(128) uint8_t buffer[1024];
        __shared__ __align__(8) uint64_t barrier;
        const uint32_t address = shared_address(buffer), bar = shared_address(&barrier);
        if (threadIdx.x == 0) {
            mbarrier_init(bar, 2);
            mbarrier_init_fence();
            mbarrier_arrive_expect(bar, 1024);
            fence_shared_for_bulk_copies();
            bulk_copy(address, in, 1024, bar, evict_first_policy());
            mbarrier_arrive(bar);
        }
        __syncthreads();
        mbarrier_wait(bar, 0);
        uint32_t a[4];
        ldmatrix_x4(a, address + 16 * threadIdx.x);
        float c[4] = {};
        mma_f16(c, a[0], a[1], a[2], a[3], movmatrix(a[0]), mul_f16x2(a[1], e4m3x2_to_f16x2(a[2])));
        for (int i = 0; i < 4; ++i) sums[4 * threadIdx.x + i] = c[i];
        const float low = f16_low_to_f32(a[0]), high = f16_high_to_f32(a[0]);
        out[threadIdx.x] = f32x2_to_f16x2(low, high) ^ f32x2_to_bf16x2(low, bits_to_f32(a[3]));
    }
    """
    assert _compile_text("probe.cu", probe, arch, {}).resources["probe"].spill_store_bytes == 0


def integers(values: torch.Tensor) -> str:
    return "{" + ", ".join(map(str, values.reshape(-1).tolist())) + "}"


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.layout_id)
def test_index_functions_agree_with_the_layout(layout: PageLayout) -> None:
    """layout.cuh finds each operand where `pack_page` put it; the compiler evaluates the comparison."""
    # Where each scale went: pages whose k-th has bit k of the scale's logical index as scale bytes
    shapes = layout.logical_shapes()
    places = {}
    for name, section in (("key_scales", layout.key_scales), ("value_scales", layout.value_scales)):
        count = section.size
        bits = (torch.arange(count).unsqueeze(0) >> torch.arange(12).unsqueeze(1)) & 1
        pages = LogicalPages(*(torch.zeros(12, *shape, dtype=torch.uint8) for shape in shapes))
        scales = bits.to(torch.uint8).unflatten(-1, getattr(shapes, name))
        packed = pack_page(pages._replace(**{name: scales}), layout)[:, section.slice].long()
        places[name] = (packed << torch.arange(12).unsqueeze(1)).sum(0).argsort() + section.offset
    checks = f"""
    #include "layout.cuh"
    constexpr int ROWS[] = {integers(key_row_tokens())};
    constexpr int TOKENS[] = {integers(value_k_tokens())};
    constexpr int KEY_SCALES[] = {integers(places["key_scales"])};
    constexpr int VALUE_SCALES[] = {integers(places["value_scales"])};
    __device__ constexpr bool orders_agree() {{
        for (int i = 0; i < 64; ++i)
            if (key_row_token(i / 16, i % 16) != ROWS[i] || value_k_token(i) != TOKENS[i]) return false;
        return true;
    }}
    __device__ constexpr bool key_scales_agree() {{
        for (int half = 0; half < 2; ++half)
            for (int tile = 0; tile < KEY_TILES; ++tile)
                for (int row = 0; row < 16; ++row)
                    for (int block = 0; block < KEY_ROW_BLOCKS; ++block) {{
                        const int token = 64 * half + ROWS[16 * tile + row], of_step = 64 / BLOCK_SIZE;
                        const int place =
                            key_scale(half, tile, block / of_step, row % 8, row / 8) + block % of_step;
                        if (place != KEY_SCALES[token * KEY_ROW_BLOCKS + block]) return false;
                    }}
        return true;
    }}
    __device__ constexpr bool value_scales_agree() {{
        for (int half = 0; half < 2; ++half)
            for (int channel = 0; channel < HEAD_DIM; ++channel)
                for (int block = 0; block < 64 / BLOCK_SIZE; ++block) {{
                    const int place = value_scale(half, channel / 16, channel % 8, channel / 8 % 2) + block;
                    if (place != VALUE_SCALES[(64 / BLOCK_SIZE * half + block) * HEAD_DIM + channel]) return false;
                }}
        return true;
    }}
    static_assert(orders_agree(), "token orders");
    static_assert(key_scales_agree(), "key scales");
    static_assert(value_scales_agree(), "value scales");
    static_assert(key_operand(0, 0, 0, 0) == {layout.key_codes.offset}, "first key operand");
    static_assert(key_operand(1, KEY_TILES - 1, KEY_STEPS - 1, 31) + 16 == {layout.key_codes.end}, "last key operand");
    static_assert(value_operand(0, 0, 0) == {layout.value_codes.offset}, "first value operand");
    static_assert(value_operand(1, VALUE_TILES - 1, 31) + 16 == {layout.value_codes.end}, "last value operand");
    extern "C" __global__ void checks() {{}}
    """
    _compile_text("checks.cu", checks, archs_of(layout)[0], cuda_constants(layout))


@pytest.mark.parametrize("arch", ArchFamily)
def test_decoders_agree_with_the_bit_order(arch: ArchFamily) -> None:
    """e2m1.cuh turns each code at each position into sign and magnitude bits of the right half."""
    signs, magnitudes = zip(*arch.code_bits, strict=True)
    decode = "decode_e2m1(word, i % 4, ShiftLeft())" if arch is ArchFamily.SM90 else "decode_e2m1_plain(word, i % 4)"
    checks = f"""
    #include "e2m1.cuh"
    constexpr int SIGNS[] = {{{", ".join(map(str, signs))}}}, MAGNITUDES[] = {{{", ".join(map(str, magnitudes))}}};
    __device__ constexpr bool agree(unsigned int others) {{
        for (int i = 0; i < 8; ++i)
            for (unsigned int code = 0; code < 16; ++code) {{
                const unsigned int mine = 1u << SIGNS[i] | 7u << MAGNITUDES[i];
                const unsigned int word = (others & ~mine) | (code >> 3) << SIGNS[i] | (code & 7) << MAGNITUDES[i];
                const unsigned int pair = {decode}, half = i < 4 ? pair & 0xFFFF : pair >> 16;
                if (half != ((code >> 3) << 15 | (code & 7) << 9)) return false;
            }}
        return true;
    }}
    static_assert(agree(0) && agree(0xFFFFFFFFu) && agree(0x12345678u), "bit order");
    extern "C" __global__ void checks() {{}}
    """
    _compile_text("checks.cu", checks, "sm_90a", {})


# --- Cache


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Architectures that NVRTC really ran for."""
    calls: list[str] = []
    run = kernel_compile._run_nvrtc

    def counting(name: str, text: str, arch: str, defines: dict[str, int]) -> CompiledKernel:
        calls.append(arch)
        return run(name, text, arch, defines)

    monkeypatch.setattr(kernel_compile, "_run_nvrtc", counting)
    return calls


def test_second_compilation_comes_from_disk(folder: Path, compilations: list[str]) -> None:
    first = compile_kernel("dequantize.cu", "sm_90a", dequantize_defines())
    assert compile_kernel("dequantize.cu", "sm_90a", dequantize_defines()) == first
    assert compilations == ["sm_90a"]
    assert [path.suffix for path in folder.iterdir()] == [".bin"]  # no partial file left


def test_key_covers_all_that_matters(folder: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    defines = dequantize_defines()
    compile_kernel("dequantize.cu", "sm_90a", defines)
    compile_kernel("dequantize.cu", "sm_120a", defines)
    compile_kernel("dequantize.cu", "sm_90a", {**defines, "BD_BF16": 0})
    sources = dict(kernel_compile._sources())
    with monkeypatch.context() as patch:
        changed = {**sources, "ptx.cuh": sources["ptx.cuh"] + "// changed\n"}
        patch.setattr(kernel_compile, "_sources", lambda: changed)
        compile_kernel("dequantize.cu", "sm_90a", defines)
    with monkeypatch.context() as patch:
        patch.setattr(kernel_compile, "_nvrtc_version", lambda: (99, 0))
        compile_kernel("dequantize.cu", "sm_90a", defines)
    with monkeypatch.context() as patch:
        patch.setattr(kernel_compile, "_OPTIONS", {**kernel_compile._OPTIONS, "fma": False})
        compile_kernel("dequantize.cu", "sm_90a", defines)
    assert len(compilations) == len(list(folder.iterdir())) == 6


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "swapped"])
def test_damaged_entry_is_compiled_again(folder: Path, compilations: list[str], damage: str) -> None:
    first = compile_kernel("dequantize.cu", "sm_90a", dequantize_defines())
    (entry,) = folder.iterdir()
    content = entry.read_bytes()
    damaged = {
        "truncated": content[:-100],
        "flipped": content[:500] + bytes([content[500] ^ 1]) + content[501:],
        "empty": b"",
        "swapped": content[32:] + content[:32],
    }[damage]
    entry.write_bytes(damaged)
    assert compile_kernel("dequantize.cu", "sm_90a", dequantize_defines()) == first
    assert len(compilations) == 2
    assert entry.read_bytes() == content


def test_cache_that_cannot_be_written_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compilations: list[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("BITDECODING_CACHE", str(tmp_path / "file"))  # a folder cannot be made below a file
    for _ in range(2):
        assert compile_kernel("dequantize.cu", "sm_90a", dequantize_defines()).cubin
    assert len(compilations) == 2


def test_failed_write_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(kernel_compile.os, "replace", fail)
    assert compile_kernel("dequantize.cu", "sm_90a", dequantize_defines()).cubin
    assert list(folder.iterdir()) == []


# --- Errors


def test_unknown_source_and_arch_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"source: 'ptx.cuh' is unknown; use one of control.cu, decode.cu"):
        compile_kernel("ptx.cuh", "sm_90a")
    with pytest.raises(UnsupportedError, match=r"arch: 'sm_80' is not supported; use one of sm_90a, sm_120a, sm_121a"):
        compile_kernel("dequantize.cu", "sm_80")


def test_arch_that_nvrtc_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_compile, "ARCHS", (*ARCHS, "sm_999a"))
    with pytest.raises(UnsupportedError, match=r"arch: NVRTC \d+\.\d+ cannot compile for sm_999a"):
        compile_kernel("dequantize.cu", "sm_999a", dequantize_defines())


def test_errors_of_a_source_are_shown() -> None:
    with pytest.raises(CompilationError, match=re.compile(r"bad.cu for sm_90a: .*undefined_name", re.DOTALL)):
        _compile_text("bad.cu", "__global__ void k(int* x) { *x = undefined_name; }", "sm_90a", {})


@pytest.mark.parametrize(("capability", "arch"), [((9, 0), "sm_90a"), ((12, 0), "sm_120a"), ((12, 1), "sm_121a")])
def test_arch_of_a_device(capability: tuple[int, int], arch: str) -> None:
    assert arch_of_capability(*capability) == arch


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (12, 9)])
def test_devices_without_kernels(capability: tuple[int, int]) -> None:
    with pytest.raises(UnsupportedError, match=rf"no kernels for compute capability {capability[0]}\.{capability[1]}"):
        arch_of_capability(*capability)


def test_launch_needs_a_cuda_device() -> None:
    kernel = Kernel("dequantize.cu", "dequantize_pages", dequantize_defines())
    with pytest.raises(UnsupportedError, match="device: kernels run on CUDA devices, got 'cpu'"):
        kernel.launch(torch.device("cpu"), (1,), 32, torch.zeros(1), np.int32(1))


def test_resources_are_read_from_the_log() -> None:
    log = (
        "ptxas info    : 0 bytes gmem\n"
        "ptxas info    : Compiling entry function 'a' for 'sm_90a'\n"
        "ptxas info    : Function properties for a\n"
        "ptxas         .     8 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads\n"
        "ptxas info    : Used 40 registers, used 1 barriers, 8 bytes smem\n"
        "ptxas info    : Compiling entry function 'b' for 'sm_90a'\n"
        "ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 10 registers\n"
    )
    assert kernel_compile._parse_resources(log) == {
        "a": KernelResources(40, 8, 16, 24),
        "b": KernelResources(10, 0, 0, 0),
    }
