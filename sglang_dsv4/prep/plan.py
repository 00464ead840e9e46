"""Plans on the CPU the metadata that follows from the lengths alone: one row a query, without a loop.

Everything is written straight into the slab that goes to the device, by ``out=`` forms, so that a plan allocates
nothing. Fields that need the engine's tables (and with them the C128 indices, whose pages only the device knows) are
the kernel's.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sglang_dsv4.prep.step import MOST_ROWS, Lengths, PrepLayout
from triton_ops.prep_args import (
    C4_CLAMPED,
    C4_LENGTHS,
    C4_SPARSE_LENGTHS,
    C128_CLAMPED,
    LENGTHS,
    POSITIONS,
    SWA_LENGTHS,
    VECTORS,
)

Int32s = npt.NDArray[np.int32]

ALIGNMENT = 4  # entries: every vector starts 16-byte aligned
_ORDER = np.arange(MOST_ROWS + 1, dtype=np.int32)


def pitch(rows: int) -> int:
    """Returns the entries from one vector of ``rows`` rows to the next."""
    return -(-rows // ALIGNMENT) * ALIGNMENT


def head_size(requests: int, rows: int) -> int:
    """Counts the entries of the vectors and, behind them, the query starts."""
    return VECTORS * pitch(rows) + requests + 1


def fill_lengths(layout: PrepLayout, lengths: Lengths, queries: int, verify: bool, head: Int32s) -> None:
    """Fills ``head``: int32 [head_size], the vectors of ``triton_ops.prep_rows`` and the query starts.

    lengths: int64 [requests], see Step.
    """
    requests = len(lengths)
    rows = requests * queries
    vectors = head[: VECTORS * pitch(rows)].reshape(VECTORS, -1)[:, :rows]
    causal = vectors[LENGTHS]
    if verify:
        np.add(lengths[:, None], _ORDER[1 : queries + 1], out=causal.reshape(requests, queries), casting="same_kind")
    else:
        causal[:] = lengths
    np.subtract(causal, 1, out=vectors[POSITIONS])
    np.minimum(causal, layout.window, out=vectors[SWA_LENGTHS])
    np.right_shift(causal, 2, out=vectors[C4_LENGTHS])
    np.maximum(vectors[C4_LENGTHS], 1, out=vectors[C4_CLAMPED])
    np.minimum(vectors[C4_CLAMPED], layout.topk, out=vectors[C4_SPARSE_LENGTHS])
    np.right_shift(causal, 7, out=vectors[C128_CLAMPED])
    np.maximum(vectors[C128_CLAMPED], 1, out=vectors[C128_CLAMPED])
    np.multiply(_ORDER[: requests + 1], queries, out=head[VECTORS * pitch(rows) :][: requests + 1])
