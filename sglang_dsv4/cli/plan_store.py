"""Computes what sessions cost in a store (DSV4_STORE): objects, bytes, and the time that they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_dsv4.cache.families import Geometry
from sglang_dsv4.cache.packed import align
from sglang_dsv4.cache.units import Units
from sglang_dsv4.cli.plan_figures import TURN
from sglang_dsv4.cli.tables import duration, size, table

STORE_GBS = 1.0  # one cold disk, or Mooncake over TCP; NVMe arrays and RDMA have 5 to 20
ALIGNED = 4096  # bytes; objects are as long as their slots in the store's ring
SEAL_BYTES = 112


@dataclass(frozen=True)
class StoreFigures:
    """Holds the figures of sessions of ``tokens`` tokens in a store. Bytes as they are stored, with seals.

    objects, nbytes: of one: its pages, and the window at the end of the last. ms: to write all of it, or to read it, at
    the store's rate. turn_bytes, turn_ms: of what the next turn writes, ``turn`` more tokens and a window.
    total_bytes: of ``sessions`` of them, each with its last window.
    """

    tokens: int
    objects: int
    nbytes: int
    ms: float
    turn: int
    turn_bytes: int
    turn_ms: float
    sessions: int
    total_bytes: int


def object_bytes(unit_bytes: int) -> int:
    """Returns bytes of the object of a unit, with its seal."""
    return align(unit_bytes + SEAL_BYTES, ALIGNED)


def store_figures(geometry: Geometry, tokens: int, sessions: int, store_gbs: float) -> StoreFigures:
    """Returns the cost of ``sessions`` sessions of ``tokens`` (a page or more) tokens each in a store.

    store_gbs: 1e9 bytes a second, either way.
    """
    units = Units.of(geometry)
    one, window = object_bytes(units.nbytes), units.tail(geometry.page_size)
    objects = tokens // geometry.page_size + window
    turn = (TURN // geometry.page_size + window) * one
    rate = store_gbs * 1e6  # bytes a millisecond
    return StoreFigures(
        tokens, objects, objects * one, objects * one / rate, TURN, turn, turn / rate, sessions,
        sessions * objects * one,
    )  # fmt: skip


def store_table(rows: Sequence[StoreFigures], store_gbs: float) -> str:
    """Returns the table of a plan. rows: at least one."""
    first = rows[0]
    columns = (
        "tokens", "a session", "objects", "write or read", f"{first.turn:,} more", "to write",
        f"{first.sessions:,} sessions",
    )  # fmt: skip
    cells = [
        (
            f"{row.tokens:,}", size(row.nbytes), f"{row.objects:,}", duration(row.ms), size(row.turn_bytes),
            duration(row.turn_ms), size(row.total_bytes),
        )
        for row in rows
    ]  # fmt: skip
    note = (
        "pages that sessions share are stored once; windows of earlier turns stay, until the store evicts them. "
        "DSV4_STORE takes a folder or a storage backend (docs/store.md)"
    )
    return table(f"Sessions in a store, at {store_gbs:g} GB/s (--store-rate)", columns, cells, (), note)
