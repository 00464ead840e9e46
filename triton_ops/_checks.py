"""Checks the arguments of launchers; each failure names the argument at fault."""

from __future__ import annotations

import torch


def check_positive(name: str, value: int) -> None:
    """Raises unless `value` is a positive int."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    if value <= 0:
        raise ValueError(f"{name} must be positive, not {value}")


def check_tensor(
    name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int | None, ...]
) -> None:
    """Raises unless `tensor` is contiguous, of one of `dtypes` and of `shape` (None: any extent)."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} must be {' or '.join(map(str, dtypes))}, not {tensor.dtype}")
    fits = tensor.dim() == len(shape) and all(
        want is None or want == got for want, got in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("*" if extent is None else str(extent) for extent in shape)
        raise ValueError(f"{name} must have shape [{wanted}], not {list(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous")


def check_aligned(name: str, tensor: torch.Tensor, nbytes: int) -> None:
    """Raises unless `tensor` starts at a multiple of `nbytes`, in memory and in its storage."""
    if tensor.data_ptr() % nbytes or tensor.storage_offset() * tensor.element_size() % nbytes:
        raise ValueError(f"{name} must start at a multiple of {nbytes} bytes")


def check_same_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raises unless `tensor` lies on `device`, the device of `buf`."""
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device} like buf, not on {tensor.device}")


def check_in_range(name: str, index: torch.Tensor, end: int) -> None:
    """Raises unless every element is in [0, end); waits for the device of `index`."""
    index = index.to(torch.int64)  # `end` may exceed int32
    bad = ((index < 0) | (index >= end)).nonzero()
    if len(bad):
        position = int(bad[0])
        raise IndexError(f"{name}[{position}] = {int(index[position])} is outside [0, {end})")
