"""Runs a HiSparse decode server at random: rows are kept, adopted and freed, on the host and on the device.

The engine's coordinator, allocator and queue do it; hypothesis chooses the requests that come, decode, are
retracted, and come back or do not. After every step each page of the host pool is in exactly one place.
"""

from collections import Counter
from typing import Any

import oracle
import torch
from hisparse_world import HOT, ROWS, HiSparseWorld
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_dsv4.engine.retract.stale import changing_weights

MOST = 1400  # tokens that a request may come to
PAGE = 256
WHICH = st.integers(0, 11)  # an entry of a list, modulo its length
LENGTHS = st.integers(1, 300) | st.integers(250, 900) | st.sampled_from((4, 255, 256, 257, 260, 512, 768))

done: Counter[str] = Counter()  # what the machine did; "steps" counts checks of everything


class HiSparseLives(RuleBasedStateMachine):
    @initialize(reserve=st.integers(1, 24), hot=st.integers(4, 20))
    def start(self, reserve: int, hot: int) -> None:
        self.world = HiSparseWorld(hot_pages=hot)
        self.world.kept.reserve = min(reserve, self.world.kept.reserve)
        oracle.fill(self.world.pool, reserve)
        self.running: list[Any] = []
        self.bytes: dict[str, dict[Any, bytes]] = {}  # of those that are away
        self.came = 0

    def teardown(self) -> None:
        for req in self.running:
            self.world.finish(req)
        for req in list(self.world.queue.retracted_queue):
            self.world.abort(req.rid)
        self.world.nothing_held()
        for name, count in self.world.host.counters.fallbacks.items():
            done[name] += count

    # ------------------------------------------------------------------------------------ what is there

    def _free_pages(self) -> int:
        return int(self.world.allocator.logical_attn_allocator.full_available_size()) // PAGE

    def _swa_pages(self) -> int:
        return int(self.world.allocator.swa_available_size()) // PAGE

    def _fits(self, tokens: int) -> bool:
        hot = self.world.allocator.hisparse_attn_allocator.available_size() >= HOT + ROWS
        room = self._free_pages() > tokens // PAGE and self._swa_pages() >= 3
        return hot and room and self.world.table.available_size() > 0

    # ----------------------------------------------------------------------------------- what happens

    @precondition(lambda self: self._fits(1))
    @rule(tokens=LENGTHS)
    def arrive(self, tokens: int) -> None:
        tokens = tokens if self._fits(tokens) else 100
        self.came += 1
        req = self.world.admit(tokens, f"{self.came:05d}", prompt=tokens)
        self.running.append(req)
        done["arrive"] += 1

    @precondition(lambda self: self.running and self._free_pages() and self._swa_pages())
    @rule(which=WHICH, steps=st.integers(1, 12), ahead=st.booleans())
    def decode(self, which: int, steps: int, ahead: bool) -> None:
        """Decodes; ahead: at the end a step is prepared whose token is not known yet."""
        req = self.running[which % len(self.running)]
        if req.seqlen + steps > MOST:
            return
        for _ in range(steps):
            self.world.step(req)
        if ahead and self.world.committed(req) == req.seqlen - 1:
            self.world._prepare(req)
        self.world.check_history(req)
        done["decode"] += 1

    @precondition(lambda self: self.running)
    @rule(which=WHICH)
    def retract(self, which: int) -> None:
        req = self.running.pop(which % len(self.running))
        before = self.world.read(req)
        self.world.retract(req)
        self.world.queue.add(req, is_retracted=True)
        if self.world.copy_of(req) is None:
            self.world.queue.pop_held()
            done["recompute"] += 1
        else:
            self.bytes[req.rid] = before
            done["retract"] += 1

    @precondition(lambda self: len(self.running) > 1)
    @rule(which=WHICH)
    def retract_more(self, which: int) -> None:
        self.retract(which)

    @precondition(lambda self: self.world.queue.retracted_queue)
    @rule(poison=st.booleans())
    def resume(self, poison: bool) -> None:
        if poison and not self.running:
            oracle.poison(self.world.pool)
        for req in self.world.resume():
            self.running.append(req)
            before = self.bytes.pop(req.rid)
            now = self.world.read(req)
            if now != before:
                oracle.compare(before, now)
            self.world.check_history(req)
            done["resume"] += 1

    @precondition(lambda self: self.world.queue.retracted_queue)
    @rule(which=WHICH)
    def abort(self, which: int) -> None:
        waiting = self.world.queue.retracted_queue
        self.world.abort(waiting[which % len(waiting)].rid)
        done["abort"] += 1

    @precondition(lambda self: len(self.running) > 2)
    @rule(which=WHICH, paused=st.booleans())
    def leave(self, which: int, paused: bool) -> None:
        """Ends a request, by a finish or a pause that retracts without a copy."""
        req = self.running.pop(which % len(self.running))
        if paused:
            self.world.retract(req, offload_kv=False)
        else:
            self.world.finish(req)
        done["pause" if paused else "finish"] += 1

    @precondition(lambda self: len(self.world.queue.retracted_queue) > 1)
    @rule()
    def other_weights(self) -> None:
        """Changes the weights; waiting requests are computed again."""
        with changing_weights():
            pass
        assert self.world.resume() == [] and not self.world.queue.retracted_queue
        self.world.queue.queue.clear()
        done["other weights"] += 1

    # ------------------------------------------------------------------------------------- what holds

    @invariant()
    def every_page_is_in_one_place(self) -> None:
        if not hasattr(self, "world"):
            return
        world, pages = self.world, self.world.host_pages()
        assert sum(pages.values()) == world.host_pool.num_host_pages, pages
        assert pages["kept"] <= world.kept.reserve
        copies = [world.copy_of(req) for req in world.queue.retracted_queue]
        assert pages["kept"] == sum(len(copy.lease.detached.pages) for copy in copies)
        assert world.host.counters.kept_bytes == pages["kept"] * world.kept.page_bytes
        table = world.coordinator.req_to_host_pool
        used = torch.cat([table[table >= 0], *(copy.lease.detached.slots for copy in copies)])
        assert len(used.unique()) == len(used), "a row of the host pool has two owners"
        hot = world.allocator.hisparse_attn_allocator
        assert hot.size - hot.available_size() == len(self.running) * (HOT + ROWS), "hot rows"
        done["steps"] += 1
