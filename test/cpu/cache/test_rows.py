"""plan against a token-by-token oracle: every live row, each once, where its position says."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest
from builders import place
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dsv4.cache.families import Geometry, families
from sglang_dsv4.cache.rows import Place, Spans, check_range, plan, segments
from sglang_dsv4.errors import IndexMismatch, WindowNotMapped

RATIOS = (0, 4, 128, 4, 128)
NAMES = ("c4_kv", "c4_indexer", "c128_kv", "swa_kv", "c4_state", "c4_indexer_state", "c128_state")
LENGTHS = (
    1, 3, 4, 5, 7, 8, 127, 128, 129, 130, 255, 256, 257, 383, 384, 385, 511, 512, 513, 1000, 4095, 4096, 4097,
)  # fmt: skip
RINGS = pytest.mark.parametrize("rings", [(8, 128), (16, 256), (8, 256), (16, 128)])

# position -> (device page, device row, host block of the copy, host row)
Rows = dict[int, tuple[int, int, int, int]]


def oracle(name: str, p: Place, ring4: int, ring128: int, page: int = 256) -> Rows:
    """Where each live position of a family lies, one position at a time."""
    n = p.tokens
    first_in_window = max(0, n - 127)
    rows: Rows = {}
    for position in range(n):
        in_window = position >= first_in_window
        swa = int(p.swa[position - first_in_window]) if in_window else None
        block, inner = position // page, position % page
        if name in ("c4_kv", "c4_indexer"):
            if position % 4 == 3:
                rows[position] = (int(p.pages[block]), inner // 4, block, inner // 4)
        elif name == "c128_kv":
            if position % 128 == 127:
                rows[position] = (int(p.pages[block]), inner // 128, block, inner // 128)
        elif name == "swa_kv":
            if in_window:
                rows[position] = (swa // page, swa % page, 0, position - first_in_window)
        elif name in ("c4_state", "c4_indexer_state"):
            first = max(0, n - n % 4 - 4)
            if position >= first:
                rows[position] = (swa // page, swa % ring4, 0, position - first)
        elif name == "c128_state" and position >= n - n % 128:
            rows[position] = (p.request_slot, position % ring128, 0, position - (n - n % 128))
    return rows


def expand(spans: Spans) -> list[tuple[int, tuple[int, int, int, int]]]:
    """Every row of every span, with the position it stands for."""
    found = []
    for k in range(len(spans)):
        for row in range(int(spans.counts[k])):
            where = (spans.pages[k], spans.rows[k] + row, spans.blocks[k], spans.host_rows[k] + row)
            found.append((spans.position_of(k, row), tuple(int(v) for v in where)))
    return found


def geometry(rings: tuple[int, int] = (8, 128), page: int = 256) -> Geometry:
    return Geometry(RATIOS, page_size=page, c4_ring=rings[0], c128_ring=rings[1])


def plan_of(g: Geometry, p: Place) -> dict[str, Spans]:
    return {spans.family.name: spans for spans in plan(g, families(g), p)}


def check(rings: tuple[int, int], p: Place, distinct: bool = True, page: int = 256) -> None:
    g = geometry(rings, page)
    found = plan_of(g, p)
    assert sorted(found) == sorted(NAMES)
    for name, spans in found.items():
        wanted = oracle(name, p, *rings, page)
        rows = expand(spans)
        got = dict(rows)
        assert len(got) == len(rows), f"{name}: a position twice"
        if spans.family.whole_pages:
            # A page moves whole: beyond the live rows only rows of the request's own last page.
            extra = {position for position in got if position not in wanted}
            assert all(p.tokens <= position < page * len(p.pages) for position in extra), name
            assert len(got) == len(p.pages) * spans.family.rows
            got = {position: where for position, where in got.items() if position in wanted}
        assert got == wanted, name
        if distinct:
            assert len({(where[0], where[1]) for _, where in rows}) == len(rows), f"{name}: a device row twice"
        assert len({(where[2], where[3]) for _, where in rows}) == len(rows), f"{name}: a host row twice"
        assert all(where[3] < spans.family.host_rows for _, where in rows), f"{name}: past the host slot"


@RINGS
@pytest.mark.parametrize("n", LENGTHS)
def test_every_live_row_once(n, rings):
    for seed in range(3):
        check(rings, place(n, seed=seed, slot=seed))


@RINGS
@pytest.mark.parametrize("n", [5, 130, 257, 385, 1000])
def test_swa_slots_in_any_order(n, rings):
    """No two neighbours side by side: the plan may not assume that a page's slots run in order."""
    p = place(n)
    swa = np.random.default_rng(n).permutation(np.arange(1, 4096))[: len(p.swa)].astype(np.int64)
    check(rings, dataclasses.replace(p, swa=swa), distinct=False)
    check(rings, dataclasses.replace(p, swa=np.ascontiguousarray(p.swa[::-1])), distinct=False)


