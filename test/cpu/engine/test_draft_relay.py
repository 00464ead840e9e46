"""A resumed request drafts on from where it was: the state that its next step begins with comes back, bit for bit.

The relay, the draft inputs, retract and resume are the engine's. A step's outputs are random, and remembered here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from server_fixture import SPEC, World
from sglang.srt.disaggregation import decode_schedule_batch_mixin as prebuilt
from sglang.srt.managers.overlap_utils import FutureMap, RelayPayload
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.speculative import eagle_disaggregation as eagle
from sglang.srt.speculative.dspark_components.dspark_draft import make_next_draft_input
from sglang.srt.speculative.eagle_info import EagleDraftInput

from sglang_dsv4.engine.retract import drafts
from sglang_dsv4.engine.state import request_state, server
from sglang_dsv4.errors import HostMemoryExhausted

HIDDEN = (4 * 8,)
EAGLE_SPEC = replace(SPEC, server_args={"speculative_eagle_topk": 1, "speculative_num_steps": 3})
ACCEPTED = (3, 1, 2, 4)  # tokens that a step adds, turn by turn


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the relay asks of a device's streams, and what a prebuilt batch asks of tree and model, is not there."""
    nothing = lambda *_, **__: None  # noqa: E731
    monkeypatch.setattr(torch, "get_device_module", mock.MagicMock())
    monkeypatch.setattr(torch.Tensor, "record_stream", nothing)
    monkeypatch.setattr(prebuilt, "checkpoint_kv_cache", nothing)
    monkeypatch.setattr(eagle, "_requires_dsa_seed_for_cuda_graph", lambda *_: False, raising=False)
    server.draft_inputs.step = server.draft_inputs.relay = None
    yield
    server.draft_inputs.step = server.draft_inputs.relay = None


@dataclass
class State:
    """What a step begins with: the draft's state, and the last token."""

    topk_p: torch.Tensor
    topk_index: torch.Tensor
    hidden_states: torch.Tensor
    bonus_token: int

    @classmethod
    def made(cls, noise: torch.Generator) -> State:
        return cls(
            torch.rand(1, generator=noise), torch.randint(1 << 16, (1,), generator=noise),
            torch.randn(HIDDEN, generator=noise).to(torch.bfloat16), int(torch.randint(1 << 15, (), generator=noise)),
        )  # fmt: skip

    def same(self, other: State) -> bool:
        return self.bonus_token == other.bonus_token and all(
            torch.equal(getattr(self, name), getattr(other, name)) for name in drafts.CARRIED
        )


