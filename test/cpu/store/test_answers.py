"""A prefill server goes on from the answers that a decode server wrote, every byte judged.

The engine's own loops of both servers over one store; the stand-in for a forward judges each byte that it reads.
"""

from __future__ import annotations

import itertools
import os
import random
from array import array
from collections import defaultdict
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from answers import PAGE, SPEC, VOCABULARY, Pair, shared_store
from decode_world import DecodeWorld
from memory_store import played_time
from plain_world import naive_pages
from processes import on_ranks
from sglang.srt.distributed import parallel_state
from sglang.srt.managers.schedule_batch import MultimodalInputs

from sglang_dsv4 import metrics
from sglang_dsv4.engine.decode import points as points_module
from sglang_dsv4.engine.decode.points import points_of
from sglang_dsv4.engine.state import request_state, server
from sglang_dsv4.errors import HostMemoryExhausted
from sglang_dsv4.sessions.trie import Trie
from sglang_dsv4.store import tier as tier_module
from sglang_dsv4.store.keys import Behind, Keys
from sglang_dsv4.testing import demo_sessions

EDGES = (0, 1, 127, 128, 255)  # those of ``test_answer_ends`` are all, without the servers' own steps
LIFE = int(os.environ.get("ANSWERS_STEPS", "24"))  # of each random life


@pytest.fixture(autouse=True)
def _pages():
    with naive_pages():
        yield


@pytest.fixture
def objects(monkeypatch):
    """A store that the servers started in a test share."""
    return shared_store(monkeypatch)


def exhausted(*_, **__):
    raise HostMemoryExhausted("no room")


def test_the_next_turn_goes_on_from_the_answer(objects):
    """At each place in a page where a request may end: for half of them the window of its last page end is gone."""
    pair, reqs = Pair(overlap=True), []
    for over in EDGES:
        prompt = 1279 if over % 64 == 0 else 1533
        reqs.append(pair.arrived(pair.tokens(prompt), 1536 + over - prompt + 1))
    pair.decode.run()
    pair.settle()
    assert [req.seqlen - 1 for req in reqs] == [1536 + over for over in EDGES]
    assert pair.next_turns(reqs) == [1536] * len(EDGES)
    pair.nothing_left()


def test_what_keeping_answers_costs_is_exported(objects, monkeypatch):
    exported = {}
    monkeypatch.setattr(metrics.Counts, "export", lambda self, labels: exported.update({type(self): labels}))

    class Watched(DecodeWorld):
        def _queue(self):
            queue = super()._queue()
            self.scheduler.metrics_collector = SimpleNamespace(labels={"tp_rank": 3})
            self.pool.host.counters.series = defaultdict(mock.MagicMock, saves=mock.MagicMock())  # one is there
            return queue

    Pair(Watched)
    assert exported == {kind: {"tp_rank": "3"} for kind in (metrics.StoreCounters, metrics.SessionCounters)}


@pytest.mark.parametrize("drafts", [2, 8])
def test_with_drafts_a_key_has_the_next_token_too(objects, drafts):
    pair = Pair(drafts=drafts)
    reqs = [pair.arrived(pair.tokens(prompt), answer) for prompt, answer in ((1279, 30), (1280, 400))]
    pair.decode.run()
    pair.settle()
    assert pair.next_turns(reqs) == [pair.whole(req) for req in reqs]
    pair.nothing_left()


@pytest.mark.parametrize("away", [1280, 1281, 1409, 1535])
def test_a_retract_amid_an_answer_costs_no_page(objects, away):
    """It comes back without the window of its last page end, and may end before the next one."""
    pair = Pair(overlap=True)
    reqs = [pair.arrived(pair.tokens(1275), answer) for answer in (away - 1275 + 12, 395)]
    while pair.decode.running[0].seqlen - 1 < away:
        pair.decode.step()
    for req in reqs:
        pair.decode.retract(req)
    pair.decode.run()
    pair.settle()
    assert pair.points.host.counters.loads == 2
    assert pair.next_turns(reqs) == [pair.whole(req) for req in reqs]
    pair.nothing_left()


