"""What the scheduler's thread spends on a retract and its resume, in one running server, with the waits and without.

Every other retract waits as all did before saves were only enqueued: for the copy's bytes, then for the forward in
flight; and its resume looks for its place behind whatever the scheduler's stream has been given, as 0.5.23 made it.

One JSON line a resume, milliseconds of the host's clock:

    locate, enqueue        the search, and the rest of what a save enqueues
    copy, forward          the waits of a retract that waits
    order, settle, pages   the stream's wait, the question whether the request was right, the wait before a transfer
    save                   all of the adapter's save, so with locate to forward in it
    load                   all of the resume's load
    gap, step              from the launch before the retract to the one after it; the same of other steps, the median
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FILE = "TIMED_RETRACTS_FILE"
STEPS = 50  # whose median is a step
Around = Callable[..., Any]


class Retracts:
    """Where the server is in its retracts; the next one waits when ``waits`` is set."""

    def __init__(self, out: Path, clock: Callable[[], float] = time.perf_counter) -> None:
        self.out, self.clock = out, clock
        self._number = itertools.count()
        self._note: dict[str, Any] | None = None  # of the last retract, until its request is loaded
        self._launched: float | None = None
        self._steps: deque[float] = deque(maxlen=STEPS)
        self._within: str | None = None  # the save, or the load

    @property
    def waits(self) -> bool:
        """Whether the last retract was one that waits."""
        return self._note is not None and bool(self._note["waits"])

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What runs within belongs to the last retract."""
        note, started = self._note, self.clock()
        try:
            yield
        finally:
            if note is not None:
                note[name] = note.get(name, 0.0) + (self.clock() - started) * 1e3

    @contextlib.contextmanager
    def whole(self, name: str) -> Iterator[None]:
        """As ``part``, for the save and the load."""
        self._within = name
        try:
            with self.part(name):
                yield
        finally:
            self._within = None

    def timed(self, name: str) -> Around:
        """An around hook that times ``name``; nothing is counted twice."""
        inner = name in {"locate", "enqueue"}

        def hook(original: Around, *args: Any, **kwargs: Any) -> Any:
            wanted = self._within == ("save" if inner else None)
            with self.part(name) if wanted else contextlib.nullcontext():
                return original(*args, **kwargs)

        return hook

    def save(self, original: Around, pool: Any, req: Any, indices: Any, slot: int) -> Any:
        """Around the adapter's save."""
        self._note = {"tokens": len(indices), "waits": bool(next(self._number) % 2)}
        self._note["launched"] = self._launched
        with self.whole("save"):
            copy = original(pool, req, indices, slot)
            if copy is None:
                self._note = None
            elif self.waits:
                with self.part("copy"):
                    _wait_for([copy.lease.used_by])
                with self.part("forward"):
                    _wait_for(pool.host.given_away._forwards)
        return copy

    def place_taken(self, original: Around, host: Any) -> None:
        """Around CopyService.place_taken."""
        if not self.waits:
            original(host)

    def load(self, original: Around, *args: Any, **kwargs: Any) -> None:
        """Around CopyService.load: the end of the note."""
        with self.whole("load"):
            original(*args, **kwargs)
        self._write()

    def launch(self, original: Around, *args: Any, **kwargs: Any) -> Any:
        """Around Scheduler.run_batch."""
        now, note = self.clock(), self._note
        if self._launched is not None:
            gap = (now - self._launched) * 1e3
            if note is None:
                self._steps.append(gap)
            elif note.get("launched") is not None and "gap" not in note:
                note["gap"] = (now - note["launched"]) * 1e3
        self._launched = now
        return original(*args, **kwargs)

    def _write(self) -> None:
        note, self._note = self._note, None
        if note is None:
            return
        del note["launched"]
        note["enqueue"] = note.get("enqueue", 0.0) - note.get("locate", 0.0)
        note["step"] = statistics.median(self._steps) if self._steps else None
        with self.out.open("a") as file:
            print(json.dumps(note), file=file)


def _wait_for(events: list[Any]) -> None:
    for event in events:
        if event is not None:
            event.synchronize()


def around(owner: Any, name: str, hook: Around) -> None:
    """Put ``hook`` around ``owner.name``."""
    setattr(owner, name, wrapped(getattr(owner, name), hook))


def wrapped(original: Around, hook: Around) -> Around:
    """``original`` with ``hook`` around it."""

    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    return called


def install(retracts: Retracts | None = None, put: Callable[[Any, str, Around], None] = around) -> None:
    """Into this process, hooks included."""
    from sglang.srt.managers.scheduler import Scheduler  # noqa: PLC0415

    from sglang_dsv4.engine import saving  # noqa: PLC0415 - as the hooks, in the server alone
    from sglang_dsv4.pools.copy_service import CopyService  # noqa: PLC0415
    from sglang_dsv4.transfer.copier import Copier  # noqa: PLC0415
    from sglang_dsv4.transfer.given_away import GivenAway  # noqa: PLC0415
    from sglang_dsv4.transfer.locate import Locator  # noqa: PLC0415

    found = retracts or Retracts(Path(os.environ[FILE]))
    put(saving, "save", found.save)
    put(CopyService, "place_taken", found.place_taken)
    put(CopyService, "load", found.load)
    put(Scheduler, "run_batch", found.launch)
    for owner, name, part in (
        (Locator, "start", "locate"), (Copier, "save", "enqueue"), (CopyService, "settle", "settle"),
        (GivenAway, "wait_on_the_stream", "order"), (GivenAway, "wait", "pages"),
    ):  # fmt: skip
        put(owner, name, found.timed(part))
