"""Where every bit of a page lies: the one definition behind the packer, the unpacker and the kernels' constants.

A *packed page* holds the 128 tokens of one cache block for one KV head as one contiguous run of bytes: key codes, key
scales, value codes, value scales. A kernel fetches it with one bulk copy, after which 16-byte shared-memory loads give
each lane its own tensor-core operands. Byte order is *fragment order*, for `mma.m16n8k64` (lane = 4g + t, 8 codes a
32-bit word): register a0 of a lane is row g, k 8t..8t+7; a1 is row g+8; a2 and a3 are the same rows, k + 32.

Slowest index first, with half = which 64 tokens of the page, and one 16-byte unit per lane or g:

- key codes ``[half][tile 4][k step][lane 32][register 4]``: rows are tokens (`key_row_tokens`), k are channels;
- key scales ``[half][tile group][channel group][g 8][tile][row g, row g+8][byte]``: bytes are blocks of channels;
- value codes ``[half][tile][lane 32][register 4]``: rows are channels, k are tokens (`value_k_tokens`);
- value scales ``[half][tile group][g 8][tile][row g, row g+8][byte]``: bytes are blocks of tokens.

A scale unit has up to 8 bytes of a row, and as many tiles as fill 16 bytes.

The token orders are chosen so that score accumulators turn into the B operand of the second product inside one warp,
and so that k 16i..16i+15 of that product are one scale block, as the FP4 tensor cores demand. They are the same for all
architectures here; only the order of bits inside a word differs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import torch

from bitdecoding.errors import InvalidInputError, UnsupportedError
from bitdecoding.names import Choice
from bitdecoding.numerics.blocks import BlockFormat
from bitdecoding.recipe import PAGE_SIZE

__all__ = [
    "SUPPORTED_HEAD_DIMS",
    "ArchFamily",
    "LogicalPages",
    "LogicalShapes",
    "PageLayout",
    "Section",
    "convert",
    "cuda_constants",
    "key_row_tokens",
    "pack_page",
    "unpack_page",
    "value_k_tokens",
]

SUPPORTED_HEAD_DIMS = (64, 128, 256)

_LAYOUT_VERSION = 1
"""Goes up with any change of the byte order, so that a cache kept on disk is never misread."""
_HALF = 64
_TILE_ROWS = 16
_K_STEP = 64
_UNIT_BYTES = 16
_WORD_CODES = 8

# Bit positions of the sign and of the lowest magnitude bit of the codes j = 0..3 of a word; code j + 4 lies 16 higher.
# Each pair (j, j + 4) lands as two fp16 with one or two LOP3: sign at bit 15, magnitude at bits 11..9.
_HOPPER_BITS = ((15, 9), (12, 6), (14, 3), (13, 0))


class ArchFamily(Choice):
    """GPUs that read the same bytes. sm_100 will need another order altogether (tcgen05 core matrices)."""

    SM90 = "sm90"
    SM120 = "sm120"

    @classmethod
    def of_capability(cls, major: int, minor: int) -> "ArchFamily":
        """The family of a compute capability; raises `UnsupportedError` for one that has no kernels."""
        if (major, minor) == (9, 0):
            return cls.SM90
        if major == 12:
            return cls.SM120
        raise UnsupportedError(
            f"device: no kernels for compute capability {major}.{minor}; supported are 9.0 (Hopper) and 12.x "
            "(Blackwell RTX)"
        )

    @property
    def code_bits(self) -> tuple[tuple[int, int], ...]:
        """(sign bit, lowest magnitude bit) of each of the 8 codes in a 32-bit word."""
        if self is ArchFamily.SM90:
            return _HOPPER_BITS + tuple((sign + 16, magnitude + 16) for sign, magnitude in _HOPPER_BITS)
        return tuple((4 * code + 3, 4 * code) for code in range(_WORD_CODES))


class Section(NamedTuple):
    """A part of a packed page."""

    offset: int
    size: int

    @property
    def end(self) -> int:
        """Offset of the byte behind the section."""
        return self.offset + self.size

    @property
    def slice(self) -> slice:
        """The section's bytes, as an index of the last dim."""
        return slice(self.offset, self.end)


