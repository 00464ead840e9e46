"""Moves units between the arena and the backend, and asks which prompts are stored.

Writes and reads run on a thread each, with slots of the ring of their own. Three rules carry this module:
- a unit is copied to its slot before anyone is told so, and sealed there;
- a unit that is read is copied to the arena first and checked there, against a seal that was read once;
- an object that failed its check is removed before it is put again: a backend keeps what it has.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from sglang_dsv4.store.backend import Backend
from sglang_dsv4.store.keys import chain, hasher, object_name
from sglang_dsv4.store.ring import Ring
from sglang_dsv4.store.seal import check, seal
from sglang_dsv4.store.wire import GET, PAGE, PUT, WRONG, Code, Piece, Question

BATCH = 16  # objects a call of the backend; single ones are several times slower over a network
SLOTS = 2 * BATCH  # of the ring: those of writes, then those of reads
AHEAD = 2 * BATCH  # objects of a load that the backend is told of before they are read
MOST_ASKED = 1024  # names a call
MOST_SEEN = 1 << 16  # names that are remembered
LASTS = 600.0  # seconds; then the backend is asked again, and takes it for use


class Job(NamedTuple):
    """Names a unit of the arena and the object of its bytes."""

    unit: int
    name: str


class Seen:
    """Remembers names of objects: those that the backend has, and those whose bytes were wrong. For both threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, None] = {}  # the least recently used first
        self._bad: dict[str, None] = {}
        self._since = time.monotonic()

    def knows(self, name: str) -> bool:
        """Returns whether the backend has it, as far as is known."""
        with self._lock:
            if time.monotonic() > self._since + LASTS:
                self._known.clear()
                self._since = time.monotonic()
            return name in self._known and self._use(self._known, name)

    def learn(self, name: str) -> None:
        """Notes that the backend has it, unless its bytes were wrong meanwhile."""
        with self._lock:
            if name not in self._bad:
                self._use(self._known, name)

    def forget(self) -> None:
        """Forgets what the backend has: something failed, and a store that was restarted may have nothing."""
        with self._lock:
            self._known.clear()

    def spoil(self, name: str) -> None:
        """Notes that its bytes are wrong."""
        with self._lock:
            self._known.pop(name, None)
            self._use(self._bad, name)

    def is_bad(self, name: str) -> bool:
        """Returns whether its bytes were wrong and nobody put it again."""
        with self._lock:
            return name in self._bad

    def removed(self, name: str) -> None:
        """Notes that the wrong bytes are gone."""
        with self._lock:
            self._bad.pop(name, None)

    @staticmethod
    def _use(names: dict[str, None], name: str) -> bool:
        names.pop(name, None)
        names[name] = None
        if len(names) > MOST_SEEN:
            del names[next(iter(names))]
        return True


