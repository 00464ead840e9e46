"""With each token, a request that came back is penalized as one that never left: by the engine's own penalizers."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import plain_world
import pytest
from server_fixture import World, crowded
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dsv4.testing import content

FREQUENCY, PRESENCE, REPETITION = "frequency_penalty", "presence_penalty", "repetition_penalty"
LEAST = "min_new_tokens"
ALL = {FREQUENCY: 0.1, PRESENCE: 0.25, REPETITION: 1.8, LEAST: 30}
SUMS = {
    FREQUENCY: ("BatchedFrequencyPenalizer", "cumulated_frequency_penalties", 0.0),
    PRESENCE: ("BatchedPresencePenalizer", "cumulated_presence_penalties", 0.0),
    REPETITION: ("BatchedRepetitionPenalizer", "cumulated_repetition_penalties", 1.0),
    LEAST: ("BatchedMinNewTokensPenalizer", "len_output_tokens", 0.0),
}
NEW = 24
PROMPT = 520  # behind two chunks
by_schedule = pytest.mark.parametrize("overlap", [False, True], ids=["plain-loop", "overlap"])


@pytest.fixture(autouse=True)
def _few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model has few words, so that it repeats itself; the vocabulary of the penalizers is larger."""
    monkeypatch.setattr(content, "VOCABULARY", 5)


def ask_for(req: Any, kind: dict[str, float]) -> Any:
    """The request, with these penalties and a tokenizer, whose stop token is a word that the model never says."""
    for name, value in kind.items():
        setattr(req.sampling_params, name, value)
    req.tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=9)
    return req


def rows_of(batch: Any, req: Any) -> dict[str, Any]:
    """Returns the sums by token, in the batch's penalizers, of ``req`` that differ from their begin."""
    found: dict[str, Any] = {}
    row = next(i for i, one in enumerate(batch.reqs) if one is req)
    known = batch.sampling_info.penalizer_orchestrator.penalizers.items()
    penalizers = {kind.__name__: one for kind, one in known}
    for name, (cls, attribute, neutral) in SUMS.items():
        # A request without a penalty is not compared: its rows mean nothing, and appear with its neighbours'.
        if getattr(req.sampling_params, name) != neutral:
            sums = getattr(penalizers[cls], attribute)[row]
            found[name] = {i: float(sums[i]) for i in (sums != neutral).nonzero().flatten().tolist()}
    return found


Seen = dict[tuple[str, int], dict[str, Any]]  # the sums with which a request's token of that number was sampled


def watch(world: Any) -> Seen:
    """The sums at each of the world's forwards; of one that is repeated, the last."""
    seen: Seen = {}
    forward = world._forward

    def watched(batch: Any) -> Any:
        for req, end in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True):
            seen[req.rid, end - len(req.origin_input_ids)] = rows_of(batch, req)
        return forward(batch)

    world._forward = watched
    return seen


def joined(world: Any, reqs: list[Any]) -> None:
    plain_world.forget(world)
    plain_world.came_back(world, *reqs)


def beside_a_prefill(world: Any, reqs: list[Any]) -> None:
    """Their last token is an extend of one token."""
    plain_world.forget(world)
    ask_for(world.submit(range(7000, 7040), max_new=2), {})
    assert sorted(world.step().extend_lens)[: len(reqs)] == [1] * len(reqs)


def in_chunks(world: Any, reqs: list[Any]) -> None:
    """The engine's own prefill, in several chunks."""
    plain_world.forget(world)
    assert world.step().extend_lens == [world.spec.chunk]


PATHS: dict[str, Callable[[Any, list[Any]], None]] = {
    "joined": joined, "extend": beside_a_prefill, "recomputed": in_chunks,
}  # fmt: skip


def life(kind: dict[str, float], overlap: bool, path: str = "", times: int = 1, at: int = 8) -> Seen:
    """The sums of a request with penalties, beside one without and one with others, retracted ``times``."""
    world = plain_world.small_world(overlap=overlap, pages=32, **({"chunk": 256} if path == "recomputed" else {}))
    ask_for(world.submit(range(9000, 9100), max_new=90), {})
    ask_for(world.submit(range(8000, 8100), max_new=90), {FREQUENCY: 0.3})
    req = ask_for(world.submit(range(PROMPT), max_new=NEW), kind)
    seen = watch(world)
    for number in range(times if path else 0):
        plain_world.run_until(world, lambda more=at + 5 * number: len(req.output_ids) >= more)
        memory = plain_world.serving(world).host.memory
        if path == "recomputed":
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(memory, "allocate", plain_world.full)
                world.retract(req)
        else:
            world.retract(req)
        PATHS[path](world, [req])
    plain_world.run_until(world, req.finished)
    last = NEW - 1  # a chunk before the last one ends before its answer
    return {key: value for key, value in seen.items() if key[0] == req.rid and 0 <= key[1] <= last}


@functools.cache
def undisturbed_life(overlap: bool) -> Seen:
    return life(ALL, overlap)


