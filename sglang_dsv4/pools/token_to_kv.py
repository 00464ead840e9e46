"""Extends the engine's aggregate pool with host copies of whole requests, named by their full slots."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from typing_extensions import override

from sglang_dsv4.cache.page_major import COVERED, is_covered, page_stride
from sglang_dsv4.errors import ArenaNotShared, HostMemoryExhausted, IndexMismatch, LayoutRefused, SettingError
from sglang_dsv4.hostmem.memory import HostCopy
from sglang_dsv4.hostmem.reserve import reserve
from sglang_dsv4.hostmem.sharing import Sharers
from sglang_dsv4.hostmem.sizing import ArenaSize
from sglang_dsv4.pools import page_major
from sglang_dsv4.pools.copy_service import CopyService, SaveRequest, ServerContext, wanted_size
from sglang_dsv4.pools.describe import DraftPool, LayoutCheck, describe, is_online, online_refusal
from sglang_dsv4.pools.host_rows import row_bytes
from sglang_dsv4.pools.kept_rows import KeptRows
from sglang_dsv4.pools.sub_pools import SingleKVPool
from sglang_dsv4.settings import Settings, read_settings
from sglang_dsv4.transfer.buffers import DeviceBuffers

logger = logging.getLogger(__name__)


class TokenToKVPool(DeepSeekV4TokenToKVPool):
    """Adds exact host copies of whole requests to the stock pool.

    A server attaches the host memory at start (``attach_host``); a pool used on its own attaches it at the
    first copy, from the ``DSV4_`` settings.
    """

    layout_checks: ClassVar[tuple[LayoutCheck, ...]] = ()  # of one engine version

    host: CopyService | None = None
    kept_rows: KeptRows | None = None  # of a HiSparse server: c4 rows, which lie on the host already
    refusal: str | None = None
    draft: DraftPool | None = None  # whose window is copied too

    @functools.cached_property
    def page_stride(self) -> int:
        """The divisor of the full pool's page ids: 1, or with DSV4_LAYOUT=page-major a family's layers.

        Raises SettingError for ratios that cannot be page-major.
        """
        ratios = self.compression_ratios[self._stage_start : self._stage_end]
        if read_settings().layout != "page-major" or not any(ratios):
            return 1
        if not is_covered(ratios):
            raise SettingError(
                f"DSV4_LAYOUT=page-major: compression ratios {sorted(set(ratios))}, covered: {COVERED}; "
                "unset DSV4_LAYOUT"
            )
        return page_stride(ratios)

    def _make_kv_pool(self, *args: Any, cls: Any = None, **kwargs: Any) -> Any:
        # The stock default of ``cls`` was bound before the class was replaced, so the replacement is named here.
        # (super() and not the class by name: in this module that name may mean the replacement.)
        if cls is None or cls is super()._make_kv_pool.__kwdefaults__["cls"]:
            cls = SingleKVPool
        window = "swa_kv_pool" not in vars(self)  # the engine makes it first; its pages are found by the map
        if self.page_stride > 1 and not window:
            if cls is not SingleKVPool:
                raise SettingError(f"DSV4_LAYOUT=page-major: a {cls.__name__}; unset DSV4_LAYOUT")
            cls = functools.partial(page_major.KVPool, page_stride=self.page_stride)
        return super()._make_kv_pool(*args, cls=cls, **kwargs)

    def _make_indexer_pool(self, *args: Any, **kwargs: Any) -> Any:
        if self.page_stride == 1:
            return super()._make_indexer_pool(*args, **kwargs)
        return page_major.IndexPool(*args, **kwargs, page_stride=self.page_stride)

    @override
    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Returns addresses, bytes and bytes of a page of the paged buffers: the engine's, or a region a family."""
        if self.page_stride == 1:
            infos: tuple[list[int], list[int], list[int]] = super().get_contiguous_buf_infos()
            return infos
        parts = (self.c4_kv_pool, self.c4_indexer_kv_pool, self.c128_kv_pool)  # in the engine's order
        backings = [part.backing for part in parts if part is not None and part.backing is not None]
        return page_major.regions(backings, self.page_stride)

    def register_mapping(self, full_to_swa_index_mapping: torch.Tensor) -> None:
        """Registers the map from full to window slots. Raises SettingError for a draft with compressed layers.

        The first map of a pool is the engine's, as long as its pages; with page-major pools a draft's is the target's.
        """
        first = getattr(self, "full_to_swa_index_mapping", None) is None
        super().register_mapping(full_to_swa_index_mapping)
        pages = (len(full_to_swa_index_mapping) - 1) // self.page_size
        kv = self.c4_kv_pool or self.c128_kv_pool
        buffers = kv.kv_buffer if kv is not None and first and read_settings().layout == "page-major" else ()
        if any((len(buffer) - 1) // self.page_stride + 1 < pages for buffer in buffers):
            raise SettingError("DSV4_LAYOUT=page-major: a draft with compressed layers of its own; unset DSV4_LAYOUT")

    def attach_host(
        self, settings: Settings, context: ServerContext | None = None, draft: DraftPool | None = None
    ) -> CopyService | None:
        """Reserves and pins the host memory; None, with ``refusal`` set and one log line, where that is not possible.

        draft: the draft model's pool, whose window is then copied too; where its layout is not covered one log line
        says so, and the target's copy is whole without it. Other starting servers are counted, see ``hostmem.claims``.
        Raises HostMemoryExhausted when DSV4_HOST_GB asks for too much.
        """
        if self.host is not None:
            return self.host  # a server may build its queues again (a role switch); the arena stays
        context = context or ServerContext()
        self.refusal = None
        failure, apart = self._reserve(settings, context, draft), None
        if isinstance(failure, ArenaNotShared):
            apart = failure
            logger.warning("each rank has host memory of its own: %s", apart)
            failure = self._reserve(settings, replace(context, world=None), draft)
        if isinstance(failure, HostMemoryExhausted):
            failure = _with_cause(failure, apart, settings, context.ranks)
        if isinstance(failure, LayoutRefused):
            self.refusal, failure = str(failure), None
        if failure is not None and settings.host_gb is not None:
            raise failure from apart
        if self.host is None:
            self.refusal = self.refusal or str(failure or "another rank has no host copies")
            logger.warning("no host copies, the engine's own behaviour stays: %s", self.refusal)
        return self.host

    def _reserve(self, settings: Settings, context: ServerContext, draft: DraftPool | None) -> Exception | None:
        """Makes ``host``; on failure returns it, if it was this rank's."""
        buffers = functools.cache(lambda: self._describe(draft, context.stages))

        def choose(ram: int, arenas: int) -> ArenaSize:
            return wanted_size(buffers(), settings, ram, arenas, row_bytes(context.host_rows))

        def make(size: ArenaSize, sharers: Sharers | None) -> CopyService:
            return CopyService(buffers(), size, settings, context, sharers)

        self.host, failure = reserve(
            choose, make, context.ranks, context.launcher, context.world, context.agreed_size, context.bound
        )
        return failure

    def _describe(self, draft: DraftPool | None, stages: int) -> DeviceBuffers:
        """Describes the device buffers, with the window of ``draft`` where its layout is covered; sets ``draft``."""
        if is_online(self) and (reason := online_refusal(drafts=False, hisparse=False, stages=stages)):
            raise LayoutRefused(reason)
        checks = type(self).layout_checks
        buffers, self.draft = describe(self, checks), None
        if draft is not None:
            try:
                buffers, self.draft = describe(self, checks, draft), draft
            except LayoutRefused as error:  # the draft's: the target alone was covered
                logger.warning("the draft's cache is not copied, fewer drafts are accepted after a resume: %s", error)
        return buffers

    def require_host(self) -> CopyService:
        """Returns the host copies; attaches them to a pool that is used on its own. Raises LayoutRefused."""
        if self.host is None and self.refusal is None:
            self.attach_host(read_settings())
        if self.host is None:
            raise LayoutRefused(f"DeepSeek-V4 host copy refused: {self.refusal}")
        return self.host

    def get_cpu_copy(
        self, indices: torch.Tensor, mamba_indices: Any = None, req_pool_index: int | None = None, wait: bool = True,
        saved: Sequence[int] = (),
    ) -> HostCopy:  # fmt: skip
        """Saves the request whose full slots are ``indices`` (positions 0..n-1) and whose slot is ``req_pool_index``.

        The bytes are on the host when this returns; without ``wait``, and for ``saved``, see ``SaveRequest``.
        Raises LayoutRefused for a pool that is not covered, RowsNotKept of a HiSparse request that is not being
        retracted, else as ``CopyService.save``.
        """
        host = self.host or self.require_host()
        request = host.request(indices, self._swa_map(), req_pool_index)
        return host.save(SaveRequest(request, saved, self.kept_rows, wait))

    def load_cpu_copy(
        self,
        kv_cache_cpu: HostCopy,
        indices: torch.Tensor,
        mamba_indices: Any = None,
        req_pool_index: int | None = None,
    ) -> None:
        """Writes a copy to the request at its new ``indices`` and new ``req_pool_index``, and releases the copy.

        Raises as ``CopyService.load``; nothing has been written then and the copy stays.
        """
        host = self.host or self.require_host()
        if self.kept_rows is not None:
            host.check(kv_cache_cpu, len(indices))
            self.kept_rows.check(kv_cache_cpu)
        host.load(kv_cache_cpu, indices, self._swa_map(), req_pool_index)

    def _swa_map(self) -> torch.Tensor:
        """Returns the map from full to window slots. Raises IndexMismatch."""
        found: torch.Tensor | None = getattr(self, "full_to_swa_index_mapping", None)
        if found is None:
            raise IndexMismatch("this pool has no map from full to SWA slots: its allocator registers it")
        return found


def _with_cause(
    failure: HostMemoryExhausted, apart: ArenaNotShared | None, settings: Settings, ranks: int
) -> HostMemoryExhausted:
    """Adds to ``failure`` the reason, if any, that each of the ``ranks`` needs an arena of its own."""
    cause = "DSV4_SHARE=off" if settings.share == "off" else str(apart or "")
    if ranks == 1 or not cause:
        return failure
    each = "host memory" if settings.host_gb is None else f"{settings.host_gb:.12g} GiB"
    return HostMemoryExhausted(f"each of {ranks} ranks pins {each} of its own, they do not share ({cause}): {failure}")
