"""A model's KV cache in pages of encoded tokens, with the first and the newest tokens kept in 16 bits.

The parts, from storage to model:

- `PagePool` and `BlockTable` hold the encoded pages of one layer and say which belong to which row.
- `PageStore` is all that one layer remembers: pages, sink, recent tokens, lengths. It knows no numerics.
- `PageBackend` encodes full pages and computes attention over a store; `TorchBackend` does so in plain PyTorch.
- `PagedLayer` takes one layer through a step: append, attention, promotion of the pages that became full.
- `PagedFP4Cache` has the layers of a model.

A row is one sequence of the batch. Its positions count from its first real token, so that pages of a row in a
left-padded batch are those of the row alone. Pages never change once written: rows may share them.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import ClassVar, NamedTuple, Protocol

import torch

from bitdecoding.cache.codec import LayerCodec, kept_dtype
from bitdecoding.cache.formats import EncodedPages
from bitdecoding.calibration.data import Calibration, LayerCalibration
from bitdecoding.errors import CalibrationError, InvalidInputError, UnsupportedError
from bitdecoding.names import Choice
from bitdecoding.numerics.blocks import BlockFormat
from bitdecoding.numerics.validation import check_finite, check_fits
from bitdecoding.recipe import MAX_DECODE_TOKENS, PAGE_SIZE, Arithmetic, KeyRounding, KVFormat, Recipe, ValueBlocks
from bitdecoding.reference.causal import causal_attention
from bitdecoding.reference.vectorized import (
    LogitRule,
    Partial,
    bits16_partial,
    bits16_visible,
    combine_partials,
    page_partial,
    page_visible,
)

__all__ = [
    "Backend",
    "BlockTable",
    "CacheLayer",
    "CacheMemory",
    "EncodedKeysValues",
    "PageBackend",
    "PagePool",
    "PageStore",
    "PagedFP4Cache",
    "PagedLayer",
    "RowStore",
    "TorchBackend",
    "checked_step",
]

_ENCODED_AT_ONCE = 64
"""Pages encoded at a time; bounds the fp32 copies."""
_DECODED_ELEMENTS = 1 << 25
"""Keys (and as many values) decoded at a time, in whole rows; bounds the fp32 copies."""
_SCORE_ELEMENTS = 1 << 24
"""Scores computed at a time, in whole query tokens."""
_NVFP4_MAX = 2688.0
_E4M3_MAX_BYTE = 0x7E


@dataclass(frozen=True)
class CacheMemory:
    """Bytes of a cache, keys and values together.

    ``*_used`` counts what cached tokens take, ``*_allocated`` what the tensors do; pages that rows share count once.

    Attributes:
        tokens: cached tokens, summed over rows; the same tokens in all layers count once.
        pages_used, pages_allocated: codes, scales and, with page-centred keys, means.
        sink_used, sink_allocated: first tokens, 16-bit.
        recent_used, recent_allocated: newest tokens, 16-bit.
        bf16: what a BF16 cache needs for these rows; of a sliding layer only the tokens in the window.
    """

    tokens: int = 0
    pages_used: int = 0
    pages_allocated: int = 0
    sink_used: int = 0
    sink_allocated: int = 0
    recent_used: int = 0
    recent_allocated: int = 0
    bf16: int = 0

    @property
    def used(self) -> int:
        """Bytes in use."""
        return self.pages_used + self.sink_used + self.recent_used

    @property
    def allocated(self) -> int:
        """Bytes allocated."""
        return self.pages_allocated + self.sink_allocated + self.recent_allocated

    @property
    def bytes_per_token(self) -> float:
        """Bytes in use a token over all layers; 0 for an empty cache."""
        return self.used / self.tokens if self.tokens else 0.0

    def __str__(self) -> str:
        mib = 2**20
        smaller = f", {self.bf16 / self.used:.2f} times as much" if self.used else ""
        return (
            f"{self.tokens} tokens: {self.used / mib:.2f} MiB used ({self.allocated / mib:.2f} allocated), "
            f"{self.bytes_per_token:.0f} B a token; BF16 needs {self.bf16 / mib:.2f} MiB{smaller}"
        )

    @classmethod
    def of_layers(cls, layers: Sequence["CacheMemory"]) -> "CacheMemory":
        """Sum over the layers of a model."""
        totals = {field.name: sum(getattr(layer, field.name) for layer in layers) for field in fields(cls)}
        return cls(**{**totals, "tokens": max((layer.tokens for layer in layers), default=0)})


class EncodedKeysValues(NamedTuple):
    """Encoded pages of keys and of values: tensors whose first two dims are pages and heads."""

    keys: EncodedPages
    values: EncodedPages


class PagePool:
    """Encoded pages of one layer under stable ids; grows by doubling. The first pages tell the tensors' shapes."""

    def __init__(self) -> None:
        self.keys: EncodedPages = {}
        self.values: EncodedPages = {}
        self.capacity = 0
        self._free: list[int] = []

    @property
    def num_used(self) -> int:
        """Pages that hold tokens."""
        return self.capacity - len(self._free)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, keys and values, all heads."""
        if not self.capacity:
            return 0
        return sum(t.nbytes for t in chain(self.keys.values(), self.values.values())) // self.capacity

    def store(self, pages: EncodedKeysValues) -> list[int]:
        """Keep pages; returns their ids."""
        count = next(iter(pages.keys.values())).shape[0]
        if count > len(self._free):
            self._grow(max(2 * self.capacity, self.num_used + count), pages)
        ids = [self._free.pop() for _ in range(count)]
        for held, new in ((self.keys, pages.keys), (self.values, pages.values)):
            for name, tensor in new.items():
                held[name][torch.tensor(ids, device=tensor.device)] = tensor
        return ids

    def _grow(self, capacity: int, like: EncodedKeysValues) -> None:
        for held, new in ((self.keys, like.keys), (self.values, like.values)):
            for name, tensor in new.items():
                grown = tensor.new_zeros((capacity, *tensor.shape[1:]))
                if name in held:
                    grown[: self.capacity] = held[name]
                held[name] = grown
        self._free = [*reversed(range(self.capacity, capacity)), *self._free]
        self.capacity = capacity

    def gather(self, ids: torch.Tensor) -> EncodedKeysValues:
        """Copies of the pages with these ids, int64 [pages]."""
        keys = {name: tensor[ids] for name, tensor in self.keys.items()}
        return EncodedKeysValues(keys, {name: tensor[ids] for name, tensor in self.values.items()})

    def keep_only(self, ids: set[int]) -> None:
        """Give back all pages but these."""
        self._free = [page for page in reversed(range(self.capacity)) if page not in ids]


class BlockTable:
    """Ids of each row's pages in order. The host's lists lead; `tensor` is their copy on the device."""

    GONE = -1
    """Stands for a page that slid out of the row's window."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._rows: list[list[int]] = [[] for _ in range(rows)]
        self._device = device
        self._tensor: torch.Tensor | None = None

    def num_pages(self, row: int) -> int:
        """Pages of a row, those gone included."""
        return len(self._rows[row])

    def num_gone(self, row: int) -> int:
        """Leading pages of a row that are gone."""
        return self._rows[row].count(self.GONE)

    def used(self) -> set[int]:
        """Ids that some row refers to."""
        return set(chain.from_iterable(self._rows)) - {self.GONE}

    def extend(self, row: int, ids: Sequence[int]) -> None:
        """Append pages to a row."""
        self._rows[row].extend(ids)
        self._tensor = None

    def drop_before(self, row: int, page: int) -> bool:
        """Mark a row's pages before ``page`` as gone; whether any was not yet."""
        page = min(page, len(self._rows[row]))
        # Pages go in order: the last one tells whether any is left.
        if page == 0 or self._rows[row][page - 1] == self.GONE:
            return False
        self._rows[row][:page] = [self.GONE] * page
        self._tensor = None
        return True

    def select(self, rows: Sequence[int]) -> None:
        """Replace the rows by copies of these rows, which share the pages."""
        self._rows = [list(self._rows[row]) for row in rows]
        self._tensor = None

    def tensor(self) -> torch.Tensor:
        """Int64 [rows, most pages of a row], `GONE` where a row has no page."""
        if self._tensor is None:
            width = max(map(len, self._rows), default=0)
            padded = [row + [self.GONE] * (width - len(row)) for row in self._rows]
            self._tensor = torch.tensor(padded, dtype=torch.int64, device=self._device).view(len(padded), width)
        return self._tensor


