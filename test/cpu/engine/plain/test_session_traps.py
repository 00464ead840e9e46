"""The traps of sessions, each by its number in their plan: a naive build keeps, loads or shows a wrong cache.

Not here, as this design cannot have them: 3 (loaded pages are the tree's, and chunks publish as ever), 14 (no pin
follows from an event), 17 (pools with SWA pages of 64 tokens are refused with their layout).
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from plain_world import (
    SMALL41,
    finish,
    forget,
    lose,
    nothing_is_held,
    run_to,
    run_until,
    serving,
    small_world,
    world_with_sessions,
)
from sglang.srt.environ import envs
from sglang.srt.mem_cache import deepseek_v4_memory_pool as pools

from sglang_dsv4.engine.plain import room
from sglang_dsv4.engine.plain.serving import may_share
from sglang_dsv4.engine.releases import engine_release
from sglang_dsv4.engine.retract.stale import changing_weights
from sglang_dsv4.errors import IndexMismatch, WindowNotMapped

TAIL = 6  # host units of a window: 263,464 bytes in units of 49,152, see test_store
needs_replay = pytest.mark.skipif(
    engine_release().replay_cuts_windows, reason="this release is left to the engine with it"
)


@pytest.fixture(autouse=True)
def _kept(monkeypatch):
    monkeypatch.setenv("DSV4_SESSIONS", "auto")


def lost(world, tokens=1300, answer=4, **arguments):
    """Returns a request that has ended, and whose cache only the host has."""
    req = world.submit(range(tokens), max_new=answer, **arguments)
    finish(world)
    forget(world)
    return req


def test_a_long_key_of_a_client_is_not_kept_with_its_session():
    """It would stay as long as the session, beside the memory that DSV4_HOST_GB bounds."""
    world, store = world_with_sessions()
    keys = [f"{number}" + "x" * 1_000_000 for number in range(3)]
    for key in keys:
        lost(world, extra_key=key)
    names = [part for known in store.trie._namespaces.values() for part in known.name if part]
    assert store.points == len({*names}) == 3 and sum(map(len, names)) < 1000
    for number, key in enumerate(keys, 1):
        lost(world, extra_key=key)
        assert hits(store)[0] == number
    lost(world, extra_key=keys[0] + "x")
    assert hits(store)[0] == 3, "another tenant's"


def hits(store):
    """Returns how often a request went on, and the tokens that it did not prefill."""
    return sum(store.counters.hits.values()), store.counters.tokens


@pytest.mark.parametrize(("tokens", "answer"), [(1280, 10), (1281, 260), (1500, 40)])
def test_trap_1_the_same_prompt_and_one_with_another_last_token_find_the_prompts_point(tokens, answer):
    """A chat that ends its reasoning differs in its prompt's last token."""
    world, store = world_with_sessions()
    lost(world, tokens, answer)
    end = (tokens - 1) // 256 * 256
    world.submit(range(tokens), max_new=2)
    world.run()
    assert hits(store) == (1, end)
    forget(world)
    world.submit([*range(tokens - 1), 49_999], max_new=2)
    world.run()
    assert hits(store) == (2, 2 * end)


@pytest.mark.parametrize("tokens", [0, 255, 384])
def test_trap_2_a_point_is_a_page_end(tokens):
    """Elsewhere the state of the compression is overwritten within five steps."""
    world, _ = world_with_sessions()
    slots = torch.arange(256, 256 + tokens)
    with pytest.raises(IndexMismatch, match="do not end where nothing of a request's slot lives"):
        serving(world).host.save_point(slots, world.pool.full_to_swa_index_mapping, 0)
    nothing_is_held(world)


def test_a_chunk_in_flight_is_not_kept():
    """A request that is prefilled again has chunks behind its prompt; nothing orders a save behind their forward."""
    world, store = world_with_sessions(overlap=True, chunk=512)
    req = world.submit(range(1530), max_new=400)
    run_until(world, lambda: req.seqlen > 1560)  # the third of its chunks ends behind its prompt
    store.clear("flush")
    world.pause()  # it has no copy
    forget(world)
    run_until(world, lambda: store.points > 0)  # the world raises where a save reads what a forward in flight writes
    assert [point.tokens for point in store.order] == [1536]


def test_trap_7_the_way_to_a_point_is_not_evicted_for_it():
    """Room for a load is made within; else pages that are free would go to the tree again."""
    world, _ = world_with_sessions()
    world.submit(range(1300), max_new=4)
    world.run()
    req = world.submit(range(1310), max_new=2)
    req.init_next_round_input(world.tree)
    with engine_release().full_pages(world.tree, req, 1280) as held:
        assert len(held) == 1280
        forget(world)
        with engine_release().full_pages(world.tree, req, 1280) as still:
            assert torch.equal(still, held)
    forget(world)
    with engine_release().full_pages(world.tree, req, 1280) as gone:
        assert not len(gone)


