"""A server that comes back goes on from its store, every byte judged; nothing a store does reaches a request.

The engine's own scheduler loop and prefix tree; the stand-in for a forward judges each byte that it reads.
"""

from __future__ import annotations

import random
import time
from types import SimpleNamespace

import pytest
from memory_store import MemoryClient, MemoryStore, played_time
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_dsv4.engine import store_start
from sglang_dsv4.engine.plain import store as plain_store
from sglang_dsv4.engine.plain.store import ask, kept_back
from sglang_dsv4.engine.state import request_state, server
from sglang_dsv4.store import tier as tier_module
from sglang_dsv4.store.work import Patience
from sglang_dsv4.testing import demo_sessions

VOCABULARY = 50_000
PATIENCE = 1.0  # seconds that a busy machine may take beside what is measured


def start(monkeypatch, objects, verify=False, drafts=0, model="m", seed=0, overlap=False, chunk=8192, **client):
    """Starts a server whose store has ``objects``; returns it, its sessions and its tier."""
    monkeypatch.setenv("DSV4_STORE", "/nowhere")
    monkeypatch.setenv("DSV4_STORE_MODEL", model)
    monkeypatch.setattr(store_start, "config_of", lambda settings: {})

    def made(settings, config, sessions, memory):
        return MemoryClient(objects, memory, seed, **client)

    monkeypatch.setattr(store_start, "_client", made)
    world = demo_sessions.server(
        "0.05", verify, pages=64, swa_pages=24, ratios=(0, 4, 128), drafts=drafts, overlap=overlap, chunk=chunk
    )
    sessions, plain = demo_sessions.parts_of(world)
    return world, sessions, plain.tier


def tokens(rng, count):
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def converse(world, rng, prompts=2, **arguments):
    """Plays first turns, of ``prompts`` or of as many random ones; returns what was said in each."""
    said = []
    for prompt in [None] * prompts if isinstance(prompts, int) else prompts:
        given = prompt or tokens(rng, rng.randint(1300, 2000))
        req = world.submit(given, max_new=8 if prompt else rng.randint(5, 60), **arguments)
        world.run()
        said.append([*req.origin_input_ids, *req.output_ids])
    return said


def go_on(world, rng, said, **arguments):
    """Plays a second turn of each; returns the requests."""
    found = []
    for words in said:
        found.append(world.submit([*words, *tokens(rng, rng.randint(1, 300))], max_new=8, **arguments))
        world.run()
    return found


def settle(tier):
    for _ in range(30):
        tier.end_pass()
    assert not tier.units()


def second_life(monkeypatch, objects, rng, prompts):
    """Plays first turns in one life; returns what was said, and the next server with its tier."""
    world, _, tier = start(monkeypatch, objects)
    said = converse(world, rng, prompts)
    settle(tier)
    world, _, tier = start(monkeypatch, objects)
    return said, world, tier


def whole(words, drafts=0):
    """The tokens up to the last page end that a next turn can go on from."""
    return (len(words) - 1 - bool(drafts)) // 256 * 256


@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("verify", [False, True])
def test_each_conversation_goes_on_in_the_next_life(monkeypatch, drafts, verify):
    objects, rng = MemoryStore(), random.Random(drafts)
    world, _, tier = start(monkeypatch, objects, verify, drafts)
    said = converse(world, rng)
    settle(tier)
    again, sessions, tier = start(monkeypatch, objects, verify, drafts)
    for words, req in zip(said, go_on(again, rng, said), strict=True):
        assert req.cached_tokens == req.cached_tokens_storage == whole(words, drafts) > 1000
        assert (req.cached_tokens_device, req.cached_tokens_host) == (0, 0)
    assert sessions.counters.hits == {"store": len(said)}
    assert sessions.counters.verified == (len(said) if verify else 0)
    settle(tier)
    again.check_integrity()
    sessions.check_integrity()


