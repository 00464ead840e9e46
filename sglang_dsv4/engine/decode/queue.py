"""Lets retracted requests of a decode server wait with a host copy, in the engine's own queue.

A retracted request with a copy waits in ``retracted_queue`` until it fits. One without is computed again by its prefill
server (see ``recompute``). A copy saved under other weights, or of a request that turned out to be wrong, is dropped at
the next pass; then its request has none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.disaggregation.decode import DecodePreallocQueue
from typing_extensions import override

from sglang_dsv4.engine.coverage import Part, launch, refusal
from sglang_dsv4.engine.decode import recompute
from sglang_dsv4.engine.decode.points import points_of
from sglang_dsv4.engine.decode.recompute import answer_without_copy, without
from sglang_dsv4.engine.hisparse import rows as hisparse
from sglang_dsv4.engine.memory import reserve_host_memory
from sglang_dsv4.engine.retract import drafts
from sglang_dsv4.engine.retract.save import copy_of, drop_copy, turned_out_wrong
from sglang_dsv4.engine.state import request_state, server
from sglang_dsv4.hostmem.memory import HostCopy
from sglang_dsv4.pools.copy_service import CopyService
from sglang_dsv4.pools.token_to_kv import TokenToKVPool

logger = logging.getLogger(__name__)


class PreallocQueue(DecodePreallocQueue):
    """Keeps the stock queue. A retracted request with a copy waits in it for memory, one without for its recompute."""

    @property
    def host(self) -> CopyService | None:
        """Returns the copy service; None where this server makes no copies."""
        pool = self.token_to_kv_pool
        return pool.host if isinstance(pool, TokenToKVPool) else None

    @override
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reserve_host_memory()

    def reserve_host_memory(self) -> None:
        """Reserves host memory once the streams are known; the draft's window goes into the target's copies."""
        on = launch()
        if refusal(on, Part.DECODE):
            logger.info("retraction backup is %s: no host copies", on.disagg.disaggregation_decode_retraction_backup)
            return
        reserve_host_memory(self.token_to_kv_pool, self.scheduler, self.draft_token_to_kv_pool)
        if self.host is not None:
            drafts.want(copy_of)

    # -------------------------------------------------------------------------------------- incoming

    @override
    def add(self, req: Any, is_retracted: bool = False, is_rebootstrap: bool = False) -> None:
        """Queues a retracted request; with a copy it keeps its boundary token and waits for memory."""
        if self.host is None:
            super().add(req, is_retracted=is_retracted, is_rebootstrap=is_rebootstrap)
            return
        if is_rebootstrap and recompute.is_held(req) and req.seqlen > self.room[0]:
            # It would be computed for nothing, or stop the queue: its next token exceeds even an empty pool.
            answer_without_copy(self.scheduler, req)
            return
        if is_rebootstrap:
            recompute.prepare_recompute(req)
        if not is_retracted:
            super().add(req, is_rebootstrap=is_rebootstrap)
        elif copy_of(req) is None:
            recompute.hold_for_recompute(self, req)
        elif self._check_if_req_exceed_kv_capacity(req):
            drop_copy(req)  # it was answered
        else:  # as the engine queues those of other pools
            req.retraction_mb_id = None
            self.retracted_queue.append(req)

    def pop_held(self, wanted: Callable[[Any], bool] = lambda req: True) -> list[Any]:
        """Removes the ``wanted`` ones of the requests that are held for their recompute, and returns them."""
        found = [req for req in self.held_rebootstrap_reqs if recompute.is_held(req) and wanted(req)]
        if found:
            self.held_rebootstrap_reqs = without(self.held_rebootstrap_reqs, found)
        return found

    # ------------------------------------------------------------------------- the pass of every step

    @override
    def resume_retracted_reqs(self, rids_to_check: Any = None) -> Any:
        """Resumes waiting requests; once a pass, also where none waits.

        rids_to_check: those on which the ranks of a pipeline agree; they agree on arrivals, too.
        """
        if (points := points_of(self.token_to_kv_pool_allocator)) is not None:
            points.end_pass()
        if not self.retracted_queue and not self.held_rebootstrap_reqs:
            return super().resume_retracted_reqs(rids_to_check)
        if self.scheduler.weight_updater.offload_tags:
            return []  # the device's memory was released: nothing can be loaded until it is back
        if self.host is not None:
            self._drop_useless_copies(self.host)
        recompute.send_held(self)
        with hisparse.within_hot_rows(self, rids_to_check):
            resumed = super().resume_retracted_reqs(rids_to_check)
        hisparse.admit(self, resumed)
        if rids_to_check is None:
            self._admit_finished_transfers()
        return resumed

    def _drop_useless_copies(self, host: CopyService) -> None:
        for req in self._pop_useless(host):
            drop_copy(req)
            if req.multimodal_inputs is None:  # the engine sends back all but those
                recompute.hold_for_recompute(self, req)
            else:
                answer_without_copy(self.scheduler, req)

    def _pop_useless(self, host: CopyService) -> list[Any]:
        """Removes the requests whose copy cannot be loaded, and returns them."""
        copies = [(req, copy) for req in self.retracted_queue if (copy := copy_of(req))]
        useless = [req for req, copy in copies if turned_out_wrong(host, req, copy) or _is_stale(host, req, copy)]
        if useless:
            self.retracted_queue = without(self.retracted_queue, useless)
        return useless

    def _admit_finished_transfers(self) -> None:
        """Lets arrived transfers run, though a copy waits.

        While a retracted request waits, the engine does not look at its transfers, so that nothing new gets memory.
        Arrived transfers would hold their pages, perhaps those that the request waits for: a deadlock.
        """
        if self.retracted_queue and self.host is not None:
            arrived = self.scheduler.disagg_decode_transfer_queue.pop_transferred()
            hisparse.admit(self, arrived)
            self.scheduler.waiting_queue.extend(arrived)

    @override
    def _pre_alloc(self, req: Any, *args: Any, **kwargs: Any) -> Any:
        """Waits for a finished request's last forward, which may still write the pages and the slot given away here.

        A transfer is in no stream and may write at once: the host waits for the forward in flight at a retract. A load
        waits for that forward by itself, and its place can be looked at without it.
        """
        host, copy = self.host, copy_of(req)
        if host is None or copy is None:
            if host is not None:
                host.pages_in_use.wait()
            server.wait_on_this_stream()
            given = super()._pre_alloc(req, *args, **kwargs)
            request_state(req).placed = int(req.kv.kv_committed_len)
            return given
        with hisparse.adopting(self.token_to_kv_pool_allocator, copy):
            given = super()._pre_alloc(req, *args, **kwargs)
        request_state(req).placed = int(req.kv.kv_committed_len)
        host.place_taken()
        drafts.restore_draft_state(req)
        server.wait_on_this_stream()
        return given

    @override
    def _prealloc_required_tokens(self, req: Any) -> Any:
        """Returns (full, SWA) tokens to be free for a request.

        With a copy never more than the pool has: if the request plus the engine's reserve exceeds the pool, an empty
        pool is enough. Otherwise it would wait for ever, with all that is behind it.
        """
        needed = super()._prealloc_required_tokens(req)
        if self.host is None or copy_of(req) is None:
            return needed
        return tuple(min(tokens, room) for tokens, room in zip(needed, self.room, strict=True))

    @override
    def _required_admission_tokens(
        self, req: Any, allocated_tokens: int, prefix_len: int, retractable_tokens: int
    ) -> int:
        """Returns the full tokens that must be free for a request from the prefill server: its pages and its decode.

        The engine counts its whole ``max_new_tokens`` again, also where a recompute has decoded most of them. Never
        more than an empty pool has beside the prefix: else the request waits for ever, with all that is behind it.
        """
        needed = int(super()._required_admission_tokens(req, allocated_tokens, prefix_len, retractable_tokens))
        return max(allocated_tokens, min(needed, self.room[0] - prefix_len)) if self.host is not None else needed

    @override
    def _prealloc_reservation_fits(
        self, full_tokens: int, swa_tokens: int, *, full_allocatable_tokens: int, swa_allocatable_tokens: int | None
    ) -> bool:
        """Returns whether the budgets have so many tokens. Of the window's an empty pool is enough, likewise."""
        fits = super()._prealloc_reservation_fits(
            full_tokens,
            min(swa_tokens, self.room[1]) if self.host is not None else swa_tokens,
            full_allocatable_tokens=full_allocatable_tokens,
            swa_allocatable_tokens=swa_allocatable_tokens,
        )
        return bool(fits)

    @property
    def room(self) -> tuple[int, int]:
        """Returns (full, SWA) tokens of the whole pages that an empty pool has."""
        allocator = self.token_to_kv_pool_allocator
        page = allocator.page_size
        return allocator.size_full // page * page, allocator.size_swa // page * page


def _is_stale(host: CopyService, req: Any, copy: HostCopy) -> bool:
    """Returns whether the copy was saved under other weights; counted."""
    if not host.is_stale(copy):
        return False
    host.counters.fallback("StaleWeights", f"request {req.rid!r} was saved under other weights")
    return True
