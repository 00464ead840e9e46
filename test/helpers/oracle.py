"""Gives a slow, plain second opinion on the cache of a DeepSeek-V4 request.

It is written from the engine's own layout, one token and one layer at a time, and shares
no code with the package under test. A buffer is addressed by ``(family, layer)`` with the absolute model
layer; a byte string by ``(family, layer, position)`` with the token's position in its request.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

WINDOW = 128
INDEXER_SCALE_BYTES = 4
SPLIT_CHUNKS = 4  # pieces of an indexer row where keys and scales have a buffer each

BufferKey = tuple[str, int]
RowKey = tuple[str, int, int]


class Kind(NamedTuple):
    """Describes one family of rows.

    by: the key of a row, the full page ("page"), the SWA slot ("window") or the request's slot ("slot"). first: of n
    tokens the first position whose row the next step needs. ring: the buffer is a list of rows, with a ring for each
    SWA page or slot. planes: bytes of a row's pieces in a plain V4 pool, () of pieces it lacks. buffers, rows: of a
    family that the engine keeps in no pool of its own, its tensors by layer, and rows a page or a ring. folded: the one
    row of a slot holds the open block; it is read, and so reset, only where a block is open.
    """

    by: str
    first: Callable[[int], int] = lambda n: 0
    ring: bool = False
    planes: tuple[int, ...] = ()
    buffers: Callable[[Any], dict[int, torch.Tensor]] | None = None
    rows: int = 0
    folded: bool = False


def _window(n: int) -> int:
    return max(0, n - (WINDOW - 1))


def _tail(n: int) -> int:
    return max(0, n - (n % 4 + 4))


# The one list of families that tests keep by hand. What else knows them derives from it.
FAMILIES = {
    "swa_kv": Kind("window", _window, planes=(576, 8)),
    "draft_swa_kv": Kind("window", _window),
    "c1_kv": Kind("page"),
    "c1_indexer": Kind("page"),
    "c1_indexer_scales": Kind("page"),
    "c2_kv": Kind("page"),
    "c2_indexer": Kind("page"),
    "c2_indexer_scales": Kind("page"),
    "c4_kv": Kind("page", planes=(576, 8)),
    "c4_indexer": Kind("page", planes=(128, 4)),
    "c4_indexer_scales": Kind("page"),
    "c128_kv": Kind("page", planes=(576, 8)),
    "c2_state": Kind("slot", lambda n: n // 2 * 2, ring=True),
    "c4_state": Kind("window", _tail, ring=True, planes=(2048 * 4,)),
    "c4_indexer_state": Kind("window", _tail, ring=True, planes=(512 * 4,)),
    "c128_state": Kind("slot", lambda n: n // 128 * 128, ring=True, planes=(1024 * 4,)),
    "c128_online_state": Kind("slot", lambda n: n - 1 if n % 128 else n, ring=True, folded=True),
}


def grows(family: str) -> bool:
    """Whether it has rows for all tokens, in whole pages."""
    return FAMILIES[family].by == "page"


# ---------------------------------------------------------------------------------------- the buffers


@functools.cache
def ratio_of(family: str) -> int:
    """Returns tokens that a row of a compressed family stands for; of a state family those of its block."""
    return int(family[1 : family.index("_")])


def owners(pool: Any, ratio: int) -> list[int]:
    """Returns absolute ids of this stage's layers that have buffers of ``ratio``, in the engine's order."""
    if ratio in (1, 2):
        return list(pool.sources_by_ratio.get(ratio, [])) if hasattr(pool, "sources_by_ratio") else []
    return [layer for layer in range(pool._stage_start, pool._stage_end) if pool.compression_ratios[layer] == ratio]


def of_ratio(pool: Any, ratio: int, tensors: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Returns one of ``tensors`` for each layer of ``ratio``, by layer; docs/extending.md calls it."""
    return dict(zip(owners(pool, ratio), tensors, strict=True)) if owners(pool, ratio) else {}


