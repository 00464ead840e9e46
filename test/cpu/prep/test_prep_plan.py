"""The CPU plan: equal to a loop, on slabs that hold garbage, and within the slab."""

from __future__ import annotations

import numpy as np
import pytest
from random_steps import HOSTILE

from sglang_dsv4.prep.plan import head_size, pitch, plan
from sglang_dsv4.prep.step import PrepLayout

LAYOUT = PrepLayout(context=1 << 20)
LENGTHS = (*HOSTILE, 0, 2047, 2048, 2049, (1 << 20) - 9)
SPARE = 16


@pytest.mark.parametrize("queries", [1, 2, 8])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_plan_equals_a_loop(queries, dtype):
    lengths = np.array(LENGTHS, dtype)
    verify = queries > 1
    rows = len(lengths) * queries
    head = np.full(head_size(len(lengths), rows) + SPARE, -77, np.int32)
    plan(LAYOUT, lengths, queries, verify, head[:-SPARE])
    causal = [int(n) + verify + query for n in lengths for query in range(queries)]
    wanted = [
        causal,
        [n - 1 for n in causal],
        [min(n, 128) for n in causal],
        [n // 4 for n in causal],
        [max(1, n // 4) for n in causal],
        [min(512, max(1, n // 4)) for n in causal],
        [max(1, n // 128) for n in causal],
    ]
    step = pitch(rows)
    assert [head[k * step : k * step + rows].tolist() for k in range(len(wanted))] == wanted
    assert head[7 * step : -SPARE].tolist() == [k * queries for k in range(len(lengths) + 1)]
    assert (head[-SPARE:] == -77).all()
