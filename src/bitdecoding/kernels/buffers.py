"""The GPU memory of one layer's cache."""

from dataclasses import dataclass

import torch

from bitdecoding.errors import InvalidInputError
from bitdecoding.kernels.checks import check_tensor
from bitdecoding.kernels.compile import require_cuda
from bitdecoding.kernels.layout import ArchFamily, PageLayout
from bitdecoding.recipe import MAX_DECODE_TOKENS, PAGE_SIZE

__all__ = [
    "MODEL_DTYPES",
    "TAIL_TOKENS",
    "LayerBuffers",
]

TAIL_TOKENS = PAGE_SIZE + MAX_DECODE_TOKENS
"""Ring of 16-bit tokens of a slot: a page and the tokens of one decode step. Position p lies at index p % 136."""
MODEL_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class LayerBuffers:
    """What one layer keeps on the device.

    Attributes:
        layout: of the pages.
        pages: packed pages, uint8 [blocks, num_kv_heads, layout.page_bytes]; the heads of a block are contiguous, the
            blocks may be further apart.
        tail: newest tokens, 16-bit [tail slots, 2 (keys, values), num_kv_heads, TAIL_TOKENS, head_dim]; a ring.
        sink: first tokens, 16-bit [sink slots, 2, num_kv_heads, sink tokens, head_dim], or None.
        means: BF16 [blocks, num_kv_heads, head_dim], means of page-centred keys, or None.
        key_mean: µ_k, fp32 [num_kv_heads, head_dim], or None.

    Raises:
        InvalidInputError: shapes, dtypes, strides or devices that do not belong together, or a layout of another GPU.
        UnsupportedError: not a CUDA device, or one without kernels.
    """

    layout: PageLayout
    pages: torch.Tensor
    tail: torch.Tensor
    sink: torch.Tensor | None = None
    means: torch.Tensor | None = None
    key_mean: torch.Tensor | None = None

    def __post_init__(self) -> None:
        layout, pages, tail = self.layout, self.pages, self.tail
        device, dim = pages.device, layout.head_dim
        blocks, heads = pages.shape[:2] if pages.dim() == 3 else (0, 0)
        if pages.dtype != torch.uint8 or tuple(pages.shape) != (blocks, heads, layout.page_bytes):
            raise InvalidInputError(
                f"pages: expected uint8 [blocks, num_kv_heads, {layout.page_bytes}], got {pages.dtype} "
                f"{list(pages.shape)}"
            )
        if pages.stride()[1:] != (layout.page_bytes, 1) or pages.stride(0) % 16 or pages.data_ptr() % 16:
            raise InvalidInputError("pages: the heads of a block must be contiguous, and blocks aligned to 16 bytes")
        if tail.dtype not in MODEL_DTYPES:
            raise InvalidInputError(f"tail: expected bfloat16 or float16, got {tail.dtype}")
        slots = tail.shape[0] if tail.dim() == 5 else 0
        check_tensor("tail", tail, tail.dtype, (slots, 2, heads, TAIL_TOKENS, dim), device)
        if self.sink is not None:
            sink_slots, tokens = (self.sink.shape[0], self.sink.shape[3]) if self.sink.dim() == 5 else (0, 0)
            check_tensor("sink", self.sink, tail.dtype, (sink_slots, 2, heads, tokens, dim), device)
        if self.means is not None:
            check_tensor("means", self.means, torch.bfloat16, (blocks, heads, dim), device)
        if self.key_mean is not None:
            check_tensor("key_mean", self.key_mean, torch.float32, (heads, dim), device)
        require_cuda(device)
        if layout.arch is not ArchFamily.of_capability(*torch.cuda.get_device_capability(device)):
            raise InvalidInputError(f"layout: {layout.layout_id!r} is not for {torch.cuda.get_device_name(device)}")

    @property
    def device(self) -> torch.device:
        """Where everything lies."""
        return self.pages.device

    @property
    def dtype(self) -> torch.dtype:
        """16-bit dtype of the model."""
        return self.tail.dtype

    @property
    def num_kv_heads(self) -> int:
        """KV heads of the layer."""
        return self.pages.shape[1]

    @property
    def sink_tokens(self) -> int:
        """Tokens of a sink slot; 0 without a sink."""
        return 0 if self.sink is None else self.sink.shape[3]
