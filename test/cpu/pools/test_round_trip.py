"""Save, lose everything, load elsewhere: every byte that later steps may read is equal, nothing else changed."""

import oracle
import pytest
import torch
from pool_fixture import LENGTHS, SPECS, assert_unchanged, make_world, round_trip

CORNERS = (1, 4, 127, 129, 256, 385, 513, 1000)


@pytest.mark.parametrize("spec", SPECS)
def test_every_length_of_the_grid(monkeypatch, spec):
    """All of the grid where families meet, its corners elsewhere; none of these is read number by number."""

    def read(request):
        raise AssertionError("read number by number")

    lengths = LENGTHS if spec in {"plain", "all_at_once"} else CORNERS
    for pages, some in ((6, [n for n in lengths if n < 1000]), (20, [n for n in lengths if n >= 1000])):
        world = make_world(pages=pages, **SPECS[spec])
        monkeypatch.setattr(world.pool.host._mover.locator, "read", read)
        for number, tokens in enumerate(some):
            round_trip(world, tokens, seed=tokens, evict=number % 2 == 1)


@pytest.mark.parametrize(("spec", "tokens"), [("plain", 5), ("plain", 389), ("all_at_once", 128), ("all_at_once", 257)])
def test_through_the_kernels(spec, tokens):
    round_trip(make_world(transfer="triton", pages=6, **SPECS[spec]), tokens)


@pytest.mark.parametrize("tokens", [3, 127, 129, 1000])
def test_the_same_request_slot_again(tokens):
    round_trip(make_world(pages=10), tokens, first_slot=2, second_slot=2)


@pytest.mark.parametrize("tokens", [384, 513, 1000, 4097])
def test_pages_evicted_from_the_window_before_the_save(tokens):
    round_trip(make_world(pages=20), tokens, evict=True)


def test_shared_prefix_pages():
    """Two requests share two complete pages; each copy holds them, each resumes into pages of its own."""
    world = make_world(pages=16)
    oracle.fill(world.pool, 5)
    one, other = world.start(1, 900), world.start(2, 777)
    other.slots[:512] = one.slots[:512]
    expected = [world.read(one), world.read(other)]
    copies = [world.save(one), world.save(other)]
    oracle.poison(world.pool)
    for copy, wanted, slot in zip(reversed(copies), reversed(expected), (3, 4), strict=True):
        oracle.compare(wanted, world.read(world.resume(copy, slot)))
    world.check_empty()


def test_many_copies_alive_loaded_in_another_order():
    world = make_world(pages=48, requests=8)
    oracle.fill(world.pool, 9)
    lengths = [130, 1, 511, 257, 1000, 4, 385]
    requests = [world.start(slot + 1, tokens) for slot, tokens in enumerate(lengths)]
    expected = [world.read(request) for request in requests]
    copies = [world.save(request) for request in requests]
    for request in requests:
        world.leave(request)
    oracle.poison(world.pool)
    for slot, number in enumerate([4, 0, 6, 2, 5, 1, 3]):
        resumed = world.resume(copies[number], slot + 1)
        oracle.compare(expected[number], world.read(resumed))
    world.check_empty()


def test_swa_rows_need_not_line_up():
    """Load where the SWA slots come in another order than at the save: rows are found one by one."""
    world = make_world(pages=16)
    oracle.fill(world.pool, 3)
    request = world.start(1, 600)
    expected = world.read(request)
    copy = world.save(request)
    world.leave(request)
    oracle.poison(world.pool)
    slots = oracle.resume(world.allocator, 600)
    mapping = world.pool.full_to_swa_index_mapping
    tail = slots[600 - 127 :].long()
    # Swap the two SWA pages that the window touches, page offsets kept: state rings stay distinct.
    swapped = mapping[tail]
    pages = torch.unique(swapped // 256)
    assert len(pages) == 2
    mapping[tail] = torch.where(swapped // 256 == pages[0], pages[1], pages[0]) * 256 + swapped % 256
    resumed = oracle.Request(slots, 3, 600)
    world.load(copy, resumed)
    oracle.compare(expected, world.read(resumed))


def scatter_window(world, slots, tokens, ring):
    """Shuffle the SWA slots of the window's pages by hand; returns what puts them back.

    Live state rows stay apart: a ring row holds one position.
    """
    mapping = world.pool.full_to_swa_index_mapping
    moved = slots[max(0, tokens - 127) // 256 * 256 :].long()
    kept = mapping[moved].clone()
    for seed in range(1000):
        order = torch.randperm(len(moved), generator=torch.Generator().manual_seed(seed))
        mapping[moved] = kept[order]
        live = mapping[slots[max(0, tokens - (tokens % 4 + 4)) :].long()]
        if len(torch.unique(live // 256 * ring + live % ring)) == len(live):
            return lambda: mapping.index_put_((moved,), kept)
    raise AssertionError("no such order")


@pytest.mark.parametrize("scattered", [("save", "load"), ("save",), ("load",)], ids="+".join)
@pytest.mark.parametrize("tokens", [5, 130, 600, 1000])
@pytest.mark.parametrize("spec", ["plain", "all_at_once"])
def test_a_window_whose_slots_are_in_no_order(monkeypatch, spec, tokens, scattered):
    """Such a request does not lie page by page: it is read number by number, and copied as exactly."""
    world = make_world(pages=16, **SPECS[spec])
    ring = 16 if "draft_tokens" in SPECS[spec] else 8
    locator, reads = world.pool.host._mover.locator, []
    real = locator.read
    monkeypatch.setattr(locator, "read", lambda request: (reads.append(request.slot), real(request))[1])
    oracle.fill(world.pool, 6)
    request = world.start(1, tokens)
    put_back = scatter_window(world, request.slots, tokens, ring) if "save" in scattered else lambda: None
    expected, before = world.read(request), oracle.snapshot(world.pool)
    copy = world.save(request)
    assert_unchanged(before, world.pool)
    put_back()
    world.leave(request)
    oracle.poison(world.pool)
    neighbour = world.start(2, 300)
    resumed = oracle.Request(oracle.resume(world.allocator, tokens), 3, tokens)
    put_back = scatter_window(world, resumed.slots, tokens, ring) if "load" in scattered else lambda: None
    before = oracle.snapshot(world.pool)
    world.load(copy, resumed)
    oracle.compare(expected, world.read(resumed))
    allowed = oracle.may_change(world.pool, resumed.slots, tokens, 3)
    oracle.assert_only_changed(before, world.pool, allowed)
    assert oracle.cleared_ring_ok(world.pool, 3, tokens)
    assert reads == [1] * ("save" in scattered) + [3] * ("load" in scattered)
    put_back()
    world.leave(neighbour)
    world.leave(resumed)
    world.check_empty()


def test_through_the_kernels_with_two_slots_exchanged():
    world = make_world(transfer="triton", pages=6)
    mapping = world.pool.full_to_swa_index_mapping
    oracle.fill(world.pool, 7)
    request = world.start(1, 389)
    mapping[request.slots[[300, 350]]] = mapping[request.slots[[350, 300]]]
    expected = world.read(request)
    copy = world.save(request)
    oracle.poison(world.pool)
    resumed = oracle.Request(oracle.resume(world.allocator, 389), 3, 389)
    mapping[resumed.slots[[270, 340]]] = mapping[resumed.slots[[340, 270]]]
    world.load(copy, resumed)
    oracle.compare(expected, world.read(resumed))
    assert oracle.cleared_ring_ok(world.pool, 3, 389)
