"""An allocator that has served for hours hands out other pages than a fresh one, and nobody wants to wait for hours.

Requests without tokens come, grow page by page and end in no order, through the allocator's own calls, in a pool that
is nearly full. Those that are left keep their pages. A prefill server's requests do not grow, so its pages are worn
down more than they would be.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

SIZES = {4: 0.3, 16: 0.4, 64: 0.2, 256: 0.1}  # pages of a request, and how many are so long
GROWS = 12  # pages, at most
STEPS = 300  # of a pool of some thousand pages


@dataclass(eq=False)
class _Request:
    slots: list[torch.Tensor]
    pages: int
    turns: int  # that are left, each of which brings a page where there is room


def churn(pages: Any, leave: int, seed: int, steps: int) -> list[torch.Tensor]:
    """Wear ``pages``, an allocator of full pages, down until ``leave`` of them are free; the slots that are held."""
    draw, live = random.Random(seed), list[_Request]()
    for _ in range(steps):
        while _free(pages) - (size := draw.choices([*SIZES], [*SIZES.values()])[0]) >= leave:
            live.append(_Request([_extend(pages, size)], size, draw.randint(1, GROWS)))
        turn = [request for request in live if draw.random() < 0.2]
        for request in turn:
            request.turns -= 1
        growing = turn[: max(0, _free(pages) - leave)]
        for request, slots in zip(growing, _grow(pages, growing), strict=True):
            request.slots.append(slots)
            request.pages += 1
        for request in turn:
            if not request.turns:
                pages.free(torch.cat(request.slots))
                live.remove(request)
    return [slots for request in live for slots in request.slots]


def _free(pages: Any) -> int:
    return int(pages.available_size() // pages.page_size)


def _extend(pages: Any, size: int) -> torch.Tensor:
    """The slots of a new request of ``size`` pages."""
    tokens = size * pages.page_size
    nothing, length = torch.zeros(1, dtype=torch.int64), torch.tensor([tokens])
    last = torch.tensor([-1], device=pages.device)
    slots: torch.Tensor = pages.alloc_extend(
        nothing.to(pages.device), nothing, length.to(pages.device), length, last, tokens
    )
    return slots


def _grow(pages: Any, growing: list[_Request]) -> list[torch.Tensor]:
    """The slots of one page more for each of ``growing``."""
    if not growing:
        return []
    lengths = torch.tensor([request.pages * pages.page_size + 1 for request in growing])
    last = torch.stack([request.slots[-1][-1] for request in growing])
    first: torch.Tensor = pages.alloc_decode(lengths.to(pages.device), lengths, last)
    return list(first[:, None] + torch.arange(pages.page_size, device=pages.device))