def test_neighbouring_slots_of_different_pages_are_not_one_run():
    """Slot 511 and slot 512 are neighbours, but end one page and begin the next."""
    p = Place(4, np.array([1]), np.array([510, 511, 512, 513]), 0)
    spans = plan_of(geometry(), p)["swa_kv"]
    assert list(zip(spans.pages.tolist(), spans.rows.tolist(), spans.counts.tolist(), strict=True)) == [
        (1, 254, 2),
        (2, 0, 2),
    ]


def test_neighbouring_rows_of_different_pages_are_not_one_run():
    p = Place(4, np.array([1]), np.array([256 + 4, 512 + 5, 768 + 6, 768 + 7]), 0)
    check((8, 128), p)
    spans = plan_of(geometry(), p)["swa_kv"]
    assert (spans.pages.tolist(), spans.counts.tolist()) == ([1, 2, 3], [1, 1, 2])


def test_a_state_ring_that_wraps_is_two_runs():
    p = place(14)  # tail: positions 8..13, ring rows 0..5
    spans = plan_of(geometry(), p)["c4_state"]
    assert (spans.rows.tolist(), spans.counts.tolist(), spans.host_rows.tolist()) == ([0], [6], [0])
    p = place(19)  # tail: positions 12..18, ring rows 4..7 and 0..2
    spans = plan_of(geometry(), p)["c4_state"]
    assert (spans.rows.tolist(), spans.counts.tolist()) == ([4, 0], [4, 3])
    assert (spans.host_rows.tolist(), spans.positions.tolist()) == ([0, 4], [12, 16])


def test_runs_are_as_long_as_they_can_be():
    found = plan_of(geometry(), place(385))  # window 258..384 on the second page; tail 380..384 wraps
    assert {name: len(found[name]) for name in ("c4_kv", "swa_kv", "c4_state", "c128_state")} == {
        "c4_kv": 2, "swa_kv": 1, "c4_state": 2, "c128_state": 1,
    }  # fmt: skip


@pytest.mark.parametrize("n", [0, 128, 256, 4096])
def test_nothing_is_pending_at_a_multiple_of_128(n):
    assert len(plan_of(geometry(), place(n))["c128_state"]) == 0


def test_no_tokens_no_rows():
    assert all(len(spans) == 0 for spans in plan_of(geometry(), place(0)).values())


@settings(max_examples=120, deadline=None)
@given(
    n=st.integers(1, 1500),
    rings=st.tuples(st.sampled_from((8, 16)), st.sampled_from((128, 256))),
    seed=st.integers(0, 2**32 - 1),
    slot=st.integers(0, 500),
)
def test_any_length(n, rings, seed, slot):
    check(rings, place(n, seed=seed, slot=slot))


@pytest.mark.parametrize("value", [0, -1, -(2**63)])
@pytest.mark.parametrize(("n", "at", "position"), [(1, 0, 0), (127, 126, 126), (128, 0, 1), (1000, 50, 923)])
def test_an_unmapped_window_position_is_named(n, at, position, value):
    p = place(n)
    p.swa[at] = value
    with pytest.raises(WindowNotMapped, match=f"position {position} of {n} "):
        plan_of(geometry(), p)


def test_the_first_unmapped_position_is_named():
    p = place(300)
    p.swa[[7, 90]] = 0
    with pytest.raises(WindowNotMapped, match="position 180 of 300 "):
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


