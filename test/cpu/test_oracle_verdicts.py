"""The oracle's verdicts can fail: each names what differs, and accepts what a load may change. Its requests take,
lose and give back pages as the engine's do."""

from __future__ import annotations

from dataclasses import replace

import oracle
import pytest
import torch
from oracle_pools import DEVICE, SPEC, build, request_of


@pytest.mark.parametrize("n", (1, 5, 129, 257, 1000))
def test_write_then_read_over_a_resume(n: int) -> None:
    """An exact move to other pages and another slot passes all verdicts."""
    pool, allocator = build()
    oracle.new_request(allocator, 1, 10)
    old = request_of(allocator, n)
    oracle.fill(pool, n)
    rows = oracle.read(pool, old.slots, n, 2)
    blocker = oracle.new_request(allocator, 3, 10)
    oracle.release(allocator, old.slots)
    new = oracle.resume(allocator, n)
    assert len(new) == n
    assert int((allocator.full_to_swa_index_mapping[new] > 0).sum()) == oracle.swa_tail(allocator, n)
    oracle.fill(pool, n + 1)
    before = oracle.snapshot(pool)
    with pytest.raises(AssertionError):
        oracle.compare(rows, oracle.read(pool, new, n, 4))
    oracle.write(pool, new, n, 4, rows)
    oracle.compare(rows, oracle.read(pool, new, n, 4))
    oracle.assert_only_changed(before, pool, oracle.may_change(pool, new, n, 4))
    with pytest.raises(AssertionError, match="swa_kv layer 0"):
        oracle.assert_only_changed(before, pool, oracle.may_change(pool, blocker.slots, 1, 3))


def test_compare_names_the_byte() -> None:
    pool, allocator = build()
    request = request_of(allocator, 130)
    oracle.fill(pool, 1)
    rows = oracle.read(pool, request.slots, 130, 2)
    oracle.compare(rows, dict(rows))

    key = ("c4_indexer", 4, 127)
    text = bytearray(rows[key])
    text[131] ^= 0x10
    message = f"c4_indexer layer 4 position 127 byte 131: expected 0x{rows[key][131]:02x}, got 0x{text[131]:02x}"
    with pytest.raises(AssertionError, match=message):
        oracle.compare(rows, {**rows, key: bytes(text)})
    with pytest.raises(AssertionError, match="c4_indexer layer 4 position 127: 132 bytes expected, got 131"):
        oracle.compare(rows, {**rows, key: bytes(text[:131])})
    short = dict(rows)
    del short[("c128_state", 5, 129)]
    with pytest.raises(AssertionError, match="c128_state layer 5 position 129: missing"):
        oracle.compare(rows, short)
    with pytest.raises(AssertionError, match="c128_state layer 5 position 129: extra"):
        oracle.compare(short, rows)


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
    before = oracle.snapshot(pool)
    allowed = oracle.may_change(pool, request.slots, 130, 2)
    oracle.assert_only_changed(before, pool, allowed)
    views = oracle.buffers(pool)

    def must_name(family: str, layer: int, page: int, byte: int, words: str) -> None:
        buffer = views[(family, layer)]
        buffer[page, byte] ^= 0xFF
        offset = page * buffer.shape[1] + byte
        message = rf"{family} layer {layer} byte {offset} \({words}\): changed from 0xa5 to 0x5a"
        with pytest.raises(AssertionError, match=message):
            oracle.assert_only_changed(before, pool, allowed)
        buffer[page, byte] ^= 0xFF

    # the row in front of the window, its values and its scales; position 2 is the last one outside
    row = oracle.swa_row(pool, int(request.slots[2]))
    page, inner = divmod(row, 256)
    must_name("swa_kv", 1, page, inner * 576 + 575, f"page {page}, row {row}, value byte 575")
    must_name("swa_kv", 1, page, 256 * 576 + inner * 8, f"page {page}, row {row}, scale byte 0")
    must_name("swa_kv", 1, page, 256 * 584, f"page {page}, padding")
    # padding and last row of a page of another request
    page = int(foreign.slots[0]) // 256
    must_name("c4_kv", 2, page, 64 * 584, f"page {page}, padding")
    must_name("c4_kv", 2, page, 64 * 584 - 1, f"page {page}, row {page * 64 + 63}, scale byte 7")
    must_name("c4_indexer", 4, page, 64 * 128, f"page {page}, row {page * 64}, scale byte 0")
    must_name("c128_kv", 5, page, 2 * 576 - 1, f"page {page}, row {page * 2 + 1}, value byte 575")
    must_name("c128_kv", 5, 0, 2 * 584 + 1, "page 0, padding")
    # a state row in front of the tail (position 123 of 130), another slot's ring, the sentinels
    row = oracle.c4_state_row(pool, "c4_state", 2, oracle.swa_row(pool, int(request.slots[123])))
    must_name("c4_state", 2, row, 8191, f"row {row}, byte 8191 of the row")
    must_name("c4_indexer_state", 2, row, 0, f"row {row}, byte 0 of the row")
    must_name("c128_state", 3, 2 * 128 - 1, 0, "row 255, byte 0 of the row")
    must_name("c128_state", 3, 3 * 128, 0, "row 384, byte 0 of the row")
    for family, layer in (("c4_state", 4), ("c4_indexer_state", 4), ("c128_state", 5)):
        last = views[(family, layer)].shape[0] - 1
        must_name(family, layer, last, 1, f"row {last}, byte 1 of the row")
    # and what a load may change does not raise
    page = int(request.slots[0]) // 256
    views[("c4_kv", 2)][page].fill_(0)
    views[("c128_state", 3)][2 * 128 : 3 * 128].fill_(0)
    oracle.assert_only_changed(before, pool, allowed)


