"""A store in this process's memory, behind the interface of the client: it loses, lags, refuses and dies as told."""

from __future__ import annotations

import random
from collections import Counter, deque
from types import SimpleNamespace

from sglang_dsv4.store.client import Event, State
from sglang_dsv4.store.keys import chain, hasher, object_name
from sglang_dsv4.store.wire import PAGE, Code

GARBAGE = 0xA5


def played_time(clock, apart=0.0):
    """The tier's module ``time``, moved by hand and by its own waits."""

    def sleep(seconds):
        clock[0] += seconds

    return SimpleNamespace(monotonic=lambda: clock[0] + apart, sleep=sleep)


class MemoryStore:
    """Objects by name; it outlives the clients."""

    def __init__(self):
        self.objects, self.groups = {}, {}


class MemoryClient:
    """Answers ``at_once`` in the next poll, or some of what is open in each, in any order.

    trouble: the share of answers that are failures, and of polls in which all open tickets fail, as at a death.
    """

    def __init__(self, store, memory, seed=0, at_once=True, trouble=0.0, secret=None):
        self.store, self.memory, self.rng = store, memory, random.Random(seed)
        self.at_once, self.trouble, self.secret = at_once, trouble, secret
        self.state, self.breaker_open, self.last_error = State.UP, False, ""
        self.open, self.numbers, self.hangs, self.ended = {}, 0, False, True
        self.events, self.seconds = deque(), Counter().__getitem__

    def poll(self):
        if self.hangs:
            return ()
        if self.rng.random() < self.trouble / 4:
            self.fail()
        for ticket in list(self.open):
            if (self.at_once or self.rng.random() < 0.4) and self.open[ticket].stage != "found":
                self._step(ticket)
        events, self.events = list(self.events), deque()
        return events

    def fail(self):
        """The process died and was reaped."""
        for ticket, one in self.open.items():
            self.events.append(Event("failed", ticket, "died", one.units[one.back :]))
        self.open.clear()

    def write(self, pieces, group):
        self.store.groups.update((object_name(piece.key, piece.part), group) for piece in pieces)
        return self._open(stage="write", pieces=list(pieces), units=[piece.unit for piece in pieces])

    def ask(self, question, tokens):
        pages = (
            memoryview(tokens).cast("B")[8 * at * question.page : 8 * ((at + 1) * question.page + question.ahead)]
            for at in range(question.count)
        )
        keys = chain(hasher(self.secret), question.root, pages)
        return self._open(stage="ask", question=question, keys=keys, units=[])

    def load(self, ticket, spots):
        one = self.open.get(ticket)
        if one is None or self.rng.random() < self.trouble:
            return False
        one.stage, one.spots, one.units = "load", list(spots), [spot.unit for spot in spots]
        return True

    def drop(self, ticket):
        self.open.pop(ticket, None)

    def close(self, seconds):
        self.state = State.OFF
        return []

    def _open(self, **fields):
        if self.rng.random() < self.trouble:
            return None
        self.numbers += 1
        self.open[self.numbers] = SimpleNamespace(back=0, codes=[], **fields)
        return self.numbers

    def _step(self, ticket):
        one = self.open[ticket]
        if one.stage == "write":
            self._write(ticket, one)
        elif one.stage == "ask":
            end = self._end(one)
            self.events.append(Event("found", ticket, end, []))
            one.stage = "found"
            if not end:
                del self.open[ticket]
        else:
            self._load(ticket, one)

    def _write(self, ticket, one):
        if one.back < len(one.pieces):
            count = one.back + (len(one.pieces) - one.back if self.at_once else self.rng.randint(1, 8))
            for unit, part, key in one.pieces[one.back : count]:
                one.codes.append(Code.KNOWN if object_name(key, part) in self.store.objects else Code.OK)
                if self.rng.random() >= self.trouble:
                    self.store.objects[object_name(key, part)] = self.memory.bytes_of(unit).clone()
            back, one.back = one.units[one.back : count], min(count, len(one.units))
            self.events.append(Event("copied", ticket, one.back, back))
            return
        bad = self.rng.random() < self.trouble
        codes = [Code.FAILED] * len(one.units) if bad else one.codes
        self.events.append(Event("stored", ticket, bytes(codes), []))
        del self.open[ticket]

    def _end(self, one):
        question, tail = one.question, 1
        for at in range(question.count, question.have, -1):
            names = [object_name(key, PAGE) for key in one.keys[question.first : at]]
            while (name := object_name(one.keys[at - 1], tail)) in self.store.objects:
                names.append(name)
                tail += 1
            if tail > 1 and all(name in self.store.objects for name in names):
                return at
            tail = 1
        return 0

    def _load(self, ticket, one):
        codes = []
        for unit, part, page in one.spots:
            found = self.store.objects.get(object_name(one.keys[page], part))
            if found is None or self.rng.random() < self.trouble:
                self.memory.bytes_of(unit).fill_(GARBAGE)
                codes.append(Code.MISSING if found is None else Code.WRONG)
            else:
                self.memory.bytes_of(unit).copy_(found)
                codes.append(Code.OK)
        self.events.append(Event("loaded", ticket, bytes(codes), one.units))
        del self.open[ticket]
