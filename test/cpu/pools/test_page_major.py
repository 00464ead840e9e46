"""Page-major pools give the engine's kernels, ids and transfers the bytes of the stock layout."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE

from sglang_dsv4.cache.families import Geometry
from sglang_dsv4.cache.page_major import page_stride, piece_figures
from sglang_dsv4.engine import page_major as serving
from sglang_dsv4.pools import page_major
from sglang_dsv4.pools.copy_service import wanted_size
from sglang_dsv4.pools.describe import describe
from sglang_dsv4.settings import Settings
from sglang_dsv4.testing.standalone import (
    FLASH_RATIOS,
    PRO_RATIOS,
    PoolSpec,
    make_allocator,
    make_draft_pool,
    make_pool,
)

PAGE = 256
UNEVEN = (0, 0, 4, 128, 4, 128, 4)  # three layers of ratio 4, two of ratio 128


@pytest.fixture(autouse=True)
def _page_major(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_LAYOUT", "page-major")


def built(ratios: tuple[int, ...] = UNEVEN, pages: int = 6, **spec: Any) -> SimpleNamespace:
    made = PoolSpec(ratios, pages=pages, swa_pages=pages, **spec)
    pool = make_pool(made)
    return SimpleNamespace(pool=pool, allocator=make_allocator(made, pool), spec=made)


def history(pool: Any) -> Iterator[tuple[str, Any, list[torch.Tensor]]]:
    """(family, its pool, its layers' buffers) in the order of the engine's registration."""
    yield "c4_kv", pool.c4_kv_pool, pool.c4_kv_pool.kv_buffer
    yield "c4_indexer", pool.c4_indexer_kv_pool, pool.c4_indexer_kv_pool.index_k_with_scale_buffer
    yield "c128_kv", pool.c128_kv_pool, pool.c128_kv_pool.kv_buffer


@pytest.mark.parametrize(("ratios", "stride"), [(UNEVEN, 3), (FLASH_RATIOS, 21), (PRO_RATIOS, 31), ((0, 4, 128), 1)])
def test_each_layer_is_contiguous_aligned_and_of_the_stock_width(monkeypatch, ratios, stride):
    pool = built(ratios, pages=3).pool
    monkeypatch.setenv("DSV4_LAYOUT", "stock")
    stock = make_pool(PoolSpec(ratios, pages=3, swa_pages=3))
    assert pool.page_stride == stride
    assert stock.page_stride == 1
    for (name, _, ours), (_, _, theirs) in zip(history(pool), history(stock), strict=True):
        assert len(ours) == len(theirs), name
        for mine, its in zip(ours, theirs, strict=True):
            assert mine.is_contiguous()
            assert mine.stride() == its.stride()
            assert mine.dtype == its.dtype
            assert len(mine) == (len(its) - 1) * stride + 1
            assert mine.data_ptr() % 16 == 0  # of every kernel's loads, and of TMA
            for dtype in (torch.bfloat16, torch.float32, torch.float8_e4m3fn):  # as kernels see it
                assert mine.view(dtype).is_contiguous()


def test_no_two_layers_share_a_byte_of_a_page_that_is_handed_out():
    made = built()
    ids = [0, *sorted(made.allocator.full_attn_allocator.free_pages.tolist())]
    for name, part, buffers in history(made.pool):
        part.backing.zero_()
        for buffer in buffers:
            for page in ids:
                assert not buffer[page].any(), f"{name}: page {page} of two layers"
                buffer[page] = 1
        used = part.backing[:, 0].reshape(-1, made.pool.page_stride).bool()
        assert used[: len(ids), : len(buffers)].all()
        assert not used[:, len(buffers) :].any()  # rows of a layer that is not there


def test_the_engines_own_buffers_take_no_memory(monkeypatch):
    """What is made is the tensor of each family, once, where the engine's own buffers would come from."""
    from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

    inside: list[str] = []
    made: list[tuple[int, tuple[str, ...]]] = []

    @contextlib.contextmanager
    def entered(name: str) -> Iterator[None]:
        inside.append(name)
        yield
        inside.remove(name)

    def zeros(*args: Any, **kwargs: Any) -> torch.Tensor:
        found = new(*args, **kwargs)
        if not found.is_meta:
            made.append((found.nbytes, tuple(inside)))
        return found

    def with_a_mem_pool(name: str, change: str) -> None:
        stock = getattr(page_major, name)
        original = getattr(stock, change)
        monkeypatch.setattr(stock, change, lambda pool: (setattr(pool, "custom_mem_pool", "pool"), original(pool))[1])

    new = torch.zeros
    adapter = SimpleNamespace(region=entered)
    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", entered)
    monkeypatch.setattr(TorchMemorySaverAdapter, "create", staticmethod(lambda enable: adapter))
    with_a_mem_pool("KVPool", "_create_buffers")
    with_a_mem_pool("IndexPool", "_create_buffer")
    pool = built().pool
    backings = [part.backing.nbytes for _, part, _ in history(pool)]
    in_mem_pool = [(nbytes, where) for nbytes, where in made if "pool" in where]
    assert sorted(in_mem_pool) == sorted((nbytes, (GPU_MEMORY_TYPE_KV_CACHE, "pool")) for nbytes in backings)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 900), st.booleans()), min_size=1, max_size=12))
