"""Holds the slots that objects pass through: the only memory that a storage backend ever knows.

A backend may write long after it gave a call up. Here such a write spoils at most a slot, whose next object then fails
its check; the arena's units have other owners by then.

The engine's backends ask a host pool for pages by index. Here a page is a slot and its size one index.
"""

from __future__ import annotations

import mmap
import threading
from typing import Any

import numpy as np
import torch

from sglang_dsv4.cache.packed import align
from sglang_dsv4.store.seal import SEAL_BYTES

PAGE_BYTES = 4096  # of the system, for backends that read and write past its cache


class Anchor:
    """The pool that backends ask for first; DeepSeek-V4's own has no bytes either."""

    page_size = 1
    layout = "layer_first"
    kv_buffer = None
    pin_memory = False
    allocator = None
    dtype = torch.uint8

    def get_ksize_per_token(self) -> int:
        """Returns the bytes of an index."""
        return 1

    def get_size_per_token(self) -> int:
        """Returns the same, by another name."""
        return self.get_ksize_per_token()


class Ring(Anchor):
    """Owns ``slots`` slots, each of a unit and its seal."""

    layout = "page_first"
    device = "cpu"

    def __init__(self, unit_bytes: int, slots: int) -> None:
        self.unit_bytes = unit_bytes
        self.stride = align(unit_bytes + SEAL_BYTES, PAGE_BYTES)
        self.slots = slots
        self._memory = mmap.mmap(-1, slots * self.stride)
        self._bytes = np.frombuffer(self._memory, np.uint8).reshape(slots, self.stride)
        self._tensor = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._aim = threading.local()

    def slot(self, number: int) -> np.ndarray:
        """Returns the bytes of a slot, a view: payload, seal and padding."""
        return self._bytes[number]

    def payload(self, number: int) -> np.ndarray:
        """Returns the bytes of its unit, a view."""
        return self._bytes[number, : self.unit_bytes]

    def seal(self, number: int) -> np.ndarray:
        """Returns the bytes of its seal, a view."""
        return self._bytes[number, self.unit_bytes : self.unit_bytes + SEAL_BYTES]

    def aim(self, number: int) -> None:
        """Lets the next ``get_dummy_flat_data_page`` of this thread be this slot, which spares a copy."""
        self._aim.number = number

    # What the backends of the engine ask of a host pool.

    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]:
        """Returns what may be registered for transfers."""
        return [self._tensor]

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        """Returns addresses and sizes of the slots ``indices``."""
        numbers, base = indices.tolist(), self._tensor.data_ptr()
        return [base + number * self.stride for number in numbers], [self.stride] * len(numbers)

    def is_stride_page_aligned(self, alignment: int) -> bool:
        """Returns whether each slot starts at a multiple of ``alignment``."""
        return self._tensor.data_ptr() % alignment == 0 and self.stride % alignment == 0

    def get_ksize_per_token(self) -> int:
        """Returns the bytes of an index."""
        return self.stride

    def get_data_page(self, index: Any, flat: bool = True) -> torch.Tensor:
        """Returns a slot as a tensor, a view."""
        start = int(index) * self.stride
        return self._tensor[start : start + self.stride]

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """Returns memory of a slot's size for a read; the slot itself once after ``aim``."""
        number = self._aim.__dict__.pop("number", None)
        return torch.empty(self.stride, dtype=torch.uint8) if number is None else self.get_data_page(number)

    def set_from_flat_data_page(self, index: Any, page: torch.Tensor) -> None:
        """Copies ``page`` into a slot, unless it is that slot."""
        slot = self.get_data_page(index)
        if page.data_ptr() != slot.data_ptr():
            slot.copy_(page)
