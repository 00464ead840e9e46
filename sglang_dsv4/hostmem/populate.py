"""Makes the pages of host memory with several threads before it is pinned.

Pinning memory without pages takes 0.6 s a GiB, 0.52 of it for making pages one after the other. The kernel reports when
it has none left; a first touch would end in SIGBUS.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from sglang_dsv4.errors import HostMemoryExhausted

logger = logging.getLogger(__name__)

STEP = 64 << 20  # bytes a call: threads end at nearly the same time
MOST_THREADS = 16
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, of Linux 5.14

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def system_page() -> int:
    """Returns the bytes of a page of memory: 4 KiB, on some ARM machines 64 KiB."""
    return os.sysconf("SC_PAGE_SIZE")


def populate(address: int, nbytes: int, processes: int = 1) -> None:
    """Gives every page of ``nbytes`` from ``address`` (page-aligned) its memory; their content stays.

    processes: that do so at once, and share the machine's cores. Raises HostMemoryExhausted.
    """
    threads = min(MOST_THREADS, max(1, len(os.sched_getaffinity(0)) // processes))
    steps = [(address + first, min(STEP, nbytes - first)) for first in range(0, nbytes, STEP)]
    try:
        with ThreadPoolExecutor(threads, thread_name_prefix="dsv4-populate") as pool:
            codes = list(pool.map(lambda step: _populate(*step), steps))
    except RuntimeError as error:  # a limit of processes
        logger.warning("host memory is made by one thread: %s", error)
        codes = [_populate(*step) for step in steps]
    troubles = [code for code in codes if code]
    if troubles:
        raise HostMemoryExhausted(
            f"cannot have {nbytes / 2**30:.2f} GiB of host memory ({os.strerror(troubles[0])}); lower DSV4_HOST_GB"
        )


def map_in(address: int, nbytes: int) -> None:
    """Maps memory that another process made, before its first use; else each page costs a fault then.

    address: page-aligned. On kernels before 5.14 nothing happens: touching a page would write it.
    """
    for first in range(0, nbytes, STEP):
        if _libc.madvise(address + first, min(STEP, nbytes - first), _POPULATE_WRITE):
            return


def _populate(address: int, nbytes: int, madvise: Callable[[int, int, int], int] = _libc.madvise) -> int:
    """Populates one step; 0, or the error's number. ctypes lets the other threads run meanwhile."""
    while madvise(address, nbytes, _POPULATE_WRITE):
        code = ctypes.get_errno()
        if code == errno.EINVAL:  # an older kernel
            _touch(address, nbytes)
            return 0
        if code not in {errno.EINTR, errno.EAGAIN}:
            return code
    return 0


def _touch(address: int, nbytes: int) -> None:
    """Touches each page by writing back its first byte."""
    for at in range(address, address + nbytes, system_page()):
        byte = ctypes.c_ubyte.from_address(at)
        byte.value = byte.value
