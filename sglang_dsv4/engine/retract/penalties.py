"""Restores a request's penalty sums when it comes back: the engine starts each new batch from zero.

The engine counts one token a request and decode step, its last output; with overlap that is the one before the step in
flight. So the tokens that were counted are kept with the request. When it comes back, its rows of every penalizer are
set to them:

    extend     samples at once, and the engine counts nothing before it: the rows are set when they are made
    prebuilt   its first step is a decode, before which the engine counts: the rows are set behind that

A step in flight at the retract is thrown away, but its token is counted already: it is not counted again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy
import torch

from sglang_dsv4.engine.memory import host_of
from sglang_dsv4.engine.state import Counted, request_state


def after_init(result: Any, orchestrator: Any, vocab_size: int, batch: Any, penalizers: Any) -> None:
    """Runs AFTER BatchedPenalizerOrchestrator.__init__: sets the rows of a new batch."""
    if not orchestrator.is_required or host_of(batch.token_to_kv_pool_allocator) is None:
        return
    samples = batch.forward_mode is not None and batch.forward_mode.is_extend()
    for row, req in enumerate(batch.reqs):
        if not req.output_ids:  # new, or the engine starts it anew
            request_state(req).counted = Counted()
            continue
        counted = _of(req)
        counted.back = not samples and bool(counted.tokens)
        if samples:
            _count_last(batch, req, counted)
            _set_row(orchestrator, row, counted.tokens)


def cumulate_penalty_output_tokens(original: Callable[..., Any], batch: Any) -> Any:
    """Runs AROUND ScheduleBatch.cumulate_penalty_output_tokens.

    The engine calls it where a request of the batch has a penalty.
    """
    result = original(batch)
    if host_of(batch.token_to_kv_pool_allocator) is None:
        return result
    for row, req in enumerate(batch.reqs):
        counted = _of(req)
        if counted.back:
            counted.back = False
            _count_last(batch, req, counted)
            _set_row(batch.sampling_info.penalizer_orchestrator, row, counted.tokens)
        else:  # the token that the engine has just counted
            counted.tokens.append(req.output_ids[-1] if req.output_ids else req.origin_input_ids[-1])
    return result


def _of(req: Any) -> Counted:
    state = request_state(req)
    if state.counted is None:
        state.counted = Counted()
    return state.counted


def _count_last(batch: Any, req: Any, counted: Counted) -> None:
    """Counts the last output, unless the step that is repeated has counted.

    Before token n + 1 the engine has counted n times. With drafts a step has several tokens, and one of them counts.
    """
    missing = len(counted.tokens) < len(req.output_ids) if batch.spec_algorithm.is_none() else not counted.tokens
    if missing:
        counted.tokens.append(req.output_ids[-1])


def _set_row(orchestrator: Any, row: int, tokens: array[int]) -> None:
    """Sets the sums of ``row`` to those of ``tokens``, in every penalizer that the batch needs."""
    from sglang.srt.sampling import penaltylib  # noqa: PLC0415

    found = {kind: one for kind, one in orchestrator.penalizers.items() if one.is_prepared()}
    if lengths := found.get(penaltylib.BatchedMinNewTokensPenalizer):
        lengths.len_output_tokens[row] = len(tokens)
    given = torch.from_numpy(numpy.array(tokens))
    if torch.device(orchestrator.device).type == "cuda":
        given = given.pin_memory()  # else the host would wait for the forward
    index = given.to(orchestrator.device, non_blocking=True)
    if one := found.get(penaltylib.BatchedFrequencyPenalizer):
        sums = one.cumulated_frequency_penalties[row].zero_()
        sums.scatter_add_(0, index, one.frequency_penalties[row].expand(len(tokens)))
    if one := found.get(penaltylib.BatchedPresencePenalizer):
        one.cumulated_presence_penalties[row].zero_()[index] = one.presence_penalties[row]
    if one := found.get(penaltylib.BatchedRepetitionPenalizer):
        one.cumulated_repetition_penalties[row].fill_(1.0)[index] = one.repetition_penalties[row]
