"""Keeps the cache of requests that have ended, and gives it to the next turn: host units, by the pages of a trie.

A *point* is a page end with the window before it on the host, and every page before it. There nothing of a request's
slot lives, so that a prompt that begins with these tokens can go on from it. Units have holders: the pages and points
that are kept (``kept``), and the copy of a transfer while it is made.

Ranks that share the arena keep the same points without asking each other: tokens and order are the same on all. In the
pass behind a save they vote on it, and agree on what their clocks say: at the save, one would wait for the other.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from sglang_dsv4.errors import HostCopyError
from sglang_dsv4.hostmem.memory import HostCopy
from sglang_dsv4.hostmem.pool import UnitNumbers
from sglang_dsv4.metrics import SessionCounters
from sglang_dsv4.pools.copy_service import CopyService
from sglang_dsv4.sessions.hints import Hints
from sglang_dsv4.sessions.kept import Kept
from sglang_dsv4.sessions.order import LAST_RESORT, PLAIN, SUPERSEDED
from sglang_dsv4.sessions.trie import Key, Name, Page, Point
from sglang_dsv4.transfer import verify

logger = logging.getLogger(__name__)

FEWEST_TOKENS = 1024  # of a point: health checks and short chats evict no agent


class SessionStore:
    """Owns the points of one rank and the host units under them. The scheduler thread owns it.

    most_bytes, bigram: see ``Kept``. log_saves: each save and each
    load is a line of the log, which costs the scheduler time; with DSV4_VERIFY it always is.
    """

    def __init__(
        self, host: CopyService, swa_map: Callable[[], torch.Tensor], bigram: bool, most_bytes: int | None,
        log_saves: bool = False,
    ) -> None:  # fmt: skip
        self._host, self._memory, self._swa_map = host, host.memory, swa_map
        self.page_size = host.buffers.geometry.page_size
        self._units = self._memory.units
        self.log_saves = log_saves or host.settings.verify
        self.counters = SessionCounters()
        self.kept = Kept(self._memory, self.page_size, bigram, most_bytes, self.counters)
        self.trie, self.order, self.lookup = self.kept.trie, self.kept.order, self.kept.lookup
        self._unchecked: list[tuple[Name | None, Point, HostCopy]] = []  # saves of this pass: first new page, point
        self._exported = 0  # the version that the gauges show
        self._weights = host.context.weight_version()
        self._unclean: Any = None  # the weights under which a point was not kept for that
        self.loaded = False  # a point, and no forward was launched since
        self.has_store = False  # beyond this memory

    @property
    def points(self) -> int:
        """Counts the points from which a prompt can go on."""
        return self.kept.windows

    def last_end(self, tokens: int) -> int:
        """Returns the last page end of a request of which ``tokens`` tokens are computed and known."""
        return max(0, tokens - self.trie.ahead) // self.page_size * self.page_size

    # ------------------------------------------------------------------------------------------------------ keep

    def _is_clean(self) -> bool:
        """Returns whether the device's cache is of the present weights alone.

        What requests computed across an update is of both, and so is what they leave in the prefix tree.
        """
        if self._host.context.is_clean():
            return True
        if self._unclean != self._weights:
            self._unclean = self._weights
            logger.info("no session is kept until the cache is flushed: requests ran on over a weight update")
        return False

    def keep(
        self, namespace: Hashable, tokens_from: Callable[[int], Any], slots: torch.Tensor, hints: Hints = PLAIN,
        behind: Point | None = None, window: bool = True,
    ) -> Point | None:  # fmt: skip
        """Keeps the point at the end of ``slots``, the full slots of the first tokens, in whole pages.

        tokens_from: the tokens from a position on, at least those of ``slots``, and with drafts one more. hints: of its
        request; their rank takes the place of an earlier one, but a request without a rank leaves that. behind: a point
        of this request, here or gone; the tokens before it need not be looked up, which takes longer than a save.
        window: without it only the pages are kept, for a later point of this request. Only the pages and the window
        that are not here yet are copied. Nothing may write them until the copy is over (``pages_in_use``). Returns the
        point; None where there is no room, or the cache is not clean. A point whose save turns out to be wrong, or to
        have failed on a rank, goes in the next pass, and is counted; with DSV4_VERIFY at once, which returns None.
        """
        started = time.perf_counter()
        self._begin()
        if not self._is_clean():
            return None
        tokens, last = slots.shape[0], None
        if behind is not None and behind.tokens <= tokens and self.stands(behind):
            last = behind.page
        first = self.trie.depth(last) * self.page_size
        keys = list(self.trie.keys(tokens_from(first), tokens - first))
        assert len(keys) * self.page_size == tokens - first
        found = self.trie.walk(namespace, keys, last)
        last, keys = (found[-1] if found else last), keys[len(found) :]
        here = self.trie.point.get(last) if last is not None and not keys else None
        hints = self.kept.leaving_half(hints, last, len(keys), here)  # before others make room for it
        if here is not None and (here.tail is not None or not window):
            self._again(here, hints)
            return here
        self.trie.used = last  # the points behind it may go
        try:
            copy = self._save(slots, self.trie.depth(last), hints, window)
            if copy is None:
                return None
            if here is not None and self.stands(here):
                self.kept.let_go(here, "superseded")
            added = self.kept.add(namespace, last, keys, copy)
            way = added if last is None else [last, *added]
            point = self.kept.put(namespace, way[-1], copy.tail_units if window else None, hints)
            if behind is not None and behind.tail is None and behind is not point and self.stands(behind):
                self.kept.let_go(behind, "superseded")
            self._spread(copy, added, point)
            self._unchecked.append((self.trie.name(added[0]) if added else None, point, copy))
            nbytes = copy.saved_bytes
            copy.hand_over()
            self._log_save(copy.tokens, len(added), int(window), nbytes, time.perf_counter() - started)
        finally:
            self.kept.done_with(last)
        return point

    def make_room_for(self, pages: int, hints: Hints, behind: Point | None) -> bool:
        """Makes room for a prompt whose pages are kept before its end: ``pages`` behind ``behind``, and a window.

        Returns whether there is room; else no point goes.
        """
        self._begin()
        if not self._is_clean():
            return False
        last = self.trie.used = behind.page if behind is not None and self.stands(behind) else None
        try:
            return self.kept.find_room(pages + self.kept.in_tail, "room", hints)
        finally:
            self.kept.done_with(last)

    def let_go(self, point: Point, reason: str) -> None:
        """Lets ``point`` go, if it is still here: nothing more comes of it."""
        if self.stands(point):
            self.kept.let_go(point, reason)

    def keep_again(self, point: Point, hints: Hints = PLAIN) -> bool:
        """Keeps a point of this request that ends where it ends now. Returns whether it is still here."""
        self._begin()
        if not self.stands(point):
            return False
        self._again(point, self.kept.leaving_half(hints, point.page, 0, point))
        return True

    @property
    def saves_of_pass(self) -> int:
        """Counts the saves since the last ``end_pass``."""
        return len(self._unchecked)

    def _begin(self) -> None:
        self._drop_stale()
        if self._memory.arena.board is None:
            self.kept.expire()

    def _again(self, point: Point, hints: Hints) -> None:
        if hints.rank is PLAIN.rank and point.order > (PLAIN.rank, PLAIN.priority):
            self.order.used(point)  # a request without a rank leaves that of others
        else:
            self.order.place(point, hints)

    @contextmanager
    def pages_of(self, namespace: Hashable, tokens: Any, computed: int) -> Iterator[list[Page]]:
        """Gives the pages here of a request's first ``computed`` tokens; within the context none of them goes.

        A copy that is made in it holds their units, and needs no others for these pages.
        """
        self._drop_stale()
        doubtful = {self.trie.named(first) for first, _, _ in self._unchecked}
        walked = self.trie.walk(namespace, self.trie.keys(tokens, computed))
        known = list(itertools.takewhile(lambda page: page not in doubtful, walked))
        last = self.trie.used = known[-1] if known else None
        try:
            yield known
        finally:
            self.kept.done_with(last)

    def add_checksums(self, copy: HostCopy | None, pages: list[Page]) -> None:
        """Adds those of ``pages``, the first ones of ``copy``, whose units it holds beside its own."""
        if copy is not None and copy.checksums is not None:
            copy.checksums |= {number: self.kept.checksums[page] for number, page in enumerate(pages)}

    def adopt(self, namespace: Hashable, tokens: Any, copy: HostCopy) -> None:
        """Keeps the whole pages of a request's copy, so that its next copy need not save them again.

        They are the first to go. copy: one whose search has found nothing wrong.
        """
        if not self._is_clean():
            return
        keys = list(self.trie.keys(tokens, copy.tokens))
        known = self.trie.walk(namespace, keys)
        missing = keys[len(known) :]
        if missing and self.kept.held + len(missing) <= self.kept.most:
            added = self.kept.add(namespace, known[-1] if known else None, missing, copy)
            self._memory.pool.keep(added)
            self._spread(copy, added, self.kept.put(namespace, added[-1], None, LAST_RESORT))

    # ------------------------------------------------------------------------------------------------ from a store

    def lend(self, point: Point, pages: UnitNumbers, tail: UnitNumbers) -> HostCopy:
        """Makes a copy of some units of ``point``, which holds them while a process beside this one reads them."""
        geometry, weights = self._host.buffers.geometry, self._host.context.weight_version()
        return self._memory.lend(point.tokens, geometry, weights, pages, tail)

    def place_for(self, namespace: Hashable, keys: Sequence[Key], loading: int) -> HostCopy | None:
        """Makes a copy for a process beside this one to fill: the window behind ``keys``, and their pages not here.

        loading: units of such copies. None where the point is here, where half of the room is not enough for all that
        is loaded at once, or where plain points make none.
        """
        walked = self.trie.walk(namespace, keys)
        last = walked[-1] if walked else None
        point = None if last is None or len(walked) < len(keys) else self.trie.point.get(last)
        needs = len(keys) - len(walked) + self.kept.in_tail
        if (point is not None and point.tail is not None) or 2 * (needs + loading) > self.kept.most:
            return None
        if not self._is_clean():
            return None
        self.trie.used = last
        try:
            if not self.kept.find_room(needs, "room", PLAIN):
                return None
            geometry, weights = self._host.buffers.geometry, self._host.context.weight_version()
            return self._memory.allocate(len(keys) * self.page_size, geometry, weights, begins=len(walked))
        except HostCopyError as error:
            self._host.counters.fallback(type(error).__name__, f"a point of {len(keys)} pages in a store: {error}")
            return None
        finally:
            self.kept.done_with(last)

    def adopt_read(self, namespace: Hashable, keys: Sequence[Key], copy: HostCopy) -> Point | None:
        """Keeps the point behind ``keys`` that ``copy`` was filled with, or releases it.

        None: pages before it went meanwhile, the point came by another way, or there is no room.
        """
        walked = self.trie.walk(namespace, keys)
        here, last = len(walked), walked[-1] if walked else None
        point = self.trie.point.get(last) if last is not None and here == len(keys) else None
        over = self.kept.held + len(keys) - here + self.kept.in_tail > self.kept.most
        if here < copy.begins or over or (point is not None and point.tail is not None):
            copy.release()
            return None
        if self._host.settings.verify:
            copy.checksums = verify.checksums(copy)
        self.trie.used = last  # the pages of a point without a window stay
        try:
            if point is not None:
                self.kept.let_go(point, "superseded")
            came, added = copy.pages(copy.begins, here), self.kept.add(namespace, last, keys[here:], copy)
            made = self.kept.put(namespace, added[-1] if added else walked[-1], copy.tail_units, PLAIN)
        finally:
            self.kept.done_with(last)
        made.from_store = True
        self._spread(copy, added, made)
        copy.hand_over()
        self._memory.pool.forget(came)
        return made

    def _log_save(self, tokens: int, pages: int, windows: int, nbytes: int, seconds: float) -> None:
        self.counters.kept(nbytes, seconds)
        if not self.log_saves:
            return
        new = (pages + windows * self.kept.in_tail) * self._units.nbytes
        logger.info(
            "kept %d tokens, %d pages new, %.1f MB in %.2f ms; %d points, %.2f GiB",
            tokens, pages, new / 1e6, seconds * 1e3, self.points, self.kept.held_bytes / 2**30,
        )  # fmt: skip

    def _spread(self, copy: HostCopy, added: list[Page], point: Point) -> None:
        """Gives each new page the checksum of its unit, and the point those of its window."""
        if copy.checksums is not None:
            for page in added:
                self.kept.checksums[page] = copy.checksums[self.trie.depth(page) - 1 - copy.begins]
            if point.tail is not None:
                point.checksums = [copy.checksums[copy.in_pages + number] for number in range(copy.in_tail)]

    def _save(self, slots: torch.Tensor, first_page: int, hints: Hints, window: bool) -> HostCopy | None:
        needs = slots.shape[0] // self.page_size - first_page + self.kept.in_tail * window
        if not self.kept.find_room(needs, "room", hints):
            return None
        try:
            return self._host.save_point(slots, self._swa_map(), first_page, window)
        except HostCopyError as error:
            self._host.counters.fallback(type(error).__name__, f"a session's point at {len(slots)} tokens: {error}")
        return None

    # ------------------------------------------------------------------------------------------------------ load

    def load(self, point: Point, slots: torch.Tensor, first_page: int) -> int:
        """Writes the pages from ``first_page`` on, and the window, to ``slots``; returns the bytes.

        Ordered before later work of the current stream. The point stays. Raises as ``CopyService.load``.
        """
        assert point.tail is not None
        path = self.trie.path(point.page)
        checksums: dict[int, Any] | None = None
        if point.checksums is not None:
            checksums = dict(enumerate([*map(self.kept.checksums.get, path), *point.checksums]))
        self._host.load_point(path, point.tail, slots, self._swa_map(), first_page, checksums)
        self.order.used(point)
        self.loaded = True
        self.counters.add("verified", int(checksums is not None))
        return (len(path) - first_page + self.kept.in_tail) * self._units.nbytes

    def record_hit(self, point: Point, tokens: int, first_page: int, nbytes: int) -> None:
        """Counts a request that has ``tokens`` tokens more of its prefix after a load from ``first_page`` on."""
        alone = (first_page + 1) * self.page_size == point.tokens
        kind = "store" if point.from_store else "window" if alone else "pages"
        point.from_store = False
        self.counters.record_hit(kind, tokens, nbytes)

    def stands(self, point: Point) -> bool:
        """Returns whether ``point`` was not let go."""
        return self.trie.stands(point)

    def supersede(self, point: Point) -> None:
        """Lets a point go before others: a later one of its request is kept."""
        if self.stands(point) and point.order == (PLAIN.rank, PLAIN.priority):
            self.order.place(point, SUPERSEDED)

    def end_pass(self, launched: bool = True) -> None:
        """Checks the saves since the last pass, drops all points if the weights changed, and makes room ahead.

        Once a pass, on each rank. The pages of a save that failed, or found its request at fault, are worthless, and so
        is all that was built on them.

        launched: a forward was, in the last pass; it is behind that pass's loads.
        """
        self.loaded = self.loaded and not launched
        if self._unchecked:
            self._check_saves()
        self._drop_stale()
        self.kept.evict_ahead()
        if self._exported != self.trie.version:
            self._export_gauges()

    def _export_gauges(self) -> None:
        self._exported = self.trie.version
        self.counters.holds(self.kept.windows, self.kept.held_bytes)

    def _check_saves(self) -> None:
        unchecked, self._unchecked = self._unchecked, []
        right = [self._is_right(copy) for _, _, copy in unchecked]
        if not self._host.true_on_every_rank(all(right)):
            for (first, point, _), mine in zip(unchecked, right, strict=True):
                if not self._host.true_on_every_rank(mine):
                    self._drop(self.trie.named(first), point)
        if self._memory.arena.board is not None:
            self.kept.expire()

    def _drop(self, first: Page | None, point: Point) -> None:
        """Lets go of all that a wrong save wrote: the pages from ``first`` on, if any, and the window of ``point``."""
        behind = [point] if first is None else [self.trie.point.get(page) for page in self.trie.below(first)]
        for one in behind:
            if one is not None and self.stands(one):
                self.kept.let_go(one, "fault")

    def _drop_stale(self) -> None:
        if self._host.context.weight_version() != self._weights:
            self.clear("weights")

    def _is_right(self, copy: HostCopy) -> bool:
        try:
            self._host.check_search(copy)
        except HostCopyError as error:
            self._host.counters.fallback(type(error).__name__, f"a session's point at {copy.tokens} tokens: {error}")
            return False
        return True

    def clear(self, reason: str) -> None:
        """Lets go of everything at once."""
        self._weights = self._host.context.weight_version()
        self.kept.clear(reason)
        self._export_gauges()  # a paused server has no passes

    def check_integrity(self) -> None:
        """Raises AssertionError as ``Kept.check_integrity``."""
        self.kept.check_integrity()
