"""Gives each attention backend whose layout is covered a metadata builder, and counts its steps."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Iterable
from typing import Any

import torch

from sglang_dsv4.engine.coverage import Part, launch, refusal
from sglang_dsv4.engine.memory import ranks_of
from sglang_dsv4.engine.metadata import graphs
from sglang_dsv4.engine.releases import engine_release
from sglang_dsv4.engine.releases.base import Release
from sglang_dsv4.engine.state import server
from sglang_dsv4.errors import LayoutRefused
from sglang_dsv4.metrics import PrepCounts, make_series
from sglang_dsv4.pools.describe import describe
from sglang_dsv4.pools.token_to_kv import TokenToKVPool
from sglang_dsv4.prep.builder import MetadataBuilder
from sglang_dsv4.prep.metadata import StepMetadata
from sglang_dsv4.prep.step import PrepLayout, Tables
from sglang_dsv4.settings import read_settings

logger = logging.getLogger(__name__)

NAME = "dsv4_prep"  # attribute of the backend
PREPARED_RATIOS = (0, 4, 128)
READ_DONE_EVENTS = 4  # the scheduler has waited for one before the next but one is recorded


class BackendPrep:
    """Keeps this package's state of one attention backend.

    early: of a step started beside the forward before: the batch, as its forward will see it, and the metadata.
    """

    def __init__(self, backend: Any, release: Release, layout: PrepLayout) -> None:
        self.backend, self.release = backend, release
        self.builder = MetadataBuilder(layout, backend.req_to_token.device)
        self.builder.warm_up()
        self.counts = PrepCounts()
        self.early: tuple[Any, StepMetadata] | None = None
        publishes = backend.req_to_token.is_cuda and not launch().host_tier
        self._read_done = itertools.cycle([torch.cuda.Event() for _ in range(READ_DONE_EVENTS)]) if publishes else None

    def tables(self) -> Tables:
        """Returns the engine's tables as they are now."""
        return self.release.tables(self.backend)

    def publish_read_done(self) -> bool:
        """Tells the scheduler that from here on the forward reads neither table, nor anything else that it writes.

        Returns whether it was told.

        Nothing in a decode layer reads them once the metadata is built, HiSparse apart, which is never attached.
        The whole-forward barrier also keeps writers of other streams behind a finished request's last forward, which
        still writes the pages and the slot given away. Those of a new request wait by ``Server.wait_on_this_stream``;
        a host tier writes behind the schedule stream alone, and where there is one nothing is published.
        """
        if self._read_done is not None:
            event = next(self._read_done)
            event.record()
            setattr(self.backend.model_runner, self.release.read_done, event)
        return self._read_done is not None


def prep_of(backend: Any) -> BackendPrep | None:
    """Returns the builder of ``backend``, if it has one."""
    return getattr(backend, NAME, None)


def export(collector: Any) -> None:
    """Gives all counts series beside those of the engine's ``collector``; None: it has none.

    Two-batch overlap makes three backends in a process. They share their series: two with the same labels would write
    to the same place in the files of PROMETHEUS_MULTIPROC_DIR, one over the other.
    """
    series = _series(PrepCounts, tuple(ranks_of(collector).items())) if collector is not None else {}
    for counts in server.unheard:
        counts.series = series
    server.unheard.clear()


_series = functools.cache(make_series)


def attach_builder(result: Any, backend: Any, model_runner: Any, *_: Any, **__: Any) -> None:
    """Runs AFTER DeepseekV4AttnBackend.__init__: attaches a builder where the layout is covered."""
    draft = model_runner.is_draft_worker
    if read_settings().prep == "off" or (draft and (_holds_others(backend) or server.target_refused)):
        return
    reason = _refusal(backend, model_runner)
    if not draft:
        server.target_refused = reason is not None
    if reason:
        _say_refused(reason)
        return
    release = engine_release()
    layout = layout_of(backend, release)
    setattr(backend, graphs.NAME, graphs.GraphPrep(release, layout, backend.req_to_token.device))
    if draft:
        return
    try:
        prep = BackendPrep(backend, release, layout)
    except Exception:  # whatever it was is raised again: only what to do about it is added
        logger.error("DSV4_PREP=off leaves decode metadata to the engine")  # noqa: TRY400 - it goes on to the log
        raise
    setattr(backend, NAME, prep)
    server.unheard.append(prep.counts)
    logger.info("decode metadata of eager steps is prepared by this package")


@functools.cache
def _say_refused(reason: str) -> None:
    """Logs once a process: a server with drafts has a backend for each of their steps, with two-batch overlap three."""
    logger.info("decode metadata stays the engine's: %s", reason)


def _holds_others(backend: Any) -> bool:
    """Returns whether it makes no metadata itself: it has a backend for each decode step of a draft model."""
    from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4MultiStepBackend  # noqa: PLC0415

    return isinstance(backend, DeepseekV4MultiStepBackend)


def _refusal(backend: Any, model_runner: Any) -> str | None:
    """Returns why the builder does not fit; an allow-list, like that of the host copies."""
    from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4AttnBackend  # noqa: PLC0415

    pool = backend.token_to_kv_pool
    if type(backend) is not DeepseekV4AttnBackend:
        return f"attention backend {type(backend).__name__}"
    if not isinstance(pool, TokenToKVPool):
        return f"pool {type(pool).__name__}"
    on = launch(hisparse=backend.hisparse_coordinator is not None, drafts=model_runner.spec_algorithm)
    if reason := refusal(on, Part.METADATA):
        return reason
    other = _other_layout(pool)
    if other:
        return other
    try:
        geometry = describe(pool, type(pool).layout_checks).geometry
    except LayoutRefused as error:
        return str(error)
    return None if geometry.window == 128 else f"a window of {geometry.window}, covered: 128"


def ratios_refusal(ratios: Iterable[int]) -> str | None:
    """Returns a refusal for compression ratios whose metadata was never compared with the engine's."""
    others = sorted(set(ratios) - set(PREPARED_RATIOS))
    return f"compression ratios {others} (DeepSeek-V4.1)" if others else None


def _other_layout(pool: Any) -> str | None:
    """Returns a refusal for a layout that copies cover, but whose metadata was never compared with the engine's."""
    if reason := ratios_refusal(pool.compression_ratios):
        return reason
    if pool.kv_layout.value != "v4":
        return f"KV layout {pool.kv_layout.value}"
    swa, indexer = pool.swa_kv_pool, pool.c4_indexer_kv_pool
    if swa is not None and swa.page_size != pool.page_size:
        return f"SWA pages of {swa.page_size} tokens, covered: {pool.page_size}"
    if indexer is not None and getattr(indexer, "index_k_with_scale_buffer", None) is None:
        return "split indexer buffers"
    return None


def layout_of(backend: Any, release: Release) -> PrepLayout:
    """Returns the sizes of ``backend``."""
    pool = backend.token_to_kv_pool
    c4_ring, c128_ring = (pool.get_ring_size(compress_ratio=ratio) for ratio in (4, 128))
    return PrepLayout(
        context=backend.req_to_token.shape[1],
        topk=backend.index_topk,
        page=backend.page_size,
        window=128,
        swa_page=pool.swa_page_size,
        c4_ring=c4_ring,
        c128_ring=c128_ring,
        c4_keep=release.kept_states(4, c4_ring),
        c128_keep=release.kept_states(128, c128_ring),
        c128=backend.has_c128,
    )
