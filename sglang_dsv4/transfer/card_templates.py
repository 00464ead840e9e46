"""The row template of every phase, on the card: a transfer of rows brings three numbers, arguments of the kernel."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from sglang_dsv4.hostmem.memory import HostMemory
from sglang_dsv4.transfer.buffers import DeviceBuffers
from sglang_dsv4.transfer.jobs import PhaseKey, PlacedRows, RowTemplates, packed_rows
from triton_ops.copy_rows import NOWHERE, copy_rows


class CardTemplates:
    """All phases planned and uploaded at start: about a thousand, half a megabyte. Make it by ``of``."""

    def __init__(self, side: DeviceBuffers, memory: HostMemory) -> None:
        self._side = side
        keys, phases = zip(*RowTemplates.of(side, memory).phases(), strict=True)
        templates = [phase.template() for phase in phases]
        packed = torch.from_numpy(np.concatenate(templates))
        handle = side.residents.constant("transfer.row_templates", packed)
        edges = itertools.pairwise(itertools.accumulate(map(len, templates), initial=0))
        self._templates: dict[PhaseKey, torch.Tensor] = {
            key: handle[first:last] for key, (first, last) in zip(keys, edges, strict=True)
        }
        self._handle = handle

    @classmethod
    def of(cls, side: DeviceBuffers, memory: HostMemory) -> CardTemplates:
        """The templates of ``side``, uploaded for the first that asks."""
        return side.once(("row templates", packed_rows(memory)), lambda: cls(side, memory))

    def warm_up(self, image: torch.Tensor) -> None:
        """Compile both kernels by a copy that skips every row."""
        for save in (True, False):
            copy_rows(
                self._side.row_table, image, self._handle[:1], 1, 8, save, self._side.c128_state_dtype, where=NOWHERE
            )

    def copy(self, rows: PlacedRows, image: torch.Tensor, save: bool) -> None:
        """``rows`` between the row image and the cache; one launch on the current stream, nothing is uploaded."""
        side = self._side
        copy_rows(
            side.row_table, image, self._templates[rows.key], rows.most_layers, rows.most_bytes, save,
            side.c128_state_dtype, where=rows.where,
        )  # fmt: skip
