"""Exceptions raised by the public API.

Every message names the argument, what was wrong with it and what is supported, in one line, so that the command
line can print it without a traceback.
"""

__all__ = [
    "BitDecodingError",
    "CalibrationError",
    "InvalidInputError",
    "ModelSourceError",
    "UnsupportedError",
]


class BitDecodingError(Exception):
    """Base of all errors that the library raises on purpose."""


class InvalidInputError(BitDecodingError, ValueError):
    """An argument has a wrong value, shape or dtype, or holds NaN or Inf."""


class UnsupportedError(BitDecodingError, NotImplementedError):
    """A valid request that the library does not implement: a head_dim, a model feature, a device."""


class CalibrationError(BitDecodingError, ValueError):
    """A calibration file is damaged, or belongs to another model, shape or window."""


class ModelSourceError(BitDecodingError, OSError):
    """A model cannot be found, downloaded, verified or read."""
