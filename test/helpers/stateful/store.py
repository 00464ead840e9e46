"""Runs a store of sessions at random, beside a list of all that it should hold; the oracle reads every byte.

A prompt's pages each repeat one token. The bytes of a page are noise, another at each computation, so that a load shows
which computation was saved.
"""

from __future__ import annotations

from typing import Any

import oracle
import torch
import units_by_hand
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_dsv4.cache.units import Units
from sglang_dsv4.errors import HostMemoryExhausted, IndexMismatch
from sglang_dsv4.hostmem.memory import HostCopy
from sglang_dsv4.hostmem.sizing import ArenaSize
from sglang_dsv4.pools.copy_service import CopyService, SaveRequest, ServerContext
from sglang_dsv4.pools.describe import describe
from sglang_dsv4.sessions.hints import HELD, Hints, Rank
from sglang_dsv4.sessions.store import SessionStore
from sglang_dsv4.settings import Settings
from stateful.expected import Away, Expected, Kept, Prompt, Rows, Saved, done, is_page, page_of, rest_of, tokens_of
from stateful.pool import PAGE, Device

PROMPTS = st.tuples(st.sampled_from(("a", "b")), st.lists(st.integers(0, 1), min_size=2, max_size=5).map(tuple))
TTLS = st.none() | st.integers(0, 3).map(float)
HINTS = (
    st.builds(Hints, prefetch=st.booleans())
    | st.just(Hints(Rank.DEMOTED))
    | st.builds(Hints, st.just(Rank.RETAINED), st.integers(-1, 1), TTLS)
    | st.builds(Hints, st.just(Rank.PINNED), st.just(0), TTLS)
)
ENOUGH = 64


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
            for index in copy.share:
                self.memory.bytes_of(copy.units[index])[:] = 0xEE
        return Search(self.right)

    def load(self, copy: HostCopy, request: Any, first_page: int) -> None:
        self.real.load(copy, request, first_page)


