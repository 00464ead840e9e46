"""How many drafts are accepted after a resume must be compared within one server: starts differ, and take minutes.

One word in a file, read at every retract, says what a retracted request's draft loses (``drafting.ARMS``). Who is
retracted is chosen alike under every word: who has gone on longest since the last time. Each of its steps with drafts
is then written down, one JSON line:

    [word, request, its retracts until then, tokens that it had, tokens since, accepted, seconds since the load]

Pages that a request gives up often come back to it, and would still hold its rows. Under ``WITHOUT`` they get those of
another retracted request, as on a server whose pages go from hand to hand.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from sglang_dsv4.engine import relay
from sglang_dsv4.hostmem.memory import HostCopy
from sglang_dsv4.livetest.drafting import BOTH, NO_RETRACT, STEPS, WITHOUT, WORD, ZEROED
from sglang_dsv4.livetest.zeroing.switch import zero
from sglang_dsv4.pools.copy_service import CopyService
from sglang_dsv4.pools.describe import DRAFT_BUFFERS

(FAMILY,) = DRAFT_BUFFERS
LONGEST = 256  # tokens since a resume that are looked at
MARK = "drafting_mark"  # attribute of a request: its last retract


@dataclass
class Mark:
    """A retract, or the moment of one that did not happen. loaded: when its copy was loaded, if it was."""

    word: str
    number: int
    had: int
    loaded: float | None = None


class Experiment:
    """What the word is, who was retracted, and what they do since."""

    def __init__(self, word: Path, out: TextIO) -> None:
        self._word, self._out = word, out
        self._row = lambda req: int(req.kv.req_pool_idx)
        self._loaded: dict[int, float] = {}  # by the request's row
        self._pages: deque[tuple[int, list[torch.Tensor]]] = deque(maxlen=4)  # of the last copies made: id, windows

    def word(self) -> str:
        """What the file says now."""
        return self._word.read_text().strip()

    def retracted(self, req: Any) -> None:
        """``req`` is about to be retracted, or would be."""
        before, word = getattr(req, MARK, None), self.word()
        at_once = time.perf_counter() if word == NO_RETRACT else None
        setattr(req, MARK, Mark(word, before.number + 1 if before else 1, len(req.output_ids), at_once))

    def stepped(self, req: Any, accepted: int) -> None:
        """A step of ``req`` has ended, and its tokens are not yet added."""
        mark: Mark | None = getattr(req, MARK, None)
        if mark is None or (since := len(req.output_ids) - mark.had) >= LONGEST:
            return
        now = time.perf_counter()
        if mark.loaded is None:
            mark.loaded = self._loaded.pop(self._row(req), now)
        line = [mark.word, req.rid, mark.number, mark.had, since, accepted, round(now - mark.loaded, 6)]
        print(json.dumps(line), file=self._out)

    def saved(self, host: CopyService, copy: HostCopy, indices: torch.Tensor, swa_map: torch.Tensor) -> None:
        """``copy`` was made of a request: its draft's window pages are kept for others."""
        pages = _window_pages(host, indices, swa_map)
        self._pages.append((id(copy), [buffer[pages].clone() for buffer in host.side.buffers[FAMILY]]))

    def loaded(self, host: CopyService, copy: int, indices: torch.Tensor, swa_map: torch.Tensor, row: int) -> None:
        """The copy of that id was loaded for the request of ``row``."""
        self._loaded[int(row)] = time.perf_counter()
        if self.word() != WITHOUT:
            return
        pages = _window_pages(host, indices, swa_map)
        others = next((kept for number, kept in reversed(self._pages) if number != copy), None)
        for layer, buffer in enumerate(host.side.buffers[FAMILY]):
            if others is None:
                buffer[pages] = 0
            else:
                buffer[pages] = others[layer][torch.arange(len(pages), device=pages.device) % len(others[layer])]