@RINGS
@pytest.mark.parametrize("page", [128, 512])
@pytest.mark.parametrize("n", [1, 100, 127, 128, 129, 300, 512, 513, 1000])
def test_other_page_sizes(n, page, rings):
    """The plan follows its geometry; a pool of such pages is refused before any plan."""
    rng = np.random.default_rng(n)
    count = -(-n // page)
    pages, swa_pages = 1 + rng.permutation(count + 5)[:count], 1 + rng.permutation(count + 5)[:count]
    swa = [int(swa_pages[k // page]) * page + k % page for k in range(max(0, n - 127), n)]
    check(rings, Place(n, pages.astype(np.int64), np.array(swa, dtype=np.int64), 3), page=page)


def test_pages_of_another_size_are_refused():
    g = geometry(page=512)
    with pytest.raises(IndexMismatch, match="600 tokens need 2 pages"):
        plan(g, families(g), place(600))


@pytest.mark.parametrize(("page", "bad"), [(-1, True), (0, False), (9, False), (10, True), (2**62, True)])
def test_a_page_that_the_pool_has_not_is_refused(page, bad):
    p = place(600)
    p.pages[1] = page
    spans = plan_of(geometry(), p)["c4_kv"]
    spans.pages[[0, 2]] = 3
    if bad:
        with pytest.raises(IndexMismatch, match=f"c4_kv: position 259 lies on full page {page}, .* has 10"):
            check_range(spans, 10)
    else:
        check_range(spans, 10)


def test_a_request_slot_that_the_pool_has_not_is_refused():
    spans = plan_of(geometry(), place(130, slot=4))["c128_state"]
    check_range(spans, 5)
    with pytest.raises(IndexMismatch, match="c128_state: position 128 lies on request slot 4, the pool has 4"):
        check_range(spans, 4)


# family -> (device page bytes by rings, [(plane offset on the device, in the host slot, bytes a row on the device,
# bytes from row to row on the host)]); the two layers of c128_state take turns on the host
LAYOUT = {
    "swa_kv": (lambda r4, r128: 149_760, [(0, 0, 576, 576), (256 * 576, 128 * 576, 8, 8)]),
    "c4_state": (lambda r4, r128: r4 * 8_192, [(0, 0, 8_192, 8_192)]),
    "c4_indexer_state": (lambda r4, r128: r4 * 2_048, [(0, 0, 2_048, 2_048)]),
    "c128_state": (lambda r4, r128: r128 * 4_096, [(0, 0, 4_096, 2 * 4_096)]),
}


@RINGS
@pytest.mark.parametrize("n", [1, 5, 129, 257, 300, 385, 1000])
def test_segments_are_the_bytes_of_the_rows(n, rings):
    p = place(n, seed=n)
    for name, (page_bytes, planes) in LAYOUT.items():
        wanted = {}
        for position, (page, row, _, host_row) in oracle(name, p, *rings).items():
            for number, (device, host, width, pitch) in enumerate(planes):
                start = page * page_bytes(*rings) + device + row * width
                wanted[number, position] = (start, host + host_row * pitch)
        spans = plan_of(geometry(rings), p)[name]
        runs = segments(spans)
        for array in (runs.device, runs.host, runs.rows, runs.spans):
            assert len(array) == len(planes) * len(spans)
            assert array.dtype == np.int64
        found = {}
        for k, span in enumerate(runs.spans.tolist()):
            number = k // len(spans)  # one plane after the other
            _, _, width, pitch = planes[number]
            assert runs.rows[k] == spans.counts[span]
            for row in range(int(runs.rows[k])):
                key = (number, spans.position_of(span, row))
                assert key not in found
                found[key] = (int(runs.device[k]) + row * width, int(runs.host[k]) + row * pitch)
        assert found == wanted, name


def test_a_million_tokens_take_no_token_loop():
    p = place(1_000_000)
    g = geometry()
    members = families(g)
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        spans = plan(g, members, p)
        best = min(best, time.perf_counter() - started)
    assert len(spans[0]) == 3907
    assert best < 0.050
