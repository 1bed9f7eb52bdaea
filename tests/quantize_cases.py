"""The quantize kernels against the reference: checks for the GPU, and for the kernels built for the host."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from bitdecoding.kernels.buffers import TAIL_TOKENS, LayerBuffers
from bitdecoding.kernels.layout import LogicalPages, PageLayout, unpack_page
from bitdecoding.kernels.quantize import Promotion, QuantizeConfig, promote_pages, store_chunk
from bitdecoding.numerics.blocks import quantize_blocks
from bitdecoding.numerics.ldlq import LdlqFactors, ldlq_factors, quantize_blocks_ldlq
from bitdecoding.numerics.rotation import hadamard_transform
from bitdecoding.recipe import PAGE_SIZE

GARBAGE = 2147480000
"""In table entries that must not be read."""
SINK = 16


@dataclass(frozen=True)
class Row:
    """One row of a step.

    Attributes:
        before, length: tokens before and after it.
        tail_slot: its ring.
        promote_sink: sink slot to fill, or -1.
        blocks: of its pages.
    """

    before: int
    length: int
    tail_slot: int = 0
    promote_sink: int = -1
    blocks: tuple[int, ...] = ()

    @property
    def state(self) -> list[int]:
        return [self.length, self.before, self.tail_slot, -1, self.promote_sink, 0, 0, 0]


@dataclass
class Layer:
    """A layer's cache, filled with what must not be read, and its parameters."""

    layout: PageLayout
    dtype: torch.dtype = torch.bfloat16
    search: bool = True
    rotate: bool = True
    centered: bool = False
    ldlq: bool = False
    heads: int = 2
    blocks: int = 12
    slots: int = 4
    smooth: bool = True
    device: str = "cpu"
    seed: int = 0
    config: QuantizeConfig = field(init=False)
    buffers: LayerBuffers = field(init=False)
    factors: LdlqFactors | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        dim, heads = self.layout.head_dim, self.heads
        generator = torch.Generator().manual_seed(self.seed)
        self.config = QuantizeConfig(
            self.layout, self.dtype == torch.bfloat16, self.search, self.rotate, self.centered, self.ldlq
        )
        self.buffers = LayerBuffers(
            self.layout,
            torch.full((self.blocks, heads, self.layout.page_bytes), 0xAA, dtype=torch.uint8, device=self.device),
            torch.full((self.slots, 2, heads, TAIL_TOKENS, dim), torch.nan, dtype=self.dtype, device=self.device),
            torch.full((self.slots, 2, heads, SINK, dim), torch.nan, dtype=self.dtype, device=self.device),
            torch.full((self.blocks, heads, dim), torch.nan, dtype=torch.bfloat16, device=self.device)
            if self.centered
            else None,
            torch.randn(heads, dim, generator=generator).to(self.device) if self.smooth else None,
        )
        if self.ldlq:
            queries = torch.randn(heads, 4 * dim, dim, generator=generator)
            queries *= torch.exp(0.7 * torch.randn(dim, generator=generator))
            c, d = ldlq_factors(queries.transpose(-1, -2) @ queries / (4 * dim))
            self.factors = LdlqFactors(c.contiguous().to(self.device), d.contiguous().to(self.device))

    # --- Steps

    def store(self, rows: list[Row], tokens: list[torch.Tensor], table_dtype: torch.dtype = torch.int32) -> None:
        """A prefill step; ``tokens``: [2, length, heads, dim] of each row, of which the new ones are stored."""
        counts = [row.length - row.before for row in rows]
        new = torch.cat([of_row[:, row.before : row.length] for row, of_row in zip(rows, tokens, strict=True)], dim=1)
        # Slices of a fused QKV with a query head, and tokens of nobody around
        dim, lead = self.layout.head_dim, 3
        fused = torch.full(
            (lead + new.shape[1] + 2, 3, self.heads, dim), torch.nan, dtype=self.dtype, device=self.device
        )
        fused[lead : lead + new.shape[1], 1:] = new.transpose(0, 1).to(self.device)
        start = lead + torch.tensor([0, *counts]).cumsum(0)
        store_chunk(
            self.buffers,
            self.config,
            torch.tensor([row.state for row in rows], dtype=torch.int32, device=self.device),
            block_table(rows, table_dtype, self.device),
            fused[:, 1],
            fused[:, 2],
            start.to(torch.int32).to(self.device),
            max(counts),
            factors=self.factors,
        )

    def fill_ring(self, row: Row, tokens: torch.Tensor) -> None:
        """What decode steps leave behind: the newest tokens of a row."""
        for position in range(max(0, row.length - TAIL_TOKENS), row.length):
            self.buffers.tail[row.tail_slot, :, :, position % TAIL_TOKENS] = tokens[:, position].to(self.device)

    # --- Checks

    def check_pages(self, row: Row, tokens: torch.Tensor, pages: range, allowed: float = 0.0) -> None:
        """Pages of a row equal the reference's, but for a share ``allowed`` of LDLQ codes."""
        for page in pages:
            block = row.blocks[page]
            span = tokens[:, page * PAGE_SIZE : (page + 1) * PAGE_SIZE].transpose(1, 2)
            expected = self.reference(span[0], span[1], block, page)
            actual = unpack_page(self.buffers.pages[block].cpu(), self.layout)
            for name, left, right in zip(LogicalPages._fields, actual, expected, strict=True):
                wrong = int((left != right).sum())
                limit = allowed * left.numel() if name.startswith("key") else 0
                assert wrong <= limit, f"page {page}: {wrong} of {left.numel()} {name} differ"

    def reference(self, keys: torch.Tensor, values: torch.Tensor, block: int, page: int) -> LogicalPages:
        """Pages [heads] from keys and values [heads, 128, dim]; with the kernel's own mean, after a look at it."""
        fmt = self.layout.block_format
        x = keys.float()
        if self.buffers.key_mean is not None:
            x = x - self.buffers.key_mean.cpu().unsqueeze(-2)
        if self.rotate:
            x = hadamard_transform(x)
        if self.buffers.means is not None:
            mean = x[:, SINK if page == 0 else 0 :].mean(-2)
            stored = self.buffers.means[block].cpu()
            # Sums in another order: half a BF16 ulp more at most
            torch.testing.assert_close(stored.float(), mean, rtol=2**-7, atol=1e-5 * float(x.abs().max()))
            assert (stored != mean.bfloat16()).float().mean() < 0.02
            x = x - stored.float().unsqueeze(-2)
        rule = fmt.search_rule if self.search else fmt.standard_rule
        if self.factors is not None:
            factors = LdlqFactors(self.factors.c.cpu(), self.factors.d.cpu())
            quantized = quantize_blocks_ldlq(x, factors, fmt, rule)
        else:
            quantized = quantize_blocks(x, fmt, rule)
        of_values = quantize_blocks(values.float(), fmt, dim=-2)
        return LogicalPages(quantized.codes, quantized.scale_bytes, of_values.codes, of_values.scale_bytes)

    def check_ring(self, row: Row, tokens: torch.Tensor) -> None:
        """Tokens behind the last full page are in the ring."""
        for position in range(row.length // PAGE_SIZE * PAGE_SIZE, row.length):
            stored = self.buffers.tail[row.tail_slot, :, :, position % TAIL_TOKENS].cpu()
            assert torch.equal(stored, tokens[:, position]), f"position {position} of the ring"

    def check_untouched(self, used: set[int]) -> None:
        """Blocks that no row has are as they were."""
        others = [block for block in range(self.blocks) if block not in used]
        assert bool((self.buffers.pages[others] == 0xAA).all())


def block_table(rows: list[Row], dtype: torch.dtype, device: str) -> torch.Tensor:
    """A slice of a wider table, with garbage behind the rows' pages."""
    width = max(len(row.blocks) for row in rows) + 2
    table = torch.full((len(rows), width + 3), GARBAGE, dtype=dtype)
    for index, row in enumerate(rows):
        table[index, : len(row.blocks)] = torch.tensor(row.blocks, dtype=dtype)
    return table.to(device)[:, :width]


def ordinary(length: int, layer: Layer, seed: int = 0) -> torch.Tensor:
    """Keys with outlier channels, and values: [2, length, heads, dim]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, length, layer.heads, layer.layout.head_dim)
    x = torch.randn(shape, generator=generator)
    x[0] *= torch.exp(torch.randn(layer.layout.head_dim, generator=generator))
    return x.to(layer.dtype)


def adversarial(length: int, layer: Layer, seed: int = 0) -> torch.Tensor:
    """Blocks of every size down to flushing and up to saturation, zeros of both signs, and numbers that make ties."""
    generator = torch.Generator().manual_seed(seed)
    heads, dim = layer.heads, layer.layout.head_dim

    def powers(*shape: int) -> torch.Tensor:
        return torch.exp2(torch.randint(-16, 13, shape, generator=generator).float())

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-7, 8, shape, generator=generator).float()

    x = torch.randn(2, length, heads, dim, generator=generator)
    groups = -(-length // 16)
    x[0] *= powers(length, heads, dim // 16).repeat_interleave(16, -1)
    x[1] *= powers(groups, heads, dim).repeat_interleave(16, 0)[:length]
    kind = torch.arange(length) // 3 % 8
    x[0, kind == 1] = 0.0
    x[0, kind == 2] = -0.0
    x[0, kind == 3] = integers(length, heads, dim)[kind == 3]
    x[0, kind == 4] = 0.25 * integers(length, heads, dim)[kind == 4]
    x[0, kind == 5, :, ::16] = 3e4
    of_group = (torch.arange(length) // 16 + torch.arange(dim).unsqueeze(-1)) % 9  # [dim, length]
    choose = (of_group.T.unsqueeze(1)).expand(length, heads, dim)
    x[1] = torch.where(choose == 1, 0.0, x[1])
    x[1] = torch.where(choose == 2, -0.0, x[1])
    x[1] = torch.where(choose == 3, integers(length, heads, dim), x[1])
    x[1] = torch.where(choose == 4, 0.125 * integers(length, heads, dim) * 3, x[1])
    return x.clamp(-3e4, 3e4).to(layer.dtype)


def extreme(length: int, layer: Layer, seed: int = 0) -> torch.Tensor:
    """BF16 from end to end: blocks far beyond what either format holds, and blocks of subnormal numbers."""
    generator = torch.Generator().manual_seed(seed)
    heads, dim = layer.heads, layer.layout.head_dim
    exponents = torch.randint(-132, 120, (2, -(-length // 32), heads, dim // 32), generator=generator)
    exponents = exponents.repeat_interleave(32, 1)[:, :length].repeat_interleave(32, -1).double()
    x = torch.randn(2, length, heads, dim, generator=generator, dtype=torch.float64) * torch.exp2(exponents)
    return x.float().bfloat16()


# --- What to check


def check_prefill(layer: Layer, tokens: torch.Tensor, allowed: float = 0.0) -> None:
    """A prefill of one row, its pages, ring and sink."""
    length = tokens.shape[1]
    row = Row(0, length, 1, 2, tuple(range(3, 3 + length // PAGE_SIZE)))
    layer.store([row], [tokens])
    layer.check_pages(row, tokens, range(length // PAGE_SIZE), allowed)
    layer.check_ring(row, tokens)
    layer.check_untouched(set(row.blocks))
    assert layer.buffers.sink is not None
    expected = (
        tokens[:, :SINK].transpose(1, 2) if length >= PAGE_SIZE else torch.full_like(layer.buffers.sink[2], torch.nan)
    )
    assert torch.equal(layer.buffers.sink[2].cpu().nan_to_num(9), expected.cpu().nan_to_num(9))


def check_chunks(make: Callable[[], Layer], bounds: list[int]) -> None:
    """Chunks that end at ``bounds`` leave the same bytes as one prefill."""
    whole, pieces = make(), make()
    tokens = ordinary(bounds[-1], whole)
    blocks = tuple(range(1, 1 + bounds[-1] // PAGE_SIZE))
    whole.store([Row(0, bounds[-1], 1, 2, blocks)], [tokens])
    before = 0
    for length in bounds:
        pieces.store([Row(before, length, 1, 2 if before < PAGE_SIZE <= length else -1, blocks)], [tokens])
        before = length
    assert torch.equal(whole.buffers.pages, pieces.buffers.pages)
    pieces.check_ring(Row(0, bounds[-1], 1), tokens)
    assert whole.buffers.sink is not None and pieces.buffers.sink is not None
    assert torch.equal(whole.buffers.sink[2].nan_to_num(9), pieces.buffers.sink[2].nan_to_num(9))


def check_batch(layer: Layer, table_dtype: torch.dtype) -> None:
    """Rows of mixed lengths in one launch, with padding rows and rows without new pages."""
    rows = [
        Row(0, 300, 0, 1, (5, 2)),
        Row(0, 0, -1),
        Row(127, 128, 1, 3, (7,)),
        Row(130, 131, 2, -1, (0,)),
        Row(250, 390, 3, -1, (4, 1, 9)),
    ]
    tokens = [ordinary(row.length, layer, index) for index, row in enumerate(rows)]
    for row, of_row in zip(rows, tokens, strict=True):
        if row.before:
            layer.fill_ring(Row(0, row.before, row.tail_slot), of_row)
    layer.store(rows, tokens, table_dtype)
    for row, of_row in zip(rows, tokens, strict=True):
        layer.check_pages(row, of_row, range(row.before // PAGE_SIZE, row.length // PAGE_SIZE))
        layer.check_ring(row, of_row)
    layer.check_untouched({5, 2, 7, 1, 9})


def check_promotion(layers: list[Layer], table_dtype: torch.dtype = torch.int32) -> None:
    """A decode step that fills pages of some rows, in all layers: the bytes of a prefill, and the sink."""
    rows = [
        Row(120, 128, 0, 3, (5,)),
        Row(0, 0, -1),
        Row(255, 256, 1, -1, (0, 7)),
        Row(383, 391, 2, -1, (1, 2, 9)),
        Row(129, 130, 3, -1, (3,)),
    ]
    device = layers[0].device
    tokens = [[ordinary(row.length, layer, 10 * i + j) for j, row in enumerate(rows)] for i, layer in enumerate(layers)]
    for layer, of_layer in zip(layers, tokens, strict=True):
        for row, of_row in zip(rows, of_layer, strict=True):
            if row.length:
                layer.fill_ring(row, of_row)
    factors = [layer.factors for layer in layers if layer.factors is not None]
    promotion = Promotion([layer.buffers for layer in layers], layers[0].config, factors or None)
    states = torch.tensor([row.state for row in rows], dtype=torch.int32, device=device)
    promote_pages(promotion, states, block_table(rows, table_dtype, device))
    allowed = 0.001 if factors else 0.0
    for layer, of_layer in zip(layers, tokens, strict=True):
        for row, of_row in zip(rows, of_layer, strict=True):
            layer.check_pages(row, of_row, range(row.before // PAGE_SIZE, row.length // PAGE_SIZE), allowed)
        layer.check_untouched({5, 7, 9})
        assert layer.buffers.sink is not None
        assert torch.equal(layer.buffers.sink[3].cpu(), of_layer[0][:, :SINK].transpose(1, 2))
        assert bool(layer.buffers.sink[:3].isnan().all())


def check_nan(layer: Layer) -> None:
    """A NaN in a key spoils its token and head only, one in a value its block of its channel only."""
    tokens = ordinary(PAGE_SIZE, layer)
    poisoned = tokens.clone()
    poisoned[0, 40, 1, 3] = torch.nan
    poisoned[1, 70, 0, 5] = torch.nan
    poisoned[1, 71, 0, 9] = torch.inf
    row = Row(0, PAGE_SIZE, 1, -1, (3,))
    layer.store([row], [poisoned])
    actual = unpack_page(layer.buffers.pages[3].cpu(), layer.layout)
    span = tokens.transpose(1, 2)
    expected = layer.reference(span[0], span[1], 3, 0) if not layer.centered else None
    block = layer.layout.block_format.block_size
    keys = torch.ones(layer.heads, PAGE_SIZE, dtype=torch.bool)
    keys[1, 40] = False
    values = torch.ones(layer.heads, PAGE_SIZE // block, layer.layout.head_dim, dtype=torch.bool)
    values[0, 70 // block, 5] = values[0, 71 // block, 9] = False
    if expected is not None:
        assert torch.equal(actual.key_codes[keys], expected.key_codes[keys])
        assert torch.equal(actual.key_scales[keys], expected.key_scales[keys])
        assert torch.equal(actual.value_scales[values], expected.value_scales[values])
        codes = values.repeat_interleave(block, 1)
        assert torch.equal(actual.value_codes[codes], expected.value_codes[codes])
    else:
        assert layer.buffers.means is not None and bool(layer.buffers.means[3].isfinite().all())