class Decoder:
    """A decode server's loop over the engine's relay and batch: ``launch`` a step, ``process`` the oldest."""

    def __init__(self, overlap: bool, algorithm: str = "EAGLE", requests: int = 8) -> None:
        self.world = World(replace(EAGLE_SPEC, requests=requests), draft=algorithm)
        self.algorithm = self.world.scheduler.spec_algorithm
        self.relay = FutureMap(torch.device("cpu"), self.algorithm, self.world.table)
        self.overlap, self.noise = overlap, torch.Generator().manual_seed(7)
        self.batch_of = lambda: object.__new__(ScheduleBatch)
        self.running = self.batch([])
        self.state: dict[str, State] = {}  # by request: what its next step begins with, as tokens are known
        self.flying: list[tuple[list[Any], list[list[int]], dict[str, State]]] = []

    def batch(self, reqs: list[Any]) -> Any:
        batch, world = self.batch_of(), self.world
        batch.reqs, batch.device, batch.enable_overlap = reqs, torch.device("cpu"), self.overlap
        batch.spec_algorithm, batch.spec_info = self.algorithm, None
        batch.req_to_token_pool, batch.token_to_kv_pool_allocator = world.table, world.allocator
        batch.tree_cache, batch.hisparse_coordinator = world.tree, None
        batch.model_config = SimpleNamespace(hf_config=None)
        batch.req_pool_indices = torch.tensor([world.slot(req) for req in reqs], dtype=torch.int64)
        batch.seq_lens = torch.tensor([req.seqlen - 1 for req in reqs], dtype=torch.int64)
        return batch

    def arrive(self, n: int, rid: str) -> Any:
        """A request from its prefill server, with the state of its prompt's end, joins the batch."""
        req = self.world.admit(n, rid, prompt=n)
        self.state[rid] = state = State.made(self.noise)
        req.output_ids[-1] = state.bonus_token
        req.output_topk_p, req.output_topk_index = state.topk_p.clone(), state.topk_index.clone()
        req.hidden_states_tensor = state.hidden_states.clone()
        self.join([req])
        return req

    def join(self, reqs: list[Any]) -> None:
        """The engine's process_prebuilt, and its merge into the running batch."""
        new = self.batch(reqs)
        new.process_prebuilt(self.relay)
        running = self.running
        if not running.reqs:
            self.running = new
            return
        running.reqs = running.reqs + new.reqs
        running.req_pool_indices = torch.cat([running.req_pool_indices, new.req_pool_indices])
        running.seq_lens = torch.cat([running.seq_lens, new.seq_lens])
        running.spec_info.merge_batch(new.spec_info)

    def begins_with(self, row: int) -> State:
        """What the step of the running batch is given for that request."""
        info = self.running.spec_info
        carried = self.algorithm.need_topk()
        found = {name: getattr(info, name)[row] if carried else None for name in drafts.CARRIED}
        return State(**found, bonus_token=int(info.bonus_tokens[row]))

    def launch(self) -> list[State]:
        """One step of the running batch; what it began with, by row."""
        batch, reqs = self.running, list(self.running.reqs)
        if self.overlap:
            self.relay.resolve_seq_lens_cpu(batch)
            self.relay._resolve_spec_extras(batch)
        began = [self.begins_with(row) for row in range(len(reqs))]
        states = [State.made(self.noise) for _ in reqs]
        accepted = [ACCEPTED[(len(req.output_ids) + row) % 4] for row, req in enumerate(reqs)]
        tokens = [[*range(50, 50 + count - 1), s.bonus_token] for count, s in zip(accepted, states, strict=True)]
        for req in reqs:
            have = req.kv.kv_allocated_len
            self.world._decode(req, have, 8)
        batch.spec_info = self._next(batch, states, batch.seq_lens + torch.tensor(accepted))
        self.flying.append((reqs, tokens, dict(zip((r.rid for r in reqs), states, strict=True))))
        if not self.overlap:
            self.process()
        return began

    def _next(self, batch: Any, states: list[State], lengths: torch.Tensor) -> Any:
        """What the engine's worker hands to the next step, with overlap through the relay."""
        tokens = torch.tensor([s.bonus_token for s in states])
        if self.algorithm.need_topk():
            inputs = {name: torch.stack([getattr(s, name) for s in states]) for name in drafts.CARRIED}
            made = EagleDraftInput(**inputs, bonus_tokens=tokens)
        else:
            made = make_next_draft_input(bonus_tokens=tokens, new_seq_lens=lengths)
        if not self.overlap:
            batch.seq_lens = lengths
            return made
        self.relay.publish(batch.req_pool_indices, lengths)
        self.relay.stash(batch.req_pool_indices, RelayPayload.from_draft_input(made))
        if self.algorithm.need_topk():
            made = EagleDraftInput()
        else:  # the engine's scheduler sets it on every input; this kind has no such field
            made.dsa_topk_indices, made.future_dsa_topk_indices_available = None, False
        made.future_indices = batch.req_pool_indices
        return made

    def process(self) -> None:
        """The oldest step's result, as the scheduler takes it: not that of a retracted request."""
        reqs, tokens, states = self.flying.pop(0)
        for req, new in zip(reqs, tokens, strict=True):
            if not req.is_retracted:
                req.output_ids.extend(new)
                self.state[req.rid] = states[req.rid]

    def run(self, steps: int) -> None:
        """Steps as the scheduler's loop runs them: with overlap the next is launched before the last is processed."""
        for _ in range(steps):
            self.launch()
            if len(self.flying) > 1:
                self.process()

    def retract(self, *retracted: Any, requeue: bool = True) -> None:
        """The engine's retract of these requests, and its queue; then the step that was in flight ends."""
        batch = self.running
        rows = [batch.reqs.index(req) for req in retracted]
        kept = [row for row in range(len(batch.reqs)) if row not in rows]
        batch.check_decode_mem = lambda selected_indices: next(fits)
        fits = chain(repeat(False, len(rows) - 1), repeat(True))
        batch._get_decode_retraction_order = lambda *_: [*kept, *reversed(rows)]
        batch.filter_batch = self._filter
        found = batch.retract_decode()
        assert found[0] == list(retracted) and not found[2]
        for req in retracted if requeue else ():
            self.world.requeue(req)
        while self.flying:
            self.process()

    def _filter(self, keep_indices: list[int]) -> None:
        batch, rows = self.running, torch.tensor(keep_indices, dtype=torch.int64)
        batch.reqs = [batch.reqs[row] for row in keep_indices]
        batch.req_pool_indices, batch.seq_lens = batch.req_pool_indices[rows], batch.seq_lens[rows]
        batch.spec_info.filter_batch(rows, keep_indices)

    def resume(self) -> list[Any]:
        """The engine's resume, up to the batch that the request joins."""
        reqs = self.world.resume()
        for req in reqs:
            req.is_retracted = False
        while self.flying:
            self.process()
        self.join(reqs)
        return reqs

    def check_next_step(self) -> None:
        wanted = [self.state[req.rid] for req in self.running.reqs]
        for req, began, state in zip(self.running.reqs, self.launch(), wanted, strict=True):
            assert state.same(began), req.rid


