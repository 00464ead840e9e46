"""Adds pages for kept rows to the HiSparse host pool when it is built; the engine ignores them.

The pool is built before the scheduler, its queues and our arena, and captured graphs hold its addresses: it cannot grow
later. The reserve and the arena share DSV4_HOST_GB as their bytes share a request's cache. Each rank keeps rows of its
own, also where an arena is shared; all have the same reserve, so that all can keep the rows that one can. The RAM is
claimed with the engine's own pool beside it, as for an arena, until both are pinned (see ``hostmem.claims``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_dsv4.cache.families import kv_page_bytes
from sglang_dsv4.cache.units import Units
from sglang_dsv4.engine.coverage import Part, launch, refusal
from sglang_dsv4.engine.hooks.table import is_wanted
from sglang_dsv4.engine.ranks import Place, of_every_rank, place, ranks_an_arena
from sglang_dsv4.engine.releases import engine_version
from sglang_dsv4.errors import GeometryError, HostMemoryExhausted, LayoutRefused
from sglang_dsv4.hostmem.claims import Claim, launcher
from sglang_dsv4.hostmem.sizing import kept_pages
from sglang_dsv4.pools.describe import PAGE, geometry_of
from sglang_dsv4.pools.hisparse_host import PagedHostPool, larger_by
from sglang_dsv4.pools.kept_rows import KeptRows
from sglang_dsv4.pools.token_to_kv import TokenToKVPool
from sglang_dsv4.settings import Settings, read_settings

logger = logging.getLogger(__name__)
Original = Callable[..., Any]

ENGINE_LEAVES = 10 << 30  # bytes of RAM that the engine leaves free, or it refuses to build a host pool


def init(
    original: Original, coordinator: Any, req_to_token_pool: Any, token_to_kv_pool_allocator: Any, top_k: int,
    device_buffer_size: int, device: str, tp_group: Any, *args: Any, **kwargs: Any,
) -> None:  # fmt: skip
    """Runs AROUND HiSparseCoordinator.__init__: its host pool gets the reserve, the device's pool its keeper.

    tp_group: None of a coordinator outside a server, which has no rank to agree with.
    """
    from sglang.srt.runtime_context import get_context  # noqa: PLC0415

    pool = token_to_kv_pool_allocator.get_kvcache()

    def build() -> None:
        original(
            coordinator, req_to_token_pool, token_to_kv_pool_allocator, top_k, device_buffer_size, device, tp_group,
            *args, **kwargs,
        )  # fmt: skip

    if not keeps_rows(pool):
        build()
        return
    settings, server = read_settings(), get_context().server_args
    ranks = 1 if tp_group is None or settings.share == "off" else ranks_an_arena(server)
    agree = (lambda pages: pages) if tp_group is None else least_of_all
    claim = Claim(*(Place(1, launcher()) if tp_group is None else place(server)))
    try:
        reserve = reserve_pages(pool, token_to_kv_pool_allocator.size_full, settings, claim, ranks, agree)
        with claim.pinning(), larger_by(reserve):
            build()
    except BaseException:
        claim.close()
        raise
    if reserve:
        pool.kept_rows = KeptRows(coordinator, reserve, settings.verify, ranks)
        logger.info(
            "HiSparse: %d pages, %.2f GiB, of the host pool are for rows of retracted requests", reserve,
            reserve * pool.kept_rows.page_bytes / 2**30,
        )  # fmt: skip


def eager_backup(original: Original, coordinator: Any, *args: Any, **kwargs: Any) -> None:
    """Runs AROUND HiSparseCoordinator._eager_backup_previous_token: copies one row of each request, never a page.

    The engine copies whole pages where the requests are as many as a page has rows.
    """
    pool = coordinator.mem_pool_host
    if not isinstance(pool, PagedHostPool):
        original(coordinator, *args, **kwargs)
        return
    pool.by_rows = True
    try:
        original(coordinator, *args, **kwargs)
    finally:
        pool.by_rows = False


def keeps_rows(pool: Any) -> bool:
    """Returns whether this server keeps retracted rows in its coordinator's host pool.

    Where it does not, the attach of our host memory finds a layout that is not covered.
    """
    return isinstance(pool, TokenToKVPool) and server_keeps_rows()


def server_keeps_rows() -> bool:
    """Returns whether the published launch arguments let a HiSparse server keep rows.

    With drafts the engine does not back up the newest rows. A plain server that is the engine's for another reason
    would pin pages for nothing. One whose prefills take the decode batch with them cannot let a restored request join
    it. The engine resolves the choice of a backup after the pools, and comes to cpu_tensor for DeepSeek-V4.
    """
    from sglang.srt.runtime_context import get_disagg, get_schedule, get_spec  # noqa: PLC0415

    disagg = get_disagg()
    if get_spec().speculative_algorithm:
        return False
    if disagg.disaggregation_mode == "null":
        wanted, schedule = is_wanted(read_settings().plain, engine_version()), get_schedule()
        mixes = schedule.enable_mixed_chunk or schedule.enable_priority_scheduling
        return wanted and not mixes and refusal(launch(), Part.PLAIN) is None
    return disagg.disaggregation_mode == "decode" and refusal(launch(), Part.DECODE) is None


def reserve_pages(
    pool: TokenToKVPool, tokens: int, settings: Settings, claim: Claim, ranks: int = 1,
    agree: Callable[[int], int] = lambda pages: pages,
) -> int:  # fmt: skip
    """Counts the pages to add to the host pool for a logical cache of ``tokens``; 0 where the layout is not covered.

    claim: of this rank; the whole host pool is claimed. ranks: that share DSV4_HOST_GB. agree: this rank's number ->
    the one for all; called once, before any rank builds its pool, which the others' free RAM would lack. Raises
    HostMemoryExhausted where DSV4_HOST_GB asks for more than can be had, or has no room for a page.
    """
    try:
        geometry = geometry_of(pool)
    except (GeometryError, LayoutRefused):
        return agree(0)  # the attach says why
    page = kv_page_bytes(PAGE // 4) * len(geometry.owners(4))
    others = Units.of(geometry).nbytes
    pages = tokens // PAGE
    with claim.measuring() as free:
        room = max(0, free // claim.ranks - ENGINE_LEAVES - pages * page)
        wanted = kept_pages(settings, pages, page, others, room, ranks)
        too_many = settings.host_gb is not None and wanted * page > room
        claim.ask((pages + wanted) * page)
    agreed = agree(0 if too_many else wanted)
    if settings.host_gb is not None and not wanted:
        raise HostMemoryExhausted(f"DSV4_HOST_GB={settings.host_gb:.12g} holds not one page of HiSparse rows; raise it")
    if too_many:
        raise HostMemoryExhausted(
            f"DSV4_HOST_GB={settings.host_gb:.12g}: {wanted * page / 2**30:.2f} GiB of it are for HiSparse rows, and "
            f"{room / 2**30:.2f} GiB of RAM can be taken beside the coordinator's own pool; lower it, or set auto"
        )
    if not agreed:
        logger.warning("HiSparse: a rank has no RAM for rows of retracted requests, so none are kept")
    return agreed


def least_of_all(pages: int) -> int:
    """Returns the smallest number over all ranks of the server; pipeline stages, too, must agree on the rows kept."""
    return min(of_every_rank(pages))
