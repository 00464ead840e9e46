"""Each trap of the cache has a test; traps of streams are in transfer/test_copier.py, of the engine in engine/."""

import pytest
from pool_fixture import LENGTHS, V41, make_world, round_trip

from sglang_dsv4.cache.families import Geometry, families

LIVE = {f.name: f.live_from for f in families(Geometry((0, 4, 128, 2), sources=(3,)))}
PAIRS = [("c2_state", ring, drafts + 1) for ring, drafts in ((2, 0), (4, 1), (4, 2), (8, 3), (8, 6), (16, 8))]


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize(
    ("state", "ring", "written"),
    [("c4_state", 8, 1), ("c4_state", 16, 9), ("c128_state", 128, 1), ("c128_state", 256, 9), *PAIRS],
)
def test_trap_4_the_forward_in_flight_writes_no_saved_ring_row(tokens, state, ring, written):
    """Without speculation it writes position n; with d draft tokens n .. n+d at most."""
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import get_compress_state_ring_size

    if state == "c2_state":  # its ring follows from the drafts
        assert get_compress_state_ring_size(2, written - 1) == ring
    saved = {p % ring for p in range(LIVE[state](tokens), tokens)}
    assert not saved & {p % ring for p in range(tokens, tokens + written)}


def test_sources_in_another_order_keep_their_own_buffers():
    """The engine makes the buffers in the order of its config, whatever that is."""
    world = make_world(pages=8, **{**V41, "sources": (4, 2, 6)})
    assert world.pool.sources_by_ratio[2] == [4, 2]
    round_trip(world, 300)


@pytest.mark.parametrize("engine", [None, "sm_100"])
def test_tiles_that_make_no_page_are_left_over(engine):
    world = make_world(pages=6, engine=engine, **V41)
    side = world.pool.host.buffers
    for ratio in (1, 2):
        family = next(f for f in side.families if f.name == f"c{ratio}_indexer")
        raw = world.pool.index_pools[ratio].index_k_with_scale_buffer[0]
        assert raw.shape[1] * family.tiles == family.page_bytes
        assert len(side.buffers[family.name][0]) == len(raw) // family.tiles >= 7
    round_trip(world, 513)


def test_a_second_attach_keeps_the_arena():
    """A server may build its queues again; reserving and pinning once more would double the memory."""
    world = make_world(pages=6)
    first = world.pool.host
    assert world.pool.attach_host(world.pool.host.settings) is first
