"""Locator over real pools and the real allocator: what it finds, what it refuses, and what it leaves to read."""

from __future__ import annotations

import oracle
import pytest
import torch
from builders import Served, served

from sglang_dsv4.cache.rows import plan
from sglang_dsv4.errors import IndexMismatch, WindowNotMapped
from sglang_dsv4.transfer.locate import Locator, Request

LENGTHS = (0, 1, 3, 127, 128, 129, 255, 256, 257, 382, 383, 384, 385, 511, 512, 1000, 1025, 2047)
SPECS = {
    "plain": {},
    "without c4": {"ratios": (0, 128)},
    "stage without c4 and c128": {"ratios": (0, 4, 128, 0), "stage": (3, 4), "blocks": 0},
    "window only": {"ratios": (0, 0), "blocks": 0},
}


@pytest.fixture(scope="module", params=SPECS.values(), ids=SPECS.keys())
def world(request) -> Served:
    return served(**request.param)


@pytest.fixture(scope="module")
def plain() -> Served:
    return served()


def asked(world: Served, request: oracle.Request, dtype=torch.int64) -> Request:
    return Request(request.slots[: request.n].to(dtype), world.pool.full_to_swa_index_mapping, request.req_slot)


def same_place(one, other) -> bool:
    return (one.tokens, one.request_slot) == (other.tokens, other.request_slot) and (
        one.pages.tolist() == other.pages.tolist() and one.swa.tolist() == other.swa.tolist()
    )