def states_of(pool: Any, ratio: int) -> dict[int, torch.Tensor]:
    """Returns the states of the layers of ``ratio``, by layer; docs/extending.md calls it."""
    return {layer: pool.compress_state_pools[layer].kv_score_buffer.kv_score for layer in owners(pool, ratio)}


def _bytes_view(buffer: torch.Tensor) -> torch.Tensor:
    """Returns the same memory as [pages or rows, bytes]."""
    assert buffer.is_contiguous(), "a buffer with gaps"
    return buffer.view(torch.uint8).flatten(1)


def _part(pool: Any, family: str) -> Any:
    """Returns the engine's pool of a family that is no state."""
    if family.endswith("swa_kv"):
        return (pool if family == "swa_kv" else pool.draft_beside.pool).swa_kv_pool
    ratio = ratio_of(family)
    if family.endswith("_kv"):
        return pool.kv_pools[ratio] if hasattr(pool, "kv_pools") else getattr(pool, f"c{ratio}_kv_pool")
    return pool.index_pools[ratio] if hasattr(pool, "index_pools") else pool.c4_indexer_kv_pool


def _state_pool(pool: Any, family: str, layer: int) -> Any:
    pools = pool.indexer_compress_state_pools if family == "c4_indexer_state" else pool.compress_state_pools
    state = pools[layer]
    assert state is not None, f"{family}: layer {layer} has no state"
    assert state.ratio == ratio_of(family), f"{family}: layer {layer} has another ratio"
    assert (state.ring_size == 1) == FAMILIES[family].folded, f"{family}: layer {layer} has {state.ring_size} rows"
    return state


def _ring(pool: Any, family: str, layer: int) -> int:
    """Returns rows of a ring."""
    return FAMILIES[family].rows or int(_state_pool(pool, family, layer).ring_size)


def _states(pool: Any, family: str, layer: int) -> torch.Tensor:
    made = FAMILIES[family].buffers
    rows: torch.Tensor = made(pool)[layer] if made else _state_pool(pool, family, layer).kv_score_buffer.kv_score
    return rows


def buffers(pool: Any) -> dict[BufferKey, torch.Tensor]:
    """Returns every cache buffer as a uint8 view [pages or rows, bytes]; no copy."""
    found: dict[BufferKey, torch.Tensor] = {}
    lists: list[tuple[str, list[int], Any]] = [
        ("swa_kv", list(range(pool._stage_start, pool._stage_end)), pool.swa_kv_pool.kv_buffer)
    ]
    if getattr(pool, "draft_beside", None) is not None:
        tensors = pool.draft_beside.pool.swa_kv_pool.kv_buffer
        lists.append(("draft_swa_kv", list(range(len(tensors))), tensors))
    for ratio in (1, 2, 4, 128):
        layers = owners(pool, ratio)
        if not layers:
            continue
        lists.append((f"c{ratio}_kv", layers, _part(pool, f"c{ratio}_kv").kv_buffer))
        if ratio == 128:
            continue
        index = _part(pool, f"c{ratio}_indexer")
        if index.index_k_with_scale_buffer is not None:
            lists.append((f"c{ratio}_indexer", layers, index.index_k_with_scale_buffer))
        else:
            lists.append((f"c{ratio}_indexer", layers, index.index_k_payload_buffer))
            lists.append((f"c{ratio}_indexer_scales", layers, index.index_k_scale_buffer))
    for family, layers, tensors in lists:
        assert len(layers) == len(tensors), f"{family}: {len(tensors)} buffers for layers {layers}"
        for layer, tensor in zip(layers, tensors, strict=True):
            found[(family, layer)] = _bytes_view(tensor)
    for family, kind in FAMILIES.items():
        if kind.buffers is not None:
            found |= {(family, layer): _bytes_view(tensor) for layer, tensor in kind.buffers(pool).items()}
        elif kind.ring:
            for layer in owners(pool, ratio_of(family)):
                if kind.folded != bool(pool.compress_state_pools[layer].online) and ratio_of(family) == 128:
                    continue
                found[(family, layer)] = _bytes_view(_states(pool, family, layer))
    return found


