"""Tokens to packed pages on the GPU: after a (chunked) prefill of one layer, and after a decode step of all layers.

The kernels read what `bitdecoding.kernels.control` found for the step: the row states and the block table. They never
wait for the device and can be captured in CUDA graphs.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bitdecoding.errors import InvalidInputError, UnsupportedError
from bitdecoding.kernels.buffers import LayerBuffers
from bitdecoding.kernels.checks import check_block_table, check_heads, check_states, check_tensor, check_vector
from bitdecoding.kernels.compile import Kernel
from bitdecoding.kernels.layout import ArchFamily, PageLayout, cuda_constants
from bitdecoding.numerics.blocks import BlockFormat
from bitdecoding.numerics.ldlq import LdlqFactors
from bitdecoding.recipe import PAGE_SIZE, KeyRounding, Recipe, Rotation, ValueBlocks

__all__ = ["Promotion", "QuantizeConfig", "promote_pages", "store_chunk"]

_THREADS = 256
_LAYER_WORDS = 8
_POINTER_BYTES = 8
_MAX_GRID = 65535
_PROMOTING_CTAS = 32
"""CTAs of a layer and head that share the rows of a batch: most rows fill no page in a step."""


@dataclass(frozen=True)
class QuantizeConfig:
    """What a quantize kernel is compiled for.

    Attributes:
        layout: of the pages.
        bf16: the model's dtype is BF16, else FP16.
        search: keys by the format's search rule, else by its standard rule. Values always take the standard rule.
        rotate: keys are rotated by the normalised Hadamard matrix.
        centered: keys are stored less their page's mean.
        ldlq: LDLQ rounding of keys.
    """

    layout: PageLayout
    bf16: bool
    search: bool = True
    rotate: bool = True
    centered: bool = False
    ldlq: bool = False

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA, as quantize.cu lays it out."""
        layout, dim = self.layout, self.layout.head_dim
        image = layout.value_scales.end - (layout.value_codes.offset if self.ldlq else 0)
        partial_means = _THREADS // (dim // 8) * dim * 4 if self.centered else 0
        keys, factors = 0, 0
        if self.ldlq:
            keys = dim * (64 if dim == 256 else PAGE_SIZE) * 4
            factors = (1 if dim == 256 else 2) * dim * layout.block_format.block_size * 4
        rows = PAGE_SIZE * _POINTER_BYTES
        means = dim * 4 * (2 if self.centered else 1)
        return max(image, partial_means, keys) + max(rows, factors) + rows + means

    @property
    def min_ctas(self) -> int:
        """CTAs a multiprocessor that registers must leave room for."""
        # A lane holds a quarter of a key. The other case fills most of a small multiprocessor's shared memory, and
        # would spill registers.
        small = self.layout.arch is ArchFamily.SM120 and self.layout.block_format is BlockFormat.NVFP4
        alone = self.layout.head_dim == 256 or (self.ldlq and small)
        return 1 if alone else 2

    @property
    def defines(self) -> dict[str, int]:
        """Macros to compile with."""
        return {
            **cuda_constants(self.layout),
            "BD_BF16": int(self.bf16),
            "BD_KEY_SEARCH": int(self.search),
            "BD_ROTATE": int(self.rotate),
            "BD_CENTERED": int(self.centered),
            "BD_LDLQ": int(self.ldlq),
            "BD_SHARED_BYTES": self.shared_bytes,
            "BD_CTAS": self.min_ctas,
        }

    @classmethod
    def of_recipe(cls, recipe: Recipe, layout: PageLayout, dtype: torch.dtype) -> "QuantizeConfig":
        """The kernel that encodes as `LayerCodec` with this recipe does.

        Raises:
            InvalidInputError: the layout has another format.
            UnsupportedError: the recipe has a part that no kernel knows.
        """
        blocks = recipe.kv_format.blocks
        if blocks is not layout.block_format:
            raise InvalidInputError(f"layout: holds {layout.block_format.value}, recipe {recipe.name} asks for another")
        assert blocks is not None
        rules = {blocks.search_rule: True, blocks.standard_rule: False}
        unsupported = {
            "rotation": recipe.rotation is Rotation.RANDOM,
            "rotation_seed": recipe.rotation_seed is not None,
            "rotation_block": recipe.rotation_block not in (None, layout.head_dim),
            "key_rule": recipe.effective_key_rule not in rules,
            "value_rule": recipe.effective_value_rule is not blocks.standard_rule,
            "value_blocks": recipe.value_blocks is not ValueBlocks.TOKENS,
        }
        for field, bad in unsupported.items():
            if bad:
                raise UnsupportedError(
                    f"{field}: no kernel encodes recipe {recipe.name}; supported are Hadamard or no rotation (no seed, "
                    "no blocks), the search or standard rule for keys, the standard rule along tokens for values"
                )
        return cls(
            layout,
            dtype == torch.bfloat16,
            recipe.effective_key_rule is blocks.search_rule,
            recipe.rotation is Rotation.HADAMARD,
            recipe.page_centered_keys,
            recipe.key_rounding is KeyRounding.LDLQ,
        )


