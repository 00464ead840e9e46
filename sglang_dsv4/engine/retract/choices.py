"""Lets the choices of a model, its experts and its indexer's, come back with a request that is restored.

With --enable-return-routed-experts or --enable-return-indexer-topk the engine records them on the host, by full slot:
a row for each token, when the result of its step is taken. So at a save the rows of all saved tokens are there, and
those of the step in flight are not. Their pages carry them (``pools.host_rows``).

A step in flight at a load may still bring a row of a request that is gone, at a slot that is given away: it is left
out. Everybody else's new pages are written by a later step, whose rows come later, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

OUTPUTS = ("routed_experts_output", "indexer_topk_output")  # of a step's result


def are_recorded() -> bool:
    """Returns whether this server records expert or indexer choices."""
    from sglang.srt.runtime_context import get_exec  # noqa: PLC0415

    features = get_exec().features
    return bool(features.enable_return_routed_experts or features.enable_return_indexer_topk)


def buffers(scheduler: Any) -> tuple[torch.Tensor, ...]:
    """Returns the engine's buffers of recorded choices, each [slots, layers, choices].

    None in a pipeline: its stages keep the results of their steps elsewhere, and each records its own layers.
    """
    from sglang.srt.state_capturer.indexer_topk import get_global_indexer_capturer  # noqa: PLC0415
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer  # noqa: PLC0415

    if not are_recorded() or scheduler.server_args.pp_size > 1:
        return ()
    capturers = get_global_experts_capturer(), get_global_indexer_capturer()
    return tuple(capturer.host_cache.buffer for capturer in capturers if capturer is not None)


def leave_out(scheduler: Any, page: int, slots: torch.Tensor) -> None:
    """Keeps the steps in flight from recording at the pages of ``page`` tokens that begin at ``slots``."""
    for _, result in scheduler.result_queue:
        for name in OUTPUTS:
            output = getattr(result, name)
            if output is not None:
                others = output if isinstance(output, Others) else Others(output, page)
                others.left_out.update((slots // page).tolist())
                setattr(result, name, others)


@dataclass
class Others:
    """Records what a step in flight chose, but for its rows in some pages. page: tokens of one."""

    output: Any  # the engine's
    page: int
    left_out: set[int] = field(default_factory=set)  # page numbers

    def finalize(self) -> None:
        """Runs in the place of the engine's method, when the result of the step is taken."""
        pages = self.output.out_cache_loc // self.page
        here = ~torch.isin(pages, torch.tensor(sorted(self.left_out), dtype=pages.dtype))
        self.output.out_cache_loc, self.output.topk = self.output.out_cache_loc[here], self.output.topk[here]
        self.output.finalize()
