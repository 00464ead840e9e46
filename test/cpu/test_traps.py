"""One test for each trap of the cache: what goes wrong without the guard, and that it is seen.

Traps of order between streams (4, 5, 7) are tested in transfer/test_copier.py, traps whose guard lives in the engine
adapters in engine/ (10 ranks, 11 layouts, 14 weights through the real hooks), the length grid (12) in pools/; each is
named here once more, so that the list is whole.
"""

import numpy as np
import oracle
import pytest
from pool_fixture import LENGTHS, make_world, saved

from sglang_dsv4.cache.families import Geometry, families
from sglang_dsv4.cache.rows import Place, plan
from sglang_dsv4.errors import IndexMismatch, StaleWeights, WindowNotMapped
from sglang_dsv4.pools.copy_service import ServerContext
from sglang_dsv4.settings import Settings

pytestmark = pytest.mark.both_layouts

GEOMETRY = Geometry((0, 4, 128))
LIVE = {family.name: family.live_from for family in families(GEOMETRY)}


def test_trap_1_the_state_follows_the_request_slot():
    world = make_world(pages=10)
    request, expected, copy = saved(world)
    world.leave(request)
    oracle.poison(world.pool)
    oracle.compare(expected, world.read(world.resume(copy, 4)))


def test_trap_1_without_a_slot_there_is_no_copy():
    world = make_world(pages=10)
    request = world.start(1, 300)
    with pytest.raises(IndexMismatch, match="slot"):
        world.pool.get_cpu_copy(request.slots)
    copy = world.save(request)
    with pytest.raises(IndexMismatch, match="slot"):
        world.pool.load_cpu_copy(copy, request.slots)
    assert not copy.released
    copy.release()
    world.check_empty()


