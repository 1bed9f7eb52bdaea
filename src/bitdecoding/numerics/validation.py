"""Checks shared by every Python entry point that quantizes."""

import torch

from bitdecoding.errors import InvalidInputError

__all__ = ["check_finite", "check_fits", "check_floating"]


def check_floating(name: str, x: torch.Tensor) -> None:
    """Raise `InvalidInputError` unless ``x`` is a floating-point tensor."""
    if not isinstance(x, torch.Tensor):
        raise InvalidInputError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise InvalidInputError(f"{name}: expected a floating-point tensor, got {x.dtype}")


def check_finite(name: str, x: torch.Tensor) -> None:
    """Raise `InvalidInputError`, naming the tensor, if ``x`` holds NaN or Inf (waits for the device)."""
    check_floating(name, x)
    finite = torch.isfinite(x.float())  # fp64 values beyond fp32 would turn into Inf later
    if not bool(finite.all()):
        raise InvalidInputError(
            f"{name}: {int((~finite).sum())} of {x.numel()} values are NaN or Inf; only finite values can be quantized"
        )


def check_fits(name: str, x: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise `InvalidInputError`, naming the tensor, if ``x`` holds NaN, Inf or values that overflow ``dtype``."""
    check_finite(name, x)
    if not bool(torch.isfinite(x.to(dtype)).all()):
        raise InvalidInputError(
            f"{name}: values overflow {dtype}, in which unquantized tokens are kept; use a wider dtype"
        )