class LogicalPages(NamedTuple):
    """Pages in logical order, all uint8, any leading dims.

    Attributes:
        key_codes: E2M1 codes 0..15 [..., 128, head_dim].
        key_scales: scale bytes, blocks along channels [..., 128, head_dim / block size].
        value_codes: E2M1 codes 0..15 [..., 128, head_dim].
        value_scales: scale bytes, blocks along tokens [..., 128 / block size, head_dim].
    """

    key_codes: torch.Tensor
    key_scales: torch.Tensor
    value_codes: torch.Tensor
    value_scales: torch.Tensor


class LogicalShapes(NamedTuple):
    """Last two dims of the tensors of `LogicalPages`."""

    key_codes: tuple[int, int]
    key_scales: tuple[int, int]
    value_codes: tuple[int, int]
    value_scales: tuple[int, int]


@dataclass(frozen=True)
class PageLayout:
    """Layout of the pages of one cache.

    Attributes:
        arch: whose bit order.
        block_format: NVFP4 or MXFP4.
        head_dim: channels of a head.
        padded: an MXFP4 page takes as many bytes as an NVFP4 page, the rest zeros, so that layers of both formats can
            share one allocation.

    Raises:
        UnsupportedError: a head_dim without kernels.
        InvalidInputError: ``padded`` with NVFP4, which has nothing to pad.
    """

    arch: ArchFamily
    block_format: BlockFormat
    head_dim: int
    padded: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "arch", ArchFamily(self.arch))
        object.__setattr__(self, "block_format", BlockFormat(self.block_format))
        if self.head_dim not in SUPPORTED_HEAD_DIMS:
            supported = ", ".join(map(str, SUPPORTED_HEAD_DIMS))
            raise UnsupportedError(f"head_dim: no page layout for {self.head_dim}; supported are {supported}")
        if self.padded and self.block_format is BlockFormat.NVFP4:
            raise InvalidInputError("padded: only MXFP4 pages can be padded (to the size of NVFP4 pages)")

    @property
    def layout_id(self) -> str:
        """Name to store beside a cache; equal only for equal byte orders."""
        padded = "-padded" if self.padded else ""
        return f"v{_LAYOUT_VERSION}-{self.arch.value}-{self.block_format.value}-d{self.head_dim}{padded}"

    def check_id(self, stored: str) -> None:
        """Raise `InvalidInputError` unless ``stored``, the id beside a cache, is this layout's."""
        if stored != self.layout_id:
            raise InvalidInputError(
                f"layout: the cache was packed as {stored!r} and cannot be read as {self.layout_id!r}; convert its "
                "pages"
            )

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of the keys, and of the values."""
        return PAGE_SIZE * self.head_dim // 2

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of the keys, and of the values."""
        return PAGE_SIZE * self.head_dim // self.block_format.block_size

    @property
    def key_codes(self) -> Section:
        """Where the key codes lie."""
        return Section(0, self.code_bytes)

    @property
    def key_scales(self) -> Section:
        """Where the key scales lie."""
        return Section(self.key_codes.end, self.scale_bytes)

    @property
    def value_codes(self) -> Section:
        """Where the value codes lie."""
        return Section(self.key_scales.end, self.code_bytes)

    @property
    def value_scales(self) -> Section:
        """Where the value scales lie."""
        return Section(self.value_codes.end, self.scale_bytes)

    @property
    def page_bytes(self) -> int:
        """Bytes of one packed page, padding included; a multiple of 16, as bulk copies need."""
        if self.padded:
            return PageLayout(self.arch, BlockFormat.NVFP4, self.head_dim).page_bytes
        return self.value_scales.end

    @property
    def key_scale_unit(self) -> tuple[int, int]:
        """(tiles, bytes of a row) in one 16-byte unit of key scales."""
        return _scale_unit(self.head_dim // self.block_format.block_size)

    @property
    def value_scale_unit(self) -> tuple[int, int]:
        """(tiles, bytes of a row) in one 16-byte unit of value scales."""
        return _scale_unit(_HALF // self.block_format.block_size)

    def logical_shapes(self) -> LogicalShapes:
        """The last two dims of each tensor of `LogicalPages`."""
        block = self.block_format.block_size
        codes = (PAGE_SIZE, self.head_dim)
        return LogicalShapes(codes, (PAGE_SIZE, self.head_dim // block), codes, (PAGE_SIZE // block, self.head_dim))


def _scale_unit(bytes_of_row: int) -> tuple[int, int]:
    width = min(8, bytes_of_row)
    return _UNIT_BYTES // (2 * width), width


# --- Token orders


def key_row_tokens() -> torch.Tensor:
    """Token (0..63 in its half) of each row of the key tiles: int64 [4, 16].

    Token n is in tile 2·(n>>5) + ((n>>3)&1), row 8·((n>>2)&1) + 4·((n>>4)&1) + (n&3).
    """
    n = torch.arange(_HALF)
    tile = 2 * (n >> 5) + ((n >> 3) & 1)
    row = 8 * ((n >> 2) & 1) + 4 * ((n >> 4) & 1) + (n & 3)
    tokens = torch.empty(4, _TILE_ROWS, dtype=torch.int64)
    tokens[tile, row] = n
    return tokens


def value_k_tokens() -> torch.Tensor:
    """Token (0..63 in its half) of each k of a value tile: int64 [64].

    Follows from `key_row_tokens`. `movmatrix` on the score accumulators of tile i, rows 8r..8r+7, gives lane 4g+t rows
    2t and 2t+1 of column g: two of the 8 elements that the lane supplies to B. Register b of B takes tiles 2b and
    2b+1; element j + 4e is row 2t+e of the j-th (tile, r). The same for 16-bit and for 4-bit probabilities.
    """
    k = torch.arange(_K_STEP)
    b, t, e, j = k >> 5, (k >> 3) & 3, (k >> 2) & 1, k & 3
    return key_row_tokens()[2 * b + (j >> 1), 8 * (j & 1) + 2 * t + e]


# --- Index maps


class _PageMap(NamedTuple):
    """For each word of codes and each byte of scales, the flat index in the logical tensor's last two dims.

    ``*_codes`` are int64 [words, 8], ``*_scales`` int64 [bytes]; all on the CPU.
    """

    key_codes: torch.Tensor
    key_scales: torch.Tensor
    value_codes: torch.Tensor
    value_scales: torch.Tensor


def _axes(*sizes: int) -> tuple[torch.Tensor, ...]:
    """Index of each axis of an array of this shape, shaped to broadcast."""
    return torch.meshgrid(*(torch.arange(size) for size in sizes), indexing="ij")


@lru_cache(maxsize=16)
def _page_map(block_format: BlockFormat, head_dim: int) -> _PageMap:
    layout = PageLayout(ArchFamily.SM90, block_format, head_dim)  # the families share it
    block = block_format.block_size
    key_tokens, value_tokens = key_row_tokens(), value_k_tokens()

    # b, r: register 2b + r; n: code of the word
    half, tile, step, g, t, b, r, n = _axes(2, 4, head_dim // _K_STEP, 8, 4, 2, 2, _WORD_CODES)
    token = _HALF * half + key_tokens[tile, 8 * r + g]
    key_codes = token * head_dim + _K_STEP * step + 32 * b + 8 * t + n

    half, tile, g, t, b, r, n = _axes(2, head_dim // _TILE_ROWS, 8, 4, 2, 2, _WORD_CODES)
    token = _HALF * half + value_tokens[32 * b + 8 * t + n]
    value_codes = token * head_dim + _TILE_ROWS * tile + 8 * r + g

    blocks = head_dim // block
    tiles, width = layout.key_scale_unit
    half, group, columns, g, tile, r, byte = _axes(2, 4 // tiles, blocks // width, 8, tiles, 2, width)
    token = _HALF * half + key_tokens[tiles * group + tile, 8 * r + g]
    key_scales = token * blocks + width * columns + byte

    tiles, width = layout.value_scale_unit
    half, group, g, tile, r, byte = _axes(2, head_dim // _TILE_ROWS // tiles, 8, tiles, 2, width)
    channel = _TILE_ROWS * (tiles * group + tile) + 8 * r + g
    value_scales = (width * half + byte) * head_dim + channel

    return _PageMap(
        key_codes.reshape(-1, _WORD_CODES),
        key_scales.reshape(-1),
        value_codes.reshape(-1, _WORD_CODES),
        value_scales.reshape(-1),
    )


@lru_cache(maxsize=64)
def _inverse_map(block_format: BlockFormat, head_dim: int, device: torch.device) -> _PageMap:
    """For each flat logical index, the flat index in `_page_map`'s tensors."""
    return _PageMap(*(index.reshape(-1).argsort().to(device) for index in _page_map(block_format, head_dim)))


@lru_cache(maxsize=64)
def _device_map(block_format: BlockFormat, head_dim: int, device: torch.device) -> _PageMap:
    return _PageMap(*(index.to(device) for index in _page_map(block_format, head_dim)))


@cache
def _placed_codes(arch: ArchFamily, device: torch.device) -> torch.Tensor:
    """What each code 0..15 contributes to a word in each of the 8 positions: int32 [8, 16]."""
    words = [
        [((code >> 3) << sign) | ((code & 7) << magnitude) for code in range(16)] for sign, magnitude in arch.code_bits
    ]
    # Bit 31 is the sign of an int32
    return torch.tensor(words, dtype=torch.int64).to(torch.int32).to(device)


# --- Packing


def pack_page(pages: LogicalPages, layout: PageLayout) -> torch.Tensor:
    """Pack pages in logical order.

    Args:
        pages: equal leading dims and device.
        layout: of the result.

    Returns:
        uint8 [..., layout.page_bytes], each page contiguous; padding is zero.

    Raises:
        InvalidInputError: another dtype or shape, codes above 15.
    """
    leading = _check_logical(pages, layout)
    device = pages.key_codes.device
    index = _device_map(layout.block_format, layout.head_dim, device)
    parts = [
        _pack_codes(pages.key_codes, index.key_codes, layout.arch),
        pages.key_scales.flatten(-2)[..., index.key_scales],
        _pack_codes(pages.value_codes, index.value_codes, layout.arch),
        pages.value_scales.flatten(-2)[..., index.value_scales],
    ]
    padding = layout.page_bytes - layout.value_scales.end
    if padding:
        parts.append(torch.zeros((*leading, padding), dtype=torch.uint8, device=device))
    return torch.cat(parts, dim=-1)


def unpack_page(packed: torch.Tensor, layout: PageLayout) -> LogicalPages:
    """Exact inverse of `pack_page`.

    Args:
        packed: uint8 [..., layout.page_bytes].
        layout: how they were packed.

    Raises:
        InvalidInputError: another dtype or size.
    """
    if packed.dtype != torch.uint8 or packed.dim() < 1 or packed.shape[-1] != layout.page_bytes:
        raise InvalidInputError(
            f"packed: expected uint8 [..., {layout.page_bytes}] for layout {layout.layout_id}, got {packed.dtype} "
            f"{list(packed.shape)}"
        )
    index = _inverse_map(layout.block_format, layout.head_dim, packed.device)
    shapes = layout.logical_shapes()
    return LogicalPages(
        _unpack_codes(packed[..., layout.key_codes.slice], index.key_codes, layout.arch).unflatten(
            -1, shapes.key_codes
        ),
        packed[..., layout.key_scales.slice][..., index.key_scales].unflatten(-1, shapes.key_scales),
        _unpack_codes(packed[..., layout.value_codes.slice], index.value_codes, layout.arch).unflatten(
            -1, shapes.value_codes
        ),
        packed[..., layout.value_scales.slice][..., index.value_scales].unflatten(-1, shapes.value_scales),
    )


def convert(packed: torch.Tensor, source: PageLayout, target: PageLayout) -> torch.Tensor:
    """Repack pages [..., source.page_bytes] for another architecture or padding: uint8 [..., target.page_bytes].

    Raises `InvalidInputError` when format or head_dim differ: that would be quantizing again.
    """
    if (source.block_format, source.head_dim) != (target.block_format, target.head_dim):
        raise InvalidInputError(
            f"layout: pages of {source.layout_id!r} cannot become {target.layout_id!r}; only the architecture and the "
            "padding can change"
        )
    return pack_page(unpack_page(packed, source), target)


def _check_logical(pages: LogicalPages, layout: PageLayout) -> tuple[int, ...]:
    """The leading dims, after checking every tensor."""
    leading = tuple(pages.key_codes.shape[:-2])
    for name, tensor, last in zip(pages._fields, pages, layout.logical_shapes(), strict=True):
        if tensor.dtype != torch.uint8 or tuple(tensor.shape) != (*leading, *last):
            raise InvalidInputError(
                f"{name}: expected uint8 {[*leading, *last]} for layout {layout.layout_id}, got {tensor.dtype} "
                f"{list(tensor.shape)}"
            )
    for name, codes in (("key_codes", pages.key_codes), ("value_codes", pages.value_codes)):
        if codes.numel() and int(codes.max()) > 15:
            raise InvalidInputError(f"{name}: {int(codes.max())} does not fit 4 bits; codes are 0..15")
    return leading


def _pack_codes(codes: torch.Tensor, index: torch.Tensor, arch: ArchFamily) -> torch.Tensor:
    """Uint8 [..., 4 words] from codes [..., 128, head_dim]."""
    flat = codes.flatten(-2)
    placed = _placed_codes(arch, codes.device)
    words = torch.zeros((*flat.shape[:-1], index.shape[0]), dtype=torch.int32, device=codes.device)
    for position in range(_WORD_CODES):
        words |= placed[position][flat[..., index[:, position]].int()]
    return words.view(torch.uint8)  # little-endian, like the GPU


def _unpack_codes(packed: torch.Tensor, index: torch.Tensor, arch: ArchFamily) -> torch.Tensor:
    """Codes uint8 [..., 128 · head_dim] from bytes [..., 4 words]."""
    # Cloned, because a view as 32-bit words needs aligned storage
    words = packed.clone(memory_format=torch.contiguous_format).view(torch.int32)
    codes = [(((words >> sign) & 1) << 3) | ((words >> magnitude) & 7) for sign, magnitude in arch.code_bits]
    return torch.stack([code.to(torch.uint8) for code in codes], dim=-1).flatten(-2)[..., index]


# --- Kernels


def cuda_constants(layout: PageLayout) -> Mapping[str, int]:
    """Macros that the CUDA sources are compiled with for this layout."""
    key_tiles, key_width = layout.key_scale_unit
    value_tiles, value_width = layout.value_scale_unit
    constants = {
        "BD_PAGE_TOKENS": PAGE_SIZE,
        "BD_HEAD_DIM": layout.head_dim,
        "BD_BLOCK_SIZE": layout.block_format.block_size,
        "BD_NVFP4": int(layout.block_format is BlockFormat.NVFP4),
        "BD_HOPPER_BITS": int(layout.arch is ArchFamily.SM90),
        "BD_PAGE_BYTES": layout.page_bytes,
        "BD_KEY_CODES": layout.key_codes.offset,
        "BD_KEY_SCALES": layout.key_scales.offset,
        "BD_VALUE_CODES": layout.value_codes.offset,
        "BD_VALUE_SCALES": layout.value_scales.offset,
        "BD_KEY_SCALE_TILES": key_tiles,
        "BD_KEY_SCALE_WIDTH": key_width,
        "BD_VALUE_SCALE_TILES": value_tiles,
        "BD_VALUE_SCALE_WIDTH": value_width,
    }
    for code, (sign, magnitude) in enumerate(layout.arch.code_bits[:4]):
        constants[f"BD_SIGN_BIT_{code}"] = sign
        constants[f"BD_MAGNITUDE_BIT_{code}"] = magnitude
    return constants
