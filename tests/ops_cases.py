"""A small cache of some layers, stepped by the kernels' wrappers or by the custom ops of `bitdecoding.kernels.ops`."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from bitdecoding import get_recipe
from bitdecoding.kernels import ops
from bitdecoding.kernels.buffers import TAIL_TOKENS, LayerBuffers
from bitdecoding.kernels.control import SlotTables, StepPlan, control_step
from bitdecoding.kernels.decode import DecodeArithmetic, DecodePlan, DecodeWorkspace, decode
from bitdecoding.kernels.gather import gather
from bitdecoding.kernels.layout import ArchFamily, PageLayout
from bitdecoding.kernels.quantize import Promotion, QuantizeConfig, promote_pages, store_chunk
from bitdecoding.numerics.ldlq import LdlqFactors
from bitdecoding.recipe import PAGE_SIZE, Arithmetic
from bitdecoding.reference.vectorized import LogitRule

KV_HEADS, Q_HEADS, DIM = 2, 8, 64
SCALE = DIM**-0.5
TABLE_NAMES = (
    *("tail_of_block", "tail_keys", "tail_older_keys", "tail_stamps"),
    *("sink_of_block", "sink_keys", "sink_stamps", "counters"),
)


class Cache:
    """Layers whose rows can grow to ``max_length`` tokens, and everything that a step needs.

    The same arguments make the same cache.
    """

    def __init__(
        self, rows: int, layers: int = 3, recipe: str = "bitdecoding-nvfp4", max_length: int = 512, device: str = "cuda"
    ) -> None:
        generator = torch.Generator(device=device).manual_seed(0)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        self.recipe = get_recipe(recipe)
        family = ArchFamily.SM90
        if device == "cuda":
            family = ArchFamily.of_capability(*torch.cuda.get_device_capability())
        assert self.recipe.kv_format.blocks is not None
        self.layout = PageLayout(family, self.recipe.kv_format.blocks, DIM)
        self.config = QuantizeConfig.of_recipe(self.recipe, self.layout, torch.bfloat16)
        width = max_length // PAGE_SIZE + 1
        blocks = rows * width + 1
        sink_tokens = self.recipe.sink_tokens
        self.block_table = (torch.randperm(blocks - 1, generator=generator, device=device) + 1).to(torch.int32)
        self.block_table = self.block_table.view(rows, width)
        # All layers in one tensor, as engines keep them: each layer's part is a view
        size = (layers, rows, 2, KV_HEADS)
        self.pages = torch.zeros(layers, blocks, KV_HEADS, self.layout.page_bytes, dtype=torch.uint8, device=device)
        self.tail = torch.zeros(*size, TAIL_TOKENS, DIM, dtype=torch.bfloat16, device=device)
        self.sink = torch.zeros(*size, sink_tokens, DIM, dtype=torch.bfloat16, device=device)
        self.means = torch.zeros(layers, blocks, KV_HEADS, DIM, dtype=torch.bfloat16, device=device)
        centered = self.config.centered
        self.layers = [
            LayerBuffers(
                self.layout,
                self.pages[i],
                self.tail[i],
                self.sink[i],
                self.means[i] if centered else None,
                randn(KV_HEADS, DIM),
            )
            for i in range(layers)
        ]
        self.factors = None
        if self.config.ldlq:
            self.factors = [
                LdlqFactors((randn(KV_HEADS, DIM, DIM) * 0.05).triu(1), randn(KV_HEADS, DIM).square() + 0.5)
                for _ in range(layers)
            ]
        self.tables = SlotTables(blocks, rows, rows, device)
        self.plan = StepPlan(self.tables, rows, sink_tokens=sink_tokens)
        self.workspace = DecodeWorkspace(rows, Q_HEADS, KV_HEADS, DIM, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=device)

    @property
    def memory(self) -> dict[str, torch.Tensor]:
        """All that steps write to."""
        return {
            **{name: getattr(self, name) for name in ("pages", "tail", "sink", "means", "lengths")},
            **{name: getattr(self.tables, name) for name in TABLE_NAMES},
            "states": self.plan.states,
            "item_prefix": self.plan.item_prefix,
        }


class Wrappers:
    """Steps by the wrappers."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.promotion = Promotion(cache.layers, cache.config, cache.factors)

    def control(self, query_start: torch.Tensor | None = None) -> None:
        cache = self.cache
        control_step(cache.plan, cache.lengths, cache.block_table, query_start=query_start)

    def decode(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        cache, rows = self.cache, len(q)
        plan = DecodePlan(cache.plan.rows(rows), cache.plan.items(rows), cache.block_table)
        logits, arithmetic = LogitRule(SCALE, None), DecodeArithmetic(Arithmetic.W16)
        return decode(q, k, v, cache.layers[layer], plan, cache.workspace, logits, arithmetic)

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor, start: torch.Tensor, most: int) -> None:
        cache = self.cache
        factors = None if cache.factors is None else cache.factors[layer]
        states = cache.plan.rows(len(start) - 1)
        store_chunk(cache.layers[layer], cache.config, states, cache.block_table, k, v, start, most, factors=factors)

    def promote(self) -> None:
        promote_pages(self.promotion, self.cache.plan.rows(len(self.cache.lengths)), self.cache.block_table)

    def gather(self, layer: int, start: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        cache = self.cache
        gather(cache.layers[layer], cache.plan.rows(len(start) - 1), cache.block_table, start, keys, values)


class Ops:
    """The same steps by the custom ops."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache

    def control_arguments(self, query_start: torch.Tensor | None = None) -> tuple[Any, ...]:
        cache, plan = self.cache, self.cache.plan
        tables = [getattr(cache.tables, name) for name in TABLE_NAMES]
        results = (plan.states, plan.item_prefix, plan.window_values, plan.granule_values)
        return (cache.lengths, cache.block_table, query_start, *results, *tables, plan.sink_tokens)

    def decode_arguments(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Any, ...]:
        cache, b, rows = self.cache, self.cache.layers[layer], len(q)
        return (
            *(q, k, v, b.pages, b.tail, b.sink, b.means, b.key_mean),
            *(cache.plan.states[:rows], cache.plan.item_prefix[0, : rows + 1], cache.block_table),
            *(cache.workspace.output, cache.workspace.stats, cache.workspace.arrived),
            *(cache.layout.layout_id, "w16", SCALE),
        )

    def store_arguments(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, start: torch.Tensor, most: int
    ) -> tuple[Any, ...]:
        cache, b = self.cache, self.cache.layers[layer]
        factors: Sequence[torch.Tensor | None] = (None, None) if cache.factors is None else cache.factors[layer]
        return (
            *(k, v, start, cache.plan.states, cache.block_table),
            *(b.pages, b.tail, b.sink, b.means, b.key_mean, *factors, cache.layout.layout_id, most),
        )

    def promote_arguments(self) -> tuple[Any, ...]:
        cache, layers = self.cache, self.cache.layers
        return (
            *(cache.plan.states, cache.block_table, [b.pages for b in layers], [b.tail for b in layers]),
            *([b.sink for b in layers], [b.means for b in layers if b.means is not None]),
            *([b.key_mean for b in layers], [f.c for f in cache.factors or ()], [f.d for f in cache.factors or ()]),
            cache.layout.layout_id,
        )

    def gather_arguments(
        self, layer: int, start: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[Any, ...]:
        cache, b = self.cache, self.cache.layers[layer]
        of_layer = (b.pages, b.tail, b.sink, b.means, b.key_mean)
        return (keys, values, cache.plan.states, cache.block_table, start, None, *of_layer, cache.layout.layout_id)

    def control(self, query_start: torch.Tensor | None = None) -> None:
        ops.control_step(*self.control_arguments(query_start))

    def decode(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ops.decode(*self.decode_arguments(layer, q, k, v))

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor, start: torch.Tensor, most: int) -> None:
        ops.store_chunk(*self.store_arguments(layer, k, v, start, most))

    def promote(self) -> None:
        ops.promote_pages(*self.promote_arguments())

    def gather(self, layer: int, start: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        ops.gather(*self.gather_arguments(layer, start, keys, values))


def step_inputs(rows: int, layers: int, seed: int, device: str = "cuda") -> SimpleNamespace:
    """Post-RoPE q, k and v of a step, [layers, rows, 1, heads, head_dim]."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def randn(heads: int) -> torch.Tensor:
        return torch.randn(layers, rows, 1, heads, DIM, generator=generator, device=device).to(torch.bfloat16)

    return SimpleNamespace(q=randn(Q_HEADS), k=randn(KV_HEADS), v=randn(KV_HEADS))


def decode_step(steps: Wrappers | Ops, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """A whole decode step: one more token a row."""
    steps.cache.lengths.add_(1)
    steps.control()
    outputs = [steps.decode(layer, q[layer], k[layer], v[layer]) for layer in range(len(q))]
    steps.promote()
    return outputs


def prefill(steps: Wrappers | Ops, lengths: Sequence[int], seed: int = 0) -> None:
    """Store the rows' first tokens."""
    cache = steps.cache
    device = cache.lengths.device
    cache.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
    start = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)
    steps.control(start)
    generator = torch.Generator(device=device).manual_seed(seed)
    for layer in range(len(cache.layers)):
        k, v = torch.randn(2, sum(lengths), KV_HEADS, DIM, generator=generator, device=device).to(torch.bfloat16)
        steps.store(layer, k, v, start, max(lengths))
