"""Lets requests come, grow and finish on the device; retracts, resumes and aborts them."""

import oracle
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from sglang_dsv4.errors import HostMemoryExhausted
from stateful.model import LENGTHS, WHICH, Requests, Running, Saved
from stateful.pool import PAGE, SPEC, pages_of, tail_pages

BOUNDARIES = st.sampled_from((4, 8, 128, 256))
STEPS = st.integers(1, 8) | st.integers(1, 200) | st.tuples(BOUNDARIES, st.integers(-1, 1))


class Steps(Requests):
    # ------------------------------------------------------------------------- requests on the device

    @precondition(lambda self: self._fits(1))
    @rule(tokens=LENGTHS, which=WHICH, tail=st.booleans())
    def admit(self, tokens: int, which: int, tail: bool) -> None:
        self._admit(tokens, which, tail)
        self._did("admit")

    @precondition(lambda self: any(self._room(r) for r in self.running))
    @rule(which=WHICH, step=STEPS)
    def extend(self, which: int, step: int | tuple[int, int]) -> None:
        """Extends by some tokens, or to just before, onto or just behind a page, block or ring boundary."""
        choices = [r for r in self.running if self._room(r)]
        running = choices[which % len(choices)]
        first = running.tokens
        tokens = step if isinstance(step, int) else max(1, -first % step[0] + step[1])
        oracle.grow(self.allocator, running.request, min(tokens, self._room(running)))
        self._write(running, first)
        self._did("extend")

    @precondition(lambda self: any(r.evictable for r in self.running))
    @rule(which=WHICH)
    def evict(self, which: int) -> None:
        choices = [r for r in self.running if r.evictable]
        running = choices[which % len(choices)]
        running.request.n = running.tokens
        oracle.evict_out_of_window(self.allocator, running.request)
        running.evicted += running.evictable
        self._did("evict")

    @precondition(lambda self: len(self.running) > 1)
    @rule(which=WHICH)
    def finish(self, which: int) -> None:
        self._leave(self.running[which % len(self.running)])
        self._did("finish")

    @precondition(lambda self: "scribble" in self.news and self._fits(1))
    @rule(which=WHICH, pages=st.integers(1, SPEC.pages))
    def scribble(self, which: int, pages: int) -> None:
        """Overwrites whole pages and rings with a request on the pages freed last, which then leaves."""
        tokens = PAGE * pages
        while not self._fits(tokens):
            tokens -= PAGE
        running = Running(oracle.new_request(self.allocator, self._take_slot(which)))
        request = running.request
        request.slots = oracle.resume(self.allocator, tokens)
        self.running.append(running)
        for (family, layer), buffer in self.device.buffers.items():
            rows = self.device.places(family, layer, request.slots, request.req_slot)
            buffer[rows] = self._noise(len(rows) * buffer.shape[1]).view(-1, buffer.shape[1])
        self._leave(running)
        self._did("scribble", quiet="scribble")

    # --------------------------------------------------------------------------------- host copies

    @precondition(lambda self: self.running)
    @rule(which=WHICH, in_flight=st.booleans())
    def retract(self, which: int, in_flight: bool) -> None:
        """Saves all tokens but the one in flight, as the engine does (seqlen - 1), and leave the device."""
        running = self.running[which % len(self.running)]
        tokens = max(1, running.tokens - in_flight)
        room, held = self._host_room(tokens), self.memory.held_bytes
        self.device.remember()
        if not room:
            with pytest.raises(HostMemoryExhausted, match="DSV4_HOST_GB"):
                self._save(running, tokens)
            self.device.assert_unchanged()
            assert self.memory.held_bytes == held
            self._did("exhausted", quiet="save")
            return
        copy = self._save(running, tokens)
        self.device.assert_unchanged()
        assert copy.tokens == tokens
        assert not copy.released
        assert self.memory.held_bytes == held + copy.nbytes
        self.saved.append(Saved(copy, oracle.read(self.pool, running.slots, tokens, running.request.req_slot)))
        self._leave(running)
        self._did("retract")

    @precondition(lambda self: self._fitting())
    @rule(which=WHICH, slot=WHICH)
    def resume(self, which: int, slot: int) -> None:
        """Resumes on other pages and another slot with the same bytes; nothing else on the device changes."""
        saved = self._fitting()[which % len(self._fitting())]
        tokens, copy, units = saved.tokens, saved.copy, list(saved.copy.units)
        request = oracle.Request(oracle.resume(self.allocator, tokens), self._take_slot(slot), tokens)
        self.running.append(Running(request, pages_of(tokens) - tail_pages(tokens)))
        self.device.remember()
        self.pool.load_cpu_copy(copy, request.slots, req_pool_index=request.req_slot)
        self.saved.remove(saved)
        rows = oracle.read(self.pool, request.slots, tokens, request.req_slot)
        if rows != saved.rows:
            oracle.compare(saved.rows, rows)  # names the byte
        self.device.assert_only_changed_at(request.slots, request.req_slot)
        assert oracle.cleared_ring_ok(self.pool, request.req_slot, tokens)
        assert copy.released
        if copy.lease.used_by is not None:
            self.reading.append((copy.lease.used_by, units))
        self.consumed = copy
        self._did("resume")

    # Rules are drawn evenly, and an example goes without some of them: what matters most has several names.

    @precondition(lambda self: self._fits(1))
    @rule(tokens=LENGTHS, which=WHICH, tail=st.booleans())
    def admit_more(self, tokens: int, which: int, tail: bool) -> None:
        self.admit(tokens, which, tail)

    @precondition(lambda self: self.running)
    @rule(which=WHICH, in_flight=st.booleans())
    def retract_more(self, which: int, in_flight: bool) -> None:
        self.retract(which, in_flight)

    @precondition(lambda self: self._fitting())
    @rule(which=WHICH, slot=WHICH)
    def resume_more(self, which: int, slot: int) -> None:
        self.resume(which, slot)

    @precondition(lambda self: self.saved)
    @rule(which=WHICH, how=st.sampled_from(("abort", "abort twice", "drop")))
    def abort(self, which: int, how: str) -> None:
        """Aborts a retracted request. A handle that dies unreleased is counted as a leak."""
        copy = self.saved.pop(which % len(self.saved)).copy
        if how == "drop":
            self.leaks += 1
        else:
            copy.release()
            if how == "abort twice":
                copy.release()
            assert copy.released
            self.consumed = copy
        self._did(how)

    @precondition(lambda self: self.reading)
    @rule()
    def time_passes(self) -> None:
        self.reading.pop(0)[0].passed = True
        self._did("time passes")
