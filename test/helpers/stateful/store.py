"""Runs a store of sessions at random, beside a list of all that it should hold; the oracle reads every byte.

A prompt's pages each repeat one token. The bytes of a page are noise, another at each computation, so that a load shows
which computation was saved.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, replace
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
TTLS = st.none() | st.integers(0, 3).map(float)
HINTS = (
    st.builds(Hints, prefetch=st.booleans())
    | st.just(Hints(Rank.DEMOTED))
    | st.builds(Hints, st.just(Rank.RETAINED), st.integers(-1, 1), TTLS)
    | st.builds(Hints, st.just(Rank.PINNED), st.just(0), TTLS)
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
    window: Rows | None  # None: the pages alone
    rank: Rank = Rank.PLAIN
    priority: int = 0
    ends: float | None = None
    placed: int = 0  # when its hints were taken
    used: int = 0


@dataclass(eq=False)
class Away:
    """Models a retracted request: its pages, some of which points have, too, and its other rows."""

    copy: HostCopy
    prompt: Prompt
    pages: list[Saved]
    rest: Rows
    tokens: int


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
            blocks_of = {Group.PAGED: copy.blocks_of(copy.first_page), Group.WINDOW: copy.blocks[Group.WINDOW]}
            for group, blocks in blocks_of.items():
                for block in blocks:
                    start = self.memory.offset(group, block)
                    self.memory.arena.region[start : self.memory.offset(group, block + 1)] = 0xEE
        return Search(self.right)

    def load(self, copy: HostCopy, request: Any, first_page: int) -> None:
        self.real.load(copy, request, first_page)


class StoreLives(RuleBasedStateMachine):
    """Keeps, loads, evicts, and asks the list whether that was right."""

    device: Device

    @initialize(
        blocks=st.integers(2, 16), windows=st.integers(2, 6), most=st.none() | st.integers(1, 9), pairs=st.booleans(),
        verify=st.sampled_from((False, False, True)),
    )  # fmt: skip
    def start(self, blocks: int, windows: int, most: int | None, pairs: bool, verify: bool) -> None:
        """Starts a store with that many blocks, that may hold the bytes of ``most`` pages."""
        self.device.start()
        self.pool, self.allocator = self.device.pool, self.device.allocator
        self.given: dict[Any, Any] = {}  # the last point that was kept behind a page
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
        self.store.order.clock = lambda: self.now
        self.pages: dict[Any, Saved] = {}
        self.points: list[Kept] = []
        self.retracts: list[Away] = []
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

    def _free(self, group: Group) -> int:
        if group is Group.PAGED:
            return self.totals[group] - len(
                {*self.pages.values(), *(page for away in self.retracts for page in away.pages)}
            )
        points = self._windows if group is Group.WINDOW else 0
        return self.totals[group] - len(self.retracts) - points

    @property
    def _windows(self) -> int:
        return sum(point.window is not None for point in self.points)

    def _bytes(self) -> int:
        return len(self.pages) * self.stride[Group.PAGED] + self._windows * self.stride[Group.WINDOW]

    def _prune(self, used: list[Any] | None = None) -> None:
        needed = {key for point in self.points for key in point.way} | set(used or ())
        self.pages = {key: page for key, page in self.pages.items() if key in needed}

    def _find_room(
        self, needs: dict[Group, int], used: list[Any] | None = None, most: int | None = None, last: Any = None
    ) -> bool:
        """Evicts as the store should. used: keys of pages that stay. last: the order beyond which none goes."""
        cost = sum(count * self.stride[group] for group, count in needs.items())
        before, count = (list(self.points), dict(self.pages)), 0

        def fits() -> bool:
            room = all(self._free(group) >= count for group, count in needs.items())
            return room and (most is None or self._bytes() + cost <= most)

        for first in self._order():
            if fits() or (last is not None and (first.rank, first.priority) > last):
                break
            waits = most is None and self._in_a_copy(first)
            if first.window is None and (waits or first.way[-1] in (used or ())):
                continue  # to evict it frees nothing
            self.points.remove(first)
            self._prune(used)
            count += 1
        if not fits():
            self.points, self.pages = before
            done["no room, and none evicted"] += 1
            return False
        done["evicted"] += count
        return True

    def _in_a_copy(self, point: Kept) -> bool:
        return any(self.pages[point.way[-1]] in away.pages for away in self.retracts)

    def _expire(self) -> None:
        for point in sorted(self.points, key=lambda point: point.placed):
            if point.ends is not None and point.ends <= self.now:
                point.rank, point.priority, point.ends = Rank.EXPIRED, 0, None
                point.used = point.placed = self._next()
                done["expired"] += 1

    def _next(self) -> int:
        self.turn += 1
        return self.turn

    def _allowed(self, hints: Hints, way: list[Any], kept: Kept | None) -> Hints:
        if hints.rank is not Rank.PINNED:
            return hints
        pinned = [other for other in self.points if other.rank is Rank.PINNED and other is not kept]
        pages = len({*way, *(key for other in pinned for key in other.way)})
        nbytes = pages * self.stride[Group.PAGED] + (len(pinned) + 1) * self.stride[Group.WINDOW]
        fits = self.most is None or 2 * nbytes <= self.most
        if fits and 2 * pages <= self.totals[Group.PAGED] and 2 * (len(pinned) + 1) <= self.totals[Group.WINDOW]:
            return hints
        done["too many pins"] += 1
        return replace(hints, rank=Rank.RETAINED)

    def _place(self, point: Kept, hints: Hints) -> None:
        point.rank, point.priority = hints.rank, hints.priority
        point.ends = None if hints.ttl_seconds is None else self.now + hints.ttl_seconds
        point.placed = point.used = self._next()

    # ------------------------------------------------------------------------------------- keep and load

    def _slots(self, pages: int, tokens: int | None = None) -> torch.Tensor:
        slots = oracle.resume(self.allocator, pages * PAGE if tokens is None else tokens)
        for (family, layer), buffer in self.device.buffers.items():
            for slot in (0, 1) if oracle.FAMILIES[family].by == "slot" else (0,):
                rows = self.device.places(family, layer, slots, slot)
                self.seed += 1
                noise = torch.randint(0, 256, (len(rows), buffer.shape[1]), generator=_seeded(self.seed))
                buffer[rows] = noise.to(torch.uint8)
        return slots

    def _read(self, slots: torch.Tensor) -> Rows:
        return oracle.read(self.pool, slots, len(slots), 0)

    @rule(
        prompt=PROMPTS, hints=HINTS, how=st.sampled_from(("right", "wrong", "refused")),
        near=st.integers(0, 4),
    )  # fmt: skip
    def keep(self, prompt: Prompt, hints: Hints, how: str, near: int) -> None:
        """Keeps a prompt's last page end. how: its search finds it at fault, or this rank's copier refuses it.

        near: the page behind which a point was kept once, maybe gone since: nothing but time depends on it.
        """
        way = self._way(prompt)
        slots = self._slots(len(way))
        rows = self._read(slots)
        if how == "refused":
            oracle.evict(self.allocator, slots, len(slots))
        self.copier.right = how != "wrong"
        before, held = self.memory.arena.region.clone(), self._held_blocks()
        self.device.remember()
        tokens, behind = self._tokens(prompt), self.given.get(way[near]) if near < len(way) else None
        done["kept behind a point"] += behind is not None
        ends_here = behind is not None and behind.page.depth == len(way)
        if ends_here and self.store.keep_again(behind, hints):
            point = behind
            done["kept again"] += 1
        else:
            point = self.store.keep(prompt[0], lambda first: tokens[first:], slots.to(torch.int32), hints, behind)
        if point is not None:
            self.given[way[-1]] = point
            for pages, node in enumerate(way, 1):  # a node that ends before the point is not the point's
                self.store.remember_node(point, node, pages * PAGE)
        self.device.assert_unchanged()
        self._nothing_else_is_written(before, held)
        self.allocator.free(slots)
        self._model_keep(prompt, way, rows, hints, how, point)
        self._did(f"keep {how}")

    def _nothing_else_is_written(self, before: torch.Tensor, held: dict[Any, tuple[Group, int]]) -> None:
        """Asserts that blocks with the same holders as before have the same bytes."""
        still = self._held_blocks()
        for group, block in (at for holder, at in held.items() if holder in still):
            here = slice(self.memory.offset(group, block), self.memory.offset(group, block + 1))
            assert torch.equal(before[here], self.memory.arena.region[here]), f"{group.value} block {block} was written"

    def _held_blocks(self) -> dict[Any, tuple[Group, int]]:
        """Returns the blocks of copies, pages and points, by their holder."""
        held: dict[Any, tuple[Group, int]] = {}
        for away in self.retracts:
            blocks = away.copy.blocks
            held |= {(away, group, int(block)): (group, int(block)) for group in Group for block in blocks[group]}
        for page in self.store._trie.pages():
            held[page] = Group.PAGED, page.block
            if page.point is not None and page.point.window is not None:
                held[page.point] = Group.WINDOW, page.point.window
        return held

    def _model_keep(self, prompt: Prompt, way: list[Any], rows: Rows, hints: Hints, how: str, point: Any) -> None:
        self._expire()
        kept = self._find(way)
        hints = self._allowed(hints, way, kept)
        if kept is not None and kept.window is not None:
            assert point is not None and point.tokens == PAGE * len(way)
            if hints.rank is Rank.PLAIN and (kept.rank, kept.priority) > (Rank.PLAIN, 0):
                kept.used = self._next()
                done["hints left"] += 1
            else:
                self._place(kept, hints)
            done["kept already"] += 1
            return
        known = [key for key in way if key in self.pages]
        new = len(way) - len(known)
        needs = {Group.PAGED: new, Group.WINDOW: 1}
        fits = self._find_room(needs, known, self.most, (hints.rank, hints.priority))
        if not fits or (how != "right" and self.verify):
            assert point is None
            self._prune()
            return
        assert point is not None
        for number, key in enumerate(way):
            self.pages.setdefault(key, Saved(_page(rows, number)))
        if (before := self._find(way)) is not None:  # the pages alone
            self.points.remove(before)
            done["superseded pages"] += 1
        kept = Kept(prompt, way, {where: value for where, value in rows.items() if not _is_page(where)})
        self.points.append(kept)
        self._place(kept, hints)
        if how != "right":
            self.faults.append(self.pages[way[len(known)] if new else way[-1]])

    @precondition(lambda self: self.points)
    @rule(which=st.integers(0, 11), first=st.integers(0, 4))
    def load(self, which: int, first: int) -> None:
        """Loads a point behind pages that are there already; every byte is the one that was saved."""
        self._settle()
        points = [point for point in self.points if point.window is not None]
        if not points:
            return
        kept = points[which % len(points)]
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
        wanted = dict(kept.window or {})
        for key in kept.way[first:]:
            wanted |= self.pages[key].rows
        got = self._read(slots)
        oracle.compare(wanted, {where: got[where] for where in got if not _is_page(where) or where[2] >= first * PAGE})
        self.allocator.free(slots)
        kept.used = self._next()
        if (kept.rank, kept.priority) == (Rank.PLAIN, -1):
            kept.priority, kept.placed = 0, kept.used
        self._did("load")

    @rule(prompt=PROMPTS, pages=st.integers(0, 4), more=st.integers(0, 2))
    def look_up(self, prompt: Prompt, pages: int, more: int) -> None:
        self._settle()
        limit = pages * PAGE + more
        way = self._way(prompt)[: max(0, limit - self.pairs) // PAGE]
        best = next(
            (point for end in range(len(way), 0, -1) if (point := self._find(way[:end])) and point.window), None
        )
        found = self.store.longest(prompt[0], self._tokens(prompt), limit)
        assert (None if found is None else found.tokens) == (None if best is None else PAGE * len(best.way))
        for node in self._way(prompt):
            assert self.store.longest(prompt[0], self._tokens(prompt), limit, node) is found
            done["looked up behind a node"] += node in self.store._at
        self._did("look up")

    # ------------------------------------------------------------------------------------- what else happens

    @rule(prompt=PROMPTS, tail=st.sampled_from((0, 0, 1, PAGE - 1)))
    def retract(self, prompt: Prompt, tail: int) -> None:
        """Makes a copy of a retracted request, which saves the pages that no point has, and takes the points' room."""
        self._settle()
        way = self._way(prompt)
        tokens = len(way) * PAGE - tail
        slots, slot = self._slots(len(way), tokens), len(self.retracts) % 2
        rows = oracle.read(self.pool, slots, tokens, slot)
        known = [key for key in way[: tokens // PAGE] if key in self.pages]
        held = self._held_blocks()
        before = self.memory.arena.region.clone()
        needs = self.memory.blocks_for(tokens)
        needs[Group.PAGED] -= len(known)
        shared = [self.pages[key] for key in known]
        copy = self.store.copy_beside(
            prompt[0], self._tokens(prompt), tokens, lambda saved: self._save(slots, slot, saved)
        )
        self._nothing_else_is_written(before, held)
        self.allocator.free(slots)
        if not (fits := all(self._free(group) >= count for group, count in needs.items())):
            self._expire()
            fits = self._find_room(needs, known)
        self._prune()
        assert (copy is not None) == fits
        if copy is not None:
            assert copy.first_page == len(known)
            pages = [Saved(_page(rows, number)) for number in range(len(known), -(-tokens // PAGE))]
            rest = {where: value for where, value in rows.items() if not _is_page(where)}
            self.retracts.append(Away(copy, prompt, [*shared, *pages], rest, tokens))
            done["pages shared"] += len(known)
        self._did("retract")

    def _save(self, slots: torch.Tensor, slot: int, saved: Any) -> HostCopy | None:
        self.copier.right = True
        mapping = self.allocator.full_to_swa_index_mapping
        try:
            return self.host.save(slots.int(), mapping, slot, wait=True, saved=saved)
        except HostMemoryExhausted:
            return None

    @precondition(lambda self: self.retracts)
    @rule(which=st.integers(0, 11))
    def adopt(self, which: int) -> None:
        """Keeps the pages of a retracted request, the first to go."""
        self._settle()
        away = self.retracts[which % len(self.retracts)]
        self.store.adopt(away.prompt[0], self._tokens(away.prompt), away.copy)
        way = self._way(away.prompt)[: away.tokens // PAGE]
        new = [key for key in way if key not in self.pages]
        if new and (self.most is None or self._bytes() + len(new) * self.stride[Group.PAGED] <= self.most):
            self.pages |= {key: page for key, page in zip(way, away.pages, strict=False) if key in new}
            kept = Kept(away.prompt, way, None, Rank.EXPIRED)
            self.points.append(kept)
            kept.placed = kept.used = self._next()
            done["adopted"] += 1
        self._did("adopt")

    @precondition(lambda self: self.retracts)
    @rule(which=st.integers(0, 11))
    def resume(self, which: int) -> None:
        """Loads a retracted request's copy: the pages are those of their first saves."""
        away = self.retracts.pop(which % len(self.retracts))
        slots = oracle.resume(self.allocator, away.tokens)
        wanted = dict(away.rest)
        for page in away.pages:
            wanted |= page.rows
        if self.host.is_stale(away.copy):
            away.copy.release()
        else:
            self.host.load(away.copy, slots, self.allocator.full_to_swa_index_mapping, 1)
            oracle.compare(wanted, oracle.read(self.pool, slots, away.tokens, 1))
        self.allocator.free(slots)
        self._did("resume")

    @precondition(lambda self: self.points)
    @rule(which=st.integers(0, 11))
    def supersede(self, which: int) -> None:
        """Lets a point go before others: its request has a later one."""
        self._settle()
        if not self.points:
            return
        kept = self.points[which % len(self.points)]
        point = next(
            point for point in self.store.order if point.page.path()[-1].key is not None and self._is(point, kept)
        )
        self.store.supersede(point)
        if (kept.rank, kept.priority) == (Rank.PLAIN, 0):
            kept.priority, kept.ends = -1, None
            kept.placed = kept.used = self._next()
            done["superseded"] += 1
        self._did("supersede")

    def _is(self, point: Any, kept: Kept) -> bool:
        return point.page is self.store._trie.walk(kept.prompt[0], self._keys(kept))[len(kept.way) - 1]

    def _keys(self, kept: Kept) -> list[bytes]:
        return self.store._trie.keys(self._tokens(kept.prompt), len(kept.way) * PAGE)

    # Rules are drawn evenly: what matters most has several names, and what empties the store shares one.

    @rule(prompt=PROMPTS, hints=HINTS, near=st.integers(0, 2))
    def keep_more(self, prompt: Prompt, hints: Hints, near: int) -> None:
        self.keep(prompt, hints, "right", near)

    @precondition(lambda self: self.points)
    @rule(which=st.integers(0, 11), hints=HINTS)
    def keep_again(self, which: int, hints: Hints) -> None:
        kept = self.points[which % len(self.points)]
        namespace, values = kept.prompt
        self.keep((namespace, values[: len(kept.way) + 1]), hints, "right", 0)

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
        counters = self.store.counters
        assert (counters.points, counters.held_bytes) == (self.store.points, self.store.held_bytes)
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
        away = {*(page for away in self.retracts for page in away.pages)}
        apart = sum(self.stride[group] for group in (Group.WINDOW, Group.REQUEST))
        assert self.memory.held_bytes == len(away) * self.stride[Group.PAGED] + len(self.retracts) * apart
        assert self.store.points == self._windows and self.store.held_bytes == self._bytes()
        assert self.most is None or self._bytes() <= self.most
        assert [_named(point) for point in self.store.order] == [
            (point.rank, point.priority, len(point.way) * PAGE) for point in self._order()
        ]
        pinned = [point for point in self.points if point.rank is Rank.PINNED]
        assert 2 * len({key for point in pinned for key in point.way}) <= self.totals[Group.PAGED]
        assert 2 * len(pinned) <= self.totals[Group.WINDOW]

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        try:
            self.store.clear("flush")
            for away in self.retracts:
                away.copy.release()
            self.memory.check_integrity()
            assert all(pool.held == 0 for pool in self.memory.pools.values())
            assert not list(self.store._trie.pages()) and not self.store.order._places and not self.store.order._ends
            self.host.close()
        finally:
            self.allocator.clear()


def _is_page(where: oracle.RowKey) -> bool:
    return oracle.grows(where[0])


def _page(rows: Rows, number: int) -> Rows:
    return {where: value for where, value in rows.items() if _is_page(where) and where[2] // PAGE == number}


def _named(point: Any) -> tuple[Any, ...]:
    return *point.order, point.tokens


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
