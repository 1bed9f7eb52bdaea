"""Time the kernels, and their peers in the same run, on one GPU and write every row to one JSON file.

    python benchmarks/kernels.py [--must-show] [--only REGEX] [--output benchmarks/results/h200-kernels.json]

Times are medians over replays of a CUDA graph. Each call in a graph reads the cache of another layer, as many layers
as it takes to exceed the L2 cache several times, so that no row runs from it. A row that fails says why in its `error`.
The measuring process is a child: when a kernel hangs or breaks the CUDA context, that row is noted, and a new child
goes on behind it. `benchmarks/kernels_plots.py` draws the results. ``--compile`` compiles what a run needs into the
library's cache folder and measures nothing; it needs no GPU.
"""

import argparse
import datetime
import gc
import importlib
import importlib.metadata
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

# This folder would make this file the package `kernels` that transformers looks for
if str(Path(__file__).resolve().parent) in sys.path:
    sys.path.remove(str(Path(__file__).resolve().parent))

import torch

from bitdecoding import BitDecodingError, __version__
from bitdecoding.kernels.buffers import TAIL_TOKENS, LayerBuffers
from bitdecoding.kernels.compile import arch_of_capability, compile_kernel
from bitdecoding.kernels.control import SlotTables, StepPlan, control_step
from bitdecoding.kernels.decode import DecodeArithmetic, DecodePlan, DecodeWorkspace, decode
from bitdecoding.kernels.decode_config import DecodeConfig, DecodeShape, choose_config, choose_shape
from bitdecoding.kernels.gather import gather
from bitdecoding.kernels.layout import ArchFamily, PageLayout
from bitdecoding.kernels.quantize import Promotion, QuantizeConfig, promote_pages, store_chunk
from bitdecoding.kernels.schedule import RowUnits, items_of_row, units_of_row
from bitdecoding.numerics.blocks import BlockFormat
from bitdecoding.numerics.ldlq import LdlqFactors
from bitdecoding.recipe import PAGE_SIZE, SINK_TOKENS, Arithmetic, get_recipe
from bitdecoding.reference.vectorized import LogitRule

try:  # comes with torch where there is a GPU
    import triton
    import triton.language as tl
except ImportError:
    triton = None

Call = Callable[[], object]
Row = dict[str, Any]

DEFAULT_OUTPUT = Path(__file__).parent / "results" / "h200-kernels.json"
COLUMNS = (
    *("kernel", "kv_format", "mode", "batch", "num_q_heads", "num_kv_heads", "head_dim", "context"),
    *("us", "tb_per_s", "pct_of_read", "speedup_vs_best_bf16"),
    *("model", "q_len", "plus", "schedule", "note", "error"),
)
OTHER_KERNELS = ("step_overhead", "quantize", "gather")
KEY_COLUMNS = (*COLUMNS[:8], "q_len", "plus")
"""What tells rows apart."""

DEVICE = "cuda"
RECENT_TOKENS = 64  # half a page, the average of a running request; the step's new tokens included
STEP_LAYERS = 36
DTYPE_BYTES = 2
K, M = 1 << 10, 1 << 20
ROTATED_BYTES = 512 * M
MAX_LAYERS = 512
SCALE_BYTES = {BlockFormat.NVFP4: (0x30, 0x48), BlockFormat.MXFP4: (120, 130)}
"""First and last scale byte of random pages: 0.5 to 4, and 2^-7 to 2^3."""


# --- What is measured


@dataclass(frozen=True)
class Shape:
    """Attention heads of a model."""

    model: str
    q_heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Point:
    """A decode step: ``batch`` rows with ``context`` cached tokens each."""

    shape: Shape
    batch: int
    context: int
    q_len: int = 1


@dataclass(frozen=True)
class Variant:
    """A kernel of ours."""

    kv_format: BlockFormat = BlockFormat.NVFP4
    mode: str = "w16"
    plus: bool = False


@dataclass(frozen=True)
class Group:
    """Decode rows of one point; beside them all peers, or only the BF16 ones that speed-ups need."""

    point: Point
    variants: tuple[Variant, ...]
    all_peers: bool = False


QWEN3_4B = Shape("Qwen3-4B", 32, 8, 128)
QWEN3_30B = Shape("Qwen3-30B-A3B", 32, 4, 128)
HEAD_DIM_64 = Shape("32 heads of 64", 32, 8, 64)
HEAD_DIM_256 = Shape("16 heads of 256", 16, 8, 256)

NVFP4, MXFP4 = BlockFormat.NVFP4, BlockFormat.MXFP4
PLAIN, PLUS = Variant(NVFP4), Variant(NVFP4, plus=True)
BOTH_FORMATS = (PLAIN, Variant(MXFP4))
WITH_NATIVE = (*BOTH_FORMATS, Variant(NVFP4, "native"))
MUST_SHOW_VARIANTS = (*WITH_NATIVE, PLUS)
OVERHEAD_POINT = Point(QWEN3_4B, 1, 8 * K)
APPEND_POINT = Point(QWEN3_4B, 1, PAGE_SIZE)
CONVERTED_TOKENS = 128 * K


def must_show_groups() -> list[Group]:
    """Issue 3's table of targets; the largest cache first, whose memory serves all others."""
    points = [
        *(Point(QWEN3_4B, batch, 128 * K) for batch in (64, 16, 1)),
        Point(QWEN3_4B, 1, 8 * K),
        Point(QWEN3_30B, 64, 128 * K),
    ]
    return [Group(point, MUST_SHOW_VARIANTS, all_peers=True) for point in points]


