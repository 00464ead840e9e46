"""locate and its torch twin against a loop over the positions; what lies behind the outputs stays as it was."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from builders import DEVICE, count_launches, needs_cuda

from triton_ops import locate as module
from triton_ops.locate import NOT_MAPPED, NOTHING, OFF_PAGE, OFF_SWA_PAGE, TILE, locate, locate_torch, report_size

OPS = pytest.mark.parametrize("op", [locate, locate_torch])
DTYPES = pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
LENGTHS = (0, 1, 127, 128, 129, 130, 255, 256, 257, 1000, 1024, 1025, 4097)
FULL_PAGES, SWA_PAGES = 41, 33  # the dummy page 0 included
POISON, SPARE = -77, 3


class Case(NamedTuple):
    """A request on scattered pages, as plain numbers. mapping: full slot -> SWA slot, its last entry -1."""

    slots: list[int]
    mapping: list[int]
    start: int
    page: int = 256
    limits: tuple[int, int] = (FULL_PAGES, SWA_PAGES)

    def with_slots(self, changes: dict[int, int]) -> Case:
        slots = list(self.slots)
        for position, slot in changes.items():
            slots[position] = slot
        return self._replace(slots=slots)

    def with_swa(self, changes: dict[int, int]) -> Case:
        """changes: SWA slot by position."""
        mapping = list(self.mapping)
        for position, swa in changes.items():
            mapping[self.slots[position]] = swa
        return self._replace(mapping=mapping)

    def swa(self, position: int) -> int:
        return self.mapping[self.slots[position]]


def case(tokens: int, seed: int = 0, page: int = 256, window: int = 127) -> Case:
    """Random pages on both sides; only the pages of the window are mapped."""
    generator = torch.Generator().manual_seed(seed)
    full = (torch.randperm(FULL_PAGES - 1, generator=generator) + 1).tolist()
    swa = (torch.randperm(SWA_PAGES - 1, generator=generator) + 1).tolist()
    slots = [full[p // page] * page + p % page for p in range(tokens)]
    start = max(0, tokens - window)
    mapping = [0] * (FULL_PAGES * page) + [-1]
    for position in range(start // page * page, -(-tokens // page) * page):
        number = position // page
        mapping[full[number] * page + position % page] = swa[number - start // page] * page + position % page
    return Case(slots, mapping, start, page)


def fault_of(c: Case, position: int) -> int:
    """What is wrong with a position: 0, or one of the three."""
    in_page = position % c.page
    base, slot, last = c.slots[position - in_page], c.slots[position], len(c.mapping) - 1
    if not 0 <= slot < last or base % c.page or not 0 <= base // c.page < c.limits[0] or slot - base != in_page:
        return OFF_PAGE
    if position < c.start:
        return 0
    swa = c.mapping[slot]
    if swa <= 0:
        return NOT_MAPPED
    first_slot = c.slots[max(position - in_page, c.start)]
    swa_page = c.mapping[first_slot] // c.page if 0 <= first_slot < last else 0
    if swa % c.page != in_page or swa // c.page >= c.limits[1] or swa // c.page != swa_page:
        return OFF_SWA_PAGE
    return 0


def expected(c: Case) -> tuple[list[int | None], list[int | None], list[int]]:
    """(pages, SWA pages of the window, entries of the tiles); None: a number below 1, whichever."""
    tokens, last = len(c.slots), len(c.mapping) - 1
    pages = [slot // c.page if slot >= 0 else None for slot in c.slots[:: c.page]]
    heads = {max(p // c.page * c.page, c.start): None for p in range(c.start, tokens)}  # kept in order
    swa_pages = []
    for position in heads:
        slot = c.slots[position]
        swa = c.mapping[slot] if 0 <= slot < last else 0
        swa_pages.append(swa // c.page if swa > 0 else None)
    tiles = []
    for tile in range(0, tokens, TILE):
        found = [4 * p + fault_of(c, p) for p in range(tile, min(tile + TILE, tokens)) if fault_of(c, p)]
        tiles.append(found[0] if found else NOTHING)
    return pages, swa_pages, tiles


def tensors(c: Case, dtype: torch.dtype, skip: int, device: str = DEVICE):
    """(indices, mapping, pages, report); the indices start ``skip`` entries behind an aligned address."""
    slots = torch.tensor([0] * skip + c.slots, dtype=dtype).to(device)[skip:]
    mapping = torch.tensor(c.mapping, dtype=torch.int64).to(device)
    pages = torch.full((-(-len(c.slots) // c.page) + SPARE,), POISON, dtype=torch.int64, device=device)
    report = torch.full((report_size(len(c.slots)) + SPARE,), POISON, dtype=torch.int64)
    return slots, mapping, pages, report if device == "cpu" else report.pin_memory()


def found(op, c: Case, dtype: torch.dtype = torch.int64, skip: int = 0, device: str = DEVICE):
    """(pages, report) after a call; the inputs must stay as they were."""
    slots, mapping, pages, report = tensors(c, dtype, skip, device)
    op(slots, mapping, c.page, c.start, c.limits, pages, report)
    if device == "cuda":
        torch.cuda.synchronize()
    assert (slots.tolist(), mapping.tolist()) == (c.slots, c.mapping)
    return pages.tolist(), report.tolist()


def same(wanted: list[int | None], have: list[int]) -> bool:
    return all(number < 1 if want is None else number == want for want, number in zip(wanted, have, strict=True))


def check(op, c: Case, dtype: torch.dtype = torch.int64, skip: int = 0, device: str = DEVICE) -> list[int]:
    """The entries of the tiles, compared with the loop like everything else."""
    wanted_pages, wanted_swa, tiles = expected(c)
    pages, report = found(op, c, dtype, skip, device)
    assert same(wanted_pages, pages[:-SPARE])
    assert same(wanted_swa, report[: len(wanted_swa)])
    assert report[2:-SPARE] == tiles
    assert pages[-SPARE:] == report[-SPARE:] == [POISON] * SPARE
    assert report[len(wanted_swa) : 2] == [POISON] * (2 - len(wanted_swa))
    return tiles


def check_fault(op, c: Case, position: int, fault: int) -> None:
    """A single fault, without the loop's word for it."""
    tiles = check(op, c)
    wanted = [NOTHING] * len(tiles)
    wanted[position // TILE] = 4 * position + fault
    assert tiles == wanted


@OPS
@DTYPES
@pytest.mark.parametrize("tokens", LENGTHS)
def test_a_request_that_lies_page_by_page(op, tokens, dtype):
    for skip in (0, 1, 2, 3) if tokens <= 1000 else (tokens % 3,):  # long ones differ in their tiles, not there
        assert set(check(op, case(tokens, seed=skip), dtype, skip)) <= {NOTHING}


@OPS
@pytest.mark.parametrize("tokens", [1, 63, 65, 500, 2049])
@pytest.mark.parametrize(("page", "window"), [(64, 32), (64, 65), (128, 127), (2048, 127)])
def test_pages_of_another_size(op, tokens, page, window):
    c = case(tokens, page=page, window=min(window, page))
    assert set(check(op, c)) <= {NOTHING}
    check_fault(op, c.with_slots({tokens - 1: 7}), tokens - 1, OFF_PAGE)


@OPS
def test_no_window_and_a_window_of_everything(op):
    everything, nothing = case(400)._replace(start=0), case(400)._replace(start=400)
    with pytest.raises(AssertionError):
        assert set(check(op, everything)) == {NOTHING}  # not all of it is mapped
    full = everything.with_swa({p: 7 * 256 + p for p in range(256)})
    assert set(check(op, full)) == {NOTHING}
    assert set(check(op, nothing.with_swa(dict.fromkeys(range(400), 0)))) == {NOTHING}


def test_the_check_itself_can_fail():
    def wrong(which: int, index: int, by: int):
        def broken(*arguments):
            locate_torch(*arguments)
            arguments[which][index] += by

        return broken

    def forgetful(slots, mapping, page, start, limits, pages, report):
        locate_torch(slots, mapping, page, len(slots), limits, pages, report)

    unmapped = case(1025).with_swa({1000: 0})
    for broken in (wrong(5, 0, 1), wrong(5, -1, 1), wrong(6, 1, 1), wrong(6, 3, -4), wrong(6, -1, 1), forgetful):
        with pytest.raises(AssertionError):
            check(broken, unmapped)
    check(locate_torch, unmapped)


# ----------------------------------------------------------------------------------------------- faults

TOKENS = 2_500  # three tiles; the window is 2373..2499, on pages 9 (2304..) and no other
TWO_PAGES = 2_600  # the window is 2473..2599, on pages 9 and 10 (2560..)
TWO_TILES = 3_100  # the window is 2973..3099, on page 11 and, in the next tile, page 12
BAD_SLOTS = (-1, -(2**31), 2**31 - 1, FULL_PAGES * 256, FULL_PAGES * 256 + 1)  # the fourth: the mapping's last entry


@OPS
@DTYPES
@pytest.mark.parametrize("bad", BAD_SLOTS)
def test_a_slot_out_of_range(op, dtype, bad):
    """One such slot in each tile: what one tile reports is not another's."""
    for positions in ((1, 1279, 2400), (1023, 1025, TOKENS - 1), (255, 2047, 2049)):
        tiles = check(op, case(TOKENS).with_slots(dict.fromkeys(positions, bad)), dtype)
        assert tiles == [4 * position + OFF_PAGE for position in positions]
    check_fault(op, case(TOKENS).with_slots({1023: bad}), 1023, OFF_PAGE)


@OPS
@pytest.mark.parametrize("bad", BAD_SLOTS)
def test_the_first_slot_of_a_page_is_out_of_range(op, bad):
    """One fault a tile is reported: that of the page's first position, not those of the positions behind it."""
    for positions in ((0, 1024, 2304), (256, 1280, 2048)):
        tiles = check(op, case(TOKENS).with_slots(dict.fromkeys(positions, bad)))
        assert tiles == [4 * position + OFF_PAGE for position in positions]


@OPS
def test_the_ends_of_the_mapping(op):
    """Its last entry belongs to slot -1; the one before is a slot like any other."""
    last = FULL_PAGES * 256
    page = {p: (FULL_PAGES - 1) * 256 + p for p in range(256)}
    c = case(256).with_slots(page)
    c = c.with_swa({p: 5 * 256 + p for p in range(256)})
    assert c.slots[255] == last - 1 == len(c.mapping) - 2
    assert check(op, c) == [NOTHING]
    first_of_window = case(382).with_slots(page).with_swa({255: 5 * 256 + 255})
    assert first_of_window.start == 255
    assert check(op, first_of_window) == [NOTHING]
    # A mapping that ends on a page boundary: the page's last slot would read the last entry.
    check_fault(op, c._replace(mapping=[*c.mapping[: last - 1], -1]), 255, OFF_PAGE)
    check_fault(op, c._replace(mapping=[*c.mapping[: last - 1], 5 * 256 + 255]), 255, OFF_PAGE)


@OPS
@pytest.mark.parametrize("position", [0, 1, 1023, 1024, 2049, TOKENS - 1])
@pytest.mark.parametrize("by", [-1, 1, 256, -256])
def test_a_slot_off_its_page(op, position, by):
    c = case(TOKENS)
    c = c.with_slots({position: c.slots[position] + by})
    if by % 256 or position % 256:  # a first slot on another page takes the page with it
        check_fault(op, c, position, OFF_PAGE)
    else:
        check_fault(op, c, position + 1, OFF_PAGE)


@OPS
@pytest.mark.parametrize("number", [0, 4, 9])
def test_a_whole_page_that_does_not_start_at_one(op, number):
    c = case(TOKENS)
    shifted = {p: c.slots[p] + 1 for p in range(256 * number, min(256 * number + 256, TOKENS))}
    check_fault(op, c.with_slots(shifted), 256 * number, OFF_PAGE)


@OPS
@pytest.mark.parametrize(("full", "fits"), [(FULL_PAGES - 1, True), (FULL_PAGES, False), (FULL_PAGES + 3, False)])
@pytest.mark.parametrize("number", [0, 4, 9])
def test_the_limit_of_full_pages(op, number, full, fits):
    """The mapping may be longer than the pool that holds the pages."""
    c = case(TOKENS)
    c = c._replace(mapping=[*c.mapping[:-1], *[0] * 2_000, -1])
    moved = c.with_slots({p: 256 * full + p % 256 for p in range(256 * number, min(256 * number + 256, TOKENS))})
    moved = moved.with_swa({p: c.swa(p) for p in range(256 * number, min(256 * number + 256, TOKENS))})
    if fits:
        assert set(check(op, moved)) == {NOTHING}
    else:
        check_fault(op, moved, 256 * number, OFF_PAGE)


@OPS
@pytest.mark.parametrize(("swa", "fits"), [(SWA_PAGES - 1, True), (SWA_PAGES, False), (2**20, False), (2**40, False)])
@pytest.mark.parametrize("number", [9, 10])
def test_the_limit_of_swa_pages(op, number, swa, fits):
    c = case(TWO_PAGES)
    pages = range(256 * number, min(256 * number + 256, TWO_PAGES))
    moved = c.with_swa({p: 256 * swa + p % 256 for p in pages})
    if fits:
        assert set(check(op, moved)) == {NOTHING}
    else:
        check_fault(op, moved, max(256 * number, c.start), OFF_SWA_PAGE)


@OPS
@pytest.mark.parametrize(
    ("position", "value"),
    [(2_473, 0), (2_474, -1), (2_559, -256), (2_560, 0), (2_560, -(2**40)), (2_561, -1), (TWO_PAGES - 1, -256)],
)
def test_a_window_position_that_is_not_mapped(op, position, value):
    check_fault(op, case(TWO_PAGES).with_swa({position: value}), position, NOT_MAPPED)


@OPS
@pytest.mark.parametrize("position", [2_473, 2_474, 2_559, 2_560, 2_561, TWO_PAGES - 1])
@pytest.mark.parametrize("by", [-1, 8])
def test_a_window_position_off_its_swa_page(op, position, by):
    c = case(TWO_PAGES)
    check_fault(op, c.with_swa({position: c.swa(position) + by}), position, OFF_SWA_PAGE)


@OPS
@pytest.mark.parametrize("position", [2_474, 2_559, 2_561, TWO_PAGES - 1])
def test_a_window_position_on_another_swa_page(op, position):
    """At its own place there."""
    c = case(TWO_PAGES)
    other = next(
        page for page in range(1, SWA_PAGES) if page not in {c.swa(c.start) // 256, c.swa(TWO_PAGES - 1) // 256}
    )
    check_fault(op, c.with_swa({position: 256 * other + position % 256}), position, OFF_SWA_PAGE)


@OPS
@pytest.mark.parametrize("value", [0, -5, 3, 2**40])
def test_the_mapping_outside_of_the_window_is_nobodys_business(op, value):
    outside = dict.fromkeys((0, 255, 1024, 2303, 2304, 2472), value)
    assert set(check(op, case(TWO_PAGES).with_swa(outside))) == {NOTHING}


@OPS
def test_the_first_fault_of_each_tile_is_reported(op):
    c = case(TWO_TILES)
    c = c.with_swa({2_980: 0, 3_000: c.swa(3_000) + 1, 3_072: c.swa(3_072) + 1, 3_075: 0})
    c = c.with_slots({700: 3, 5: -1, 1_023: 2**31 - 1, 2_000: 0, 1_999: 0, 3_050: 1, 3_099: 1})
    assert check(op, c) == [4 * 5 + OFF_PAGE, 4 * 1_999 + OFF_PAGE, 4 * 2_980 + NOT_MAPPED, 4 * 3_072 + OFF_SWA_PAGE]


@OPS
def test_a_position_with_several_faults_reports_the_first_kind(op):
    c = case(TWO_TILES).with_swa({2_990: -3, 3_090: 0})
    c = c.with_slots({3_090: c.slots[3_090] + 1})
    assert check(op, c) == [NOTHING, NOTHING, 4 * 2_990 + NOT_MAPPED, 4 * 3_090 + OFF_PAGE]


@OPS
@pytest.mark.parametrize("seed", range(8))
def test_any_faults(op, seed):
    """Slots and mapping changed at random places, to values near and far."""
    generator = torch.Generator().manual_seed(seed)

    def draw(end: int) -> int:
        return int(torch.randint(end, (1,), generator=generator))

    c = case(TWO_TILES, seed)
    values = (*BAD_SLOTS, 0, 1, 255, 256, 512, FULL_PAGES * 256 - 1)
    near = c.slots
    window = {c.start + draw(127): (values[draw(len(values))], c.swa(3_000) + draw(9))[draw(2)] for _ in range(draw(5))}
    c = c.with_swa({p: swa for p, swa in window.items() if swa < 2**31})
    slots = {draw(TWO_TILES): (values[draw(len(values))], near[draw(TWO_TILES)])[draw(2)] for _ in range(draw(6))}
    check(op, c.with_slots(slots), torch.int32)


# -------------------------------------------------------------------------------------------- the rest


def arguments(**changes):
    c = case(300)
    slots, mapping, pages, report = tensors(c, torch.int32, 0)
    given = {"slots": slots, "mapping": mapping, "page": 256, "start": c.start, "limits": c.limits}
    given |= {"pages": pages, "report": report}
    return [(changes[name](value) if name in changes else value) for name, value in given.items()]


@OPS
@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("slots", lambda t: t[::2], TypeError, "indices must be 1-D"),
        ("slots", lambda t: t.view(2, -1), TypeError, "indices must be 1-D"),
        ("slots", lambda t: t.to(torch.int16), TypeError, "indices must be int64 or int32, not torch.int16"),
        ("slots", lambda t: t.float(), TypeError, "indices must be int64 or int32"),
        ("mapping", lambda t: t.int(), TypeError, "swa_map must be int64, not torch.int32"),
        ("mapping", lambda t: t[::2], TypeError, "swa_map must be 1-D"),
        ("pages", lambda t: t.int(), TypeError, "pages must be int64, not"),
        ("pages", lambda t: t[:1], ValueError, "1 pages"),
        ("report", lambda t: t.int(), TypeError, "report must be int64, not"),
        ("report", lambda t: t.view(2, -1), TypeError, "report must be 1-D"),
        ("report", lambda t: t[:2], ValueError, "report of 2 entries"),
        ("start", lambda _: 301, ValueError, "from 301 of 300"),
        ("start", lambda _: -1, ValueError, "from -1"),
        ("page", lambda _: 64, ValueError, "more than two pages of 64"),
    ],
)
def test_bad_arguments_are_refused_by_name(op, name, change, error, message):
    given = arguments(**{name: change})
    with pytest.raises(error, match=message):
        op(*given)
    assert set(given[5].tolist()) == set(given[6].flatten().tolist()) == {POISON}


