"""The custom ops without a GPU: schemas, fake tensors, and tracing by `torch.compile` with kernels that do little."""

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ops_cases import DIM, KV_HEADS, Q_HEADS, Cache, Ops, Wrappers, decode_step, step_inputs
from torch._subclasses.fake_tensor import FakeTensorMode

from bitdecoding import InvalidInputError
from bitdecoding.kernels import buffers as buffers_module
from bitdecoding.kernels import decode as decode_module
from bitdecoding.kernels import ops
from bitdecoding.kernels.compile import Kernel
from bitdecoding.kernels.layout import SUPPORTED_HEAD_DIMS, ArchFamily, PageLayout
from bitdecoding.numerics.blocks import BlockFormat

WRITTEN = {
    "decode": {"tail", "workspace_output", "workspace_stats", "workspace_arrived", "lse"},
    "control_step": {
        *("states", "item_prefix", "tail_of_block", "tail_keys", "tail_older_keys", "tail_stamps"),
        *("sink_of_block", "sink_keys", "sink_stamps", "counters"),
    },
    "store_chunk": {"pages", "tail", "sink", "means"},
    "promote_pages": {"pages", "sinks", "means"},
    "gather": {"keys", "values"},
}


def launch(kernel: Any, device: Any, grid: Any, threads: int, *arguments: Any) -> None:
    """A trace of each kernel on what it writes to, that depends on what it reads."""
    if kernel._name == "decode":
        tail, query, new_keys, output, lse, rows = (arguments[i] for i in (2, 4, 5, 7, 8, 10))
        output.copy_(query + tail[0, 0, 0, 0, 0] + rows[0, 0])
        tail.add_(new_keys[0, 0, 0, 0])
        if lse is not None:
            lse.fill_(3.0)
    elif kernel._name == "control":
        lengths, counters, states = arguments[0], arguments[12], arguments[13]
        states[: len(lengths), 0] = lengths
        counters.add_(1)
    elif kernel._name == "store_chunk":
        for written in arguments[5:9]:
            if written is not None:
                written.fill_(2)
    elif kernel._name == "promote_pages":
        rows, table = arguments[0], arguments[2]
        for pages, *_ in table.tolist():  # bare addresses
            ctypes.c_uint8.from_address(pages).value = int(rows[0, 0]) % 256
    else:
        assert kernel._name == "gather"
        arguments[9].fill_(1)
        arguments[10].fill_(2)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Kernel, "launch", launch)
    monkeypatch.setattr(buffers_module, "require_cuda", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=2))
    decode_module._multiprocessors.cache_clear()
    ops._promotions.clear()
    yield
    decode_module._multiprocessors.cache_clear()
    ops._promotions.clear()
    torch._dynamo.reset()


def cache(recipe: str = "bitdecoding-nvfp4", layers: int = 2) -> Cache:
    return Cache(2, layers, recipe, device="cpu")


@pytest.mark.parametrize("name", WRITTEN)
def test_schemas_declare_what_is_written(name: str) -> None:
    schema = getattr(torch.ops.bitdecoding, name).default._schema
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    assert written == WRITTEN[name]
    assert len(schema.returns) == (1 if name == "decode" else 0)


def arguments_of(name: str, made: Cache) -> tuple[Any, ...]:
    steps = Ops(made)
    x = step_inputs(2, 2, 1, "cpu")
    start = torch.tensor([0, 3, 8], dtype=torch.int32)
    k, v = torch.randn(2, 8, KV_HEADS, DIM).to(torch.bfloat16)
    return {
        "decode": lambda: steps.decode_arguments(0, x.q[0], x.k[0], x.v[0]),
        "control_step": steps.control_arguments,
        "store_chunk": lambda: steps.store_arguments(0, k, v, start, 5),
        "promote_pages": steps.promote_arguments,
        "gather": lambda: steps.gather_arguments(0, start, k, v),
    }[name]()


@pytest.mark.parametrize("recipe", ["bitdecoding-nvfp4", "bitdecoding-mxfp4-plus"])
@pytest.mark.parametrize("name", WRITTEN)
def test_opcheck(name: str, recipe: str) -> None:
    torch.library.opcheck(getattr(torch.ops.bitdecoding, name).default, arguments_of(name, cache(recipe)))


