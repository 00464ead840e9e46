"""The next turn goes on from the cache that the last one left, in the engine's own scheduler."""

from __future__ import annotations

from itertools import count, islice
from types import SimpleNamespace

import pytest
from plain_world import finish, forget, lose, nothing_is_held, run_to, run_until, serving, world_with_sessions
from sglang.srt.disaggregation.utils import DisaggregationMode

from sglang_dsv4.engine.memory import reserve_host_memory
from sglang_dsv4.engine.plain import sessions, start
from sglang_dsv4.engine.plain.serving import plain_of
from sglang_dsv4.engine.releases import engine_release
from sglang_dsv4.engine.state import request_state
from sglang_dsv4.errors import VerifyMismatch
from sglang_dsv4.sessions.trie import Trie


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """Finished requests leave their cache."""
    monkeypatch.setenv("DSV4_SESSIONS", "auto")


SERVERS = {
    "plain": {},
    "overlap and mixed chunks": {"overlap": True, "mixed": True, "chunk": 512},
    "little room": {"chunk": 256, "swa_pages": 9},
    "drafts": {"drafts": 4},
    "drafts, overlap": {"drafts": 4, "overlap": True},
}


@pytest.mark.parametrize("lost", ["windows", "all"])
@pytest.mark.parametrize(
    ("tree", "server", "tokens", "more"),
    [
        *((tree, "plain", 1300, 1) for tree in ("python", "rust")),
        *(("python", server, 1500, more) for server in SERVERS for more in (1, 700)),
    ],
)
def test_the_next_turn_goes_on_where_the_last_one_ended(lost, tree, server, tokens, more, monkeypatch):
    monkeypatch.setenv("DSV4_VERIFY", "1")
    world, store = world_with_sessions(tree=tree, **SERVERS[server])
    first = world.submit(range(tokens), max_new=40)
    finish(world)
    store.check_integrity()
    prompt = [*first.origin_input_ids, *first.output_ids]
    lose(world, lost, prompt)
    forks = [world.submit([*prompt, *range(30000 + 1000 * i, 30000 + 1000 * i + more)], max_new=20) for i in range(3)]
    finish(world)
    assert all(fork.finished() for fork in forks)
    assert store.counters.hits == {"window" if lost == "windows" else "pages": 1}
    end = (len(prompt) - 1) // 256 * 256
    assert store.counters.tokens == end and store.counters.verified == 1
    world.second_turn(forks[0], range(50), max_new=3)
    world.run()
    store.check_integrity()
    forget(world)
    assert world.totals() == (world.spec.pages, world.spec.swa_pages, world.spec.requests)
    store.clear("flush")
    nothing_is_held(world)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_second_retract_saves_its_new_pages_alone(overlap):
    world, store = world_with_sessions(overlap=overlap)
    req, memory = world.submit(range(1270), max_new=60), serving(world).host.memory
    pages = []
    for tokens in (1290, 1300):
        run_to(world, req, tokens)
        world.retract(req)
        copy = serving(world).saved_of(req).copy
        pages.append((copy.first_page, copy.in_pages))
        forget(world)
        memory.check_integrity()
    assert pages == [(4, 6), (5, 6)], "the prompt's four pages are a point's"
    world.run()
    store.check_integrity()
    assert serving(world).host.counters.loads == 2
    store.clear("flush")
    nothing_is_held(world)