@functools.cache
def _kernel(name: str, config: QuantizeConfig) -> Kernel:
    return Kernel("quantize.cu", name, config.defines, config.shared_bytes)


def store_chunk(
    buffers: LayerBuffers,
    config: QuantizeConfig,
    rows: torch.Tensor,
    block_table: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    query_start: torch.Tensor,
    max_tokens: int,
    *,
    factors: LdlqFactors | None = None,
) -> None:
    """Store the new tokens of a prefill step in one layer's cache, on torch's current stream.

    Pages that become full are quantized, with their older tokens from the tail ring, into the blocks of the table; the
    tokens behind the last full page go to the ring. A first page that becomes full also fills the row's sink slot.

    Args:
        buffers: of the layer.
        config: how to encode.
        rows: row states, int32 [rows, 8].
        block_table: int32 or int64 [rows, blocks of a row]; entries behind a row's pages may be anything.
        new_keys: post-RoPE keys of all rows, 16-bit [tokens, num_kv_heads, head_dim], or such a slice of a fused QKV.
        new_values: values, likewise.
        query_start: int32 [rows + 1], where each row's new tokens start; the last entry is the end.
        max_tokens: most new tokens of a row.
        factors: fp32 LDLQ factors c [num_kv_heads, head_dim, head_dim] and d [num_kv_heads, head_dim].

    Raises:
        InvalidInputError: dtypes, shapes, strides or devices that do not belong together.
    """
    device, heads, dim = buffers.device, buffers.num_kv_heads, buffers.layout.head_dim
    _check_layer("buffers", buffers, config, factors)
    num_rows = _check_rows(rows, block_table, device)
    tokens = new_keys.shape[0] if new_keys.dim() == 3 else 0
    for name, tensor in (("new_keys", new_keys), ("new_values", new_values)):
        check_heads(name, tensor, (tokens, heads, dim), buffers.dtype, device)
    check_vector("query_start", query_start, (torch.int32,), num_rows + 1, device)
    if not 0 <= max_tokens <= tokens:
        raise InvalidInputError(f"max_tokens: must be within 0..{tokens}, the tokens of new_keys, got {max_tokens}")
    if num_rows > _MAX_GRID or heads > _MAX_GRID:
        raise InvalidInputError(f"rows: at most {_MAX_GRID} rows and heads in one launch, got {num_rows} and {heads}")
    # A row that starts in the middle of a page touches one more
    pages = (max_tokens + PAGE_SIZE - 2) // PAGE_SIZE + 1 if max_tokens else 0
    _kernel("store_chunk", config).launch(
        device,
        (pages, heads, num_rows),
        _THREADS,
        new_keys,
        new_values,
        query_start,
        rows,
        block_table,
        buffers.pages,
        buffers.means,
        buffers.tail,
        buffers.sink,
        buffers.key_mean,
        None if factors is None else factors.c,
        None if factors is None else factors.d,
        np.int64(new_keys.stride(0)),
        np.int64(new_keys.stride(1)),
        np.int64(new_values.stride(0)),
        np.int64(new_values.stride(1)),
        np.int64(buffers.pages.stride(0)),
        np.int64(block_table.stride(0)),
        np.int32(block_table.dtype == torch.int64),
        np.int32(buffers.sink_tokens),
    )


