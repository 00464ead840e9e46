"""DeepSeek-V4.1 needs more than V4's habits: shared layers, tiles, a ring of two, other rows."""

import oracle
import pytest
import torch
from pool_fixture import LENGTHS, V41, make_world, round_trip

from sglang_dsv4.cache.families import Geometry, families
from sglang_dsv4.errors import LayoutRefused

PAIR = next(f for f in families(Geometry((2,), sources=(0,))) if f.name == "c2_state")


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


@pytest.mark.parametrize("kind", ["swa_kv_pool", "kv_pools"])
def test_rows_of_another_layout_are_not_cut_as_v4_rows(kind):
    world = make_world(pages=6, **{**V41, "kv_layout": "v41"})
    part = world.pool.swa_kv_pool if kind == "swa_kv_pool" else world.pool.kv_pools[1]
    before = oracle.snapshot(world.pool)
    rows = torch.arange(256, 260)
    for call in (lambda: part.get_cpu_copy(rows), lambda: part.load_cpu_copy([], rows)):
        with pytest.raises(LayoutRefused, match="rows have no k_nope"):
            call()
    oracle.assert_only_changed(before, world.pool)


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize(("ring", "drafts"), [(2, 0), (4, 1), (4, 2), (8, 3), (8, 6), (16, 8)])
def test_the_forward_in_flight_writes_no_pending_row_of_a_pair(tokens, ring, drafts):
    """The engine's ring is the least power of two from 2 + drafts; a verify writes positions n .. n + drafts."""
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import get_compress_state_ring_size

    assert get_compress_state_ring_size(2, drafts) == ring
    saved = {p % ring for p in range(PAIR.live_from(tokens), tokens)}
    assert len(saved) == tokens % 2
    assert not saved & {p % ring for p in range(tokens, tokens + drafts + 1)}


@pytest.mark.parametrize("drafts", [0, 6])
@pytest.mark.parametrize("tokens", [1, 2, 255, 256, 257, 600, 601])
def test_a_pair_survives_what_is_written_while_it_is_away(tokens, drafts):
    """After the save the forward in flight writes position n; after the load, so does the resumed request's next."""
    world = make_world(pages=8, **V41, draft_tokens=drafts)
    oracle.fill(world.pool, tokens)
    request = world.start(1, tokens)
    expected = world.read(request)
    for state in (s for s in world.pool.compress_state_pools if s is not None):
        for position in range(tokens, tokens + drafts + 1):
            state.kv_score_buffer.kv_score[state.ring_size + position % state.ring_size] = 1.0
    copy = world.save(request)
    world.leave(request)
    oracle.poison(world.pool)
    resumed = world.resume(copy, 3)
    oracle.compare(expected, world.read(resumed))
    oracle.cleared_ring_ok(world.pool, 3, tokens)
