"""Page layout: exact inverse, every byte used once, and tensor-core fragments that give the dense products."""

from itertools import product

import pytest
import torch

from bitdecoding.cache.formats import Fp4Format
from bitdecoding.errors import InvalidInputError, UnsupportedError
from bitdecoding.kernels.layout import (
    SUPPORTED_HEAD_DIMS,
    ArchFamily,
    LogicalPages,
    PageLayout,
    convert,
    cuda_constants,
    key_row_tokens,
    pack_page,
    unpack_page,
    value_k_tokens,
)
from bitdecoding.numerics import decode_e2m1, decode_e4m3, decode_e8m0, unpack_nibbles
from bitdecoding.numerics.blocks import BlockFormat, ScaleRule, dequantize_blocks
from bitdecoding.recipe import PAGE_SIZE

LAYOUTS = [
    PageLayout(arch, fmt, head_dim, padded)
    for arch, fmt, head_dim, padded in product(ArchFamily, BlockFormat, SUPPORTED_HEAD_DIMS, (False, True))
    if not (padded and fmt is BlockFormat.NVFP4)
]
UNPADDED = [layout for layout in LAYOUTS if not layout.padded]


def by_id(layout: PageLayout) -> str:
    return layout.layout_id


def random_bytes(shape: tuple[int, ...], high: int, seed: int) -> torch.Tensor:
    return torch.randint(0, high, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def random_pages(layout: PageLayout, *leading: int) -> LogicalPages:
    """Every code and every scale byte may occur."""
    return LogicalPages(
        *(
            random_bytes((*leading, *shape), 16 if name.endswith("codes") else 256, seed)
            for seed, (name, shape) in enumerate(layout.logical_shapes()._asdict().items())
        )
    )


# --- Packing


@pytest.mark.parametrize("layout", LAYOUTS, ids=by_id)
@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (0, 2)])
def test_unpacking_inverts_packing(layout: PageLayout, leading: tuple[int, ...]) -> None:
    pages = random_pages(layout, *leading)
    packed = pack_page(pages, layout)
    assert packed.shape == (*leading, layout.page_bytes) and packed.dtype == torch.uint8 and packed.is_contiguous()
    for original, unpacked in zip(pages, unpack_page(packed, layout), strict=True):
        assert torch.equal(original, unpacked)


@pytest.mark.parametrize("layout", LAYOUTS, ids=by_id)
def test_packing_inverts_unpacking_so_every_bit_has_one_place(layout: PageLayout) -> None:
    packed = random_bytes((2, layout.page_bytes), 256, 7)
    packed[:, layout.value_scales.end :] = 0
    assert torch.equal(pack_page(unpack_page(packed, layout), layout), packed)


