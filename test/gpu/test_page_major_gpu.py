"""The engine's own compiled kernels on page-major pools whose layers span more than 2 GB: the stock pool's bytes."""

import pytest
import torch

from sglang_dsv4.testing.standalone import PoolSpec, make_pool

LAYERS, PAGES, ROWS = 3, 85_000, 64  # 12 GB


@pytest.fixture
def pools(monkeypatch):
    """(a small stock pool, a large page-major one) with the same layers."""
    made = []
    for layout, pages in (("stock", 4), ("page-major", PAGES)):
        monkeypatch.setenv("DSV4_LAYOUT", layout)
        made.append(make_pool(PoolSpec((4,) * LAYERS, pages=pages, swa_pages=4, device="cuda")))
    yield made
    made.clear()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_are_stored_and_gathered_past_2_gb(pools, dtype):
    stock, ours = pools
    page = PAGES * LAYERS  # the last one
    near, far = (torch.arange(ROWS, device="cuda") + first * ROWS for first in (1, page))
    for layer in range(LAYERS):
        rows, keys = (torch.randn(ROWS, width, device="cuda").bfloat16() for width in (512, 128))
        for pool, slots in ((stock, near), (ours, far)):
            pool.c4_kv_pool.set_key_buffer_fused(layer, slots.to(dtype), rows)
            pool.c4_indexer_kv_pool.set_index_fused(layer, slots.to(dtype), keys)
        assert stock.c4_kv_pool.kv_buffer[layer][1].any()
        assert torch.equal(stock.c4_kv_pool.kv_buffer[layer][1], ours.c4_kv_pool.kv_buffer[layer][page])
        index, other = (pool.c4_indexer_kv_pool for pool in pools)
        assert torch.equal(index.index_k_with_scale_buffer[layer][1], other.index_k_with_scale_buffer[layer][page])
        lengths = torch.tensor([ROWS], dtype=torch.int32, device="cuda")
        numbers = [torch.tensor([[number]], dtype=torch.int32, device="cuda") for number in (1, page)]
        gathered = [
            part.get_index_k_scale_buffer(layer, lengths, pages, ROWS, ROWS)
            for part, pages in zip((index, other), numbers, strict=True)
        ]
        for mine, its in zip(*gathered, strict=True):
            assert torch.equal(mine.view(torch.uint8), its.view(torch.uint8))
    written = ours.c4_kv_pool.backing.view(torch.int64).any(1).nonzero().flatten().tolist()
    assert written == [page + layer for layer in range(LAYERS)]
