"""A request's pages lie scattered, and a transfer between servers is posted piece by piece.

The engine hands out free pages in the order of its list, which on a prefill or a decode server it sorts by address once
it is used up. Pages that growing requests take one at a time soon break every run, and an order by address hands out
the smallest holes to whoever needs most. Here a request of many pages gets the shortest run that holds it; whoever
needs few gets what the shortest runs have.

The list stays what it is, a tensor of the device: runs are found there, with no answer to the host. That costs about
twenty launches for a request of ``MANY`` pages or more, and where the engine sorts its list; other admissions and
decode steps are the engine's.

Pages so come back sooner than by the engine. On a decode server a finished request's last forward may still write to
them, and so may the transfer of an aborted one, while a transfer that is to fill them waits for no stream. So they
rest: they are not handed out before that forward has ended and ``REST`` seconds have passed, unless the list would be
used up without them, when the engine takes them, too. Ranks see that at different moments, so that their pages may
differ; what is free does not.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.utils import get_num_new_pages
from typing_extensions import override

from sglang_dsv4.engine.packed.refusals import parallel_sizes
from sglang_dsv4.pools.token_to_kv import TokenToKVPool
from sglang_dsv4.settings import read_settings

MANY = 8  # pages from which on a request is worth the search; below, its transfer is short however it lies
REST = 2.0  # seconds: a piece of a transfer that was posted before its request was aborted takes milliseconds
_process: dict[str, Callable[[], Iterable[Any]] | None] = {"writer_streams": None}  # one scheduler a process


def after_init(result: Any, allocator: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER SWATokenToKVPoolAllocator.__init__: a server that sends or receives transfers hands out runs of pages."""
    if read_settings().layout == "stock":
        return
    full, parallel = allocator.full_attn_allocator, parallel_sizes()
    sends_or_receives = full.need_sort  # the engine's own word for it
    if (
        sends_or_receives
        and parallel.attn_cp_size == parallel.dcp_size == 1  # ranks that share a request may count on the same pages
        and type(full) is PagedTokenToKVPoolAllocator
        and isinstance(allocator.get_kvcache(), TokenToKVPool)
    ):
        allocator.full_attn_allocator = PageRuns(
            full.size, full.page_size, full.dtype, full.device, full.get_kvcache(), full.need_sort
        )


def watch(writer_streams: Callable[[], Iterable[Any]]) -> None:
    """On a decode server: the streams on which a finished request's last forward may still run."""
    _process["writer_streams"] = writer_streams


class PageRuns(PagedTokenToKVPoolAllocator):
    """The engine's allocator of full pages, whose free pages are kept by run. The scheduler's thread owns it.

    step: what neighbours differ by.
    """

    step = 1

    @override
    def clear(self) -> None:
        """All pages are free, and nobody writes."""
        super().clear()
        # Those that rest, the newest last: when they were given back, behind which forwards, and how many.
        self._resting: deque[tuple[float, list[Any], int]] = deque()

    @override
    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        """As the engine's: many pages come from one run, if one holds them."""
        if num_new_pages is None:
            num_new_pages = get_num_new_pages(
                seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu
            )
        if num_new_pages >= MANY and self._most_new_pages(prefix_lens_cpu, seq_lens_cpu) >= MANY:
            # With fewer in its list the engine would sort it once more.
            self._order(num_new_pages, extend_num_tokens // self.page_size + len(seq_lens) + 1)
        given: torch.Tensor | None = super().alloc_extend(
            prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens, num_new_pages
        )
        return given

    def _most_new_pages(self, prefix_lens: torch.Tensor, seq_lens: torch.Tensor) -> int:
        """Of one request: many small ones shall not break the longest run. On the host."""
        first, last = ((lengths + self.page_size - 1) // self.page_size for lengths in (prefix_lens, seq_lens))
        return int((last - first).max())

    @override
    def merge_and_sort_free(self) -> None:
        """The engine's, when its list is used up."""
        if self._given_back():
            super().merge_and_sort_free()
            self.free_pages = by_run(self.free_pages, self.step)
            self._resting.clear()

    @override
    def _release_page_ids(self, *page_ids: torch.Tensor) -> None:
        super()._release_page_ids(*page_ids)
        streams = _process["writer_streams"]
        if streams is not None:
            self._count_resting()  # few entries stay, however long nobody asks for many pages
            ends = [stream.record_event() for stream in streams()]
            self._resting.append((time.monotonic(), ends, sum(map(len, page_ids))))

    def _order(self, wanted: int, least: int) -> None:
        """The list, of ``least`` pages if there are so many: its first ``wanted`` are in as few runs as can be."""
        rested = self._given_back() - self._count_resting()
        if len(self.free_pages) + rested < least:
            rested = self._given_back()
            self._resting.clear()
        pages = torch.cat((self.free_pages, self._take_oldest(rested)))
        self.free_pages = by_run(torch.sort(pages).values, self.step, wanted)

    def _given_back(self) -> int:
        """Pages that are not in the list yet."""
        return int(self.available_size() // self.page_size - len(self.free_pages))

    def _count_resting(self) -> int:
        """Of these, those that rest: the newest ones."""
        until = time.monotonic() - REST
        while self._resting and self._resting[0][0] <= until and all(end.query() for end in self._resting[0][1]):
            self._resting.popleft()
        return sum(pages for _, _, pages in self._resting)

    def _take_oldest(self, count: int) -> torch.Tensor:
        """Remove the ``count`` that were given back first."""
        if hasattr(self, "staged_pages"):  # from 0.5.22 on: pieces, the newest last
            waiting = torch.cat((*self.staged_pages, self.free_pages[:0]))
            taken, left = waiting[:count], waiting[count:]
            self.staged_pages, self.num_staged_pages = ([left] if len(left) else []), len(left)
            return taken
        split = len(self.release_pages) - count  # the newest first
        taken, self.release_pages = self.release_pages[split:], self.release_pages[:split]
        return taken


def by_run(ascending: torch.Tensor, step: int, wanted: int = 0) -> torch.Tensor:
    """``ascending`` page ids, int64, rearranged by runs, in which neighbours differ by ``step``.

    First ``wanted`` pages: of the shortest run that has so many, or of the longest ones. Then the rest, the shortest
    runs first. Runs of one length keep their order.
    """
    if not len(ascending):
        return ascending
    run = torch.cat((ascending.new_zeros(1), (torch.diff(ascending) != step).cumsum(0)))
    lengths = torch.zeros_like(run).scatter_add_(0, run, torch.ones_like(run))[run]
    holds_it = lengths >= wanted
    best = torch.argsort(torch.where(holds_it, lengths, 2 * len(ascending) - lengths), stable=True)
    rest = best[wanted:]
    rest = rest[torch.argsort(lengths[rest], stable=True)]
    return ascending[torch.cat((best[:wanted], rest))]
