"""Makes the metadata of a step in plain Python, one token after the other, from the definitions alone.

It shares no arithmetic with the plan or the kernel. Where a definition leaves a value open it says so here.
"""

import struct

import numpy as np
import torch

from sglang_dsv4.prep.metadata import CompressPlan, StepMetadata, c128_width
from sglang_dsv4.prep.step import PrepLayout, Step, Tables, check_step


def build_metadata(layout: PrepLayout, step: Step, tables: Tables) -> StepMetadata:
    """Gives metadata of ``step``, in memory of its own. A row of length 0 is padding: its plans take position 0."""
    return _Oracle(layout, step, tables).build()


class _Oracle:
    def __init__(self, layout: PrepLayout, step: Step, tables: Tables) -> None:
        self.layout, self.step, self.width = layout, step, check_step(layout, step)
        self.device = step.slots.device
        self.table = tables.req_to_token.cpu().numpy()
        self.mapping = tables.full_to_swa.cpu().numpy()
        self.slots = step.slots.tolist()
        self.out_locs = step.out_locs.tolist()
        lengths = step.lengths.tolist()
        length_offset = int(step.verify) if step.length_offset is None else step.length_offset
        self.ends = [
            length + length_offset + step.queries - 1 for length in lengths
        ]  # causal length of each request's last query
        self.rows = [
            (request, query, end - step.queries + 1 + query)
            for request, end in enumerate(self.ends)
            for query in range(step.queries)
        ]

    def build(self) -> StepMetadata:
        lengths = [length for _, _, length in self.rows]
        c4 = [length // 4 for length in lengths]
        locs = list(zip(self.out_locs, lengths, strict=True))
        plans = {ratio: self._compress_plan(ratio) for ratio in (4, 128)}
        return StepMetadata(
            lengths=self._ints(lengths),
            positions=self._ints([length - 1 for length in lengths]),
            query_starts=self._ints([self.step.queries * i for i in range(self.step.requests + 1)]),
            page_table=self._ints([self._pages(request, length) for request, _, length in self.rows]),
            swa_indices=self._ints([self._window(request, length) for request, _, length in self.rows]),
            swa_lengths=self._ints([min(length, self.layout.window) for length in lengths]),
            swa_out_locs=self._ints([self._swa(loc) for loc in self.out_locs]),
            c4_out_locs=self._ints([loc // 4 if n % 4 == 0 else 0 for loc, n in locs], torch.int64),
            c4_lengths=self._ints(c4),
            c4_clamped=self._ints([max(1, n) for n in c4]),
            c4_sparse_lengths=self._ints([min(max(1, n), self.layout.topk) for n in c4]),
            c4_sparse_indices=self._ints([[-1] * self.layout.topk for _ in self.rows]),
            c128_out_locs=self._ints([loc // 128 if n % 128 == 0 else 0 for loc, n in locs], torch.int64),
            c128_clamped=self._ints([max(1, length // 128) for length in lengths]),
            c128_indices=self._ints([self._c128_slots(request, length) for request, _, length in self.rows]),
            c4=plans[4],
            c128=plans[128],
        )

    def _ints(self, values: list, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def _full(self, request: int, position: int) -> int:
        return int(self.table[self.slots[request], position])

    def _swa(self, slot: int) -> int:
        return int(self.mapping[slot]) if 0 <= slot < len(self.mapping) - 1 else -1

    def _pages(self, request: int, length: int) -> list[int]:
        page, pages = self.layout.page, [0] * self.width
        for number in range(min(self.width, -(-length // page))):
            pages[number] = self._full(request, number * page) // page
        return pages

    def _window(self, request: int, length: int) -> list[int]:
        positions = [length - 1 - back for back in range(self.layout.window)]
        return [self._swa(self._full(request, position)) if position >= 0 else -1 for position in positions]

    def _c128_slots(self, request: int, length: int) -> list[int]:
        slots = [-1] * c128_width(self.layout, self.width)
        for group in range(min(length // 128, self.width * self.layout.page // 128, len(slots))):
            slots[group] = self._full(request, group * 128) // 128
        return slots

    def _state_row(self, ratio: int, request: int, position: int) -> int:
        if ratio == 128:
            return self.slots[request] * self.layout.c128_ring + position % self.layout.c128_ring
        swa = max(0, self._swa(self._full(request, position)))
        return swa // self.layout.swa_page * self.layout.c4_ring + swa % self.layout.c4_ring

    def _compress_plan(self, ratio: int) -> CompressPlan:
        plans, writes = [], []
        for row, (request, query, length) in enumerate(self.rows):
            position = max(0, length - 1)
            place = self._state_row(ratio, request, position)
            groups = self._state_row(ratio, request, max(0, position - ratio)) // ratio, place // ratio
            if self.step.verify:
                plans.append(self._verify_plan(ratio, row, request, query, length, groups))
                writes.append(struct.pack("=ii", *((row, place) if self._kept(ratio, request, position) else (-1, -1))))
            else:
                plans.append(struct.pack("=Iiii", length, place, *groups))
        return CompressPlan(self._bytes(plans, 16), self._bytes(writes, 8) if self.step.verify else None)

    def _verify_plan(
        self, ratio: int, row: int, request: int, query: int, length: int, groups: tuple[int, int]
    ) -> bytes:
        if length % ratio or length < 1:
            return struct.pack("=iHHii", -1, 0, 0, -1, -1)
        window = 8 if ratio == 4 else 128
        from_ring = window - min(query + 1, window)
        return struct.pack("=IHHii", length, row, from_ring, *(groups if from_ring else (-1, request)))

    def _kept(self, ratio: int, request: int, position: int) -> bool:
        """Whether the state row of ``position`` is written: a later compression, or a roll-back, reads it."""
        end = self.ends[request]
        begun = end // ratio * ratio
        keep = self.layout.c4_keep if ratio == 4 else self.layout.c128_keep
        if position >= end - keep or position >= begun - (4 if ratio == 4 else 0):
            return True
        return ratio == 4 and position % self.layout.swa_page >= self.layout.swa_page - 4

    def _bytes(self, items: list[bytes], size: int) -> torch.Tensor:
        flat = np.frombuffer(b"".join(items), np.uint8).reshape(len(items), size).copy()
        return torch.from_numpy(flat).to(self.device)
