"""A retract throws the step in flight away, but the drafts' relay buffers hold what it put out: its inputs are needed.

A step of EAGLE begins with what the step before left: the draft's first choices and its hidden state. The engine keeps
them by request slot, and the step in flight has written over them. A request carries such a state only from its
prefill, in attributes that still describe the prompt's end when it comes back. So the inputs of each step are kept, by
reference, and go into those attributes once its copy is made; the engine's own resume takes them from there.

    overlap       what the relay gathered for the step in flight; tokens and copy end where that step began
                  (none is in flight where the scheduler left a step out: then what the relay holds now)
    no overlap    the batch's own state: no step is in flight, and what it holds is what the next one takes

Which of the first two it is, the lengths tell: a state belongs to the copy when as many tokens were in the cache. The
last token goes back with the request's tokens. DSpark needs nothing else.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch

logger = logging.getLogger(__name__)
CARRIED = {  # of a draft input -> of a request, as a prefill server delivers it
    "topk_p": "output_topk_p",
    "topk_index": "output_topk_index",
    "hidden_states": "hidden_states_tensor",
}


class Step(NamedTuple):
    """What a step began with.

    reqs: None where it is no longer the request's. lengths: tokens in the cache then. relay: the FutureMap.
    made: after the gather on the forward's stream; None on a CPU.
    """

    relay: Any
    reqs: list[Any]
    lengths: torch.Tensor
    inputs: dict[str, torch.Tensor]
    made: Any


_state: dict[str, Any] = {"wanted": False, "step": None, "told": False, "made": None}  # one scheduler a process


def want() -> None:
    """Retracted requests of this process will ask for their states: from now on each step's inputs are kept."""
    _state["wanted"] = True


def after_resolve_spec_extras(result: Any, future_map: Any, batch: Any) -> None:
    """AFTER FutureMap._resolve_spec_extras, which gathers a step's inputs into tensors of their own."""
    inputs = _inputs(batch) if _state["wanted"] else {}
    _state["step"] = None
    if inputs:
        made = _recorded() if next(iter(inputs.values())).is_cuda else None
        _state["step"] = Step(future_map, list(batch.reqs), batch.seq_lens, inputs, made)


def _recorded() -> Any:
    """An event behind what the current stream has: one for all steps, for it is the last step that is asked for."""
    _state["made"] = _state["made"] or torch.cuda.Event()
    _state["made"].record()
    return _state["made"]


def put_back(batch: Any, idx: int) -> None:
    """Give the batch's request number ``idx``, whose copy was just made, the state that its next step begins with.

    The forward in flight gathered it at its begin, on a stream of its own. The few bytes are read on the current
    stream, which the engine may have put behind that forward. A request that was in no step yet keeps what it came
    with: its prefill's, or what was put back before.
    """
    found = _row(batch, idx)
    if found is None:
        return
    inputs, row = found
    for name, values in inputs.items():
        setattr(batch.reqs[idx], CARRIED[name], values[row].to("cpu", copy=True))  # the engine stacks CPU tensors


def _inputs(batch: Any) -> dict[str, torch.Tensor]:
    """What the batch's draft input carries; nothing of DSpark, whose fields of these names are placeholders."""
    if batch.spec_info is None or not batch.spec_algorithm.need_topk():
        return {}
    found = {name: getattr(batch.spec_info, name, None) for name in CARRIED}
    return {name: values for name, values in found.items() if values is not None}


def _row(batch: Any, idx: int) -> tuple[dict[str, torch.Tensor], int] | None:
    """(inputs, row) of that request; None where it was in no step."""
    if not batch.enable_overlap:
        inputs = _inputs(batch)
        return (inputs, idx) if inputs else None
    req, step = batch.reqs[idx], _state["step"]
    row = None if step is None else next((i for i, one in enumerate(step.reqs) if one is req), None)
    if row is None:
        return None
    step.reqs[row] = None
    if step.made is not None:
        step.made.synchronize()
    return _fitting(step, row, req, int(batch.spec_info.future_indices[idx]))


def _fitting(step: Step, row: int, req: Any, slot: int) -> tuple[dict[str, torch.Tensor], int] | None:
    """(inputs, row) of the state that belongs to as many tokens as are saved. slot: the request's, in the relay."""
    began, saved = int(step.lengths[row]), req.seqlen - 1
    if began == saved:
        return step.inputs, row
    if int(step.relay.new_seq_lens_buf[slot]) == saved:
        return {name: getattr(step.relay, f"{name}_buf") for name in step.inputs}, slot
    if not _state["told"]:
        _state["told"] = True
        logger.warning(
            "draft state not put back, fewer drafts are accepted after a resume: request %s, saved at %d tokens, began "
            "its step at %d", req.rid, saved, began,
        )  # fmt: skip
    return None