@pytest.mark.parametrize(
    ("backend", "overlap", "waits"),
    [("mooncake", True, True), ("nixl", True, engine_release().nixl_gets_the_event),
     ("ascend", True, False), ("mooncake", False, False)],
)  # fmt: skip
def test_a_prefill_server_sends_a_loaded_prefix_behind_its_load_alone(monkeypatch, backend, overlap, waits):
    """The event of an early send is behind forwards alone; others in the same pass may have the loaded prefix, too."""
    world, store = world_with_sessions(overlap=overlap)
    vars(world.scheduler).update(disaggregation_mode=DisaggregationMode.PREFILL)
    vars(world.pool).pop(start.NAME)
    start.start_plain_serving(None, world.scheduler)
    order, streams = [], {name: SimpleNamespace() for name in ("forward", "schedule")}
    streams["forward"].wait_stream = lambda other: order.append("behind" if other is streams["schedule"] else "?")
    vars(world.scheduler).update(
        disaggregation_mode=DisaggregationMode.NULL, enable_staging=False,  # its queues are a plain server's
        transfer_backend=SimpleNamespace(value=backend),
    )  # fmt: skip
    store = serving(world).sessions
    req = world.submit(range(1300), max_new=1)

    def early_send(scheduler, req, allow_send=True):
        order.append("sent" if allow_send else "left")

    def send(of):
        order.clear()
        with monkeypatch.context() as patch:
            for name, stream in streams.items():
                patch.setattr(world.scheduler, f"{name}_stream", stream)
            sessions.maybe_send_cached_prefix_chunk(early_send, world.scheduler, of)
        return order

    world.run()
    forget(world)
    again = world.second_turn(req, range(40), max_new=1)
    assert send(again) == ["sent"]
    run_until(world, lambda: store.counters.hits == {"pages": 1})
    assert (send(again) == ["behind", "sent"]) is waits is ("sent" in order), "in its pass"
    world.run()
    assert send(again) == ["sent"], "behind a forward"
    forget(world)
    later = world.second_turn(again, range(40), max_new=1, hints={"kv.prefetch": {}})
    monkeypatch.setattr(world.scheduler, "get_num_allocatable_reqs", lambda *_, **__: 0)
    run_until(world, lambda: store.counters.hits == {"pages": 2})
    world.scheduler.get_new_batch_prefill(world.scheduler.running_batch)
    assert (send(later) == ["behind", "sent"]) is waits is ("sent" in order), "no forward was launched since"


def test_one_session_a_pass_is_loaded_before_there_is_room(monkeypatch):
    """More would hold up the batch that runs."""
    world, store = world_with_sessions()
    first = [world.submit(range(2000 * i, 2000 * i + 1300), max_new=4) for i in range(2)]
    world.run()
    forget(world)
    for req in first:
        world.second_turn(req, range(40), max_new=3, hints={"kv.prefetch": {}})
    with monkeypatch.context() as full:
        full.setattr(world.scheduler, "get_num_allocatable_reqs", lambda *_, **__: 0)
        for loaded in (1, 2, 2):
            assert world.step() is None and store.counters.hits == {"pages": loaded}
    world.run()
    assert store.counters.hits == {"pages": 2}


def test_a_server_that_changes_its_role_leaves_nothing(caplog):
    """A decode server saves by itself, and never looks at what a plain one kept; the next role begins anew."""
    world, store = world_with_sessions()
    world.submit(range(1300), max_new=4)
    world.run()
    memory, plain = serving(world).host.memory, serving(world)
    for mode in (DisaggregationMode.DECODE, DisaggregationMode.PREFILL):
        vars(world.scheduler).update(disaggregation_mode=mode)
        start.start_plain_serving(None, world.scheduler)
        assert store.points == memory.pool.held == 0
        assert (plain_of(world.allocator) is None) is (mode == DisaggregationMode.DECODE)
        assert (memory.cache is None) is (mode == DisaggregationMode.DECODE)
    assert caplog.text.count("is not kept: prompts come to a decode server computed") == 1
    assert serving(world) is not plain and serving(world).sessions is not store
    nothing_is_held(world)


def before_its_start():
    """Returns a server that has no role and no host memory yet."""
    world, _ = world_with_sessions()
    plain_of(world.allocator).end()
    vars(world.pool).pop(start.NAME)
    world.pool.host.close()
    world.pool.host = None
    return world


def test_a_decode_server_that_becomes_a_prefill_server_keeps_sessions():
    """Its memory was reserved for retracts alone."""
    world = before_its_start()
    reserve_host_memory(world.pool, world.scheduler)
    vars(world.scheduler).update(disaggregation_mode=DisaggregationMode.PREFILL)
    start.start_plain_serving(None, world.scheduler)
    assert serving(world).sessions is not None


def test_every_session_that_is_loaded_is_compared(monkeypatch):
    """DSV4_VERIFY: pages that others saved, in other copies, have checksums of their own."""
    monkeypatch.setenv("DSV4_VERIFY", "1")
    world, store = world_with_sessions()
    req = world.submit(range(1270), max_new=60)
    for tokens in (1290, 1300):
        run_to(world, req, tokens)
        world.retract(req)
        forget(world)
    world.run()
    forget(world)
    again = world.second_turn(req, range(40), max_new=3)
    world.run()
    assert again.finished() and store.counters.verified == 1 and serving(world).host.counters.verified == 2
    serving(world).host.memory.bytes_of(next(iter(store.trie.pages())))[5] ^= 1
    forget(world)
    world.second_turn(again, range(40), max_new=3)
    with pytest.raises(VerifyMismatch, match="changed since the save: tokens 0 to 256 "):
        world.run()


