"""Puts memory between guards, so that one byte too many is seen."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from triton_ops.tables import host_words

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
POISON = 0xA5
# Wider than any page or host block of a kernel test, so that one step past either end still lands in a guard;
# a multiple of 16, so that what lies between two guards keeps the alignment of an allocation.
GUARD = 1 << 16


class Guarded:
    """Holds ``nbytes`` bytes between two guards; ``read`` returns the guards too."""

    def __init__(self, nbytes: int, device: str, pin: bool = False) -> None:
        self.whole = torch.empty(nbytes + 2 * GUARD, dtype=torch.uint8, device=device, pin_memory=pin)
        self.inner = self.whole[GUARD : GUARD + nbytes]
        assert self.inner.data_ptr() % 16 == 0

    def noise(self, seed: int) -> None:
        """Fills everything with random bytes, guards included."""
        generator = torch.Generator().manual_seed(seed)
        self.whole.copy_(torch.randint(0, 256, self.whole.shape, dtype=torch.uint8, generator=generator))

    def poison(self) -> None:
        """Fills everything with one byte, guards included."""
        self.whole.fill_(POISON)

    def read(self) -> bytearray:
        if self.whole.is_cuda:
            torch.cuda.synchronize()
        return bytearray(self.whole.cpu().numpy().tobytes())


def assert_bytes(name: str, wanted: bytes | bytearray, found: bytes | bytearray) -> None:
    """Names the first byte that differs; offsets count from the end of the first guard."""
    assert len(wanted) == len(found), f"{name}: {len(found)} bytes, wanted {len(wanted)}"
    if bytes(wanted) == bytes(found):
        return
    where = next(i for i in range(len(wanted)) if wanted[i] != found[i])
    raise AssertionError(f"{name}, byte {where - GUARD}: wanted {wanted[where]}, found {found[where]}")


Contents = tuple[list[bytearray], bytearray]  # of the buffers, and of the host


class Memories:
    """Holds device buffers and a host region between guards: random where a copy reads, poisoned where it writes.

    shapes: (row or page bytes, how many) of each buffer.
    """

    def __init__(self, save: bool, shapes: Sequence[tuple[int, int]], host_bytes: int, device: str) -> None:
        self.buffers = [Guarded(width * count, device) for width, count in shapes]
        self.host = Guarded(host_bytes, "cpu", pin=device == "cuda")
        for number, buffer in enumerate(self.buffers):
            buffer.noise(number) if save else buffer.poison()
        self.host.poison() if save else self.host.noise(99)
        self.views = [b.inner.view(count, width) for b, (width, count) in zip(self.buffers, shapes, strict=True)]

    @property
    def memory(self) -> torch.Tensor:
        """Returns the host region as the ops take it."""
        return host_words(self.host.inner)

    def read(self) -> Contents:
        return [buffer.read() for buffer in self.buffers], self.host.read()

    def assert_holds(self, wanted: Contents) -> None:
        """Asserts these bytes everywhere: where the copy reads, nothing has changed either."""
        found = self.read()
        for number, (want, have) in enumerate(zip(wanted[0], found[0], strict=True)):
            assert_bytes(f"buffer {number}", want, have)
        assert_bytes("host", wanted[1], found[1])
