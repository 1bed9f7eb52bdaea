"""The paged cache on CUDA kernels: the counterpart of `PageStore` and `TorchBackend` for GPUs that have kernels.

Layers with the same sliding window form a `KernelGroup`: one block table, one set of slots, one control launch before
the group's first layer and one promotion launch behind its last. The host knows the lengths, as it made the steps; the
kernels read everything from the device, and nothing waits for it.
"""

from collections.abc import Sequence
from itertools import chain

import torch

from bitdecoding.cache.codec import LayerCodec
from bitdecoding.cache.paged import CacheMemory, checked_step
from bitdecoding.calibration.data import LayerCalibration
from bitdecoding.errors import InvalidInputError, UnsupportedError
from bitdecoding.kernels.buffers import MODEL_DTYPES, TAIL_TOKENS, LayerBuffers
from bitdecoding.kernels.compile import require_compiler, require_cuda
from bitdecoding.kernels.control import SlotTables, StepPlan, control_step
from bitdecoding.kernels.decode import DecodeArithmetic, DecodePlan, DecodeWorkspace, decode
from bitdecoding.kernels.gather import gather
from bitdecoding.kernels.layout import SUPPORTED_HEAD_DIMS, ArchFamily, PageLayout
from bitdecoding.kernels.quantize import Promotion, QuantizeConfig, promote_pages, store_chunk
from bitdecoding.recipe import (
    MAX_DECODE_TOKENS,
    PAGE_SIZE,
    Arithmetic,
    KeyRounding,
    ProbabilityFormat,
    ProbabilityRule,
    QueryFormat,
    QuerySmoothing,
    Recipe,
    Rotation,
)
from bitdecoding.reference.causal import causal_attention
from bitdecoding.reference.vectorized import LogitRule

__all__ = ["KernelGroup", "KernelLayer", "check_kernels", "kernel_groups"]


