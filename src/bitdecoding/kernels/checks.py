"""Checks that the kernel wrappers share: all that a launch would otherwise read or write wrongly."""

import torch

from bitdecoding.errors import InvalidInputError

__all__ = ["ROW_STATE_FIELDS", "check_block_table", "check_heads", "check_states", "check_tensor", "check_vector"]

ROW_STATE_FIELDS = 8
"""Int32 values of a row's state: length, before, tail slot, sink slot to read, sink slot to fill, three reserved."""


def check_tensor(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    """Raise `InvalidInputError` unless the tensor is contiguous, aligned to 16 bytes and just so."""
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or tensor.device != device or not tensor.is_contiguous():
        raise InvalidInputError(
            f"{name}: expected contiguous {dtype} {list(shape)} on {device}, got {tensor.dtype} {list(tensor.shape)} "
            f"with strides {list(tensor.stride())} on {tensor.device}"
        )
    if tensor.data_ptr() % 16:
        raise InvalidInputError(f"{name}: must be aligned to 16 bytes")


def check_heads(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise `InvalidInputError` unless a tensor [..., heads, head_dim] can be read or written 16 bytes at a time: any
    strides that are multiples of 8 elements, the last dim contiguous."""
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device != device:
        raise InvalidInputError(
            f"{name}: expected {dtype} {list(shape)} on {device}, got {tensor.dtype} {list(tensor.shape)} on "
            f"{tensor.device}"
        )
    strides = [stride for stride, size in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if size > 1]
    if tensor.stride(-1) != 1 or any(stride % 8 for stride in strides) or tensor.data_ptr() % 16:
        raise InvalidInputError(
            f"{name}: rows of head_dim must be contiguous and start at multiples of 16 bytes, got strides "
            f"{list(tensor.stride())}; call contiguous()"
        )


def check_vector(
    name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], size: int, device: torch.device
) -> None:
    """Raise `InvalidInputError` unless this is a contiguous vector; it may start anywhere, as a slice does."""
    good = tensor.dtype in dtypes and tuple(tensor.shape) == (size,) and tensor.device == device
    if not good or not tensor.is_contiguous():
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise InvalidInputError(
            f"{name}: expected contiguous {names} [{size}] on {device}, got {tensor.dtype} {list(tensor.shape)} on "
            f"{tensor.device}"
        )


def check_states(name: str, rows: torch.Tensor, count: int, device: torch.device) -> None:
    """Raise `InvalidInputError` unless these are the states of so many rows (`StepPlan.rows`)."""
    check_tensor(name, rows, torch.int32, (count, ROW_STATE_FIELDS), device)


def check_block_table(name: str, table: torch.Tensor, rows: int, device: torch.device) -> None:
    """Raise `InvalidInputError` unless this is a block table of so many rows, which may be any distance apart."""
    good = table.dim() == 2 and table.shape[0] == rows and table.device == device
    if not good or table.dtype not in (torch.int32, torch.int64):
        raise InvalidInputError(
            f"{name}: expected int32 or int64 [{rows}, blocks] on {device}, got {table.dtype} {list(table.shape)} on "
            f"{table.device}"
        )
    if table.shape[1] > 1 and table.stride(1) != 1:
        raise InvalidInputError(f"{name}: entries of a row must be contiguous; call contiguous()")