class StoreLives(RuleBasedStateMachine):
    """Keeps, loads, evicts, and asks the list whether that was right."""

    device: Device

    @initialize(
        units=st.integers(18, 52), most=st.none() | st.integers(13, 40), bigram=st.booleans(),
        verify=st.sampled_from((False, False, True)), ahead=st.sampled_from((0, 0, 1, 7)),
    )  # fmt: skip
    def start(self, units: int, most: int | None, bigram: bool, verify: bool, ahead: int) -> None:
        """Starts a store with that many units, that may hold the bytes of ``most`` of them.

        ahead: units that it has free from pass to pass, if it can; one less is enough for now.
        """
        self.device.start()
        self.pool, self.allocator = self.device.pool, self.device.allocator
        self.given: dict[Any, Any] = {}  # the last point that was kept behind a page
        self.found: dict[Any, Any] = {}  # the last look-up of a prompt
        self.weights, self.verify = 1, verify
        context = ServerContext(weight_version=lambda: self.weights, is_clean=lambda: self.expected.is_clean)
        side = describe(self.pool)
        size = ArenaSize(Units.of(side.geometry), units)
        self.host = CopyService(side, size, Settings(transfer="torch", verify=verify), context)
        self.memory = self.host.memory
        self.copier = self.host._copier = Copier(self.host._copier, self.memory)
        self.unit = units_by_hand.unit_bytes(self.pool)
        nbytes = None if most is None else most * self.unit + self.unit // 2
        self.store = SessionStore(self.host, lambda: self.allocator.full_to_swa_index_mapping, bigram, nbytes)
        tail = units_by_hand.units(self.pool, PAGE) - 1
        self.expected = Expected(units, self.unit, tail, nbytes, bigram)
        self.expected.few = self.store.kept.few = max(0, ahead - 1)
        self.expected.enough = self.store.kept.enough = ahead
        self.store.order.clock = lambda: self.expected.now
        self.retracts, self.seed = self.expected.away, 0

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
        near=st.integers(0, 4), window=st.sampled_from((True, True, False)),
    )  # fmt: skip
    def keep(self, prompt: Prompt, hints: Hints, how: str, near: int, window: bool = True) -> None:
        """Keeps a prompt's last page end. how: its search finds it at fault, or this rank's copier refuses it.

        near: the page behind which a point was kept once, maybe gone since: nothing but time depends on it, unless that
        one has no window; then it goes.
        """
        way = self.expected.way(prompt)
        slots = self._slots(len(way))
        rows = self._read(slots)
        if how == "refused":
            oracle.evict(self.allocator, slots, len(slots))
            how = how if window else "right"  # nobody looks for the window
        self.copier.right = how != "wrong"
        before, held = self.memory.arena.region.clone(), self._held_units()
        self.device.remember()
        tokens, behind = tokens_of(prompt), self.given.get(way[near]) if near < len(way) else None
        done["kept behind a point"] += behind is not None
        ends_here = behind is not None and behind.tokens == PAGE * len(way)
        stands = behind is not None and self.store.stands(behind)
        expected_behind = self.expected.find(way[: behind.tokens // PAGE]) if stands else None
        if ends_here and (behind.tail is not None or not window) and self.store.keep_again(behind, hints):
            point = behind
            done["kept again"] += 1
        else:
            given = slots.to(torch.int32)
            point = self.store.keep(prompt[0], lambda first: tokens[first:], given, hints, behind, window)
        if point is not None:
            self.given[way[-1]] = point
            for pages, node in enumerate(
                way if window else (), 1
            ):  # a node that ends before the point is not the point's
                self.store.lookup.remember_node(point, node, pages * PAGE)
        self.device.assert_unchanged()
        self._nothing_else_is_written(before, held)
        self.allocator.free(slots)
        refused = how != "right" and self.verify
        expects = self.expected.keep(prompt, rows, hints, how == "right", refused, window, expected_behind)
        assert (point is not None) == expects
        assert point is None or point.tokens == PAGE * len(way)
        self._did(f"keep {how}")

    def _nothing_else_is_written(self, before: torch.Tensor, held: list[tuple[Any, int]]) -> None:
        """Asserts that units with the same holders as before have the same bytes."""
        now = {(id(holder), unit) for holder, unit in self._held_units()}
        for unit in (unit for holder, unit in held if (id(holder), unit) in now):
            here = slice(unit * self.unit, (unit + 1) * self.unit)
            assert torch.equal(before[here], self.memory.arena.region[here]), f"unit {unit} was written"

    def _held_units(self) -> list[tuple[Any, int]]:
        """Returns the units of copies, pages and points, each with its holder, of a page its name."""
        held: list[tuple[Any, int]] = [(away, unit) for away in self.retracts for unit in away.copy.units]
        held += [(self.store.trie.name(page), page) for page in self.store.trie.pages()]
        return held + [(point, unit) for point in self.store.order for unit in point.tail or ()]

    @precondition(lambda self: self.expected.points)
    @rule(which=st.integers(0, 11), first=st.integers(0, 4))
    def load(self, which: int, first: int) -> None:
        """Loads a point behind pages that are there already; every byte is the one that was saved."""
        self._settle()
        points = [point for point in self.expected.points if point.window is not None]
        if not points:
            return
        kept = points[which % len(points)]
        point = self.store.lookup.longest(kept.prompt[0], tokens_of(kept.prompt), ENOUGH * PAGE).point
        assert point is not None
        count, first = len(kept.way), min(first, len(kept.way) - 1)
        slots = oracle.resume(self.allocator, count * PAGE)
        before = oracle.snapshot(self.pool)
        nbytes = self.store.load(point, slots, first)
        assert nbytes == (count - first + self.expected.tail) * self.unit
        allowed = oracle.may_change(self.pool, slots[first * PAGE :], (count - first) * PAGE, 0)
        for (family, layer), mask in allowed.items():
            if oracle.FAMILIES[family].by == "slot":
                mask[:] = False
            del layer
        oracle.assert_only_changed(before, self.pool, allowed)
        wanted = dict(kept.window or {})
        for key in kept.way[first:]:
            wanted |= self.expected.pages[key].rows
        got = self._read(slots)
        oracle.compare(wanted, {where: got[where] for where in got if not is_page(where) or where[2] >= first * PAGE})
        self.allocator.free(slots)
        self.expected.loaded(kept)
        self._did("load")

    @rule(prompt=PROMPTS, pages=st.integers(0, 4), more=st.integers(0, 2))
    def look_up(self, prompt: Prompt, pages: int, more: int) -> None:
        self._settle()
        limit = pages * PAGE + more
        way = self.expected.way(prompt)[: max(0, limit - self.expected.bigram) // PAGE]
        best = self.expected.longest(way)
        found = self.store.lookup.longest(prompt[0], tokens_of(prompt), limit)
        point = found.point
        assert (None if point is None else point.tokens) == (None if best is None else PAGE * len(best.way))
        for node in self.expected.way(prompt):
            assert self.store.lookup.longest(prompt[0], tokens_of(prompt), limit, node).point is point
            done["looked up behind a node"] += node in self.store.lookup._at
        before = self.found.get((prompt, limit))
        if before is not None:
            assert self.store.lookup.longest(prompt[0], tokens_of(prompt), limit, None, before).point is point
            assert not self.store.lookup.is_current(prompt[0], before, limit) or before.point is point
            done["looked up again"] += 1
        self.found[prompt, limit] = found
        self._did("look up")

    # ------------------------------------------------------------------------------------- what else happens

    @rule(prompt=PROMPTS, tail=st.sampled_from((0, 0, 1, PAGE - 1)))
    def retract(self, prompt: Prompt, tail: int) -> None:
        """Makes a copy of a retracted request, which saves the pages that no point has, and takes the points' room."""
        self._settle()
        way = self.expected.way(prompt)
        tokens = len(way) * PAGE - tail
        slots, slot = self._slots(len(way), tokens), len(self.retracts) % 2
        rows = oracle.read(self.pool, slots, tokens, slot)
        known = self.expected.known(way[: tokens // PAGE])
        held = self._held_units()
        before = self.memory.arena.region.clone()
        count = units_by_hand.units(self.pool, tokens)
        needs = count - len(known)
        shared = [self.expected.pages[key] for key in known]
        with self.store.pages_of(prompt[0], tokens_of(prompt), tokens) as pages:
            copy = self._save(slots, slot, pages)
            self.store.add_checksums(copy, pages)
        self._nothing_else_is_written(before, held)
        self.allocator.free(slots)
        if not (fits := self.expected.free() >= needs):
            self.expected.expire()
            fits = self.expected.find_room(needs, known)
        self.expected.prune()
        assert (copy is not None) == fits
        if copy is not None:
            assert copy.first_page == len(known)
            pages = [*shared, *(Saved(page_of(rows, number)) for number in range(len(known), -(-tokens // PAGE)))]
            self.retracts.append(Away(copy, prompt, pages, rest_of(rows), count - len(pages), tokens))
            done["pages shared"] += len(known)
        self._did("retract")

    def _save(self, slots: torch.Tensor, slot: int, saved: Any) -> HostCopy | None:
        self.copier.right = True
        mapping = self.allocator.full_to_swa_index_mapping
        try:
            return self.host.save(SaveRequest(self.host.request(slots.int(), mapping, slot), saved))
        except HostMemoryExhausted:
            return None

    @precondition(lambda self: self.retracts)
    @rule(which=st.integers(0, 11))
    def adopt(self, which: int) -> None:
        """Keeps the pages of a retracted request, the first to go."""
        self._settle()
        away = self.retracts[which % len(self.retracts)]
        self.store.adopt(away.prompt[0], tokens_of(away.prompt), away.copy)
        self.expected.adopt(away.prompt, away.pages, away.tokens // PAGE)
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

    @precondition(lambda self: self.expected.points)
    @rule(which=st.integers(0, 11))
    def supersede(self, which: int) -> None:
        """Lets a point go before others: its request has a later one."""
        self._settle()
        if not self.expected.points:
            return
        kept = self.expected.points[which % len(self.expected.points)]
        point = next(point for point in self.store.order if self._is(point, kept))
        self.store.supersede(point)
        self.expected.supersede(kept)
        self._did("supersede")

    def _is(self, point: Any, kept: Kept) -> bool:
        return point.page == self.store.trie.walk(kept.prompt[0], self._keys(kept))[len(kept.way) - 1]

    def _keys(self, kept: Kept) -> list[bytes]:
        return list(self.store.trie.keys(tokens_of(kept.prompt), len(kept.way) * PAGE))

    # Rules are drawn evenly: what matters most has several names, and what empties the store shares one.

    @rule(prompt=PROMPTS, hints=HINTS, near=st.integers(0, 2))
    def keep_more(self, prompt: Prompt, hints: Hints, near: int) -> None:
        self.keep(prompt, hints, "right", near)

    @rule(prompt=PROMPTS, hints=HINTS)
    def keep_in_parts(self, prompt: Prompt, hints: Hints) -> None:
        """Keeps the first page of a prompt alone, and then its end behind that."""
        self.keep((prompt[0], prompt[1][:2]), hints, "right", 0, False)
        self.keep(prompt, hints, "right", 0)

    @precondition(lambda self: self.expected.points)
    @rule(which=st.integers(0, 11), hints=HINTS)
    def keep_again(self, which: int, hints: Hints) -> None:
        kept = self.expected.points[which % len(self.expected.points)]
        namespace, values = kept.prompt
        self.keep((namespace, values[: len(kept.way) + 1]), hints, "right", 0)

    @precondition(lambda self: self.expected.points)
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
        self.expected.now += seconds

    def _settle(self, _: int = 0) -> None:
        """Begins the next pass: all that was built on a wrong save goes."""
        self.store.end_pass()
        counters = self.store.counters
        assert (counters.points, counters.held_bytes) == (self.store.points, self.store.kept.held_bytes)
        self.expected.settle()
        self.expected.evict_ahead()

    def _weights(self, _: int) -> None:
        self._settle()
        self.weights += 1
        self.store.end_pass()
        self.expected.clear()
        self.expected.is_clean = False

    def _flush(self, _: int) -> None:
        self.store.clear("flush")
        self.expected.clear()
        self.expected.is_clean = True
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
        pool = self.memory.pool
        assert pool.available == self.expected.free() and pool.available + pool.held == pool.total
        assert self.memory.held_bytes == self.expected.away_bytes()
        assert self.store.points == self.expected.windows and self.store.kept.held_bytes == self.expected.nbytes()
        assert self.expected.nbytes() <= self.expected.most
        assert [_named(point) for point in self.store.order] == [
            (*point.order, len(point.way) * PAGE) for point in self.expected.order()
        ]
        held = [point for point in self.expected.points if point.rank in HELD]
        pages = {key for point in held for key in point.way}
        assert 2 * (len(pages) + len(held) * self.expected.tail) * self.unit <= self.expected.most

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        try:
            self.store.clear("flush")
            for away in self.retracts:
                away.copy.release()
            self.memory.check_integrity()
            assert self.memory.pool.held == 0
            assert not list(self.store.trie.pages()) and not self.store.order._places and not self.store.order._ends
            self.host.close()
        finally:
            self.allocator.clear()


def _named(point: Any) -> tuple[Any, ...]:
    return *point.order, point.tokens


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