def test_trap_8_a_long_load_leaves_other_windows_in_the_tree():
    """It asks for one window, not for one as long as its pages."""
    world, store = world_with_sessions(pages=24, swa_pages=10)
    first = lost(world, 2100)
    others = [[*range(start, start + 300)] for start in range(10_000, 16_000, 1000)]
    for other in others:
        world.submit(other, max_new=2)
        world.run()
    world.second_turn(first, [7], max_new=2)
    world.run()
    assert hits(store) == (1, 2048)
    assert [len(world.match(other)) for other in others] == [256] * 6


DRAFTS = {"drafts": 4, "overlap": True}


def test_trap_9_with_drafts_a_row_is_another_before_another_token():
    world, store = world_with_sessions(**DRAFTS)
    lost(world, 1400)
    world.submit([*range(1280), *range(30_000, 30_300)], max_new=4)
    world.run()
    assert hits(store) == (0, 0), "the row before position 1280 depends on the token there"


NAMESPACES = {"plain": {}, "adapter": {"lora_id": "a"}, "key": {"extra_key": "k"}, "salt": {"cache_salt": "s"}}


@pytest.mark.parametrize("theirs", NAMESPACES)
def test_trap_10_a_tenant_never_reads_the_cache_of_another(theirs):
    world, store = world_with_sessions()
    lost(world, **NAMESPACES[theirs])
    for count, whose in enumerate([name for name in NAMESPACES if name != theirs]):
        world.submit(range(1310), max_new=2, **NAMESPACES[whose])
        world.run()
        assert hits(store) == (0, 0), whose
        assert store.points == 2 + count, "each has its own"
    forget(world)
    world.submit(range(1310), max_new=2, **NAMESPACES[theirs])
    world.run()
    assert hits(store) == (1, 1280)


@pytest.mark.parametrize(("start", "end"), [(1100, 1024), (1279, 1024), (1280, 1280), (-1, 1280)])
def test_trap_11_the_tokens_whose_log_probabilities_are_wanted_are_computed(start, end):
    world, store = world_with_sessions(overlap=True)
    lost(world, 1100)
    lost(world, 1300)
    req = world.submit(range(1310), max_new=2)
    req.return_logprob, req.logprob_start_len = True, start
    assert world.step().prefix_lens == [end]
    assert hits(store)[1] == 1024 + end, "the second of the prompts went on, too"


def not_shared(world, tokens=1300, **changes):
    """Runs a request with those attributes; its cache is nobody's."""
    req = world.submit(range(tokens), max_new=4)
    for name, value in changes.items():
        setattr(req, name, value)
    world.run()
    return req


