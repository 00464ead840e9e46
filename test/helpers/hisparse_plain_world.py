"""A plain server with HiSparse on CPU: prompts are computed on the device, staged to the host, decoded with hot
rows.

The engine's own scheduler and coordinator run; the c4 rows are written where the compressor would write them, looked
for where the swap-in would look, and in each decode step some are swapped in, as the engine's kernel does it.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from hisparse_world import HOT, ROWS, on_cpu

from sglang_dsv4.engine.standalone import make_allocator
from sglang_dsv4.testing import forward, integrity, ledger, server
from sglang_dsv4.testing import world as plain
from sglang_dsv4.testing.content import PrefixLedger
from sglang_dsv4.testing.server import ServerSpec
from sglang_dsv4.testing.world import PlainWorld

_parts, _check, _write = ledger.parts, forward.check_reads, forward.write
_build_scheduler = plain.build_scheduler


class HiSparseSpec(ServerSpec):
    """As ServerSpec, with HiSparse."""

    def pool(self) -> Any:
        """The pool's part of it."""
        found = super().pool()
        return replace(found, hisparse=True, server_args={**found.server_args, "enable_hisparse": True})


class HiSparsePlainWorld(PlainWorld):
    """One plain HiSparse server; only within ``plain_on_cpu``."""

    def __init__(self, hot_pages: int = 40, **changes: Any) -> None:
        self.hot_pages, self.chosen = hot_pages, random.Random(hot_pages)
        with (
            mock.patch.object(server, "make_allocator", self.make_allocator),
            mock.patch.object(plain, "build_scheduler", self.build_scheduler),
        ):
            super().__init__(HiSparseSpec(**{"ratios": (0, 4, 128), "radix": False} | changes))

    def make_allocator(self, spec: Any, pool: Any) -> Any:
        """The HiSparse allocator over the usual one."""
        from sglang.srt.mem_cache.allocator.hisparse import DeepSeekV4HiSparseTokenToKVPoolAllocator

        pool.c4_kv_pool.size, pool.made_by = self.hot_pages * ROWS, self
        logical = make_allocator(spec, pool)
        found = DeepSeekV4HiSparseTokenToKVPoolAllocator(logical)
        found.full_attn_allocator, found.swa_attn_allocator = logical.full_attn_allocator, logical.swa_attn_allocator
        return found

    def build_scheduler(self, spec: ServerSpec, memory: Any) -> Any:
        """A scheduler with a coordinator."""
        from sglang.srt.managers.hisparse_coordinator import HiSparseCoordinator

        self.coordinator = HiSparseCoordinator(
            req_to_token_pool=memory.table, token_to_kv_pool_allocator=memory.allocator, top_k=HOT,
            device_buffer_size=HOT, device="cpu", tp_group=None,
        )  # fmt: skip
        scheduler = _build_scheduler(spec, memory)
        scheduler.enable_hisparse, scheduler.hisparse_coordinator = True, self.coordinator
        scheduler.batch_result_processor = server._results(scheduler)
        return scheduler

    def c4_parts(self, host: bool) -> list[Any]:
        """The c4 buffers, on the device or on the host."""
        device = [part for part in _parts(self.pool) if part.family == "c4_kv"]
        pages = self.coordinator.mem_pool_host.kv_buffer
        return [part._replace(buffer=pages[part.layer]) for part in device] if host else device

    def write_rows(self, wanted: PrefixLedger, slots: torch.Tensor, first: int) -> None:
        """The compressor's: a row with each fourth position, through the mapping."""
        positions = torch.arange(first, len(slots))
        positions = positions[positions % 4 == 3]
        rows = self.pool.c4_kv_pool.full_to_hisparse_device_index_mapping[slots[positions] // 4]
        assert bool((rows > 0).all()), "a row has no place on the device"
        for part in self.c4_parts(host=False):
            wanted.put(part, positions, rows)

    def check_rows(self, wanted: PrefixLedger, slots: torch.Tensor, row: int, whom: str) -> None:
        """All c4 rows of ``slots`` are where the next forward looks."""
        owner, count = self.coordinator, len(slots) // 4
        numbers = torch.arange(count)
        positions = numbers * 4 + 3
        on_device, on_host = self.c4_parts(host=False), self.c4_parts(host=True)
        for device, host in zip(on_device, on_host, strict=True):
            if not int(owner.req_device_buffer_size[row]):  # before its first step
                places = self.pool.c4_kv_pool.full_to_hisparse_device_index_mapping[slots[positions] // 4]
                wrong = wanted.differences(device, positions, places)
            else:
                wrong = self._step_reads(wanted, device, host, row, positions)
            if wrong:
                raise forward.WrongRows(f"{whom}, {len(slots)} tokens: {wrong[0]}")

    def _step_reads(self, wanted: PrefixLedger, device: Any, host: Any, row: int, positions: Any) -> list[str]:
        owner, count = self.coordinator, len(positions)
        places = owner.req_device_buffer_token_locs[device.layer, row].long()
        if count <= HOT:
            return wanted.differences(device, positions, places[:count])
        hot = owner.req_device_buffer_tokens[device.layer, row, :HOT].tolist()
        cold = torch.tensor([number for number in range(count - 1) if number not in hot], dtype=torch.int64)
        kept = torch.tensor([number for number in hot if 0 <= number < count - 1], dtype=torch.int64)
        there = torch.tensor([hot.index(number) for number in kept.tolist()], dtype=torch.int64)
        rows = owner.req_to_host_pool[row]
        return [
            *wanted.differences(device, positions[-1:], places[HOT : HOT + 1]),
            *(wanted.differences(device, positions[kept], places[there]) if len(kept) else []),
            *(wanted.differences(host, positions[cold], rows[cold]) if len(cold) else []),
        ]

    def swap_in(self, wanted: PrefixLedger, tokens: int, row: int) -> None:
        """A step behind ``tokens`` reads HOT rows of its choice, and finds them on the device then."""
        count = tokens // 4
        if count <= HOT:
            return
        for device, host in zip(self.c4_parts(host=False), self.c4_parts(host=True), strict=True):
            asked = self.chosen.sample(range(count), HOT)
            if wrong := self._swapped_in(wanted, device, host, row, count, asked):
                raise forward.WrongRows(f"swapped in, {tokens} tokens: {wrong[0]}")

    def _swapped_in(
        self, wanted: PrefixLedger, device: Any, host: Any, row: int, count: int, asked: list[int]
    ) -> list[str]:  # fmt: skip
        """What of ``asked`` is wrong on the device. The places used longest ago are given to what is missing there."""
        owner, newest = self.coordinator, count - 1
        held, order = owner.req_device_buffer_tokens[device.layer, row], owner.lru_slots[device.layer, row]
        places = owner.req_device_buffer_token_locs[device.layer, row].long()
        where = {int(held[place]): place for place in order.tolist() if int(held[place]) in asked}
        where.pop(newest, None)
        free = [place for place in order.tolist() if place not in where.values()]
        missing = [number for number in asked if number != newest and number not in where]
        given = dict(zip(missing, free, strict=False))
        for number, place in given.items():
            move_row(host, int(owner.req_to_host_pool[row, number]), device, int(places[place]))
            held[place] = number
        used = [place for place in order.tolist() if place in where.values()]
        owner.lru_slots[device.layer, row] = torch.tensor([*free[len(given) :], *given.values(), *used]).to(order.dtype)
        where |= given | {newest: HOT}
        numbers = torch.tensor(asked)
        return wanted.differences(device, numbers * 4 + 3, places[torch.tensor([where[number] for number in asked])])

    def nothing_held(self) -> None:
        """Every row is back, on the host and on the device."""
        host, hot = self.coordinator.mem_pool_host, self.allocator.hisparse_attn_allocator
        assert host.available_size() == host.size, f"{host.size - host.available_size()} host rows are lost"
        assert hot.available_size() == hot.size, f"{hot.size - hot.available_size()} hot rows are lost"


def move_row(source: Any, row: int, target: Any, place: int) -> None:
    """One row of a layer, from the host's pages to the device's."""
    for (here, _, _), (there, _, _) in zip(ledger.planes(source), ledger.planes(target), strict=True):
        there[place // target.rows, place % target.rows] = here[row // source.rows, row % source.rows]


def _made_by(pool: Any) -> HiSparsePlainWorld | None:
    return getattr(pool, "made_by", None)


def _known_parts(pool: Any) -> list[Any]:
    return [part for part in _parts(pool) if _made_by(pool) is None or part.family != "c4_kv"]


def _check_reads(pool: Any, wanted: PrefixLedger, slots: torch.Tensor, row: int, whom: str) -> None:
    _check(pool, wanted, slots, row, whom)
    _made_by(pool).check_rows(wanted, slots, row, whom)  # type: ignore[union-attr]


def _write_all(pool: Any, wanted: PrefixLedger, slots: torch.Tensor, first: int, row: int, decode: bool) -> None:
    _write(pool, wanted, slots, first, row, decode)
    world = _made_by(pool)
    assert world is not None
    world.write_rows(wanted, slots, first)
    if decode:
        world.swap_in(wanted, len(slots), row)


@contextlib.contextmanager
def plain_on_cpu() -> Iterator[None]:
    """Within this, such servers can be built and run."""
    with on_cpu(), contextlib.ExitStack() as stack:
        for place, name, value in (
            (ledger, "parts", _known_parts), (forward, "parts", _known_parts), (integrity, "parts", _known_parts),
            (forward, "check_reads", _check_reads), (integrity, "check_reads", _check_reads),
            (forward, "write", _write_all),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(place, name, value))
        yield
