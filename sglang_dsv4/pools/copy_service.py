"""Saves and loads requests: orders host units, copier, other ranks and verify mode."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from sglang_dsv4.cache.family import Group
from sglang_dsv4.cache.rows import Spans
from sglang_dsv4.cache.units import Units
from sglang_dsv4.errors import (
    AnotherRank,
    CopyEngineError,
    CopyMismatch,
    HostCopyError,
    IndexMismatch,
    StaleWeights,
)
from sglang_dsv4.hostmem.memory import HostCopy, HostMemory
from sglang_dsv4.hostmem.nodes import Nodes
from sglang_dsv4.hostmem.pool import UnitNumbers
from sglang_dsv4.hostmem.sharing import Sharers, World
from sglang_dsv4.hostmem.sizing import ArenaSize, PoolSize, arena_size
from sglang_dsv4.metrics import Counters
from sglang_dsv4.pools.host_rows import HostRows
from sglang_dsv4.pools.kept_rows import KeptRows
from sglang_dsv4.settings import Settings
from sglang_dsv4.transfer import verify
from sglang_dsv4.transfer.buffers import DeviceBuffers
from sglang_dsv4.transfer.copier import Copier, WriterStreams
from sglang_dsv4.transfer.copy_engine import require_driver
from sglang_dsv4.transfer.locate import NO_SLOT, DeviceSearch, Refusal, Request
from sglang_dsv4.transfer.pages_in_use import PagesInUse
from sglang_dsv4.transfer.reference import ReferenceCopier, find_request_spans, from_page

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class ServerContext:
    """Tells a pool of its server. What asks other ranks is called equally often on each of them."""

    # This rank's size of the arena (None: it refuses) -> the one for every rank (None: one refuses).
    agreed_size: Callable[[ArenaSize | None], ArenaSize | None] = lambda size: size
    ranks: int = 1  # that share the machine's RAM
    launcher: str | None = None  # of the first of them; None: this one's own
    bound: Nodes | None = None  # the memory nodes to which they are bound, if each is
    world: World | None = None  # the server's ranks, where those of a group may share an arena
    true_on_every_rank: Callable[[bool], bool] = lambda mine: mine  # of those that retract together
    writer_streams: WriterStreams = lambda: ()  # whose queued work a load must wait for
    weight_version: Callable[[], Any] = lambda: None  # of the weights now being served
    is_clean: Callable[[], bool] = lambda: True  # whether all of the device's cache was computed with these
    stages: int = 1  # of the pipeline; they agree on retracts before each checks its saves: with several a save waits
    steps_in_flight: Callable[[Any], int] = lambda req: 0  # a request's launched steps that have no result yet
    take_results: Callable[[], None] = lambda: None  # takes all such results
    host_rows: Sequence[torch.Tensor] = ()  # that the engine keeps on the host: of each token, by its full slot
    on_host_rows: Callable[[torch.Tensor], None] = lambda slots: None  # pages that begin at these slots get such rows


@dataclass(frozen=True)
class SaveRequest:
    """Tells ``CopyService.save`` what to copy. It changes nothing on its way."""

    request: Request  # on the device
    saved: Sequence[int] = ()  # host units that hold its first pages already; the copy holds them, too
    kept: KeptRows | None = None  # has detached the request's HiSparse rows; the copy takes them
    wait: bool = True  # until the bytes are on the host
    first_page: int = 0  # the first that needs a unit
    tail: bool = True  # whether the copy has one

    @property
    def tokens(self) -> int:
        """Counts the tokens of the request."""
        return int(self.request.indices.shape[0])


def wanted_size(
    buffers: DeviceBuffers, settings: Settings, ram: int, arenas: int = 1, row_bytes: int = 0
) -> ArenaSize:  # fmt: skip
    """Chooses the size of an arena. ram: bytes that the ``arenas`` may take. Raises as ``arena_size``.

    row_bytes: of a token's ``HostRows``.
    """
    pages, swa_pages = buffers.page_counts
    slots = swa_pages if buffers.request_slots is None else buffers.request_slots
    return arena_size(Units.of(buffers.geometry, row_bytes), PoolSize(pages, slots), settings, ram, arenas)


def whole_every(buffers: DeviceBuffers) -> int:
    """Returns the interval of page ends, in tokens, at which a request's slot holds nothing; 0: there is none."""
    rings = [family for family in buffers.row_families if family.group is Group.REQUEST]
    periods = [family.period for family in rings if family.period is not None and not family.lag]
    return math.lcm(buffers.geometry.page_size, *periods) if len(periods) == len(rings) else 0


