"""Memory between guards, so that one byte too many is seen."""

from __future__ import annotations

import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
POISON = 0xA5
# Wider than any page or host block of a kernel test, so that one step past either end still lands in a guard;
# a multiple of 16, so that what lies between two guards keeps the alignment of an allocation.
GUARD = 1 << 16


class Guarded:
    """``nbytes`` bytes between two guards; ``read`` returns the guards too."""

    def __init__(self, nbytes: int, device: str, pin: bool = False) -> None:
        self.whole = torch.empty(nbytes + 2 * GUARD, dtype=torch.uint8, device=device, pin_memory=pin)
        self.inner = self.whole[GUARD : GUARD + nbytes]
        assert self.inner.data_ptr() % 16 == 0

    def noise(self, seed: int) -> None:
        """Random bytes everywhere, guards included."""
        generator = torch.Generator().manual_seed(seed)
        self.whole.copy_(torch.randint(0, 256, self.whole.shape, dtype=torch.uint8, generator=generator))

    def poison(self) -> None:
        """One byte everywhere, guards included."""
        self.whole.fill_(POISON)

    def read(self) -> bytearray:
        """All bytes."""
        if self.whole.is_cuda:
            torch.cuda.synchronize()
        return bytearray(self.whole.cpu().numpy().tobytes())


def assert_bytes(name: str, wanted: bytes | bytearray, found: bytes | bytearray) -> None:
    """Name the first byte that differs; offsets count from the end of the first guard."""
    assert len(wanted) == len(found), f"{name}: {len(found)} bytes, wanted {len(wanted)}"
    if bytes(wanted) == bytes(found):
        return
    where = next(i for i in range(len(wanted)) if wanted[i] != found[i])
    raise AssertionError(f"{name}, byte {where - GUARD}: wanted {wanted[where]}, found {found[where]}")
