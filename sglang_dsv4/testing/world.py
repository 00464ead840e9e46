"""Runs the scheduler's own loop of a plain server without a GPU or a model.

Most servers are plain, and a retract is seen to be right only in that loop.
"""

from __future__ import annotations

import contextlib
from array import array
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers import scheduler as engine
from sglang.srt.managers.io_struct import AbortReq, ContinueGenerationReqInput, PauseGenerationReqInput
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm as Drafts

from sglang_dsv4.engine.plain.serving import plain_of
from sglang_dsv4.engine.releases import engine_release
from sglang_dsv4.testing.choices import Choices
from sglang_dsv4.testing.content import VOCABULARY, PrefixLedger, next_token
from sglang_dsv4.testing.forward import Forward, WrongRows
from sglang_dsv4.testing.integrity import Pages, check_requests, check_tree, poison
from sglang_dsv4.testing.ledger import Part, left_by_prefill, locations, parts
from sglang_dsv4.testing.server import PAGE, WINDOW, ServerSpec, Silence, build_memory, build_scheduler

IDLE = 4  # passes without a batch after which nothing more is going to happen
NO_STREAMS = SimpleNamespace(Stream=Silence, StreamContext=contextlib.nullcontext)  # a device module without any


class Stuck(RuntimeError):
    """Reports that requests wait, and the scheduler starts nothing."""


