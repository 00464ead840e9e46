"""The test oracle reads each family's rows where the engine writes them, and its verdicts can fail."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import oracle
import pytest
import torch

from sglang_dsv4.testing import standalone
from sglang_dsv4.testing.standalone import PoolSpec

LENGTHS = (1, 3, 4, 127, 128, 130, 255, 256, 257, 513, 1000)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPEC = PoolSpec(pages=8, swa_pages=7, device=DEVICE)
C4_LAYERS, C128_LAYERS = (2, 4), (3, 5)


def build(spec: PoolSpec = SPEC) -> tuple[Any, Any]:
    pool = standalone.make_pool(spec)
    return pool, standalone.make_allocator(spec, pool)


def request_of(allocator: Any, n: int, req_slot: int = 2) -> oracle.Request:
    """A request that does not start on the first page, with window eviction done as in decode."""
    request = oracle.new_request(allocator, req_slot, n)
    oracle.evict_out_of_window(allocator, request)
    return request


@pytest.fixture(scope="module")
def shared() -> tuple[Any, Any]:
    """A pool that no test fills and an allocator that every test leaves as it found it."""
    return build()


def engines_rows() -> Any:
    from sglang.kernels.ops.kvcache import dsv4_main_kv_store as module

    return module


def make_pack(rows: int, seed: int) -> tuple[Any, list[tuple[bytes, bytes]]]:
    """Random rows as the engine's input, and their value and scale bytes (without the pad byte)."""
    generator = torch.Generator().manual_seed(seed)

    def noise(width: int) -> torch.Tensor:
        # No bit pattern of a NaN: an emulated store may change its payload.
        return torch.randint(0, 0x70, (rows, width), dtype=torch.uint8, generator=generator)

    nope, rope, scale = noise(448), noise(128), noise(7)
    pack = engines_rows().NopeFp8RopeBf16Pack(
        nope.to(DEVICE).view(torch.float8_e4m3fn), rope.to(DEVICE).view(torch.bfloat16), scale.to(DEVICE)
    )
    values = torch.cat([nope, rope], dim=1)
    return pack, [(values[i].numpy().tobytes(), scale[i].numpy().tobytes()) for i in range(rows)]


