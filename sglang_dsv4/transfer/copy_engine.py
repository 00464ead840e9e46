"""Enqueues copies by calls to the CUDA driver, at a tenth of torch's host time.

torch needs about 15 us to enqueue one copy, and the link idles meanwhile; a retract of 2K tokens has three copies.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

from sglang_dsv4.errors import CopyEngineError

LIBRARY = "libcuda.so.1"
TO_HOST, TO_DEVICE = "cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2"


def require_driver() -> None:
    """Finds both calls now, at start. Raises CopyEngineError without the driver."""
    for name in (TO_HOST, TO_DEVICE):
        _driver(name)


@functools.cache
def _driver(name: str) -> Callable[..., int]:
    try:
        call = getattr(ctypes.CDLL(LIBRARY), name)
    except (OSError, AttributeError) as error:
        raise CopyEngineError(f"{LIBRARY} has no {name} here ({error}); DSV4_TRANSFER=torch does without") from error
    call.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    call.restype = ctypes.c_int
    found: Callable[..., int] = call
    return found


def copy_to_host(host: int, device: int, nbytes: int, stream: int) -> None:
    """Enqueues a copy of ``nbytes`` from address ``device`` to pinned address ``host``. Raises CopyEngineError."""
    _check(_driver(TO_HOST)(host, device, nbytes, stream), nbytes)


def copy_to_device(device: int, host: int, nbytes: int, stream: int) -> None:
    """Enqueues a copy of ``nbytes`` from pinned address ``host`` to address ``device``. Raises CopyEngineError."""
    _check(_driver(TO_DEVICE)(device, host, nbytes, stream), nbytes)


def _check(code: int, nbytes: int) -> None:
    if code:
        raise CopyEngineError(f"the CUDA driver refused a copy of {nbytes} bytes (error {code})")
