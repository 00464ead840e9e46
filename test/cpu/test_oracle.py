"""The oracle's rows: their number in closed form, and the engine's own code where it can be asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import oracle
import pytest
import torch
from oracle_pools import DEVICE, LENGTHS, SPEC, build, request_of

from sglang_dsv4.engine import standalone

C4_LAYERS = (2, 4)
C128_LAYERS = (3, 5)


@pytest.fixture(scope="module")
def shared() -> tuple[Any, Any]:
    """A pool that no test fills and an allocator that every test leaves as it found it."""
    return build()


def counts(rows: dict[oracle.RowKey, bytes]) -> dict[str, int]:
    found = dict.fromkeys(oracle.FAMILIES, 0)
    for family, _, _ in rows:
        found[family] += 1
    return found


@pytest.mark.parametrize("n", LENGTHS)
def test_number_of_rows_is_the_closed_form(shared: tuple[Any, Any], n: int) -> None:
    pool, allocator = shared
    request = request_of(allocator, n)
    rows = oracle.read(pool, request.slots, n, request.req_slot)
    assert counts(rows) == {
        "swa_kv": 6 * min(n, 127),
        "c4_kv": 2 * (n // 4),
        "c4_indexer": 2 * (n // 4),
        "c128_kv": 2 * (n // 128),
        "c4_state": 2 * min(n, 4 + n % 4),
        "c4_indexer_state": 2 * min(n, 4 + n % 4),
        "c128_state": 2 * (n % 128),
    }
    sizes = {"swa_kv": 584, "c4_kv": 584, "c4_indexer": 132, "c128_kv": 584}
    sizes.update(c4_state=2048 * 4, c4_indexer_state=512 * 4, c128_state=1024 * 4)
    for (family, _, _), text in rows.items():
        assert len(text) == sizes[family]
    oracle.release(allocator, request.slots)


@pytest.mark.parametrize("n", (1, 5, 130, 513))
def test_fp4_indexer_and_bf16_state_rows(n: int) -> None:
    pool, allocator = build(replace(SPEC, fp4_indexer=True, state_dtype=torch.bfloat16))
    request = request_of(allocator, n)
    for (family, _, _), text in oracle.read(pool, request.slots, n, 2).items():
        if family == "c4_indexer":
            assert len(text) == 68
        if family == "c4_state":
            assert len(text) == 2048 * 2


def test_a_stage_has_absolute_layers() -> None:
    pool, allocator = build(replace(SPEC, stage=(3, 6)))
    request = request_of(allocator, 130)
    layers: dict[str, set[int]] = {}
    for family, layer, _ in oracle.read(pool, request.slots, 130, 2):
        layers.setdefault(family, set()).add(layer)
    assert layers["swa_kv"] == {3, 4, 5}
    assert layers["c4_kv"] == layers["c4_indexer"] == layers["c4_state"] == layers["c4_indexer_state"] == {4}
    assert layers["c128_kv"] == layers["c128_state"] == {3, 5}


def test_buffers_are_views_of_all_memory() -> None:
    pool, _ = build()
    found = oracle.buffers(pool)
    assert len(found) == 6 + 2 + 2 + 2 + 2 + 2 + 2
    assert found[("swa_kv", 3)].data_ptr() == pool.swa_kv_pool.kv_buffer[3].data_ptr()
    assert found[("c128_kv", 5)].data_ptr() == pool.c128_kv_pool.kv_buffer[1].data_ptr()
    for buffer in found.values():
        assert buffer.dtype == torch.uint8
    state = pool.compress_state_pools[3].kv_score_buffer.kv_score
    assert found[("c128_state", 3)].numel() == state.numel() * state.element_size()


# ----------------------------------------------------------------- against the engine's own store code


def store_kv(pool: Any, buffer: torch.Tensor, loc: torch.Tensor, pack: Any, torch_code: bool) -> None:
    """One of the engine's own writers of 584-byte rows; the plain one is only in the older line."""
    if standalone.engine_version() == "0.5.17":
        from sglang.kernels.ops.attention.dsv4.index_buf_accessor import SetKAndS

        (SetKAndS.torch if torch_code else SetKAndS.triton)(pool, buffer, loc, pack)
        return
    if torch_code:
        pytest.skip("this engine has no plain torch writer")
    from sglang.kernels.ops.kvcache.dsv4_main_kv_store import SetKAndS

    SetKAndS.triton(pool, buffer, loc, pack)


