"""A process that is bound to memory nodes counts the RAM of these alone."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import together

from sglang_dsv4.engine import ranks
from sglang_dsv4.hostmem import nodes, sizing
from sglang_dsv4.hostmem.sizing import free_ram

SET_MEMPOLICY, BIND = 238, 2  # of x86-64
HERE = Path("/sys/devices/system/node/node0/meminfo")


def _bound_to_node_0() -> object:
    mask = ctypes.c_ulong(1)
    if ctypes.CDLL(None, use_errno=True).syscall(SET_MEMPOLICY, BIND, ctypes.byref(mask), ctypes.c_ulong(64)):
        return f"no policy can be set here: {os.strerror(ctypes.get_errno())}"
    return nodes.bound_nodes()


@pytest.mark.skipif(not HERE.exists() or os.uname().machine != "x86_64", reason="no node, or other numbers of calls")
def test_a_process_that_is_bound_knows_it() -> None:
    assert sys.platform == "linux" and nodes.bound_nodes() is None
    (found,) = together(_bound_to_node_0, [()])
    if isinstance(found, str):
        pytest.skip(found)
    assert found == {0}


def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, allowed: str = "0-3", maps: str = "default") -> None:
    """One with 4,000 kB free, 1,000 on each of four nodes in four parts, one part of it page cache in use."""
    kinds = ("MemTotal", "MemFree", "Active(file)", "Inactive(file)", "SReclaimable", "Dirty")
    rows = "".join(f"Node 0 {kind}: {kilobytes} kB\n" for kind, kilobytes in zip(kinds, (9, 400, 300, 200, 100, 7)))  # noqa: B905
    files = {f"sys/devices/system/node/node{node}/meminfo": rows for node in range(4)}
    files |= {"proc/self/status": f"Name: x\nMems_allowed_list:\t{allowed}\n"}
    files |= {"proc/self/numa_maps": f"55d0 {maps} file=/usr/bin/python3 mapped=2 N0=2\n55d1 bind:3 heap\n"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for module in (nodes, sizing):
        monkeypatch.setattr(module, "Path", lambda path: tmp_path / str(path).lstrip("/"))
    available = SimpleNamespace(available=4_000 << 10)
    monkeypatch.setattr(sizing, "psutil", SimpleNamespace(virtual_memory=lambda: available))


@pytest.mark.parametrize(
    ("allowed", "maps", "bound", "kilobytes"),
    [
        ("0-3", "default", None, 4_000),
        ("0-3", "bind:1", {1}, 1_000),
        ("0-3", "bind=static:0,2-3", {0, 2, 3}, 3_000),
        ("0-3", "bind:0-3", {0, 1, 2, 3}, 4_000),
        ("0-3", "prefer:1", None, 4_000),
        ("0-3", "interleave:0-1", None, 4_000),
        ("1,3", "default", None, 2_000),
        ("1-2", "bind:2-3", {2, 3}, 1_000),
    ],
)
def test_the_ram_of_its_nodes_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    allowed: str, maps: str, bound: set[int] | None, kilobytes: int,
) -> None:  # fmt: skip
    machine(monkeypatch, tmp_path, allowed, maps)
    nodes._tell.cache_clear()
    found = nodes.bound_nodes()
    with caplog.at_level("INFO"):
        assert found == bound and free_ram(found) == free_ram(found) == kilobytes << 10
    assert len(caplog.messages) == (kilobytes < 4_000), "told once"


def test_a_machine_without_nodes_is_counted_as_a_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(monkeypatch, tmp_path)
    shutil.rmtree(tmp_path / "proc")
    shutil.rmtree(tmp_path / "sys")
    assert nodes.bound_nodes() is None and free_ram(nodes.bound_nodes()) == 4_000 << 10


@pytest.mark.parametrize(
    ("bound", "replicas", "together_on"),
    [([{0}, {1}], 1, {0, 1}), ([{1}, {1}], 1, {1}), ([{1}, None], 1, None), ([{1}, {1}], 2, None)],
)
def test_ranks_count_the_nodes_of_all_of_them(
    monkeypatch: pytest.MonkeyPatch, bound: list[set[int] | None], replicas: int, together_on: set[int] | None
) -> None:
    """Each takes its part on its own: a server on two sockets may have both."""
    others = [(place, "the first", of) for place, of in zip(("here", "here"), bound, strict=True)]
    monkeypatch.setattr(ranks, "_distributed", lambda: True)
    monkeypatch.setattr(ranks, "machine", lambda: "here")
    monkeypatch.setattr(ranks, "of_every_rank", lambda _: [*others, ("elsewhere", "another", {7})])
    args = SimpleNamespace(enable_dp_attention=False, dp_size=replicas)
    assert ranks.place(args) == ranks.Place(2 * replicas, "the first", together_on)
