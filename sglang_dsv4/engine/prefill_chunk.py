"""On 0.5.17 the host waits in each chunk of a prefill for one number that it knows: how many window rows are gathered.

The first sparse layer of a chunk builds what all of them share, out of tensors on the device. The list of the window's
slots is as long as the requests' windows together, so the device is asked, and it may still be in the chunk before.
Here the sum comes from the batch's own lengths; the tensors are the engine's, byte for byte. 0.5.22 sums on the host.

A sum that were too small would let the kernel write behind the list. So it is made of plain extends alone, whose
lengths are the scheduler's own on either side. In mixed batches the host's lengths of running requests may lag. (Under
a prefill graph such a batch is an extend by its mode; there they are exact: without drafts the engine advances both.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

WORKERS = 128  # programs a request, as the engine launches them

_state: dict[str, Any] = {"lengths": None}  # (tokens, of them new) of each request, while a chunk's tensors are built


def forward_prefill_sparse(
    original: Callable[..., Any], backend: Any, q: Any, layer_id: Any, compress_ratio: Any, forward_batch: Any,
    *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """AROUND DeepseekV4AttnBackend._forward_prefill_sparse, of every layer: the first one builds for all."""
    first = backend.forward_metadata.sparse_prefill_cache is None
    _state["lengths"] = _lengths(forward_batch) if first else None
    try:
        return original(backend, q, layer_id, compress_ratio, forward_batch, *args, **kwargs)
    finally:
        _state["lengths"] = None


def build_swa_token_ids(
    original: Callable[..., Any], seq_lens: torch.Tensor, extend_seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor, req_to_token: torch.Tensor, full_to_swa: torch.Tensor, swa_window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """AROUND sparse_prefill_utils.build_swa_token_ids: (slots, first positions, counts, offsets), all int32."""
    lengths, requests = _state["lengths"], seq_lens.shape[0]
    if lengths is None or len(lengths) != requests:
        return original(seq_lens, extend_seq_lens, req_pool_indices, req_to_token, full_to_swa, swa_window)  # type: ignore[no-any-return]
    counts = torch.minimum(seq_lens, extend_seq_lens + (swa_window - 1))
    first = seq_lens - counts
    offsets = torch.zeros(requests + 1, dtype=torch.int32, device=seq_lens.device)
    offsets[1:] = torch.cumsum(counts, dim=0)
    total = sum(min(tokens, new + swa_window - 1) for tokens, new in lengths)
    slots = torch.empty(total, dtype=torch.int32, device=seq_lens.device)
    if total:
        _kernel()[(requests, WORKERS)](
            slots, first, counts, offsets, req_pool_indices, req_to_token, req_to_token.stride(0), full_to_swa
        )
    return slots, first, counts, offsets


def _lengths(forward_batch: Any) -> list[tuple[int, int]] | None:
    """(tokens, of them new) of each request as the host knows them; None where it may not."""
    tokens, new = forward_batch.seq_lens_cpu, forward_batch.extend_seq_lens_cpu
    if forward_batch.forward_mode.name != "EXTEND" or forward_batch._original_forward_mode is not None:
        return None  # the latter: decode rows that run as an extend beside other ranks' prefills
    if tokens is None or new is None or len(tokens) != len(new):
        return None
    return list(zip(tokens.tolist(), map(int, new), strict=True))


def _kernel() -> Any:
    from sglang.srt.layers.attention.dsv4.sparse_prefill_utils import _build_swa_token_ids_kernel  # noqa: PLC0415

    return _build_swa_token_ids_kernel