def test_requests_come_and_go(lives):
    """Each page id is a multiple of the layers, none is lost or handed out twice; flushing gives all of them back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSV4_LAYOUT", "page-major")
        made = built(pages=14)
    allocator, stride = made.allocator, made.pool.page_stride
    every = {stride * page for page in range(1, 15)}
    assert len(allocator.full_to_swa_index_mapping) == (14 * stride + 1) * PAGE + 1
    assert made.pool.full_to_swa_index_mapping is allocator.full_to_swa_index_mapping
    running: list[oracle.Request] = []
    for number, (tokens, leaves) in enumerate(lives):
        if allocator.available_size() >= tokens + PAGE:
            running.append(oracle.new_request(allocator, number, tokens))
        if leaves and running:
            oracle.release(allocator, running.pop(0).slots)
        held = [page for request in running for page in torch.unique(request.slots // PAGE).tolist()]
        free = allocator.full_attn_allocator.free_pages.tolist()
        assert sorted(held + free) == sorted(every)
        assert allocator.full_available_size() == len(free) * PAGE
    allocator.clear()
    assert set(allocator.full_attn_allocator.free_pages.tolist()) == every
    assert not allocator.full_to_swa_index_mapping[:-1].any()


def sent_pages(allocator: Any, slots: torch.Tensor) -> np.ndarray:
    """Page numbers as the engine's own send path makes them out of rows of its request table."""
    from sglang.srt.disaggregation import decode, prefill

    translate = getattr(allocator, "translate_kv_indices_for_transfer", lambda same: same)
    pages = prefill.kv_to_page_indices(translate(slots), PAGE)
    assert (decode.kv_to_page_indices(translate(slots), PAGE) == pages).all()
    return pages


@pytest.mark.parametrize("ratios", [UNEVEN, FLASH_RATIOS])
def test_three_regions_move_all_layers(ratios):
    """A prefill server's request, copied region by region as a transfer backend does, is the decode server's."""
    source, target = built(ratios), built(ratios, pages=9)
    assert source.pool.page_stride == page_stride(ratios)
    oracle.fill(source.pool, 3)
    oracle.fill(target.pool, 4)
    oracle.new_request(target.allocator, 1, 300)  # so that the pages differ
    here, there = oracle.new_request(source.allocator, 1, 700), oracle.new_request(target.allocator, 2, 700)
    before = [part.backing.clone() for _, part, _ in history(target.pool)]
    ours, theirs = source.pool.get_contiguous_buf_infos(), target.pool.get_contiguous_buf_infos()
    assert len(ours[0]) == len({key[0] for key in oracle.buffers(source.pool) if oracle.grows(key[0])})
    assert ours[2] == theirs[2] == list(piece_figures(Geometry(ratios))[1].piece_bytes)
    from_pages, to_pages = (
        sent_pages(made.allocator, request.slots.to(torch.int32)) for made, request in ((source, here), (target, there))
    )
    assert max(from_pages) <= source.spec.pages
    for address, length, item, to in zip(*ours, theirs[0], strict=True):
        assert length % item == 0
        for page, to_page in zip(from_pages.tolist(), to_pages.tolist(), strict=True):
            assert (page + 1) * item <= length
            ctypes.memmove(to + to_page * item, address + page * item, item)
    wanted = {key: row for key, row in oracle.read(source.pool, here.slots, 700, 1).items() if oracle.grows(key[0])}
    got = {key: row for key, row in oracle.read(target.pool, there.slots, 700, 2).items() if oracle.grows(key[0])}
    oracle.compare(wanted, got)
    for old, (_, part, _) in zip(before, history(target.pool), strict=True):
        changed = (part.backing != old).any(1).view(-1, target.pool.page_stride).any(1)
        assert changed.nonzero().flatten().tolist() == sorted(to_pages)


def test_windows_and_states_are_registered_as_stock(monkeypatch):
    """Beside the three regions of history, none over another; also a draft's."""
    made = built(FLASH_RATIOS, pages=3)
    ours = made.pool.get_state_buf_infos()
    draft = make_draft_pool(made.spec, made.allocator).get_state_buf_infos()
    history_of_ours = made.pool.get_contiguous_buf_infos()
    monkeypatch.setenv("DSV4_LAYOUT", "stock")
    stock = built(FLASH_RATIOS, pages=3)
    assert ours[1:] == stock.pool.get_state_buf_infos()[1:]
    assert draft[1:] == make_draft_pool(stock.spec, stock.allocator).get_state_buf_infos()[1:]
    regions = sorted(
        (begin, begin + length)
        for infos in (history_of_ours, ours, draft)
        for begin, length, _ in zip(*infos, strict=True)
    )
    assert len(history_of_ours[0]) == 3
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(regions))


