"""Runs a store of sessions at random, beside a list of all that it should hold; the oracle reads every byte.

A prompt's pages each repeat one token. The bytes of a page are noise, another at each computation, so that a load shows
which computation was saved.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import oracle
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_dsv4.cache.family import Group
from sglang_dsv4.errors import HostMemoryExhausted, IndexMismatch
from sglang_dsv4.hostmem.memory import HostCopy
from sglang_dsv4.pools.copy_service import CopyService, ServerContext
from sglang_dsv4.pools.describe import describe
from sglang_dsv4.sessions.hints import Hints, Rank
from sglang_dsv4.sessions.store import SessionStore
from sglang_dsv4.settings import Settings
from stateful.pool import PAGE, Device

Rows = dict[oracle.RowKey, bytes]
Prompt = tuple[str, tuple[int, ...]]  # a namespace, a token a page, and the token behind them

PROMPTS = st.tuples(st.sampled_from(("a", "b")), st.lists(st.integers(0, 1), min_size=2, max_size=5).map(tuple))
HINTS = st.just(Hints()) | st.builds(
    Hints,
    st.sampled_from((Rank.DEMOTED, Rank.PLAIN, Rank.RETAINED, Rank.PINNED)),
    st.integers(-1, 1),
    st.none() | st.integers(0, 3).map(float),
)
ENOUGH = 64

done: Counter[str] = Counter()  # what the machine did; "steps" counts the rules it ran


@dataclass(eq=False)
class Saved:
    """Holds the bytes of a page, as its first save read them."""

    rows: Rows


@dataclass(eq=False)
class Kept:
    """Models a point."""

    prompt: Prompt
    way: list[Any]  # the keys of its pages
    window: Rows
    rank: Rank = Rank.PLAIN
    priority: int = 0
    ends: float | None = None
    placed: int = 0  # when its hints were taken
    used: int = 0


class Search:
    """Plays the device's answer to a search, which comes later."""

    def __init__(self, right: bool) -> None:
        self.right = right

    def check(self, late: bool = False) -> None:
        if not self.right:
            raise IndexMismatch("played")


class Copier:
    """Answers with the real copier's bytes, and with a search that is right or not."""

    def __init__(self, real: Any, memory: Any) -> None:
        self.real, self.memory, self.right = real, memory, True

    def save(self, copy: HostCopy, request: Any) -> Search:
        self.real.save(copy, request)
        if not self.right:  # it read any rows
            for group, first in ((Group.PAGED, copy.first_page), (Group.WINDOW, 0)):
                for block in copy.blocks[group][first:].tolist():
                    start = self.memory.offset(group, block)
                    self.memory.arena.region[start : self.memory.offset(group, block + 1)] = 0xEE
        return Search(self.right)

    def load(self, copy: HostCopy, request: Any, first_page: int) -> None:
        self.real.load(copy, request, first_page)


