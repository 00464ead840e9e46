"""Checks host memory, the locked-memory limit and the GPUs of this machine."""

from __future__ import annotations

import os
import re
import resource
import time
from pathlib import Path

from sglang_dsv4.cli.doctor_installation import FAIL, OK, REFUSES, WARN, Check, Checks, settings_or_defaults
from sglang_dsv4.cli.tables import size
from sglang_dsv4.command_line import gpus
from sglang_dsv4.errors import HostMemoryExhausted
from sglang_dsv4.hostmem.fences import why_unordered
from sglang_dsv4.hostmem.populate import MOST_THREADS

DRIVER = Path("/proc/driver/nvidia/version")
PROBE_BYTES = 64 << 20
PINNING = 0.08  # seconds a GiB, once it has its pages
POPULATING = 0.5  # seconds a GiB and thread


def host_memory(arenas: int, ranks: int = 1) -> Checks:
    """Checks the memory that ``arenas`` arenas of a server's ``ranks`` pin, against the RAM that can be taken."""
    from sglang_dsv4.hostmem.sizing import free_ram, too_much  # noqa: PLC0415 - tests replace it

    free, host_gb = free_ram(), settings_or_defaults().host_gb
    if ranks > 1 and (reason := why_unordered()):
        yield Check("shared memory", WARN, reason, "each rank has an arena of its own: DSV4_HOST_GB counts for each")
    cores = len(os.sched_getaffinity(0))
    most = each(arenas)
    together = "" if arenas == 1 else f" each, {size(most * arenas)} together"
    takes = f"{_arenas(arenas)} at most {size(most)}{together}, pinned while the server lives"
    if host_gb is None:
        slow = f"up to {most / 2**30 * (PINNING + POPULATING / min(MOST_THREADS, cores)):.0f} s of its start"
        found = f"{size(free)} can be taken; DSV4_HOST_GB=auto gives {takes} ({slow})"
        yield Check("host memory", OK, found)
    elif trouble := too_much(host_gb, free, arenas):
        found, _, todo = trouble.partition("; ")
        yield Check("host memory", FAIL, found, todo, REFUSES)
    elif apart := too_much(host_gb, free, ranks):
        found = f"{size(free)} can be taken; DSV4_HOST_GB={host_gb:g} gives {takes}"
        todo = f"ranks that cannot open each other's memory would have one each, and refuse to start: {apart}"
        yield Check("host memory", WARN, found, todo)
    else:
        yield Check("host memory", OK, f"{size(free)} can be taken; DSV4_HOST_GB={host_gb:g} gives {takes}")


def locked_memory(arenas: int) -> Checks:
    """Checks the limit of each process against its arena: ranks that share one pin all of it."""
    limit, wanted = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], each(arenas)
    found = f"{'unlimited' if limit == resource.RLIM_INFINITY else size(limit)}, an arena up to {size(wanted)}"
    if limit == resource.RLIM_INFINITY or limit >= wanted:
        yield Check("locked memory (ulimit -l)", OK, found)
    elif not gpus():
        yield Check("locked memory (ulimit -l)", OK, f"{found}; without a GPU nothing is pinned")
    else:
        todo = "if pinning is refused: ulimit -l unlimited (docker: --ulimit memlock=-1), or lower DSV4_HOST_GB"
        yield Check("locked memory (ulimit -l)", WARN, found, todo)


def gpu() -> Checks:
    """Checks each GPU that torch sees, and whether memory can be pinned for it."""
    import torch  # noqa: PLC0415

    for number in range(gpus()):
        properties = torch.cuda.get_device_properties(number)
        yield Check(f"GPU {number}", OK, f"{properties.name}, {size(properties.total_memory)}")
    if DRIVER.is_file() and (found := re.search(r"\d+\.\d[\d.]*", DRIVER.read_text())):
        yield Check("GPU driver", OK, found[0])
    if gpus():
        yield _pinning()
    else:
        breaks = "a server; bench and demo move their bytes with torch, at its speed"
        yield Check("GPU", WARN, "none that torch sees", "run on a machine with an NVIDIA GPU to serve", breaks)


def _pinning() -> Check:
    """Pins a little memory, as a server does."""
    from sglang_dsv4.hostmem.arena import Arena  # noqa: PLC0415

    started = time.perf_counter()
    try:
        Arena(PROBE_BYTES, pin=True).close()
    except HostMemoryExhausted as error:
        return Check("pinning", FAIL, str(error), "raise the locked-memory limit (ulimit -l)", "host copies")
    return Check("pinning", OK, f"{size(PROBE_BYTES)} in {(time.perf_counter() - started) * 1e3:.0f} ms")


def each(arenas: int) -> int:
    """Returns the most bytes of an arena."""
    from sglang_dsv4.hostmem.sizing import RAM_SHARE, free_ram  # noqa: PLC0415

    host_gb = settings_or_defaults().host_gb
    return free_ram() // RAM_SHARE // arenas if host_gb is None else int(host_gb * 2**30)


def _arenas(count: int) -> str:
    return "one arena" if count == 1 else f"{count} arenas"