def says(page_major: bool) -> str:
    arguments = SimpleNamespace(kv_cache_dtype_str="fp8_e4m3")
    if page_major:
        serving.before_manager(None, arguments, None)
    return arguments.kv_cache_dtype_str


@pytest.mark.parametrize(("prefill", "decode"), [(True, False), (False, True)])
def test_a_peer_with_another_layout_is_refused(monkeypatch, prefill, decode):
    """Whichever of the two has the setting: the decode server's own check, before anything is sent."""
    from sglang.srt.disaggregation.common import conn

    fields = dataclasses.fields(conn.PrefillServerInfo)
    said = {field.name: None for field in fields if field.default is field.default_factory}  # there is neither
    said |= dict.fromkeys(("attn_tp_size", "attn_cp_size", "dp_size", "pp_size"), 1)
    said |= {"page_size": PAGE, "kv_cache_dtype": says(prefill), "follow_bootstrap_room": True}
    answer = SimpleNamespace(status_code=200, json=lambda: said)
    manager = object.__new__(conn.CommonKVManager)
    manager.kv_args = SimpleNamespace(page_size=PAGE)
    manager.prefill_info_table, manager.kv_cache_dtype_str = {}, says(decode)
    monkeypatch.setattr(conn.requests, "get", lambda *_, **__: answer)
    with pytest.raises(RuntimeError, match="DSV4_LAYOUT=page-major"):
        manager.try_ensure_parallel_info("peer:1")


def test_the_engine_counts_the_map_and_the_unused_rows():
    """Flash: 20 more entries of the map a token, and a 21st layer of ratio 128."""
    sized = SimpleNamespace(stage_compress_ratios=list(FLASH_RATIOS))
    assert serving.after_bytes_per_full_token(1000.0, sized) == 1000 + 20 * 8 + 1728 / PAGE


def far_page(part: Any, name: str) -> tuple[int, torch.Tensor]:
    """A page whose bytes lie past 2 GB of its layer, and its bytes; only touched pages take memory."""
    width = getattr(part, name)[0].shape[1]
    far = 2**31 // width + 21
    setattr(part, name, [torch.from_numpy(np.zeros((far + 1, width), np.uint8))])
    return far, getattr(part, name)[0][far]


def test_keys_and_rows_are_read_and_written_past_2_gb():
    """The engine's unfused kernels take int32 page numbers or slots, and multiply pages in that width."""
    part = built().pool.c4_indexer_kv_pool
    far, page = far_page(part, "index_k_with_scale_buffer")
    page.copy_(torch.randint(0, 255, page.shape, dtype=torch.uint8))
    keys, scales = part.get_index_k_scale_buffer(0, torch.tensor([64]).int(), torch.tensor([[far]]).int(), 64, 64)
    assert torch.equal(keys.view(torch.uint8).flatten(), page[: 64 * 128])
    assert torch.equal(scales.view(torch.uint8).flatten(), page[64 * 128 :])
    pool = built(fp4_indexer=True).pool
    far, page = far_page(pool.c4_kv_pool, "kv_buffer")
    pack = SimpleNamespace(
        k_nope_fp8=torch.randint(0, 255, (1, 448), dtype=torch.uint8).view(torch.float8_e4m3fn),
        k_rope_bf16=torch.randn(1, 64).bfloat16(),
        scale_k_nope_ue8m0=torch.randint(1, 255, (1, 7), dtype=torch.uint8),
    )
    pool.c4_kv_pool.set_key_buffer(0, torch.tensor([far * 64 + 5]).int(), pack)
    assert torch.equal(page[5 * 576 : 5 * 576 + 448], pack.k_nope_fp8.view(torch.uint8)[0])
    assert torch.equal(page[5 * 576 + 448 : 6 * 576], pack.k_rope_bf16.view(torch.uint8)[0])
    assert torch.equal(page[64 * 576 + 5 * 8 :][:7], pack.scale_k_nope_ue8m0[0])
    far, page = far_page(pool.c4_indexer_kv_pool, "index_k_with_scale_buffer")
    pool.c4_indexer_kv_pool.set_index_fp4(0, torch.tensor([far * 64 + 5]).int(), torch.randn(1, 128).bfloat16())
    assert page[5 * 64 : 6 * 64].any() and page[64 * 64 + 5 * 4 :][:4].all()


def test_host_memory_is_that_of_the_stock_pool(monkeypatch):
    sizes = []
    for layout in ("stock", "page-major"):
        monkeypatch.setenv("DSV4_LAYOUT", layout)
        pool = built().pool
        sizes.append(wanted_size(describe(pool), Settings(), 1 << 40))
    assert sizes[0] == sizes[1]
