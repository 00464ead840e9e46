"""Plays a prefill server and a decode server over one store in memory."""

from __future__ import annotations

import random

from decode_world import DecodeWorld
from memory_store import MemoryClient, MemoryStore

from sglang_dsv4.engine import store_start
from sglang_dsv4.engine.decode.points import points_of
from sglang_dsv4.testing import demo_sessions

PAGE, VOCABULARY = 256, 50_000
SPEC = {"pages": 72, "swa_pages": 24, "ratios": (0, 4, 128)}


def shared_store(monkeypatch):
    """Returns a store that the servers started from now on share."""
    found = MemoryStore()
    for name, text in {"DSV4_STORE": "/nowhere", "DSV4_STORE_MODEL": "m", "DSV4_HOST_GB": "0.05"}.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr(store_start, "config_of", lambda settings: {})

    def made(settings, config, sessions, memory):
        return MemoryClient(found, memory)

    monkeypatch.setattr(store_start, "_client", made)
    return found


class Pair:
    """A prefill server, played by a plain one, and a decode server."""

    def __init__(self, decode=DecodeWorld, room=None, **spec):
        """Starts both. room: fields of the decode server's spec alone."""
        self.spec, self.rng = SPEC | spec, random.Random(5)
        self.prefill = demo_sessions.server("0.05", **self.spec)
        self.with_decode(decode(**self.spec | (room or {})))

    def with_decode(self, world):
        """Takes another decode server."""
        self.decode, self.points = world, points_of(world.allocator)

    def tokens(self, count):
        return [self.rng.randrange(VOCABULARY) for _ in range(count)]

    def arrived(self, prompt, answer, **arguments):
        """Lets a prompt be prefilled, and its transfer arrive; the answer has so many tokens."""
        self.prefill.submit(prompt, max_new=1, **arguments)
        self.prefill.run()
        self.settle()
        return self.decode.submit(prompt, max_new=answer, **arguments)

    def settle(self):
        """Runs passes until all that is written is in the store."""
        tier = demo_sessions.parts_of(self.prefill)[1].tier
        for _ in range(8):
            tier.end_pass()
            self.points.end_pass()
        self.points.host.memory.check_integrity()
        self.points.sessions.check_integrity()
        assert not tier.units() and not self.points.tier.units()

    def next_turns(self, reqs, **arguments):
        """Sends the next turns to a prefill server that has nothing but the store; returns their cached tokens."""
        self.prefill = demo_sessions.server("0.05", **self.spec)
        found = []
        for req in reqs:
            words = [*req.origin_input_ids, *req.output_ids, *self.tokens(9)]
            found.append(self.prefill.submit(words, max_new=2, **arguments))
            self.prefill.run()
        return [req.cached_tokens for req in found]

    def next_turns_apart(self, reqs):
        """Sends the next turns, eight at a time, to a prefill server that forgets all behind them."""
        self.prefill, found = demo_sessions.server("0.05", **self.spec), []
        for at in range(0, len(reqs), 8):
            words = [[*req.origin_input_ids, *req.output_ids_through_stop] for req in reqs[at : at + 8]]
            found += [self.prefill.submit([*each, *self.tokens(9)], max_new=2) for each in words]
            self.prefill.run(check=False)
            assert self.prefill.flush()
        return [req.cached_tokens for req in found]

    def whole(self, req):
        """The tokens up to the last page end that the decode server computed."""
        return (req.seqlen - 1 - bool(self.decode.spec.drafts)) // PAGE * PAGE

    def nothing_left(self):
        assert self.points.sessions.points == 0
        assert self.points.host.memory.pool.held == 0 == self.points.host.memory.leaks
        assert not self.points.host.counters.fallbacks