def test_kv_rows_written_by_the_engine_are_read_back() -> None:
    n = 130
    pool, allocator = build()
    oracle.new_request(allocator, 1, 300)
    request = request_of(allocator, n)
    oracle.fill(pool, 7)
    rows = oracle.read(pool, request.slots, n, 2)
    slots = request.slots

    tail, fours, blocks = range(max(0, n - 127), n), range(3, n, 4), range(127, n, 128)
    cases = (
        ("swa_kv", 4, pool.swa_kv_pool, 4, tail, allocator.full_to_swa_index_mapping[slots[list(tail)]]),
        ("c4_kv", 4, pool.c4_kv_pool, 1, fours, slots[list(fours)] // 4),
        ("c128_kv", 3, pool.c128_kv_pool, 0, blocks, slots[list(blocks)] // 128),
    )

    expected = dict(rows)
    for family, layer, sub_pool, index, where, loc in cases:
        pack, texts = make_pack(len(where), seed=layer + n)
        engines_rows().SetKAndS.triton(sub_pool, sub_pool.kv_buffer[index], loc.contiguous(), pack)
        for position, (values, scales) in zip(where, texts, strict=True):
            pad = rows[(family, layer, position)][-1:]  # the engine leaves the eighth scale byte
            expected[(family, layer, position)] = values + scales + pad
    oracle.compare(expected, oracle.read(pool, slots, n, 2))


def test_indexer_rows_written_by_the_engine_are_read_back() -> None:
    from sglang.kernels.ops.kvcache.dsa_index_k_cache import _set_k_and_s_triton

    n = 130
    pool, allocator = build()
    request = request_of(allocator, n)
    oracle.fill(pool, 8)
    expected = oracle.read(pool, request.slots, n, 2)
    where = [p for p in range(n) if p % 4 == 3]
    generator = torch.Generator().manual_seed(n)
    keys = torch.randint(0, 0x70, (len(where), 128), dtype=torch.uint8, generator=generator)
    scales = torch.rand(len(where), generator=generator)
    buffer, loc = pool.c4_indexer_kv_pool.index_k_with_scale_buffer[1], (request.slots[where] // 4).contiguous()
    _set_k_and_s_triton(buffer, loc, keys.to(DEVICE).view(torch.float8_e4m3fn), scales.to(DEVICE), page_size=64)
    for i, position in enumerate(where):
        expected[("c4_indexer", 4, position)] = keys[i].numpy().tobytes() + scales[i].numpy().tobytes()
    oracle.compare(expected, oracle.read(pool, request.slots, n, 2))


@pytest.mark.parametrize("drafts", (0, 4))
@pytest.mark.parametrize("n", LENGTHS)
def test_state_rows_are_the_engine_translation(n: int, drafts: int) -> None:
    pool, allocator = build(replace(SPEC, draft_tokens=drafts))
    oracle.new_request(allocator, 1, 300)
    request = request_of(allocator, n)
    tail = list(range(max(0, n - (n % 4 + 4)), n))
    swa = pool.translate_loc_from_full_to_swa(request.slots[tail])
    for layer in C4_LAYERS:
        for family, pools in (
            ("c4_state", pool.compress_state_pools),
            ("c4_indexer_state", pool.indexer_compress_state_pools),
        ):
            assert pools[layer].ring_size == (16 if drafts else 8)
            engine = pools[layer].translate_from_swa_loc_to_state_loc(swa.clone()).tolist()
            ours = list(oracle.live_rows(pool, (family, layer), request.slots, n, 2))
            assert ours == list(zip(tail, engine, strict=True))
            assert len(set(engine)) == len(engine), "two live positions share a row"
    pending = torch.arange(128 * (n // 128), n, device=DEVICE)
    for layer in C128_LAYERS:
        state = pool.compress_state_pools[layer]
        assert state.ring_size == (256 if drafts else 128)
        engine = state.translate_from_req_position_to_state_loc(torch.full_like(pending, 2), pending.clone()).tolist()
        ours = list(oracle.live_rows(pool, ("c128_state", layer), request.slots, n, 2))
        assert ours == list(zip(pending.tolist(), engine, strict=True))


@pytest.mark.parametrize("n", LENGTHS)
def test_swa_rows_are_the_engine_window(shared: tuple[Any, Any], n: int) -> None:
    """The engine's window indices for the step at position ``n``, less that position's own row."""
    from sglang.kernels.ops.attention.dsv4.attn_metadata_kernels import BuildCausalSwaPageIndices

    pool, allocator = shared
    request = oracle.new_request(allocator, 2, n + 1)
    table = torch.zeros(4, 2048, dtype=torch.int32, device=DEVICE)
    table[2, : n + 1] = request.slots.to(torch.int32)
    window = BuildCausalSwaPageIndices.torch(
        req_to_token=table,
        full_to_swa_mapping=allocator.full_to_swa_index_mapping,
        req_pool_indices_repeated=torch.tensor([2], device=DEVICE),
        seq_lens_casual=torch.tensor([n + 1], dtype=torch.int32, device=DEVICE),
        swa_window=128,
        page_index_aligned_size=64,
    )
    engine = [row for row in window.flatten().tolist() if row >= 0]
    engine.remove(oracle.swa_row(pool, int(request.slots[n])))
    ours = [row for _, row in oracle.live_rows(pool, ("swa_kv", 0), request.slots, n, 2)]
    assert sorted(ours) == sorted(engine)
    oracle.release(allocator, request.slots)


@pytest.mark.parametrize("family", oracle.FAMILIES)
def test_a_flip_of_a_live_byte_is_seen(family: str) -> None:
    """The first byte of the first and the last byte of the last live row of each buffer."""
    pool, allocator = build()
    n = 259
    request = request_of(allocator, n)
    oracle.fill(pool, 2)
    rows = oracle.read(pool, request.slots, n, 2)
    for (name, layer), buffer in oracle.buffers(pool).items():
        if name != family:
            continue
        live = list(oracle.live_rows(pool, (family, layer), request.slots, n, 2))
        for end, (position, row) in ((0, live[0]), (-1, live[-1])):
            page, *byte = oracle._row_spans(pool, family, buffer.shape[1], row)[end]
            index = range(len(rows[(family, layer, position)]))[end]
            buffer[page, byte[end] + end] ^= 1
            with pytest.raises(AssertionError, match=f"{family} layer {layer} position {position} byte {index}:"):
                oracle.compare(rows, oracle.read(pool, request.slots, n, 2))
            buffer[page, byte[end] + end] ^= 1
    oracle.compare(rows, oracle.read(pool, request.slots, n, 2))


def test_assert_only_changed_catches_what_is_not_the_request() -> None:
    pool, allocator = build()
    foreign = oracle.new_request(allocator, 1, 300)
    request = request_of(allocator, 130)
    oracle.poison(pool)
    before, views = oracle.snapshot(pool), oracle.buffers(pool)
    allowed = oracle.may_change(pool, request.slots, 130, 2)
    swa_page, inner = divmod(oracle.swa_row(pool, int(request.slots[2])), 256)  # in front of the window
    state = oracle.c4_state_row(pool, "c4_state", 2, oracle.swa_row(pool, int(request.slots[123])))  # and of the tail
    page = int(foreign.slots[0]) // 256
    for family, layer, where, byte in (
        ("swa_kv", 1, swa_page, inner * 576 + 575), ("swa_kv", 1, swa_page, 256 * 584),
        ("c4_kv", 2, page, 64 * 584 - 1), ("c4_indexer", 4, page, 64 * 128), ("c128_kv", 5, page, 2 * 576 - 1),
        ("c4_state", 2, state, 8191), ("c4_indexer_state", 2, state, 0),
        ("c128_state", 3, 2 * 128 - 1, 0), ("c128_state", 3, 3 * 128, 0),  # the rings of the slots beside its own
    ):  # fmt: skip
        buffer = views[(family, layer)]
        buffer[where, byte] ^= 0xFF
        with pytest.raises(AssertionError, match=f"{family} layer {layer} byte {where * buffer.shape[1] + byte} "):
            oracle.assert_only_changed(before, pool, allowed)
        buffer[where, byte] ^= 0xFF
    views[("c4_kv", 2)][int(request.slots[0]) // 256].fill_(0)  # a load may change these
    views[("c128_state", 3)][2 * 128 : 3 * 128].fill_(0)
    oracle.assert_only_changed(before, pool, allowed)


def test_a_ring_that_was_not_cleared_is_seen() -> None:
    pool, _ = build()
    oracle.fill(pool, 3)
    with pytest.raises(AssertionError, match=r"c128_state layer 3 row .* not cleared"):
        oracle.cleared_ring_ok(pool, 2, 130)
    (getattr(pool, "clear_request_scoped_state", None) or pool.clear_c128_req_state)(2)
    buffer = oracle.buffers(pool)[("c128_state", 5)]
    buffer[2 * 128 : 2 * 128 + 2].fill_(7)  # positions 128 and 129
    assert oracle.cleared_ring_ok(pool, 2, 130)
    with pytest.raises(AssertionError, match=f"c128_state layer 5 row {2 * 128 + 1} byte 0: not cleared"):
        oracle.cleared_ring_ok(pool, 2, 129)
