"""Keeps the c4 rows of retracted HiSparse requests in the coordinator's host pool, where they lie already.

The engine's coordinator gives each running request pages of a host pool. Every page is in one place:

    | free | a running request's | kept: a retracted request's |
    detach: a request's -> kept      adopt: kept -> the request's, in its new slot      release: kept -> free

The engine's pool is as large as the logical cache: enough for all running requests. ``reserve`` pages were added to it,
and no more than those are ever kept, so a running request never lacks a page.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from sglang_dsv4.errors import CopyConsumed, HostCopyError, HostMemoryExhausted, RowsNotKept, VerifyMismatch
from sglang_dsv4.hostmem.memory import HostCopy
from sglang_dsv4.settings import Settings

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Rows:
    """Holds the c4 rows of one retracted request. pages: numbers in the host pool, in order, int64 on the CPU.

    The holder of their copy owns them. state: detached, with a copy, adopted or released.
    """

    owner: KeptRows
    pages: torch.Tensor
    tokens: int
    checksum: int | None = None
    state: str = "detached"

    @property
    def slots(self) -> torch.Tensor:
        """All row slots of the pages, in order."""
        size = self.owner.page_size
        return (self.pages[:, None] * size + torch.arange(size)).flatten()

    def go_with(self, copy: HostCopy) -> None:
        """Gives the rows to ``copy``, with which they live and die."""
        copy.lease.detached, self.state = self, "with a copy"

    def adopt(self) -> torch.Tensor:
        """Hands the slots to the caller's request. Raises CopyConsumed where no copy has them."""
        if self.state != "with a copy":
            raise CopyConsumed(f"the c4 rows of a copy of {self.tokens} tokens are {self.state}")
        self.owner.let_go(self, "adopted")
        return self.slots

    def release(self) -> None:
        """Gives the pages back to the host pool, unless a request adopted them."""
        if self.state in ("detached", "with a copy"):
            self.owner.let_go(self, "released")
            self.owner.free(self)