class CopyService:
    """Saves requests of one pool to host memory and loads them back, exactly. The scheduler thread owns it."""

    def __init__(
        self, buffers: DeviceBuffers, size: ArenaSize, settings: Settings, context: ServerContext | None = None,
        sharers: Sharers | None = None,
    ) -> None:  # fmt: skip
        self.buffers, self.settings = buffers, settings
        self.context = context or ServerContext()
        self.counters = Counters()
        cuda = buffers.device.type == "cuda"
        keeps_file = bool(settings.store.backend)
        self.memory = HostMemory(buffers.families, size, cuda, self.counters.holds, sharers, keeps_file)
        board = self.memory.arena.board
        self.true_on_every_rank = board.vote if board and sharers and sharers.whole else self.context.true_on_every_rank
        self._whole = whole_every(buffers)
        self.pages_in_use = PagesInUse(buffers.device, self.context.writer_streams)
        page, context = buffers.geometry.page_size, self.context
        self._host_rows = HostRows(context.host_rows, self.memory, page, context.on_host_rows)
        self._copier = self._make_copier(fast=cuda and settings.transfer == "auto")
        self._copier.warm_up()
        logger.info(
            "host copies: %.2f GiB, %s units%s", self.memory.arena.nbytes / 2**30, f"{size.count:,}",
            f"; {sharers.ranks} ranks share them" if sharers else "",
        )  # fmt: skip

    def _make_copier(self, fast: bool) -> Copier | ReferenceCopier:
        writers, together = self.context.writer_streams, functools.partial(_together, self.true_on_every_rank)
        if not fast:
            return ReferenceCopier(self.buffers, writers, together)
        try:
            require_driver()
        except CopyEngineError as error:  # ROCm
            logger.warning("copies are moved by torch, which takes longer: %s", error)
            return ReferenceCopier(self.buffers, writers, together)
        return Copier(self.buffers, self.memory, writers, together)

    def save(self, one: SaveRequest) -> HostCopy:
        """Copies this rank's share of a request to host memory.

        The bytes are on the host when this returns, and nothing on the device changes. Where ``one`` does not wait they
        are on their way: nothing may write the request's pages (``pages_in_use``), and ``check_search`` comes before
        the copy is used. DSV4_VERIFY always waits.
        Raises HostMemoryExhausted, IndexMismatch, WindowNotMapped, or the error of the detachment, and then nothing is
        taken; AnotherRank where another rank raised one of them.
        """
        started = time.perf_counter()
        copy = self._save_on_every_rank(one)
        seconds, nbytes = time.perf_counter() - started, copy.saved_bytes
        self.counters.saved(nbytes, seconds)
        self.counters.holds(self.memory.copies, self.memory.held_bytes)
        self._log("saved", copy, nbytes, seconds)
        return copy

    def save_point(
        self, indices: torch.Tensor, swa_map: torch.Tensor, first_page: int, window: bool = True
    ) -> HostCopy:
        """Copies the window before a page end, and the pages from ``first_page`` on, to host memory.

        indices: full slots of positions 0..n-1, n a multiple of the page. Nothing of a request's slot lives there. The
        copy has no units of the pages before ``first_page``, and without ``window`` none of that. Raises IndexMismatch
        or HostMemoryExhausted where every rank does; ``check_search`` raises all else. Votes with no other rank, and
        waits as ``HostMemory.allocate``.
        With DSV4_VERIFY it waits, votes and raises as ``save``.
        """
        point = self._point(indices, swa_map, window)
        one = SaveRequest(point, wait=self.settings.verify, first_page=first_page, tail=window)
        return self._save_on_every_rank(one) if self.settings.verify else self._save(one, self._enqueue_point)

    def _save_on_every_rank(self, one: SaveRequest) -> HostCopy:
        if self.settings.verify or self.context.stages > 1:
            one = replace(one, wait=True)
        try:
            copy = self._save(one, self._enqueue)
        except HostCopyError:
            self.true_on_every_rank(False)
            raise
        if not self.true_on_every_rank(True):
            copy.release()
            raise AnotherRank("another rank could not save the request")
        if self.settings.verify:
            self._verify_save(copy, one.request)
        return copy

    def _enqueue(self, copy: HostCopy, request: Request) -> DeviceSearch | None:
        slots = self._host_rows.first_slots(request, copy.first_page)  # before the save is on this stream
        search = self._copier.save(copy, request)
        self._host_rows.save(copy, slots)
        return search

    def _enqueue_point(self, copy: HostCopy, request: Request) -> DeviceSearch | Refusal | None:
        try:
            return self._enqueue(copy, request)
        except HostCopyError as error:  # the others may hold a point here
            return Refusal(error)

    def _save(
        self, one: SaveRequest, enqueue: Callable[[HostCopy, Request], DeviceSearch | Refusal | None]
    ) -> HostCopy:
        request, geometry, weights = one.request, self.buffers.geometry, self.context.weight_version()
        copy = self.memory.allocate(one.tokens, geometry, weights, one.saved, one.first_page, one.tail)
        try:
            if one.kept is not None:
                one.kept.taken(copy.tokens).go_with(copy)
            if self.buffers.draft_begins is not None and request.slot != NO_SLOT:
                # Written by the forward that placed the request, which is over; no step writes it.
                copy.draft_begins = self.buffers.draft_begins[request.slot].clone()
            copy.search = enqueue(copy, request)
            self.pages_in_use.transferred(copy.lease.used_by, copy.lease.gathered)
            if one.wait:
                self._finish(copy)
        except BaseException:  # one that dies while held counts as a leak
            if copy.lease.used_by is not None:  # its kernels are enqueued
                self.pages_in_use.transferred(copy.lease.used_by)
            self.memory.touched(copy)
            copy.release()
            raise
        self.memory.touched(copy)
        return copy

    def _verify_save(self, copy: HostCopy, request: Request) -> None:
        """Compares other ranks' shares with this one's live rows, then notes checksums."""
        try:
            spans = from_page(find_request_spans(self.buffers, request), copy.first_page)
            self.memory.wait_for_shares(copy)
            verify.check_shares(self.buffers, copy, spans)
            copy.checksums = verify.checksums(copy)
        except BaseException:
            copy.release()
            raise

    def _finish(self, copy: HostCopy) -> None:
        if copy.search is not None:
            copy.search.check()
            copy.search = None
        if copy.lease.used_by is not None:
            copy.lease.used_by.synchronize()

    def check_search(self, copy: HostCopy) -> None:
        """Checks, once, the search of a save without a wait.

        Waits for the search, not for the save. Raises IndexMismatch or WindowNotMapped, or of ``save_point`` the error
        of its copier: the copy is worthless.
        """
        search, copy.search = copy.search, None
        if search is not None:
            search.check(late=True)

    def place_taken(self) -> None:
        """Notes that the next load's pages were just taken on the current stream; it waits for no later work there."""
        self._copier.place_taken()

    def load(
        self,
        copy: HostCopy,
        indices: torch.Tensor,
        swa_map: torch.Tensor,
        request_slot: int | None,
        first_page: int = 0,
    ) -> None:
        """Writes ``copy`` to the request at ``indices`` and releases it.

        first_page: the pages before it are shared, hold the same tokens already, and are not written.
        Ordered before later work of the current stream. Raises CopyConsumed, CopyMismatch, StaleWeights,
        IndexMismatch, WindowNotMapped, or AnotherRank where another rank raised one of the last two, before anything
        is written, and the copy then stays as it is. With DSV4_VERIFY also VerifyMismatch, after the write: the device
        then holds wrong bytes, and the server stops.
        """
        started = time.perf_counter()
        self.check(copy, indices.shape[0])
        self._load(copy, self.request(indices, swa_map, request_slot), first_page)
        if copy.draft_begins is not None and self.buffers.draft_begins is not None:
            self.buffers.draft_begins[request_slot] = copy.draft_begins
        shared = len(copy.pages(0, first_page)) * self.memory.units.nbytes
        copy.release()
        seconds = time.perf_counter() - started
        self.counters.loaded(copy.nbytes - shared, seconds, verified=copy.checksums is not None)
        self._log("loaded", copy, copy.nbytes, seconds)

    def load_point(
        self, pages: UnitNumbers, tail: UnitNumbers, indices: torch.Tensor, swa_map: torch.Tensor, first_page: int,
        checksums: verify.Checksums | None,
    ) -> None:  # fmt: skip
        """Writes pages and window of ``save_point`` to the slots ``indices``, as ``load`` does.

        pages, tail: all its units; their owner keeps them. checksums: with DSV4_VERIFY, of them all.
        """
        request = self._point(indices, swa_map)
        copy = self.memory.lend(indices.shape[0], self.buffers.geometry, self.context.weight_version(), pages, tail)
        copy.checksums = checksums
        try:
            self._load(copy, request, first_page)
        finally:
            copy.release()

    def _load(self, copy: HostCopy, request: Request, first_page: int) -> None:
        self.memory.wait_for_shares(copy)
        spans: tuple[Spans, ...] = ()
        if copy.checksums is not None:
            spans = _together(self.true_on_every_rank, lambda: find_request_spans(self.buffers, request))
            verify.check_host(copy)
        slots = self._host_rows.first_slots(request, first_page)
        try:
            self._copier.load(copy, request, first_page)
            self._host_rows.load(copy, first_page, slots)
        finally:
            self.memory.touched(copy)
        self.pages_in_use.transferred(copy.lease.used_by)
        if copy.checksums is not None:
            verify.check_device(self.buffers, copy, from_page(spans, first_page))

    def check(self, copy: HostCopy, tokens: int) -> None:
        """Raises unless ``copy`` can be loaded into ``tokens`` tokens of this pool now; checks its search."""
        if not isinstance(copy, HostCopy) or copy.memory is not self.memory:
            if isinstance(copy, HostCopy) and copy.geometry != self.buffers.geometry:
                raise CopyMismatch(f"a copy of geometry {copy.geometry}, this pool has {self.buffers.geometry}")
            raise CopyMismatch("not a copy of this pool")
        copy.require_held()
        if copy.tokens != tokens:
            raise CopyMismatch(f"a copy of {copy.tokens} tokens cannot be loaded into {tokens} indices")
        if self.is_stale(copy):
            raise StaleWeights(f"saved under weights {copy.weight_version}, now {self.context.weight_version()}")
        self.check_search(copy)

    def is_stale(self, copy: HostCopy) -> bool:
        """Returns whether the weights changed since the save."""
        return bool(copy.weight_version != self.context.weight_version())

    def request(self, indices: torch.Tensor, swa_map: torch.Tensor, slot: int | None) -> Request:
        """Names a request by its full slots and its own. Raises IndexMismatch, on every rank, where it can be none."""
        if slot is None:
            raise IndexMismatch("the request's slot is needed: its pending 128-token state is found by it alone")
        slots = self.buffers.request_slots
        if slots is not None and not 0 <= slot < slots:
            raise IndexMismatch(f"request slot {slot} of {slots}")
        return Request.of(indices, swa_map, int(slot))

    def _point(self, indices: torch.Tensor, swa_map: torch.Tensor, window: bool = True) -> Request:
        tokens = indices.shape[0]
        if not (tokens and self._whole) or tokens % self._whole:
            raise IndexMismatch(f"{tokens} tokens do not end where nothing of a request's slot lives")
        return Request.of(indices, swa_map, NO_SLOT, window)

    def _log(self, verb: str, copy: HostCopy, nbytes: int, seconds: float) -> None:
        if not logger.isEnabledFor(logging.INFO):
            return
        logger.info(
            "%s %d tokens, %.1f MB in %.2f ms; copies alive %d, %.2f of %.2f GiB held", verb, copy.tokens,
            nbytes / 1e6, seconds * 1e3, self.memory.copies, self.memory.held_bytes / 2**30,
            self.memory.arena.nbytes / 2**30,
        )  # fmt: skip

    def close(self) -> None:
        """Unpins the arena. Copies still alive become unusable."""
        self.pages_in_use.wait()
        self.memory.close()


def _together(agree: Callable[[bool], bool], work: Callable[[], T]) -> T:
    """Returns the result of ``work``; raises its error, or AnotherRank where another rank's work failed."""
    try:
        found = work()
    except HostCopyError:  # raised on, not kept: its traceback holds this frame, and with it the copy
        agree(False)
        raise
    if not agree(True):
        raise AnotherRank("another rank could not load the request")
    return found
