"""The quantized KV cache: page formats, the codec of a layer, and the paged cache of a model."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bitdecoding.cache.paged import CacheMemory, PagedFP4Cache

__all__ = ["CacheMemory", "PagedFP4Cache"]


def __getattr__(name: str) -> Any:
    # Late, because the paged cache computes with bitdecoding.reference, which imports this package's codec.
    if name in __all__:
        from bitdecoding.cache import paged

        return getattr(paged, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