def snapshot(pool: Any) -> dict[BufferKey, torch.Tensor]:
    """Returns copies of all buffers, in host memory."""
    return {key: buffer.to("cpu", copy=True) for key, buffer in buffers(pool).items()}


def fill(pool: Any, seed: int) -> None:
    """Fills with random bytes everywhere: dummy pages, page padding, NaN payloads and sentinel rows included."""
    generator = np.random.default_rng(seed)
    for buffer in buffers(pool).values():
        noise = np.frombuffer(generator.bytes(buffer.numel()), np.uint8)
        buffer.copy_(torch.tensor(noise).view(buffer.shape))


def poison(pool: Any) -> None:
    """Fills with one byte everywhere."""
    for buffer in buffers(pool).values():
        buffer.fill_(0xA5)


# ------------------------------------------------------------------------------------------- the rows


def _rows_a_page(pool: Any, family: str) -> int:
    """Returns rows of one page of the engine's buffer; 1 for a state family, whose buffer is a plain list of rows."""
    kind = FAMILIES[family]
    return 1 if kind.ring else kind.rows or int(_part(pool, family).page_size)


def _kv_addressing(pool: Any, family: str, page_bytes: int) -> tuple[int, int, int, int, int]:
    """Returns value bytes, scale bytes, stride of the values, start and stride of the scales, as the engine states."""
    part, rows = _part(pool, family), _rows_a_page(pool, family)
    layout = part.kv_layout
    assert page_bytes == layout.page_bytes(rows), f"{family}: a page of {page_bytes} bytes"
    if hasattr(layout, "row_addressing"):
        return layout.data_bytes, layout.scale_bytes, *layout.row_addressing(rows)
    # 0.5.22 has no rows whose scales follow their values.
    return layout.data_bytes, layout.scale_bytes, layout.data_bytes, layout.scale_offset(rows), layout.scale_bytes


def _row_spans(pool: Any, family: str, page_bytes: int, row: int) -> list[tuple[int, int, int]]:
    """Returns a row's bytes in order: (page, first byte, past-last byte)."""
    return _spans_of(pool, family, page_bytes)(row)


def _spans_of(pool: Any, family: str, page_bytes: int) -> Callable[[int], list[tuple[int, int, int]]]:
    """Returns ``_row_spans`` of the rows of one buffer: what is the same for all of them is asked for once."""
    kind, rows = FAMILIES[family], _rows_a_page(pool, family)
    if kind.buffers is not None:
        return lambda row: list(_own_spans(kind, page_bytes, row))
    if kind.ring:
        return lambda row: [(row, 0, page_bytes)]
    if family.endswith("_kv"):
        values, scales, stride, scale_base, scale_stride = _kv_addressing(pool, family, page_bytes)

        def kv_spans(row: int) -> list[tuple[int, int, int]]:
            page, inner = divmod(row, rows)
            first, second = inner * stride, scale_base + inner * scale_stride
            return [(page, first, first + values), (page, second, second + scales)]

        return kv_spans
    split = _part(pool, family).index_k_with_scale_buffer is None
    return lambda row: _index_spans(family, page_bytes, rows, split, row)


def _index_spans(family: str, page_bytes: int, rows: int, split: bool, row: int) -> list[tuple[int, int, int]]:
    """Returns ``_row_spans`` of an indexer. split: its keys and scales have a buffer each."""
    page, inner = divmod(row, rows)
    assert page_bytes % rows == 0, f"indexer page of {page_bytes} bytes"
    width = page_bytes // rows
    if split:  # [page, 1, 4, rows, 16 or 1]
        piece = width // SPLIT_CHUNKS
        if family.endswith("_scales"):
            inner = inner % 16 * 4 + inner // 16  # the slots of a page are a 16 x 4 tile transposed
        starts = [(chunk * rows + inner) * piece for chunk in range(SPLIT_CHUNKS)]
        return [(page, start, start + piece) for start in starts]
    assert width in (128 + INDEXER_SCALE_BYTES, 64 + INDEXER_SCALE_BYTES), f"indexer row of {width} bytes"
    values = width - INDEXER_SCALE_BYTES
    start = rows * values + inner * INDEXER_SCALE_BYTES
    return [(page, inner * values, inner * values + values), (page, start, start + INDEXER_SCALE_BYTES)]


