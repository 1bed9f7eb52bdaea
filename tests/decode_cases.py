"""Random caches for the decode kernel with poison in every place that must not be read, and references for them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product

import torch

from bitdecoding import Calibration, LayerCodec, Recipe, get_recipe
from bitdecoding.kernels.buffers import TAIL_TOKENS, LayerBuffers
from bitdecoding.kernels.decode import DecodeArithmetic, DecodePlan, DecodeWorkspace
from bitdecoding.kernels.decode_config import DecodeShape, choose_shape
from bitdecoding.kernels.layout import ArchFamily, LogicalPages, PageLayout, pack_page
from bitdecoding.kernels.schedule import items_of_row, units_of_row
from bitdecoding.numerics.packing import unpack_nibbles
from bitdecoding.recipe import PAGE_SIZE, Arithmetic
from bitdecoding.reference.vectorized import (
    LogitRule,
    Partial,
    bits16_partial,
    bits16_visible,
    combine_partials,
    page_scores,
    page_visible,
    smoothing_shift,
    stream_partial,
)

GARBAGE = 2147480000


@dataclass(frozen=True)
class Spec:
    """One launch of the decode kernel."""

    lengths: Sequence[int]
    recipe: str = "bitdecoding-nvfp4"
    native: bool = False
    head_dim: int = 128
    kv_heads: int = 2
    group: int = 4
    tokens: int = 1
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    softcap: float | None = None
    sink_at_hand: bool = True
    granule: int = 1
    table_dtype: torch.dtype = torch.int32
    high_blocks: int = 0
    seed: int = 0
    q_scale: float = 2.0


@dataclass
class Case:
    """Inputs on a device and all that a reference needs."""

    spec: Spec
    recipe: Recipe
    codec: LayerCodec
    buffers: LayerBuffers
    plan: DecodePlan
    query: torch.Tensor
    new_keys: torch.Tensor
    new_values: torch.Tensor
    keys: list[torch.Tensor] = field(default_factory=list)  # raw, all tokens of a row [kv_heads, length, head_dim]
    values: list[torch.Tensor] = field(default_factory=list)
    key_pages: list[dict[str, torch.Tensor]] = field(default_factory=list)
    value_pages: list[dict[str, torch.Tensor]] = field(default_factory=list)

    @property
    def logits(self) -> LogitRule:
        return LogitRule(self.spec.head_dim**-0.5, self.spec.softcap)

    @property
    def arithmetic(self) -> DecodeArithmetic:
        mode = Arithmetic.NATIVE if self.spec.native else Arithmetic.W16
        return DecodeArithmetic(mode, True, self.recipe.probability_c, self.codec.tau)

    def before(self, row: int) -> int:
        return max(0, self.spec.lengths[row] - self.spec.tokens)


def calibration(kv_heads: int, head_dim: int, seed: int = 0) -> Calibration:
    generator = torch.Generator().manual_seed(seed + 77)
    mean = torch.randn(1, kv_heads, head_dim, generator=generator) * 2
    q = torch.randn(1, kv_heads, 4 * head_dim, head_dim, generator=generator)
    return Calibration(mean, q.transpose(-1, -2) @ q / (4 * head_dim))


def logical_pages(keys: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> LogicalPages:
    """Encoded pages [pages, heads, ...] of `LayerCodec` in the packer's form."""
    return LogicalPages(
        unpack_nibbles(keys["codes"]), keys["scales"], unpack_nibbles(values["codes"]), values["scales"]
    )