@pytest.mark.parametrize(("seed", "spec"), [(1, {"overlap": True}), (2, {"drafts": 4})])
def test_answers_of_a_random_life_come_back(objects, monkeypatch, seed, spec):
    """Little host memory, retracts, aborts and flushes: whatever comes back is right, and no unit is lost."""
    monkeypatch.setenv("DSV4_HOST_GB", "0.003")
    pair, rng, ended = Pair(**spec), random.Random(seed), []
    world, points = pair.decode, pair.points
    for _ in range(LIFE):
        what, running = rng.random(), [req for req in world.running if req in world.scheduler.running_batch.reqs]
        if what < 0.3 and len(world.running) < 4 and not world.queue.retracted_queue:
            ended.append(pair.arrived(pair.tokens(rng.randint(700, 1500)), rng.randint(30, 700)))
        elif what < 0.5 and running:
            world.retract(rng.choice(running))
        elif what < 0.55 and running:
            world.abort(rng.choice(running))
        elif what < 0.6:
            points.sessions.clear("flush")
        else:
            for _ in range(rng.randint(10, 90)):
                world.step()
        world.check_integrity()
        points.sessions.check_integrity()
        points.host.memory.check_integrity()
    world.queue.held_rebootstrap_reqs = []  # they had no copy, and nobody computes them here
    world.queue.queue.clear()
    world.run()
    pair.settle()
    assert points.host.counters.loads > 0 and points.host.memory.pool.held == 0
    whole = [req for req in ended if req.finished() and req.finished_reason.to_json()["type"] != "abort"]
    found = pair.next_turns(whole)
    assert all(cached <= pair.whole(req) for cached, req in zip(found, whole, strict=True))
    assert sum(cached == pair.whole(req) for cached, req in zip(found, whole, strict=True)) >= len(whole) // 2 > 1


def test_only_the_pages_of_the_answer_are_copied_and_put(objects):
    pair = Pair()
    pair.arrived(pair.tokens(2000), 190)
    before = dict(objects.objects)
    pair.decode.run()
    pair.settle()
    in_tail = pair.points.sessions.kept.in_tail
    assert len(objects.objects) - len(before) == pair.points.tier.counters.units["put", "ok"] == 1 + in_tail
    assert all(objects.objects[name] is found for name, found in before.items())


def test_a_prompt_too_short_for_the_prefill_server_is_written_with_its_answer(objects):
    pair = Pair()
    req = pair.arrived(pair.tokens(1000), 420)
    assert not objects.objects
    pair.decode.run()
    pair.settle()
    assert pair.next_turns([req]) == [1280]


def test_what_is_aborted_a_warm_up_or_of_another_tenant_is_not_found(objects):
    pair = Pair()
    aborted, warm_up = (pair.arrived(pair.tokens(1520), 180) for _ in range(2))
    warm_up.bootstrap_host = "2.2.2.2"
    for _ in range(160):
        pair.decode.step()
    pair.decode.abort(aborted)
    before = len(objects.objects)
    pair.decode.run()
    pair.settle()
    assert aborted.finished() and len(objects.objects) == before
    pair.nothing_left()
    req = pair.arrived(pair.tokens(1520), 30, cache_salt="a")
    pair.decode.run()
    pair.settle()
    assert pair.next_turns([req], cache_salt="b") == [0]
    assert pair.next_turns([req], cache_salt="a") == [1536]


@pytest.mark.parametrize(("name", "value"), [
    ("multimodal_inputs", MultimodalInputs(mm_items=[])), ("skip_radix_cache_insert", True),
    ("positional_embed_overrides", ()), ("input_embeds", ()),
])  # fmt: skip
def test_what_others_may_not_have_is_not_written(objects, name, value):
    """Its tokens do not say what its cache is, or it is nobody else's."""
    pair = Pair()
    req = pair.arrived(pair.tokens(1520), 30)
    before = len(objects.objects)
    pair.decode.step()
    setattr(req, name, value)
    pair.decode.run()
    pair.settle()
    assert req.finished() and len(objects.objects) == before
    pair.nothing_left()


def test_a_next_turn_that_comes_before_the_write_is_over_is_a_miss(objects, monkeypatch):
    """It is computed at once, at every state of the write but the last; what is written does not come of it."""
    pair = Pair()
    client = pair.points.tier._client
    client.at_once, client.rng = False, SimpleNamespace(random=lambda: 0.3, randint=lambda *_: 2)
    client.hangs = True
    req = pair.arrived(pair.tokens(1020), 270)
    pair.decode.run()
    pair.prefill = demo_sessions.server("0.05", **pair.spec)
    tier = demo_sessions.parts_of(pair.prefill)[1].tier
    monkeypatch.setattr(tier, "write", lambda point: None)
    client.hangs, states, found, passes = False, [], [], []
    while not found or pair.points.tier.units():
        if found:
            pair.points.end_pass()
        states.append(len(objects.objects))
        turn = pair.prefill.second_turn(req, pair.tokens(9), max_new=2)
        passes.append(pair.prefill.run())
        found.append(turn.cached_tokens)
        assert pair.prefill.flush()
    assert states == sorted({*states}) and states[0] == 0 and len(states) > 3
    assert found == [0] * (len(found) - 1) + [1280]
    asks = tier.counters.asks
    assert asks["miss"] >= 3 and asks["miss"] + asks["failed"] == len(found) - 1, (
        "failed: a part of the window is there"
    )
    assert asks["hit"] == 1 and max(passes) <= 4, passes