class StoreLives(RuleBasedStateMachine):
    """Keeps, loads, evicts, and asks the list whether that was right."""

    device: Device

    @initialize(
        blocks=st.integers(1, 9), windows=st.integers(1, 4), most=st.none() | st.integers(1, 9), pairs=st.booleans(),
        verify=st.sampled_from((False, False, True)),
    )  # fmt: skip
    def start(self, blocks: int, windows: int, most: int | None, pairs: bool, verify: bool) -> None:
        """Starts a store with that many blocks, that may hold the bytes of ``most`` pages."""
        self.device.start()
        self.pool, self.allocator = self.device.pool, self.device.allocator
        self.totals = {Group.PAGED: blocks, Group.WINDOW: windows, Group.REQUEST: 2}
        self.weights, self.now, self.turn, self.pairs, self.verify = 1, 0.0, 0, pairs, verify
        context = ServerContext(weight_version=lambda: self.weights)
        self.host = CopyService(describe(self.pool), self.totals, Settings(transfer="torch", verify=verify), context)
        self.memory = self.host.memory
        self.copier = self.host._copier = Copier(self.host._copier, self.memory)
        strides = self.device.strides
        self.stride = {group: strides[group] for group in Group}
        self.most = None if most is None else most * strides[Group.PAGED] + 2 * strides[Group.WINDOW]
        self.store = SessionStore(self.host, lambda: self.allocator.full_to_swa_index_mapping, pairs, self.most)
        self.store._clock = lambda: self.now
        self.pages: dict[Any, Saved] = {}
        self.points: list[Kept] = []
        self.retracts: list[HostCopy] = []
        self.faults: list[Saved | Kept] = []  # at which a save went wrong, not settled
        self.seed = 0

    # ------------------------------------------------------------------------------------- the list

    def _way(self, prompt: Prompt) -> list[Any]:
        namespace, values = prompt
        return [(namespace, values[: end + self.pairs]) for end in range(1, len(values))]

    def _tokens(self, prompt: Prompt) -> array[int]:
        return array("q", [value for value in prompt[1] for _ in range(PAGE)])[: (len(prompt[1]) - 1) * PAGE + 1]

    def _find(self, way: list[Any]) -> Kept | None:
        return next((point for point in self.points if point.way == way), None)

    def _order(self) -> list[Kept]:
        return sorted(self.points, key=lambda point: (point.rank, point.priority, point.used))

    def _held(self, group: Group) -> int:
        return sum(len(copy.blocks[group]) for copy in self.retracts)

    def _free(self, group: Group) -> int:
        mine = {Group.PAGED: len(self.pages), Group.WINDOW: len(self.points), Group.REQUEST: 0}
        return self.totals[group] - self._held(group) - mine[group]

    def _bytes(self) -> int:
        return len(self.pages) * self.stride[Group.PAGED] + len(self.points) * self.stride[Group.WINDOW]

    def _prune(self, used: list[Any] | None = None) -> None:
        needed = {key for point in self.points for key in point.way} | set(used or ())
        self.pages = {key: page for key, page in self.pages.items() if key in needed}

    def _evict_until(self, enough: Callable[[], bool], used: list[Any] | None = None) -> None:
        while not enough() and self.points:
            self.points.remove(self._order()[0])
            self._prune(used)
            done["evicted"] += 1

    def _expire(self) -> None:
        for point in sorted(self.points, key=lambda point: point.placed):
            if point.ends is not None and point.ends <= self.now:
                point.rank, point.priority, point.ends = Rank.EXPIRED, 0, None
                point.used = point.placed = self._next()
                done["expired"] += 1

    def _next(self) -> int:
        self.turn += 1
        return self.turn

    def _place(self, point: Kept, hints: Hints) -> None:
        point.rank, point.priority = hints.rank, hints.priority
        if hints.rank is Rank.PINNED:
            others = [other for other in self.points if other.rank is Rank.PINNED and other is not point]
            pinned = [point, *others]
            pages, windows = sum(len(other.way) for other in pinned), len(pinned)
            if 2 * pages > self.totals[Group.PAGED] or 2 * windows > self.totals[Group.WINDOW]:
                point.rank = Rank.RETAINED
                done["too many pins"] += 1
        point.ends = None if hints.ttl_seconds is None else self.now + hints.ttl_seconds
        point.placed = point.used = self._next()

    # ------------------------------------------------------------------------------------- keep and load

    def _slots(self, pages: int) -> torch.Tensor:
        slots = oracle.resume(self.allocator, pages * PAGE)
        for (family, layer), buffer in self.device.buffers.items():
            if not oracle.FAMILIES[family].ring or oracle.FAMILIES[family].by == "window":
                rows = self.device.places(family, layer, slots, 0)
                self.seed += 1
                noise = torch.randint(0, 256, (len(rows), buffer.shape[1]), generator=_seeded(self.seed))
                buffer[rows] = noise.to(torch.uint8)
        return slots

    def _read(self, slots: torch.Tensor) -> Rows:
        return oracle.read(self.pool, slots, len(slots), 0)

    @rule(prompt=PROMPTS, hints=HINTS, how=st.sampled_from(("right", "right", "right", "wrong", "refused")))
    def keep(self, prompt: Prompt, hints: Hints, how: str) -> None:
        """Keeps a prompt's last page end. how: its search finds it at fault, or the save is refused."""
        way = self._way(prompt)
        slots = self._slots(len(way))
        rows = self._read(slots)
        if how == "refused":
            oracle.evict(self.allocator, slots, len(slots))
        self.copier.right = how != "wrong"
        before, held = self.memory.arena.region.clone(), self._held_blocks()
        self.device.remember()
        point = self.store.keep(prompt[0], self._tokens(prompt), slots.to(torch.int32), hints)
        self.device.assert_unchanged()
        still = self._held_blocks()
        for group, block in (at for holder, at in held.items() if holder in still):
            here = slice(self.memory.offset(group, block), self.memory.offset(group, block + 1))
            assert torch.equal(before[here], self.memory.arena.region[here]), f"{group.value} block {block} was written"
        self.allocator.free(slots)
        self._model_keep(prompt, way, rows, hints, how, point)
        self._did(f"keep {how}")

    def _held_blocks(self) -> dict[Any, tuple[Group, int]]:
        """Returns the blocks of copies, pages and points, by their holder."""
        held: dict[Any, tuple[Group, int]] = {}
        for copy in self.retracts:
            held |= {
                (copy.lease.number, group, int(block)): (group, block)
                for group in Group
                for block in copy.blocks[group]
            }
        for page in self.store._trie.pages():
            held[page] = Group.PAGED, page.block
            if page.point is not None:
                held[page.point] = Group.WINDOW, page.point.window
        return held

    def _model_keep(self, prompt: Prompt, way: list[Any], rows: Rows, hints: Hints, how: str, point: Any) -> None:
        self._expire()
        kept = self._find(way)
        if kept is not None:
            assert point is not None and point.tokens == PAGE * len(way)
            self._place(kept, hints)
            done["kept already"] += 1
            return
        known = [key for key in way if key in self.pages]
        new = len(way) - len(known)

        def fits() -> bool:
            room = new <= self._free(Group.PAGED) and self._free(Group.WINDOW) >= 1
            cost = new * self.stride[Group.PAGED] + self.stride[Group.WINDOW]
            return room and (self.most is None or self._bytes() + cost <= self.most)

        if self._could_fit(len(known), new):
            self._evict_until(fits, known)
        else:
            done["too large"] += 1
        if not fits() or how == "refused" or (how == "wrong" and self.verify):
            assert point is None
            self._prune()
            return
        assert point is not None
        for number, key in enumerate(way):
            page = {where: value for where, value in rows.items() if _is_page(where) and where[2] // PAGE == number}
            self.pages.setdefault(key, Saved(page))
        kept = Kept(prompt, way, {where: value for where, value in rows.items() if not _is_page(where)})
        self.points.append(kept)
        self._place(kept, hints)
        if how == "wrong":
            self.faults.append(self.pages[way[len(known)] if new else way[-1]])

    def _could_fit(self, known: int, new: int) -> bool:
        """Returns whether it fits when all other points are evicted."""
        pages = self.totals[Group.PAGED] - self._held(Group.PAGED)
        windows = self.totals[Group.WINDOW] - self._held(Group.WINDOW)
        cost = (known + new) * self.stride[Group.PAGED] + self.stride[Group.WINDOW]
        return known + new <= pages and windows >= 1 and (self.most is None or cost <= self.most)

    @precondition(lambda self: self.points)
    @rule(which=st.integers(0, 11), first=st.integers(0, 4))
    def load(self, which: int, first: int) -> None:
        """Loads a point behind pages that are there already; every byte is the one that was saved."""
        self._settle()
        if not self.points:
            return
        kept = self.points[which % len(self.points)]
        point = self.store.longest(kept.prompt[0], self._tokens(kept.prompt), ENOUGH * PAGE)
        assert point is not None
        count, first = len(kept.way), min(first, len(kept.way) - 1)
        slots = oracle.resume(self.allocator, count * PAGE)
        before = oracle.snapshot(self.pool)
        nbytes = self.store.load(point, slots, first)
        assert nbytes == (count - first) * self.stride[Group.PAGED] + self.stride[Group.WINDOW]
        allowed = oracle.may_change(self.pool, slots[first * PAGE :], (count - first) * PAGE, 0)
        for (family, layer), mask in allowed.items():
            if oracle.FAMILIES[family].by == "slot":
                mask[:] = False
            del layer
        oracle.assert_only_changed(before, self.pool, allowed)
        wanted = dict(kept.window)
        for key in kept.way[first:]:
            wanted |= self.pages[key].rows
        got = self._read(slots)
        oracle.compare(wanted, {where: got[where] for where in got if not _is_page(where) or where[2] >= first * PAGE})
        self.allocator.free(slots)
        kept.used = self._next()
        self._did("load")

    @rule(prompt=PROMPTS, limit=st.integers(0, 4 * PAGE + 2))
    def look_up(self, prompt: Prompt, limit: int) -> None:
        self._settle()
        way = self._way(prompt)[: max(0, limit - self.pairs) // PAGE]
        best = next((point for end in range(len(way), 0, -1) if (point := self._find(way[:end]))), None)
        found = self.store.longest(prompt[0], self._tokens(prompt), limit)
        assert (None if found is None else found.tokens) == (None if best is None else PAGE * len(best.way))
        self._did("look up")

    # ------------------------------------------------------------------------------------- what else happens

    @rule(tokens=st.integers(1, 9 * PAGE))
    def retract(self, tokens: int) -> None:
        """Makes a copy of a retract, which takes the blocks of points where none are free."""
        needs = self.memory.blocks_for(tokens)
        mine = {Group.PAGED: len(self.pages), Group.WINDOW: len(self.points), Group.REQUEST: 0}
        if all(self._free(group) + mine[group] >= count for group, count in needs.items()):
            self._evict_until(lambda: all(self._free(group) >= count for group, count in needs.items()))
        fits = all(self._free(group) >= count for group, count in needs.items())
        try:
            self.retracts.append(self.memory.allocate(tokens, self.host.buffers.geometry))
            assert fits
        except HostMemoryExhausted:
            assert not fits
        self._did("retract")

    @precondition(lambda self: self.retracts)
    @rule(which=st.integers(0, 11))
    def resume(self, which: int) -> None:
        self.retracts.pop(which % len(self.retracts)).release()
        self._did("resume")

    # Rules are drawn evenly: what matters most has several names, and what empties the store shares one.

    @rule(prompt=PROMPTS, hints=HINTS)
    def keep_more(self, prompt: Prompt, hints: Hints) -> None:
        self.keep(prompt, hints, "right")

    @precondition(lambda self: self.points)
    @rule(which=st.integers(0, 11), first=st.integers(0, 4))
    def load_more(self, which: int, first: int) -> None:
        self.load(which, first)

    @rule(
        what=st.sampled_from(("settle", "settle", "wait", "wait", "wait", "weights", "flush")),
        seconds=st.integers(1, 3),
    )
    def disturb(self, what: str, seconds: int) -> None:
        getattr(self, f"_{what}")(seconds)
        self._did(what)

    def _wait(self, seconds: int) -> None:
        self.now += seconds

    def _settle(self, _: int = 0) -> None:
        """Begins the next pass: all that was built on a wrong save goes."""
        self.store.settle()
        for fault in self.faults:
            self.points = [point for point in self.points if fault not in [self.pages.get(key) for key in point.way]]
            done["found wrong"] += 1
            self._prune()
        self.faults = []

    def _weights(self, _: int) -> None:
        self._settle()
        self.weights += 1
        self.store.settle()
        self.points, self.pages = [], {}

    def _flush(self, _: int) -> None:
        self.store.clear("flush")
        self.points, self.pages = [], {}
        self._settle()

    def _did(self, what: str) -> None:
        done["steps"] += 1
        done[what] += 1

    # ------------------------------------------------------------------------------------- what must hold

    @invariant()
    def everything_is_right(self) -> None:
        if not hasattr(self, "store"):
            return
        self.memory.check_integrity()
        self.store.check_integrity()
        assert self.memory.leaks == 0
        for group, pool in self.memory.pools.items():
            assert pool.available == self._free(group) and pool.available + pool.held == pool.total
        assert self.store.points == len(self.points) and self.store.held_bytes == self._bytes()
        assert self.most is None or self._bytes() <= self.most
        assert [_named(point) for point in self._store_order()] == [
            (point.rank, point.priority, len(point.way) * PAGE) for point in self._order()
        ]
        pinned = [point for point in self.points if point.rank is Rank.PINNED]
        assert 2 * len({key for point in pinned for key in point.way}) <= self.totals[Group.PAGED]
        assert 2 * len(pinned) <= self.totals[Group.WINDOW]

    def _store_order(self) -> Iterator[Any]:
        for order in sorted(self.store._order):
            assert self.store._order[order], "an empty place in the order: clients choose its number"
            yield from self.store._order[order]

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        try:
            self.store.clear("flush")
            for copy in self.retracts:
                copy.release()
            self.memory.check_integrity()
            assert all(pool.held == 0 for pool in self.memory.pools.values())
            assert not list(self.store._trie.pages()) and not self.store._timed
            assert self.store.counters.points == self.store.counters.held_bytes == 0
            self.host.close()
        finally:
            self.allocator.clear()


def _is_page(where: oracle.RowKey) -> bool:
    return oracle.grows(where[0])


def _named(point: Any) -> tuple[Any, ...]:
    return *point.order, point.tokens


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
