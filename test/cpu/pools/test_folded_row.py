"""With online compression nothing pends at the end of a block, and no step reads the row then."""

from pool_fixture import ONLINE, make_world, saved


def test_a_row_that_no_step_reads_is_not_written():
    """The empty pattern of rings, half zeros and half -inf, would be no state in three parts."""
    world = make_world(pages=8, engine=ONLINE)
    request, _, copy = saved(world, tokens=256)
    world.leave(request)
    rows = [state.kv_score_buffer.kv_score for state in world.pool.compress_state_pools if state and state.online]
    for row in rows:
        row.fill_(7.0)
    world.resume(copy, 3)
    assert all(bool((row == 7.0).all()) for row in rows)


def test_the_slots_are_those_of_the_request_table():
    """The engine's buffer has two rows more, and with a ring as many slots more."""
    pool = make_world(pages=8, engine=ONLINE).pool
    (rows,) = {len(state.kv_score_buffer.kv_score) for state in pool.compress_state_pools if state and state.online}
    assert pool.host.buffers.request_slots == pool.num_req_slots == rows - 2
