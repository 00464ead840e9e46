"""A slow, plain second opinion on what a DeepSeek-V4 request's cache is.

Everything here is written from the engine's own layout, one token and one layer at a time, and shares
no code with the package under test. A buffer is addressed by ``(family, layer)`` with the absolute model
layer; a byte string by ``(family, layer, position)`` with the token's position in its request.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

FAMILIES = ("swa_kv", "c4_kv", "c4_indexer", "c128_kv", "c4_state", "c4_indexer_state", "c128_state")
STATE_FAMILIES = ("c4_state", "c4_indexer_state", "c128_state")
WINDOW = 128
KV_VALUE_BYTES = 448 + 2 * 64
KV_SCALE_BYTES = 8
INDEXER_SCALE_BYTES = 4

BufferKey = tuple[str, int]
RowKey = tuple[str, int, int]


# ---------------------------------------------------------------------------------------- the buffers


def _stage_layers(pool: Any, ratio: int | None = None) -> list[int]:
    """Absolute ids of this stage's layers, all or those of one compress ratio."""
    found = []
    for layer in range(pool._stage_start, pool._stage_end):
        if ratio is None or pool.compression_ratios[layer] == ratio:
            found.append(layer)
    return found


def _bytes_view(buffer: torch.Tensor) -> torch.Tensor:
    """The same memory as [pages or rows, bytes]."""
    assert buffer.dim() == 2, f"a buffer of {buffer.dim()} dimensions"
    assert buffer.is_contiguous(), "a buffer with gaps"
    return buffer.view(torch.uint8)


def _state_pool(pool: Any, family: str, layer: int) -> Any:
    pools = pool.indexer_compress_state_pools if family == "c4_indexer_state" else pool.compress_state_pools
    state = pools[layer]
    assert state is not None, f"{family}: layer {layer} has no state"
    assert state.ratio == (128 if family == "c128_state" else 4), f"{family}: layer {layer} has another ratio"
    assert state.ring_size > 1, f"{family}: layer {layer} keeps an accumulator, not a ring"
    return state


def buffers(pool: Any) -> dict[BufferKey, torch.Tensor]:
    """Every cache buffer as a uint8 view [pages or rows, bytes]; no copy."""
    found: dict[BufferKey, torch.Tensor] = {}
    lists: list[tuple[str, list[int], Any]] = [
        ("swa_kv", _stage_layers(pool), pool.swa_kv_pool.kv_buffer),
    ]
    if _stage_layers(pool, 4):
        lists.append(("c4_kv", _stage_layers(pool, 4), pool.c4_kv_pool.kv_buffer))
        lists.append(("c4_indexer", _stage_layers(pool, 4), pool.c4_indexer_kv_pool.index_k_with_scale_buffer))
    if _stage_layers(pool, 128):
        lists.append(("c128_kv", _stage_layers(pool, 128), pool.c128_kv_pool.kv_buffer))
    for family, layers, tensors in lists:
        assert len(layers) == len(tensors), f"{family}: {len(tensors)} buffers for layers {layers}"
        for layer, tensor in zip(layers, tensors, strict=True):
            found[(family, layer)] = _bytes_view(tensor)
    for family, ratio in (("c4_state", 4), ("c4_indexer_state", 4), ("c128_state", 128)):
        for layer in _stage_layers(pool, ratio):
            found[(family, layer)] = _bytes_view(_state_pool(pool, family, layer).kv_score_buffer.kv_score)
    return found


def snapshot(pool: Any) -> dict[BufferKey, torch.Tensor]:
    """Copies of all buffers, in host memory."""
    return {key: buffer.to("cpu", copy=True) for key, buffer in buffers(pool).items()}


def fill(pool: Any, seed: int) -> None:
    """Random bytes everywhere: dummy pages, page padding, NaN payloads and sentinel rows included."""
    generator = np.random.default_rng(seed)
    for buffer in buffers(pool).values():
        noise = np.frombuffer(generator.bytes(buffer.numel()), np.uint8)
        buffer.copy_(torch.tensor(noise).view(buffer.shape))


def poison(pool: Any, byte: int = 0xA5) -> None:
    """One byte everywhere."""
    for buffer in buffers(pool).values():
        buffer.fill_(byte)


# ------------------------------------------------------------------------------------------- the rows


def _rows_a_page(pool: Any, family: str) -> int:
    """Rows of one page; 1 for a state family, whose buffer is a plain list of rows."""
    if family in STATE_FAMILIES:
        return 1
    if family == "swa_kv":
        return int(pool.swa_kv_pool.page_size)
    return int(pool.page_size) // (128 if family == "c128_kv" else 4)