@pytest.mark.parametrize(("told", "verify", "lines"), [(False, "0", 0), (True, "0", 1), (False, "1", 1)])
def test_a_save_is_a_line_of_the_log_where_each_request_is(told, verify, lines, caplog, monkeypatch):
    monkeypatch.setenv("DSV4_VERIFY", verify)
    caplog.set_level("INFO")
    world, _ = world_with_sessions()
    monkeypatch.setattr(world.scheduler, "server_args", SimpleNamespace(log_requests=told))
    start.start_sessions(serving(world), world.scheduler, None)
    monkeypatch.undo()
    world.submit(range(1300), max_new=5)
    world.run()
    assert serving(world).sessions.points == 1 and caplog.text.count("kept 1280 tokens, 5 pages new") == lines


def test_a_short_answer_keeps_its_prompts_point_again(monkeypatch):
    """No walk of the tree looks for it. The request's node tells of a prompt's window, where it ends there."""
    world, store = world_with_sessions()
    asked, walked, has_window, key = [], [], engine_release().has_window, engine_release()._key
    monkeypatch.setattr(engine_release(), "has_window", lambda *a: (asked.append(a[-1]), has_window(*a))[1])
    monkeypatch.setattr(engine_release(), "_key", lambda *a: (walked.append(a[-1]), key(*a))[1])
    req = world.submit(range(1300), max_new=5)
    world.run()
    assert asked == [1280] and request_state(req).point.tokens == 1280 and store.kept._made == store.points == 1
    other = world.submit(range(2000, 3500), max_new=40)
    world.run()
    assert asked[1:] == [1280, 1536] and not walked and (request_state(other).point.tokens, store.points) == (1536, 3)
    world.submit(range(4000, 5280), max_new=5)  # its node ends a page behind its point
    world.run()
    assert asked[3:] == [1024, 1280] and walked == [1024]


@pytest.mark.parametrize(("tree", "drafts"), [("python", 0), ("rust", 0), ("python", 4), ("rust", 4)])
def test_a_turn_whose_beginning_the_tree_has_cuts_its_new_pages_alone(tree, drafts, monkeypatch):
    """The tree has compared the others."""
    world, store = world_with_sessions(tree=tree, drafts=drafts)
    cut, keys, tails = [], Trie.keys, count(20000, 1000)

    def counted(*arguments):
        cut.append(0)
        for key in keys(*arguments):
            cut[-1] += 1
            yield key

    monkeypatch.setattr(Trie, "keys", counted)

    def cuts(beginning, forks=1, answer=3):
        cut.clear()
        for tail in islice(tails, forks):
            world.submit([*beginning, *range(tail, tail + 520)], max_new=answer)
        world.run()
        store.check_integrity()
        return cut.copy()

    assert cuts(range(1000), answer=40) == [5, 1], "its prompt and its answer; its look-up found nothing of it"
    first = world.requests[0]
    prompt = [*first.origin_input_ids, *first.output_ids]
    assert cuts(prompt) == cuts(first.origin_input_ids) == [1, 2], "a look-up ends at the first page that is not there"
    assert cuts(prompt, forks=3) == [1, 1, 1, 2, 2, 2]
    forget(world)
    assert cuts(prompt, forks=3) == [7, 1, 1, 2, 2, 2], "it is loaded for the first one"
    beginning = range(5000, 6300)
    cuts(beginning), cuts(beginning)  # the second one leaves a point where they part
    assert cuts(beginning) == [6, 2], "which is found once"
    assert cuts(beginning) == [1, 2]


def test_memory_of_sessions_is_not_counted_as_that_of_copies():
    world, store = world_with_sessions()
    world.submit(range(1300), max_new=5)
    world.run()
    counters = serving(world).host.counters
    assert (store.points, store.kept.held_bytes > 0) == (1, True)
    assert serving(world).host.memory.held_bytes == 0 and counters.saves == counters.loads == 0
    assert world.flush() and (store.points, store.kept.held_bytes, store.counters.held_bytes) == (0, 0, 0)
    nothing_is_held(world)


def test_a_third_prompt_goes_on_behind_the_beginning_that_two_had():
    """The engine computes a window there for the second one."""
    world, store = world_with_sessions()
    beginning = range(1300)
    for turn in range(2):
        world.submit([*beginning, *range(20000 + 1000 * turn, 20500 + 1000 * turn)], max_new=3)
        world.run()
    forget(world)
    world.submit([*beginning, *range(30000, 30500)], max_new=3)
    world.run()
    assert (store.counters.hits, store.counters.tokens) == ({"pages": 1}, 1280)
