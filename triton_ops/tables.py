"""Builds pointer tables, by which one kernel addresses many device buffers.

A table holds, for each buffer, its distance in bytes from an *anchor* buffer that is a kernel argument. The
kernel adds the distance to the anchor: pointer alignment then stays known to the compiler, which it would not
be for an address loaded from memory, and loads stay 16 bytes wide.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from triton_ops._launch import Fixed

ALIGNMENT = 16
Upload = Callable[[str, torch.Tensor], torch.Tensor]  # a table's name and its values on the host -> the device's copy


def straight_to(device: torch.device) -> Upload:
    """Makes an Upload that counts nothing."""
    return lambda _, table: table.to(device)


@dataclass(frozen=True)
class BufferTable:
    """Holds a pointer table of buffers on one device, uploaded once.

    anchor: the first buffer, int64 view. offsets: int64 [n], bytes from the anchor. sizes: int64 [n], bytes.
    buffers: the uint8 views themselves, ``[pages, page_bytes]``; they keep the memory alive.
    """

    anchor: torch.Tensor
    offsets: torch.Tensor
    sizes: torch.Tensor
    buffers: tuple[torch.Tensor, ...]

    @functools.cached_property
    def fixed(self) -> Fixed:
        """Returns the tables, in the order of kernels."""
        return Fixed(self.anchor, self.offsets, self.sizes)

    @classmethod
    def of(cls, buffers: list[torch.Tensor], upload: Upload | None = None) -> BufferTable:
        """Checks the buffers and uploads their table.

        buffers: uint8, 2-D, contiguous, on one device; addresses and sizes multiples of 16. upload: takes the tables
        ``offsets`` and ``sizes`` to that device.
        """
        check_buffers(buffers)
        anchor = buffers[0]
        offsets = torch.tensor([b.data_ptr() - anchor.data_ptr() for b in buffers], dtype=torch.int64)
        sizes = torch.tensor([b.numel() for b in buffers], dtype=torch.int64)
        upload = upload or straight_to(anchor.device)
        return cls(_words(anchor), upload("offsets", offsets), upload("sizes", sizes), tuple(buffers))


def check_buffers(buffers: list[torch.Tensor]) -> None:
    """Raises unless there is a buffer and each is valid for BufferTable.of; the error names its number."""
    if not buffers:
        raise ValueError("a pointer table needs at least one buffer")
    for number, buffer in enumerate(buffers):
        if buffer.dtype != torch.uint8 or buffer.dim() != 2 or not buffer.is_contiguous():
            raise TypeError(f"buffer {number} must be a contiguous 2-D uint8 tensor")
        if buffer.device != buffers[0].device:
            raise ValueError(f"buffer {number} is on {buffer.device}, the first is on {buffers[0].device}")
        if buffer.data_ptr() % ALIGNMENT or buffer.shape[1] % ALIGNMENT:
            raise ValueError(f"buffer {number} is not aligned to {ALIGNMENT} bytes")


def _words(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.view(-1).view(torch.int64)


def host_words(region: torch.Tensor) -> torch.Tensor:
    """Views a host region (1-D uint8, 16-byte aligned) as the int64 words of kernels."""
    if region.dtype != torch.uint8 or region.dim() != 1 or not region.is_contiguous():
        raise TypeError("the host region must be a contiguous 1-D uint8 tensor")
    if region.data_ptr() % ALIGNMENT or region.numel() % ALIGNMENT:
        raise ValueError(f"the host region is not aligned to {ALIGNMENT} bytes")
    return region.view(torch.int64)
