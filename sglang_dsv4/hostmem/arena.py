"""Pinning costs 0.6 s a GiB, too long while serving: one region of host memory, reserved and pinned once at start."""

from __future__ import annotations

import logging
import mmap
import time
import weakref

import torch

from sglang_dsv4.errors import HostMemoryExhausted
from sglang_dsv4.hostmem.sizing import free_ram

logger = logging.getLogger(__name__)
PAGE = 4096


class Arena:
    """``nbytes`` of host memory as a 1-D uint8 tensor, page-aligned; pinned when ``pin``.

    Pinned by registering it with CUDA, not through torch's pinned allocator, which rounds a size up to a power
    of two: an arena of 65 GiB would take 128. Pinning takes the pages, and the OOM killer ends somebody where there
    are none: what is free is looked at once more right before. Raises HostMemoryExhausted.
    """

    def __init__(self, nbytes: int, pin: bool) -> None:
        try:
            self._memory = mmap.mmap(-1, max(nbytes, PAGE))
        except (OSError, OverflowError) as error:
            raise HostMemoryExhausted(
                f"cannot reserve {nbytes / 2**30:.2f} GiB of host memory; lower DSV4_HOST_GB"
            ) from error
        self.region = torch.frombuffer(self._memory, dtype=torch.uint8)[:nbytes]
        self.nbytes = nbytes
        self._unpin: weakref.finalize | None = None
        if pin:
            self._pin()

    def _pin(self) -> None:
        free = free_ram()
        if self.nbytes > free:
            raise HostMemoryExhausted(
                f"cannot pin {self.nbytes / 2**30:.2f} GiB of host memory, {free / 2**30:.2f} GiB of RAM are left; "
                "lower DSV4_HOST_GB"
            )
        started = time.perf_counter()
        code = int(torch.cuda.cudart().cudaHostRegister(self.region.data_ptr(), self.nbytes, 0))
        if code != 0:
            raise HostMemoryExhausted(
                f"cannot pin {self.nbytes / 2**30:.2f} GiB of host memory (CUDA error {code}); lower "
                "DSV4_HOST_GB or raise the locked-memory limit (ulimit -l)"
            )
        # Freeing memory that is still registered would make the next owner of its addresses unpinnable.
        self._unpin = weakref.finalize(self, _unregister, self._memory, self.region.data_ptr())
        logger.info("pinned %.2f GiB in %.1f s", self.nbytes / 2**30, time.perf_counter() - started)

    @property
    def pinned(self) -> bool:
        """Whether the region is registered with CUDA now."""
        return self._unpin is not None and self._unpin.alive

    def close(self) -> None:
        """Unpin; also done when the arena dies. The caller makes sure that nothing is being copied."""
        if self._unpin is not None:
            self._unpin()


def _unregister(memory: mmap.mmap, address: int) -> None:
    """``memory`` is an argument so that it lives until it is unregistered."""
    torch.cuda.cudart().cudaHostUnregister(address)
