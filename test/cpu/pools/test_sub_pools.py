"""Each sub-pool alone saves its rows and loads them into other rows, and changes no other byte."""

from typing import Any

import oracle
import pytest
import torch
from pool_fixture import V41

from sglang_dsv4.errors import CopyMismatch, IndexMismatch, LayoutRefused
from sglang_dsv4.testing.standalone import PoolSpec, make_allocator, make_pool

KV = [(torch.float8_e4m3fn, 448), (torch.bfloat16, 64), (torch.uint8, 8)]


def parts_of(pool: Any, name: str) -> tuple[Any, list[oracle.BufferKey], list[tuple[torch.dtype, int]]]:
    """A family's sub-pool, its buffers, and the parts of a row; of a state family those of its first layer alone."""
    keys = [key for key in oracle.buffers(pool) if key[0] == name]
    if oracle.FAMILIES[name].ring:
        state = pool.compress_state_pools[keys[0][1]]
        return state, keys[:1], [(state.kv_score_buffer.kv_score.dtype, state.last_dim)]
    if name == "c4_indexer":
        index = pool.c4_indexer_kv_pool
        return index, keys, [(torch.uint8, index.get_bytes_per_token() - 4), (torch.uint8, 4)]
    return getattr(pool, f"{name}_pool"), keys, KV


def bytes_of(pool: Any, keys: list[oracle.BufferKey], rows: torch.Tensor) -> list[bytes]:
    """The rows of each buffer, by the oracle."""
    found = []
    for key in keys:
        buffer = oracle.buffers(pool)[key]
        for row in rows.tolist():
            spans = oracle._row_spans(pool, key[0], buffer.shape[1], row)
            found.append(b"".join(bytes(buffer[page, first:end].tolist()) for page, first, end in spans))
    return found


def allowed(pool: Any, keys: list[oracle.BufferKey], rows: torch.Tensor) -> dict[oracle.BufferKey, torch.Tensor]:
    """Masks of the bytes of ``rows``."""
    masks = {key: torch.zeros(buffer.shape, dtype=torch.bool) for key, buffer in oracle.buffers(pool).items()}
    for key in keys:
        for row in rows.tolist():
            for page, first, end in oracle._row_spans(pool, key[0], masks[key].shape[1], row):
                masks[key][page, first:end] = True
    return masks


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize(
    ("family", "spec"),
    [
        ("swa_kv", {}), ("c4_kv", {}), ("c128_kv", {}), ("c4_indexer", {}), ("c4_indexer", {"fp4_indexer": True}),
        ("c4_state", {}), ("c128_state", {}), ("c4_state", {"state_dtype": torch.bfloat16}),
    ],
    ids=str,
)  # fmt: skip
def test_rows_come_back_in_other_places(family, spec, dtype):
    pool = make_pool(PoolSpec(pages=4, swa_pages=4, **spec))
    part, keys, parts = parts_of(pool, family)
    oracle.fill(pool, 1)
    last = len(oracle.buffers(pool)[keys[0]]) * oracle._rows_a_page(pool, family) - 1  # of a state, the sentinel
    places = torch.randperm(last, generator=torch.Generator().manual_seed(1)).to(dtype)
    rows, others = places[: min(7, last // 2)], places[-min(7, last // 2) :]
    expected = bytes_of(pool, keys, rows)
    copy = part.get_cpu_copy(rows)
    for layer in [(copy,)] if oracle.FAMILIES[family].ring else copy:
        assert [(part.dtype, part.shape[1]) for part in layer] == parts
        assert all(part.device.type == "cpu" for part in layer)
    oracle.poison(pool)
    before = oracle.snapshot(pool)
    strided = others.repeat_interleave(2)[::2]
    part.load_cpu_copy(copy, strided)
    assert bytes_of(pool, keys, others) == expected
    oracle.assert_only_changed(before, pool, allowed(pool, keys, others))


def test_hisparse_rows_through_the_live_mapping():
    spec = PoolSpec(pages=4, swa_pages=4, hisparse=True)
    pool = make_pool(spec)
    make_allocator(spec, pool)
    part, keys, _ = parts_of(pool, "c4_kv")
    mapping = torch.zeros(4 * 64 + 64, dtype=torch.int64)
    compressed, later = torch.tensor([65, 66, 130, 200]), torch.tensor([80, 81, 82, 83])
    mapping[compressed] = torch.tensor([77, 5, 190, 64])
    part.register_mapping(mapping)
    oracle.fill(pool, 2)
    expected = bytes_of(pool, keys, mapping[compressed])
    copy = part.get_cpu_copy(compressed)
    oracle.poison(pool)
    mapping[compressed] = 0  # the rows are given away; the request comes back elsewhere
    mapping[later] = torch.tensor([9, 133, 2, 99])
    part.load_cpu_copy(copy, later)
    assert bytes_of(pool, keys, mapping[later]) == expected
    for bad, text in ((130, "130 has no HiSparse device row"), (-2, "-2 is outside"), (10**6, "1000000 is outside")):
        with pytest.raises(IndexMismatch, match=text):
            part.get_cpu_copy(torch.tensor([80, bad]))


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
    for target, copy in ((pool.swa_kv_pool, kv), (index, keys)):
        for bad in (-1, -(2**31), 4 * 256 + 256, 1 << 40):
            with pytest.raises(IndexMismatch, match=f"row {bad} is outside"):
                target.get_cpu_copy(torch.tensor([1, bad, 3]))
            with pytest.raises(IndexMismatch, match=f"row {bad} is outside"):
                target.load_cpu_copy(copy, torch.tensor([1, bad, 3]))
    late = [*kv[:-1], (*kv[-1][:2], kv[-1][2].int())]
    narrow = [(key[:, :64], scale) for key, scale in keys]
    for target, copy, where in (
        (pool.swa_kv_pool, kv, rows), (pool.c4_kv_pool, kv, rows[:2]), (index, keys, rows[:2]), (index, narrow, rows),
        (pool.compress_state_pools[3], state, rows), (pool.c4_kv_pool, late, rows),
    ):  # fmt: skip
        with pytest.raises(CopyMismatch):
            target.load_cpu_copy(copy, where)
    oracle.assert_only_changed(before, pool)


def test_rows_of_another_layout_are_not_cut_as_v4_rows():
    pool = make_pool(PoolSpec(pages=4, swa_pages=4, kv_layout="v41", **V41))
    for part in (pool.swa_kv_pool, pool.kv_pools[1]):
        with pytest.raises(LayoutRefused):
            part.get_cpu_copy(torch.arange(4))
        with pytest.raises(LayoutRefused):
            part.load_cpu_copy([], torch.arange(4))
    index = make_pool(PoolSpec()).c4_indexer_kv_pool
    index.index_k_with_scale_buffer = None
    with pytest.raises(LayoutRefused):
        index.get_cpu_copy(torch.tensor([1]))
