"""Each sub-pool alone saves its rows and loads them into other rows."""

import oracle
import pytest
import torch

from sglang_dsv4.errors import CopyMismatch, IndexMismatch, LayoutRefused
from sglang_dsv4.testing.standalone import PoolSpec, make_allocator, make_pool


def rows_of(pool, family, rows):
    """The bytes of these rows in each buffer of a family, by the oracle."""
    return [
        [bytes(b for page, first, end in oracle._row_spans(pool, family, buffer.shape[1], int(row))
               for b in buffer[page, first:end].tolist()) for row in rows]
        for (name, _), buffer in oracle.buffers(pool).items() if name == family
    ]  # fmt: skip


def distinct(count, limit, seed=0):
    """``count`` distinct locations below ``limit``."""
    return torch.randperm(limit, generator=torch.Generator().manual_seed(seed))[:count]


@pytest.mark.parametrize("family, page_size", [("swa_kv", 256), ("c4_kv", 64), ("c128_kv", 2)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_single_kv(family, page_size, dtype):
    pool = make_pool(PoolSpec(pages=4, swa_pages=4))
    oracle.fill(pool, 1)
    part = getattr(pool, f"{family}_pool")
    limit = part.kv_buffer[0].shape[0] * page_size
    rows, others = distinct(7, limit, 1).to(dtype), distinct(7, limit, 2).to(dtype)
    expected = rows_of(pool, family, rows)
    copy = part.get_cpu_copy(rows)
    assert [tuple(t.shape) for t in copy[0]] == [(7, 448), (7, 64), (7, 8)]
    assert [t.dtype for t in copy[0]] == [torch.float8_e4m3fn, torch.bfloat16, torch.uint8]
    assert all(t.device.type == "cpu" for triple in copy for t in triple)
    oracle.poison(pool)
    part.load_cpu_copy(copy, others)
    assert rows_of(pool, family, others) == expected
    for buffer in part.kv_buffer:
        assert int((buffer != 0xA5).sum()) <= 7 * 584, "a byte outside the rows changed"


def test_hisparse_rows_through_the_live_mapping():
    spec = PoolSpec(pages=4, swa_pages=4, hisparse=True)
    pool = make_pool(spec)
    make_allocator(spec, pool)
    part = pool.c4_kv_pool
    mapping = torch.zeros(4 * 64 + 64, dtype=torch.int64)
    compressed = torch.tensor([65, 66, 130, 200])
    mapping[compressed] = torch.tensor([77, 5, 190, 64])
    part.register_mapping(mapping)
    oracle.fill(pool, 2)
    expected = rows_of(pool, "c4_kv", mapping[compressed])
    copy = part.get_cpu_copy(compressed)
    oracle.poison(pool)
    mapping[compressed] = 0  # the rows are given away; the request comes back elsewhere
    later = torch.tensor([80, 81, 82, 83])
    mapping[later] = torch.tensor([9, 133, 2, 99])
    part.load_cpu_copy(copy, later)
    assert rows_of(pool, "c4_kv", mapping[later]) == expected
    with pytest.raises(IndexMismatch, match="130 has no HiSparse device row"):
        part.get_cpu_copy(torch.tensor([80, 130]))


@pytest.mark.parametrize("fp4, width", [(False, 128), (True, 64)])
def test_indexer(fp4, width):
    pool = make_pool(PoolSpec(pages=4, swa_pages=4, fp4_indexer=fp4))
    part = pool.c4_indexer_kv_pool
    oracle.fill(pool, 3)
    limit = part.index_k_with_scale_buffer[0].shape[0] * 64
    rows, others = distinct(9, limit, 1), distinct(9, limit, 2)
    expected = rows_of(pool, "c4_indexer", rows)
    copy = part.get_cpu_copy(rows)
    assert [tuple(t.shape) for t in copy[0]] == [(9, width), (9, 4)]
    oracle.poison(pool)
    part.load_cpu_copy(copy, others)
    assert rows_of(pool, "c4_indexer", others) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", [2, 3])
def test_compress_state(dtype, layer):
    pool = make_pool(PoolSpec(pages=4, swa_pages=4, state_dtype=dtype))
    part = pool.compress_state_pools[layer]
    oracle.fill(pool, 4)
    state = part.kv_score_buffer.kv_score
    rows, others = torch.tensor([0, 5, 9, 30]), torch.tensor([31, 2, 8, 7])
    expected = state[rows].view(torch.uint8).clone()
    copy = part.get_cpu_copy(rows)
    before = state.view(torch.uint8).clone()
    part.load_cpu_copy(copy, others)
    assert torch.equal(state[others].view(torch.uint8), expected)
    untouched = [row for row in range(len(state)) if row not in others.tolist()]
    assert torch.equal(state.view(torch.uint8)[untouched], before[untouched])


def test_bad_input_is_refused_and_writes_nothing():
    pool = make_pool(PoolSpec(pages=4, swa_pages=4))
    oracle.fill(pool, 5)
    rows, part, index = torch.tensor([1, 2, 3]), pool.compress_state_pools[2], pool.c4_indexer_kv_pool
    kv, keys, state = (found.get_cpu_copy(rows) for found in (pool.c4_kv_pool, index, part))
    before = oracle.snapshot(pool)
    for bad in ([3, 3], [-1], [1 << 40], [len(part.kv_score_buffer.kv_score) - 1]):  # the last is the sentinel
        with pytest.raises(IndexMismatch):
            part.get_cpu_copy(torch.tensor(bad))
        with pytest.raises(IndexMismatch):
            part.load_cpu_copy(torch.zeros(len(bad), part.last_dim), torch.tensor(bad))
    for target, copy, where in (
        (pool.swa_kv_pool, kv, rows), (pool.c4_kv_pool, kv, rows[:2]), (index, keys, rows[:2]),
        (pool.compress_state_pools[3], state, rows),
    ):  # fmt: skip
        with pytest.raises(CopyMismatch):
            target.load_cpu_copy(copy, where)
    oracle.assert_only_changed(before, pool)
    index.index_k_with_scale_buffer = None
    with pytest.raises(LayoutRefused):
        index.get_cpu_copy(torch.tensor([1]))