def test_decode_of_fake_tensors() -> None:
    """Nothing is launched or read; the result is contiguous whatever the query's strides are."""
    with FakeTensorMode():
        made = torch.empty
        qkv = made(2, 1, Q_HEADS + 2 * KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda")
        q, k, v = qkv.split((Q_HEADS, KV_HEADS, KV_HEADS), 2)
        others = [made(1, device="cuda")] * 2 + [None] * 3 + [made(1, device="cuda")] * 6
        out = ops.decode(q, k, v, *others, "v1-sm90-nvfp4-d64", "w16", 0.125)
    assert (out.shape, out.dtype, out.device) == (q.shape, torch.bfloat16, q.device)
    assert out.is_contiguous()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("recipe", ["bitdecoding-nvfp4", "bitdecoding-mxfp4-plus"])
def test_a_compiled_step_equals_the_wrappers(recipe: str, backend: str) -> None:
    """Layers' buffers are views of one tensor; addresses must be those of the tensors that the graph gets."""
    one, other = Wrappers(cache(recipe)), Ops(cache(recipe))
    compiled = torch.compile(decode_step, fullgraph=True, backend=backend)
    for seed in range(3):
        x = step_inputs(2, 2, seed, "cpu")
        expected, found = decode_step(one, x.q, x.k, x.v), compiled(other, x.q, x.k, x.v)
        for a, b in zip(expected, found, strict=True):
            assert torch.equal(a, b)
    for name, memory in one.cache.memory.items():
        assert torch.equal(memory, other.cache.memory[name]), name
    assert one.cache.lengths.tolist() == [3, 3]
    assert one.cache.pages[:, 0, 0, 0].tolist() == [3, 3]
    assert one.cache.tables.counters.tolist() == [3] * 10


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_optional_results_are_written(backend: str) -> None:
    steps = Ops(cache())
    x = step_inputs(2, 2, 0, "cpu")

    def run(lse: torch.Tensor) -> torch.Tensor:
        return ops.decode(*steps.decode_arguments(0, x.q[0], x.k[0], x.v[0]), lse=lse)

    lse = torch.zeros(2, 1, Q_HEADS)
    torch.compile(run, fullgraph=True, backend=backend)(lse)
    assert lse.unique().tolist() == [3.0]


def test_store_and_gather_write_as_the_wrappers_do() -> None:
    start = torch.tensor([0, 3, 8], dtype=torch.int32)
    k, v = torch.randn(2, 8, KV_HEADS, DIM).to(torch.bfloat16)
    one, other = Wrappers(cache("bitdecoding-nvfp4-plus")), Ops(cache("bitdecoding-nvfp4-plus"))
    results = []
    for steps in (one, other):
        keys, values = torch.zeros(2, 8, KV_HEADS, DIM).to(torch.bfloat16)
        steps.store(1, k, v, start, 5)
        steps.gather(1, start, keys, values)
        results.append((keys, values))
        assert keys.unique().tolist() == [1]
        assert values.unique().tolist() == [2]
    for name, memory in one.cache.memory.items():
        assert torch.equal(memory, other.cache.memory[name]), name


def test_promotion_tables_are_made_once_and_hold_no_memory() -> None:
    made = cache()
    for _ in range(3):
        Ops(made).promote()
    assert len(ops._promotions) == 1
    (promotion,) = ops._promotions.values()
    assert promotion.table.tolist() == Wrappers(made).promotion.table.tolist()
    assert not any(isinstance(value, torch.Tensor) and value.numel() > 100 for value in vars(promotion).values())
    assert promotion._kept == ((), None)
    Ops(cache()).promote()
    assert len(ops._promotions) == 2


def test_every_layout_has_its_id() -> None:
    for arch in ArchFamily:
        for fmt in BlockFormat:
            for dim in SUPPORTED_HEAD_DIMS:
                for padded in (False, True) if fmt is BlockFormat.MXFP4 else (False,):
                    layout = PageLayout(arch, fmt, dim, padded)
                    assert ops._layout(layout.layout_id) == layout


def replaced(arguments: tuple[Any, ...], **at: Any) -> list[Any]:
    changed = list(arguments)
    for index, value in at.items():
        changed[int(index[1:])] = value
    return changed


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("decode", {"_14": "v0-sm90"}, "layout: 'v0-sm90' is unknown; supported are v"),
        ("decode", {"_15": "w8"}, "arithmetic: 'w8' is unknown; use one of native, w16"),
        ("decode", {"_12": torch.zeros(3)}, "workspace_stats: expected contiguous torch.float32"),
        ("decode", {"_0": torch.zeros(2, 1, Q_HEADS, DIM)}, "query: expected torch.bfloat16"),
        ("control_step", {"_14": torch.zeros(3, dtype=torch.int64)}, r"counters: expected .* \[10\]"),
        ("control_step", {"_6": torch.ones(2, dtype=torch.int32)}, r"granule_values: expected .* \[1\]"),
        ("store_chunk", {"_10": torch.zeros(2)}, "factor_c, factor_d: both or neither"),
        ("promote_pages", {"_4": []}, None),
        ("promote_pages", {"_3": []}, "tails: expected those of 2 layers, got 0"),
        ("promote_pages", {"_6": [torch.zeros(KV_HEADS, DIM)]}, "key_means: expected those of 2 layers, got 1"),
        ("promote_pages", {"_2": [], "_3": [], "_4": [], "_6": []}, "pages: expected those of at least one layer"),
    ],
)
def test_bad_arguments_are_refused_by_name(name: str, change: dict[str, Any], message: str | None) -> None:
    arguments = replaced(arguments_of(name, cache()), **change)
    if message is None:
        getattr(ops, name)(*arguments)
        return
    with pytest.raises(InvalidInputError, match=message):
        getattr(ops, name)(*arguments)