def test_what_the_allocator_gives_lies_page_by_page(world):
    """One locator for all: what it found before does not show. Long requests first and last."""
    locator = Locator(world.side)
    for number, tokens in enumerate((*LENGTHS[::-1], *LENGTHS)):
        dtype = (torch.int32, torch.int64)[number % 2]
        request = world.start(tokens, slot=2)
        wanted = world.place(request)
        pages = locator.look(asked(world, request, dtype))
        assert pages.tolist() == wanted.pages.tolist()
        assert (pages.dtype, pages.device) == (torch.int64, world.side.device)
        assert locator.window_pages() == tuple(dict.fromkeys((wanted.swa // 256).tolist()))
        assert same_place(locator.read(asked(world, request, dtype)), wanted)
        oracle.release(world.allocator, request.slots)


def test_indices_with_gaps_between_them(plain):
    """A column of a table, as well as a row."""
    locator, request = Locator(plain.side), plain.start(600, slot=1)
    table = torch.zeros(600, 3, dtype=torch.int32, device=request.slots.device)
    table[:, 1] = request.slots
    given = asked(plain, request)._replace(indices=table[:, 1])
    assert locator.look(given).tolist() == plain.place(request).pages.tolist()
    assert locator.window_pages() is not None
    oracle.release(plain.allocator, request.slots)


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (torch.zeros(2, 3, dtype=torch.int64), "1-D"),
        (torch.zeros((), dtype=torch.int64), "1-D"),
        (torch.zeros(3), "int32 or int64, not torch.float32"),
        (torch.zeros(3, dtype=torch.int16), "int32 or int64"),
    ],
)
def test_indices_of_no_request_are_refused(plain, indices, message):
    mapping = plain.pool.full_to_swa_index_mapping
    with pytest.raises(IndexMismatch, match=message):
        Locator(plain.side).look(Request(indices.to(mapping.device), mapping, 0))


def test_more_tokens_than_the_smallest_family_has_pages_for(plain):
    pages = min(len(oracle.buffers(plain.pool)[key]) for key in (("c4_kv", 1), ("c4_indexer", 1), ("c128_kv", 2)))
    mapping = plain.pool.full_to_swa_index_mapping
    slots = torch.arange(pages * 256 + 1, device=mapping.device)
    locator = Locator(plain.side)
    with pytest.raises(IndexMismatch, match=rf"{pages * 256 + 1} tokens are more than the pool's {pages} pages"):
        locator.look(Request(slots, mapping, 0))
    assert locator.look(Request(slots[:-1], mapping, 0)).tolist() == list(range(pages))
    assert locator.window_pages() is None, "the mapping is shorter"


def test_a_stage_without_pages_bounds_no_request():
    """Its tables grow with the requests, and what was found before is forgotten."""
    world = served((0, 0), blocks=0, pages=40, swa_pages=9)
    locator = Locator(world.side)
    for tokens in (3, 700, 256 * 30 + 5, 300):
        request = oracle.Request(oracle.resume(world.allocator, tokens), 1, tokens)
        wanted = world.place(request)
        assert locator.look(asked(world, request)).tolist() == wanted.pages.tolist()
        assert locator.window_pages() == tuple(dict.fromkeys((wanted.swa // 256).tolist()))
        oracle.release(world.allocator, request.slots)


@pytest.mark.parametrize("bad", [-1, -(2**31), 2**31 - 1, 10 * 256, 11 * 256 + 5])
@pytest.mark.parametrize("position", [0, 255, 256, 473, 599])
def test_a_slot_out_of_range_is_named(plain, position, bad):
    locator, request = Locator(plain.side), plain.start(600, slot=1)
    slots = request.slots.clone()
    slots[position] = bad
    locator.look(asked(plain, oracle.Request(slots, 1, 600), torch.int32))
    assert locator.window_pages() is None
    with pytest.raises(IndexMismatch, match=rf"position {position} of 600 has full slot {bad}, off its page"):
        locator.read(asked(plain, oracle.Request(slots, 1, 600), torch.int32))
    locator.look(asked(plain, request))  # a fault is of its own request
    assert locator.window_pages() is not None
    oracle.release(plain.allocator, request.slots)


def test_the_last_entry_of_the_mapping_is_no_slot(plain):
    """A page that ends with it: its other slots are fine."""
    locator, mapping = Locator(plain.side), plain.pool.full_to_swa_index_mapping[: 2 * 256].clone()
    mapping[256:] = torch.arange(768, 1024)
    good = Request(torch.arange(256, 511, device=mapping.device), mapping, 0)
    locator.look(good)
    assert locator.window_pages() == (3,)
    assert locator.read(good).swa.tolist() == list(range(768 + 128, 1023))
    bad = good._replace(indices=torch.arange(256, 512, device=mapping.device))
    locator.look(bad)
    assert locator.window_pages() is None
    with pytest.raises(IndexMismatch, match="position 255 of 256 has full slot 511"):
        locator.read(bad)


@pytest.mark.parametrize(
    ("swa", "planned"),
    [(lambda old: 0, False), (lambda old: -3, False), (lambda old: old + 1, True), (lambda old: 5 * 256 + 7, True)],
)
@pytest.mark.parametrize("position", [473, 511, 512, 599])
def test_a_window_in_no_order_is_left_to_be_read(plain, position, swa, planned):
    """Whether a position is mapped at all shows when the rows are planned."""
    locator, request = Locator(plain.side), plain.start(600, slot=1)
    mapping = plain.pool.full_to_swa_index_mapping.clone()
    where = int(request.slots[position])
    mapping[where] = swa(int(mapping[where]))
    given = asked(plain, request)._replace(swa_map=mapping)
    locator.look(given)
    assert locator.window_pages() is None
    place = locator.read(given)
    assert int(place.swa[position - 473]) == int(mapping[where])
    if planned:
        plan(plain.side.geometry, plain.side.families, place)
    else:
        with pytest.raises(WindowNotMapped, match=f"position {position} of 600"):
            plan(plain.side.geometry, plain.side.families, place)
    oracle.release(plain.allocator, request.slots)


@pytest.mark.parametrize("family", ["c4_kv", "c4_indexer", "c128_kv", "swa_kv", "c4_state", "c4_indexer_state"])
def test_pages_out_of_range_of_any_family(plain, monkeypatch, family):
    """One with fewer pages than the others bounds the request."""
    other, request = plain.start(700, slot=0), plain.start(600, slot=1)
    place = plain.place(request)
    used = place.pages if family in {"c4_kv", "c4_indexer", "c128_kv"} else place.swa // 256
    for limit, fits in ((int(used.max()) + 1, True), (int(used.max()), False)):
        monkeypatch.setitem(plain.side.pages, family, limit)
        locator = Locator(plain.side)
        locator.look(asked(plain, request))
        assert (locator.window_pages() is not None) == fits, limit
    for one in (other, request):
        oracle.release(plain.allocator, one.slots)