@pytest.mark.parametrize("layout", LAYOUTS, ids=by_id)
def test_each_logical_code_has_four_bits_of_its_own(layout: PageLayout) -> None:
    """Setting one code to 15 sets 4 bits in its own section, and no two codes share any."""
    for name, section in (("key_codes", layout.key_codes), ("value_codes", layout.value_codes)):
        count = 48  # a sample; the test above covers the rest
        indices = torch.arange(count) * (PAGE_SIZE * layout.head_dim // count) + torch.arange(count) % 16
        codes = torch.zeros(count, PAGE_SIZE * layout.head_dim, dtype=torch.uint8)
        codes[torch.arange(count), indices] = 15
        empty = LogicalPages(*(torch.zeros(count, *shape, dtype=torch.uint8) for shape in layout.logical_shapes()))
        packed = pack_page(empty._replace(**{name: codes.unflatten(-1, (PAGE_SIZE, layout.head_dim))}), layout)
        bits = (packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1
        assert torch.equal(bits.sum((-1, -2)), torch.full((count,), 4))
        assert int(bits[:, section.slice].sum()) == 4 * count
        assert int(bits.sum(0, dtype=torch.int64).max()) == 1


def test_sizes() -> None:
    nvfp4 = PageLayout(ArchFamily.SM90, BlockFormat.NVFP4, 128)
    sections = (nvfp4.key_codes, nvfp4.key_scales, nvfp4.value_codes, nvfp4.value_scales)
    assert [tuple(section) for section in sections] == [(0, 8192), (8192, 1024), (9216, 8192), (17408, 1024)]
    assert nvfp4.page_bytes == 18432
    assert PageLayout(ArchFamily.SM90, BlockFormat.MXFP4, 128).page_bytes == 17408
    for layout in LAYOUTS:
        assert layout.page_bytes % 16 == 0  # a bulk copy's unit
        if layout.padded:
            assert layout.page_bytes == PageLayout(layout.arch, BlockFormat.NVFP4, layout.head_dim).page_bytes


def test_padding_is_zero_and_ignored() -> None:
    layout = PageLayout(ArchFamily.SM90, BlockFormat.MXFP4, 128, padded=True)
    pages = random_pages(layout, 2)
    packed = pack_page(pages, layout)
    assert not packed[:, layout.value_scales.end :].any()
    packed[:, layout.value_scales.end :] = 255
    for original, unpacked in zip(pages, unpack_page(packed, layout), strict=True):
        assert torch.equal(original, unpacked)


@pytest.mark.parametrize("layout", UNPADDED, ids=by_id)
def test_unpacking_reads_strided_and_misaligned_pages(layout: PageLayout) -> None:
    pages = random_pages(layout, 3)
    packed = pack_page(pages, layout)
    wider = torch.zeros(3, layout.page_bytes + 5, dtype=torch.uint8)
    wider[:, 1:-4] = packed
    for original, unpacked in zip(pages, unpack_page(wider[:, 1:-4], layout), strict=True):
        assert torch.equal(original, unpacked)


@pytest.mark.parametrize("fmt", BlockFormat)
def test_packs_what_the_cache_encodes(fmt: BlockFormat) -> None:
    """`Fp4Format`'s pages survive packing, and decode to the same values."""
    layout = PageLayout(ArchFamily.SM90, fmt, 64)
    x = torch.randn(2, 3, PAGE_SIZE, 64, generator=torch.Generator().manual_seed(1))
    keys_format, values_format = (Fp4Format(fmt, fmt.standard_rule, dim) for dim in (-1, -2))
    keys, values = keys_format.encode(x), values_format.encode(x)
    pages = LogicalPages(
        unpack_nibbles(keys["codes"]), keys["scales"], unpack_nibbles(values["codes"]), values["scales"]
    )
    unpacked = unpack_page(pack_page(pages, layout), layout)
    decoded = dequantize_blocks(unpacked.value_codes, unpacked.value_scales, fmt, dim=-2)
    assert torch.equal(decoded, values_format.decode(values))
    decoded = dequantize_blocks(unpacked.key_codes, unpacked.key_scales, fmt, dim=-1)
    assert torch.equal(decoded, keys_format.decode(keys))
    assert isinstance(fmt.standard_rule, ScaleRule)


# --- Conversion and identity


@pytest.mark.parametrize("layout", LAYOUTS, ids=by_id)
def test_convert_equals_packing_for_the_target(layout: PageLayout) -> None:
    pages = random_pages(layout, 2)
    packed = pack_page(pages, layout)
    targets = [
        other for other in LAYOUTS if (other.block_format, other.head_dim) == (layout.block_format, layout.head_dim)
    ]
    assert len(targets) == (2 if layout.block_format is BlockFormat.NVFP4 else 4)
    for target in targets:
        assert torch.equal(convert(packed, layout, target), pack_page(pages, target))


def test_families_differ_only_in_the_bits_of_a_word() -> None:
    hopper, blackwell = (PageLayout(arch, BlockFormat.NVFP4, 128) for arch in (ArchFamily.SM90, ArchFamily.SM120))
    pages = random_pages(hopper)
    a, b = pack_page(pages, hopper), pack_page(pages, blackwell)
    assert torch.equal(a[hopper.key_scales.slice], b[hopper.key_scales.slice])
    assert not torch.equal(a[hopper.key_codes.slice], b[hopper.key_codes.slice])
    assert torch.equal(hopper_codes(a[hopper.key_codes.slice]), plain_codes(b[hopper.key_codes.slice]))


def test_ids_are_unique_and_others_are_refused() -> None:
    assert len({layout.layout_id for layout in LAYOUTS}) == len(LAYOUTS)
    layout = PageLayout(ArchFamily.SM90, BlockFormat.NVFP4, 128)
    assert layout.layout_id == "v1-sm90-nvfp4-d128"
    layout.check_id(layout.layout_id)
    with pytest.raises(
        InvalidInputError, match=r"packed as 'v1-sm120-nvfp4-d128' and cannot be read as 'v1-sm90-nvfp4"
    ):
        layout.check_id(PageLayout(ArchFamily.SM120, BlockFormat.NVFP4, 128).layout_id)


@pytest.mark.parametrize("head_dim", [0, 32, 80, 96, 192, 512])
def test_other_head_dims_are_refused_by_name(head_dim: int) -> None:
    with pytest.raises(UnsupportedError, match=rf"head_dim: no page layout for {head_dim}; supported are 64, 128, 256"):
        PageLayout(ArchFamily.SM90, BlockFormat.NVFP4, head_dim)


def test_refusals() -> None:
    layout = PageLayout(ArchFamily.SM90, BlockFormat.NVFP4, 64)
    pages = random_pages(layout, 2)
    with pytest.raises(
        InvalidInputError, match=r"key_scales: expected uint8 \[2, 128, 4\].*got torch.uint8 \[2, 128, 8\]"
    ):
        pack_page(pages._replace(key_scales=random_bytes((2, 128, 8), 256, 0)), layout)
    with pytest.raises(InvalidInputError, match=r"value_codes: expected uint8 .*got torch.int32"):
        pack_page(pages._replace(value_codes=pages.value_codes.int()), layout)
    with pytest.raises(InvalidInputError, match="value_codes: 16 does not fit 4 bits"):
        pack_page(pages._replace(value_codes=torch.full_like(pages.value_codes, 16)), layout)
    with pytest.raises(InvalidInputError, match=r"packed: expected uint8 \[\.\.\., 9216\]"):
        unpack_page(torch.zeros(2, 9217, dtype=torch.uint8), layout)
    with pytest.raises(InvalidInputError, match=r"packed: expected uint8 .*got torch.int32"):
        unpack_page(torch.zeros(2, 9216, dtype=torch.int32), layout)
    with pytest.raises(InvalidInputError, match="only the architecture and the padding can change"):
        convert(pack_page(pages, layout), layout, PageLayout(ArchFamily.SM90, BlockFormat.MXFP4, 64))
    with pytest.raises(InvalidInputError, match="only MXFP4 pages can be padded"):
        PageLayout(ArchFamily.SM90, BlockFormat.NVFP4, 64, padded=True)


@pytest.mark.parametrize(
    ("capability", "family"), [((9, 0), ArchFamily.SM90), ((12, 0), ArchFamily.SM120), ((12, 1), ArchFamily.SM120)]
)
def test_family_of_a_device(capability: tuple[int, int], family: ArchFamily) -> None:
    assert ArchFamily.of_capability(*capability) is family


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (10, 3), (11, 0)])
def test_devices_without_kernels_are_refused(capability: tuple[int, int]) -> None:
    with pytest.raises(UnsupportedError, match=rf"capability {capability[0]}\.{capability[1]}; supported are 9.0"):
        ArchFamily.of_capability(*capability)