def test_a_next_turn_waits_for_an_answer_no_longer_than_its_limit(objects, monkeypatch):
    """The store hangs with the write, and with the question for it."""
    clock = [100.0]
    monkeypatch.setattr(tier_module, "time", played_time(clock))
    pair = Pair()
    pair.points.tier._client.hangs = True
    req = pair.arrived(pair.tokens(1020), 270)
    pair.decode.run()
    pair.prefill = demo_sessions.server("0.05", **pair.spec)
    tier = demo_sessions.parts_of(pair.prefill)[1].tier
    tier._client.hangs = True
    limit = clock[0] + tier._patience.seconds(1280)
    turn = pair.prefill.second_turn(req, pair.tokens(9), max_new=2)
    for now in (clock[0], limit - 0.001):
        clock[0] = now
        pair.prefill.step()
        assert pair.prefill.waiting == [turn]
    clock[0] = limit + 0.001
    pair.prefill.run()
    assert turn.finished() and turn.cached_tokens == 0 and clock[0] == limit + 0.001
    assert pair.points.tier.units(), "the write is not over"


def test_two_groups_of_a_server_write_for_one_prefill_server(objects):
    """As data-parallel groups: each has its requests, its points and its client. One prompt came to both."""
    pair = Pair()
    groups, shared, reqs = (pair.decode, DecodeWorld(**pair.spec)), pair.tokens(1520), []
    for world in groups:
        pair.with_decode(world)
        reqs += [pair.arrived(prompt, 30) for prompt in (pair.tokens(1520), shared)]
    while any(world.running for world in groups):
        for world in groups:
            world.step()
            world.check_integrity()
    each = 1 + pair.points.sessions.kept.in_tail
    for world, wrote in zip(groups, ({"ok": 2 * each}, {"ok": each, "known": each}), strict=True):
        pair.with_decode(world)
        pair.settle()
        pair.nothing_left()
        assert pair.points.tier.counters.units == {("put", code): count for code, count in wrote.items()}
    assert pair.next_turns(reqs) == [1536] * 4


def test_retracts_find_the_room_that_points_hold(objects):
    """Points go where a copy needs their units; their requests lose a point at most, and no byte."""
    pair = Pair()
    memory = pair.points.host.memory
    reqs = [pair.arrived(pair.tokens(1270), 402) for _ in range(4)]
    for _ in range(160):
        pair.decode.step()
    assert pair.points.sessions.points == 4
    taken, geometry = [], pair.points.host.buffers.geometry
    while memory.pool.available > 48:
        taken.append(memory.allocate(PAGE, geometry))
    for req in reqs:
        pair.decode.retract(req)
    assert pair.points.host.counters.saves == 4 and pair.points.sessions.points < 4
    for copy in taken:
        copy.release()
    pair.decode.run()
    pair.settle()
    assert pair.points.host.counters.loads == 4
    found = pair.next_turns(reqs)
    assert {*found} == {1024, 1536}, "behind a point that went nothing more is kept"
    pair.nothing_left()


def test_a_point_stays_where_there_is_no_room_for_the_next(objects, monkeypatch):
    pair = Pair()
    req = pair.arrived(pair.tokens(1270), 410)
    while req.seqlen < 1430:
        pair.decode.step()
    (point,) = pair.points.sessions.order
    monkeypatch.setattr(pair.points.sessions.kept, "find_room", lambda *_, **__: False)
    while req.seqlen < 1670:
        pair.decode.step()
    assert request_state(req).point is point and pair.points.sessions.stands(point)
    pair.decode.run()
    pair.settle()
    assert pair.next_turns([req]) == [1280]


def test_page_ends_that_many_pass_at_once_are_not_all_kept(objects, monkeypatch):
    """A decode step must not wait for as many saves as there are requests."""
    monkeypatch.setattr(points_module, "MOST_SAVES", 2)
    pair = Pair()
    reqs = [pair.arrived(pair.tokens(1270), 160) for _ in range(5)]
    most = 0
    while pair.decode.step() is not None:
        most = max(most, pair.points.sessions.saves_of_pass)
    pair.settle()
    assert most == 2 and pair.points.sessions.counters.crowded >= 3
    assert sorted(pair.next_turns(reqs)) == [1024] * 3 + [1280] * 2


