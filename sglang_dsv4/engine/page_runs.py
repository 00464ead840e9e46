"""A request's pages lie scattered, and a transfer between servers is posted piece by piece.

The engine hands out free pages in the order of its list, which on a prefill or a decode server it sorts by address once
it is used up. Pages that growing requests take one at a time soon break every run, and an order by address hands out
the smallest holes to whoever needs most. Here a request of many pages gets the shortest run that holds it; whoever
needs few gets what the shortest runs have.

The list stays what it is, a tensor of the device: runs are found there, with no answer to the host. That costs about
twenty launches for an admission of ``MANY`` pages or more; other admissions, decode steps and frees are the engine's.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.utils import get_num_new_pages
from typing_extensions import override

from sglang_dsv4.pools.token_to_kv import TokenToKVPool
from sglang_dsv4.settings import read_settings

MANY = 8  # pages from which on a request is worth the search; below, its transfer is short however it lies


def after_init(result: Any, allocator: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER SWATokenToKVPoolAllocator.__init__: a server that sends or receives transfers hands out runs of pages."""
    full = allocator.full_attn_allocator
    sends_or_receives = full.need_sort  # the engine's own word for it
    if (
        read_settings().layout != "stock"
        and sends_or_receives
        and type(full) is PagedTokenToKVPoolAllocator
        and isinstance(allocator.get_kvcache(), TokenToKVPool)
    ):
        allocator.full_attn_allocator = PageRuns(
            full.size, full.page_size, full.dtype, full.device, full.get_kvcache(), full.need_sort
        )


class PageRuns(PagedTokenToKVPoolAllocator):
    """The engine's allocator of full pages, whose free pages are kept by run. The scheduler's thread owns it.

    step: what neighbours differ by.
    """

    step = 1

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
        if num_new_pages >= MANY:
            self._order(num_new_pages)
        given: torch.Tensor | None = super().alloc_extend(
            prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens, num_new_pages
        )
        return given

    @override
    def merge_and_sort_free(self) -> None:
        """The engine's, when its list is used up."""
        if self._some_wait():
            super().merge_and_sort_free()
            self.free_pages = by_run(self.free_pages, self.step)

    def _order(self, wanted: int) -> None:
        """All free pages into the list; its first ``wanted`` are in as few runs as can be."""
        if self._some_wait():
            super().merge_and_sort_free()
            ascending = self.free_pages
        else:
            ascending = torch.sort(self.free_pages).values
        self.free_pages = by_run(ascending, self.step, wanted)

    def _some_wait(self) -> bool:
        """Whether pages were given back that are not in the list yet."""
        return bool(self.available_size() > len(self.free_pages) * self.page_size)


def by_run(ascending: torch.Tensor, step: int, wanted: int = 0) -> torch.Tensor:
    """``ascending`` page ids, int64, rearranged by runs, in which neighbours differ by ``step``.

    First ``wanted`` pages: of the shortest run that has so many, or of the longest ones. Then the rest, the shortest
    runs first. Runs of one length keep their order, so that all ranks hand out the same pages.
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