def test_trap_2_live_state_rows_only_and_each_once():
    """The reference saves state rows for every token; positions that share a ring row then overwrite each other."""
    world = make_world(pages=10)
    request, expected, copy = saved(world, tokens=702)
    ring = 8
    every_token = [
        (swa // 256) * ring + swa % ring for swa in (oracle.swa_row(world.pool, int(s)) for s in request.slots)
    ]
    assert len(set(every_token)) < len(every_token), "the trap is there: rows repeat"
    world.leave(request)
    oracle.poison(world.pool)
    oracle.compare(expected, world.read(world.resume(copy, 2)))


@pytest.mark.parametrize("tokens", LENGTHS)
def test_trap_2_no_row_is_planned_twice(tokens):
    geometry = Geometry((0, 4, 128))
    first = max(0, tokens - 127)
    place = Place(tokens, np.arange(1, -(-tokens // 256) + 1), np.arange(first, tokens) + 256, 1)
    for spans in plan(geometry, families(geometry), place):
        rows = [
            (page, row + k)
            for page, row, count in zip(spans.pages, spans.rows, spans.counts, strict=True)
            for k in range(count)
        ]
        assert len(set(rows)) == len(rows), spans.family.name


def test_trap_3_a_window_position_without_a_new_row_is_an_error():
    world = make_world(pages=10)
    request, expected, copy = saved(world, tokens=600)
    world.leave(request)
    slots = oracle.resume(world.allocator, 600)
    mapping = world.pool.full_to_swa_index_mapping
    kept = int(mapping[slots[480]])
    mapping[slots[480]] = 0
    resumed = oracle.Request(slots, 2, 600)
    before = oracle.snapshot(world.pool)
    with pytest.raises(WindowNotMapped, match="position 480 of 600"):
        world.load(copy, resumed)
    oracle.assert_only_changed(before, world.pool)
    mapping[slots[480]] = kept
    world.load(copy, resumed)  # the copy survived the refusal
    oracle.compare(expected, world.read(resumed))


def test_trap_3_nor_can_it_be_saved():
    world = make_world(pages=10)
    request = world.start(1, 600)
    world.pool.full_to_swa_index_mapping[request.slots[473]] = 0
    with pytest.raises(WindowNotMapped, match="position 473"):
        world.save(request)
    world.check_empty()


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("ring4, ring128, written", [(8, 128, 1), (16, 256, 9)])
def test_trap_4_the_forward_in_flight_writes_no_saved_ring_row(tokens, ring4, ring128, written):
    """Without speculation it writes position n; with 8 draft tokens n .. n+8 at most."""
    in_flight = range(tokens, tokens + written)
    saved4 = {p % ring4 for p in range(LIVE["c4_state"](tokens), tokens)}
    saved128 = {p % ring128 for p in range(LIVE["c128_state"](tokens), tokens)}
    assert not saved4 & {p % ring4 for p in in_flight}
    assert not saved128 & {p % ring128 for p in in_flight}


def test_trap_4_more_draft_tokens_are_refused():
    assert {p % 16 for p in range(LIVE["c4_state"](7), 7)} & {(7 + 9) % 16}, "n+9 lands on n-7 when n % 4 == 3"
    make_world(pages=6, draft_tokens=8)
    with pytest.raises(AssertionError, match="9 draft tokens"):
        make_world(pages=6, draft_tokens=9)


def test_trap_5_pages_overwritten_right_after_the_save():
    world = make_world(pages=10)
    request, expected, copy = saved(world)
    oracle.fill(world.pool, 99)  # a request admitted in the same iteration
    world.leave(request)
    oracle.compare(expected, world.read(world.resume(copy, 3)))


def test_trap_6_online_c128_is_refused():
    world = make_world(pages=6)
    state = next(p for p in world.pool.compress_state_pools if p is not None and p.ratio == 128)
    state.ring_size = 1
    world.pool.host = None
    assert world.pool.attach_host(Settings(host_gb=0.1)) is None
    assert "c128 ring 1" in world.pool.refusal


def test_trap_7_release_is_explicit_and_a_dropped_handle_is_counted():
    world = make_world(pages=6)
    request = world.start(1, 300)
    memory = world.pool.host.memory
    copy = world.save(request)
    copy.release()
    assert memory.leaks == 0 and memory.copies == 0
    copy = world.save(request)
    del copy
    assert memory.leaks == 1
    world.check_empty()


@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("tokens", [128, 129, 255])
def test_trap_8_a_load_resets_the_rest_of_the_ring(tokens, drafts):
    """Of its own slot alone; a save resets nothing."""
    world = make_world(pages=6, draft_tokens=drafts)
    request, expected, copy = saved(world, tokens=tokens)
    oracle.compare(expected, world.read(request))
    world.leave(request)
    oracle.poison(world.pool)  # the previous owner's rows
    before = oracle.snapshot(world.pool)
    resumed = world.resume(copy, 3)
    assert oracle.cleared_ring_ok(world.pool, 3, tokens)
    oracle.compare(expected, world.read(resumed))
    oracle.assert_only_changed(before, world.pool, oracle.may_change(world.pool, resumed.slots, tokens, 3))


def test_trap_9_hisparse_is_refused_by_name():
    with pytest.raises(AssertionError, match="HiSparse"):
        make_world(pages=6, hisparse=True)


def test_trap_12_the_grid_covers_every_residue():
    assert {n % 4 for n in LENGTHS} == {0, 1, 2, 3}
    assert {n % 128 for n in LENGTHS} >= {0, 1, 2, 127}


def test_trap_14_a_copy_of_other_weights_is_not_loaded():
    version = [7]
    world = make_world(pages=10)
    world.pool.host = None
    world.pool.attach_host(Settings(host_gb=0.1), ServerContext(weight_version=lambda: version[0]))
    request, _, copy = saved(world, tokens=300)
    world.leave(request)
    version[0] = 8
    before = oracle.snapshot(world.pool)
    slots = oracle.resume(world.allocator, 300)
    with pytest.raises(StaleWeights, match=r"7.*8"):
        world.load(copy, oracle.Request(slots, 2, 300))
    oracle.assert_only_changed(before, world.pool)
    copy.release()


def test_a_second_attach_keeps_the_arena():
    """A server may build its queues again; reserving and pinning once more would double the memory."""
    world = make_world(pages=6)
    first = world.pool.host
    assert world.pool.attach_host(Settings(host_gb=0.5)) is first