def test_a_turn_behind_a_turn_of_the_store_is_written_alone(monkeypatch):
    objects, rng = MemoryStore(), random.Random(1)
    world, _, tier = start(monkeypatch, objects)
    (words,) = converse(world, rng, 1)
    settle(tier)
    world, _, tier = start(monkeypatch, objects)
    req = world.submit([*words, *tokens(rng, 600)], max_new=40)
    world.run()
    settle(tier)
    longer = [*req.origin_input_ids, *req.output_ids]
    new = (whole(longer) - whole(words)) // 256
    assert tier.counters.units["put", "ok"] == new + tier._sessions.kept.in_tail
    world, _, tier = start(monkeypatch, objects)
    assert go_on(world, rng, [longer])[0].cached_tokens == whole(longer)


@pytest.mark.parametrize("shares", [False, True])
def test_a_shared_prompt_does_not_wait_for_its_answer(monkeypatch, shares):
    objects, rng = MemoryStore(), random.Random(11)
    world, _, tier = start(monkeypatch, objects)
    req = world.submit(tokens(rng, 1500), max_new=60, hints={"kv.share": {}} if shares else None)
    while len(req.output_ids) < 9:
        world.step()
    assert len(objects.objects) == (1280 // 256 + tier._sessions.kept.in_tail if shares else 0)
    world.run()
    settle(tier)
    world, _, _ = start(monkeypatch, objects)
    (later,) = go_on(world, rng, [[*req.origin_input_ids, *req.output_ids]])
    assert later.cached_tokens == 1536


def test_another_tenant_or_model_finds_nothing(monkeypatch):
    objects, rng = MemoryStore(), random.Random(2)
    world, _, tier = start(monkeypatch, objects)
    said = converse(world, rng, 2, cache_salt="a")
    settle(tier)
    for salt, model, found in (("b", "m", False), (None, "m", False), ("a", "n", False), ("a", "m", True)):
        world, _, _ = start(monkeypatch, objects, model=model)
        salted = {} if salt is None else {"cache_salt": salt}
        got = [req.cached_tokens for req in go_on(world, rng, said, **salted)]
        assert all(got) if found else not any(got), (salt, model)
    version = store_start.engine_version()
    for release, found in (("0.4.9", False), (f"{version}.post1", True)):
        monkeypatch.setattr(store_start, "engine_version", lambda release=release: release)
        world, _, _ = start(monkeypatch, objects)
        got = [req.cached_tokens for req in go_on(world, rng, said, cache_salt="a")]
        assert all(got) if found else not any(got), release


def test_a_request_that_waits_holds_up_no_other_and_leaves_by_an_abort(monkeypatch):
    objects, rng = MemoryStore(), random.Random(3)
    said, world, tier = second_life(monkeypatch, objects, rng, 2)
    tier._patience = Patience(60.0, 0.0)
    tier._client.hangs = True
    first, second = (world.submit([*words, 7, 8, 9], max_new=4) for words in said)
    other = world.submit(tokens(rng, 300), max_new=4)
    for _ in range(12):
        world.step()
    assert other.finished() and world.waiting == [first, second]
    world.abort(first)
    assert world.waiting == [second]
    tier._client.hangs = False
    world.run()
    assert second.cached_tokens == whole(said[1])
    settle(tier)
    world.check_integrity()


def test_a_request_that_comes_in_the_midst_of_a_pass_is_kept_back_from_it(monkeypatch):
    """As one whose grammar is ready: it would be admitted at once, and the store read for nobody."""
    objects, rng = MemoryStore(), random.Random(8)
    said, world, _ = second_life(monkeypatch, objects, rng, 1)
    _, plain = demo_sessions.parts_of(world)
    with kept_back(plain, world.scheduler):
        req = world.submit([*said[0], 7, 8, 9], max_new=4)
        assert not world.scheduler.waiting_queue
    assert world.scheduler.waiting_queue == [req]
    before = request_state(req).ask
    ask(plain, world.scheduler, req)
    assert request_state(req).ask is before and len(plain.asking) == 1, "it is asked once"
    world.run()
    assert req.cached_tokens == whole(said[0])


def glancing(monkeypatch, seconds, count=1500, overlap=True, chunk=8192):
    """Starts a server with a prefill of ``count`` tokens in flight, whose client answers at each third poll."""
    monkeypatch.setattr(plain_store, "GLANCE", seconds)
    world, _, tier = start(monkeypatch, MemoryStore(), overlap=overlap, chunk=chunk)
    polls, poll = [], tier._client.poll

    def slow():
        polls.append(time.monotonic())
        return poll() if len(polls) % 3 == 0 else ()

    world.submit(tokens(random.Random(9), count), max_new=20)
    while world.step() is None:
        pass
    monkeypatch.setattr(tier._client, "poll", slow)
    return world, tier, polls


@pytest.mark.parametrize(("count", "overlap", "joins"), [(1500, True, True), (300, True, False), (1500, False, False)])
def test_an_answer_is_waited_for_while_a_long_prefill_keeps_the_device_busy(monkeypatch, count, overlap, joins):
    """Else a new prompt waits for all of that prefill, though the store has nothing for it."""
    world, _, polls = glancing(monkeypatch, 60.0, count, overlap)
    begin, second = time.monotonic(), world.submit(tokens(random.Random(10), 1200), max_new=4)
    world.step()
    assert (second in world.running) is joins and (second in world.waiting) is not joins
    assert len(polls) == (3 if joins else 1) and time.monotonic() < begin + 30, "no longer than for the answer"
    world.run()
    assert second.finished()


def test_a_store_that_hangs_holds_up_a_prefill_once_a_question(monkeypatch):
    world, tier, polls = glancing(monkeypatch, 0.2)
    tier._client.hangs = True
    world.submit(tokens(random.Random(12), 1200), max_new=4)
    world.step()
    assert len(polls) > 1 and polls[-1] < tier._sent_at + 0.2 + PATIENCE
    time.sleep(max(0.0, tier._sent_at + 0.2 - time.monotonic()))
    polls.clear()
    tier.end_pass(0.2)
    assert len(polls) == 1


def test_questions_that_are_sent_meanwhile_make_a_glance_no_longer(monkeypatch):
    """The client takes one at a time; the others are sent as it is answered."""
    world, tier, _ = glancing(monkeypatch, 0.1)
    client, ask_, slow = tier._client, tier._client.ask, tier._client.poll
    monkeypatch.setattr(client, "ask", lambda *given: None if client.open else ask_(*given))
    for number in range(60):
        world.submit(tokens(random.Random(f"one of {number}"), 1200), max_new=1)
    monkeypatch.setattr(client, "poll", lambda: time.sleep(0.02) or slow())
    begin = time.monotonic()
    tier.end_pass(0.1)
    assert time.monotonic() < begin + 0.1 + PATIENCE and tier._to_ask


def test_a_question_that_is_late_is_not_waited_for(monkeypatch):
    world, tier, _ = glancing(monkeypatch, 60.0)
    tier._patience = Patience(0.0, 0.0)
    tier._client.hangs = True
    late = world.submit(tokens(random.Random(14), 1200), max_new=4)
    tier.end_pass()
    assert not request_state(late).ask.waits
    begin = time.monotonic()
    tier.end_pass(60.0)
    assert time.monotonic() < begin + 30


@pytest.mark.parametrize(("count", "overlap", "decodes", "took", "may"), [
    (300, True, None, 0.3, 0.06), (300, True, "here", 0.3, 0.0), (300, True, "elsewhere", 0.3, 0.0),
    (300, False, None, 0.3, 0.0), (300, True, None, 20.0, plain_store.MOST),
    (1500, True, "here", 0.3, plain_store.GLANCE), (1500, True, "elsewhere", 0.3, plain_store.GLANCE),
    (1500, True, None, 0.003, plain_store.GLANCE),
])  # fmt: skip
def test_a_fifth_of_a_long_launch_may_go_by_where_nothing_decodes(monkeypatch, count, overlap, decodes, took, may):
    """It has many layers; each read that ends a moment later would be a launch of its own."""
    monkeypatch.setattr(plain_store, "time", played_time([100.0]))
    batch = SimpleNamespace(forward_mode=ForwardMode.EXTEND, extend_num_tokens=count)
    scheduler = SimpleNamespace(enable_overlap=overlap, last_batch=batch, require_mlp_sync=decodes == "elsewhere")
    plain = SimpleNamespace(pass_began=100.0 - took)
    running = SimpleNamespace(is_empty=lambda: decodes != "here")
    assert plain_store.glance(plain, scheduler, running) == pytest.approx(may) and plain.pass_began == 100.0
    scheduler.last_batch = None
    assert plain_store.glance(plain, scheduler, running) == 0.0


@pytest.mark.parametrize("share", [0.0, 1e9])
def test_between_the_chunks_of_a_prompt_an_answer_is_waited_for(monkeypatch, share):
    """Nothing runs beside them."""
    monkeypatch.setattr(plain_store, "SHARE", share)
    monkeypatch.setattr(plain_store, "MOST", 60.0)
    world, _, polls = glancing(monkeypatch, 0.0, count=1500, chunk=512)
    world.submit(tokens(random.Random(17), 1200), max_new=4)
    world.step()
    assert len(polls) == (3 if share else 1)
    world.run()


@pytest.mark.parametrize("spare", [0.0, 60.0])
def test_a_read_that_begins_in_a_pass_may_be_over_in_it(monkeypatch, spare):
    said, world, tier = second_life(monkeypatch, MemoryStore(), random.Random(15), 2)
    polls, poll = [], tier._client.poll
    monkeypatch.setattr(tier._client, "poll", lambda: poll() if polls.append(0) or len(polls) % 3 == 0 else ())
    reqs = [world.submit([*words, 7, 8, 9], max_new=4) for words in said]
    begin = time.monotonic()
    tier.end_pass(spare)
    assert [request_state(req).ask.waits for req in reqs] == [not spare] * 2 and time.monotonic() < begin + 30
    assert len(polls) == (6 if spare else 1), "no longer than for the reads"
    world.run()
    assert [req.cached_tokens for req in reqs] == [whole(words) for words in said]


def test_a_read_that_hangs_makes_a_glance_no_longer(monkeypatch):
    (words,), world, tier = second_life(monkeypatch, MemoryStore(), random.Random(16), 1)
    client, clock = tier._client, [100.0]
    monkeypatch.setattr(tier_module, "time", played_time(clock))
    tier._patience, poll, load = Patience(60.0, 0.0), client.poll, client.load
    world.submit([*words, 7, 8, 9], max_new=4)
    monkeypatch.setattr(client, "poll", lambda: poll() if clock[0] > 100.9 else ())

    def hangs(ticket, spots):
        client.hangs = True
        return load(ticket, spots)

    monkeypatch.setattr(client, "load", hangs)
    tier.end_pass(1.0)
    assert client.hangs and clock[0] == pytest.approx(101.0, abs=0.01)
    clock[0] += 1.0
    before = clock[0]
    tier.end_pass(1.0)
    assert clock[0] == before, "once for what was sent"
    client.hangs = False
    world.run()


def without_the_read_of(monkeypatch, tier, ask):
    """The client goes on with all but the read of ``ask``; returns what lets it go on, too."""
    step, held = tier._client._step, [ask.ticket]
    monkeypatch.setattr(tier._client, "_step", lambda ticket: None if ticket in held else step(ticket))
    return held.clear


def test_a_read_that_takes_long_holds_up_no_answer(monkeypatch):
    said, world, tier = second_life(monkeypatch, MemoryStore(), random.Random(18), 2)
    first, second = (world.submit([*words, 7, 8, 9], max_new=4) for words in said)
    world.abort(second)
    tier.end_pass()
    go_on_ = without_the_read_of(monkeypatch, tier, request_state(first).ask)
    third = world.submit([*said[1], 7, 8, 9], max_new=4)
    begin = time.monotonic()
    tier.end_pass(60.0)
    asks = [request_state(req).ask for req in (first, third)]
    assert [ask.waits for ask in asks] == [True, False] and time.monotonic() < begin + 30
    go_on_()
    world.run()


def test_a_read_begins_as_another_ends(monkeypatch):
    """Both are of one size, as those of agents."""
    rng = random.Random(19)
    said, world, tier = second_life(monkeypatch, MemoryStore(), rng, [tokens(rng, 1500), tokens(rng, 1500)])
    first = world.submit([*said[0], 7, 8, 9], max_new=4)
    tier.end_pass()
    second = world.submit([*said[1], 7, 8, 9], max_new=4)
    tier.end_pass(60.0)
    assert not request_state(first).ask.waits and not request_state(second).ask.waits
    world.run()


def test_a_turn_of_few_new_words_is_not_matched_twice(monkeypatch):
    """The engine's match of a long prompt takes the scheduler longer than all of a question."""
    objects, rng = MemoryStore(), random.Random(13)
    world, sessions, tier = start(monkeypatch, objects)
    said, (other,) = converse(world, rng, 2), converse(world, rng, 1)
    sessions.clear("flush")  # the device alone has it: what the store has need not be read
    matches, match = [], Req.init_next_round_input
    for words in said:
        world.submit(words, max_new=2)
        world.run()
    monkeypatch.setattr(Req, "init_next_round_input", lambda *a, **k: matches.append(1) or match(*a, **k))
    for words, more, matched in ((said[0], 300, 0), (said[1], 1300, 1), (other, 20, 1)):
        asked = tier._numbers
        world.submit([*words, *tokens(rng, more)], max_new=2)
        assert (len(matches), tier._numbers - asked) == (matched, int(more > 1024))
        world.run()
        matches.clear()


def test_a_rejected_request_is_not_asked(monkeypatch):
    """Under overload each refusal would read half of the memory."""
    objects, rng = MemoryStore(), random.Random(9)
    said, world, _ = second_life(monkeypatch, objects, rng, 1)
    _, plain = demo_sessions.parts_of(world)
    req = world.submit(said[0], max_new=4)
    world.scheduler.waiting_queue.remove(req)
    plain.asking, request_state(req).ask = [], None
    ask(plain, world.scheduler, req)
    assert request_state(req).ask is None and not plain.asking


def test_weights_that_were_updated_before_a_switch_of_roles_have_no_store(monkeypatch):
    world, _, tier = start(monkeypatch, MemoryStore())
    _, plain = demo_sessions.parts_of(world)
    plain.tier = None
    assert store_start.join_store(plain.pool, world.scheduler, plain.sessions) not in (None, tier)
    monkeypatch.setattr(server, "weight_version", 3)
    assert store_start.join_store(plain.pool, world.scheduler, plain.sessions) is None


def test_a_late_store_costs_the_wait_alone(monkeypatch):
    objects, rng = MemoryStore(), random.Random(4)
    said, world, tier = second_life(monkeypatch, objects, rng, 1)
    tier._patience = Patience(0.0, 0.0)
    tier._client.hangs = True
    (req,) = go_on(world, rng, said)
    assert req.cached_tokens == 0
    tier._client.hangs = False
    settle(tier)
    assert tier.counters.asks == {"late": 1}
    world.evict(demo_sessions.ALL, demo_sessions.ALL)
    assert go_on(world, rng, said)[0].cached_tokens >= whole(said[0])


def test_after_a_weight_update_nothing_is_asked_or_written(monkeypatch):
    objects, rng = MemoryStore(), random.Random(5)
    world, _, tier = start(monkeypatch, objects)
    said = converse(world, rng, 1)
    settle(tier)
    written = len(objects.objects)
    world, _, tier = start(monkeypatch, objects)
    monkeypatch.setattr(server, "weight_version", server.weight_version + 1)
    monkeypatch.setattr(server, "clean_version", server.weight_version)
    assert go_on(world, rng, said)[0].cached_tokens == 0
    settle(tier)
    assert len(objects.objects) == written


def test_nothing_of_an_aborted_request_is_written(monkeypatch):
    objects, rng = MemoryStore(), random.Random(6)
    world, _, tier = start(monkeypatch, objects)
    req = world.submit(tokens(rng, 2000), max_new=300)
    for _ in range(20):
        world.step()
    world.abort(req)
    world.run()
    settle(tier)
    assert not objects.objects and request_state(req).point is not None, "its prompt is kept on the host alone"


def test_retracts_find_as_much_room_beside_a_store(monkeypatch):
    """Writes keep units from retracts for a short time, and reads never take a copy's room."""
    objects, rng = MemoryStore(), random.Random(7)
    world, sessions, tier = start(monkeypatch, objects, at_once=False)
    requests = [world.submit(tokens(rng, rng.randint(1100, 1500)), max_new=60) for _ in range(4)]
    for _ in range(40):
        world.step()
        if world.retractable:
            world.retract(rng.choice(world.retractable))
    world.run()
    assert all(req.finished() for req in requests)
    for _ in range(200):
        tier.end_pass()
    assert not tier.units()
    sessions.check_integrity()
    world.check_integrity()
