"""Puts this package's metadata kernel into decode and verify graphs.

The engine's kernels there loop over the whole request table, in every replay.

The engine turns raw inputs (slots, lengths, output slots, all on the device) into metadata in one method for decode
and one for verification, which it calls inside the capture. There this package's one kernel takes their place:

    out of the graph   the engine copies the batch into the raw inputs that the graph was captured with
    in the graph       ours: one kernel -> fields; the engine's planners; the engine's write slots of the SWA window

The fields lie in the graph's pool, as the engine's do. The engine's warm-ups before a capture run the same way, so the
kernel is compiled by then. Draft models' decode steps come here too; ragged verification stays the engine's.
A draft model's extend has its metadata made before its graph, by a row of small kernels: here by the eager builder.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from sglang_dsv4.engine.hooks import passed
from sglang_dsv4.engine.releases.base import Release
from sglang_dsv4.errors import IndexMismatch
from sglang_dsv4.prep.builder import MetadataBuilder
from sglang_dsv4.prep.in_graph import build_in_graph
from sglang_dsv4.prep.step import PrepLayout, Step

logger = logging.getLogger(__name__)
Original = Callable[..., Any]

NAME = "dsv4_graph_prep"  # attribute of the backend, whose graphs are captured with this package's kernel


@dataclass(frozen=True)
class GraphPrep:
    """Keeps the facts of one attention backend that the kernel needs."""

    release: Release
    layout: PrepLayout
    device: torch.device

    def build(self, backend: Any, raw: Any, verify: bool) -> Any:
        """Makes the engine's metadata object of ``raw``. Raises IndexMismatch."""
        step = Step(
            raw.req_pool_indices.contiguous(),
            raw.out_cache_loc.contiguous(),
            raw.seq_lens.contiguous(),
            queries=backend.speculative_num_draft_tokens if verify else 1,
            verify=verify,
        )
        made = build_in_graph(self.layout, step, self.release.tables(backend))
        metadata = self.release.compose(backend, made, raw.out_cache_loc)
        # The engine translates the batch's own output slots right after: the raw ones may have been rebound since.
        metadata.core_attn_metadata.swa_out_cache_loc = None
        return metadata

    def build_window(self, backend: Any, slots: Any, lengths: Any, queries: int, out_locs: Any) -> Any:
        """Makes the engine's metadata object of a draft model's extend: the last ``queries`` tokens of each request.

        Valid until the second next one. Raises IndexMismatch.
        """
        step = Step(slots, out_locs, lengths, queries=queries, verify=True, length_offset=1 - queries)
        made = self.window_builder.build(step, self.release.tables(backend))
        return self.release.compose_window(backend, made, out_locs)

    @functools.cached_property
    def window_builder(self) -> MetadataBuilder:
        """Makes the builder once: it cuts its memory for each shape, which takes longer than a launch.

        One page is read at most.
        """
        return MetadataBuilder(replace(self.layout, context=self.layout.page), self.device)


def graph_prep_of(backend: Any) -> GraphPrep | None:
    """Returns the ``GraphPrep`` attached to ``backend``."""
    return getattr(backend, NAME, None)


def from_raw_decode(original: Original, backend: Any, raw_metadata: Any) -> Any:
    """Runs AROUND DeepseekV4AttnBackend.make_forward_metadata_from_raw_decode."""
    return _make(functools.partial(original, backend, raw_metadata), backend, raw_metadata, verify=False)


def from_raw_verify(original: Original, backend: Any, raw_metadata: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs AROUND DeepseekV4AttnBackend.make_forward_metadata_from_raw_verify."""
    engines = functools.partial(original, backend, raw_metadata, *args, **kwargs)
    reason = None
    if raw_metadata.verify_lens is not None:
        reason = "ragged verification"
    elif raw_metadata.c128_compress_metadata is not None:
        reason = "online c128 compression"
    elif passed(original, "graph_backed", backend, raw_metadata, *args, **kwargs):
        reason = "verified steps whose metadata is made before their graph"
    return _make(engines, backend, raw_metadata, verify=True, reason=reason)


def draft_extend(
    original: Original,
    backend: Any,
    req_pool_indices: Any,
    seq_lens: Any,
    num_tokens_per_req: int,
    out_cache_loc: Any = None,
) -> Any:
    """Runs AROUND DeepseekV4AttnBackend.init_forward_metadata_draft_extend, out of any graph, once an iteration.

    Without output slots it is the dummy that a capture begins with: the kernel is compiled then, and not at a request.
    Every replay would write captured metadata in the builder's memory, behind its events: captures stay the engine's.
    """
    prep = graph_prep_of(backend)
    if prep is not None and _in_a_capture(seq_lens):
        say_left("a draft's extend whose preparation is captured")
    elif prep is not None and out_cache_loc is None:
        prep.window_builder.warm_up()
    elif prep is not None:
        try:
            return prep.build_window(backend, req_pool_indices, seq_lens, num_tokens_per_req, out_cache_loc)
        except IndexMismatch as error:
            say_left(_not_taken(error))
    return original(backend, req_pool_indices, seq_lens, num_tokens_per_req, out_cache_loc)


def _make(engines: Callable[[], Any], backend: Any, raw: Any, verify: bool, reason: str | None = None) -> Any:
    prep = graph_prep_of(backend)
    if prep is None:
        return engines()
    if reason is None:
        try:
            made = prep.build(backend, raw, verify)
        except IndexMismatch as error:
            reason = _not_taken(error)
        else:
            if _in_a_capture(raw.seq_lens):
                _say_made()
            return made
    say_left(reason)
    return engines()


def _in_a_capture(lengths: torch.Tensor) -> bool:
    return lengths.is_cuda and torch.cuda.is_current_stream_capturing()


def _not_taken(error: IndexMismatch) -> str:
    """Returns one reason for all of them: each tells of its batch's sizes, and would be logged anew."""
    logger.debug("not prepared: %s", error)
    return "inputs that the builder does not take"


@functools.cache
def _say_made() -> None:
    """Logs once a process, when it is so: there may be no graphs, or none that make their metadata."""
    logger.info("decode metadata in graphs is made by this package's kernel")


@functools.cache
def say_left(reason: str) -> None:
    """Logs once a reason, for all backends of the process."""
    logger.info("decode metadata of such graphs is left to the engine: %s", reason)
