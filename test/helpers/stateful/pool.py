"""Keeps the pool that all examples share; an example starts and ends with every page free."""

import functools
from dataclasses import replace

import numpy as np
import oracle
import torch
import units_by_hand

from sglang_dsv4.pools.token_to_kv import TokenToKVPool
from sglang_dsv4.testing.standalone import PoolSpec, make_allocator, make_pool

SPEC = PoolSpec(ratios=(0, 4, 128), pages=12, swa_pages=7, requests=4)
UNEVEN_SPEC = replace(SPEC, ratios=(0, 4, 128, 4))  # page-major, a family has a row that nobody uses
V41_SPEC = replace(SPEC, ratios=(0, 2, 2, 1), sources=(1, 3))
PAGE = SPEC.page_size
NOISE_BYTES = 16 << 20


def pages_of(tokens: int) -> int:
    return -(-tokens // PAGE)


def tail_pages(tokens: int) -> int:
    """Returns the SWA pages of a request of ``tokens`` tokens whose SWA rows outside of the window are gone."""
    return pages_of(tokens) - max(0, tokens - oracle.WINDOW) // PAGE


class Device:
    """Holds one pool with its allocator, built once; examples put it back as it was."""

    def __init__(self, spec: PoolSpec) -> None:
        self.pool = make_pool(spec)
        self.allocator = make_allocator(spec, self.pool, need_sort=True)
        assert type(self.pool) is TokenToKVPool
        oracle.fill(self.pool, seed=1)
        self.buffers = oracle.buffers(self.pool)
        self.first = oracle.snapshot(self.pool)
        # Compared eight bytes at a time: every page and state row is a multiple of that.
        self.words = {key: buffer.view(torch.int64) for key, buffer in self.buffers.items()}
        self.before = {key: words.clone() for key, words in self.words.items()}
        self.rings = {
            (family, layer): int(oracle._state_pool(self.pool, family, layer).ring_size)
            for family, layer in self.buffers
            if oracle.FAMILIES[family].ring
        }
        self.noise = torch.from_numpy(np.random.default_rng(2).integers(0, 256, NOISE_BYTES, dtype=np.uint8))
        self.planes = {key: self._planes(key[0], buffer) for key, buffer in self.buffers.items()}
        self.units = functools.cache(functools.partial(units_by_hand.units, self.pool))
        self.least_units, self.unit = units_by_hand.least(self.pool), units_by_hand.unit_bytes(self.pool)

    def _planes(self, family: str, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Views [page, row, byte], one for the values and one for the scales of the rows."""
        rows, width = oracle._rows_a_page(self.pool, family), buffer.shape[1]
        spans = oracle._row_spans(self.pool, family, width, 0)
        after = oracle._row_spans(self.pool, family, width, 1) if rows > 1 else spans
        return [
            buffer.as_strided((len(buffer), rows, end - start), (width, there - start, 1), start)
            for (_, start, end), (_, there, _) in zip(spans, after, strict=True)
        ]

    def start(self) -> None:
        """Puts free pages in their first order and the first bytes everywhere."""
        assert self.clean()
        self.allocator.clear()
        for key, buffer in self.buffers.items():
            buffer.copy_(self.first[key])

    def clean(self) -> bool:
        full, swa = self.allocator.full_available_size(), self.allocator.swa_available_size()
        mapped = bool(self.allocator.full_to_swa_index_mapping[:-1].any())
        return (full, swa, mapped) == (SPEC.pages * PAGE, SPEC.swa_pages * PAGE, False)

    def remember(self) -> None:
        for key, words in self.words.items():
            self.before[key].copy_(words)

    def assert_unchanged(self) -> None:
        for key, words in self.words.items():
            assert torch.equal(self.before[key], words), f"{key} changed"

    def seen_places(self, family: str, layer: int, slots: torch.Tensor, req_slot: int) -> torch.Tensor:
        """Returns a buffer's rows of the request at ``slots`` in any layer: buffers of a family may overlap."""
        rows, buffer = self.places(family, layer, slots, req_slot), self.buffers[(family, layer)]
        shifts = [
            (other.storage_offset() - buffer.storage_offset()) // buffer.shape[1]
            for (name, _), other in self.buffers.items()
            if name == family and other.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        ]
        return (rows[:, None] + torch.tensor(shifts)).flatten()

    def places(self, family: str, layer: int, slots: torch.Tensor, req_slot: int) -> torch.Tensor:
        """Returns rows of a buffer (pages, or rows of states) that belong to the request at ``slots``."""
        starts = slots[::PAGE]
        swa = self.allocator.full_to_swa_index_mapping[starts]
        swa = swa[swa > 0] // PAGE
        if family == "swa_kv":
            return swa
        if oracle.FAMILIES[family].ring:
            tiles = self.rings[(family, layer)]
            pages = torch.tensor([req_slot]) if oracle.FAMILIES[family].by == "slot" else swa
        else:
            pages, tiles = starts // PAGE, PAGE // oracle.ratio_of(family) // oracle._rows_a_page(self.pool, family)
        return (pages[:, None] * tiles + torch.arange(tiles)).flatten()

    def assert_only_changed_at(self, slots: torch.Tensor, req_slot: int) -> None:
        """Asserts that no page, ring or sentinel of another owner differs from the state that ``remember`` saw."""
        for (family, layer), words in self.words.items():
            changed = (self.before[(family, layer)] != words).any(dim=1).nonzero().flatten()
            strange = set(changed.tolist()) - set(self.seen_places(family, layer, slots, req_slot).tolist())
            assert not strange, f"{family} layer {layer}: pages or rows {sorted(strange)} changed"
