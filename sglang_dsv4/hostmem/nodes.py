"""Finds the memory nodes (NUMA) from which a process can take RAM, and what is free there.

The engine starts each rank bound to the node of its card, where it may (``numactl --membind``), and a container may
have some nodes only. Memory that is missing there is not taken elsewhere: the OOM killer ends a process.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path

logger = logging.getLogger(__name__)

Nodes = frozenset[int]
FREE = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")  # of a node; page cache is given up


def bound_nodes() -> Nodes | None:
    """Returns the nodes that this process's memory is bound to; None where it is bound to none."""
    try:
        with Path("/proc/self/numa_maps").open("rb", buffering=0) as maps:
            line = maps.read(256).split(b"\n")[0]  # of its program, which has the policy of the process
    except OSError:  # no Linux, one node alone, or a sandbox
        return None
    words = line.decode(errors="replace").split()
    policy, _, listed = words[1].partition(":") if len(words) > 1 else ("", "", "")
    return _nodes(listed) if policy.partition("=")[0] == "bind" else None


def free_on(bound: Nodes | None) -> int | None:
    """Measures the bytes that can be taken from the nodes ``bound`` alone; None where that is every node."""
    root = Path("/sys/devices/system/node")
    here = Nodes(int(node.name.removeprefix("node")) for node in root.glob("node[0-9]*"))
    usable = here if bound is None else here & bound
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith("Mems_allowed_list:"):
            usable &= _nodes(line.split()[1])
    if not usable or usable == here:
        return None
    _tell(usable)
    return sum(_free(root / f"node{node}" / "meminfo") for node in usable)


@functools.cache
def _tell(usable: Nodes) -> None:
    logger.info("bound to memory nodes %s, whose RAM alone counts", ", ".join(map(str, sorted(usable))))


def _free(meminfo: Path) -> int:
    rows = (line.split() for line in meminfo.read_text().splitlines())
    return sum(int(row[3]) << 10 for row in rows if row[2].rstrip(":") in FREE)


def _nodes(listed: str) -> Nodes:
    """Reads a list as the kernel writes it, such as 0-1,4."""
    ranges = (part.split("-") for part in listed.split(",") if part)
    return Nodes(node for first, *last in ranges for node in range(int(first), int((last or [first])[0]) + 1))