class KeptRows:
    """Keeps rows in the host pool of one coordinator. The scheduler thread owns it.

    reserve: pages that may be kept. verify: rows are compared before they are used again. ranks: that share
    DSV4_HOST_GB, each with a reserve of its own.
    """

    def __init__(self, coordinator: Any, reserve: int, verify: bool = False, ranks: int = 1) -> None:
        self._coordinator, self.reserve, self.verify, self._ranks = coordinator, reserve, verify, ranks
        self.held = 0  # pages
        self._now: Rows | HostCopyError | None = None  # detached by the retract in progress, or its refusal
        self.on_change: Callable[[int], None] = lambda held_bytes: None

    @property
    def page_size(self) -> int:
        """Rows of a page."""
        return int(self._coordinator.page_size)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, all layers."""
        pool = self._coordinator.mem_pool_host
        return int(pool.item_bytes * pool.layer_num)

    @property
    def hot_rows(self) -> int:
        """Device rows of a decoding request."""
        return int(self._coordinator.padded_buffer_size)

    @property
    def with_hot_rows(self) -> int:
        """Requests with device rows."""
        return int((self._coordinator.req_device_buffer_size > 0).sum())

    def without_reserve(self, settings: Settings) -> Settings:
        """Subtracts the reserve from DSV4_HOST_GB; the rest is for the arena."""
        if settings.host_gb is None:
            return settings
        return replace(settings, host_gb=settings.host_gb - self._ranks * self.reserve * self.page_bytes / 2**30)

    # ------------------------------------------------------------------------------------- a retract

    @contextmanager
    def detaching(self, slot: int, tokens: int, computed: bool) -> Iterator[None]:
        """Detaches the host rows of the request in ``slot``; within ``with`` a copy of ``tokens`` tokens may take them.

        At the end they are freed unless taken. computed: whether the last of the tokens was computed by a decode step
        with none prepared after it; the coordinator backs a row up at the next step's preparation.
        """
        try:
            self._now = self._detach(slot, tokens, computed)
        except HostCopyError as error:
            self._now = error
        try:
            yield
        finally:
            now, self._now = self._now, None
            if isinstance(now, Rows) and now.state == "detached":
                now.release()

    def taken(self, tokens: int) -> Rows:
        """Returns the detached rows of ``tokens`` tokens, within ``detaching``. Raises the error of the detachment."""
        if isinstance(self._now, HostCopyError):
            raise self._now
        if self._now is None or self._now.tokens != tokens:
            raise RowsNotKept(f"no c4 rows of {tokens} tokens were detached: the request was not being retracted")
        return self._now

    def _detach(self, slot: int, tokens: int, computed: bool) -> Rows:
        coordinator = self._coordinator
        rows = tokens // coordinator.compress_ratio
        count = -(-rows // self.page_size)
        if self.held + count > self.reserve:
            raise HostMemoryExhausted(
                f"{tokens} tokens have {count} host pages of c4 rows, {self.held} of {self.reserve} are kept already: "
                "raise DSV4_HOST_GB"
            )
        self._wait_for_writers()
        if computed and rows and tokens % coordinator.compress_ratio == 0:
            self._back_up(slot, rows - 1)
        allocated = int(coordinator.req_to_host_pool_allocated_len[slot])
        if allocated != count * self.page_size:
            raise RowsNotKept(f"{tokens} tokens need {count} host pages, the request has {allocated} rows of them")
        pages = (
            coordinator.req_to_host_pool[slot, : allocated : self.page_size].cpu() // self.page_size
        )  # waits for the rows
        coordinator.req_to_host_pool[slot, :allocated] = -1
        coordinator.req_to_host_pool_allocated_len[slot] = 0
        kept = Rows(self, pages, tokens)
        self._count(count)
        if self.verify:
            kept.checksum = self._checksum(kept)
        return kept

    def _wait_for_writers(self) -> None:
        """Orders later work of this stream behind the forward in flight and the last backup."""
        coordinator = self._coordinator
        if coordinator.decode_producer_stream is not None:
            module = torch.get_device_module(coordinator.req_to_host_pool.device)
            module.current_stream().wait_stream(coordinator.decode_producer_stream)
        coordinator.wait_for_pending_backup()

    def _back_up(self, slot: int, row: int) -> None:
        """Backs up the newest row, which only the device has."""
        coordinator = self._coordinator
        host = coordinator.mem_pool_host.alloc_paged_token_slots(
            coordinator.req_to_host_pool, coordinator.req_to_host_pool_allocated_len, slot, row, 1
        )
        hot = min(row, coordinator.device_buffer_size)  # behind the buffer's own rows is the place of the newest
        device = coordinator.req_to_device_buffer[slot, hot : hot + 1]
        coordinator.mem_pool_host.backup_from_device_all_layer(
            coordinator.mem_pool_device, host, device, io_backend="kernel"
        )

    # -------------------------------------------------------------------------------------- a resume

    @contextmanager
    def adopting(self, copy: HostCopy | None) -> Iterator[None]:
        """Gives the next request that asks for host rows within ``with`` those of ``copy``."""
        pool = self._coordinator.mem_pool_host
        pool.adopts = copy.lease.detached if copy is not None else None
        try:
            yield
        finally:
            pool.adopts = None

    def put_back(self, copy: HostCopy, slot: int) -> None:
        """Gives the request in ``slot`` the host rows of ``copy``. Raises as ``check``."""
        coordinator = self._coordinator
        with self.adopting(copy):
            coordinator.mem_pool_host.alloc_paged_token_slots(
                coordinator.req_to_host_pool, coordinator.req_to_host_pool_allocated_len, slot, 0,
                copy.tokens // coordinator.compress_ratio,
            )  # fmt: skip
        self.check(copy)

    def admit(self, req: Any, slot: int) -> None:
        """Gives ``req`` in ``slot``, with its history in the host pool, hot rows, and loads its newest row."""
        self._coordinator.admit_request_direct(req)
        self.load_newest(slot, req.kv.kv_allocated_len)

    def load_newest(self, slot: int, tokens: int) -> None:
        """Loads the newest row of the request in ``slot`` to its device place; a short history is there already."""
        coordinator = self._coordinator
        rows, place = tokens // coordinator.compress_ratio, coordinator.device_buffer_size
        if rows <= place:
            return
        host, device = (
            coordinator.req_to_host_pool[slot, rows - 1 : rows],
            coordinator.req_to_device_buffer[slot, place : place + 1],
        )
        for layer in range(coordinator.mem_pool_device.layer_num):
            coordinator.mem_pool_host.load_to_device_per_layer(
                coordinator.mem_pool_device, host, device, layer, io_backend="kernel"
            )

    def check(self, copy: HostCopy) -> None:
        """Raises unless the rows of ``copy`` were adopted and, with verify, are unchanged."""
        rows = copy.lease.detached
        if not isinstance(rows, Rows) or rows.state != "adopted":
            raise RowsNotKept(f"a copy of {copy.tokens} tokens is loaded, and its c4 rows were not adopted")
        if rows.checksum is not None and rows.checksum != self._checksum(rows):
            raise VerifyMismatch(f"host pages changed since the retract: c4 rows of {rows.tokens} tokens")

    def _checksum(self, rows: Rows) -> int:
        crc = 0
        for layer in self._coordinator.mem_pool_host.kv_buffer:
            crc = zlib.crc32(layer[rows.pages].numpy().data, crc)
        return crc

    # ------------------------------------------------------------------------------------ accounting

    def let_go(self, rows: Rows, state: str) -> None:
        """Stops keeping ``rows``."""
        rows.state = state
        self._count(-len(rows.pages))

    def free(self, rows: Rows) -> None:
        """Gives the pages of ``rows`` back to the host pool."""
        if len(rows.pages):
            self._coordinator.mem_pool_host.free(rows.slots)

    def _count(self, pages: int) -> None:
        self.held += pages
        self.on_change(self.held * self.page_bytes)
