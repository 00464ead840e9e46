"""Counts units of host memory from the engine's buffers, row by row; shares no code with the package under test."""

from typing import Any

import oracle

PAGE = 256


def _up(value: int, to: int) -> int:
    return -(-value // to) * to


def _summed(sizes: dict[str, int]) -> int:
    """Returns the bytes of families one after the other, each begun at a multiple of 256."""
    return sum(_up(size, 256) for size in sizes.values())


def page_bytes(pool: Any) -> int:
    """Returns the bytes of a page of tokens in all layers; 0 of a stage without history."""
    sizes: dict[str, int] = {}
    for (family, _), buffer in oracle.buffers(pool).items():
        if oracle.grows(family):
            rows = PAGE // oracle.ratio_of(family)
            sizes[family] = sizes.get(family, 0) + rows // oracle._rows_a_page(pool, family) * buffer.shape[1]
    return _summed(sizes)


def tail_bytes(pool: Any, tokens: int) -> int:
    """Returns the bytes of the rows that are in no page, of ``tokens`` saved tokens in all layers."""
    sizes: dict[str, int] = {}
    draft = getattr(pool, "draft_beside", None) or oracle.DraftBeside(None)
    for (family, _), buffer in oracle.buffers(pool).items():
        if not oracle.grows(family):
            row = sum(end - start for _, start, end in oracle._row_spans(pool, family, buffer.shape[1], 0))
            layer = _up(len(oracle.positions(family, tokens, draft.rows)) * row, 128)
            sizes[family] = sizes.get(family, 0) + layer
    return _summed(sizes)


def unit_bytes(pool: Any) -> int:
    """Returns the bytes of a unit: of a page; a quarter of the longest tail where there is no history."""
    in_page = page_bytes(pool)
    return _up(in_page or -(-max(tail_bytes(pool, tokens) for tokens in range(2 * PAGE)) // 4), 4096)


def least(pool: Any) -> int:
    """Counts the units of a page and the longest tail."""
    return 1 + -(-max(tail_bytes(pool, tokens) for tokens in range(2 * PAGE)) // unit_bytes(pool))


def units(pool: Any, tokens: int) -> int:
    """Counts the units of a copy of ``tokens`` saved tokens."""
    return -(-tokens // PAGE) + -(-tail_bytes(pool, tokens) // unit_bytes(pool))
