"""Gives a request that comes back the inputs with which its drafts went on before the retract.

A retract throws the step in flight away, but the drafts' relay buffers hold its outputs already.

A step of EAGLE begins with the draft's first choices and its hidden state from the step before. The engine keeps
them by request slot, and the step in flight has written over them. A request carries such a state only from its
prefill, in attributes that still describe the prompt's end when it comes back. So the inputs of each step are kept, by
reference, and go into those attributes when the request comes back; the engine's own resume takes them from there.

    overlap       the relay's inputs gathered for the step in flight; tokens and copy end where that step began
                  (where the request is in none, the relay's present inputs: a step was left out, or it was in none yet)
    no overlap    the batch's own state: no step is in flight, and the next one takes this state

Which of the first two it is, the lengths tell: a state belongs to the copy when as many tokens were in the cache. The
last token goes back with the request's tokens. DSpark needs nothing else.

Nothing waits at the retract. The lengths are on the device, so both places are sent to the host; which one it is, is
asked when the request has its place again. The current stream may be behind a whole forward, which is over by then.
The forward of a step in flight writes the relay on a stream of its own, so the relay is not read for a request in that
step. Where nothing was gathered for such a step (mixed chunks), it is read: the engine writes a slot's length before
its state, and here the length is read last, so a state that is half written does not fit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from sglang_dsv4.engine.state import request_state, server

logger = logging.getLogger(__name__)
CARRIED = {  # of a draft input -> of a request, as a prefill server delivers it
    "topk_p": "output_topk_p",
    "topk_index": "output_topk_index",
    "hidden_states": "hidden_states_tensor",
}
LENGTH = "length"  # beside those of a state: tokens that were in the cache

States = list[dict[str, torch.Tensor]]  # of one request, each tensor with a leading dimension of 1


class Step(NamedTuple):
    """Keeps the inputs with which a step began.

    reqs: None where it is no longer the request's. lengths: tokens in the cache then. made: after the gather on the
    forward's stream; None on a CPU.
    """

    reqs: list[Any]
    lengths: torch.Tensor
    inputs: dict[str, torch.Tensor]
    made: Any


class Coming(NamedTuple):
    """Holds states on their way to the host. saved: tokens of the copy. ready: after them; None on a CPU."""

    saved: int
    states: States
    ready: Any


def want(copy_of: Callable[[Any], Any]) -> None:
    """Keeps each step's inputs from now on. copy_of: a request -> its host copy, with which it needs its state."""
    server.draft_inputs.copy_of = copy_of


def after_resolve_spec_extras(result: Any, future_map: Any, batch: Any) -> None:
    """Runs AFTER FutureMap._resolve_spec_extras, which gathers a step's inputs into tensors of their own."""
    inputs = _inputs(batch) if server.draft_inputs.copy_of else {}
    server.draft_inputs.step = None
    if inputs:
        made = _recorded() if next(iter(inputs.values())).is_cuda else None
        server.draft_inputs.relay, server.draft_inputs.step = (
            future_map,
            Step(list(batch.reqs), batch.seq_lens, inputs, made),
        )


def _recorded() -> Any:
    """Records an event behind the current stream's work: one for all steps, as only the last step's is waited for."""
    server.draft_inputs.made = server.draft_inputs.made or torch.cuda.Event()
    server.draft_inputs.made.record()
    return server.draft_inputs.made


def keep_inputs(batch: Any, idx: int, in_flight: bool) -> None:
    """Sends the host the next drafts' inputs of a request that was just retracted with a copy.

    in_flight: whether a step of it was launched whose result is not taken.
    """
    copy_of = server.draft_inputs.copy_of
    if copy_of is not None and copy_of(batch.reqs[idx]) is not None:
        put_back(batch, idx, in_flight)