def assert_same(found: Seen, expected: Seen) -> None:
    assert found.keys() == expected.keys() and len(expected) == NEW
    for key, value in expected.items():
        assert found[key] == value, f"token {key[1]}: {found[key]}, undisturbed {value}"


@by_schedule
@pytest.mark.parametrize("path", PATHS)
def test_a_plain_servers_request_keeps_the_penalties_of_its_whole_answer(path: str, overlap: bool) -> None:
    undisturbed = undisturbed_life(overlap)
    assert undisturbed["r2", NEW - 1].keys() == ALL.keys() and all(undisturbed["r2", NEW - 1].values())
    for times in (1, 2):
        assert_same(life(ALL, overlap, path, times), undisturbed)


@by_schedule
def test_with_drafts_it_keeps_what_was_counted(overlap: bool) -> None:
    """A step has several tokens there, and the engine counts the last one."""
    world = plain_world.small_world(overlap=overlap, drafts=4)
    ask_for(world.submit(range(9000, 9100), max_new=90), {})
    req = ask_for(world.submit(range(PROMPT), max_new=60), ALL)
    seen = watch(world)
    plain_world.run_until(world, lambda: len(req.output_ids) >= 30)
    counted = list(seen.values())[-1][FREQUENCY]
    world.retract(req)
    seen.clear()
    plain_world.run_until(world, lambda: any(rid == req.rid for rid, _ in seen))
    assert next(sums for (rid, _), sums in seen.items() if rid == req.rid)[FREQUENCY] == counted


class Decode:
    """The decode steps of a decode server's requests: the engine's batches, and a model that follows from them."""

    def __init__(self, world: World, overlap: bool) -> None:
        self.world, self.overlap = world, overlap
        self.batch: Any = None
        self.in_flight: list[tuple[Any, int]] = []
        self.seen: Seen = {}

    def join(self, *reqs: Any) -> None:
        """``reqs`` have their cache, and join the running batch as the engine's prebuilt ones do."""
        model = SimpleNamespace(vocab_size=64, is_encoder_decoder=False)
        world = self.world
        for req in reqs:
            req.extend_end = req.seqlen - 1
        batch = ScheduleBatch.init_new(
            list(reqs), world.table, world.allocator, world.tree, model, self.overlap, SpeculativeAlgorithm.NONE
        )
        batch.prepare_for_prebuilt()
        if self.batch is None or not self.batch.reqs:
            self.batch = batch
        else:
            self.batch.merge_batch(batch)

    def step(self) -> None:
        """One decode step; with overlap, the result of the one before comes in behind it."""
        batch = self.batch
        batch.prepare_for_decode()
        results = []
        for req in batch.reqs:
            number = batch.seq_lens_cpu.tolist()[batch.reqs.index(req)] - len(req.origin_input_ids)
            self.seen[req.rid, number] = rows_of(batch, req)
            results.append((req, number * number % 5))
        if not self.overlap:
            self._take(results)
            return
        self._take(self.in_flight)
        self.in_flight = results

    def _take(self, results: list[tuple[Any, int]]) -> None:
        for req, token in results:
            if not req.is_retracted:
                req.output_ids.append(token)

    def leave(self, req: Any) -> None:
        """``req`` is retracted; what is in flight for it is thrown away, while the others decode on."""
        batch = self.batch
        self.world.retract(req)
        batch.filter_batch(keep_indices=[i for i, one in enumerate(batch.reqs) if one is not req])
        for _ in range(2):
            self.step()


def resumed(world: World, req: Any) -> None:
    world.requeue(req)
    assert world.resume() == [req]


def rebootstrapped(world: World, req: Any) -> None:
    """Its prefill server computes it again; the engine appends the token that it had last."""
    world.requeue(req)
    assert world.rebootstrapped[-1:] == [req]
    world.queue._pre_alloc(req)
    req.output_ids.append(req.pd_rebootstrap_forced_output_id)


def decode_life(overlap: bool, way: Callable[[World, Any], None] | None, times: int = 1) -> Seen:
    with pytest.MonkeyPatch.context() as patched:
        world = crowded(patched)[0] if way is rebootstrapped else World()
    decode = Decode(world, overlap)
    bare = ask_for(world.admit(100, "bare", prompt=100), {})
    req = ask_for(world.admit(300, "penalized", prompt=300), ALL)
    other = ask_for(world.admit(200, "other", prompt=200), {FREQUENCY: 0.3, PRESENCE: 0.7})
    decode.join(bare, req, other)
    for _ in range(times if way else 0):
        for _ in range(6):
            decode.step()
        decode.leave(req)
        way(world, req)
        decode.join(req)
    while len(req.output_ids) < NEW:
        decode.step()
    return {key: value for key, value in decode.seen.items() if key[0] in ("penalized", "other") and key[1] < NEW}


@by_schedule
@pytest.mark.parametrize("way", [resumed, rebootstrapped])
def test_a_decode_servers_request_keeps_them_too(way: Callable[[World, Any], None], overlap: bool) -> None:
    expected = decode_life(overlap, None)
    for times in (1, 2):
        found = decode_life(overlap, way, times)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert found[key] == value, f"{key}: {found[key]}, undisturbed {value}"
