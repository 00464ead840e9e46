"""Judges copied bytes: writes and reads rows as the engine's kernels address them, and remembers them.

It shares nothing with ``cache.rows``, for a copier must not be its own judge: rows are found one position at a time
from the slots, the mapping and the request's slot, by the engine's own formulas.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

PAGE = 256
KV_ROW = (576, 8)
INDEX_SCALES = 4
ONLINE = "c128_online_state"  # one row a slot, which each step folds its token into; its bytes are the last token's
BY_REQUEST = ("c128_state", "c2_state", ONLINE)  # rings that the request's slot selects
WINDOW_ROWS, DRAFT_ROWS = "swa_kv", "draft_swa_kv"
WINDOWED = (WINDOW_ROWS, DRAFT_ROWS, "c4_state", "c4_indexer_state")  # found through the map of the sliding window


class Part(NamedTuple):
    """Describes one buffer of one family."""

    family: str
    layer: int
    buffer: torch.Tensor
    rows: int  # rows a page; 1 for a state buffer
    planes: tuple[int, ...]  # bytes of a row, by plane
    ring: int = 0
    ratio: int = 0  # tokens a row stands for where it holds compressed tokens


def parts(pool: Any) -> list[Part]:
    """Lists every buffer that holds a request's cache."""
    found = [Part(WINDOW_ROWS, i, b, PAGE, KV_ROW) for i, b in enumerate(pool.swa_kv_pool.kv_buffer)]
    draft = getattr(pool, "draft", None)  # what the pool says of its draft; its rows lie at the target's places
    if draft is not None:
        found += [Part(DRAFT_ROWS, i, b, PAGE, KV_ROW) for i, b in enumerate(draft.pool.swa_kv_pool.kv_buffer)]
    for ratio, kv in pool.kv_pools.items():  # one may have no buffers
        found += [Part(f"c{ratio}_kv", i, b, PAGE // ratio, KV_ROW, ratio=ratio) for i, b in enumerate(kv.kv_buffer)]
    for ratio, keys in pool.index_pools.items():
        row = (keys.get_bytes_per_token() - INDEX_SCALES, INDEX_SCALES)
        buffers = enumerate(keys.index_k_with_scale_buffer)
        found += [Part(f"c{ratio}_indexer", i, b, keys.page_size, row, ratio=ratio) for i, b in buffers]
    for name, pools in (
        ("state", pool.compress_state_pools),
        ("indexer_state", pool.indexer_compress_state_pools),
    ):
        for layer, state in enumerate(pools):
            if state is not None:
                rows = state.kv_score_buffer.kv_score.view(torch.uint8)
                family = ONLINE if state.online else f"c{state.ratio}_{name}"
                found.append(Part(family, layer, rows, 1, (rows.shape[1],), state.ring_size))
    return found


def unjudged(pool: Any, known: list[Part]) -> list[str]:
    """Lists the families that copies hold and ``known`` has no buffer of; to be taught to this module."""
    host = getattr(pool, "host", None)  # a pool of the engine itself keeps no copies
    families = host.buffers.families if host is not None else ()
    return sorted({family.name for family in families if family.layers} - {part.family for part in known})


def live_from(family: str, tokens: int) -> int:
    """Returns the first position whose row the step after ``tokens`` reads, in a family."""
    first = {
        WINDOW_ROWS: tokens - 127,
        DRAFT_ROWS: tokens - 127,  # of EAGLE; what DSpark reads more is not judged
        "c4_state": tokens - tokens % 4 - 4,
        "c4_indexer_state": tokens - tokens % 4 - 4,
        "c128_state": tokens // 128 * 128,
        "c2_state": tokens // 2 * 2,
        ONLINE: tokens - min(1, tokens % 128),
    }
    return max(0, first.get(family, 0))


def selected_by(part: Part) -> str:
    """Returns the selectors of a page, or a ring, of ``part``.

    They are slots of requests, windows (their pages), or pages of all tokens.
    """
    if part.family in BY_REQUEST:
        return "slots"
    return "windows" if part.family in WINDOWED else "pages"


def left_by_prefill(part: Part, positions: torch.Tensor, tokens: int) -> torch.Tensor:
    """Selects the ``positions`` that a prefill up to ``tokens`` writes into a state ring, as the engine's planner does.

    Those of the unfinished blocks at its end, and the last four of every window page (c_plan.cuh).
    """
    if part.family in BY_REQUEST:
        return positions >= live_from(part.family, tokens)
    return (positions >= live_from(part.family, tokens)) | (positions % PAGE >= PAGE - 4)


def locations(part: Part, pool: Any, slots: torch.Tensor, first: int, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (positions, rows in the buffer) of positions first..len(slots)-1 that have a row in ``part``."""
    positions = torch.arange(first, len(slots), device=slots.device)
    if part.family == ONLINE:  # the last token of a block leaves the row as it is
        positions = positions[positions % 128 != 127]
    if part.family in BY_REQUEST:
        return positions, slot * part.ring + positions % part.ring
    full = slots[first:].long()
    if part.ratio:
        complete = (full + 1) % part.ratio == 0
        return positions[complete], full[complete] // part.ratio
    swa = pool.full_to_swa_index_mapping[full]
    positions, swa = positions[swa > 0], swa[swa > 0]
    if not part.ring:
        return positions, swa
    return positions, swa // PAGE * part.ring + swa % part.ring


def planes(part: Part) -> Iterator[tuple[torch.Tensor, torch.dtype, slice]]:
    """Returns the planes of ``part``.

    Each is (view ``[pages, rows, words]``, its words, the bytes of a row that it holds).
    """
    start = done = 0
    for width in part.planes:
        word = torch.int64 if width % 8 == 0 else torch.int32
        plane = part.buffer[:, start : start + part.rows * width].unflatten(1, (part.rows, width))
        yield plane.view(word), word, slice(done, done + width)
        start, done = start + part.rows * width, done + width


@functools.cache
def _salt(family: str, layer: int, width: int, device: torch.device) -> torch.Tensor:
    """Returns the byte added to the noise, which makes a row its family's and layer's own."""
    column = torch.arange(width, device=device)
    salt = zlib.crc32(f"{family} {layer}".encode()) % 251
    return ((column * 7 + column // 64 + salt) % 256).to(torch.uint8)


class Ledger:
    """Gives one request's rows: bytes that depend on request, position, family and layer."""

    def __init__(self, seed: int, capacity: int) -> None:
        self._noise = np.random.default_rng(seed).integers(0, 256, (capacity, 64), np.uint8)

    def row(self, part: Part, positions: torch.Tensor) -> torch.Tensor:
        """Returns the bytes of ``positions`` in ``part``, ``[n, row bytes]``."""
        width = sum(part.planes)
        noise = torch.from_numpy(self._noise[positions.cpu().numpy()]).to(positions.device)
        return noise.repeat(1, -(-width // 64))[:, :width] ^ _salt(part.family, part.layer, width, positions.device)

    def write(self, pool: Any, slots: torch.Tensor, first: int, slot: int) -> None:
        """Writes positions first..len(slots)-1, as the forwards that compute them would."""
        for part in parts(pool):
            start = max(first, len(slots) - part.ring) if part.ring else first
            self.put(part, *locations(part, pool, slots, start, slot))

    def put(self, part: Part, positions: torch.Tensor, rows: torch.Tensor) -> None:
        """Writes ``positions`` into the ``rows`` of a buffer."""
        values, page, inner = self.row(part, positions), rows // part.rows, rows % part.rows
        for plane, word, piece in planes(part):
            plane[page, inner] = values[:, piece].reshape(-1).view(word).view(-1, plane.shape[2])

    def mismatches(
        self,
        pool: Any,
        slots: torch.Tensor,
        slot: int,
        known: list[Part] | None = None,
        floor: Callable[[Part], int] = lambda _: 0,
    ) -> list[str]:
        """Lists, by family of ``known``, where the rows that the next step reads differ from those written.

        floor: the first position that it reads of a part, where that is not the family's own.
        """
        tokens, known = len(slots), known or parts(pool)
        wrong = [f"{name}: the ledger does not know this family" for name in unjudged(pool, known)]
        for part in known:
            first = max(live_from(part.family, tokens), floor(part))
            positions, rows = locations(part, pool, slots, first, slot)
            if part.family in WINDOWED and len(positions) != tokens - first:
                wrong.append(f"{part.family}, buffer {part.layer}: {tokens - first - len(positions)} rows unmapped")
                continue
            wrong += self.differences(part, positions, rows)
        return wrong

    def differences(self, part: Part, positions: torch.Tensor, rows: torch.Tensor) -> list[str]:
        """Names the first byte of ``rows`` that is not the one of ``positions``; or nothing."""
        values, page, inner = self.row(part, positions), rows // part.rows, rows % part.rows
        for plane, word, piece in planes(part):
            found, wanted = plane[page, inner], values[:, piece].reshape(-1)
            if not torch.equal(found.view(-1), wanted.view(word)):
                differs = found.view(torch.uint8) != values[:, piece]
                row, byte = torch.nonzero(differs)[0].tolist()
                return [f"{part.family}, buffer {part.layer}, position {int(positions[row])}, byte {byte}"]
        return []
