"""Orders a rank's stores to shared memory as other ranks read them, on processors that do not do so themselves.

A word in shared memory tells that something written before it is there: other words, or a transfer that this rank has
seen the end of. x86-64 keeps stores in order, and loads. An ARM processor (GH200, GB200, GB300) keeps neither, and
Python has no fence. There the kernel's membarrier lets every registered process pass a full barrier between the two
stores: whoever reads the word later began all reads behind it after that barrier. So the writer alone calls it.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Callable

IN_ORDER = frozenset({"x86_64", "AMD64"})
MEMBARRIER = {"aarch64": 283, "arm64": 283}  # number of the system call
QUERY, GLOBAL_EXPEDITED, REGISTER = 0, 1 << 1, 1 << 2


def no_fence() -> None:
    """Does nothing: stores are in order."""


def why_unordered() -> str | None:
    """Returns why this machine's ranks cannot tell each other anything by shared memory; None: they can."""
    machine = platform.machine()
    if machine in IN_ORDER:
        return None
    if machine not in MEMBARRIER:
        return f"a {machine} may see another rank's writes in another order than they were made"
    found = _membarrier(machine)(QUERY)
    if found < 0 or not found & GLOBAL_EXPEDITED or not found & REGISTER:
        return f"a {machine} needs the kernel's membarrier, which is not to be had here"
    return None


def fence_of_this_rank() -> Callable[[], None]:
    """Registers this process for the fences of the other ranks; returns its own. Raises OSError."""
    machine = platform.machine()
    if machine in IN_ORDER:
        return no_fence
    call = _membarrier(machine)

    def fence() -> None:
        if call(GLOBAL_EXPEDITED):
            raise OSError("membarrier failed")

    if call(REGISTER):
        raise OSError("this process cannot register for membarrier")
    return fence


@functools.cache
def _membarrier(machine: str) -> Callable[[int], int]:
    call = ctypes.CDLL(None, use_errno=True).syscall
    return lambda command: int(call(MEMBARRIER[machine], command, 0, 0))