def other_groups() -> list[Group]:
    """The rest of a run."""
    shown = {group.point for group in must_show_groups()}
    main = [Point(QWEN3_4B, batch, context) for context in (8 * K, 32 * K, 128 * K, K) for batch in (1, 16, 64)]
    rest = (Variant(MXFP4, "native"), Variant(MXFP4, plus=True))
    return [
        *(Group(Point(QWEN3_4B, batch, context), rest) for batch, context in ((1, 128 * K), (16, 128 * K), (1, 8 * K))),
        *(Group(point, (PLAIN,)) for point in main if point not in shown),
        Group(Point(QWEN3_30B, 1, 128 * K), WITH_NATIVE),
        Group(Point(QWEN3_30B, 16, 8 * K), WITH_NATIVE),
        *(Group(Point(shape, b, 32 * K), BOTH_FORMATS) for shape in (HEAD_DIM_64, HEAD_DIM_256) for b in (1, 16)),
        Group(Point(QWEN3_4B, 1, M), (PLAIN,)),
    ]


def query_bytes(point: Point) -> int:
    """Of the query and of the output."""
    return 2 * DTYPE_BYTES * point.batch * point.q_len * point.shape.q_heads * point.shape.head_dim


def decode_bytes(point: Point, variant: Variant) -> int:
    """What our decode kernel must read and write: pages, page means, 16-bit sink and recent tokens, q and out."""
    shape = point.shape
    in_16bit = (SINK_TOKENS + RECENT_TOKENS) * token_bytes(shape)
    of_row = pages_bytes(shape, point.context, variant) + shape.kv_heads * in_16bit
    return point.batch * of_row + query_bytes(point)


def pages_bytes(shape: Shape, tokens: int, variant: Variant) -> int:
    """Of pages, with their means, of one sequence in one layer."""
    page = page_layout(shape, variant.kv_format).page_bytes + variant.plus * DTYPE_BYTES * shape.head_dim
    return tokens // PAGE_SIZE * shape.kv_heads * page


def token_bytes(shape: Shape) -> int:
    """Of 16-bit keys and values of one token and KV head."""
    return 2 * DTYPE_BYTES * shape.head_dim


def conversion_bytes(shape: Shape, tokens: int, variant: Variant) -> int:
    """Moved between pages and 16-bit keys and values."""
    return pages_bytes(shape, tokens, variant) + tokens * shape.kv_heads * token_bytes(shape)


def contiguous_bytes(point: Point, bits: float) -> int:
    """Of a cache with so many bits a number, q and out."""
    shape = point.shape
    return int(point.batch * shape.kv_heads * point.context * 2 * shape.head_dim * bits / 8) + query_bytes(point)


def page_layout(shape: Shape, kv_format: BlockFormat) -> PageLayout:
    """Pages as this GPU reads them; as Hopper does where there is none."""
    family = ArchFamily.SM90
    if torch.cuda.is_available():
        family = ArchFamily.of_capability(*torch.cuda.get_device_capability())
    return PageLayout(family, kv_format, shape.head_dim)


def layers_for(bytes_of_layer: int) -> int:
    """How many layers to go round, so that none is still in the L2 cache at its next turn."""
    return max(1, min(MAX_LAYERS, math.ceil(ROTATED_BYTES / bytes_of_layer)))


# --- Buffers of our kernels, filled with random valid bytes


