"""The gather kernel: the real source built for the CPU against the codec, every instance compiled, and what the wrapper
refuses."""

from itertools import product
from typing import Any

import pytest
import torch
from decode_cases import Spec
from gather_cases import gather_case
from host_kernels import HostKernel, needs_compiler

from bitdecoding.errors import InvalidInputError, UnsupportedError
from bitdecoding.kernels import buffers as buffers_module
from bitdecoding.kernels import gather as gather_module
from bitdecoding.kernels.buffers import TAIL_TOKENS, LayerBuffers
from bitdecoding.kernels.compile import ARCHS, compile_kernel
from bitdecoding.kernels.gather import gather
from bitdecoding.kernels.layout import SUPPORTED_HEAD_DIMS, ArchFamily, PageLayout, cuda_constants
from bitdecoding.numerics.blocks import BlockFormat

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = [0, 1, 17, 129, 130, 260, 300]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers may lie on the CPU, and the kernel runs there."""
    monkeypatch.setattr(buffers_module, "require_cuda", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))

    def kernel(layout: PageLayout, bf16: bool, rotate: bool) -> HostKernel:
        defines = {**cuda_constants(layout), "BD_BF16": int(bf16), "BD_ROTATE": int(rotate)}
        return HostKernel("gather.cu", "gather", defines)

    monkeypatch.setattr(gather_module, "_kernel", kernel)


@needs_compiler
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("head_dim", "recipe", "dtype"),
    [
        (64, "bitdecoding-nvfp4-plus", torch.bfloat16),
        (128, "bitdecoding-nvfp4-plus", torch.bfloat16),
        (128, "bitdecoding-mxfp4", torch.float16),
        (256, "bitdecoding-mxfp4-plus", torch.bfloat16),
    ],
)
def test_equals_the_codec(head_dim: int, recipe: str, dtype: torch.dtype) -> None:
    spec = Spec(LENGTHS, recipe=recipe, head_dim=head_dim, dtype=dtype)
    gather_case(spec, device="cpu").check()


@needs_compiler
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("rotate", [True, False])
@pytest.mark.parametrize("sink", [True, False])
def test_windows_sinks_and_options(rotate: bool, sink: bool) -> None:
    """Rows that start in the sink, in a page, in the tail, at their end and beyond it."""
    lengths = [260, 260, 260, 300, 300, 300, 0, 300]
    starts = [5, 16, 100, 128, 261, 280, 4, 299]
    spec = Spec(
        lengths, "bitdecoding-nvfp4-plus", head_dim=64, tokens=3, sink_at_hand=sink, table_dtype=torch.int64, seed=3
    )
    case = gather_case(spec, starts, "cpu", rotate=rotate, use_means=not rotate, use_key_mean=sink)
    case.check(wide_start=True, spare=500)


@needs_compiler
@pytest.mark.usefixtures("on_cpu")
def test_many_short_rows() -> None:
    gather_case(Spec([n % 5 * 40 for n in range(70)], head_dim=64, kv_heads=1), device="cpu").check(spare=0)


LAYOUTS = [PageLayout(*choice) for choice in product(ArchFamily, BlockFormat, SUPPORTED_HEAD_DIMS)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.layout_id)
@pytest.mark.parametrize(("bf16", "rotate"), [(1, 1), (1, 0), (0, 1)])
def test_compiles_without_spills(layout: PageLayout, bf16: int, rotate: int) -> None:
    pytest.importorskip("cuda.core", reason="cuda-core is not installed: pip install 'bitdecoding-fp4[cuda]'")
    for arch in ARCHS:
        if arch.startswith("sm_90") is not (layout.arch is ArchFamily.SM90):
            continue
        defines = {**cuda_constants(layout), "BD_BF16": bf16, "BD_ROTATE": rotate}
        resources = compile_kernel("gather.cu", arch, defines).resources["gather"]
        assert (resources.stack_bytes, resources.spill_store_bytes, resources.spill_load_bytes) == (0, 0, 0)


# --- Errors


LAYOUT = PageLayout(ArchFamily.SM90, BlockFormat.NVFP4, 64)


def arguments(**changes: Any) -> dict[str, Any]:
    return {
        "buffers": LayerBuffers(
            LAYOUT,
            torch.zeros(3, 2, LAYOUT.page_bytes, dtype=torch.uint8),
            torch.zeros(4, 2, 2, TAIL_TOKENS, 64, dtype=torch.bfloat16),
        ),
        "rows": torch.zeros(3, 8, dtype=torch.int32),
        "block_table": torch.zeros(3, 2, dtype=torch.int32),
        "out_start": torch.zeros(4, dtype=torch.int32),
        "keys": torch.zeros(9, 2, 64, dtype=torch.bfloat16),
        "values": torch.zeros(9, 2, 64, dtype=torch.bfloat16),
        **changes,
    }


@pytest.fixture
def buffers_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers_module, "require_cuda", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


@pytest.mark.usefixtures("buffers_on_cpu")
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rows", torch.zeros(3, 7, dtype=torch.int32), r"expected contiguous torch.int32 \[3, 8\]"),
        ("rows", torch.zeros(3, 8), r"expected contiguous torch.int32 \[3, 8\]"),
        ("block_table", torch.zeros(2, 2, dtype=torch.int32), r"expected int32 or int64 \[3, blocks\]"),
        ("block_table", torch.zeros(2, 3, dtype=torch.int32).T, r"entries of a row must be contiguous"),
        ("out_start", torch.zeros(3, dtype=torch.int32), r"expected contiguous int32 or int64 \[4\]"),
        ("out_start", torch.zeros(4), r"expected contiguous int32 or int64 \[4\] on cpu, got torch.float32"),
        ("start_position", torch.zeros(3, dtype=torch.int64), r"expected contiguous int32 \[3\]"),
        ("keys", torch.zeros(9, 2, 64), r"expected torch.bfloat16 \[9, 2, 64\]"),
        ("keys", torch.zeros(9, 64, dtype=torch.bfloat16), r"expected torch.bfloat16 \[0, 2, 64\]"),
        ("keys", torch.zeros(9, 2, 68, dtype=torch.bfloat16)[..., :64], r"rows of head_dim must be contiguous"),
        ("values", torch.zeros(8, 2, 64, dtype=torch.bfloat16), r"expected torch.bfloat16 \[9, 2, 64\]"),
    ],
)
def test_other_tensors_are_refused(name: str, value: torch.Tensor, message: str) -> None:
    with pytest.raises(InvalidInputError, match=f"{name}: {message}"):
        gather(**arguments(**{name: value}))


@pytest.mark.usefixtures("buffers_on_cpu")
def test_needs_a_cuda_device() -> None:
    with pytest.raises(UnsupportedError, match="device: kernels run on CUDA devices, got 'cpu'"):
        gather(**arguments())
