"""A retracted request gives its pages away at once: its cache is saved on every rank, or on none."""

from __future__ import annotations

from typing import Any

import torch

from sglang_dsv4.errors import HostCopyError, MustStop
from sglang_dsv4.hostmem.memory import HostCopy
from sglang_dsv4.pools.copy_service import CopyService
from sglang_dsv4.pools.token_to_kv import TokenToKVPool


def save(pool: TokenToKVPool, req: Any, indices: torch.Tensor, slot: int) -> HostCopy | None:
    """The copy of ``req``, whose full slots are ``indices``; None, counted and logged, where one cannot be had.

    Either way the forward in flight is waited for: it may still write the request's slots, which are free from now on
    and may be filled from outside any stream.
    """
    host = pool.host
    try:
        if host is None or not _fits_again(host, req):
            return None
        return copy_on_every_rank(host, pool, req, indices, slot)
    finally:
        wait_for_forward(pool)


def copy_on_every_rank(
    host: CopyService, pool: TokenToKVPool, req: Any, indices: torch.Tensor, slot: int
) -> HostCopy | None:
    """As ``save``, for a request that may be saved, and without its wait for the forward."""
    try:
        return pool.get_cpu_copy(indices, req_pool_index=slot)
    except MustStop:
        raise
    except HostCopyError as error:
        host.counters.fallback(type(error).__name__, str(error))
    return None


def keeps_its_tokens(req: Any) -> bool:
    """False for a request given as embeddings: the engine drops its outputs at a retract and starts it over."""
    return req.input_embeds is None


def _fits_again(host: CopyService, req: Any) -> bool:
    """Whether a copy of ``req`` would fit it again after the resume; counted when not."""
    if keeps_its_tokens(req):
        return True
    host.counters.fallback("InputEmbeds", f"request {req.rid} starts over after a retract")
    return False


def wait_for_forward(pool: TokenToKVPool) -> None:
    """Wait for the forwards queued now. With host memory no device-wide synchronize: the forward stream is known."""
    if pool.host is None:
        device = torch.device(pool.device)
        torch.get_device_module(device).synchronize(device)
        return
    for stream in pool.host.context.writer_streams():
        event = torch.cuda.Event()
        event.record(stream)
        event.synchronize()