def make_case(spec: Spec, device: str = "cuda") -> Case:
    generator = torch.Generator(device=device).manual_seed(spec.seed)
    heads, dim, rows = spec.kv_heads, spec.head_dim, len(spec.lengths)
    recipe = get_recipe(spec.recipe)
    if not spec.native:
        recipe = recipe.with_arithmetic(Arithmetic.W16)
    codec = LayerCodec(recipe, heads, dim, calibration(heads, dim).layer(0), device=device, dtype=spec.dtype)
    family = ArchFamily.of_capability(*torch.cuda.get_device_capability()) if device == "cuda" else ArchFamily.SM90
    layout = PageLayout(family, recipe.kv_format.blocks, dim)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    keys, values, key_pages, value_pages = [], [], [], []
    outlier = torch.ones(dim, device=device)
    outlier[:: dim // 4] = 6.0
    for length in spec.lengths:
        keys.append((randn(heads, length, dim) * outlier + codec.key_mean[:, None]).to(spec.dtype))
        values.append((randn(heads, length, dim) * torch.rand(dim, generator=generator, device=device)).to(spec.dtype))
    before = [max(0, length - spec.tokens) for length in spec.lengths]
    counts = [b // PAGE_SIZE for b in before]
    total = sum(counts)
    blocks = total + 3 + spec.high_blocks
    # Poison: NaN scales, NaN tails, NaN sinks, garbage ids
    pages = torch.full((blocks, heads, layout.page_bytes), 0xFF, dtype=torch.uint8, device=device)
    nan = float("nan")
    tail = torch.full((rows + 2, 2, heads, TAIL_TOKENS, dim), nan, dtype=spec.dtype, device=device)
    sink_tokens = recipe.sink_tokens
    sink = torch.full((rows + 2, 2, heads, sink_tokens, dim), nan, dtype=spec.dtype, device=device)
    means = None
    if recipe.page_centered_keys:
        means = torch.full((blocks, heads, dim), nan, dtype=torch.bfloat16, device=device)
    width = max(counts, default=0) + 3
    table = torch.full((rows, width), GARBAGE, dtype=spec.table_dtype, device=device)
    order = (torch.randperm(total, generator=generator, device=device) + spec.high_blocks + 1).tolist()
    states = torch.zeros(rows, 8, dtype=torch.int32)
    for row, length in enumerate(spec.lengths):
        count = counts[row]
        ids = [order.pop() for _ in range(count)]
        table[row, :count] = torch.tensor(ids, dtype=spec.table_dtype, device=device)
        cut = slice(0, count * PAGE_SIZE)
        as_pages = [
            x[row][:, cut].unflatten(1, (count, PAGE_SIZE)).transpose(0, 1) for x in (keys, values)
        ]  # [pages, heads, PAGE_SIZE, dim]
        first = torch.arange(count, device=device) == 0
        encoded_keys = codec.encode_keys(as_pages[0], first) if count else {}
        encoded_values = codec.encode_values(as_pages[1]) if count else {}
        key_pages.append(encoded_keys)
        value_pages.append(encoded_values)
        if count:
            pages[ids] = pack_page(logical_pages(encoded_keys, encoded_values), layout)
            if means is not None:
                means[ids] = encoded_keys["mean"]
        slot = (row + 1) % (rows + 2)
        for position in range(count * PAGE_SIZE, before[row]):
            tail[slot, 0, :, position % TAIL_TOKENS] = keys[row][:, position]
            tail[slot, 1, :, position % TAIL_TOKENS] = values[row][:, position]
        sink_slot = -1
        if count and spec.sink_at_hand and sink_tokens:
            sink_slot = rows + 1 - row
            sink[sink_slot, 0] = keys[row][:, :sink_tokens]
            sink[sink_slot, 1] = values[row][:, :sink_tokens]
        states[row] = torch.tensor([length, before[row], slot if length else -1, sink_slot, -1, 0, 0, 0])
    items = [
        items_of_row(units_of_row(n, b, int(s[3]) >= 0, spec.window, sink_tokens), spec.granule)
        for n, b, s in zip(spec.lengths, before, states, strict=True)
    ]
    prefix = torch.tensor([0, *items], dtype=torch.int32).cumsum(0).to(torch.int32)

    def newest(x: list[torch.Tensor]) -> torch.Tensor:
        out = torch.full((rows, spec.tokens, heads, dim), nan, dtype=spec.dtype, device=device)
        for row, length in enumerate(spec.lengths):
            count = min(length, spec.tokens)
            if count:
                out[row, spec.tokens - count :] = x[row][:, length - count :].transpose(0, 1)
        return out

    query = (randn(rows, spec.tokens, heads * spec.group, dim) * spec.q_scale).to(spec.dtype)
    for row, length in enumerate(spec.lengths):
        query[row, : max(0, spec.tokens - length)] = nan
    return Case(
        spec,
        recipe,
        codec,
        LayerBuffers(layout, pages, tail, sink if sink_tokens else None, means, codec.key_mean),
        DecodePlan(states.to(device), prefix.to(device), table, spec.granule),
        query,
        newest(keys),
        newest(values),
        keys,
        values,
        key_pages,
        value_pages,
    )


@dataclass
class RowParts:
    """One row's operands of the reference functions; queries that are padding are left out."""

    q: torch.Tensor  # [1, kv_heads, group, tokens, head_dim]
    positions: torch.Tensor  # [1, tokens]
    page_keys: torch.Tensor  # fp32 [1, kv_heads, tokens, head_dim]
    page_values: torch.Tensor
    means: torch.Tensor | None
    page_seen: torch.Tensor  # bool [1, tokens, page tokens]
    keys16: torch.Tensor
    values16: torch.Tensor
    seen16: torch.Tensor


def row_parts(case: Case, row: int) -> RowParts:
    spec, codec = case.spec, case.codec
    length, heads, dim = spec.lengths[row], spec.kv_heads, spec.head_dim
    queries = min(length, spec.tokens)
    device = case.query.device
    q = case.query[row, spec.tokens - queries :].unflatten(1, (heads, -1)).permute(1, 2, 0, 3)[None]
    positions = torch.arange(length - queries, length, device=device)[None]
    count = case.before(row) // PAGE_SIZE
    if count:
        keys = codec.decode_keys(case.key_pages[row]).transpose(0, 1).flatten(1, 2)[None]
        values = codec.decode_values(case.value_pages[row]).transpose(0, 1).flatten(1, 2)[None]
        means = case.key_pages[row].get("mean")
        means = None if means is None else means.transpose(0, 1)[None]
    else:
        keys = values = torch.zeros(1, heads, 0, dim, device=device)
        means = None
    quantized = torch.full_like(positions, count * PAGE_SIZE)
    sink = case.recipe.sink_tokens if spec.sink_at_hand and count else 0
    page_seen = page_visible(positions, quantized, count, sink, spec.window)
    key_position = torch.arange(length, device=device)[None]
    seen16 = bits16_visible(positions, quantized, key_position, sink, spec.window)
    return RowParts(q, positions, keys, values, means, page_seen, case.keys[row][None], case.values[row][None], seen16)


@dataclass(frozen=True)
class Cut:
    """How the kernel cuts the work: CTAs, pairs of warps, and query rows that are read together."""

    ctas: int
    pairs: int
    columns: int


def reference(case: Case, cut: Cut) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (fp32) and natural log-sum-exp of the reference, partials cut as the kernel cuts them."""
    spec = case.spec
    rows, groups = len(spec.lengths), spec.group
    out = torch.zeros(rows, spec.tokens, spec.kv_heads * groups, spec.head_dim, device=case.query.device)
    lse = torch.full(out.shape[:3], -torch.inf, device=out.device)
    for row, length in enumerate(spec.lengths):
        if not length:
            continue
        parts = row_parts(case, row)
        partials = [bits16_partial(case.codec, parts.q, parts.keys16, parts.values16, parts.seen16, case.logits)]
        if parts.page_keys.shape[-2]:
            partials += page_partials(case, row, parts, cut)
        joined = combine_partials(partials)
        queries = parts.q.shape[-2]
        natural = joined.lse * torch.log(torch.tensor(2.0))
        shift = smoothing_shift(case.codec, parts.q)
        if spec.softcap is None and shift is not None:
            natural = natural + shift.squeeze(-1) * case.logits.scale
        out[row, spec.tokens - queries :] = joined.output[0].permute(2, 0, 1, 3).flatten(1, 2)
        lse[row, spec.tokens - queries :] = natural[0].permute(2, 0, 1).flatten(1, 2)
    return out, lse


def page_partials(case: Case, row: int, parts: RowParts, cut: Cut) -> list[Partial]:
    """A partial for each warp that reads pages of the row: each has its own running maximum over half pages."""
    spec = case.spec
    scores = page_scores(case.codec, parts.q, parts.page_keys, parts.means, parts.page_seen, case.logits)
    units = units_of_row(
        spec.lengths[row], case.before(row), int(case.plan.rows[row, 3]) >= 0, spec.window, case.recipe.sink_tokens
    )
    values = parts.page_values
    # Query rows [group, tokens] of the row, numbered token by token; padding queries stand in front
    queries = parts.q.shape[-2]
    token = torch.arange(queries, device=values.device) + spec.tokens - queries
    query_row = token * spec.group + torch.arange(spec.group, device=values.device)[:, None]
    column_groups = -(-spec.group * spec.tokens // cut.columns)
    partials = []
    for head, column_group in product(range(spec.kv_heads), range(column_groups)):
        together = query_row // cut.columns == column_group
        for begin, end in segments(case, row, head * column_groups + column_group, column_groups, cut, units.total):
            for pair, half in product(range(cut.pairs), range(2)):
                pages = [units.first_page + u for u in range(begin + pair, end, cut.pairs) if u < units.pages]
                if not pages or not together.any():
                    continue
                tokens = torch.cat([torch.arange(64) + 128 * page + 64 * half for page in pages]).to(values.device)
                partial = stream_partial(
                    case.codec, scores[:, head : head + 1, :, :, tokens], values[:, head : head + 1, tokens], 64
                )
                # As a partial of all heads and query rows, of which the others saw nothing
                output = torch.zeros(*scores.shape[:-1], spec.head_dim, device=values.device)
                lse = torch.full(scores.shape[:-1], -torch.inf, device=values.device)
                output[:, head] = partial.output[:, 0]
                lse[:, head] = partial.lse[:, 0].masked_fill(~together, -torch.inf)
                partials.append(Partial(output, lse))
    return partials


def segments(case: Case, row: int, tile: int, column_groups: int, cut: Cut, units: int) -> list[tuple[int, int]]:
    """Units [begin, end) of the pieces of work that a row's tile is cut into."""
    prefix, granule = case.plan.item_prefix.tolist(), case.spec.granule
    tiles = case.spec.kv_heads * column_groups
    items = prefix[row + 1] - prefix[row]
    if granule > 1:
        return [(i * granule, min(units, (i + 1) * granule)) for i in range(items)]
    first, total = prefix[row] * tiles + tile * items, prefix[-1] * tiles
    used = min(cut.ctas, total)
    share, larger = divmod(total, used)
    edges = sorted({first, first + items} | {c * share + min(c, larger) for c in range(used)})
    inside = [edge - first for edge in edges if first <= edge <= first + items]
    return [(a, min(units, b)) for a, b in pairwise(inside) if a < units]


def exact(case: Case) -> torch.Tensor:
    """Fp64 attention on dequantized keys and values, rows [tokens, heads, dim] as the kernel's output."""
    spec = case.spec
    out = torch.zeros(case.query.shape, dtype=torch.float64, device=case.query.device)
    for row, length in enumerate(spec.lengths):
        if not length:
            continue
        q, k, v, seen = dense(case, row)
        scores = q @ k.transpose(-1, -2) * case.logits.scale
        if spec.softcap is not None:
            shift = smoothing_shift(case.codec, row_parts(case, row).q).double()[0].flatten(1, 2)
            scores = torch.tanh((scores + shift * case.logits.scale) / spec.softcap) * spec.softcap
        p = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
        queries = min(length, spec.tokens)
        result = (p @ v).unflatten(1, (spec.group, queries))
        out[row, spec.tokens - queries :] = result.permute(2, 0, 1, 3).flatten(1, 2)
    return out


def dense(case: Case, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fp64 rotated queries, all keys (dequantized, rotated, less µ_k) and values a row reads, and the mask."""
    parts, codec = row_parts(case, row), case.codec
    q = codec.rotate(parts.q).double()[0].flatten(1, 2)
    page_keys = parts.page_keys.double()
    if parts.means is not None:
        page_keys = page_keys + parts.means.double().repeat_interleave(PAGE_SIZE, -2)
    k16 = codec.rotate(codec.smooth(parts.keys16)).double()
    k = torch.cat((page_keys, k16), -2)[0]
    v = torch.cat((parts.page_values.double(), parts.values16.double()), -2)[0]
    seen = torch.cat((parts.page_seen, parts.seen16), -1)[0]  # [tokens, keys]
    return q, k, v, seen.repeat(case.spec.group, 1)


def shape_of(case: Case) -> DecodeShape:
    spec = case.spec
    return choose_shape(
        case.buffers.layout,
        Arithmetic.NATIVE if spec.native else Arithmetic.W16,
        centered=case.buffers.means is not None,
        rotate=True,
        capped=spec.softcap is not None,
        bf16=spec.dtype == torch.bfloat16,
        query_rows=spec.group * spec.tokens,
    )


def workspace_for(case: Case) -> DecodeWorkspace:
    spec = case.spec
    return DecodeWorkspace(
        len(spec.lengths),
        spec.kv_heads * spec.group,
        spec.kv_heads,
        spec.head_dim,
        max_tokens=spec.tokens,
        max_length=max(spec.lengths),
        granule=spec.granule,
        sink_tokens=case.recipe.sink_tokens,
        device=case.query.device,
    )


def relative(x: torch.Tensor, y: torch.Tensor) -> float:
    """Largest ‖x - y‖ / ‖y‖ of a row of the batch."""
    x, y = x.double().flatten(1), y.double().flatten(1)
    norm = y.norm(dim=-1)
    error = (x - y).norm(dim=-1)
    assert bool((error[norm == 0] == 0).all())
    return float((error / norm.clamp(min=1e-30))[norm > 0].max()) if bool((norm > 0).any()) else 0.0


def check_result(case: Case, output: torch.Tensor, lse: torch.Tensor, cut: Cut) -> None:
    """The kernel's results are the reference's, and the new tokens are where they belong."""
    assert torch.isfinite(output).all()
    expected, expected_lse = reference(case, cut)
    # A result in the model's dtype is off by half a unit in its last place
    rounding = 2.0**-9 if case.spec.dtype == torch.bfloat16 else 2.0**-12
    difference = relative(output, expected)
    assert difference <= 1e-3 + rounding, difference
    finite = torch.isfinite(expected_lse)
    assert torch.equal(finite, torch.isfinite(lse)) and bool((lse[~finite] == -torch.inf).all())
    torch.testing.assert_close(lse[finite], expected_lse[finite], rtol=1e-4, atol=2e-4)
    check_append(case)


def check_append(case: Case) -> None:
    """New tokens are in the tail ring; nothing else has changed."""
    fresh = make_case(case.spec, case.query.device.type)
    ring = fresh.buffers.tail
    for row, length in enumerate(case.spec.lengths):
        slot = int(case.plan.rows[row, 2])
        for position in range(case.before(row), length):
            ring[slot, 0, :, position % ring.shape[3]] = case.keys[row][:, position]
            ring[slot, 1, :, position % ring.shape[3]] = case.values[row][:, position]
    assert torch.equal(ring.view(torch.int16), case.buffers.tail.view(torch.int16))