@OPS
def test_no_more_room_than_needed(op):
    pages, report = arguments()[5:]
    given = arguments(pages=lambda t: t[:2], report=lambda t: t[:3])
    op(*given)
    assert report_size(300) == 3
    assert (len(pages), len(report)) == (2 + SPARE, 3 + SPARE)
    assert POISON not in given[5].tolist()


def test_one_program_a_tile(monkeypatch):
    counted = count_launches(monkeypatch, module._locate)
    for tokens in (0, 1, TILE, TILE + 1, 4_097):
        check(locate, case(tokens))
    assert counted.grids == [(1, 1, 1), (1, 1, 1), (2, 1, 1), (5, 1, 1)]


@needs_cuda
@pytest.mark.gpu
@DTYPES
def test_compiled_kernel(monkeypatch, dtype):
    """One compiled variant for every length, alignment, and mapping."""
    monkeypatch.setattr(module._locate, "_variants", {})
    for tokens in (1, 4_097, *LENGTHS):
        for skip in range(4):
            assert set(check(locate, case(tokens, skip), dtype, skip, "cuda")) <= {NOTHING}
    for bad in BAD_SLOTS:
        for position in (0, 2_400, TOKENS - 1):
            check(locate, case(TOKENS).with_slots({position: bad}), dtype, 1, "cuda")
    for value in (0, -1, 2**40):
        check(locate, case(TWO_PAGES).with_swa({2_500: value, 2_560: value}), dtype, 0, "cuda")
