"""Each trap of the cache has a test; traps of streams are in transfer/test_copier.py, of the engine in engine/."""

import oracle
import pytest
from pool_fixture import LENGTHS, make_world, saved

from sglang_dsv4.cache.families import Geometry, families
from sglang_dsv4.errors import StaleWeights
from sglang_dsv4.pools.copy_service import ServerContext
from sglang_dsv4.settings import Settings

GEOMETRY = Geometry((0, 4, 128))
LIVE = {family.name: family.live_from for family in families(GEOMETRY)}


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("ring4, ring128, written", [(8, 128, 1), (16, 256, 9)])
def test_trap_4_the_forward_in_flight_writes_no_saved_ring_row(tokens, ring4, ring128, written):
    """Without speculation it writes position n; with 8 draft tokens n .. n+8 at most."""
    in_flight = range(tokens, tokens + written)
    saved4 = {p % ring4 for p in range(LIVE["c4_state"](tokens), tokens)}
    saved128 = {p % ring128 for p in range(LIVE["c128_state"](tokens), tokens)}
    assert not saved4 & {p % ring4 for p in in_flight}
    assert not saved128 & {p % ring128 for p in in_flight}


def test_trap_6_a_ring_of_one_row_is_refused_unless_the_pool_says_that_it_is_online():
    world = make_world(pages=6)
    state = next(p for p in world.pool.compress_state_pools if p is not None and p.ratio == 128)
    state.ring_size = 1
    world.pool.host = None
    assert world.pool.attach_host(Settings(host_gb=0.1)) is None
    assert "c128 ring 1" in world.pool.refusal


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