class Pool:
    """Random memory that cases use in turn: allocating and filling it for each of them takes longer than timing them.

    Args:
        dtype: of its elements.
        fill: writes random numbers into a new piece of memory.
    """

    def __init__(self, dtype: torch.dtype, fill: Callable[[torch.Tensor], object]) -> None:
        self._dtype = dtype
        self._fill = fill
        self._memory: dict[str, torch.Tensor] = {}

    def take(self, *shape: int, device: str) -> torch.Tensor:
        """A tensor at the start of the memory, good until the next call."""
        size = math.prod(shape)
        if device not in self._memory or self._memory[device].numel() < size:
            self._memory.pop(device, None)
            self._memory[device] = torch.empty(-(-size // 8) * 8, dtype=self._dtype, device=device)
            self._fill(self._memory[device])
        return self._memory[device][:size].view(shape)


RANDOM_BYTES = Pool(torch.uint8, lambda memory: memory.view(torch.int64).random_(-(2**63), None))
RANDOM_16BIT = Pool(torch.bfloat16, torch.Tensor.normal_)


@dataclass
class DecodeBuffers:
    """Everything that decode steps of one point need; every row has the same lengths.

    Attributes:
        layout: of the pages.
        q, k_new, v_new: BF16 [batch, q_len, heads, head_dim].
        pages: uint8 [layers, blocks, kv_heads, page_bytes], in memory that the next case overwrites.
        means: BF16 [layers, blocks, kv_heads, head_dim], for page-centred keys.
        tail: BF16 [layers, batch, 2, kv_heads, 136, head_dim]; row i has slot i.
        sink: BF16 [layers, batch, 2, kv_heads, 16, head_dim]; row i has slot i.
        block_table: int32 [batch, pages + 2], distinct blocks in random order; two pages of room to promote into.
        state: int32 [batch, 8], as the control kernel leaves it.
        item_prefix: int32 [batch + 1], as the control kernel leaves it with granule 1.
        lengths: int32 [batch], cached tokens at the end of the step.
        key_mean: fp32 [kv_heads, head_dim], of smoothed keys.
        units: of work of a row and KV head.
    """

    layout: PageLayout
    q: torch.Tensor
    k_new: torch.Tensor
    v_new: torch.Tensor
    pages: torch.Tensor
    means: torch.Tensor | None
    tail: torch.Tensor
    sink: torch.Tensor
    block_table: torch.Tensor
    state: torch.Tensor
    item_prefix: torch.Tensor
    lengths: torch.Tensor
    key_mean: torch.Tensor
    units: RowUnits

    @property
    def layers(self) -> int:
        """How many layers' caches there are."""
        return self.pages.shape[0]


def fill_scales(pages: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """Write finite, ordinary scales into random bytes [..., page_bytes]."""
    first, last = SCALE_BYTES[layout.block_format]
    for section in (layout.key_scales, layout.value_scales):
        pages[..., section.slice].random_(first, last + 1)
    return pages


def random_16bit(*shape: int) -> torch.Tensor:
    """BF16, standard normal."""
    return torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_()


def decode_buffers(point: Point, variant: Variant, layers: int) -> DecodeBuffers:
    """Buffers of `point` after `context` tokens in pages and `RECENT_TOKENS` in 16 bits, the new ones among them."""
    shape, batch = point.shape, point.batch
    layout = page_layout(shape, variant.kv_format)
    width = point.context // PAGE_SIZE + 2
    blocks = batch * width
    new = (batch, point.q_len, shape.kv_heads, shape.head_dim)
    length = point.context + RECENT_TOKENS
    units = units_of_row(length, length - point.q_len, True, None, SINK_TOKENS)
    state = torch.zeros((batch, 8), dtype=torch.int32, device=DEVICE)
    rows = torch.arange(batch, dtype=torch.int32, device=DEVICE)
    state[:, 0], state[:, 1], state[:, 4] = length, length - point.q_len, -1
    state[:, 2] = state[:, 3] = rows
    pages = RANDOM_BYTES.take(layers, blocks, shape.kv_heads, layout.page_bytes, device=DEVICE)
    return DecodeBuffers(
        layout=layout,
        q=random_16bit(batch, point.q_len, shape.q_heads, shape.head_dim),
        k_new=random_16bit(*new),
        v_new=random_16bit(*new),
        pages=fill_scales(pages, layout),
        means=random_16bit(layers, blocks, shape.kv_heads, shape.head_dim) if variant.plus else None,
        tail=random_16bit(layers, batch, 2, shape.kv_heads, TAIL_TOKENS, shape.head_dim),
        sink=random_16bit(layers, batch, 2, shape.kv_heads, SINK_TOKENS, shape.head_dim),
        block_table=torch.randperm(blocks, device=DEVICE).to(torch.int32).view(batch, width),
        state=state,
        item_prefix=items_of_row(units, 1) * torch.arange(batch + 1, dtype=torch.int32, device=DEVICE),
        lengths=state[:, 0].contiguous(),
        key_mean=random_16bit(shape.kv_heads, shape.head_dim).float(),
        units=units,
    )


# --- Adapters: the only calls into our kernels


def compiled_decode(point: Point, variant: Variant) -> tuple[DecodeShape, DecodeConfig]:
    """The instance of the decode kernel that `decode` takes."""
    shape = point.shape
    query_rows = shape.q_heads // shape.kv_heads * point.q_len
    compiled = choose_shape(
        page_layout(shape, variant.kv_format),
        Arithmetic(variant.mode),
        centered=variant.plus,
        rotate=True,
        capped=False,
        bf16=True,
        query_rows=query_rows,
    )
    return compiled, choose_config(compiled, point.batch * shape.kv_heads * -(-query_rows // compiled.columns))


def compile_all(groups: Sequence[Group]) -> None:
    """Compile what most rows need, all at a time, into the folder that launches look into; for Hopper without a GPU."""
    arch = arch_of_capability(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else "sm_90a"
    jobs: list[tuple[str, Mapping[str, int]]] = [("control.cu", {})]
    jobs += [("quantize.cu", quantize_config(QWEN3_4B, variant).defines) for variant in (PLAIN, PLUS)]
    for group in groups:
        for variant in group.variants:
            shape, config = compiled_decode(group.point, variant)
            jobs.append(("decode.cu", config.defines(shape)))
    different = {json.dumps(job): job for job in jobs}.values()

    def run(job: tuple[str, Mapping[str, int]]) -> None:
        source, defines = job
        try:
            compile_kernel(source, arch, defines)
        except BitDecodingError as error:  # the row that needs it will say so
            print(one_line(error), file=sys.stderr)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(run, different))


def decode_calls(point: Point, variant: Variant, b: DecodeBuffers) -> list[Call]:
    """One decode call for each layer.

    All layers share one plan, made beforehand, as in a decode step: the calls do what a step does once a layer, append
    and query rotation included.
    """
    shape = point.shape
    plan = DecodePlan(b.state, b.item_prefix, b.block_table)
    workspace = DecodeWorkspace(
        point.batch, shape.q_heads, shape.kv_heads, shape.head_dim, device=DEVICE, max_tokens=point.q_len
    )
    logits = LogitRule(shape.head_dim**-0.5, None)
    arithmetic = DecodeArithmetic(Arithmetic(variant.mode))
    out = torch.empty_like(b.q)

    def call_of(buffers: LayerBuffers) -> Call:
        return lambda: decode(b.q, b.k_new, b.v_new, buffers, plan, workspace, logits, arithmetic, output=out)

    return [call_of(buffers) for buffers in layer_buffers(b)]


def make_decode_case(point: Point, variant: Variant, layers: int) -> tuple[list[Call], str]:
    """One decode call for each of ``layers`` layers, and the schedule in words."""
    b = decode_buffers(point, variant, layers)
    _, config = compiled_decode(point, variant)
    schedule = (
        f"{config.min_ctas} CTAs of {config.threads} threads an SM, {config.slots} slots, {b.units.total} units a row"
    )
    return decode_calls(point, variant, b), schedule


def layer_buffers(b: DecodeBuffers) -> list[LayerBuffers]:
    """The kernels' view of each layer."""
    return [
        LayerBuffers(b.layout, b.pages[i], b.tail[i], b.sink[i], None if b.means is None else b.means[i], b.key_mean)
        for i in range(b.layers)
    ]


def quantize_config(shape: Shape, variant: Variant) -> QuantizeConfig:
    """The kernel of the paper's recipe, or of its ``plus`` preset."""
    recipe = get_recipe(f"bitdecoding-{variant.kv_format.value}{'-plus' if variant.plus else ''}")
    return QuantizeConfig.of_recipe(recipe, page_layout(shape, variant.kv_format), torch.bfloat16)


def ldlq_factors_of(shape: Shape) -> LdlqFactors:
    """Made-up LDLQ factors: a small strictly upper triangular feed-forward, weights of about 1."""
    heads, dim = shape.kv_heads, shape.head_dim
    c = torch.randn(heads, dim, dim, device=DEVICE).mul_(0.02).triu_(1)
    return LdlqFactors(c, torch.rand(heads, dim, device=DEVICE) + 0.5)


def make_step_calls(point: Point, variant: Variant, layers: int) -> dict[str, list[Call]]:
    """What a decode step of ``layers`` layers launches besides attention, each call a step: control and promotion.

    "128 steps": consecutive steps, in the last of which every row fills a page; "no page fills": those before it;
    "pages fill": that step alone, again and again (its row then claims a tail slot, which it has otherwise).
    """
    b = decode_buffers(point, variant, layers)
    config = quantize_config(point.shape, variant)
    factors = [ldlq_factors_of(point.shape)] * layers if config.ldlq else None
    promotion = Promotion(layer_buffers(b), config, factors)
    tables = SlotTables(point.batch * b.block_table.shape[1], point.batch, point.batch, DEVICE)
    plan = StepPlan(tables, point.batch, sink_tokens=SINK_TOKENS)
    after = torch.arange(1, PAGE_SIZE + 1, dtype=torch.int32, device=DEVICE)[:, None]
    lengths = (point.context + after).expand(-1, point.batch).contiguous()

    def step(index: int) -> Call:
        def call() -> None:
            control_step(plan, lengths[index], b.block_table)
            promote_pages(promotion, plan.rows(point.batch), b.block_table)

        return call

    steps = [step(index) for index in range(PAGE_SIZE)]
    return {"128 steps": steps, "no page fills": steps[:-1], "pages fill": steps[-1:]}


def make_append_calls(point: Point, variant: Variant, layers: int) -> dict[str, list[Call]]:
    """Decode calls of all layers as they are, and without the append.

    A row whose tokens all are of before the step has nothing to append, and reads its newest token from the ring: the
    same work otherwise. The control kernel never leaves such a row.
    """
    b = decode_buffers(point, variant, layers)
    state = b.state.clone()
    state[:, 1] = state[:, 0]
    return {"with": decode_calls(point, variant, b), "without": decode_calls(point, variant, replace(b, state=state))}


def make_quantize(shape: Shape, tokens: int, variant: Variant) -> list[Call]:
    """Quantize ``tokens`` tokens of one new sequence into pages, K and V being slices of a fused QKV output."""
    config, heads, dim = quantize_config(shape, variant), shape.kv_heads, shape.head_dim
    pages = tokens // PAGE_SIZE
    qkv = RANDOM_16BIT.take(tokens, shape.q_heads + 2 * heads, dim, device=DEVICE)
    k, v = qkv[:, -2 * heads : -heads], qkv[:, -heads:]
    buffers = LayerBuffers(
        config.layout,
        torch.empty((pages, heads, config.layout.page_bytes), dtype=torch.uint8, device=DEVICE),
        random_16bit(1, 2, heads, TAIL_TOKENS, dim),
        random_16bit(1, 2, heads, SINK_TOKENS, dim),
        random_16bit(pages, heads, dim) if variant.plus else None,
        random_16bit(heads, dim).float(),
    )
    factors = ldlq_factors_of(shape) if config.ldlq else None
    # length, before, tail slot, sink slot to read and to fill
    rows = torch.tensor([[tokens, 0, 0, -1, 0, 0, 0, 0]], dtype=torch.int32, device=DEVICE)
    table = torch.randperm(pages, device=DEVICE).to(torch.int32).view(1, pages)
    start = torch.tensor([0, tokens], dtype=torch.int32, device=DEVICE)
    return [lambda: store_chunk(buffers, config, rows, table, k, v, start, tokens, factors=factors)]


def make_gather(shape: Shape, tokens: int, variant: Variant) -> list[Call]:
    """Dequantize ``tokens`` cached tokens of one sequence to 16-bit K and V."""
    b = decode_buffers(Point(shape, 1, tokens), variant, 1)
    (buffers,) = layer_buffers(b)
    rows = torch.tensor([[tokens + 1, tokens, 0, 0, -1, 0, 0, 0]], dtype=torch.int32, device=DEVICE)
    start = torch.tensor([0, tokens], dtype=torch.int32, device=DEVICE)
    keys, values = torch.empty((2, tokens, shape.kv_heads, shape.head_dim), dtype=torch.bfloat16, device=DEVICE)
    return [lambda: gather(buffers, rows, b.block_table, start, keys, values)]


# --- Peers


@dataclass(frozen=True)
class Peer:
    """A kernel of others."""

    kernel: str
    kv_format: str
    bits: float  # a number of the cache, scales included
    make: Callable[[Point, int], list[Call]]
    baseline: bool = False  # what speed-ups at every point are over


def sdpa_calls(backend: str) -> Callable[[Point, int], list[Call]]:
    """Torch's attention over contiguous K and V, without a mask."""

    def make(point: Point, layers: int) -> list[Call]:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        shape, chosen = point.shape, getattr(SDPBackend, backend)
        q = random_16bit(point.batch, shape.q_heads, point.q_len, shape.head_dim)
        cache = (layers, point.batch, shape.kv_heads, point.context, shape.head_dim)
        k, v = RANDOM_16BIT.take(2, *cache, device=DEVICE)

        def call_of(layer: int) -> Call:
            def call() -> torch.Tensor:
                with sdpa_kernel(chosen):
                    return scaled_dot_product_attention(q, k[layer], v[layer], enable_gqa=True)

            return call

        return [call_of(layer) for layer in range(layers)]

    return make


def flashinfer_calls(backend: str, kv_format: str) -> Callable[[Point, int], list[Call]]:
    """FlashInfer's decode over a paged cache."""

    def make(point: Point, layers: int) -> list[Call]:
        flashinfer = importlib.import_module("flashinfer")
        shape, batch, page = point.shape, point.batch, 64
        if point.q_len != 1:
            raise ValueError("not timed with several query tokens")
        width = point.context // page
        blocks = batch * width
        size = (layers, blocks, page, shape.kv_heads)
        q = random_16bit(batch, shape.q_heads, shape.head_dim)
        indices = torch.randperm(blocks, device=DEVICE).to(torch.int32)
        caches: Sequence[torch.Tensor]
        scales: list[torch.Tensor] = []
        if kv_format == "nvfp4":
            caches = [
                torch.empty((*size, shape.head_dim // 2), dtype=torch.uint8, device=DEVICE).random_(0, 256)
                for _ in range(2)
            ]
            scales = [
                torch.empty((*size, shape.head_dim // 16), dtype=torch.uint8, device=DEVICE).random_(0x30, 0x49)
                for _ in range(2)
            ]
        elif kv_format == "fp8":  # 0x00..0x47: finite, up to 3.75
            caches = [
                torch.empty((*size, shape.head_dim), dtype=torch.uint8, device=DEVICE)
                .random_(0, 0x48)
                .view(torch.float8_e4m3fn)
                for _ in range(2)
            ]
        else:
            caches = RANDOM_16BIT.take(2, *size, shape.head_dim, device=DEVICE).unbind()
        workspace = torch.zeros(256 * M, dtype=torch.uint8, device=DEVICE)

        if backend == "xqa":
            table = indices.view(batch, width)
            lengths = torch.full((batch,), point.context, dtype=torch.int32, device=DEVICE)
            out = torch.empty_like(q)

            def xqa_of(layer: int) -> Call:
                return lambda: flashinfer.decode.xqa_batch_decode_with_kv_cache(
                    query=q,
                    kv_cache=(caches[0][layer], caches[1][layer]),
                    workspace_buffer=workspace,
                    block_tables=table,
                    seq_lens=lengths,
                    max_seq_len=point.context,
                    bmm1_scale=shape.head_dim**-0.5,
                    bmm2_scale=1.0,
                    out=out,
                    kv_layout="NHD",
                )

            return [xqa_of(layer) for layer in range(layers)]

        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=True, backend=backend
        )
        wrapper.plan(
            torch.arange(0, blocks + 1, width, dtype=torch.int32, device=DEVICE),
            indices,
            torch.full((batch,), page, dtype=torch.int32, device=DEVICE),
            shape.q_heads,
            shape.kv_heads,
            shape.head_dim,
            page,
            q_data_type=q.dtype,
            kv_data_type=caches[0].dtype,
        )

        def fa2_of(layer: int) -> Call:
            extra: dict[str, Any] = {}
            if scales:
                extra = {"kv_cache_sf": tuple(s[layer].view(torch.float8_e4m3fn) for s in scales)}
                extra |= {"k_scale": 1.0, "v_scale": 1.0}
            return lambda: wrapper.run(q, (caches[0][layer], caches[1][layer]), **extra)

        return [fa2_of(layer) for layer in range(layers)]

    return make


def peers() -> list[Peer]:
    """The peers that are installed."""
    found = [
        Peer("torch SDPA cuDNN", "bf16", 16, sdpa_calls("CUDNN_ATTENTION"), baseline=True),
        Peer("torch SDPA flash", "bf16", 16, sdpa_calls("FLASH_ATTENTION"), baseline=True),
    ]
    if version_of("flashinfer-python") != NOT_INSTALLED:
        for backend, kv_format, bits in (
            ("fa2", "bf16", 16),
            ("xqa", "bf16", 16),
            ("xqa", "fp8", 8),
            ("fa2", "nvfp4", 4.5),
        ):
            found.append(Peer(f"FlashInfer {backend}", kv_format, bits, flashinfer_calls(backend, kv_format)))
    return found


# --- Timing

SECONDS_OF_ROW = 0.1
GRAPH_US = 1000.0
MAX_CALLS_OF_GRAPH = 1024
SLEEP_CYCLES = 1_000_000  # half a millisecond, in which the host gets ahead
PEAK_BYTES_PER_US = 4.8e6  # H200, data sheet


def calls_of_graph(calls: int, expected_us: float) -> int:
    """How often to go round ``calls`` in one graph, so that it runs long enough for its launch not to count."""
    rounds = math.ceil(GRAPH_US / (max(expected_us, 2.0) * calls))
    return max(1, min(rounds, MAX_CALLS_OF_GRAPH // calls))


def replays(graph_us: float) -> int:
    """How many replays to take the median of."""
    return max(10, min(30, round(SECONDS_OF_ROW * 1e6 / graph_us)))


def time_calls(calls: Sequence[Call], expected_us: float) -> float:
    """Microseconds of one call: the median over replays of a graph of all calls, one after the other."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in (calls[0], calls[0], calls[-1]):  # compiles, and makes plans
            call()
        stream.synchronize()
        rounds = calls_of_graph(len(calls), expected_us)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(rounds):
                for call in calls:
                    call()

        def replay() -> tuple[torch.cuda.Event, torch.cuda.Event]:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(SLEEP_CYCLES)  # the host's launch of the graph must not count
            start.record()
            graph.replay()
            end.record()
            return start, end

        replay()
        start, end = replay()
        stream.synchronize()
        events = [replay() for _ in range(replays(start.elapsed_time(end) * 1e3))]
        stream.synchronize()
    times = sorted(start.elapsed_time(end) * 1e3 for start, end in events)
    return times[len(times) // 2] / (rounds * len(calls))


if triton is not None:

    @triton.jit
    def _read_kernel(data: Any, sums: Any, BLOCK: tl.constexpr) -> None:
        program = tl.program_id(0)
        values = tl.load(data + program * BLOCK + tl.arange(0, BLOCK))
        tl.store(sums + program, tl.sum(values))


def read_bandwidth() -> tuple[float, str]:
    """TB/s of the fastest of several ways to read 4 GiB, and its name."""
    data = torch.empty(1 << 30, dtype=torch.int32, device=DEVICE)
    data.view(torch.uint8).random_(0, 256)
    size = data.numel() * data.element_size()
    found = {}

    def note(name: str, call: Call) -> None:
        try:
            found[name] = size / time_calls([call], size / PEAK_BYTES_PER_US) / 1e6
        except Exception as error:
            print(f"plain read, {name}: {one_line(error)}", file=sys.stderr)

    note("torch.sum", lambda: data.sum(dtype=torch.int32))
    if triton is not None:
        for block, warps in ((4096, 4), (8192, 4), (8192, 8), (16384, 8), (16384, 16)):
            programs = data.numel() // block
            sums = torch.empty(programs, dtype=torch.int32, device=DEVICE)

            def read(block: int = block, warps: int = warps, sums: torch.Tensor = sums) -> None:
                _read_kernel[(len(sums),)](data, sums, BLOCK=block, num_warps=warps)

            note(f"Triton, {4 * block // K} KiB and {warps} warps a program", read)
    name = max(found, key=lambda key: found[key])
    return found[name], name


def copy_bandwidth() -> float:
    """TB/s, counting bytes read and bytes written."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device=DEVICE).random_(0, 256)
    target = torch.empty_like(source)
    size = 2 * source.numel()
    return size / time_calls([lambda: target.copy_(source)], size / PEAK_BYTES_PER_US) / 1e6


# --- Rows


def new_row(shape: Shape, **fields: Any) -> Row:
    """A row with all columns, in their order."""
    row = dict.fromkeys(COLUMNS)
    row |= {
        "model": shape.model,
        "num_q_heads": shape.q_heads,
        "num_kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "q_len": 1,
        "plus": False,
    }
    unknown = fields.keys() - row.keys()
    if unknown:
        raise KeyError(f"no such columns: {sorted(unknown)}")
    return row | fields


def point_row(point: Point, **fields: Any) -> Row:
    """A row of a decode step."""
    return new_row(point.shape, batch=point.batch, context=point.context, q_len=point.q_len, **fields)


def variant_fields(variant: Variant) -> Row:
    """Columns of a kernel of ours."""
    return {"kv_format": variant.kv_format.value, "mode": variant.mode, "plus": variant.plus}


def row_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells the row apart."""
    return tuple(row[column] for column in KEY_COLUMNS)


def short(tokens: int) -> str:
    """131072 as 128K."""
    for unit, name in ((M, "M"), (K, "K")):
        if tokens % unit == 0:
            return f"{tokens // unit}{name}"
    return str(tokens)


def row_label(row: Mapping[str, Any]) -> str:
    """One row in words; what ``--only`` is matched against."""
    parts = [row["kernel"], row["kv_format"], row["mode"], "plus" if row["plus"] else None, row["model"]]
    parts += [f"batch {row['batch']}", short(row["context"]), f"q_len {row['q_len']}" if row["q_len"] > 1 else None]
    return " ".join(str(part) for part in parts if part is not None)


def fill_speedups(rows: Sequence[Row]) -> None:
    """Compare decode rows with the fastest BF16 kernel at the same point."""
    columns = ("batch", "num_q_heads", "num_kv_heads", "head_dim", "context", "q_len")
    best: dict[tuple[Any, ...], float] = {}
    decoding = [row for row in rows if row["us"] is not None and row["kernel"] not in OTHER_KERNELS]
    for row in decoding:
        if row["kv_format"] == "bf16":
            point = tuple(row[column] for column in columns)
            best[point] = min(row["us"], best.get(point, math.inf))
    for row in decoding:
        point = tuple(row[column] for column in columns)
        row["speedup_vs_best_bf16"] = round(best[point] / row["us"], 3) if point in best else None


def one_line(error: BaseException) -> str:
    """What went wrong, without a machine's paths."""
    text = " ".join(str(error).split())
    text = re.sub(r"(?<![\w.])/(?:[\w.@+-]+/)+", "", text)
    return f"{type(error).__name__}: {text}"[:300]


class Recorder:
    """The results file: rows are added as they come and written after every group.

    Args:
        path: of the file; rows that it holds are not measured again.
        deadline: time.time() after which rows are only noted as skipped.
    """

    def __init__(self, path: Path, deadline: float = math.inf) -> None:
        self._path = path
        self.deadline = deadline
        self._lock = threading.Lock()
        self.result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"rows": []}
        self._done = {row_key(row) for row in self.rows}

    @property
    def rows(self) -> list[Row]:
        """All rows so far."""
        return self.result["rows"]

    def has(self, row: Row) -> bool:
        """Whether this row is there, measured or failed."""
        return row_key(row) in self._done

    def add(self, row: Row) -> None:
        """Take a row in and show it."""
        with self._lock:
            self.rows.append(row)
            self._done.add(row_key(row))
        figures = f"{row['us']:10.2f} us" if row["us"] is not None else row["error"]
        if row["tb_per_s"] is not None:
            figures += f"  {row['tb_per_s']:.3f} TB/s  {row['pct_of_read']:5.1f} %"
        print(f"{row_label(row):62s} {figures}", flush=True)

    def save(self) -> None:
        """Compare and write; never leaves half a file."""
        with self._lock:
            fill_speedups(self.rows)
            partial = self._path.with_suffix(".partial")
            partial.write_text(format_result(self.result))
            partial.replace(self._path)


def format_result(result: Mapping[str, Any]) -> str:
    """JSON with one row a line."""
    above = {key: value for key, value in result.items() if key != "rows"}
    text = json.dumps({**above, "rows": []}, indent=1).removesuffix("[]\n}")
    rows = ",\n".join("  " + json.dumps(row) for row in result["rows"])
    return f"{text}[\n{rows}\n ]\n}}\n"


# --- Run

RESTART = 75  # exit status: a new process shall go on
MAX_RESTARTS = 12
SECONDS_UNTIL_HUNG = 75.0


@contextmanager
def watchdog(recorder: Recorder, row: Row) -> Iterator[None]:
    """Give up the process when the row takes too long; a hung kernel cannot be stopped otherwise."""

    def give_up() -> None:
        recorder.add({**row, "error": f"no result after {SECONDS_UNTIL_HUNG:.0f} s"})
        recorder.save()
        os._exit(RESTART)

    timer = threading.Timer(SECONDS_UNTIL_HUNG, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def device_works() -> bool:
    """Whether the CUDA context is still of use after an error."""
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            data = torch.zeros(1024, device=DEVICE)
            data += 1  # loads the kernel, which must not happen in the capture
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                data += 1
            graph.replay()
            return float(data.sum()) == 2048
    except Exception:
        return False


def attempt(recorder: Recorder, row: Row, measure: Callable[[], Row]) -> None:
    """Measure one row, or note why there is none."""
    if recorder.has(row):
        return
    if time.time() > recorder.deadline:
        recorder.add({**row, "error": "skipped: the time budget was used up"})
        return
    with watchdog(recorder, row):
        try:
            row = row | measure()
        except Exception as error:
            row["error"] = one_line(error)
    recorder.add(row)
    if row["error"] is not None:
        torch.cuda.empty_cache()
        if not device_works():
            recorder.save()
            sys.stdout.flush()
            os._exit(RESTART)


@dataclass
class Driver:
    """Measures groups of rows whose labels match ``only``."""

    recorder: Recorder
    only: str

    @property
    def read_tb_per_s(self) -> float:
        """Of this run."""
        return self.recorder.result["plain_read_tb_per_s"]

    @cached_property
    def peers(self) -> list[Peer]:
        """Installed ones."""
        return peers()

    def wanted(self, row: Row) -> bool:
        """Whether the row is among those asked for."""
        return re.search(self.only, row_label(row)) is not None

    def timed(self, calls: Sequence[Call], size: int) -> Row:
        """Columns of a kernel that moves ``size`` bytes."""
        us = time_calls(calls, size / PEAK_BYTES_PER_US)
        rate = size / us / 1e6
        percent = round(100 * rate / self.read_tb_per_s, 2)
        return {"us": round(us, 3), "tb_per_s": round(rate, 4), "pct_of_read": percent}

    def ours(self, point: Point, variant: Variant) -> Row:
        size = decode_bytes(point, variant)
        calls, schedule = make_decode_case(point, variant, layers_for(size))
        return {**self.timed(calls, size), "schedule": schedule or None}

    def peer(self, point: Point, peer: Peer) -> Row:
        size = contiguous_bytes(point, peer.bits)
        layers = layers_for(size)
        needed, there = size * layers, torch.cuda.mem_get_info()[1]
        if needed > 0.7 * there:
            raise MemoryError(f"K and V need {needed / 1e9:.0f} GB, the GPU has {there / 1e9:.0f} GB")
        return self.timed(peer.make(point, layers), size)

    def decode_group(self, group: Group) -> None:
        """One point: our kernels and, if any of them is asked for, the group's peers."""
        point, peers = group.point, [peer for peer in self.peers if group.all_peers or peer.baseline]
        ours = [(v, point_row(point, kernel="bitdecoding", **variant_fields(v))) for v in group.variants]
        others = [(p, point_row(point, kernel=p.kernel, kv_format=p.kv_format, mode="peer")) for p in peers]
        ours = [(variant, row) for variant, row in ours if self.wanted(row)]
        if not ours:
            others = [(peer, row) for peer, row in others if self.wanted(row)]
        for peer, row in others:
            attempt(self.recorder, row, partial(self.peer, point, peer))
        for variant, row in ours:
            attempt(self.recorder, row, partial(self.ours, point, variant))
        if ours or others:
            self.finish(f"batch {point.batch}, {short(point.context)}, {point.shape.model}")

    def finish(self, group: str) -> None:
        """Note the clock that the GPU has after a group, and write the file."""
        if state := gpu_state():
            self.recorder.result.setdefault("gpu_state", []).append({"after": group, **state})
        self.recorder.save()

    def overhead_group(self, variant: Variant) -> None:
        """What a step adds besides attention."""

        def step(name: str) -> Row:
            return {"us": round(time_calls(make_step_calls(OVERHEAD_POINT, variant, STEP_LAYERS)[name], 10.0), 3)}

        def everything() -> Row:
            us = step("128 steps")["us"]
            calls = make_append_calls(APPEND_POINT, variant, STEP_LAYERS)
            append = STEP_LAYERS * (time_calls(calls["with"], 5.0) - time_calls(calls["without"], 5.0))
            note = (
                f"control and promotion {us:.2f} us, the mean of 128 consecutive steps, in one of which every row fills"
                f" a page; append {append:.2f} us: part of the decode kernel, timed as {STEP_LAYERS} times what the"
                f" decode of a row of {APPEND_POINT.context + RECENT_TOKENS} tokens takes longer than without it"
            )
            return {"us": round(us + append, 3), "note": note}

        measures: dict[str, tuple[Callable[[], Row], str | None]] = {
            "control+promotion+append": (everything, None),
            "control+promotion, no page fills": (partial(step, "no page fills"), "127 of 128 steps"),
            "control+promotion, pages fill": (partial(step, "pages fill"), "1 of 128 steps"),
        }
        for mode, (measure, note) in measures.items():
            fields = {**variant_fields(variant), "mode": mode, "schedule": f"{STEP_LAYERS} layers", "note": note}
            row = point_row(OVERHEAD_POINT, kernel="step_overhead", **fields)
            if self.wanted(row):
                attempt(self.recorder, row, measure)
        self.finish("step overhead")

    def conversion(
        self, make: Callable[[Shape, int, Variant], list[Call]], shape: Shape, tokens: int, variant: Variant, size: int
    ) -> Row:
        return self.timed(make(shape, tokens, variant), size)

    def conversion_group(self, shape: Shape, tokens: int, variants: Sequence[Variant]) -> None:
        """Quantize and gather one layer of one sequence."""
        makers = {"quantize": make_quantize, "gather": make_gather}
        for kernel, make in makers.items():
            for variant in variants:
                size = conversion_bytes(shape, tokens, variant)
                fields = {**variant_fields(variant), "mode": "to pages" if kernel == "quantize" else "to 16 bits"}
                row = new_row(shape, kernel=kernel, batch=1, context=tokens, **fields)
                if self.wanted(row):
                    attempt(self.recorder, row, partial(self.conversion, make, shape, tokens, variant, size))
        self.finish("quantize and gather")

    def run(self, must_show: bool) -> None:
        """Everything, the most important first."""
        for group in must_show_groups():
            self.decode_group(group)
        for variant in (PLAIN, PLUS):
            self.overhead_group(variant)
        if must_show:
            return
        self.conversion_group(QWEN3_4B, CONVERTED_TOKENS, (PLAIN, PLUS))
        for group in other_groups():
            self.decode_group(group)


NOT_INSTALLED = "not installed"


def version_of(package: str) -> str:
    """Of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED


def query_gpu(fields: str, timeout: float) -> list[str]:
    """What nvidia-smi says about the first GPU; empty where it does not work."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    return [value.strip() for value in lines[0].split(",")] if lines else []


_NO_GPU_STATE: list[str] = []


def gpu_state() -> Row:
    """Clock of the multiprocessors and power, right now; empty for good once it did not work."""
    if _NO_GPU_STATE:
        return {}
    try:
        clock, power = query_gpu("clocks.sm,power.draw", 2.0)
        return {"sm_mhz": float(clock), "power_w": float(power)}
    except ValueError as error:
        _NO_GPU_STATE.append(one_line(error))
        return {}


def header(command: str) -> dict[str, Any]:
    """Where and how the rows were measured."""
    read, how = read_bandwidth()
    return {
        "date": datetime.date.today().isoformat(),
        "command": command,
        "gpu": torch.cuda.get_device_name(),
        "driver": "".join(query_gpu("driver_version", 20.0)) or "unknown",
        "versions": {
            "bitdecoding-fp4": __version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "triton": version_of("triton"),
            "flashinfer": version_of("flashinfer-python"),
        },
        "plain_read_tb_per_s": round(read, 4),
        "plain_read_by": how,
        "copy_tb_per_s": round(copy_bandwidth(), 4),
        "recent_tokens": RECENT_TOKENS,
        "sink_tokens": SINK_TOKENS,
        "gpu_state": [],
    }


def measure(args: argparse.Namespace, command: str) -> None:
    """The child process."""
    recorder = Recorder(args.output, args.deadline)
    if not args.only:
        compile_all([*must_show_groups(), *(() if args.must_show else other_groups())])
    gc.freeze()  # every capture collects garbage, and need not look at torch's own objects
    if "gpu" not in recorder.result:
        recorder.result = {**header(command), "rows": []}
        recorder.save()
        print(f"plain read {recorder.result['plain_read_tb_per_s']} TB/s by {recorder.result['plain_read_by']}")
        print(f"copy {recorder.result['copy_tb_per_s']} TB/s", flush=True)
    Driver(recorder, args.only).run(args.must_show)


def supervise(args: argparse.Namespace) -> int:
    """Start children until one gets to the end; the exit status."""
    args.output.parent.mkdir(parents=True, exist_ok=True)
    if args.resume and args.output.exists():
        recorder = Recorder(args.output)
        recorder.rows[:] = [row for row in recorder.rows if row["error"] is None]
        recorder.save()
    else:
        args.output.unlink(missing_ok=True)
    deadline = time.time() + args.budget
    for _ in range(MAX_RESTARTS):
        child = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--deadline", str(deadline)], check=False)
        if child.returncode != RESTART:
            return child.returncode
        print("the CUDA context was lost; a new process goes on", flush=True)
    print(f"given up after {MAX_RESTARTS} lost contexts")
    return 1


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    parser.add_argument("--must-show", action="store_true", help="the rows with targets only")
    parser.add_argument("--only", default="", help="regular expression that labels of rows must match")
    parser.add_argument("--resume", action="store_true", help="keep the rows that OUTPUT has, except failed ones")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds after which rows are skipped")
    parser.add_argument("--compile", action="store_true", help="compile only")
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile:
        compile_all([*must_show_groups(), *other_groups()])
        return
    if args.deadline is None:
        sys.exit(supervise(args))
    must_show, only = " --must-show" if args.must_show else "", f" --only '{args.only}'" if args.only else ""
    measure(args, f"python benchmarks/kernels.py{must_show}{only}")


if __name__ == "__main__":
    main()
