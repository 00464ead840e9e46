"""Launches a kernel again and again at little host cost.

Triton looks at every argument of every launch to choose among compiled variants; for a kernel with a dozen
arguments that takes longer than many kernels run. Here the caller names the variant by a key, and a launch
with a known key goes straight to the compiled kernel.

Rules for a kernel launched this way, because the first call's variant serves all later ones:
- every int that changes is in ``do_not_specialize`` and below 2**31;
- every pointer is 16-byte aligned, or read one element at a time, or in ``do_not_specialize_on_alignment``;
- the key holds everything else that changes: the device, dtypes, compile-time constants.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch


class Launcher:
    """Holds one kernel with its compile options, and its compiled variants by key."""

    def __init__(self, kernel: Any, **options: int) -> None:
        self.kernel = kernel
        self._options = options
        self._variants: dict[Hashable, Any] = {}

    def __call__(self, key: Hashable, grid: tuple[int, int, int], *arguments: Any, stream: int | None = None) -> None:
        """Launches on ``stream`` (a handle; None: the current stream). ``arguments``: all of them, in order."""
        variant = self._variants.get(key)
        if variant is not None:
            variant[grid](*arguments, stream=stream)
            return
        compiled = self._first(grid, arguments, stream)
        if hasattr(compiled, "packed_metadata"):  # not so under the interpreter
            self._variants[key] = compiled

    def _first(self, grid: tuple[int, int, int], arguments: tuple[Any, ...], stream: int | None) -> Any:
        """Compiles and launches; Triton itself launches on the current stream only."""
        if stream is None:
            return self.kernel[grid](*arguments, **self._options)
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            return self.kernel[grid](*arguments, **self._options)
