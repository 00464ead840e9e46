"""Makes the metadata of eager decode steps, beside the forward before where it can.

the scheduler         on its schedule stream: allocates, writes both tables
load_batch            on the forward stream; the scheduler's tensors are seen for the last time: ``start``, beside the
                      forward before
init_forward_metadata ``finish``, or all of it in line, and the metadata is the backend's; the tables are then done with

None of these runs in a step whose metadata a graph makes, so that step pays nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from sglang_dsv4.engine.metadata.attach import BackendPrep, export, prep_of
from sglang_dsv4.engine.state import server
from sglang_dsv4.errors import IndexMismatch
from sglang_dsv4.prep.metadata import StepMetadata
from sglang_dsv4.prep.step import Step

logger = logging.getLogger(__name__)
Original = Callable[..., Any]


def run_event_loop(scheduler: Any, *_: Any, **__: Any) -> None:
    """Runs BEFORE Scheduler.run_event_loop, once a process: steps started earlier are warm-ups and captures."""
    server.scheduler = scheduler
    export(getattr(scheduler, "metrics_collector", None))


def load_batch(original: Original, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs AROUND EagerRunner.load_batch: the engine then copies the batch into buffers of the forward stream."""
    prep = prep_of(runner.model_runner.attn_backend)
    schedule = _schedule() if prep is not None else None
    made = _start(prep, forward_batch, schedule) if schedule is not None else None
    loaded = original(runner, forward_batch, *args, **kwargs)
    if prep is not None:
        prep.early = None if made is None else (loaded, made)
    return loaded


def init_forward_metadata(original: Original, backend: Any, forward_batch: Any) -> None:
    """Runs AROUND DeepseekV4AttnBackend.init_forward_metadata, which graphs do not use."""
    prep = prep_of(backend)
    if prep is None or not (_finish(prep, forward_batch) or _build(prep, forward_batch)):
        original(backend, forward_batch)


def _schedule() -> Any:
    """Returns the stream on which an overlapping scheduler wrote the tables.

    On the CPU True; None where the forward is none of an overlapping scheduler.
    """
    if server.scheduler is None or not server.scheduler.enable_overlap:
        return None
    current = _stream()
    if current is None:
        return True
    return server.scheduler.schedule_stream if current == server.scheduler.forward_stream else None


def _start(prep: BackendPrep, forward_batch: Any, schedule: Any) -> StepMetadata | None:
    """Starts the step of a plain decode batch, whose lengths the host knows and whose tensors the scheduler made."""
    plain = forward_batch.forward_mode.is_decode() and forward_batch.spec_info is None
    if not plain or not prep.backend.model_runner.spec_algorithm.is_none():
        return None
    if forward_batch.global_num_tokens_cpu is not None:
        return None  # padded to the other ranks' batches, on the forward stream
    if forward_batch.seq_lens_cpu is None or forward_batch.out_cache_loc is None:
        return None
    if prep.release.own_reason(forward_batch):
        return None
    step = Step(
        forward_batch.req_pool_indices,
        forward_batch.out_cache_loc,
        forward_batch.seq_lens_cpu.numpy(),
    )
    try:
        return prep.builder.start(step, prep.tables(), after=schedule)
    except IndexMismatch:
        return None  # found again, and counted, when the metadata is made


def _finish(prep: BackendPrep, forward_batch: Any) -> bool:
    """Returns whether ``forward_batch`` was started early; then its metadata is in place."""
    early, prep.early = prep.early, None
    if early is None:
        return False
    prep.builder.finish()  # dropped or not: what was enqueued reads the tables and the step's tensors
    if early[0] is not forward_batch:
        return False
    if prep.publish_read_done():
        server.early_stream = _stream()
    prep.release.install(prep.backend, early[1], forward_batch)
    prep.counts.add("steps", 1, "overlapped")
    return True


def _build(prep: BackendPrep, forward_batch: Any) -> bool:
    """Returns whether the metadata of ``forward_batch`` was made here, in line, with the device's lengths."""
    mode = _logical_mode(forward_batch)
    verify = mode.is_target_verify()
    if not verify and not mode.is_decode():
        return False
    step = _step(prep, forward_batch, verify)
    if isinstance(step, Step):
        try:
            made = prep.builder.build(step, prep.tables())
        except IndexMismatch as error:
            logger.debug("not prepared: %s", error)
            step = "a step that the builder does not take"
        else:
            prep.release.install(prep.backend, made, forward_batch)
            prep.counts.add("steps", 1, "inline")
            return True
    prep.counts.leave(step)
    return False


def _step(prep: BackendPrep, forward_batch: Any, verify: bool) -> Step | str:
    """Returns the step of ``forward_batch``, or why the engine makes its metadata."""
    backend = prep.backend
    if forward_batch.out_cache_loc is None:
        return "no out_cache_loc"
    if forward_batch.out_cache_loc.is_cuda and torch.cuda.is_current_stream_capturing():
        return "a graph is being captured"
    reason = prep.release.own_reason(forward_batch)
    if reason:
        return reason
    if verify and backend._resolve_verify_layout(forward_batch, bs=len(forward_batch.seq_lens)) is not None:
        return "ragged verification"
    return Step(
        forward_batch.req_pool_indices,
        forward_batch.out_cache_loc,
        forward_batch.seq_lens,
        queries=backend.speculative_num_draft_tokens if verify else 1,
        verify=verify,
    )


def _stream() -> Any:
    """Returns the current stream; None on the CPU."""
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None


def _logical_mode(forward_batch: Any) -> Any:
    from sglang.srt.layers.attention.deepseek_v4_backend import _get_logical_forward_mode  # noqa: PLC0415

    return _get_logical_forward_mode(forward_batch)