def check_kernels(
    recipe: Recipe, head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[ArchFamily, Arithmetic]:
    """What kernels a cache would run on.

    Raises:
        UnsupportedError: names what no kernel knows: the device, the model's dtype, head_dim, or a part of the recipe.
    """
    require_cuda(device)
    require_compiler()
    family = ArchFamily.of_capability(*torch.cuda.get_device_capability(device))
    if dtype not in MODEL_DTYPES:
        raise UnsupportedError(f"dtype: kernels take bfloat16 and float16 models, got {dtype}")
    if head_dim not in SUPPORTED_HEAD_DIMS:
        supported = ", ".join(map(str, SUPPORTED_HEAD_DIMS))
        raise UnsupportedError(f"head_dim: no kernels for {head_dim}; supported are {supported}")
    blocks = recipe.kv_format.blocks
    if blocks is None:
        raise UnsupportedError(f"kv_format: no kernels for {recipe.kv_format.value}; supported are nvfp4 and mxfp4")
    modes = {
        (QueryFormat.BITS16, ProbabilityFormat.BITS16): Arithmetic.W16,
        (QueryFormat.DUAL_FP4, ProbabilityFormat.FP4): Arithmetic.NATIVE,
    }
    arithmetic = modes.get((recipe.query_format, recipe.probability_format))
    usual_rule = recipe.probability_rule in (None, ProbabilityRule.for_format(blocks)[0])
    if arithmetic is None or recipe.query_smoothing is not QuerySmoothing.NONE or not usual_rule:
        raise UnsupportedError(
            f"recipe: no kernel computes with the query and probabilities of {recipe.name}; supported are 16-bit ones "
            "(w16), and dual FP4 queries with FP4 probabilities under the default rule (native)"
        )
    QuantizeConfig.of_recipe(recipe, PageLayout(family, blocks, head_dim), dtype)
    return family, arithmetic


class KernelGroup:
    """Layers that share rows, block table, slots and steps.

    Args:
        recipe: how pages are stored and read.
        num_kv_heads, head_dim: of each layer.
        statistics: calibration of each layer, or None.
        names: of the layers, for messages.
        window: sliding window of all of them, or None.
        device, dtype: of the cache and the model.

    Attributes:
        layers: one `KernelLayer` a layer, to be stepped in this order.
        lengths: tokens of each row, those of a step in progress included.
    """

    def __init__(
        self,
        recipe: Recipe,
        num_kv_heads: int,
        head_dim: int,
        statistics: Sequence[LayerCalibration | None],
        names: Sequence[str],
        window: int | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        family, arithmetic = check_kernels(recipe, head_dim, dtype, device)
        assert recipe.kv_format.blocks is not None
        self.recipe = recipe
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.window = window
        self.device = torch.empty(0, device=device).device  # with its index, as tensors have it
        self.dtype = dtype
        self.layout = PageLayout(family, recipe.kv_format.blocks, head_dim)
        self.encoding = QuantizeConfig.of_recipe(recipe, self.layout, dtype)
        codecs = [LayerCodec(recipe, num_kv_heads, head_dim, s, device=self.device, dtype=dtype) for s in statistics]
        self.key_means = [codec.key_mean for codec in codecs]
        self.arithmetic = DecodeArithmetic(
            arithmetic, recipe.rotation is Rotation.HADAMARD, recipe.probability_c, codecs[0].tau
        )
        self.factors = None
        if recipe.key_rounding is KeyRounding.LDLQ:
            self.factors = [codec.ldlq_factors(s) for codec, s in zip(codecs, statistics, strict=True) if s is not None]
        self.layers = [KernelLayer(self, index, name) for index, name in enumerate(names)]
        self.buffers: list[LayerBuffers] = []
        self._blocks = _Blocks()
        self._plan: StepPlan | None = None
        self._workspaces: dict[int, DecodeWorkspace] = {}
        self.free()

    # --- Rows

    def free(self) -> None:
        """Forget all rows; the memory is kept for the next."""
        self.lengths: list[int] = []
        self.before: list[int] = []
        self._padding: list[int] = []
        self._step_tokens = 0
        self._appending = False
        self._layers_done = len(self.layers)
        self._blocks.free()
        if self._plan is not None:
            self._plan.tables.clear()

    def select_rows(self, rows: Sequence[int]) -> None:
        """Replace the rows by copies of these rows, which share full pages."""
        self._check_between_steps()
        if not self.lengths:
            return
        source = torch.tensor(rows, dtype=torch.int64, device=self.device)
        # States of the last step: slots in which the rows' tokens lie
        slots = self._slots.states[:, 2].long()[source].clamp(min=0)
        tails = [layer.tail[slots] for layer in self.buffers]
        self._blocks.select(rows)
        self.lengths = [self.lengths[row] for row in rows]
        self._reserve(len(rows))
        # Row i takes slot i, under the block of its newest token
        plan = self._slots
        tables = plan.tables
        tables.tail_of_block.fill_(-1)
        tables.tail_keys.fill_(-1)
        tables.tail_older_keys.fill_(-1)
        keys = [ids[(n - 1) // PAGE_SIZE] if n else -1 for ids, n in zip(self._blocks.rows, self.lengths, strict=True)]
        filled = [row for row, key in enumerate(keys) if key >= 0]
        key_tensor = torch.tensor([keys[row] for row in filled], dtype=torch.int32, device=self.device)
        slot_tensor = torch.tensor(filled, dtype=torch.int32, device=self.device)
        tables.tail_keys[slot_tensor.long()] = key_tensor
        tables.tail_of_block[key_tensor.long()] = slot_tensor
        for layer, tail in zip(self.buffers, tails, strict=True):
            layer.tail[: len(rows)] = tail
        plan.states[: len(rows), 2] = torch.arange(len(rows), dtype=torch.int32, device=self.device)
        self._send_rows()

    def memory(self) -> CacheMemory:
        """Bytes of the group's layers."""
        token = 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        page = self.num_kv_heads * (
            self.layout.page_bytes + (2 * self.head_dim if self.recipe.page_centered_keys else 0)
        )
        full = [n // PAGE_SIZE for n in self.lengths]
        pages = {block for ids, count in zip(self._blocks.rows, full, strict=True) for block in ids[:count]} - {-1}
        visible = [n if self.window is None else min(n, self.window) for n in self.lengths]
        layers = len(self.layers)
        tails = sum(layer.tail.nbytes for layer in self.buffers)
        sinks = sum(layer.sink.nbytes for layer in self.buffers if layer.sink is not None)
        return CacheMemory(
            tokens=sum(self.lengths),
            pages_used=layers * len(pages) * page,
            pages_allocated=layers * self._blocks.capacity * page,
            sink_used=layers * sum(count > 0 for count in full) * self.recipe.sink_tokens * token,
            sink_allocated=sinks,
            recent_used=layers * sum(n % PAGE_SIZE for n in self.lengths) * token,
            recent_allocated=tails,
            bf16=layers * sum(visible) * token,
        )

    # --- Steps

    def begin(self, layer: int, tokens: int, padding: list[int], appending: bool) -> None:
        """A layer takes its part in a step; the first one starts it. ``appending``: without attention.

        Raises:
            InvalidInputError: layers out of order, or another step than the layers before took.
        """
        if self._layers_done == len(self.layers):
            if layer != 0:
                raise InvalidInputError(
                    f"{self.layers[layer].name}: steps start with {self.layers[0].name}; layers are stepped in order"
                )
            self._appending = appending
            self._start(tokens, padding)
        elif layer != self._layers_done or tokens != self._step_tokens or appending != self._appending:
            raise InvalidInputError(
                f"{self.layers[layer].name}: the step of {self._step_tokens} tokens waits for "
                f"{self.layers[self._layers_done].name}; all layers take the same step, in order"
            )

    def _start(self, tokens: int, padding: list[int]) -> None:
        rows = len(padding)
        self.before = self.lengths or [0] * rows
        self.lengths = [n + tokens - pad for n, pad in zip(self.before, padding, strict=True)]
        self._step_tokens, self._padding = tokens, padding
        self._layers_done = 0
        # The last page stays even where the window has left it: its block leads to the row's slot
        seen = [0 if self.window is None else min(n - self.window + 1, n - 1) for n in self.before]
        self._blocks.cover(self.lengths, [max(0, position) // PAGE_SIZE for position in seen])
        self._reserve(rows)
        self._send_rows()
        starts = [0]
        for pad in padding:
            starts.append(starts[-1] + tokens - pad)
        self.query_start = torch.tensor(starts, dtype=torch.int32, device=self.device)
        control_step(self._slots, self._lengths, self.table, query_start=self.query_start)

    def end(self, layer: int) -> None:
        """A layer is done; behind the last one, pages that a decode step filled are quantized in all layers."""
        self._layers_done = layer + 1
        if self._layers_done == len(self.layers) and self.decoding:
            promote_pages(self._promotion, self.plan.rows, self.table)

    @property
    def decoding(self) -> bool:
        """Whether the step adds to a filled cache what the decode kernel takes."""
        few = self._step_tokens <= MAX_DECODE_TOKENS
        return few and any(self.before) and not any(self._padding) and not self._appending

    @property
    def plan(self) -> DecodePlan:
        """Of the step in progress."""
        rows = len(self.lengths)
        return DecodePlan(self._slots.rows(rows), self._slots.items(rows, self.window), self.table)

    @property
    def _slots(self) -> StepPlan:
        assert self._plan is not None  # made with the first rows
        return self._plan

    @property
    def step_tokens(self) -> int:
        """New tokens of the step in progress, padding included."""
        return self._step_tokens

    @property
    def padding(self) -> list[int]:
        """Of these, leading tokens of each row that are padding."""
        return self._padding

    def workspace(self, num_q_heads: int) -> DecodeWorkspace:
        """Memory for partial results of the step in progress, the same for all layers."""
        if num_q_heads not in self._workspaces:
            self._workspaces[num_q_heads] = DecodeWorkspace(
                self._slots.max_rows,
                num_q_heads,
                self.num_kv_heads,
                self.head_dim,
                device=self.device,
                max_tokens=MAX_DECODE_TOKENS,
            )
        return self._workspaces[num_q_heads]

    # --- Memory

    def _check_between_steps(self) -> None:
        if self._layers_done != len(self.layers):
            raise InvalidInputError(f"{self.layers[0].name}: a step is in progress; finish it in all layers first")

    def _reserve(self, rows: int) -> None:
        """Make room for so many rows and for the blocks handed out; what is cached stays."""
        slots = 0 if self._plan is None else self._plan.max_rows
        held = self.buffers[0].pages.shape[0] if self.buffers else 0
        if rows <= slots and self._blocks.capacity <= held:
            return
        slots, blocks = max(rows, slots), max(self._blocks.capacity, held)
        sink_tokens, centered = self.recipe.sink_tokens, self.recipe.page_centered_keys
        heads, dim = self.num_kv_heads, self.head_dim
        grown = []
        for index in range(len(self.layers)):
            old = self.buffers[index] if self.buffers else None
            pages, tail, sink, means = (None,) * 4 if old is None else (old.pages, old.tail, old.sink, old.means)
            grown.append(
                LayerBuffers(
                    self.layout,
                    self._grown(pages, (blocks, heads, self.layout.page_bytes), torch.uint8),
                    self._grown(tail, (slots, 2, heads, TAIL_TOKENS, dim), self.dtype),
                    self._grown(sink, (slots, 2, heads, sink_tokens, dim), self.dtype) if sink_tokens else None,
                    self._grown(means, (blocks, heads, dim), torch.bfloat16) if centered else None,
                    self.key_means[index],
                )
            )
        tables = SlotTables(blocks, slots, slots if sink_tokens else 0, self.device)
        plan = StepPlan(tables, slots, windows=(self.window,), sink_tokens=sink_tokens)
        if self._plan is not None:
            tables.take_over(self._plan.tables)
            plan.states[: self._plan.max_rows] = self._plan.states
        self._plan = plan
        self.buffers = grown
        self._promotion = Promotion(grown, self.encoding, self.factors)
        self._workspaces.clear()

    def _grown(self, old: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        new = torch.zeros(shape, dtype=dtype, device=self.device)
        if old is not None:
            new[: old.shape[0]] = old
        return new

    def _send_rows(self) -> None:
        """Lengths and block table to the device."""
        width = max(map(len, self._blocks.rows), default=0)
        # Blocks that slid out of the window are never read; any id will do
        padded = [[max(block, 0) for block in ids] + [0] * (width - len(ids)) for ids in self._blocks.rows]
        self.table = torch.tensor(padded, dtype=torch.int32, device=self.device).view(len(padded), width)
        self._lengths = torch.tensor(self.lengths, dtype=torch.int32, device=self.device)


class _Blocks:
    """Blocks of each row, in order, -1 where one slid out of the window; and those that are free."""

    def __init__(self) -> None:
        self.capacity = 0
        self.rows: list[list[int]] = []
        self._free: list[int] = []

    def free(self) -> None:
        self.rows = []
        self._free = [*reversed(range(self.capacity))]

    def cover(self, lengths: Sequence[int], first_pages: Sequence[int]) -> None:
        """Give rows blocks up to these lengths, and take back those before ``first_pages``."""
        if not self.rows:
            self.rows = [[] for _ in lengths]
        dropped = False
        for ids, first in zip(self.rows, first_pages, strict=True):
            gone = min(first, len(ids))
            dropped = dropped or any(block >= 0 for block in ids[:gone])
            ids[:gone] = [-1] * gone
        if dropped:
            self._collect()
        for ids, length in zip(self.rows, lengths, strict=True):
            for _ in range(-(-length // PAGE_SIZE) - len(ids)):
                ids.append(self._take())

    def select(self, rows: Sequence[int]) -> None:
        """Rows become copies of these. A block that is not full yet belongs to one row only."""
        self.rows = [list(self.rows[row]) for row in rows]
        self._collect()
        seen: set[int] = set()
        for ids in self.rows:
            if ids and ids[-1] in seen:
                ids[-1] = self._take()
            seen.update(ids[-1:])

    def _collect(self) -> None:
        used = set(chain.from_iterable(self.rows))
        self._free = [block for block in reversed(range(self.capacity)) if block not in used]

    def _take(self) -> int:
        if not self._free:
            grown = max(8, 2 * self.capacity)
            self._free = [*reversed(range(self.capacity, grown))]
            self.capacity = grown
        return self._free.pop()


class KernelLayer:
    """One layer of a `KernelGroup`, with the interface of `PagedLayer`, whose ``store`` it is as well."""

    def __init__(self, group: KernelGroup, index: int, name: str) -> None:
        self.name = name
        self._group = group
        self._index = index

    @property
    def store(self) -> "KernelLayer":
        """What the layer remembers."""
        return self

    @property
    def lengths(self) -> list[int]:
        """Cached tokens of each row, as this layer has seen them."""
        group = self._group
        return list(group.lengths if self._index < group._layers_done else group.before)

    @property
    def num_rows(self) -> int:
        """Rows in the cache; 0 before the first step."""
        return len(self.lengths)

    @property
    def window(self) -> int | None:
        """Sliding window in tokens, or None."""
        return self._group.window

    def select_rows(self, rows: Sequence[int]) -> None:
        """As `PageStore.select_rows`, for all layers of the group at once: the group's first layer does it."""
        if self._index == 0:
            self._group.select_rows(rows)

    def free(self) -> None:
        """Forget all rows, in all layers of the group at once: the group's first layer does it."""
        if self._index == 0:
            self._group.free()

    def memory(self) -> CacheMemory:
        """Bytes of the group, told by its first layer; nothing by the others."""
        return self._group.memory() if self._index == 0 else CacheMemory()

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        logits: LogitRule,
        padding: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """One step, as `PagedLayer.attend`. NaN and Inf are not looked for: they stay in their row.

        Raises:
            InvalidInputError: wrong shapes, dtype, number of rows or padding, or a layer out of its turn.
        """
        padding = self._check(q, keys, values, padding)
        group = self._group
        group.begin(self._index, q.shape[-2], padding, appending=False)
        if group.decoding:
            output = self._decode(q, keys, values, logits)
        elif any(group.before):
            output = self._attend_context(q, keys, values, logits)
            self._store(keys, values)
        else:
            padded = torch.tensor(padding, device=q.device) if any(padding) else None
            output = causal_attention(q, keys, values, logits, window=group.window, padding=padded)
            self._store(keys, values)
        group.end(self._index)
        return output

    def append(self, keys: torch.Tensor, values: torch.Tensor, padding: Sequence[int] | None = None) -> None:
        """Cache tokens without computing attention; arguments and errors as for `attend`."""
        padding = self._check(None, keys, values, padding)
        group = self._group
        group.begin(self._index, keys.shape[-2], padding, appending=True)
        self._store(keys, values)
        group.end(self._index)

    def _decode(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, logits: LogitRule) -> torch.Tensor:
        group = self._group
        output = decode(
            _token_major(q),
            _token_major(keys),
            _token_major(values),
            group.buffers[self._index],
            group.plan,
            group.workspace(q.shape[1]),
            logits,
            group.arithmetic,
            window=group.window,
        )
        return output.transpose(1, 2)

    def _attend_context(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, logits: LogitRule
    ) -> torch.Tensor:
        """A chunk of a prefill: ordinary attention over all cached tokens, back in 16 bits, and the new ones."""
        group = self._group
        rows, heads, tokens, dim = keys.shape
        before = group.before
        context = max(before)
        # Rows end together: shorter ones have padding in front
        shape = (rows, context + tokens, heads, dim)
        all_keys, all_values = (torch.zeros(shape, dtype=keys.dtype, device=keys.device) for _ in range(2))
        starts = [row * (context + tokens) + context - n for row, n in enumerate(before)]
        gather(
            group.buffers[self._index],
            group.plan.rows,
            group.table,
            torch.tensor([*starts, rows * (context + tokens)], dtype=torch.int64, device=keys.device),
            all_keys.flatten(0, 1),
            all_values.flatten(0, 1),
            rotate=group.arithmetic.rotate,
        )
        all_keys[:, context:] = keys.transpose(1, 2)
        all_values[:, context:] = values.transpose(1, 2)
        padded = [context - n + pad for n, pad in zip(before, group.padding, strict=True)]
        return causal_attention(
            q,
            all_keys.transpose(1, 2),
            all_values.transpose(1, 2),
            logits,
            window=group.window,
            padding=torch.tensor(padded, device=q.device) if any(padded) else None,
        )

    def _store(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        group = self._group
        store_chunk(
            group.buffers[self._index],
            group.encoding,
            group.plan.rows,
            group.table,
            self._new_tokens(keys),
            self._new_tokens(values),
            group.query_start,
            group.step_tokens - min(group.padding),
            factors=None if group.factors is None else group.factors[self._index],
        )

    def _new_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, heads, tokens, dim] as one list of tokens [tokens of all rows, heads, dim], padding left out."""
        by_token = _token_major(x)
        if any(self._group.padding):
            return torch.cat([row[pad:] for row, pad in zip(by_token, self._group.padding, strict=True)])
        return by_token.flatten(0, 1)

    def _check(
        self, q: torch.Tensor | None, keys: torch.Tensor, values: torch.Tensor, padding: Sequence[int] | None
    ) -> list[int]:
        group = self._group
        padding = checked_step(self.name, q, keys, values, padding, self.lengths, (group.num_kv_heads, group.head_dim))
        for name, tensor in (("queries", q), ("keys", keys), ("values", values)):
            if tensor is not None and (tensor.dtype != group.dtype or tensor.device != group.device):
                raise InvalidInputError(
                    f"{self.name}: {name} must be {group.dtype} on {group.device}, got {tensor.dtype} on "
                    f"{tensor.device}"
                )
        return padding


def _token_major(x: torch.Tensor) -> torch.Tensor:
    """[rows, heads, tokens, dim] as [rows, tokens, heads, dim] that kernels can read, without a copy where possible."""
    by_token = x.transpose(1, 2)
    strides = by_token.stride()
    aligned = strides[-1] == 1 and not any(s % 8 for s in strides[:-1]) and by_token.data_ptr() % 16 == 0
    return by_token if aligned else by_token.contiguous()


def kernel_groups(
    recipe: Recipe,
    num_kv_heads: int,
    head_dim: int,
    statistics: Sequence[LayerCalibration | None],
    windows: Sequence[int | None],
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> list[KernelLayer]:
    """The layers of a model, those with the same window in one group.

    Raises:
        UnsupportedError: as `check_kernels`.
    """
    layers: dict[int, KernelLayer] = {}
    for window in dict.fromkeys(windows):
        members = [i for i, other in enumerate(windows) if other == window]
        group = KernelGroup(
            recipe,
            num_kv_heads,
            head_dim,
            [statistics[i] for i in members],
            [f"layer {i}" for i in members],
            window,
            device=device,
            dtype=dtype,
        )
        layers.update(zip(members, group.layers, strict=True))
    return [layers[i] for i in range(len(windows))]
