"""Reserves one region of host memory and pins it at start: pinning takes seconds, too long while serving."""

from __future__ import annotations

import logging
import mmap
import os
import time
import weakref
from collections.abc import Sequence
from itertools import pairwise

import torch

from sglang_dsv4.errors import HostMemoryExhausted
from sglang_dsv4.hostmem.board import Board
from sglang_dsv4.hostmem.nodes import Nodes, bound_nodes
from sglang_dsv4.hostmem.populate import populate, system_page
from sglang_dsv4.hostmem.sharing import MEMORY_NAME, Sharers
from sglang_dsv4.hostmem.sizing import free_ram

logger = logging.getLogger(__name__)


class Arena:
    """Owns ``nbytes`` of host memory as a page-aligned 1-D uint8 tensor; pinned when ``pin``.

    cuts: offsets inside, ascending, at which it is registered in parts, as some hosts refuse more than 96 GiB in one
    call; no copy may cross one, and parts share no page. sharers: the ranks that share it; ``board`` lies before it.
    keep_file: it lies in a file without a name, ``file``, from offset ``start`` on, so that a child process can map it.

    Registered with CUDA, not through torch's pinned allocator, which rounds a size up to a power of two: an arena of
    65 GiB would take 128. Pinning takes the pages, and without free ones the OOM killer ends a process: free RAM is
    checked again right before. Raises HostMemoryExhausted; with sharers ArenaNotShared, on each of them.
    """

    def __init__(
        self, nbytes: int, pin: bool, cuts: Sequence[int] = (), sharers: Sharers | None = None, keep_file: bool = False
    ) -> None:
        self.nbytes = nbytes
        self.board: Board | None = None
        self._memory: mmap.mmap | None = None
        self.region = torch.empty(0, dtype=torch.uint8)
        self._parts = list(pairwise((0, *cuts, nbytes)))
        self._unpin: list[weakref.finalize] = []
        self.file, self.start = -1, 0
        self._keep_file = keep_file
        if sharers is not None:
            self._share(sharers, pin)
            return
        try:
            self._map(self._alone(max(nbytes, system_page())), 0)
        except (OSError, OverflowError) as error:
            raise HostMemoryExhausted(
                f"cannot reserve {nbytes / 2**30:.2f} GiB of host memory; lower DSV4_HOST_GB"
            ) from error
        if pin:
            self._require_room(bound_nodes())
            started = time.perf_counter()
            populate(self.region.data_ptr(), nbytes)
            self._pin(started)

    def _alone(self, nbytes: int) -> mmap.mmap:
        if not self._keep_file:
            return mmap.mmap(-1, nbytes)
        self._own(os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC))
        os.ftruncate(self.file, nbytes)
        return mmap.mmap(self.file, nbytes)

    def _own(self, file: int) -> None:
        self.file = file
        weakref.finalize(self, os.close, file)

    def _share(self, sharers: Sharers, pin: bool) -> None:
        """Maps the memory of all sharers; each populates its part, whose pages are then near to its card."""
        start, started = Board.bytes_for(sharers.ranks), time.perf_counter()

        def make() -> None:
            if sharers.rank == 0:
                self._require_room()
                sharers.resize(start + self.nbytes)

        def fill() -> None:
            self._map(sharers.map(start + self.nbytes), start)
            page = system_page()
            first, last = (
                self.nbytes // page * edge // sharers.ranks * page for edge in (sharers.rank, sharers.rank + 1)
            )
            last = self.nbytes if sharers.rank + 1 == sharers.ranks else last
            populate(self.region.data_ptr() + first, last - first, sharers.ranks)

        try:
            sharers.together(make)
            sharers.together(fill)
            if pin:
                sharers.together(lambda: self._pin(started))
        except BaseException:  # an interrupt too: registered memory must not be freed before it is unregistered
            self.close()
            self._memory, self.region = None, self.region[:0].clone()  # the error may live on, and this with it
            raise
        finally:
            if self._keep_file and self._memory is not None:
                self._own(sharers.duplicate())
            sharers.close()
        self.start = start
        self.board = Board(self._memory, sharers.rank, sharers.ranks)

    def _map(self, memory: mmap.mmap, start: int) -> None:
        self._memory = memory
        self.region = torch.frombuffer(memory, dtype=torch.uint8)[start : start + self.nbytes]

    def _require_room(self, bound: Nodes | None = None) -> None:
        free = free_ram(bound)
        if self.nbytes > free:
            raise HostMemoryExhausted(
                f"cannot pin {self.nbytes / 2**30:.2f} GiB of host memory, {free / 2**30:.2f} GiB of RAM are left; "
                "lower DSV4_HOST_GB"
            )

    def _pin(self, started: float) -> None:
        base = self.region.data_ptr()
        for first, last in self._parts:
            code = int(torch.cuda.cudart().cudaHostRegister(base + first, last - first, 0)) if last > first else 0
            if code != 0:
                self.close()
                raise HostMemoryExhausted(
                    f"cannot pin {self.nbytes / 2**30:.2f} GiB of host memory (CUDA error {code}); lower "
                    "DSV4_HOST_GB or raise the locked-memory limit (ulimit -l)"
                )
            # Freeing memory that is still registered would make the next owner of its addresses unpinnable.
            if last > first:
                self._unpin.append(weakref.finalize(self, _unregister, self._memory, base + first))
        logger.info("pinned %.2f GiB in %.1f s", self.nbytes / 2**30, time.perf_counter() - started)

    @property
    def pinned(self) -> bool:
        """Returns whether the region is registered with CUDA now."""
        return any(unpin.alive for unpin in self._unpin)

    def close(self) -> None:
        """Unpins the arena; also done when it dies. The caller makes sure that nothing is being copied."""
        for unpin in self._unpin:
            unpin()


def _unregister(memory: mmap.mmap | None, address: int) -> None:
    """Unpins the part at ``address``; ``memory`` is an argument so that it lives until then."""
    torch.cuda.cudart().cudaHostUnregister(address)
