"""Wears the arena of a miniature server down, and lets it go on."""

from itertools import pairwise

from server_fixture import UNITS

from benchmarks import worn
from sglang_dsv4.sessions.store import SessionStore
from sglang_dsv4.testing.demo_sessions import ALL, parts_of, server


def test_an_arena_is_worn_down_behind_a_flush_and_serves_on(monkeypatch, tmp_path):
    monkeypatch.setattr(SessionStore, "clear", SessionStore.clear)  # put back behind the test
    monkeypatch.setattr(worn, "ALIVE", 12)
    world = server(repr(600 * UNITS.nbytes / 2**30), ratios=(0, 4, 128), pages=30, context=8192)
    store, plain = parts_of(world)
    (tmp_path / "turns").write_text("400")
    worn.install(tmp_path / "turns")
    assert world.flush()
    pool = plain.host.memory.pool
    free = sorted(set(range(pool.total)) - set(store.kept.units()))
    assert len(free) < pool.total // 4
    assert sum(unit != before + 1 for before, unit in pairwise(free)) > 3, "free units are neighbours"
    world.submit(range(1500), max_new=4)
    world.run()
    world.evict(ALL, ALL)
    again = world.submit(range(1500), max_new=4)
    world.run()
    assert again.cached_tokens == 1280, "a session of the worn server's own"
    store.check_integrity()
    plain.host.memory.check_integrity()