def test_constants_name_the_sections() -> None:
    constants = cuda_constants(PageLayout(ArchFamily.SM90, BlockFormat.MXFP4, 128, padded=True))
    assert constants["BD_PAGE_BYTES"] == 18432
    assert [constants[f"BD_{name}"] for name in ("KEY_CODES", "KEY_SCALES", "VALUE_CODES", "VALUE_SCALES")] == [
        0,
        8192,
        8704,
        16896,
    ]
    assert [(constants[f"BD_SIGN_BIT_{i}"], constants[f"BD_MAGNITUDE_BIT_{i}"]) for i in range(4)] == [
        (15, 9),
        (12, 6),
        (14, 3),
        (13, 0),
    ]


# --- Token orders


def test_key_rows_follow_the_documented_permutation() -> None:
    tokens = key_row_tokens()
    assert torch.equal(tokens.reshape(-1).sort().values, torch.arange(64))
    # Written the other way round
    for tile, row in product(range(4), range(16)):
        expected = 32 * (tile >> 1) + 16 * ((row >> 2) & 1) + 8 * (tile & 1) + 4 * (row >> 3) + (row & 3)
        assert int(tokens[tile, row]) == expected


def test_a_scale_block_of_tokens_stays_with_four_neighbouring_rows() -> None:
    """All 16 tokens of a block lie in one aligned group of four g: its maximum takes two shuffles."""
    tokens = key_row_tokens()
    for block in range(4):
        tile, row = (tokens // 16 == block).nonzero(as_tuple=True)
        assert len(set(((row % 8) // 4).tolist())) == 1
        assert len(set((tile // 2).tolist())) == 1


def test_value_k_keeps_scale_blocks_in_place() -> None:
    """k 16i..16i+15 are tokens 16i..16i+15: scale byte i belongs to block i, as the FP4 tensor cores want it."""
    tokens = value_k_tokens()
    assert torch.equal(tokens // 16, torch.arange(64) // 16)
    assert torch.equal(tokens.sort().values, torch.arange(64))


# --- A bit-level model of the decoder in e2m1.cuh


def words_of(section: torch.Tensor) -> torch.Tensor:
    """Unsigned 32-bit words as int64."""
    return section.contiguous().view(torch.int32).long() & 0xFFFFFFFF


def hopper_halves(words: torch.Tensor) -> torch.Tensor:
    """fp16 [..., 4, 2] of Hopper words, by the shifts and masks of `decode_e2m1`; element [j, e] is code j + 4e."""
    both = 0x00010001
    sign, all_bits = 0x8000 * both, 0x8E00 * both
    pairs = [
        words & all_bits,
        (words << 3) & all_bits,
        ((words << 1) & sign) | ((words << 6) & (0x0E00 * both)),
        ((words << 2) & sign) | ((words << 9) & (0x0E00 * both)),
    ]
    halves = torch.stack([torch.stack((pair & 0xFFFF, (pair >> 16) & 0xFFFF), -1) for pair in pairs], -2)
    return torch.where(halves >= 1 << 15, halves - (1 << 16), halves).to(torch.int16).view(torch.float16)


def hopper_values(words: torch.Tensor) -> torch.Tensor:
    """fp64 [..., 8] in the order of codes."""
    return (hopper_halves(words).double() * 2**14).transpose(-1, -2).flatten(-2)


def hopper_codes(section: torch.Tensor) -> torch.Tensor:
    halves = hopper_halves(words_of(section)).transpose(-1, -2).flatten(-2)
    bits = halves.contiguous().view(torch.int16).int()
    return (((bits >> 12) & 8) | ((bits >> 9) & 7)).to(torch.uint8)


def plain_codes(section: torch.Tensor) -> torch.Tensor:
    return torch.stack([((words_of(section) >> (4 * i)) & 15).to(torch.uint8) for i in range(8)], -1)


def plain_values(words: torch.Tensor) -> torch.Tensor:
    return torch.stack([decode_e2m1(((words >> (4 * i)) & 15).to(torch.uint8)) for i in range(8)], -1).double()


def test_hopper_order_decodes_every_code_at_every_position() -> None:
    layout = PageLayout(ArchFamily.SM90, BlockFormat.NVFP4, 64)
    pages = random_pages(layout)
    words = words_of(pack_page(pages, layout)[layout.key_codes.slice])
    seen = plain_codes(pack_page(pages, PageLayout(ArchFamily.SM120, BlockFormat.NVFP4, 64))[layout.key_codes.slice])
    assert all(len(seen[:, i].unique()) == 16 for i in range(8))
    values = hopper_values(words)
    assert torch.equal(values, decode_e2m1(seen).double())
    assert torch.equal(torch.signbit(values), torch.signbit(decode_e2m1(seen)))  # -0 as well


# --- Tensor-core fragments: both products of a decode step, computed the way a warp would

LANE = torch.arange(32)
G, T = LANE // 4, LANE % 4
HEADS = 8


def mma_k16(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """mma.m16n8k16 with the PTX manual's fragments: c [32, 4], a [32, 4, 2], b [32, 2, 2]."""
    left, right = torch.zeros(16, 16, dtype=torch.float64), torch.zeros(16, HEADS, dtype=torch.float64)
    for register, e in product(range(4), range(2)):
        left[G + 8 * (register & 1), 2 * T + e + 8 * (register >> 1)] = a[:, register, e]
    for register, e in product(range(2), range(2)):
        right[2 * T + e + 8 * register, G] = b[:, register, e]
    return c + accumulators(left @ right)


def mma_k64(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """mma.m16n8k64: a [32, 4, 8], b [32, 2, 8], scales of A's rows [32, 64] by lane and k, B unscaled.

    The scales of row g come from lane 4g, those of row g + 8 from lane 4g + 1.
    """
    left, right = torch.zeros(16, 64, dtype=torch.float64), torch.zeros(64, HEADS, dtype=torch.float64)
    for register, n in product(range(4), range(8)):
        left[G + 8 * (register & 1), 8 * T + n + 32 * (register >> 1)] = a[:, register, n]
    for register, n in product(range(2), range(8)):
        right[8 * T + n + 32 * register, G] = b[:, register, n]
    rows = torch.arange(HEADS)
    return c + accumulators((left * torch.cat((scales[4 * rows], scales[4 * rows + 1]))) @ right)


def accumulators(full: torch.Tensor) -> torch.Tensor:
    """C fragments [32, 4] of [16, 8]."""
    return torch.stack([full[G + 8 * (i >> 1), 2 * T + (i & 1)] for i in range(4)], -1)


def from_accumulators(c: torch.Tensor) -> torch.Tensor:
    full = torch.zeros(16, HEADS, dtype=c.dtype)
    for i in range(4):
        full[G + 8 * (i >> 1), 2 * T + (i & 1)] = c[:, i]
    return full


def movmatrix(x: torch.Tensor) -> torch.Tensor:
    """movmatrix.m8n8.trans.b16 on x [32, 2]: lane 4g+t gives row g, columns 2t, 2t+1."""
    full = torch.zeros(8, 8, dtype=x.dtype)
    for e in range(2):
        full[G, 2 * T + e] = x[:, e]
    return torch.stack([full.T[G, 2 * T + e] for e in range(2)], -1)


class Warp:
    """One warp's loads from a packed page, for the 64 tokens of one half."""

    def __init__(self, layout: PageLayout, packed: torch.Tensor, half: int) -> None:
        self.layout, self.half = layout, half
        self.keys = self._operands(packed[layout.key_codes.slice])  # [half, unit, lane, register]
        self.values = self._operands(packed[layout.value_codes.slice])
        self.key_scales = packed[layout.key_scales.slice].reshape(2, -1, 8, 16)[half]  # [unit, g, byte]
        self.value_scales = packed[layout.value_scales.slice].reshape(2, -1, 8, 16)[half]
        self.steps = layout.head_dim // 64
        self.tiles = layout.head_dim // 16
        self.block = layout.block_format.block_size

    def _operands(self, section: torch.Tensor) -> torch.Tensor:
        words = words_of(section).reshape(2, -1, 32, 4)[self.half]
        return hopper_values(words) if self.layout.arch is ArchFamily.SM90 else plain_values(words)

    def decode_scale(self, byte: torch.Tensor) -> torch.Tensor:
        return (decode_e4m3 if self.block == 16 else decode_e8m0)(byte.contiguous()).double()

    def key_step_scales(self, tile: int, step: int) -> torch.Tensor:
        """Scales of rows g and g + 8 [8 g, 2, blocks in 64 channels]."""
        tiles, width = self.layout.key_scale_unit
        columns = self.layout.head_dim // self.block // width
        first = step * (64 // self.block)
        unit = self.key_scales[(tile // tiles) * columns + first // width].reshape(8, tiles, 2, width)
        return self.decode_scale(unit[:, tile % tiles, :, first % width : first % width + 64 // self.block])

    def value_tile_scales(self, tile: int) -> torch.Tensor:
        """Scales of rows g and g + 8 [8 g, 2, blocks in 64 tokens]."""
        tiles, width = self.layout.value_scale_unit
        return self.decode_scale(self.value_scales[tile // tiles].reshape(8, tiles, 2, width)[:, tile % tiles])

    def multiply(self, c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """c + (scaled A)·B over 64 k: a [32, 4, 8], b [32, 2, 8] in k64 positions, scales [8 g, 2, blocks]."""
        of_k = scales.repeat_interleave(self.block, -1)  # [8 g, 2, 64 k]
        if self.layout.arch is ArchFamily.SM120:
            by_lane = torch.full((32, 64), float("nan"), dtype=torch.float64)  # lanes that the instruction ignores
            by_lane[4 * torch.arange(8)], by_lane[4 * torch.arange(8) + 1] = of_k[:, 0], of_k[:, 1]
            return mma_k64(c, a, b, by_lane)
        if self.block == 16:
            # A lane scales its own elements: k 8t.. and 32 + 8t..
            for j in range(4):
                pair = [j, j + 4]
                scaled = torch.stack(
                    [a[:, i, pair] * of_k[G, i & 1, 8 * T + 32 * (i >> 1)].unsqueeze(-1) for i in range(4)], 1
                )
                c = mma_k16(c, scaled, b[:, :, pair])
            return c
        # MXFP4 scales accumulators, so one product must stay inside a block of 32 k: registers of one half of k
        for step in range(2):
            part = torch.zeros_like(c)
            for j in (0, 2):
                low, high = [j, j + 4], [j + 1, j + 5]
                left = torch.stack([a[:, 2 * step + r, pair] for pair in (low, high) for r in range(2)], 1)
                part = mma_k16(part, left, torch.stack([b[:, step, low], b[:, step, high]], 1))
            c = c + part * torch.stack([of_k[G, i >> 1, 32 * step] for i in range(4)], -1)
        return c

    def scores(self, query: torch.Tensor) -> list[torch.Tensor]:
        """Accumulators of the four key tiles for queries [8, head_dim]."""
        result = []
        for tile in range(4):
            c = torch.zeros(32, 4, dtype=torch.float64)
            for step in range(self.steps):
                b = torch.stack(
                    [query[G[:, None], 64 * step + 32 * r + 8 * T[:, None] + torch.arange(8)] for r in (0, 1)], 1
                )
                c = self.multiply(c, self.keys[tile * self.steps + step], b, self.key_step_scales(tile, step))
            result.append(c)
        return result

    def probability_operand(self, tiles: list[torch.Tensor]) -> torch.Tensor:
        """B [32, 2, 8] of the second product from probabilities in accumulator fragments."""
        b = torch.zeros(32, 2, 8, dtype=torch.float64)
        if self.layout.arch is ArchFamily.SM90:
            for register, j in product(range(2), range(4)):
                tile, r = 2 * register + (j >> 1), j & 1
                b[:, register, [j, j + 4]] = movmatrix(tiles[tile][:, 2 * r : 2 * r + 2])
            return b
        # 4-bit probabilities: the four (tile, r) of a register share one 16-bit element, so one movmatrix moves 8 codes
        for register in range(2):
            nibbles = torch.zeros(32, 2, dtype=torch.int64)
            for j in range(4):
                tile, r = 2 * register + (j >> 1), j & 1
                nibbles |= tiles[tile][:, 2 * r : 2 * r + 2].long() << (4 * j)
            moved = movmatrix(nibbles)
            word = moved[:, 0] | (moved[:, 1] << 16)
            for n in range(8):
                b[:, register, n] = ((word >> (4 * n)) & 15).double()
        return b

    def output(self, b: torch.Tensor) -> torch.Tensor:
        """O^T of this half [head_dim, 8]."""
        rows = []
        for tile in range(self.tiles):
            c = torch.zeros(32, 4, dtype=torch.float64)
            rows.append(from_accumulators(self.multiply(c, self.values[tile], b, self.value_tile_scales(tile))))
        return torch.cat(rows)


def test_movmatrix_model_transposes() -> None:
    x = torch.arange(64).reshape(8, 8)
    fragments = torch.stack([x[G, 2 * T + e] for e in range(2)], -1)
    assert torch.equal(movmatrix(fragments), torch.stack([x.T[G, 2 * T + e] for e in range(2)], -1))


@pytest.mark.parametrize("layout", LAYOUTS, ids=by_id)
def test_fragments_give_the_dense_products(layout: PageLayout) -> None:
    """S^T = K·Q^T, then O^T = V^T·P^T with P taken from the score accumulators: both exact, as all values are small."""
    fmt = layout.block_format
    pages = random_pages(layout)
    # Powers of two and small integers only, so that fp64 sums are exact in every order
    low, count = (0x30, 24) if fmt is BlockFormat.NVFP4 else (122, 10)
    pages = pages._replace(
        key_scales=low + pages.key_scales % count,
        value_scales=low + pages.value_scales % count,
    )
    packed = pack_page(pages, layout)
    keys = dequantize_blocks(pages.key_codes, pages.key_scales, fmt, dim=-1).double()
    values = dequantize_blocks(pages.value_codes, pages.value_scales, fmt, dim=-2).double()
    query = torch.randint(-6, 7, (HEADS, layout.head_dim), generator=torch.Generator().manual_seed(5)).double()
    dense = keys @ query.T  # [128, 8]

    def probability(scores: torch.Tensor) -> torch.Tensor:
        return (scores * 64).floor().remainder(16)  # any function of a score; 4 bits

    output = torch.zeros(layout.head_dim, HEADS, dtype=torch.float64)
    for half in range(2):
        warp = Warp(layout, packed, half)
        tiles = warp.scores(query)
        for tile, c in enumerate(tiles):
            assert torch.equal(from_accumulators(c), dense[64 * half + key_row_tokens()[tile]])
        output += warp.output(warp.probability_operand([probability(c) for c in tiles]))
    assert torch.equal(output, values.T @ probability(dense))