def make_pack(rows: int, seed: int) -> tuple[Any, list[tuple[bytes, bytes]]]:
    """Random rows as the engine's input, and their value and scale bytes (without the pad byte)."""
    if standalone.engine_version() == "0.5.17":
        from sglang.kernels.ops.attention.dsv4.index_buf_accessor import NopeFp8RopeBf16Pack
    else:
        from sglang.kernels.ops.kvcache.dsv4_main_kv_store import NopeFp8RopeBf16Pack
    generator = torch.Generator().manual_seed(seed)

    def noise(width: int) -> torch.Tensor:
        # No bit pattern of a NaN: an emulated store may change its payload.
        return torch.randint(0, 0x70, (rows, width), dtype=torch.uint8, generator=generator)

    nope, rope, scale = noise(448), noise(128), noise(7)
    pack = NopeFp8RopeBf16Pack(
        nope.to(DEVICE).view(torch.float8_e4m3fn), rope.to(DEVICE).view(torch.bfloat16), scale.to(DEVICE)
    )
    values = torch.cat([nope, rope], dim=1)
    return pack, [(values[i].numpy().tobytes(), scale[i].numpy().tobytes()) for i in range(rows)]


@pytest.mark.parametrize(("n", "torch_code"), ((513, True), (5, False), (130, False)))
def test_kv_rows_written_by_the_engine_are_read_back(n: int, torch_code: bool) -> None:
    pool, allocator = build()
    oracle.new_request(allocator, 1, 300)
    request = request_of(allocator, n)
    oracle.fill(pool, 7)
    rows = oracle.read(pool, request.slots, n, 2)
    slots = request.slots

    cases = []
    tail = [p for p in range(n) if p >= n - 127]
    cases.append(("swa_kv", 4, pool.swa_kv_pool, 4, tail, allocator.full_to_swa_index_mapping[slots[tail]]))
    fours = [p for p in range(n) if p % 4 == 3]
    cases.append(("c4_kv", 4, pool.c4_kv_pool, 1, fours, slots[fours] // 4))
    blocks = [p for p in range(n) if p % 128 == 127]
    if blocks:
        cases.append(("c128_kv", 3, pool.c128_kv_pool, 0, blocks, slots[blocks] // 128))

    expected = dict(rows)
    for family, layer, sub_pool, index, where, loc in cases:
        pack, texts = make_pack(len(where), seed=layer + n)
        store_kv(sub_pool, sub_pool.kv_buffer[index], loc.contiguous(), pack, torch_code)
        for position, (values, scales) in zip(where, texts, strict=True):
            pad = rows[(family, layer, position)][-1:]  # the engine leaves the eighth scale byte
            expected[(family, layer, position)] = values + scales + pad
    oracle.compare(expected, oracle.read(pool, slots, n, 2))
    with pytest.raises(AssertionError, match="swa_kv layer 4 position"):
        oracle.compare(rows, oracle.read(pool, slots, n, 2))


@pytest.mark.parametrize("n", (5, 130))
def test_indexer_rows_written_by_the_engine_are_read_back(n: int) -> None:
    if standalone.engine_version() == "0.5.17":
        from sglang.kernels.ops.attention.dsa.index_buf_accessor import _set_k_and_s_triton
    else:
        from sglang.kernels.ops.kvcache.dsa_index_k_cache import _set_k_and_s_triton
    pool, allocator = build()
    request = request_of(allocator, n)
    oracle.fill(pool, 8)
    expected = oracle.read(pool, request.slots, n, 2)
    where = [p for p in range(n) if p % 4 == 3]
    generator = torch.Generator().manual_seed(n)
    keys = torch.randint(0, 0x70, (len(where), 128), dtype=torch.uint8, generator=generator)
    scales = torch.rand(len(where), generator=generator)
    _set_k_and_s_triton(
        buf=pool.c4_indexer_kv_pool.index_k_with_scale_buffer[1],
        loc=(request.slots[where] // 4).contiguous(),
        index_k=keys.to(DEVICE).view(torch.float8_e4m3fn),
        index_k_scale=scales.to(DEVICE),
        page_size=64,
    )
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
def test_state_rows_are_what_the_next_compressions_read(shared: tuple[Any, Any], n: int) -> None:
    """Decode from position ``n`` by the decode plan's formulas: what is read before it is written is live."""
    pool, allocator = shared
    request = oracle.new_request(allocator, 2, n + 130)
    oracle_rows = {
        family: {row for _, row in oracle.live_rows(pool, (family, layer), request.slots, n, 2)}
        for family, layer in (("c4_state", 2), ("c128_state", 3))
    }
    for family, ratio, ring in (("c4_state", 4, 8), ("c128_state", 128, 128)):

        def state_loc(position: int, ratio: int = ratio, ring: int = ring) -> int:
            if ratio == 128:
                return 2 * ring + position % ring
            loc = int(pool.full_to_swa_index_mapping[request.slots[position]])
            return loc // 256 * ring + loc % ring

        written: set[int] = set()
        read: set[int] = set()
        for seq_len in range(n + 1, n + 131):
            last = seq_len - 1
            written.add(state_loc(last))
            if seq_len % ratio:
                continue
            pages = {state_loc(last) // ratio}
            if ratio == 4 and seq_len > 4:
                pages.add(state_loc(max(last - ratio, 0)) // ratio)
            read |= {page * ratio + i for page in pages for i in range(ratio)} - written
        assert read == oracle_rows[family], family
    oracle.release(allocator, request.slots)


@pytest.mark.parametrize("n", LENGTHS)
def test_swa_rows_are_the_engine_window(shared: tuple[Any, Any], n: int) -> None:
    """The engine's window indices for the step at position ``n``, less that position's own row."""
    if standalone.engine_version() == "0.5.17":
        from sglang.kernels.ops.attention.dsv4_attn_metadata_kernels import BuildCausalSwaPageIndices
    else:
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
    engine = {row for row in window.flatten().tolist() if row >= 0}
    engine.remove(oracle.swa_row(pool, int(request.slots[n])))
    ours = [row for _, row in oracle.live_rows(pool, ("swa_kv", 0), request.slots, n, 2)]
    assert set(ours) == engine
    assert len(ours) == len(engine)
    oracle.release(allocator, request.slots)


def test_hisparse_rows_go_through_the_device_mapping() -> None:
    spec = replace(SPEC, hisparse=True)
    pool, allocator = build(spec)
    request = request_of(allocator, 130)
    rows_total = pool.c4_kv_pool.kv_buffer[0].shape[0] * 64
    mapping = torch.zeros(rows_total, dtype=torch.int64, device=DEVICE)
    pool.c4_kv_pool.register_mapping(mapping)
    with pytest.raises(AssertionError, match="is not on the device"):
        oracle.read(pool, request.slots, 130, 2)
    shuffled = torch.randperm(rows_total - 64, generator=torch.Generator().manual_seed(1)) + 64
    mapping[: len(shuffled)] = shuffled.to(DEVICE)
    oracle.fill(pool, 4)
    rows = oracle.read(pool, request.slots, 130, 2)
    where = [p for p in range(130) if p % 4 == 3]
    engine = pool.c4_kv_pool.translate_loc_from_full_to_hisparse_device(request.slots[:130]).tolist()
    assert list(oracle.live_rows(pool, ("c4_kv", 2), request.slots, 130, 2)) == list(zip(where, engine, strict=True))
    buffer = pool.c4_kv_pool.kv_buffer[0].cpu()
    for position, row in zip(where, engine, strict=True):
        page, inner = divmod(row, 64)
        values = buffer[page, inner * 576 : inner * 576 + 576].numpy().tobytes()
        scales = buffer[page, 64 * 576 + inner * 8 : 64 * 576 + inner * 8 + 8].numpy().tobytes()
        assert rows[("c4_kv", 2, position)] == values + scales
    allowed = oracle.may_change(pool, request.slots, 130, 2)
    assert int(allowed[("c4_kv", 2)].sum()) == 32 * 584
    assert int(allowed[("c4_indexer", 2)].sum()) == 64 * 132