def _row_layout(pool: Any, family: str, page_bytes: int) -> tuple[int, int]:
    """(value bytes, scale bytes) of a row; a state row is all value."""
    rows = _rows_a_page(pool, family)
    if family in STATE_FAMILIES:
        return page_bytes, 0
    if family == "c4_indexer":
        assert page_bytes % rows == 0, f"indexer page of {page_bytes} bytes"
        row = page_bytes // rows
        assert row in (128 + INDEXER_SCALE_BYTES, 64 + INDEXER_SCALE_BYTES), f"indexer row of {row} bytes"
        return row - INDEXER_SCALE_BYTES, INDEXER_SCALE_BYTES
    used = rows * (KV_VALUE_BYTES + KV_SCALE_BYTES)
    padded = -(-used // 576) * 576
    assert page_bytes == padded, f"{family}: a page of {page_bytes} bytes, not {padded}"
    return KV_VALUE_BYTES, KV_SCALE_BYTES


def _row_spans(pool: Any, family: str, page_bytes: int, row: int) -> list[tuple[int, int, int]]:
    """Where a row's bytes lie, in order: (page, first byte, past-last byte)."""
    rows = _rows_a_page(pool, family)
    values, scales = _row_layout(pool, family, page_bytes)
    page = row // rows
    inner = row % rows
    spans = [(page, inner * values, inner * values + values)]
    if scales:
        start = rows * values + inner * scales
        spans.append((page, start, start + scales))
    return spans


def swa_row(pool: Any, slot: int) -> int:
    """SWA row of a full slot; an unmapped slot is an error."""
    row = int(pool.full_to_swa_index_mapping[slot])
    assert row > 0, f"full slot {slot} has no SWA row"
    return row


def c4_state_row(pool: Any, family: str, layer: int, swa_loc: int) -> int:
    """State row of the token that lies in SWA row ``swa_loc``."""
    ring = int(_state_pool(pool, family, layer).ring_size)
    return (swa_loc // int(pool.swa_page_size)) * ring + swa_loc % ring


def c128_state_row(pool: Any, layer: int, req_slot: int, position: int) -> int:
    """State row of a position of the request in slot ``req_slot``."""
    ring = int(_state_pool(pool, "c128_state", layer).ring_size)
    return req_slot * ring + position % ring


def _c4_kv_row(pool: Any, compressed: int) -> int:
    mapping = getattr(pool.c4_kv_pool, "full_to_hisparse_device_index_mapping", None)
    if type(pool.c4_kv_pool).__name__ != "HiSparseC4DevicePool":
        return compressed
    assert mapping is not None, "a HiSparse pool without a device mapping"
    row = int(mapping[compressed])
    assert row > 0, f"compressed row {compressed} is not on the device"
    return row


def positions(family: str, n: int) -> list[int]:
    """Positions of a request with ``n`` saved tokens whose rows the next step needs."""
    if family == "swa_kv":
        return list(range(max(0, n - (WINDOW - 1)), n))
    if family in ("c4_state", "c4_indexer_state"):
        return list(range(max(0, n - (n % 4 + 4)), n))
    if family == "c128_state":
        return list(range(128 * (n // 128), n))
    return list(range(n))


def live_rows(pool: Any, key: BufferKey, slots: torch.Tensor, n: int, req_slot: int) -> Iterator[tuple[int, int]]:
    """(position, row in the buffer) of everything of one family and layer that must survive."""
    family, layer = key
    assert slots.dim() == 1
    assert len(slots) >= n, f"{len(slots)} slots for {n} tokens"
    numbers = slots.tolist()
    for position in positions(family, n):
        slot = numbers[position]
        if family == "swa_kv":
            yield position, swa_row(pool, slot)
        elif family == "c4_kv" and (slot + 1) % 4 == 0:
            yield position, _c4_kv_row(pool, slot // 4)
        elif family == "c4_indexer" and (slot + 1) % 4 == 0:
            yield position, slot // 4
        elif family == "c128_kv" and (slot + 1) % 128 == 0:
            yield position, slot // 128
        elif family in ("c4_state", "c4_indexer_state"):
            yield position, c4_state_row(pool, family, layer, swa_row(pool, slot))
        elif family == "c128_state":
            yield position, c128_state_row(pool, layer, req_slot, position)


def read(pool: Any, slots: torch.Tensor, n: int, req_slot: int) -> dict[RowKey, bytes]:
    """Every byte string of a request with ``n`` saved tokens that a host copy must keep."""
    slots = slots.cpu()
    found: dict[RowKey, bytes] = {}
    for (family, layer), buffer in buffers(pool).items():
        page_bytes = buffer.shape[1]
        memory = memoryview(buffer.cpu().numpy()).cast("B")
        for position, row in live_rows(pool, (family, layer), slots, n, req_slot):
            assert not _is_sentinel(family, buffer, row), f"{family} layer {layer}: row {row} is the sentinel"
            text = b""
            for page, start, end in _row_spans(pool, family, page_bytes, row):
                text += bytes(memory[page * page_bytes + start : page * page_bytes + end])
            found[(family, layer, position)] = text
    return found


def write(pool: Any, slots: torch.Tensor, n: int, req_slot: int, rows: dict[RowKey, bytes]) -> None:
    """The reverse of ``read``: put the byte strings where this request's rows are now."""
    slots = slots.cpu()
    for (family, layer), buffer in buffers(pool).items():
        for position, row in live_rows(pool, (family, layer), slots, n, req_slot):
            text = rows[(family, layer, position)]
            done = 0
            for page, start, end in _row_spans(pool, family, buffer.shape[1], row):
                piece = bytearray(text[done : done + end - start])
                buffer[page, start:end].copy_(torch.frombuffer(piece, dtype=torch.uint8))
                done += end - start
            assert done == len(text)


def _is_sentinel(family: str, buffer: torch.Tensor, row: int) -> bool:
    return family in STATE_FAMILIES and row == buffer.shape[0] - 1


# ------------------------------------------------------------------------------------------- verdicts


def compare(expected: dict[RowKey, bytes], got: dict[RowKey, bytes]) -> None:
    """Raise AssertionError on the first difference, by name."""
    for key in sorted(expected.keys() | got.keys(), key=lambda k: (FAMILIES.index(k[0]), k[1], k[2])):
        where = f"{key[0]} layer {key[1]} position {key[2]}"
        if key not in got:
            raise AssertionError(f"{where}: missing")
        if key not in expected:
            raise AssertionError(f"{where}: extra")
        if expected[key] == got[key]:
            continue
        if len(expected[key]) != len(got[key]):
            raise AssertionError(f"{where}: {len(expected[key])} bytes expected, got {len(got[key])}")
        for index, (want, have) in enumerate(zip(expected[key], got[key], strict=True)):
            if want != have:
                raise AssertionError(f"{where} byte {index}: expected 0x{want:02x}, got 0x{have:02x}")


def may_change(pool: Any, slots: torch.Tensor, n: int, req_slot: int) -> dict[BufferKey, torch.Tensor]:
    """Bytes that a load of this request may change, as boolean masks in the buffers' shapes."""
    slots = slots.cpu()
    paged = ["c4_indexer", "c128_kv"]
    if type(pool.c4_kv_pool).__name__ != "HiSparseC4DevicePool":
        paged.append("c4_kv")
    allowed: dict[BufferKey, torch.Tensor] = {}
    for (family, layer), buffer in buffers(pool).items():
        mask = torch.zeros(tuple(buffer.shape), dtype=torch.bool)
        if family in paged:
            for page in {slot // int(pool.page_size) for slot in slots[:n].tolist()}:
                mask[page] = True
        elif family == "c128_state":
            ring = int(_state_pool(pool, family, layer).ring_size)
            mask[req_slot * ring : (req_slot + 1) * ring] = True
        else:
            for _, row in live_rows(pool, (family, layer), slots, n, req_slot):
                for page, start, end in _row_spans(pool, family, buffer.shape[1], row):
                    mask[page, start:end] = True
        if family in STATE_FAMILIES:
            assert not bool(mask[-1].any()), f"{family} layer {layer}: the sentinel is in reach"
        allowed[(family, layer)] = mask
    return allowed


def locate(pool: Any, family: str, page: int, byte: int) -> str:
    """A byte of a buffer in words: the page, the row and the part of the row."""
    if family in STATE_FAMILIES:
        return f"row {page}, byte {byte} of the row"
    buffer = next(b for (name, _), b in buffers(pool).items() if name == family)
    rows = _rows_a_page(pool, family)
    values, scales = _row_layout(pool, family, buffer.shape[1])
    if byte < rows * values:
        return f"page {page}, row {page * rows + byte // values}, value byte {byte % values}"
    behind = byte - rows * values
    if behind < rows * scales:
        return f"page {page}, row {page * rows + behind // scales}, scale byte {behind % scales}"
    return f"page {page}, padding"


def assert_only_changed(
    before: dict[BufferKey, torch.Tensor], pool: Any, allowed: dict[BufferKey, torch.Tensor]
) -> None:
    """Raise AssertionError naming the first byte that differs from ``before`` outside ``allowed``."""
    now = buffers(pool)
    assert before.keys() == now.keys() == allowed.keys(), "not the same buffers"
    for (family, layer), buffer in now.items():
        old = before[(family, layer)].cpu()
        new = buffer.cpu()
        wrong = (old != new) & ~allowed[(family, layer)]
        if not bool(wrong.any()):
            continue
        offset = int(wrong.flatten().to(torch.uint8).argmax())
        page, byte = divmod(offset, buffer.shape[1])
        raise AssertionError(
            f"{family} layer {layer} byte {offset} ({locate(pool, family, page, byte)}): "
            f"changed from 0x{int(old[page, byte]):02x} to 0x{int(new[page, byte]):02x}"
        )


def cleared_ring_ok(pool: Any, req_slot: int, n: int) -> bool:
    """True if the request slot's c128 rings hold the empty pattern wherever no pending row lies.

    The pattern is zeros in the first half and -inf in the second. Raises AssertionError elsewhere.
    """
    for (family, layer), buffer in buffers(pool).items():
        if family != "c128_state":
            continue
        state = _state_pool(pool, family, layer)
        dtype = state.kv_score_buffer.kv_score.dtype
        minus_inf = {torch.float32: struct.pack("<f", float("-inf")), torch.bfloat16: b"\x80\xff"}[dtype]
        half = buffer.shape[1] // 2
        pattern = bytes(half) + minus_inf * (half // len(minus_inf))
        ring = int(state.ring_size)
        pending = {c128_state_row(pool, layer, req_slot, p) for p in positions(family, n)}
        rows = buffer[req_slot * ring : (req_slot + 1) * ring].cpu().numpy()
        for index in range(ring):
            row = req_slot * ring + index
            if row in pending:
                continue
            text = rows[index].tobytes()
            if text != pattern:
                byte = next(i for i in range(len(text)) if text[i] != pattern[i])
                raise AssertionError(f"{family} layer {layer} row {row} byte {byte}: not cleared")
    return True


# ------------------------------------------------------------------- requests over the real allocator


@dataclass
class Request:
    """A request: its full slots by position, its slot in the request table, its saved tokens."""

    slots: torch.Tensor
    req_slot: int
    n: int = 0


def new_request(allocator: Any, req_slot: int, tokens: int = 0) -> Request:
    """A request of ``tokens`` tokens."""
    request = Request(torch.empty(0, dtype=torch.int64, device=allocator.device), req_slot)
    if tokens:
        grow(allocator, request, tokens)
    return request


def _lengths(allocator: Any, value: int) -> tuple[torch.Tensor, torch.Tensor]:
    host = torch.tensor([value], dtype=torch.int64)
    return host.to(allocator.device), host


def grow(allocator: Any, request: Request, tokens: int) -> torch.Tensor:
    """Append ``tokens`` tokens in full and SWA pages, as a prefill chunk or so many decode steps do."""
    before = len(request.slots)
    last = int(request.slots[-1]) if before else -1
    prefix, prefix_cpu = _lengths(allocator, before)
    total, total_cpu = _lengths(allocator, before + tokens)
    last_loc, _ = _lengths(allocator, last)
    new = allocator.alloc_extend(prefix, prefix_cpu, total, total_cpu, last_loc, tokens)
    assert new is not None, f"no room for {tokens} more tokens after {before}"
    request.slots = torch.cat([request.slots, new.to(torch.int64)])
    request.n = len(request.slots)
    return request.slots


def swa_tail(allocator: Any, n: int) -> int:
    """Tokens that get SWA rows when a request of ``n`` tokens is allocated at once for decode."""
    page = int(allocator.page_size)
    return n - (max(0, n - WINDOW) // page) * page


def resume(allocator: Any, n: int) -> torch.Tensor:
    """Slots for ``n`` tokens as decode preallocation gives them: SWA rows for the page-aligned tail only."""
    prefix, prefix_cpu = _lengths(allocator, 0)
    total, total_cpu = _lengths(allocator, n)
    last_loc, _ = _lengths(allocator, -1)
    slots = allocator.alloc_extend_swa_tail(prefix, prefix_cpu, total, total_cpu, last_loc, n, swa_tail(allocator, n))
    assert slots is not None, f"no room for {n} tokens"
    return slots.to(torch.int64)


def evict(allocator: Any, slots: torch.Tensor, upto: int) -> None:
    """Give back the SWA pages of whole pages of positions below ``upto``; the full slots stay."""
    page = int(allocator.page_size)
    gone = slots[: (upto // page) * page]
    gone = gone[allocator.full_to_swa_index_mapping[gone] > 0]
    if len(gone):
        allocator.free_swa(gone)


def evict_out_of_window(allocator: Any, request: Request) -> None:
    """What the engine's decode step evicts when ``n`` tokens are in the cache."""
    evict(allocator, request.slots, max(0, request.n - WINDOW))


def release(allocator: Any, slots: torch.Tensor) -> None:
    """Give back all pages of a request, full and SWA."""
    if len(slots):
        allocator.free(slots)
