"""Copies the rows that the engine itself keeps on the host, by full slot, with the pages of a request.

There it records, for a request that asks, which experts each token was routed to. Slots of a page are neighbours, so
its rows are, too. They lie behind all units of the arena, by the unit of their page, and go with it to every holder.

    the engine's:  | rows of slot 0 | of slot 1 | ...           a page: from its first slot on
    the arena's:   unit 0: | a page's rows of one buffer | of another |   unit 1: ...

Ranks that share an arena have the same rows, and the first of them answers requests: it alone copies them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sglang_dsv4.errors import IndexMismatch
from sglang_dsv4.hostmem.memory import HostCopy, HostMemory
from sglang_dsv4.transfer.locate import Request


def row_bytes(buffers: Sequence[torch.Tensor]) -> int:
    """Returns the bytes of a token's rows in all ``buffers``."""
    return sum(buffer.nbytes // len(buffer) for buffer in buffers)


class HostRows:
    """Copies one pool's rows between the engine's buffers and the arena, at once: both lie on the host."""

    def __init__(
        self, buffers: Sequence[torch.Tensor], memory: HostMemory, page: int, on_load: Callable[[torch.Tensor], None]
    ) -> None:
        """Starts with the engine's ``buffers``, each [slots, ...].

        page: tokens of it. on_load: called with the first slot of each page that gets rows.
        """
        mine = buffers if memory.rank == 0 else ()
        self._buffers = [buffer.flatten(1).view(torch.uint8) for buffer in mine]
        self._memory, self._page, self._on_load = memory, page, on_load
        self._no_slots = torch.empty(0, dtype=torch.int64)  # made once: it is host time of each transfer

    def first_slots(self, request: Request, first_page: int) -> torch.Tensor:
        """Returns the first slot of each page from ``first_page`` on; waits for the current stream.

        Nothing is waited for where the engine keeps no rows.
        """
        if not self._buffers:
            return self._no_slots
        return request.indices[first_page * self._page :: self._page].cpu()

    def save(self, copy: HostCopy, slots: torch.Tensor) -> None:
        """Copies the rows of the pages that ``copy`` saves. slots: theirs, of ``first_slots``. Raises IndexMismatch."""
        if self._buffers:
            self._copy(copy, copy.first_page, slots, out=True)

    def load(self, copy: HostCopy, first_page: int, slots: torch.Tensor) -> None:
        """Gives the pages from ``first_page`` on, at ``slots``, the rows of ``copy``."""
        if self._buffers:
            self._on_load(slots)
            self._copy(copy, first_page, slots, out=False)

    def _copy(self, copy: HostCopy, first_page: int, slots: torch.Tensor, out: bool) -> None:
        units = copy.pages(first_page)
        for number, slot in enumerate(slots.tolist()):
            count, begin = min(self._page, copy.tokens - (first_page + number) * self._page), 0
            for buffer in self._buffers:
                if not 0 <= slot <= len(buffer) - count:
                    raise IndexMismatch(f"page {first_page + number} begins at full slot {slot} of {len(buffer)}")
                theirs, end = buffer[slot : slot + count], begin + count * buffer.shape[1]
                ours = self._memory.host_rows[units[number], begin:end].view(theirs.shape)
                if out:
                    ours.copy_(theirs)
                else:
                    theirs.copy_(ours)
                begin += self._page * buffer.shape[1]