def two(overlap: bool, steps: int = 3, **kwargs: Any) -> tuple[Decoder, Any, Any]:
    decoder = Decoder(overlap, **kwargs)
    stays, goes = decoder.arrive(40, "stays"), decoder.arrive(130, "goes")
    decoder.run(steps)
    return decoder, stays, goes


both = pytest.mark.parametrize("overlap", (False, True), ids=("no overlap", "overlap"))


def others_step(decoder: Decoder, stays: Any, _: Any) -> None:
    """A step was gathered without it, for others or for nobody, since its own was processed."""
    decoder.run(3)
    decoder.process()
    others = decoder.batch([stays])
    others.spec_info = decoder._next(others, [decoder.state["stays"]], others.seq_lens)
    decoder.relay._resolve_spec_extras(others)


def rows_move(decoder: Decoder, stays: Any, goes: Any) -> None:
    """A request has finished since the step was launched: the batch is shorter than the step."""
    decoder.arrive(60, "last")
    decoder.run(4)
    decoder._filter([1, 2])
    assert decoder.running.reqs[0] is goes


BEFORE: dict[str, Callable[[Decoder, Any, Any], Any]] = {
    **{f"{steps} steps": lambda decoder, *_, steps=steps: decoder.run(steps) for steps in (0, 1, 2, 5)},
    "rows moved": rows_move,
    "a step left out": lambda decoder, *_: (decoder.run(3), decoder.process()),  # in flight, processed, none launched
    "a step of others": others_step,
}
CASES = [(before, overlap) for before in BEFORE for overlap in (False, True) if overlap or "a step " not in before]


@pytest.mark.parametrize("times", (1, 2))
@pytest.mark.parametrize(("before", "overlap"), CASES)
def test_the_next_step_begins_with_what_the_lost_one_began_with(before: str, overlap: bool, times: int) -> None:
    """With overlap the step in flight is thrown away, and the relay holds its output. times: of retracts in a row."""
    decoder, stays, goes = two(overlap, steps=0)
    BEFORE[before](decoder, stays, goes)
    wanted, slot = decoder.state["goes"], decoder.world.slot(goes)
    for _ in range(times):
        batch_has = [getattr(decoder.running.spec_info, name) for name in drafts.CARRIED]
        decoder.retract(goes)
        for tensor in batch_has if not overlap else ():
            tensor.zero_()  # as a graph's next replay may
        if "a step " in before:
            decoder.relay.hidden_states_buf[slot] = 0  # another request's by now
        drafts.restore_draft_state(goes)
        assert torch.equal(goes.hidden_states_tensor, wanted.hidden_states)
        assert torch.equal(goes.output_topk_p, wanted.topk_p) and torch.equal(goes.output_topk_index, wanted.topk_index)
        assert all(getattr(goes, name).device.type == "cpu" for name in drafts.CARRIED.values())
        if times == 1:
            decoder.run(2)  # the others go on, and write over what is not kept
        assert decoder.resume() == [goes]
    assert decoder.state["goes"] is wanted
    decoder.check_next_step()
    decoder.world.nothing_held()


@both
def test_requests_in_each_others_slots_are_not_confused(overlap: bool) -> None:
    """Two slots, of which each request gets the other's, while a third stays."""
    decoder = Decoder(overlap, requests=3)
    decoder.arrive(40, "stays")
    first, second = decoder.arrive(130, "first"), decoder.arrive(131, "second")
    decoder.run(3)
    slots = [decoder.world.slot(first), decoder.world.slot(second)]
    decoder.retract(first, second)
    decoder.run(1)
    decoder.world.queue.retracted_queue.reverse()
    assert decoder.resume() == [second, first]
    assert slots == [decoder.world.slot(second), decoder.world.slot(first)]
    decoder.check_next_step()