def put_back(batch: Any, idx: int, in_flight: bool) -> None:
    """Sends the host the inputs of the next step of request number ``idx``, whose copy was just made.

    The forward in flight gathered it at its begin, on a stream of its own; see ``restore_draft_state``.
    """
    req, step = batch.reqs[idx], None
    states: States = []
    if not batch.enable_overlap:  # the next step may write where these lie
        states = [{name: values[idx : idx + 1].clone() for name, values in _inputs(batch).items()}]
    elif _has_state(batch):
        step = server.draft_inputs.step
        states = _of_step(step, req)
        if not (states and in_flight):
            states += _of_relay(server.draft_inputs.relay, batch.spec_info.future_indices[idx : idx + 1])
    if any(states):
        request_state(req).draft_state = _send(req.seqlen - 1, states, step)


def restore_draft_state(req: Any) -> None:
    """Sets the sent state on a request that has a place again, in the attributes that the engine reads next."""
    coming: Coming | None = request_state(req).draft_state
    if coming is None:
        return
    request_state(req).draft_state = None
    if coming.ready is not None:
        coming.ready.synchronize()
    lengths = [int(state.pop(LENGTH, coming.saved)) for state in coming.states]
    fitting = [state for state, length in zip(coming.states, lengths, strict=True) if length == coming.saved]
    if fitting:
        for name, values in fitting[0].items():
            # Where the transfer left it: the engine stacks it with those of requests that arrive. Pinned memory is for
            # the next one: making it may wait.
            given = getattr(req, CARRIED[name], None)
            device = values.device if given is None else given.device
            setattr(req, CARRIED[name], values[0].to(device, copy=True))
    elif not server.draft_inputs.told:
        server.draft_inputs.told = True
        logger.warning(
            "draft state not put back, fewer drafts are accepted after a resume: request %r, saved at %d tokens, "
            "states found at %s", req.rid, coming.saved, lengths,
        )  # fmt: skip


def _has_state(batch: Any) -> bool:
    """Returns whether a draft keeps a state. DSpark's fields of these names are placeholders."""
    return batch.spec_info is not None and batch.spec_algorithm.need_topk()


def _inputs(batch: Any) -> dict[str, torch.Tensor]:
    """Returns the tensors that the batch's draft input carries."""
    if not _has_state(batch):
        return {}
    found = {name: getattr(batch.spec_info, name, None) for name in CARRIED}
    return {name: values for name, values in found.items() if values is not None}


def _of_step(step: Step | None, req: Any) -> States:
    """Takes the last step's inputs for ``req``, if it is in that step; from then on it is not."""
    row = None if step is None else next((i for i, one in enumerate(step.reqs) if one is req), None)
    if step is None or row is None:
        return []
    step.reqs[row] = None
    return [_rows({**step.inputs, LENGTH: step.lengths}, slice(row, row + 1))]


def _of_relay(relay: Any, slot: torch.Tensor) -> States:
    """Returns the relay's inputs for that slot, before the next forward writes there. slot: int [1], on the device."""
    buffers = {name: getattr(relay, f"{name}_buf", None) for name in CARRIED}
    held = {name: buffer for name, buffer in buffers.items() if buffer is not None}
    return [_rows({**held, LENGTH: relay.new_seq_lens_buf}, slot)] if held else []


def _rows(tensors: dict[str, torch.Tensor], rows: Any) -> dict[str, torch.Tensor]:
    return {name: tensor[rows] for name, tensor in tensors.items()}


def _send(saved: int, states: States, step: Step | None) -> Coming:
    """Copies ``states`` to the host, behind the current stream and the gather of ``step``, on a stream of its own."""
    if not next(iter(states[0].values())).is_cuda:
        return Coming(saved, states, None)
    stream = server.draft_inputs.stream = server.draft_inputs.stream or torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    if step is not None and step.made is not None:
        stream.wait_event(step.made)
    with torch.cuda.stream(stream):
        sent = [{name: _to_host(tensor, stream) for name, tensor in state.items()} for state in states]
        ready = torch.cuda.Event()
        ready.record()
    return Coming(saved, sent, ready)


def _to_host(tensor: torch.Tensor, stream: Any) -> torch.Tensor:
    """Copies to pinned memory, enqueued on ``stream``, the current one. A row holds the memory of its whole batch."""
    tensor.record_stream(stream)
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
