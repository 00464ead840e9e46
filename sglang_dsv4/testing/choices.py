"""Records a stand-in model's choices of experts and index rows with the engine's own capturers.

What is chosen at a position follows from the tokens up to it, as all bytes of the stand-in do (``content``).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from sglang.srt.runtime_context import get_exec
from sglang.srt.state_capturer import base
from sglang.srt.state_capturer.indexer_topk import IndexerTopkCapturer, set_global_indexer_capturer
from sglang.srt.state_capturer.routed_experts import RoutedExpertsCapturer, set_global_experts_capturer

from sglang_dsv4.testing.content import fingerprints

EXPERTS = (3, 2)  # layers, and choices of one
INDEX = (1, 5)


def chosen(tokens: Sequence[int], shape: tuple[int, int]) -> torch.Tensor:
    """Returns what is chosen at each position of ``tokens``, ``[n, *shape]``."""
    layers, width = shape
    seeds = torch.from_numpy(fingerprints(tokens).view("int64").copy()) % 1_000_003
    return ((seeds[:, None] + 1) * torch.arange(1, layers * width + 1) % 65_521).view(-1, layers, width).int()


def _not_pinned(dims: tuple[int, ...], dtype: torch.dtype, **_: Any) -> torch.Tensor:
    return torch.empty(dims, dtype=dtype)


class Choices:
    """Holds the capturers that the published launch arguments ask for; there are no others in this process."""

    def __init__(self, slots: int, requests: int) -> None:
        """Makes them for a pool of ``slots`` tokens."""
        features, (layers, width) = get_exec().features, EXPERTS
        model = SimpleNamespace(hf_text_config=SimpleNamespace(num_experts_per_tok=width, num_hidden_layers=layers))
        self._experts = self._index = None
        with mock.patch.dict(base.ALLOC_MEMORY_FUNCS, cpu=_not_pinned):
            if features.enable_return_routed_experts:
                self._experts = RoutedExpertsCapturer(model, slots, requests, 0, "cpu")
            if features.enable_return_indexer_topk:
                self._index = IndexerTopkCapturer(slots, *INDEX, requests, "cpu")
        set_global_experts_capturer(self._experts)
        set_global_indexer_capturer(self._index)

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Returns the engine's buffers, each [slots, layers, choices]."""
        return [each.host_cache.buffer for each in (self._experts, self._index) if each is not None]

    def record(self, slots: torch.Tensor, tokens: Sequence[tuple[Sequence[int], int]], late: bool) -> dict[str, Any]:
        """Records a forward's choices at ``slots``. Returns fields of its result.

        tokens: of each request the tokens up to the last one computed, and how many of them the forward computes.
        late: with overlap, the engine records them when the result is taken.
        """
        batch, outputs = SimpleNamespace(out_cache_loc=slots, out_cache_loc_virtual=None), {}
        ways = (("routed_experts_output", self._experts, EXPERTS), ("indexer_topk_output", self._index, INDEX))
        for name, capturer, shape in ways:
            if capturer is not None:
                rows = torch.cat([chosen(known, shape)[len(known) - count :] for known, count in tokens])
                for layer in range(shape[0]):
                    capturer.capture(layer, rows[:, layer])
                outputs[name] = capturer.on_forward_end(batch, False, None, no_copy_to_cpu=late)
        return outputs