class Promotion:
    """The layers whose pages `promote_pages` quantizes together: of one shape, format and dtype, on one device.

    Args:
        layers: buffers of each layer.
        config: how to encode.
        factors: LDLQ factors of each layer, where ``config`` asks for them.

    Raises:
        InvalidInputError: no layers, layers of different shapes, or missing parts.
    """

    def __init__(
        self, layers: Sequence[LayerBuffers], config: QuantizeConfig, factors: Sequence[LdlqFactors] | None = None
    ) -> None:
        if not layers or len(layers) > _MAX_GRID:
            raise InvalidInputError(f"layers: between 1 and {_MAX_GRID} are needed, got {len(layers)}")
        if factors is not None and len(factors) != len(layers):
            raise InvalidInputError(f"factors: expected those of {len(layers)} layers, got {len(factors)}")
        first = layers[0]
        table = []
        for index, layer in enumerate(layers):
            of_layer = None if factors is None else factors[index]
            _check_layer(f"layers[{index}]", layer, config, of_layer)
            shape = (layer.device, layer.num_kv_heads, layer.sink_tokens)
            if shape != (first.device, first.num_kv_heads, first.sink_tokens):
                raise InvalidInputError(
                    f"layers[{index}]: device, KV heads and sink tokens are {shape}, those of the first layer "
                    f"{(first.device, first.num_kv_heads, first.sink_tokens)}; promote them apart"
                )
            parts = (layer.pages, layer.means, layer.tail, layer.sink, layer.key_mean, *(of_layer or (None, None)))
            table.append([*(0 if part is None else part.data_ptr() for part in parts), layer.pages.stride(0)])
        self.config = config
        self.device = first.device
        self.num_kv_heads = first.num_kv_heads
        self.sink_tokens = first.sink_tokens
        self.num_layers = len(layers)
        self.table = torch.tensor(table, dtype=torch.int64, device=first.device)
        self._kept = (tuple(layers), None if factors is None else tuple(factors))  # the table has bare addresses


def promote_pages(promotion: Promotion, rows: torch.Tensor, block_table: torch.Tensor) -> None:
    """Quantize the pages that the decode step filled from the tail rings, in all layers, on torch's current stream.

    Args:
        promotion: the layers.
        rows: row states, int32 [rows, 8].
        block_table: int32 or int64 [rows, blocks of a row]; entries behind a row's pages may be anything.

    Raises:
        InvalidInputError: dtypes, shapes or devices that do not belong together.
    """
    num_rows = _check_rows(rows, block_table, promotion.device)
    _kernel("promote_pages", promotion.config).launch(
        promotion.device,
        (promotion.num_kv_heads, promotion.num_layers, min(num_rows, _PROMOTING_CTAS)),
        _THREADS,
        rows,
        block_table,
        promotion.table,
        np.int64(block_table.stride(0)),
        np.int32(num_rows),
        np.int32(block_table.dtype == torch.int64),
        np.int32(promotion.sink_tokens),
    )


def _check_layer(name: str, layer: LayerBuffers, config: QuantizeConfig, factors: LdlqFactors | None) -> None:
    if layer.layout != config.layout or (layer.dtype == torch.bfloat16) != config.bf16:
        raise InvalidInputError(
            f"{name}: holds {layer.layout.layout_id} and {layer.dtype}, the kernel was chosen for "
            f"{config.layout.layout_id} and {torch.bfloat16 if config.bf16 else torch.float16}"
        )
    if (layer.means is not None) != config.centered:
        raise InvalidInputError(f"{name}: page means are {'needed' if config.centered else 'not used'} by the recipe")
    if layer.layout.block_format not in BlockFormat:
        raise InvalidInputError(f"{name}: no kernel for {layer.layout.block_format}")
    if layer.pages.shape[0] > 2**31 - 1:
        raise InvalidInputError(f"{name}: block ids are 32-bit, got {layer.pages.shape[0]} blocks")
    if (factors is not None) != config.ldlq:
        raise InvalidInputError(f"factors: LDLQ factors are {'needed' if config.ldlq else 'not used'} by the recipe")
    if factors is not None:
        heads, dim = layer.num_kv_heads, layer.layout.head_dim
        check_tensor("factors.c", factors.c, torch.float32, (heads, dim, dim), layer.device)
        check_tensor("factors.d", factors.d, torch.float32, (heads, dim), layer.device)


def _check_rows(rows: torch.Tensor, block_table: torch.Tensor, device: torch.device) -> int:
    """Number of rows."""
    count = rows.shape[0] if rows.dim() == 2 else 0
    check_states("rows", rows, count, device)
    check_block_table("block_table", block_table, count, device)
    return count
