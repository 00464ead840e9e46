"""locate equals its torch twin, and names single faults."""

from __future__ import annotations

import pytest
import torch
from located import check, check_fault

from triton_ops.cases import INT32_MAX, INT32_MIN
from triton_ops.cases.locate import FULL_PAGES, LOCATE_LENGTHS, SWA_PAGES, located
from triton_ops.locate import NOT_MAPPED, NOTHING, OFF_PAGE, OFF_SWA_PAGE

DTYPES = pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])


@DTYPES
@pytest.mark.parametrize("tokens", LOCATE_LENGTHS)
def test_a_request_that_lies_page_by_page(tokens, dtype):
    for skip in (0, 1, 2, 3) if tokens <= 256 else (tokens % 3,):  # long ones differ in their tiles, not there
        assert set(check(located(tokens, seed=skip), dtype, skip)) <= {NOTHING}


TOKENS = 2_500  # three tiles; the window is 2373..2499, on pages 9 (2304..) and no other
TWO_PAGES = 552  # the window is 425..551, on pages 1 and 2 (512..)
TWO_TILES = 3_100  # the window is 2973..3099, on page 11 and, in the next tile, page 12
BAD_SLOTS = (-1, INT32_MIN, INT32_MAX, FULL_PAGES * 256, FULL_PAGES * 256 + 1)  # the fourth: the mapping's last entry


def test_the_ends_of_the_mapping():
    """Its last entry belongs to slot -1; the one before is a slot like any other."""
    last = FULL_PAGES * 256
    page = {p: (FULL_PAGES - 1) * 256 + p for p in range(256)}
    c = located(256).with_slots(page)
    c = c.with_swa({p: 5 * 256 + p for p in range(256)})
    assert c.slots[255] == last - 1 == len(c.mapping) - 2
    assert check(c) == [NOTHING]
    first_of_window = located(382).with_slots(page).with_swa({255: 5 * 256 + 255})
    assert first_of_window.start == 255
    assert check(first_of_window) == [NOTHING]
    # A mapping that ends on a page boundary: the page's last slot would read the last entry.
    check_fault(c._replace(mapping=[*c.mapping[: last - 1], -1]), 255, OFF_PAGE)
    check_fault(c._replace(mapping=[*c.mapping[: last - 1], 5 * 256 + 255]), 255, OFF_PAGE)


@pytest.mark.parametrize(("full", "fits"), [(FULL_PAGES - 1, True), (FULL_PAGES, False), (FULL_PAGES + 3, False)])
def test_the_limit_of_full_pages(full, fits):
    """The mapping may be longer than the pool that holds the pages."""
    for number in (0, 9):
        c, own = located(TOKENS), range(256 * number, min(256 * number + 256, TOKENS))
        c = c._replace(mapping=[*c.mapping[:-1], *[0] * 2_000, -1])
        moved = c.with_slots({p: 256 * full + p % 256 for p in own}).with_swa({p: c.swa(p) for p in own})
        if fits:
            assert set(check(moved)) == {NOTHING}
        else:
            check_fault(moved, 256 * number, OFF_PAGE)


@pytest.mark.parametrize(("swa", "fits"), [(SWA_PAGES - 1, True), (SWA_PAGES, False), (2**20, False), (2**40, False)])
def test_the_limit_of_swa_pages(swa, fits):
    for number in (1, 2):
        c = located(TWO_PAGES)
        moved = c.with_swa({p: 256 * swa + p % 256 for p in range(256 * number, min(256 * number + 256, TWO_PAGES))})
        if fits:
            assert set(check(moved)) == {NOTHING}
        else:
            check_fault(moved, max(256 * number, c.start), OFF_SWA_PAGE)


@pytest.mark.parametrize("position", [425, 426, 511, 512, 513, TWO_PAGES - 1])
def test_a_window_position_that_is_not_mapped_or_off_its_swa_page(position):
    c = located(TWO_PAGES)
    for value in (0, -1, -256, -(2**40)):
        check_fault(c.with_swa({position: value}), position, NOT_MAPPED)
    for by in (-1, 8):
        check_fault(c.with_swa({position: c.swa(position) + by}), position, OFF_SWA_PAGE)
    if position not in {425, 512}:  # the first of a page takes the page with it
        used = {c.swa(c.start) // 256, c.swa(TWO_PAGES - 1) // 256}
        other = next(page for page in range(1, SWA_PAGES) if page not in used)
        check_fault(c.with_swa({position: 256 * other + position % 256}), position, OFF_SWA_PAGE)


@pytest.mark.parametrize("seed", range(8))
def test_any_faults(seed):
    """Slots and mapping changed at random places, to values near and far."""
    generator = torch.Generator().manual_seed(seed)

    def draw(end: int) -> int:
        return int(torch.randint(end, (1,), generator=generator))

    c = located(TWO_TILES, seed)
    values = (*BAD_SLOTS, 0, 1, 255, 256, 512, FULL_PAGES * 256 - 1)
    near = c.slots
    window = {c.start + draw(127): (values[draw(len(values))], c.swa(3_000) + draw(9))[draw(2)] for _ in range(draw(5))}
    c = c.with_swa(window)
    slots = {draw(TWO_TILES): (values[draw(len(values))], near[draw(TWO_TILES)])[draw(2)] for _ in range(draw(6))}
    check(c.with_slots(slots), torch.int32)
