"""Transformers: attention function and caches."""

from bitdecoding.integrations.transformers.cache import FP4Cache

__all__ = ["FP4Cache"]
