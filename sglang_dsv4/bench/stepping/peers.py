"""The plan of ``sglang_dsv4.prep.plan`` made in two other ways: token by token, and by small operations on the GPU."""

from __future__ import annotations

import numpy as np
import torch

from sglang_dsv4.prep.plan import Int32s, head_size, pitch
from sglang_dsv4.prep.step import Lengths, PrepLayout
from triton_ops.prep_args import VECTORS


def plan_by_token(layout: PrepLayout, lengths: Lengths, queries: int, verify: bool, head: Int32s) -> None:
    """A Python loop over the tokens; the arguments of ``plan``."""
    step = pitch(len(lengths) * queries)
    row = 0
    for request, length in enumerate(lengths.tolist()):
        head[VECTORS * step + request] = row
        for query in range(queries):
            causal = length + query + 1 if verify else length
            c4 = causal // 4
            head[row] = causal
            head[step + row] = causal - 1
            head[2 * step + row] = min(causal, layout.window)
            head[3 * step + row] = c4
            head[4 * step + row] = max(c4, 1)
            head[5 * step + row] = min(max(c4, 1), layout.topk)
            head[6 * step + row] = max(causal // 128, 1)
            row += 1
    head[VECTORS * step + len(lengths)] = row


def plan_on_device(layout: PrepLayout, lengths: torch.Tensor, queries: int, verify: bool) -> torch.Tensor:
    """Small operations on the device of ``lengths`` (int64 [requests]); returns the head, int32 [head_size]."""
    requests = lengths.shape[0]
    rows, step = requests * queries, pitch(requests * queries)
    head = torch.empty(head_size(requests, rows), dtype=torch.int32, device=lengths.device)
    vectors = head[: VECTORS * step].view(VECTORS, step)[:, :rows]
    ahead = torch.arange(queries, dtype=torch.int64, device=lengths.device) + int(verify)
    causal = (lengths.repeat_interleave(queries, output_size=rows) + ahead.repeat(requests)).to(torch.int32)
    c4 = causal // 4
    vectors[0] = causal
    vectors[1] = causal - 1
    vectors[2] = causal.clamp(max=layout.window)
    vectors[3] = c4
    vectors[4] = c4.clamp(min=1)
    vectors[5] = c4.clamp(min=1, max=layout.topk)
    vectors[6] = (causal // 128).clamp(min=1)
    torch.arange(0, rows + 1, queries, dtype=torch.int32, device=lengths.device, out=head[VECTORS * step :])
    return head


def entries(head: Int32s, requests: int, queries: int) -> Int32s:
    """The entries of a head that mean something, without what pads its vectors."""
    rows = requests * queries
    step = pitch(rows)
    vectors = head[: VECTORS * step].reshape(VECTORS, step)[:, :rows]
    return np.concatenate([vectors.reshape(-1), head[VECTORS * step :]])