class Lanes:
    """Writes, reads and asks. ``put`` belongs to one thread, ``get``, ``chain`` and ``ask`` to another."""

    def __init__(
        self, arena: np.ndarray, unit_bytes: int, in_tail: int, backend: Backend, ring: Ring, secret: bytes | None,
        beat: Callable[[int], None],
    ) -> None:  # fmt: skip
        """arena: the bytes of the units. in_tail: units of a window. ring: of SLOTS slots.

        beat: called with PUT or GET before and after each call of the backend: whoever watches sees a hanging one.
        """
        self._units = arena.reshape(-1, unit_bytes)
        self._in_tail, self._backend, self._ring, self._secret, self._beat = in_tail, backend, ring, secret, beat
        self._seen = Seen()
        self._doubtful = deque[str](maxlen=MOST_SEEN)

    # Writes

    def put(self, group: bytes, pieces: Sequence[Piece], copied: Callable[[int], None]) -> Iterator[list[Code]]:
        """Stores the units of ``pieces``, in their order, and yields the codes so far after each batch.

        group: a key, of all that a backend may evict as one. copied: called with a number of pieces, the first ones,
        whose units may have another owner from now on.
        """
        jobs = [Job(piece.unit, object_name(piece.key, piece.part)) for piece in pieces]
        known = self._stored([job.name for job in jobs])
        codes: list[Code] = []
        for batch in _batches(jobs):
            told, fresh = self._fill(batch, known)
            copied(len(codes) + len(batch))
            told |= self._put(fresh, group.hex())
            codes += [told[job.name] for job in batch]
            yield codes

    def _stored(self, names: Sequence[str]) -> set[str]:
        """Returns those that the backend has. A bad one does not count."""
        known = {name for name in names if self._seen.knows(name)}
        unsure = [name for name in names if name not in known and not self._seen.is_bad(name)]
        told = self._exists(PUT, unsure) or [False] * len(unsure)
        for name, there in zip(unsure, told, strict=True):
            if there:
                self._seen.learn(name)
                known.add(name)
        return known

    def _fill(self, batch: Sequence[Job], known: set[str]) -> tuple[dict[str, Code], Sequence[Job]]:
        """Copies to the first slots what is not known, and seals it. Returns codes of the others, and those jobs."""
        codes = {job.name: Code.KNOWN for job in batch if job.name in known}
        fresh = [job for job in batch if job.name not in known]
        if fresh and not self._backend.room(len(fresh) * self._ring.stride):
            return codes | {job.name: Code.FULL for job in fresh}, []
        for slot, job in enumerate(fresh):
            np.copyto(self._ring.payload(slot), self._units[job.unit])
            seal(self._ring.slot(slot), self._ring.unit_bytes, job.name, self._secret)
        return codes, fresh

    def _put(self, jobs: Sequence[Job], group: str) -> dict[str, Code]:
        """Puts the first slots, which hold the objects of ``jobs``."""
        stuck = {job.name for job in jobs if self._seen.is_bad(job.name) and not self._clear(job.name)}
        slots = {job.name: slot for slot, job in enumerate(jobs) if job.name not in stuck}
        codes = dict.fromkeys(stuck, Code.FAILED)
        if slots:
            done = self._call(PUT, self._backend.put, list(slots), list(slots.values()), group)
            refused = Code.FULL if not all(done) and self._call(PUT, self._backend.is_full) else Code.FAILED
            codes |= {name: Code.OK if ok else refused for name, ok in zip(slots, done, strict=True)}
        for name, code in codes.items():
            if code is Code.OK:
                self._seen.learn(name)
        if not {Code.FAILED, Code.FULL}.isdisjoint(codes.values()):
            self._seen.forget()
        return codes

    def _clear(self, name: str) -> bool:
        """Removes wrong bytes. A backend that cannot remove may overwrite them: the next read says."""
        if not self._backend.can_remove or self._call(PUT, self._backend.remove, name):
            self._seen.removed(name)
            return True
        return False

    # Reads

    def get(self, jobs: Sequence[Job]) -> Iterator[list[Code]]:
        """Reads objects into units of the arena, and yields the codes so far after each batch.

        A batch with a missing or a wrong one is the last: a point needs all. The rest is MISSING then; behind a wrong
        one it is in doubt, for ``survey``.
        """
        codes: list[Code] = []
        names = [job.name for job in jobs]
        told = 0  # names that the backend expects
        for batch in _batches(jobs):
            if soon := names[told : len(codes) + BATCH + AHEAD]:
                self._call(GET, self._backend.expect, soon)
                told += len(soon)
            codes += self._get(batch)
            if any(codes):
                if WRONG.intersection(codes):
                    self._doubtful.extend(names[len(codes) :])
                codes += [Code.MISSING] * (len(jobs) - len(codes))
                self._seen.forget()
            yield codes
            if len(codes) == len(jobs):
                return

    def in_doubt(self) -> bool:
        """Returns whether there is something to survey."""
        return bool(self._doubtful)

    def survey(self) -> None:
        """Reads the next objects in doubt, for the wrong ones; else a load finds, and has mended, a batch of them."""
        names = [self._doubtful.popleft() for _ in range(min(BATCH, len(self._doubtful)))]
        slots = range(BATCH, BATCH + len(names))
        for slot, name, code in zip(slots, names, self._read(names, slots), strict=True):
            self._judged(name, self._proved(name, slot) if code is Code.OK else code)

    def _get(self, batch: Sequence[Job]) -> list[Code]:
        slots = range(BATCH, BATCH + len(batch))
        told = self._read([job.name for job in batch], slots)
        return [
            self._take(slot, job) if code is Code.OK else self._judged(job.name, code)
            for slot, job, code in zip(slots, batch, told, strict=True)
        ]

    def _read(self, names: Sequence[str], slots: Sequence[int]) -> list[Code]:
        for slot in slots:  # a backend that reads nothing, and says that it did, finds no seal of its own
            self._ring.seal(slot)[:] = 0
        return self._call(GET, self._backend.get, names, slots)

    def _take(self, slot: int, job: Job) -> Code:
        """Copies a slot to the arena and checks it there; the slot may be written by a late read at any time."""
        raw = self._ring.seal(slot).tobytes()
        unit = self._units[job.unit]
        np.copyto(unit, self._ring.payload(slot))
        return self._judged(job.name, check(raw, unit, job.name, self._secret))

    def _judged(self, name: str, code: Code) -> Code:
        if code in WRONG:
            self._seen.spoil(name)
        return code

    # Questions

    def chain(self, question: Question, ids: Any) -> list[bytes]:
        """Returns the key of each page. ids: of ``question``, int64."""
        raw = np.ascontiguousarray(ids, np.int64).view(np.uint8).data
        step, more = 8 * question.page, 8 * question.ahead
        pages = (raw[start : start + step + more] for start in range(0, question.count * step, step))
        return chain(hasher(self._secret), question.root, pages)

    def ask(self, keys: Sequence[bytes], have: int, first: int) -> int:
        """Returns the last end of pages behind ``have`` whose window and pages are stored; 0: there is none.

        keys: of the prompt's pages. first: pages whose objects need not be there. All are asked for, though: a store
        takes it for use.
        """
        later = range(have + 1, len(keys) + 1)
        written = self._there([object_name(keys[end - 1], self._in_tail) for end in later])
        ends = [end for end, there in zip(later, written, strict=True) if there]  # the last unit was written last
        if not ends:
            return 0
        there = self._there([object_name(key, PAGE) for key in keys[: ends[-1]]])
        pages = [*([True] * first), *there[first:], False]
        whole = pages.index(False)
        for end in reversed([end for end in ends if end <= whole]):
            if all(self._there([object_name(keys[end - 1], part) for part in range(1, self._in_tail)])):
                return end
        return 0

    def _there(self, names: Sequence[str]) -> list[bool]:
        told = self._exists(GET, names)
        return [self._readable(name) for name in names] if told is None else told

    def _readable(self, name: str) -> bool:
        """Asks a backend that cannot say what it has: reads the object into a slot."""
        code = self._read([name], [BATCH])[0]
        return code is Code.OK and self._judged(name, self._proved(name, BATCH)) is Code.OK

    def _proved(self, name: str, slot: int) -> Code:
        """Checks an object where it was read, which a late read may spoil: not for units."""
        return check(self._ring.seal(slot).tobytes(), self._ring.payload(slot), name, self._secret)

    def _exists(self, lane: int, names: Sequence[str]) -> list[bool] | None:
        found: list[bool] = []
        for start in range(0, len(names), MOST_ASKED):
            told = self._call(lane, self._backend.exists, names[start : start + MOST_ASKED])
            if told is None:
                return None
            found += told
        return found

    def _call(self, lane: int, call: Callable[..., Any], *arguments: Any) -> Any:
        done = False
        self._beat(lane)
        try:
            answer = call(*arguments)
            done = True
        finally:
            self._beat(lane)
            if not done:
                self._seen.forget()
        return answer


def _batches(jobs: Sequence[Job]) -> Iterator[Sequence[Job]]:
    for start in range(0, len(jobs), BATCH):
        yield jobs[start : start + BATCH]
