"""Checks copy_rows between guards against its torch twin."""

import copy

import torch
from guarded import DEVICE, Memories

from triton_ops.cases.copy_rows import Seg
from triton_ops.copy_rows import copy_rows, copy_rows_torch
from triton_ops.tables import BufferTable

SANE = 1 << 20  # a hostile field is larger; it counts for no bound
NUMBERS = (2, 1, 4)  # page numbers, where a test names none


class World(Memories):
    def __init__(self, save: bool, shapes: tuple[tuple[int, int], ...], host_bytes: int, device: str = DEVICE) -> None:
        super().__init__(save, shapes, host_bytes, device)
        self.table = BufferTable.of(self.views)


def table_of(segments: list[Seg]) -> torch.Tensor:
    tensor = torch.tensor(segments, dtype=torch.int64).reshape(-1, len(Seg._fields))
    return tensor.pin_memory() if DEVICE == "cuda" else tensor


def page_numbers(numbers: tuple[int, int, int] = NUMBERS) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=DEVICE)


def bounds(segments: list[Seg]) -> tuple[int, int]:
    """Returns (most_layers, most_bytes) over the segments that are not hostile."""
    layers = [s.layers for s in segments if 0 <= s.layers <= SANE]
    sizes = [s.rows * s.row_bytes for s in segments if min(s.rows, s.row_bytes) >= 0 and s.rows * s.row_bytes <= SANE]
    return max(layers, default=0), max(sizes, default=0)


def check(
    world: World, segments: list[Seg], save: bool, most_layers: int | None = None, moves: bool | None = None,
    dtype: torch.dtype | None = None, numbers: tuple[int, int, int] = NUMBERS,
) -> None:  # fmt: skip
    """Checks segments; moves: whether any byte changes, if the caller knows. dtype: of the states, where it matters."""
    layers, nbytes = bounds(segments)
    layers = layers if most_layers is None else most_layers
    more = [table_of(segments), page_numbers(numbers), layers, nbytes, save, *([dtype] if dtype else [])]
    before, twin = world.read(), copy.deepcopy(world)
    copy_rows_torch(twin.table, twin.memory, *more)
    wanted = twin.read()
    assert moves is None or (wanted != before) == moves
    copy_rows(world.table, world.memory, *more)
    world.assert_holds(wanted)
