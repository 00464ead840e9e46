"""Memory that another process made is mapped before its use, and keeps its content."""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path

import numpy as np
import pytest

from sglang_dsv4.hostmem import populate
from sglang_dsv4.hostmem.populate import map_in, system_page


def mapped(address: int) -> int:
    """Returns the bytes of the mapping at ``address`` that this process has pages of."""
    ranges = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    (found,) = [text for text in ranges if text.startswith(f"{address:x}-")]
    return 1024 * int(re.search(r"^Rss: +(\d+) kB", found, re.MULTILINE)[1])


@pytest.mark.parametrize("pages", [1, 7, 33])
def test_all_pages_are_there_and_as_they_were(pages, monkeypatch):
    monkeypatch.setattr(populate, "STEP", 8 * system_page())
    nbytes = pages * system_page()
    fd = os.memfd_create("test")
    os.ftruncate(fd, nbytes)
    wanted = np.random.default_rng(pages).integers(0, 256, nbytes, np.uint8)
    maker = np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
    maker[:] = wanted
    other = np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
    address = other.__array_interface__["data"][0]
    assert mapped(address) == 0
    map_in(address, nbytes)
    assert mapped(address) == nbytes and (maker == wanted).all() and (other == wanted).all()
    os.close(fd)


def test_an_older_kernel_maps_nothing_and_writes_nothing(monkeypatch):
    calls = []
    monkeypatch.setattr(populate, "STEP", 4096)
    monkeypatch.setattr(
        populate, "_libc", type("Libc", (), {"madvise": staticmethod(lambda *of: calls.append(of) or -1)})
    )
    map_in(1 << 40, 4 * 4096)
    assert calls == [(1 << 40, 4096, 23)]