def _window_pages(host: CopyService, indices: torch.Tensor, swa_map: torch.Tensor) -> torch.Tensor:
    geometry = host.side.geometry
    return torch.unique(swa_map[indices[-(geometry.window - 1) :].long()] // geometry.page_size)


def install() -> None:
    """Wrap retracts, saves, loads and the results of steps in this process."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch  # noqa: PLC0415
    from sglang.srt.managers.scheduler_components.batch_result_processor import (  # noqa: PLC0415
        SchedulerBatchResultProcessor as Processor,
    )

    out = Path(os.environ[STEPS]).open("a", buffering=1)  # noqa: SIM115 - as long as the server
    experiment = Experiment(Path(os.environ[WORD]), out)
    ScheduleBatch._get_decode_retraction_order = staticmethod(in_turn(ScheduleBatch._get_decode_retraction_order))
    ScheduleBatch.retract_decode = unless_only_remembered(ScheduleBatch.retract_decode, experiment)
    ScheduleBatch.release_req = marking(ScheduleBatch.release_req, experiment)
    Processor._resolve_spec_v2_tokens = noting(Processor._resolve_spec_v2_tokens, experiment)
    relay.put_back = unless_told(relay.put_back, experiment)
    CopyService.save = keeping(CopyService.save, experiment)  # type: ignore[method-assign]
    CopyService.load = losing(CopyService.load, experiment)  # type: ignore[method-assign]


def in_turn(order: Callable[..., list[int]]) -> Callable[..., list[int]]:
    """``ScheduleBatch._get_decode_retraction_order``: who has most tokens since the last time is its last."""

    @functools.wraps(order)
    def ordered(reqs: Sequence[Any], *given: Any) -> list[int]:
        found = order(reqs, *given)

        def since(index: int) -> int:
            mark = getattr(reqs[index], MARK, None)
            return len(reqs[index].output_ids) - (mark.had if mark else 0)

        return sorted(found, key=since)

    return ordered


def unless_only_remembered(retract: Callable[..., Any], experiment: Experiment) -> Callable[..., Any]:
    """``ScheduleBatch.retract_decode``; under ``NO_RETRACT`` nobody leaves while there is memory."""

    @functools.wraps(retract)
    def retracted(batch: Any, *given: Any) -> Any:
        if experiment.word() != NO_RETRACT or not batch.check_decode_mem():
            return retract(batch, *given)
        from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import NewTokenRatioTracker  # noqa: PLC0415

        order = batch._get_decode_retraction_order(batch.reqs, *given)
        if len(order) > 1:
            experiment.retracted(batch.reqs[order[-1]])
        return [], NewTokenRatioTracker.estimate_new_token_ratio_after_retract(batch.reqs), []

    return retracted


def marking(release: Callable[..., Any], experiment: Experiment) -> Callable[..., Any]:
    """``ScheduleBatch.release_req``."""

    @functools.wraps(release)
    def released(batch: Any, idx: int, *given: Any, **named: Any) -> Any:
        experiment.retracted(batch.reqs[idx])
        return release(batch, idx, *given, **named)

    return released


def noting(resolve: Callable[..., Any], experiment: Experiment) -> Callable[..., Any]:
    """``SchedulerBatchResultProcessor._resolve_spec_v2_tokens``: a step's result, before its tokens are added."""

    @functools.wraps(resolve)
    def resolved(processor: Any, result: Any, batch: Any) -> Any:
        going = [(row, req) for row, req in enumerate(batch.reqs) if not (req.is_retracted or req.finished())]
        found, accepted = resolve(processor, result, batch), result.accept_lens.tolist()
        for row, req in going:
            experiment.stepped(req, accepted[row])
        return found

    return resolved


def unless_told(put_back: Callable[..., None], experiment: Experiment) -> Callable[..., None]:
    """``relay.put_back``."""

    @functools.wraps(put_back)
    def put(batch: Any, idx: int) -> None:
        if experiment.word() in (BOTH, ZEROED):
            put_back(batch, idx)

    return put


def keeping(save: Callable[..., HostCopy], experiment: Experiment) -> Callable[..., HostCopy]:
    """``CopyService.save``, waited for: the bytes are looked at."""

    @functools.wraps(save)
    def saved(host: CopyService, indices: torch.Tensor, swa_map: torch.Tensor, row: int | None, *_: bool) -> HostCopy:
        copy = save(host, indices, swa_map, row)
        experiment.saved(host, copy, indices, swa_map)
        return copy

    return saved


def losing(load: Callable[..., None], experiment: Experiment) -> Callable[..., None]:
    """``CopyService.load``. A copy that was damaged is not compared with what was saved."""

    @functools.wraps(load)
    def loaded(
        host: CopyService, copy: HostCopy, indices: torch.Tensor, swa_map: torch.Tensor, row: int, *given: Any
    ) -> None:
        if experiment.word() == ZEROED:
            zero(copy, FAMILY)
            copy.checksums = None
        load(host, copy, indices, swa_map, row, *given)
        experiment.loaded(host, id(copy), indices, swa_map, row)

    return loaded
