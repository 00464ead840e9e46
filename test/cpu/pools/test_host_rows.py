"""The engine's own rows on the host go with the pages of a copy: compared with a loop over single slots."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_dsv4.cache.families import Geometry, families
from sglang_dsv4.cache.units import Units
from sglang_dsv4.errors import IndexMismatch
from sglang_dsv4.hostmem.memory import HostMemory
from sglang_dsv4.hostmem.sizing import ArenaSize
from sglang_dsv4.pools.host_rows import HostRows, row_bytes

RATIOS, PAGE, PAGES = (0, 4, 128, 4), 256, 12


def buffers() -> list[torch.Tensor]:
    wide = torch.arange(PAGES * PAGE * 15, dtype=torch.int32).view(PAGES * PAGE, 3, 5)
    return [wide, torch.randint(0, 99, (PAGES * PAGE, 2, 1), dtype=torch.int16)]


def made(rows: list[torch.Tensor], rank: int = 0) -> tuple[HostMemory, HostRows, list[int]]:
    g, told = Geometry(RATIOS), []
    memory = HostMemory(families(g), ArenaSize(Units.of(g, row_bytes(rows)), 40), pin=False)
    memory.rank = rank
    memory.arena.region.fill_(0xEE)
    return memory, HostRows(rows, memory, PAGE, lambda slots: told.extend(slots.tolist())), told


def placed(pages: list[int], tokens: int) -> Any:
    """Returns a request of ``tokens`` tokens in those full pages."""
    slots = [pages[position // PAGE] * PAGE + position % PAGE for position in range(tokens)]
    return SimpleNamespace(indices=torch.tensor(slots, dtype=torch.int32))


@pytest.mark.parametrize("tokens", [1, 255, 256, 257, 600, 1024])
@pytest.mark.parametrize("first_page", [0, 1, 2])
def test_rows_come_back_from_a_page_on(tokens: int, first_page: int) -> None:
    rows = buffers()
    memory, host_rows, told = made(rows)
    before, after = placed([7, 3, 9, 1], tokens), placed([2, 10, 4, 8], tokens)
    copy = memory.allocate(tokens, Geometry(RATIOS))
    host_rows.save(copy, host_rows.first_slots(before, 0))
    wanted = [buffer.clone() for buffer in rows]
    for old, new in list(zip(before.indices, after.indices, strict=True))[first_page * PAGE :]:
        for buffer in wanted:
            buffer[new] = buffer[old]
    host_rows.load(copy, first_page, host_rows.first_slots(after, first_page))
    assert all(map(torch.equal, rows, wanted))
    assert told == [page * PAGE for page in [2, 10, 4, 8][first_page : -(-tokens // PAGE)]]
    copy.release()


@pytest.mark.parametrize("begins", [0, 2])
def test_pages_that_were_saved_before_keep_their_rows(begins: int) -> None:
    """Another holder has saved them, with its own rows of the same tokens; or they have no unit in this copy."""
    rows = buffers()
    memory, host_rows, _ = made(rows)
    request, g = placed([7, 3, 9, 1], 1024), Geometry(RATIOS)
    first = memory.allocate(512, g)
    before = memory.host_rows.clone()
    saved = first.pages(0) if begins == 0 else []
    copy = memory.allocate(1024, g, saved=saved, begins=begins)
    host_rows.save(copy, host_rows.first_slots(request, copy.first_page))
    changed = (memory.host_rows != before).any(1).nonzero().flatten().tolist()
    assert sorted(changed) == sorted(copy.pages(2))
    for handle in (first, copy):
        handle.release()


@pytest.mark.parametrize("page", [-1, PAGES, 1 << 20])
def test_slots_beyond_the_buffers_are_refused(page: int) -> None:
    """The device finds a wrong slot only later."""
    memory, host_rows, _ = made(buffers())
    copy = memory.allocate(300, Geometry(RATIOS))
    with pytest.raises(IndexMismatch, match="page 1 begins at full slot"):
        host_rows.save(copy, host_rows.first_slots(placed([1, page], 300), 0))
    copy.release()


def test_other_ranks_of_an_arena_copy_none() -> None:
    rows = buffers()
    memory, host_rows, told = made(rows, rank=1)
    before, copy = rows[0].clone(), memory.allocate(300, Geometry(RATIOS))
    request = placed([5, 6], 300)
    host_rows.save(copy, host_rows.first_slots(request, 0))
    host_rows.load(copy, 0, host_rows.first_slots(request, 0))
    assert torch.equal(rows[0], before) and bool((memory.host_rows == 0xEE).all()) and not told
    copy.release()


class Forbidden(TorchDispatchMode):
    """Fails at every operation of torch."""

    def __torch_dispatch__(self, func: Any, *_: Any) -> Any:
        raise AssertionError(f"{func} takes host time of a save")


def test_where_the_engine_keeps_none_a_transfer_pays_nothing() -> None:
    memory, host_rows, _ = made([])
    request, copy = placed([5, 6], 300), memory.allocate(300, Geometry(RATIOS))
    with Forbidden():
        host_rows.save(copy, host_rows.first_slots(request, 0))
        host_rows.load(copy, 0, host_rows.first_slots(request, 0))
    copy.release()