def _own_spans(kind: Kind, width: int, row: int) -> Iterator[tuple[int, int, int]]:
    """Yields ``_row_spans`` of a planar page, or of a planar ring, whose buffer has entries of ``width`` bytes."""
    base = row // kind.rows * width * (kind.rows if kind.ring else 1)
    for number, piece in enumerate(kind.planes):
        start = base + kind.rows * sum(kind.planes[:number]) + row % kind.rows * piece
        end = start + piece
        while start < end:
            page, first = divmod(start, width)
            last = min(width, first + end - start)
            yield page, first, last
            start += last - first


def swa_row(pool: Any, slot: int) -> int:
    """Returns the SWA row of a full slot; an unmapped slot is an error."""
    row = int(pool.full_to_swa_index_mapping[slot])
    assert row > 0, f"full slot {slot} has no SWA row"
    return row


def c4_state_row(pool: Any, family: str, layer: int, swa_loc: int) -> int:
    """Returns state row of the token that lies in SWA row ``swa_loc``."""
    ring = _ring(pool, family, layer)
    return (swa_loc // int(pool.swa_page_size)) * ring + swa_loc % ring


def request_state_row(pool: Any, family: str, layer: int, req_slot: int, position: int) -> int:
    """Returns state row of a position of the request in slot ``req_slot``."""
    ring = _ring(pool, family, layer)
    return req_slot * ring + position % ring


def _c4_kv_row(pool: Any, compressed: int) -> int:
    mapping = getattr(pool.c4_kv_pool, "full_to_hisparse_device_index_mapping", None)
    if type(pool.c4_kv_pool).__name__ != "HiSparseC4DevicePool":
        return compressed
    assert mapping is not None, "a HiSparse pool without a device mapping"
    row = int(mapping[compressed])
    assert row > 0, f"compressed row {compressed} is not on the device"
    return row


@dataclass(frozen=True)
class DraftBeside:
    """Holds a draft model's pool beside the target's, which has it as ``draft_beside``. rows: read by its next step."""

    pool: Any
    rows: int = WINDOW - 1


def positions(family: str, n: int, draft_rows: int = WINDOW - 1) -> list[int]:
    """Returns positions of a request with ``n`` saved tokens whose rows the next step needs."""
    first = max(0, n - draft_rows) if family == "draft_swa_kv" else FAMILIES[family].first(n)
    return list(range(first, n))


def live_rows(pool: Any, key: BufferKey, slots: torch.Tensor, n: int, req_slot: int) -> Iterator[tuple[int, int]]:
    """Yields (position, row in the buffer) of everything of one family and layer that must survive."""
    family, layer = key
    assert slots.dim() == 1
    assert len(slots) >= n, f"{len(slots)} slots for {n} tokens"
    numbers = slots.tolist()
    draft = getattr(pool, "draft_beside", None) or DraftBeside(None)
    kind, ratio = FAMILIES[family], ratio_of(family) if grows(family) else 0
    for position in positions(family, n, draft.rows):
        slot = numbers[position]
        if kind.by == "window":
            row = swa_row(pool, slot)
            yield position, c4_state_row(pool, family, layer, row) if kind.ring else row
        elif kind.by == "slot":
            yield position, request_state_row(pool, family, layer, req_slot, position)
        elif (slot + 1) % ratio == 0:
            row = slot // ratio
            yield position, _c4_kv_row(pool, row) if family == "c4_kv" else row


def read(pool: Any, slots: torch.Tensor, n: int, req_slot: int) -> dict[RowKey, bytes]:
    """Returns every byte string of a request with ``n`` saved tokens that a host copy must keep."""
    slots = slots.cpu()
    found: dict[RowKey, bytes] = {}
    for (family, layer), buffer in buffers(pool).items():
        page_bytes = buffer.shape[1]
        memory = memoryview(buffer.cpu().numpy()).cast("B")
        spans = _spans_of(pool, family, page_bytes)
        for position, row in live_rows(pool, (family, layer), slots, n, req_slot):
            assert not _is_sentinel(family, buffer, row), f"{family} layer {layer}: row {row} is the sentinel"
            text = b""
            for page, start, end in spans(row):
                text += bytes(memory[page * page_bytes + start : page * page_bytes + end])
            found[(family, layer, position)] = text
    return found


def _is_sentinel(family: str, buffer: torch.Tensor, row: int) -> bool:
    return FAMILIES[family].ring and row == buffer.shape[0] - 1


# ------------------------------------------------------------------------------------------- verdicts


def compare(expected: dict[RowKey, bytes], got: dict[RowKey, bytes]) -> None:
    """Raises AssertionError on the first difference, by name."""
    order = list(FAMILIES)
    for key in sorted(expected.keys() | got.keys(), key=lambda k: (order.index(k[0]), k[1], k[2])):
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
    """Returns bytes that a load of this request may change, as boolean masks in the buffers' shapes."""
    slots = slots.cpu()
    hisparse = type(pool.c4_kv_pool).__name__ == "HiSparseC4DevicePool"
    full_pages = {slot // int(pool.page_size) for slot in slots[:n].tolist()}
    allowed: dict[BufferKey, torch.Tensor] = {}
    for (family, layer), buffer in buffers(pool).items():
        mask = torch.zeros(tuple(buffer.shape), dtype=torch.bool)
        kind = FAMILIES[family]
        if kind.by == "slot":
            ring = _ring(pool, family, layer)
            mask[req_slot * ring : (req_slot + 1) * ring] = True
        elif kind.by == "window" or (family == "c4_kv" and hisparse):
            for _, row in live_rows(pool, (family, layer), slots, n, req_slot):
                for page, start, end in _row_spans(pool, family, buffer.shape[1], row):
                    mask[page, start:end] = True
        else:
            tiles = int(pool.page_size) // ratio_of(family) // _rows_a_page(pool, family)
            for page in full_pages:
                mask[page * tiles : page * tiles + tiles] = True
        if kind.ring:
            assert not bool(mask[-1].any()), f"{family} layer {layer}: the sentinel is in reach"
        allowed[(family, layer)] = mask
    return _seen_by_all(pool, allowed)


def _seen_by_all(pool: Any, masks: dict[BufferKey, torch.Tensor]) -> dict[BufferKey, torch.Tensor]:
    """Copies the same bytes into every buffer that has them: the buffers of a family may overlap."""
    places: dict[int, list[BufferKey]] = {}
    for key, buffer in buffers(pool).items():
        places.setdefault(buffer.untyped_storage().data_ptr(), []).append(key)
    for keys in places.values():
        if len(keys) == 1:
            continue
        whole = {key: buffers(pool)[key] for key in keys}
        starts = {key: buffer.storage_offset() for key, buffer in whole.items()}
        union = torch.zeros(max(starts[key] + whole[key].numel() for key in keys), dtype=torch.bool)
        for key in keys:
            union[starts[key] :][: whole[key].numel()] |= masks[key].flatten()
        for key in keys:
            masks[key] = union[starts[key] :][: whole[key].numel()].view(masks[key].shape)
    return masks


def assert_only_changed(
    before: dict[BufferKey, torch.Tensor], pool: Any, allowed: dict[BufferKey, torch.Tensor] | None = None
) -> None:
    """Raises AssertionError naming the first byte that differs from ``before`` outside ``allowed`` (None: any)."""
    now = buffers(pool)
    assert before.keys() == now.keys() == (allowed or now).keys(), "not the same buffers"
    for (family, layer), buffer in now.items():
        old = before[(family, layer)].cpu()
        new = buffer.cpu()
        wrong = old != new
        if allowed is not None:
            wrong &= ~allowed[(family, layer)]
        if not bool(wrong.any()):
            continue
        offset = int(wrong.flatten().to(torch.uint8).argmax())
        page, byte = divmod(offset, buffer.shape[1])
        raise AssertionError(
            f"{family} layer {layer} byte {offset} (page or row {page}, byte {byte} of it): "
            f"changed from 0x{int(old[page, byte]):02x} to 0x{int(new[page, byte]):02x}"
        )


def cleared_ring_ok(pool: Any, req_slot: int, n: int) -> bool:
    """Whether the request slot's rings hold the empty pattern.

    The pattern is zeros in the first half and -inf in the second. Raises AssertionError elsewhere.
    """
    for (family, layer), buffer in buffers(pool).items():
        if FAMILIES[family].by != "slot" or FAMILIES[family].folded:
            continue
        dtype = _states(pool, family, layer).dtype
        minus_inf = {torch.float32: struct.pack("<f", float("-inf")), torch.bfloat16: b"\x80\xff"}[dtype]
        half = buffer.shape[1] // 2
        pattern = bytes(half) + minus_inf * (half // len(minus_inf))
        ring = _ring(pool, family, layer)
        pending = {request_state_row(pool, family, layer, req_slot, p) for p in positions(family, n)}
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
    """Holds a request: its full slots by position, its slot in the request table, its saved tokens."""

    slots: torch.Tensor
    req_slot: int
    n: int = 0


def new_request(allocator: Any, req_slot: int, tokens: int = 0) -> Request:
    """Returns a request of ``tokens`` tokens."""
    request = Request(torch.empty(0, dtype=torch.int64, device=allocator.device), req_slot)
    if tokens:
        grow(allocator, request, tokens)
    return request


def _lengths(allocator: Any, value: int) -> tuple[torch.Tensor, torch.Tensor]:
    host = torch.tensor([value], dtype=torch.int64)
    return host.to(allocator.device), host


def grow(allocator: Any, request: Request, tokens: int) -> torch.Tensor:
    """Appends ``tokens`` tokens in full and SWA pages, as a prefill chunk or so many decode steps do."""
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
    """Returns tokens that get SWA rows when a request of ``n`` tokens is allocated at once for decode."""
    page = int(allocator.page_size)
    return n - (max(0, n - WINDOW) // page) * page


def resume(allocator: Any, n: int) -> torch.Tensor:
    """Gives slots for ``n`` tokens as decode preallocation does: SWA rows for the page-aligned tail only."""
    prefix, prefix_cpu = _lengths(allocator, 0)
    total, total_cpu = _lengths(allocator, n)
    last_loc, _ = _lengths(allocator, -1)
    slots = allocator.alloc_extend_swa_tail(prefix, prefix_cpu, total, total_cpu, last_loc, n, swa_tail(allocator, n))
    assert slots is not None, f"no room for {n} tokens"
    return slots.to(torch.int64)


def evict(allocator: Any, slots: torch.Tensor, upto: int) -> None:
    """Gives back the SWA pages of whole pages of positions below ``upto``; the full slots stay."""
    page = int(allocator.page_size)
    gone = slots[: (upto // page) * page]
    gone = gone[allocator.full_to_swa_index_mapping[gone] > 0]
    if len(gone):
        allocator.free_swa(gone)


def evict_out_of_window(allocator: Any, request: Request) -> None:
    """Evicts the pages that the engine's decode step evicts when ``n`` tokens are in the cache."""
    evict(allocator, request.slots, max(0, request.n - WINDOW))


def release(allocator: Any, slots: torch.Tensor) -> None:
    """Gives back all pages of a request, full and SWA."""
    if len(slots):
        allocator.free(slots)