@pytest.mark.parametrize("copied", [True, False])
def test_nothing_stays_of_a_request_that_is_aborted_while_it_waits(objects, monkeypatch, copied):
    pair = Pair()
    req = pair.arrived(pair.tokens(1270), 280)
    while req.seqlen < 1430:
        pair.decode.step()
    if not copied:
        monkeypatch.setattr(pair.decode.pool, "get_cpu_copy", exhausted)
    pair.decode.retract(req)
    assert pair.points.sessions.points == 1
    pair.decode.abort(req)
    pair.settle()
    assert pair.points.sessions.points == 0 == pair.points.host.memory.pool.held


def test_prompts_are_hashed_ahead_of_their_writes(objects, monkeypatch):
    """At most so many tokens in a pass, of those that still run."""
    monkeypatch.setattr(points_module, "HASHED", 512)
    pair = Pair()
    reqs = [pair.arrived(pair.tokens(1780), 160) for _ in range(3)]
    while not request_state(reqs[2]).behind:
        pair.decode.step()
    hashed = [[request_state(req).behind.hashed for req in reqs]]
    while len(pair.points._to_hash) > 0:
        pair.points.end_pass()
        hashed.append([request_state(req).behind.hashed for req in reqs])
    steps = [sum(after) - sum(before) for before, after in itertools.pairwise(hashed)]
    assert hashed[-1] == [1536] * 3 and steps and max(steps) == 512
    pair.decode.run()
    pair.settle()
    assert pair.next_turns(reqs) == [pair.whole(req) for req in reqs]


@pytest.mark.parametrize(("answer", "at", "retracted"), [(180, 1430, False), (30, 1290, True)])
def test_a_point_that_went_is_not_made_anew(objects, answer, at, retracted):
    """The window went with its page, or did not come back with its request."""
    pair = Pair()
    req = pair.arrived(pair.tokens(1270), answer)
    while req.seqlen <= at:
        pair.decode.step()
    if retracted:
        pair.decode.retract(req)
    assert pair.points.sessions.points == 1
    pair.points.sessions.clear("flush")
    assert pair.points.sessions.points == 0
    pair.decode.run()
    pair.settle()
    assert pair.next_turns([req]) == [1024], "the prefill server's own"
    pair.nothing_left()


def test_other_weights_end_it(objects, monkeypatch):
    pair = Pair()
    pair.arrived(pair.tokens(1270), 280)
    for _ in range(30):
        pair.decode.step()
    before = len(objects.objects)
    monkeypatch.setattr(server, "weight_version", 1)
    pair.decode.run()
    pair.settle()
    assert len(objects.objects) == before
    pair.nothing_left()


@pytest.mark.parametrize("bigram", [False, True])
def test_a_prompt_is_hashed_in_parts(bigram):
    """A pass hashes no more than it may; the keys behind are those of the whole chain."""
    rng = random.Random(2)
    tokens = array("q", [rng.randrange(VOCABULARY) for _ in range(9 * 4 + 1)])
    whole, behind = Trie(4, bigram), Trie(4, bigram)
    whole.add(("x", None), None, list(whole.keys(tokens, 36)), list(range(9)))
    one = Behind(("x", None), tokens, 28)
    behind.add(one, None, list(behind.keys(tokens, 36, 28)), [0, 1])
    keys = Keys(behind, b"model", None)
    for _ in range(3):
        keys.hash_ahead(one, 12)
    assert one.hashed == one.end == 28
    assert keys.of(1) == Keys(whole, b"model", None).of(8)
    assert Keys(behind, b"model", None).of(1) == keys.of(1), "nothing was hashed ahead"


def _written(objects):
    """Plays a decode server's life; returns what it wrote."""
    world = DecodeWorld(**SPEC)
    points, rng = points_of(world.allocator), random.Random(3)
    reqs = [world.submit([rng.randrange(VOCABULARY) for _ in range(1270)], max_new=answer) for answer in (20, 150, 275)]
    while reqs[1].seqlen < 1300:
        world.step()
    world.retract(reqs[1])
    world.run()
    for _ in range(8):
        points.end_pass()
    assert not points.tier.units() and points.host.memory.pool.held == 0
    return {name: bytes(found.numpy()) for name, found in objects.objects.items()}, points.host.memory.ranks


def test_two_ranks_write_what_one_does(objects, monkeypatch, tmp_path):
    """Each saves its share of a point; the first one alone has a client, and the other lets go of the same units."""

    def work(rank):
        group = SimpleNamespace(
            world_size=2, rank_in_group=rank, ranks=[0, 1], cpu_group=torch.distributed.group.WORLD
        )  # fmt: skip
        for name in ("get_world_group", "get_attn_tp_group"):
            monkeypatch.setattr(parallel_state, name, lambda: group)
        return _written(objects)

    (both, ranks), (nothing, _) = on_ranks(tmp_path, work)
    alone, _ = _written(objects)
    assert ranks == 2 and not nothing
    assert both == alone and len(alone) == 1 + 1 + 2 + 3 * 6
