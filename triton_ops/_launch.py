"""Launches a kernel again and again at little host cost.

Triton looks at every argument of every launch to choose among compiled variants; for a kernel with a dozen
arguments that takes longer than many kernels run. Here the caller names the variant by a key, and a launch
with a known key goes straight to the compiled kernel; on a named stream also past the hooks of Triton's own tracers.

Rules for a kernel launched this way, because the first call's variant serves all later ones:
- every int that changes is in ``do_not_specialize`` and below 2**31;
- every pointer is 16-byte aligned, or read one element at a time, or in ``do_not_specialize_on_alignment``;
- the key holds everything else that changes: the device, dtypes, compile-time constants.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch


class Fixed:
    """Holds tensors that keep their place, a kernel's first arguments: their addresses are asked for once."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors
        self.addresses = tuple(tensor.data_ptr() for tensor in tensors)
        self.device = tensors[0].device.index if tensors else None


NONE_FIXED = Fixed()


class Launcher:
    """Holds one kernel with its compile options, and its compiled variants by key."""

    def __init__(self, kernel: Any, **options: int) -> None:
        self.kernel = kernel
        self._options = options
        self._variants: dict[Hashable, Any] = {}

    def __call__(
        self, key: Hashable, grid: tuple[int, int, int], *arguments: Any, fixed: Fixed = NONE_FIXED,
        stream: int | None = None,
    ) -> None:  # fmt: skip
        """Launches on ``stream`` (a handle; None: the current one). ``arguments``: all after ``fixed``, in order."""
        variant = self._variants.get(key)
        if variant is None:
            compiled = self._first(grid, (*fixed.tensors, *arguments), stream)
            if hasattr(compiled, "packed_metadata"):  # not so under the interpreter
                self._variants[key] = compiled
        elif stream is None:
            variant[grid](*fixed.tensors, *arguments)
        else:
            unseen = (None, None, None)  # no metadata for hooks, and none before and after
            variant.run(*grid, stream, variant.function, variant.packed_metadata, *unseen, *fixed.addresses, *arguments)

    def _first(self, grid: tuple[int, int, int], arguments: tuple[Any, ...], stream: int | None) -> Any:
        """Compiles and launches; Triton itself launches on the current stream only."""
        if stream is None:
            return self.kernel[grid](*arguments, **self._options)
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            return self.kernel[grid](*arguments, **self._options)