def test_an_unmapped_row_inside_the_window_is_an_error() -> None:
    pool, allocator = build()
    request = oracle.new_request(allocator, 2, 300)
    oracle.evict(allocator, request.slots, 300)
    with pytest.raises(AssertionError, match="has no SWA row"):
        oracle.read(pool, request.slots, 300, 2)


def test_fill_is_deterministic_and_total() -> None:
    pool, _ = build()
    oracle.poison(pool, 0x11)
    assert all(bool((buffer == 0x11).all()) for buffer in oracle.snapshot(pool).values())
    oracle.fill(pool, 5)
    first = oracle.snapshot(pool)
    oracle.fill(pool, 6)
    assert not any(torch.equal(first[key], now) for key, now in oracle.snapshot(pool).items())
    oracle.fill(pool, 5)
    assert all(torch.equal(first[key], now) for key, now in oracle.snapshot(pool).items())
    for (family, _), buffer in first.items():
        assert len(buffer[-1].unique()) > 200, family
        assert len(buffer[:, -1].unique()) > min(4, buffer.shape[0] // 2), family
    assert bool(pool.compress_state_pools[2].kv_score_buffer.kv_score.isnan().any())


def test_snapshot_is_a_copy() -> None:
    pool, _ = build()
    oracle.poison(pool, 1)
    kept = oracle.snapshot(pool)
    oracle.poison(pool, 2)
    assert all(bool((buffer == 1).all()) for buffer in kept.values())


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("drafts", (0, 4))
def test_cleared_ring(dtype: torch.dtype, drafts: int) -> None:
    pool, _ = build(replace(SPEC, state_dtype=dtype, draft_tokens=drafts))
    ring = 256 if drafts else 128
    oracle.fill(pool, 3)
    with pytest.raises(AssertionError, match=r"c128_state layer 3 row .* not cleared"):
        oracle.cleared_ring_ok(pool, 2, 130)
    clear = getattr(pool, "clear_request_scoped_state", None) or pool.clear_c128_req_state
    clear(2)
    assert oracle.cleared_ring_ok(pool, 2, 0)
    buffer = oracle.buffers(pool)[("c128_state", 5)]
    start = 2 * ring
    first = start + 128 % ring
    buffer[first : first + 2].fill_(7)  # positions 128 and 129
    assert oracle.cleared_ring_ok(pool, 2, 130)
    with pytest.raises(AssertionError, match=f"c128_state layer 5 row {first + 1} byte 0: not cleared"):
        oracle.cleared_ring_ok(pool, 2, 129)
    with pytest.raises(AssertionError, match="c128_state layer 3 row"):
        oracle.cleared_ring_ok(pool, 1, 130)
    buffer[first : first + 2].fill_(0)
    with pytest.raises(AssertionError, match=f"row {first} byte {buffer.shape[1] // 2 + dtype.itemsize - 2}:"):
        oracle.cleared_ring_ok(pool, 2, 0)


# ------------------------------------------------------------------------------ requests over the real allocator


def test_grow_in_pieces_evict_and_release() -> None:
    _, allocator = build()
    full, swa = allocator.full_available_size(), allocator.swa_available_size()
    request = oracle.new_request(allocator, 1)
    for piece in (3, 1, 252, 1, 300, 443):
        oracle.grow(allocator, request, piece)
    assert request.n == len(request.slots) == 1000
    assert len(request.slots.unique()) == 1000
    assert torch.equal(request.slots % 256, torch.arange(1000, device=DEVICE) % 256)
    mapped = allocator.full_to_swa_index_mapping[request.slots]
    assert torch.equal(mapped % 256, request.slots % 256)
    assert allocator.full_available_size() == full - 4 * 256
    assert allocator.swa_available_size() == swa - 4 * 256
    oracle.evict(allocator, request.slots, 872)
    oracle.evict_out_of_window(allocator, request)  # the same, once more
    mapped = allocator.full_to_swa_index_mapping[request.slots]
    assert bool((mapped[:768] == 0).all())
    assert bool((mapped[768:] > 0).all())
    assert allocator.swa_available_size() == swa - 256
    oracle.release(allocator, request.slots)
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (full, swa)


@pytest.mark.parametrize(
    ("n", "tail"),
    ((1, 1), (127, 127), (383, 383), (384, 128), (385, 129), (639, 383), (640, 128), (1000, 232)),
)
def test_resume_maps_the_tail(n: int, tail: int) -> None:
    pool, allocator = build()
    full, swa = allocator.full_available_size(), allocator.swa_available_size()
    slots = oracle.resume(allocator, n)
    assert oracle.swa_tail(allocator, n) == tail
    mapped = allocator.full_to_swa_index_mapping[slots]
    assert bool((mapped[: n - tail] == 0).all())
    assert bool((mapped[n - tail :] > 0).all())
    assert len(oracle.read(pool, slots, n, 1)) > 0
    request = oracle.Request(slots, 1, n)
    oracle.grow(allocator, request, 1)
    assert len(request.slots) == n + 1
    oracle.release(allocator, request.slots)
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (full, swa)