Encoder = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], EncodedKeysValues]


class PageStore:
    """All that one layer remembers of its rows.

    Args:
        num_kv_heads: KV heads of the layer.
        head_dim: channels of a head.
        sink_tokens: first tokens of a row kept in 16 bits too.
        window: sliding window in tokens, or None; pages that slid out of it are given back.
        device: where the tensors live.
        dtype: 16-bit dtype of sink and recent tokens.

    Attributes:
        lengths: cached tokens of each row.
        pool, table: the encoded pages and whose they are.
        recent_keys, recent_values: tokens after a row's last page [rows, num_kv_heads, capacity, head_dim].
        sink_keys, sink_values: [rows, num_kv_heads, sink_tokens, head_dim]; set for rows that have pages.
    """

    def __init__(
        self,
        num_kv_heads: int,
        head_dim: int,
        sink_tokens: int,
        window: int | None,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.sink_tokens = sink_tokens
        self.window = window
        self.device = torch.device(device)
        self.dtype = dtype
        self.pool = PagePool()
        self.free()

    def free(self) -> None:
        """Forget all rows; the pool keeps its memory."""
        self.pool.keep_only(set())
        self._allocate(0)

    def _allocate(self, rows: int) -> None:
        self.lengths = [0] * rows
        self.table = BlockTable(rows, self.device)
        self.recent_keys, self.recent_values = self._buffer(rows, 0), self._buffer(rows, 0)
        self.sink_keys, self.sink_values = self._buffer(rows, 0), self._buffer(rows, 0)

    def _buffer(self, rows: int, tokens: int) -> torch.Tensor:
        # Zeros: slots without a token are masked, but must not hold NaN.
        return torch.zeros(rows, self.num_kv_heads, tokens, self.head_dim, dtype=self.dtype, device=self.device)

    @property
    def num_rows(self) -> int:
        """Rows in the cache; 0 before the first step."""
        return len(self.lengths)

    def quantized(self, row: int) -> int:
        """Tokens of a row that lie in pages."""
        return self.table.num_pages(row) * PAGE_SIZE

    def num_recent(self, row: int) -> int:
        """Tokens of a row after its last page."""
        return self.lengths[row] - self.quantized(row)

    def first_page(self, row: int) -> int:
        """First page that the next token of a row can see."""
        return 0 if self.window is None else max(0, self.lengths[row] - self.window + 1) // PAGE_SIZE

    def append(self, keys: torch.Tensor, values: torch.Tensor, padding: Sequence[int]) -> None:
        """Add tokens after each row's last one; the first call after `free` sets the number of rows.

        Args:
            keys, values: [rows, num_kv_heads, tokens, head_dim], any floating-point dtype; rounded to the 16-bit dtype.
            padding: leading tokens of each row that are padding and not stored.
        """
        rows, _, tokens, _ = keys.shape
        if not self.num_rows:
            self._allocate(rows)
        filled = [self.num_recent(row) for row in range(rows)]
        self._reserve(max(start + tokens - pad for start, pad in zip(filled, padding, strict=True)))
        if len(set(filled)) == 1 and not any(padding):
            self.recent_keys[:, :, filled[0] : filled[0] + tokens] = keys
            self.recent_values[:, :, filled[0] : filled[0] + tokens] = values
        else:
            for row, (start, pad) in enumerate(zip(filled, padding, strict=True)):
                slots = slice(start, start + tokens - pad)
                self.recent_keys[row, :, slots] = keys[row, :, pad:]
                self.recent_values[row, :, slots] = values[row, :, pad:]
        self.lengths = [length + tokens - pad for length, pad in zip(self.lengths, padding, strict=True)]

    def _reserve(self, slots: int) -> None:
        held = self.recent_keys.shape[-2]
        if slots > held:
            capacity = max(slots, PAGE_SIZE)
            keys, values = self._buffer(self.num_rows, capacity), self._buffer(self.num_rows, capacity)
            keys[..., :held, :], values[..., :held, :] = self.recent_keys, self.recent_values
            self.recent_keys, self.recent_values = keys, values

    def promote(self, encode: Encoder) -> None:
        """Move full pages of recent tokens into the pool, and give back pages that slid out of the window.

        Args:
            encode: as `PageBackend.encode`.
        """
        full = [self.num_recent(row) // PAGE_SIZE for row in range(self.num_rows)]
        if any(full):
            self._keep_sinks([row for row in range(self.num_rows) if full[row] and not self.table.num_pages(row)])
            self._store_pages(full, encode)
            self._shift_recent(full)
        if self.window is not None:
            dropped = [self.table.drop_before(row, self.first_page(row)) for row in range(self.num_rows)]
            if any(dropped):
                self.pool.keep_only(self.table.used())

    def _keep_sinks(self, rows: list[int]) -> None:
        if not rows or not self.sink_tokens:
            return
        if not self.sink_keys.shape[-2]:
            self.sink_keys = self._buffer(self.num_rows, self.sink_tokens)
            self.sink_values = self._buffer(self.num_rows, self.sink_tokens)
        self.sink_keys[rows] = self.recent_keys[rows, :, : self.sink_tokens]
        self.sink_values[rows] = self.recent_values[rows, :, : self.sink_tokens]

    def _store_pages(self, full: list[int], encode: Encoder) -> None:
        """Encode each row's ``full`` leading pages of recent tokens; those already out of the window are skipped."""
        jobs = []
        for row, count in enumerate(full):
            done = self.table.num_pages(row)
            gone = min(max(self.first_page(row) - done, 0), count)
            self.table.extend(row, [BlockTable.GONE] * gone)
            jobs += [(row, page, done + page == 0) for page in range(gone, count)]
        for start in range(0, len(jobs), _ENCODED_AT_ONCE):
            batch = jobs[start : start + _ENCODED_AT_ONCE]
            first = torch.tensor([is_first for _, _, is_first in batch], device=self.device)
            pages = encode(self._cut(self.recent_keys, batch), self._cut(self.recent_values, batch), first)
            for (row, _, _), page_id in zip(batch, self.pool.store(pages), strict=True):
                self.table.extend(row, [page_id])

    def _cut(self, recent: torch.Tensor, jobs: list[tuple[int, int, bool]]) -> torch.Tensor:
        return torch.stack([recent[row, :, page * PAGE_SIZE : (page + 1) * PAGE_SIZE] for row, page, _ in jobs])

    def _shift_recent(self, full: list[int]) -> None:
        keys, values = self._buffer(self.num_rows, PAGE_SIZE), self._buffer(self.num_rows, PAGE_SIZE)
        for row, count in enumerate(full):
            rest = self.num_recent(row)
            tokens = slice(count * PAGE_SIZE, count * PAGE_SIZE + rest)
            keys[row, :, :rest] = self.recent_keys[row, :, tokens]
            values[row, :, :rest] = self.recent_values[row, :, tokens]
        self.recent_keys, self.recent_values = keys, values

    def select_rows(self, rows: Sequence[int]) -> None:
        """Replace the rows by copies of these rows (a row may come several times); pages are shared, not copied."""
        self.lengths = [self.lengths[row] for row in rows]
        self.table.select(rows)
        index = torch.tensor(rows, dtype=torch.int64, device=self.device)
        self.recent_keys, self.recent_values = self.recent_keys[index], self.recent_values[index]
        self.sink_keys, self.sink_values = self.sink_keys[index], self.sink_values[index]
        self.pool.keep_only(self.table.used())

    def memory(self) -> CacheMemory:
        """Bytes of this layer."""
        token = 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        with_pages = sum(self.table.num_pages(row) > 0 for row in range(self.num_rows))
        visible = [length if self.window is None else min(length, self.window) for length in self.lengths]
        return CacheMemory(
            tokens=sum(self.lengths),
            pages_used=self.pool.num_used * self.pool.page_bytes,
            pages_allocated=self.pool.capacity * self.pool.page_bytes,
            sink_used=with_pages * self.sink_tokens * token,
            sink_allocated=self.sink_keys.nbytes + self.sink_values.nbytes,
            recent_used=sum(self.num_recent(row) for row in range(self.num_rows)) * token,
            recent_allocated=self.recent_keys.nbytes + self.recent_values.nbytes,
            bf16=sum(visible) * token,
        )


class PageBackend(Protocol):
    """The numerics of one layer."""

    def encode(self, keys: torch.Tensor, values: torch.Tensor, first: torch.Tensor) -> EncodedKeysValues:
        """Encode full pages.

        Args:
            keys, values: 16-bit [pages, num_kv_heads, PAGE_SIZE, head_dim].
            first: bool [pages], true for the first page of a row.
        """
        ...

    def attend(self, q: torch.Tensor, store: PageStore, logits: LogitRule) -> torch.Tensor:
        """Attention of the newest tokens, already appended, over everything that the store holds.

        All of them see the same pages; among the 16-bit tokens attention is causal.

        Args:
            q: post-RoPE queries of each row's newest tokens [rows, num_q_heads, tokens, head_dim].
            store: the layer's tokens. A row with fewer tokens than ``q`` has padding in front, whose output is 0.
            logits: softmax scale and soft-cap.

        Returns:
            [rows, num_q_heads, tokens, head_dim] in the dtype of ``q``.
        """
        ...


class _DecodedPages(NamedTuple):
    """Pages ``first_page``, ... of some rows: keys and values fp32 [rows, num_kv_heads, tokens, head_dim], page means
    16-bit [rows, num_kv_heads, pages, head_dim] or None."""

    first_page: int
    keys: torch.Tensor
    values: torch.Tensor
    means: torch.Tensor | None


class _Positions(NamedTuple):
    """Of some rows: positions of the queries, and tokens in pages as each query sees them; int64 [rows, queries]."""

    query: torch.Tensor
    quantized: torch.Tensor

    def part(self, queries: slice) -> "_Positions":
        return _Positions(self.query[:, queries], self.quantized[:, queries])


class TorchBackend:
    """`PageBackend` in plain PyTorch for any recipe and device; decodes the pages that a step reads, in every step.

    Args:
        recipe, num_kv_heads, head_dim, calibration, device, dtype: as for `LayerCodec`.
        name: of the layer, for messages.

    Raises:
        UnsupportedError, CalibrationError: as `LayerCodec`.
    """

    _reported: ClassVar[set[str]] = set()

    def __init__(
        self,
        recipe: Recipe,
        num_kv_heads: int,
        head_dim: int,
        calibration: LayerCalibration | None,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        name: str = "layer",
    ) -> None:
        self._name = name
        self._codec = LayerCodec(recipe, num_kv_heads, head_dim, calibration, device=device, dtype=dtype)
        self._prefill_codec = self._codec
        if recipe.kv_format.blocks is not None:
            # Reads the same pages; without LDLQ, which only the encoder needs and which would be computed again.
            reading = recipe.with_arithmetic(Arithmetic.W16).replace(key_rounding=KeyRounding.NEAREST)
            self._prefill_codec = LayerCodec(reading, num_kv_heads, head_dim, calibration, device=device, dtype=dtype)

    def encode(self, keys: torch.Tensor, values: torch.Tensor, first: torch.Tensor) -> EncodedKeysValues:
        """As `PageBackend.encode`. Warns once a process where NVFP4 saturates (beyond 2688), and once where it
        flushes non-zero blocks to 0."""
        pages = EncodedKeysValues(self._codec.encode_keys(keys, first), self._codec.encode_values(values))
        recipe = self._codec.recipe
        if recipe.kv_format is KVFormat.NVFP4:
            value_dim = -2 if recipe.value_blocks is ValueBlocks.TOKENS else -1
            self._report_range("keys", pages.keys, lambda: self._codec.rotate(self._codec.smooth(keys)), -1)
            self._report_range("values", pages.values, lambda: values.float(), value_dim)
        return pages

    def _report_range(self, what: str, pages: EncodedPages, stored: Callable[[], torch.Tensor], dim: int) -> None:
        """Warn once of blocks above NVFP4's range and once of non-zero blocks below it."""
        scales = pages["scales"]
        # Scales at either end are rare, so that ``stored`` is seldom computed.
        if "saturates" not in TorchBackend._reported and bool((scales == _E4M3_MAX_BYTE).any()):
            largest = float(stored().abs().amax())
            if largest > _NVFP4_MAX:
                self._warn("saturates", f"{what} reach {largest:.0f}, NVFP4 saturates at {_NVFP4_MAX:.0f}")
        if "flushes" not in TorchBackend._reported and bool((scales == 0).any()):
            # The blocked dim becomes (blocks, block_size); the second of the two is reduced.
            split = stored().abs().movedim(dim, -1).unflatten(-1, (-1, BlockFormat.NVFP4.block_size))
            flushed = int(((scales == 0) & (split.amax(-1).movedim(-1, dim) > 0)).sum())
            if flushed:
                self._warn(
                    "flushes", f"{flushed} of {scales.numel()} blocks of {what} are below NVFP4's range and stored as 0"
                )

    def _warn(self, event: str, message: str) -> None:
        TorchBackend._reported.add(event)
        warnings.warn(f"{self._name}: {message}; MXFP4 recipes have the range (this is said once)", stacklevel=2)

    def attend(self, q: torch.Tensor, store: PageStore, logits: LogitRule) -> torch.Tensor:
        """As `PageBackend.attend`. More than `MAX_DECODE_TOKENS` queries read FP4 pages with 16-bit arithmetic."""
        codec = self._codec if q.shape[-2] <= MAX_DECODE_TOKENS else self._prefill_codec
        grouped = q.unflatten(1, (store.num_kv_heads, -1))
        pages = max(store.table.num_pages(row) for row in range(store.num_rows))
        row_elements = store.num_kv_heads * store.head_dim * PAGE_SIZE * pages
        at_once = max(1, _DECODED_ELEMENTS // max(1, row_elements))
        parts = []
        for start in range(0, store.num_rows, at_once):
            rows = range(start, min(start + at_once, store.num_rows))
            parts.append(self._attend_rows(codec, grouped[start : start + at_once], store, rows, logits))
        return torch.cat(parts).flatten(1, 2).to(q.dtype)

    def _attend_rows(
        self, codec: LayerCodec, q: torch.Tensor, store: PageStore, rows: range, logits: LogitRule
    ) -> torch.Tensor:
        """Attention of grouped queries [rows, num_kv_heads, group, tokens, head_dim]; same shape, fp32."""
        positions = _positions(store, rows, q.shape[-2])
        pages = _decode_pages(codec, store, rows)
        keys, values, key_position = _bits16_tokens(store, rows)
        outputs = []
        tokens = keys.shape[-2] + (pages.keys.shape[-2] if pages else 0)
        for queries in _slices(q.shape[-2], max(1, _SCORE_ELEMENTS // (q.shape[:3].numel() * tokens))):
            part, seen = q[..., queries, :], positions.part(queries)
            visible = bits16_visible(seen.query, seen.quantized, key_position, store.sink_tokens, store.window)
            partials = [bits16_partial(codec, part, keys, values, visible, logits)]
            if pages is not None:
                partials.append(_paged_partial(codec, part, pages, seen, store, logits))
            outputs.append(combine_partials(partials).output)
        return torch.cat(outputs, -2)


def _slices(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def _positions(store: PageStore, rows: range, queries: int) -> _Positions:
    lengths = torch.tensor([store.lengths[row] for row in rows], device=store.device)
    quantized = torch.tensor([store.quantized(row) for row in rows], device=store.device)
    query = lengths[:, None] - queries + torch.arange(queries, device=store.device)
    return _Positions(query, quantized[:, None].expand_as(query))


def _decode_pages(codec: LayerCodec, store: PageStore, rows: range) -> _DecodedPages | None:
    """The pages that some of the rows may see; None if there are none. What a row lacks is some other, finite page."""
    table = store.table.tensor()[rows.start : rows.stop]
    with_pages = [row for row in rows if store.table.num_pages(row)]
    stop = max((store.table.num_pages(row) for row in with_pages), default=0)
    # As of before the step: its first token sees the most. Pages before that are gone from the pool.
    first = min((store.table.num_gone(row) for row in with_pages), default=0)
    if first >= stop:
        return None
    encoded = store.pool.gather(table[:, first:stop].clamp(min=0).flatten())

    def join(x: torch.Tensor) -> torch.Tensor:  # [rows·pages, heads, PAGE_SIZE, d] -> [rows, heads, tokens, d]
        return x.unflatten(0, (len(rows), -1)).transpose(1, 2).flatten(2, 3)

    mean = encoded.keys.get("mean")
    return _DecodedPages(
        first,
        join(codec.decode_keys(encoded.keys)),
        join(codec.decode_values(encoded.values)),
        None if mean is None else mean.unflatten(0, (len(rows), -1)).transpose(1, 2),
    )


def _paged_partial(
    codec: LayerCodec, q: torch.Tensor, pages: _DecodedPages, seen: _Positions, store: PageStore, logits: LogitRule
) -> Partial:
    # Only differences of positions matter: count them from the first decoded page.
    origin = pages.first_page * PAGE_SIZE
    visible = page_visible(
        seen.query - origin,
        seen.quantized - origin,
        pages.keys.shape[-2] // PAGE_SIZE,
        store.sink_tokens - origin,
        store.window,
    )
    return page_partial(codec, q, pages.keys, pages.values, pages.means, visible, logits)


def _bits16_tokens(store: PageStore, rows: range) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """16-bit keys and values [rows, heads, tokens, d] and their positions int64 [rows, tokens], -1 for empty slots."""
    used = slice(0, max(store.num_recent(row) for row in rows))
    part = slice(rows.start, rows.stop)
    keys = torch.cat((store.sink_keys[part], store.recent_keys[part, :, used]), -2)
    values = torch.cat((store.sink_values[part], store.recent_values[part, :, used]), -2)
    sink = torch.arange(store.sink_keys.shape[-2], device=store.device)
    recent = torch.arange(used.stop, device=store.device)
    quantized = torch.tensor([[store.quantized(row)] for row in rows], device=store.device)
    filled = torch.tensor([[store.num_recent(row)] for row in rows], device=store.device)
    # Until a row has pages its first tokens are among the recent ones.
    sink_position = torch.where(quantized > 0, sink, -1)
    recent_position = torch.where(recent < filled, quantized + recent, -1)
    return keys, values, torch.cat((sink_position, recent_position), -1)


class PagedLayer:
    """One attention layer of a paged cache.

    Args:
        store: what the layer remembers; starts empty.
        backend: its numerics.
        name: of the layer, for messages.
    """

    def __init__(self, store: PageStore, backend: PageBackend, name: str = "layer") -> None:
        self.store = store
        self.name = name
        self._backend = backend

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        logits: LogitRule,
        padding: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """One step: cache the tokens, compute their attention, then quantize the pages that became full.

        With nothing cached before, attention is exact and causal, in the dtype of ``q``, on the given keys and values.

        Args:
            q: post-RoPE queries [rows, num_q_heads, tokens, head_dim].
            keys, values: of the same tokens [rows, num_kv_heads, tokens, head_dim].
            logits: softmax scale and soft-cap.
            padding: leading tokens of each row that are padding, or None; only rows without cached tokens may have any.
                Their output is finite and otherwise arbitrary.

        Returns:
            [rows, num_q_heads, tokens, head_dim] in the dtype of ``q``.

        Raises:
            InvalidInputError: wrong shapes, number of rows or padding; NaN or Inf. The cache is then unchanged.
        """
        padding = self._checked_padding(q, keys, values, padding)
        empty = not any(self.store.lengths)
        self.store.append(keys, values, padding)
        if empty:
            padded = torch.tensor(padding, device=q.device) if any(padding) else None
            output = causal_attention(q, keys, values, logits, window=self.store.window, padding=padded)
        else:
            output = self._backend.attend(q, self.store, logits)
        self.store.promote(self._backend.encode)
        return output

    def append(self, keys: torch.Tensor, values: torch.Tensor, padding: Sequence[int] | None = None) -> None:
        """Cache tokens without computing attention; arguments and errors as for `attend`."""
        self.store.append(keys, values, self._checked_padding(None, keys, values, padding))
        self.store.promote(self._backend.encode)

    def _checked_padding(
        self, q: torch.Tensor | None, keys: torch.Tensor, values: torch.Tensor, padding: Sequence[int] | None
    ) -> list[int]:
        store = self.store
        padding = checked_step(self.name, q, keys, values, padding, store.lengths, (store.num_kv_heads, store.head_dim))
        if q is not None:
            check_finite(f"{self.name} queries", q)
        check_fits(f"{self.name} keys", keys, store.dtype)
        check_fits(f"{self.name} values", values, store.dtype)
        return padding


def checked_step(
    name: str,
    q: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    padding: Sequence[int] | None,
    cached: Sequence[int],
    heads: tuple[int, int],
) -> list[int]:
    """The padding of a step's rows, after a look at the shapes.

    Args:
        name: of the layer.
        q, keys, values, padding: as for `PagedLayer.attend`; ``q`` may be None.
        cached: tokens of each row before the step; empty before the first one.
        heads: KV heads and head_dim of the layer.

    Raises:
        InvalidInputError: shapes, number of rows or padding that do not belong together.
    """
    rows, tokens = keys.shape[0], keys.shape[-2]
    num_kv_heads, head_dim = heads
    expected = (len(cached) or rows, num_kv_heads, tokens, head_dim)
    if tuple(keys.shape) != expected or tuple(values.shape) != expected or not tokens or not rows:
        raise InvalidInputError(
            f"{name}: keys and values must be [rows, KV heads, tokens, head_dim] = {list(expected)}, got "
            f"{list(keys.shape)} and {list(values.shape)}; free the cache before another batch"
        )
    if q is not None and (q.shape[1] % num_kv_heads or tuple(q.shape) != (rows, q.shape[1], tokens, head_dim)):
        raise InvalidInputError(f"{name}: queries {list(q.shape)} do not go with keys {list(keys.shape)}")
    padding = [0] * rows if padding is None else list(padding)
    cached = list(cached) or [0] * rows
    if len(padding) != rows or not all(
        0 <= pad <= tokens and not (pad and n) for pad, n in zip(padding, cached, strict=True)
    ):
        raise InvalidInputError(f"{name}: padding {padding} does not fit {tokens} tokens after {cached} cached")
    return padding


class RowStore(Protocol):
    """Whose tokens a layer holds: what `PageStore` tells of them and does with them."""

    @property
    def lengths(self) -> list[int]:
        """Cached tokens of each row."""
        ...

    @property
    def num_rows(self) -> int:
        """Rows in the cache."""
        ...

    @property
    def window(self) -> int | None:
        """Sliding window in tokens, or None."""
        ...

    def select_rows(self, rows: Sequence[int]) -> None:
        """Replace the rows by copies of these rows."""
        ...

    def free(self) -> None:
        """Forget all rows."""
        ...

    def memory(self) -> CacheMemory:
        """Bytes in use and allocated."""
        ...


class CacheLayer(Protocol):
    """A layer of a `PagedFP4Cache`, whatever its backend."""

    name: str

    @property
    def store(self) -> RowStore:
        """The layer's rows."""
        ...

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        logits: LogitRule,
        padding: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """As `PagedLayer.attend`."""
        ...

    def append(self, keys: torch.Tensor, values: torch.Tensor, padding: Sequence[int] | None = None) -> None:
        """As `PagedLayer.append`."""
        ...


class Backend(Choice):
    """What computes with a cache."""

    AUTO = "auto"
    TORCH = "torch"
    KERNELS = "kernels"


class PagedFP4Cache:
    """The KV cache of a model: encoded pages under any recipe, sink and recent tokens in 16 bits.

    Rows start with the first step and end with `free`. Every layer takes the same steps.

    Args:
        recipe: how pages are stored and read.
        num_layers: attention layers.
        num_kv_heads: KV heads of a layer.
        head_dim: channels of a head.
        calibration: the model's statistics; may be None where the recipe needs none.
        windows: sliding window of each layer in tokens or None; left out where no layer slides.
        device: where the cache lives.
        dtype: the model's; sink and recent tokens are bfloat16 where it is not a 16-bit one.
        backend: ``torch`` (any recipe and device), ``kernels`` (CUDA), or ``auto``: kernels where there are some for
            the device, the model's dtype, the head_dim and the recipe.

    Raises:
        UnsupportedError: a head_dim that the recipe's format cannot store; with ``kernels``, what they do not support.
        CalibrationError: the recipe needs statistics that ``calibration`` lacks, or they are of another shape.

    Attributes:
        backend: the one in use, ``torch`` or ``kernels``.
        layers: one a layer (`PagedLayer`, or `KernelLayer` with the same interface), to be stepped in order.
    """

    def __init__(
        self,
        recipe: Recipe,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        calibration: Calibration | None = None,
        *,
        windows: Sequence[int | None] | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        backend: Backend | str = Backend.AUTO,
    ) -> None:
        if calibration is not None and calibration.num_layers != num_layers:
            raise CalibrationError(
                f"calibration: made for {calibration.num_layers} layers, the model has {num_layers}; calibrate it"
            )
        if windows is None:
            windows = [None] * num_layers
        if len(windows) != num_layers:
            raise InvalidInputError(f"windows: expected {num_layers}, one a layer, got {len(windows)}")
        self.recipe = recipe
        statistics = [None if calibration is None else calibration.layer(i) for i in range(num_layers)]
        self.backend = _choose_backend(Backend(backend), recipe, head_dim, dtype, torch.device(device))
        self.layers: Sequence[CacheLayer]
        if self.backend is Backend.KERNELS:
            from bitdecoding.cache.gpu import kernel_groups  # needs cuda-core, and this module

            self.layers = kernel_groups(
                recipe, num_kv_heads, head_dim, statistics, windows, device=torch.device(device), dtype=dtype
            )
            return
        stored = kept_dtype(dtype)
        layers = []
        for i, window in enumerate(windows):
            torch_backend = TorchBackend(
                recipe, num_kv_heads, head_dim, statistics[i], device=device, dtype=stored, name=f"layer {i}"
            )
            store = PageStore(num_kv_heads, head_dim, recipe.sink_tokens, window, device=device, dtype=stored)
            layers.append(PagedLayer(store, torch_backend, f"layer {i}"))
        self.layers = layers

    @property
    def lengths(self) -> list[int]:
        """Cached tokens of each row (of the last layer, which ends a step)."""
        return list(self.layers[-1].store.lengths)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Replace the rows by copies of these rows, as beam search and repeated prompts need; pages are shared."""
        for layer in self.layers:
            layer.store.select_rows(rows)

    def free(self) -> None:
        """Forget all rows; the memory of the pages is kept for the next."""
        for layer in self.layers:
            layer.store.free()

    def memory(self) -> CacheMemory:
        """Bytes in use and allocated, over all layers."""
        return CacheMemory.of_layers([layer.store.memory() for layer in self.layers])


def _choose_backend(
    backend: Backend, recipe: Recipe, head_dim: int, dtype: torch.dtype, device: torch.device
) -> Backend:
    """`Backend.AUTO` resolved; `UnsupportedError` where kernels are asked for and there are none."""
    if backend is Backend.TORCH or (backend is Backend.AUTO and device.type != "cuda"):
        return Backend.TORCH
    from bitdecoding.cache.gpu import check_kernels

    try:
        check_kernels(recipe, head_dim, dtype, device)
    except UnsupportedError:
        if backend is Backend.KERNELS:
            raise
        return Backend.TORCH
    return Backend.KERNELS