class PlainWorld:
    """Runs one plain server.

    ``submit`` requests, ``step`` its loop, disturb it, and ``check_integrity`` at any time. Requests are the engine's
    ``Req``; their bytes follow from their tokens (``content``). A forward raises WrongRows where it would read a byte
    that is not theirs.
    """

    def __init__(self, spec: ServerSpec | None = None, **changes: Any) -> None:
        self.spec = spec or ServerSpec(**changes)
        memory = build_memory(self.spec)
        self.pool, self.allocator, self.table, self.tree = memory.pool, memory.allocator, memory.table, memory.tree
        self.choices = Choices((self.spec.pages + 1) * PAGE, self.spec.requests)
        self.scheduler = self.build_scheduler(memory)
        self.requests: list[Any] = []  # all that were submitted, in order
        self.computed: dict[str, int] = {}  # tokens whose rows were written, by request id
        self._forward = Forward(self)
        self._tokens: dict[str, list[int]] = {}
        self.free = Pages(self).free
        self._launched: deque[list[torch.Tensor]] = deque(maxlen=4)  # of each of the last forwards, the slots it writes
        poison(self, everything=True)
        self.start()

    def build_scheduler(self, memory: Any) -> Any:
        """Returns the engine's scheduler over ``memory``."""
        return build_scheduler(self.spec, memory)

    def start(self) -> None:
        """Runs the start between a server's memory and its first request, where hooks reserve theirs."""
        scheduler, dispatch, carries = self.scheduler, engine.dispatch_event_loop, Drafts.carries_draft_hidden_states
        vars(scheduler).update(device_module=NO_STREAMS, schedule_stream=Silence(), forward_stream=Silence())
        engine.dispatch_event_loop = lambda _: None
        Drafts.carries_draft_hidden_states = lambda _: False  # else it looks up the width of a model's hidden state
        try:
            scheduler.init_disaggregation()
            scheduler.run_event_loop()
        finally:
            engine.dispatch_event_loop, Drafts.carries_draft_hidden_states = dispatch, carries
        if (plain := plain_of(self.allocator)) is not None:
            self._watch_saves(plain.host._copier)

    def _watch_saves(self, copier: Any) -> None:
        """Lets each save raise WrongRows that reads a slot which a forward in flight writes: here none is ever late."""
        save = copier.save

        def watched(copy: Any, request: Any) -> Any:
            count = len(self.scheduler.result_queue)
            written = [slots for forward in list(self._launched)[-count:] for slots in forward] if count else []
            if written and bool(torch.isin(request.indices.long(), torch.cat(written)).any()):
                raise WrongRows(f"a save of {copy.tokens} tokens reads what a forward in flight writes")
            return save(copy, request)

        copier.save = watched

    # -------------------------------------------------------------------------------------- requests

    def submit(
        self,
        tokens: Sequence[int],
        max_new: int = 64,
        rid: str | None = None,
        priority: int | None = None,
        hints: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> Any:
        """Submits a new request for ``tokens`` to the scheduler's waiting queue. hints: its custom_params."""
        sampling = SamplingParams(max_new_tokens=max_new, temperature=0, custom_params=hints)
        sampling.normalize(None)
        req = Req(
            rid or f"r{len(self.requests)}", "", array("q", tokens), sampling,
            vocab_size=VOCABULARY, priority=priority, **arguments,
        )  # fmt: skip
        self.requests.append(req)
        self._tokens[req.rid] = list(tokens)
        self.scheduler._add_request_to_queue(req)
        return req

    def second_turn(self, req: Any, more: Sequence[int], **arguments: Any) -> Any:
        """Submits a new request whose prompt is ``req``'s prompt and answer, and ``more``."""
        return self.submit([*req.origin_input_ids, *req.output_ids, *more], **arguments)

    def tokens(self, req: Any, length: int) -> list[int]:
        """Returns the first ``length`` tokens of ``req``: its prompt, and the stand-in's answer to it."""
        known = self._tokens[req.rid]
        while len(known) < length:
            known.append(next_token(known))
        return known[:length]

    def ledger(self, req: Any, length: int) -> PrefixLedger:
        """Returns the ledger of its first ``length`` tokens."""
        return PrefixLedger(self.tokens(req, length + bool(self.spec.drafts)))

    def slots(self, req: Any, length: int) -> torch.Tensor:
        """Returns the full slots of its first ``length`` tokens."""
        return self.table.req_to_token[int(req.kv.req_pool_idx), :length].to(torch.int64)

    @property
    def running(self) -> list[Any]:
        """Lists the requests that hold KV, in the order of their submission."""
        return [req for req in self.requests if req.kv.holds_kv]

    @property
    def retractable(self) -> list[Any]:
        """Lists the requests whose prefill is done, or launched: the engine would retract these."""
        chunked = self.scheduler.chunked_req
        return [req for req in self.running if not req.finished() and req is not chunked]

    @property
    def waiting(self) -> list[Any]:
        """Returns the scheduler's waiting queue."""
        return list(self.scheduler.waiting_queue)

    # -------------------------------------------------------------------------------------- the loop

    def plan(self) -> Any:
        """Returns the engine's plan of the next pass."""
        scheduler = self.scheduler
        return scheduler.get_next_batch_to_run(running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)

    def step(self) -> Any:
        """Runs one pass of the engine's event loop; returns the batch that ran, or None."""
        scheduler, plan = self.scheduler, self.plan()
        scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
        if batch is not None:
            scheduler.forward_ct += 1
            self._launched.append([])
            scheduler.result_queue.append((batch.copy(), self._forward(batch)))
        if len(scheduler.result_queue) > (batch is not None and self.spec.overlap):
            scheduler.process_batch_result(*scheduler.result_queue.popleft())
        scheduler.last_batch = batch
        poison(self)
        return batch

    def run(self, most: int = 2000, check: bool = True) -> int:
        """Steps until nothing runs or waits; returns how often. Raises Stuck if that never comes."""
        idle = 0  # passes: a finished request may keep its place for one more
        for number in range(most):
            idle = 0 if self.step() is not None else idle + 1
            if check:
                self.check_integrity()
            if idle and not self.running and not self.waiting:
                return number
            if idle > IDLE:
                break
        raise Stuck(f"{len(self.running)} requests run, {len(self.waiting)} wait, and nothing starts")

    # --------------------------------------------------------------------------------- disturbances

    def retract(self, req: Any) -> None:
        """Runs a pass in which the engine retracts ``req``, of all requests, and launches nothing.

        A result in flight comes in after the retract, and before the next pass can admit a request.
        """
        scheduler = self.scheduler
        batch = scheduler.running_batch = self._merged()
        index = batch.reqs.index(req)
        batch.release_req(index, len(batch.reqs) - 1)
        batch.filter_batch(keep_indices=[i for i in range(len(batch.reqs)) if i != index])
        scheduler._add_request_to_queue(req, is_retracted=True)
        while scheduler.result_queue:
            scheduler.process_batch_result(*scheduler.result_queue.popleft())
        scheduler.last_batch = None
        poison(self)

    def _merged(self) -> Any:
        """Merges the last prefill's requests into the running batch: the first half of a pass."""
        scheduler = self.scheduler
        scheduler.get_new_batch_prefill = lambda running: SimpleNamespace(batch_to_run=None, running_batch=running)
        scheduler.update_running_batch = lambda batch: batch
        try:
            plan = scheduler.get_next_batch_to_run(
                running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
            )
        finally:
            del scheduler.get_new_batch_prefill, scheduler.update_running_batch
        return plan.running_batch

    def abort(self, req: Any) -> None:
        """Calls the engine's ``abort_request`` for this request."""
        self.scheduler.abort_request(AbortReq(rid=req.rid))

    def pause(self) -> None:
        """Calls the engine's ``pause_generation`` that retracts every request, and continues after it."""
        self.scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        self.scheduler.continue_generation(ContinueGenerationReqInput())
        poison(self)

    def flush(self) -> bool:
        """Calls the engine's ``flush_cache``; returns whether it flushed."""
        done = bool(self.scheduler.flush_cache(empty_cache=False))
        poison(self)
        return done

    def evict(self, full: int, window: int = 0) -> None:
        """Evicts cached tokens of the tree."""
        self.tree.evict(EvictParams(num_tokens=full, swa_num_tokens=window))
        poison(self)

    def match(self, tokens: Sequence[int]) -> torch.Tensor:
        """Returns the full slots that the tree gives a new request for ``tokens``."""
        probe = _probe(tokens)
        probe.init_next_round_input(self.tree)
        return engine_release().prefix(self.tree, probe).to(torch.int64)

    # ---------------------------------------------------------------------------------- checks

    def parts(self) -> list[Part]:
        """Lists every buffer that the ledger judges."""
        return parts(self.pool)

    def check_reads(self, ledger: PrefixLedger, slots: torch.Tensor, row: int, whom: str, end: int = 0) -> None:
        """Raises WrongRows, with the first wrong bytes, unless the step after ``slots`` reads the right ones.

        end: of an extend, whose late layers see the last 128 of its tokens.
        """

        def floor(part: Part) -> int:
            return min(end - WINDOW, len(slots)) if end and self.spec.is_late(part) else 0

        wrong = ledger.mismatches(self.pool, slots, row, self.parts(), floor)
        if wrong:
            raise WrongRows(f"{whom}, {len(slots)} tokens: {'; '.join(wrong[:4])}")

    def write(self, ledger: PrefixLedger, slots: torch.Tensor, first: int, row: int, decode: bool) -> None:
        """Writes positions first..len(slots)-1 as a prefill does, or a decode step."""
        if self._launched:
            self._launched[-1].append(slots[first:])
        for part in self.parts():
            begin = first if decode or not self.spec.is_late(part) else max(first, len(slots) - WINDOW)
            positions, rows = locations(part, self.pool, slots, begin, row)
            if part.ring and not decode:
                kept = left_by_prefill(part, positions, len(slots))
                positions, rows = positions[kept], rows[kept]
            ledger.put(part, positions, rows)

    def check_integrity(self) -> None:
        """Checks that rows, tree and pages are right; raises the error of the first wrong one."""
        Pages(self).check()
        check_requests(self)
        check_tree(self)

    def totals(self) -> tuple[int, int, int]:
        """Counts free pages, free window pages, free slots."""
        return (
            self.allocator.full_available_size() // PAGE,
            self.allocator.swa_available_size() // PAGE,
            len(self.table.free_slots),
        )


def _probe(tokens: Sequence[int]) -> Any:
    return Req("probe", "", array("q", tokens), SamplingParams(max_new_tokens=1), vocab_size=VOCABULARY)