@both
def test_a_state_that_came_with_a_recompute_is_not_replaced_by_an_old_one(overlap: bool) -> None:
    """Its copy was dropped, its prefill server computed it again, and it is retracted before any step."""
    decoder, _, goes = two(overlap)
    decoder.retract(goes)
    drafts.restore_draft_state(goes)
    fresh = State.made(decoder.noise)
    goes.output_topk_p, goes.output_topk_index, goes.hidden_states_tensor = (
        fresh.topk_p, fresh.topk_index, fresh.hidden_states,
    )  # fmt: skip
    decoder.resume()
    decoder.retract(goes)
    drafts.restore_draft_state(goes)
    assert torch.equal(goes.hidden_states_tensor, fresh.hidden_states)


@both
def test_dspark_needs_its_last_token_and_length_alone(overlap: bool) -> None:
    """Its input has fields of the same names, which hold nothing."""
    decoder, _, goes = two(overlap, algorithm="DSPARK")
    wanted, before = decoder.state["goes"].bonus_token, goes.hidden_states_tensor
    decoder.retract(goes)
    drafts.restore_draft_state(goes)
    assert goes.hidden_states_tensor is before
    decoder.run(1)
    decoder.resume()
    length = goes.seqlen - 1
    began = decoder.launch()[-1]
    assert (began.bonus_token, began.topk_p, began.hidden_states) == (wanted, None, None)
    assert int(decoder.running.seq_lens[-1]) == length or not overlap
    decoder.world.nothing_held()


def test_a_state_of_another_length_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the scheduler did in between: the prefill's state is worth more than one of other tokens. Said once."""
    decoder, _, goes = two(overlap=True)
    before, server.draft_inputs.told = goes.hidden_states_tensor.clone(), False
    decoder.process()
    decoder.relay.new_seq_lens_buf += 1
    decoder.retract(goes)
    drafts.restore_draft_state(goes)
    assert torch.equal(goes.hidden_states_tensor, before)
    assert [r.levelname for r in caplog.records if "draft state not put back" in r.getMessage()] == ["WARNING"]


def test_nothing_is_kept_where_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain server's extends make the state anew: it would hold requests and tensors for nothing."""
    monkeypatch.setattr(server.draft_inputs, "copy_of", None)
    monkeypatch.setattr(drafts, "_inputs", lambda _: pytest.fail("it looked"))
    drafts.after_resolve_spec_extras(None, None, None)
    assert server.draft_inputs.step is None


@both
def test_a_state_comes_back_to_where_the_transfer_left_it(overlap: bool) -> None:
    """On the card, with some of Mooncake's memory: the engine stacks it with those of requests that arrive."""
    decoder, _, goes = two(overlap, steps=2)
    for name in drafts.CARRIED.values():  # "meta" stands for the card
        setattr(goes, name, getattr(goes, name).to("meta"))
    decoder.retract(goes)
    assert decoder.world.resume() == [goes]
    assert {getattr(goes, name).device.type for name in drafts.CARRIED.values()} == {"meta"}


def test_without_a_copy_nothing_is_put_back() -> None:
    """Its prefill server computes it again, and delivers a state with it."""
    decoder, _, goes = two(overlap=True)
    before = goes.hidden_states_tensor.clone()
    with mock.patch.object(decoder.world.host, "save", side_effect=HostMemoryExhausted("full")):
        decoder.retract(goes, requeue=False)
    assert decoder.world.copy_of(goes) is None and not (request_state(goes).draft_state is not None)
    assert torch.equal(goes.hidden_states_tensor, before)


@both
def test_on_a_gpu_nobody_waits_at_the_retract(monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    """The copies lie behind the gather and the current stream, and not behind what the forward does after it."""
    said: list[str] = []
    event = SimpleNamespace(record=lambda: said.append("recorded"), synchronize=lambda: said.append("the host waits"))
    stream = SimpleNamespace(
        wait_stream=lambda other: said.append(f"behind {other}"), wait_event=lambda _: said.append("behind the gather")
    )
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the current stream")
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(drafts, "_to_host", lambda tensor, _: said.append("copied") or tensor.clone())
    for name in ("made", "stream"):
        monkeypatch.setattr(server.draft_inputs, name, None)
    decoder, _, goes = two(overlap, steps=1)
    wanted, gathered = decoder.state["goes"], ["recorded"] if overlap else []
    assert said == gathered
    decoder.retract(goes)
    sent = said[len(gathered) :]
    assert sent[: 1 + overlap] == ["behind the current stream", *(["behind the gather"] if overlap else [])]
    assert sent[-1] == "recorded" and set(sent[1 + overlap : -1]) == {"copied"}
    decoder.resume()
    assert said[-1] == "the host waits" and said.count("the host waits") == 1
    assert torch.equal(goes.hidden_states_tensor, wanted.hidden_states)
