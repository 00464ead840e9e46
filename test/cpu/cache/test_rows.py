"""The plan of a request has every live row once, where its position says: checked token by token."""

import dataclasses

import numpy as np
import pytest
from builders import place
from hypothesis import given, settings
from hypothesis import strategies as st
from made_families import family_sets

from sglang_dsv4.cache.families import Geometry, families
from sglang_dsv4.cache.family import Family, Group
from sglang_dsv4.cache.packed import Tail
from sglang_dsv4.cache.rows import Place, Spans, find_spans
from sglang_dsv4.errors import GeometryError, IndexMismatch, WindowNotMapped

RATIOS = (0, 4, 128, 4, 128)
LENGTHS = (
    1, 3, 4, 5, 7, 8, 127, 128, 129, 130, 255, 256, 257, 383, 384, 385, 511, 512, 513, 1000, 4095, 4096, 4097,
)  # fmt: skip
RINGS = pytest.mark.parametrize("rings", [(8, 128), (16, 256), (8, 256), (16, 128)])

# position -> (device page, device row, page of the copy, its row there or live row)
Rows = dict[int, tuple[int, int, int, int]]


def oracle(g: Geometry, family: Family, p: Place) -> Rows:
    """Where each live position of a family lies, one position at a time."""
    n, page = p.tokens, g.page_size
    first_in_window, first = n - len(p.swa), live_from(family, n)
    rows: Rows = {}
    for position in range(first, n):
        block, inner = position // page, position % page
        if family.group is Group.PAGED:
            if position % family.ratio == family.ratio - 1:
                row = inner // family.ratio
                rows[position] = (int(p.pages[block]), row, block, row)
        elif family.group is Group.WINDOW:
            swa = int(p.swa[position - first_in_window])
            rows[position] = (swa // page, swa % family.rows, 0, position - first)
        else:
            rows[position] = (p.request_slot, position % family.rows, 0, position - first)
    return rows


def reach_of(g: Geometry) -> int:
    """How far back from the next token the target's step reads, or its draft's."""
    return max(127, g.draft.reach if g.draft else 0)


def live_from(family: Family, n: int) -> int:
    """The first position that lives, by the definition: the open block of ``period`` and the ``lag`` before it."""
    if family.group is Group.PAGED:
        return 0
    block = n - n % family.period
    return min((p for p in range(n) if p >= block - family.lag), default=n)


def expand(spans: Spans) -> list[tuple[int, tuple[int, int, int, int]]]:
    """Every row of every span, with the position it stands for."""
    found = []
    for k in range(len(spans)):
        for row in range(int(spans.counts[k])):
            where = (spans.pages[k], spans.rows[k] + row, spans.copy_pages[k], spans.live_rows[k] + row)
            found.append((spans.position_of(k, row), tuple(int(v) for v in where)))
    return found


def geometry(rings: tuple[int, int] = (8, 128), page: int = 256) -> Geometry:
    return Geometry(RATIOS, page_size=page, rings={4: rings[0], 128: rings[1]})


def plan_of(g: Geometry, p: Place) -> dict[str, Spans]:
    return {spans.family.name: spans for spans in find_spans(g, families(g), p)}


def check(g: Geometry, p: Place, members: tuple[Family, ...] | None = None, distinct: bool = True) -> None:
    members = families(g) if members is None else members
    found = find_spans(g, members, p)
    assert [spans.family for spans in found] == list(members)
    for spans in found:
        family = spans.family
        name, wanted, rows = family.name, oracle(g, family, p), expand(spans)
        got = dict(rows)
        assert len(got) == len(rows), f"{name}: a position twice"
        if family.whole_pages:
            # A page moves whole: beyond the live rows only rows of the request's own last page.
            extra = {position for position in got if position not in wanted}
            assert all(p.tokens <= position < g.page_size * len(p.pages) for position in extra), name
            assert len(got) == len(p.pages) * family.rows
            got = {position: where for position, where in got.items() if position in wanted}
        assert got == wanted, name
        if distinct:
            assert len({(where[0], where[1]) for _, where in rows}) == len(rows), f"{name}: a device row twice"
        assert len({(where[2], where[3]) for _, where in rows}) == len(rows), f"{name}: a live row twice"
        assert family.live_rows(p.tokens) == p.tokens - live_from(family, p.tokens), name
        moved = len(p.pages) * family.page_bytes if family.whole_pages else len(rows) * family.row_bytes
        assert family.moved_bytes(g.page_size, p.tokens) == moved * len(family.layers), name


@RINGS
@pytest.mark.parametrize("n", LENGTHS)
def test_every_live_row_once(n, rings):
    for seed in range(3):
        check(geometry(rings), place(n, seed=seed, slot=seed))


@RINGS
@pytest.mark.parametrize("n", [5, 130, 257, 385, 1000])
def test_swa_slots_in_any_order(n, rings):
    """No two neighbours side by side: the plan may not assume that a page's slots run in order."""
    p = place(n)
    swa = np.random.default_rng(n).permutation(np.arange(1, 4096))[: len(p.swa)].astype(np.int64)
    check(geometry(rings), dataclasses.replace(p, swa=swa), distinct=False)
    check(geometry(rings), dataclasses.replace(p, swa=np.ascontiguousarray(p.swa[::-1])), distinct=False)


@settings(max_examples=60, deadline=None)
@given(pool=family_sets(), n=st.integers(0, 1500), seed=st.integers(0, 2**32 - 1), slot=st.integers(0, 500))
def test_any_families_at_any_length(pool, n, seed, slot):
    g, members = pool
    check(g, place(n, seed=seed, slot=slot, reach=reach_of(g), page=g.page_size), members)


def test_rows_that_live_before_the_window_are_refused():
    """Only the window's SWA slots are known."""
    g = geometry()
    family = dataclasses.replace(families(g)[3], lag=128)
    find_spans(g, (family,), place(127))
    with pytest.raises(GeometryError, match=f"family {family.name}: position 0 of 128 lives before the window"):
        find_spans(g, (family,), place(128))


@pytest.mark.parametrize("value", [0, -1, -(2**63)])
@pytest.mark.parametrize(("n", "at", "position"), [(1, 0, 0), (127, 126, 126), (128, 0, 1), (1000, 50, 923)])
def test_an_unmapped_window_position_is_named(n, at, position, value):
    p = place(n)
    p.swa[at] = value
    with pytest.raises(WindowNotMapped, match=f"position {position} of {n} "):
        plan_of(geometry(), p)


@pytest.mark.parametrize("n", [1, 127, 256, 257, 1000])
def test_wrong_lengths_are_refused(n):
    p = place(n)
    more_pages, more_swa = np.append(p.pages, 1), np.append(p.swa, 1)
    for changes in (
        {"pages": p.pages[:-1]}, {"pages": more_pages}, {"swa": p.swa[:-1]}, {"swa": more_swa}, {"tokens": n + 256},
    ):  # fmt: skip
        with pytest.raises(IndexMismatch, match="tokens need"):
            plan_of(geometry(), dataclasses.replace(p, **changes))


@settings(max_examples=40, deadline=None)
@given(pool=family_sets(), n=st.sampled_from((1, 5, 129, 257, 300, 385, 1000)))
def test_spans_are_the_bytes_of_the_rows(pool, n):
    g, members = pool
    p = place(n, seed=n, reach=reach_of(g), page=g.page_size)
    for spans in find_spans(g, members, p):
        family = spans.family
        if family.whole_pages:
            continue
        tile, live = family.rows // family.tiles, n - live_from(family, n)
        host = [sum(p.row_bytes for p in family.planes[:k]) * live for k in range(len(family.planes))]
        wanted = {
            (number, position): (
                page * family.page_bytes
                + row // tile * family.page_bytes // family.tiles
                + plane.offset
                + row % tile * plane.row_bytes,
                host[number] + live_row * plane.row_bytes,
            )
            for position, (page, row, _, live_row) in oracle(g, family, p).items()
            for number, plane in enumerate(family.planes)
        }
        tail, found = Tail.of(members, n), {}
        columns = (spans.pages, spans.rows, spans.counts, spans.live_rows)
        for span, (page, row, count, live_row) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
            for number, plane in enumerate(family.planes):
                there = page * family.page_bytes + family.row_offset(number, row)  # from there on they are neighbours
                for k in range(count):
                    key = (number, spans.position_of(span, k))
                    assert key not in found
                    found[key] = (there + k * plane.row_bytes, tail.in_layer(family, number, live_row + k))
        assert found == wanted, family.name