@pytest.mark.parametrize(
    "changes",
    [
        {"skip_radix_cache_insert": True},
        {"positional_embed_overrides": object()},
        {"input_embeds": [[0.0]]},
        {"session": SimpleNamespace(streaming=True)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_is_of_its_request_alone_is_neither_kept_nor_loaded(changes, monkeypatch):
    world, store = world_with_sessions()
    req = lost(world)
    store.clear("flush")
    for name, value in changes.items():
        monkeypatch.setattr(req, name, value)
    assert not may_share(req)
    if "skip_radix_cache_insert" in changes:
        not_shared(world, **changes)
        assert store.points == 0


REFUSED = {
    "no prefix cache": {"radix": False},
    "hierarchical": {"server_args": {"enable_hierarchical_cache": True}},
    "SGLANG_RADIX_FORCE_MISS": {},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_not_covered_is_said_at_the_start(reason, caplog):
    with envs.SGLANG_RADIX_FORCE_MISS.override(reason.startswith("SGLANG")):
        world = small_world(**REFUSED[reason])
    assert serving(world).sessions is None
    assert [line for line in caplog.messages if line.startswith("sessions: ") and reason in line]


def test_trap_13_pages_that_a_save_reads_are_given_away_behind_it(monkeypatch):
    """The finish frees them at once: later work of the stream waits for the save."""
    world, store = world_with_sessions()
    done, host = [], serving(world).host
    keep, wait = store.keep, host.pages_in_use.wait_on_the_stream
    monkeypatch.setattr(store, "keep", lambda *given: (done.append("save"), keep(*given))[1])
    monkeypatch.setattr(host.pages_in_use, "wait_on_the_stream", lambda: (done.append("given away"), wait())[1])
    lost(world, 1500, answer=40)
    assert done == ["save", "given away"] * 2


def test_trap_16_a_flush_forgets_and_one_that_fails_does_not():
    world, store = world_with_sessions()
    lost(world)
    world.submit(range(40_000, 40_100), max_new=20)
    world.step()
    assert not world.flush() and store.points == 1
    world.run()
    assert world.flush() and store.points == 0
    world.submit(range(1310), max_new=2)
    world.run()
    assert hits(store) == (0, 0)


def test_other_weights_forget_everything():
    world, store = world_with_sessions()
    lost(world)
    with changing_weights():
        pass
    world.submit(range(1310), max_new=2)
    world.run()
    assert hits(store) == (0, 0) and store.counters.evicted == {"weights": 1}


def test_trap_18_nothing_behind_the_stop_is_kept():
    """A verify step commits tokens behind it, which no client ever sees."""
    world, store = world_with_sessions(**DRAFTS)
    req = world.submit(range(1262), max_new=60)
    req.sampling_params.stop_token_ids = {world.tokens(req, 1280)[-1]}
    world.run()
    assert (len(req.output_ids_through_stop), len(req.output_ids)) == (18, 21), "it ran past the stop"
    assert [point.tokens for point in store.order] == [1024]


def test_trap_21_a_short_request_keeps_nothing():
    world, store = world_with_sessions()
    lost(world, 1010)
    assert store.points == 0
    lost(world, 1025)
    assert store.points == 1


@pytest.mark.parametrize("more", [0, -1])
def test_trap_22_a_point_takes_no_unit_of_a_retract(more):
    """The copies of retracts leave as many units as five pages and a window take, or one less."""
    world, store = world_with_sessions()
    pool, store.kept.few, store.kept.enough = serving(world).host.memory.pool, 0, 0
    pool.take(pool.total - (5 + TAIL + more))
    lost(world)
    assert (store.points, pool.available) == ((1, 0) if not more else (0, 5 + TAIL - 1))


@pytest.mark.parametrize(("tokens", "end"), [(1300, 1024), (1407, 1280), (1536, 1536)])
def test_a_page_that_a_restore_loaded_in_part_becomes_no_point_but_at_its_end(tokens, end):
    """A request retracted with so many tokens comes back and ends: a next turn reads right rows."""
    world, store = world_with_sessions()
    req = world.submit(range(tokens - 5), max_new=8)
    run_to(world, req, tokens)
    store.clear("flush")
    world.retract(req)
    forget(world)
    world.run()
    assert serving(world).host.counters.loads == 1
    forget(world)
    world.second_turn(req, range(300), max_new=2)
    world.run()
    assert max((tokens for tokens in [hits(store)[1]]), default=0) in (0, end)
    store.check_integrity()


def test_a_preempted_request_and_its_session():
    world, store = world_with_sessions(priority=True, running=1)
    low = world.submit(range(1300), max_new=20, priority=1)
    run_to(world, low, 1305)
    world.submit(range(20_000, 21_100), max_new=5, priority=9)
    world.run()
    assert low.retraction_count == 1 and low.finished()
    forget(world)
    world.second_turn(low, [7], max_new=2, priority=1)
    world.run()
    assert hits(store) == (1, 1280)
    store.check_integrity()


REPLAY = {**SMALL41, "replay": True}


@needs_replay
@pytest.mark.parametrize("more", [1, 127, 128, 700])
@pytest.mark.parametrize("what", ["windows", "all"])
def test_with_a_decoders_replay_a_point_is_loaded_a_window_before_the_prompts_end(what, more):
    world, store = world_with_sessions(**REPLAY)
    first = world.submit(range(1500), max_new=40)  # up to 1,539: its last point is 1,536
    world.run()
    prompt = [*first.origin_input_ids, *first.output_ids]
    lose(world, what, prompt)
    world.submit([*prompt, *range(30_000, 30_000 + more)], max_new=20)
    world.run()
    assert hits(store) == (1, 1536 if more >= 127 else 1280)


def test_an_eviction_for_a_load_that_fails_may_take_the_requests_own_window(monkeypatch):
    """It is matched again then: it would read what is not there any more."""
    world, store = world_with_sessions()
    first = world.submit(range(1300), max_new=4)
    world.run()
    second = world.second_turn(first, range(300), max_new=4)
    world.run()
    forget(world)
    world.submit(range(1300), max_new=2)
    world.run()
    assert hits(store) == (1, 1280)

    def refuse(*_):
        raise WindowNotMapped("played")

    monkeypatch.setattr(store, "load", refuse)
    monkeypatch.setattr(room, "make_room", lambda *_: world.evict(0, 1 << 20))
    world.second_turn(second, [7], max_new=2)
    world.run()
    assert serving(world).host.counters.fallbacks == {"WindowNotMapped": 1}


@pytest.mark.parametrize("overlap", [False, True])
def test_with_online_compression_a_step_in_flight_is_no_reason(overlap, monkeypatch):
    """It writes the request's one state row, of which a page end needs nothing."""
    monkeypatch.setattr(pools, "ONLINE_C128", True)
    world, store = world_with_sessions(overlap=overlap)
    first = lost(world, 1500, answer=40)
    assert store.points == 2
    world.second_turn(first, [7], max_new=4)
    world.run()
    assert hits(store) == (1, 1536)
