"""Plays a plain server with HiSparse on CPU: prompts computed on the device, staged, decoded with hot rows.

The engine's own scheduler and coordinator run; the c4 rows are written where the compressor would write them, looked
for where the swap-in would look, and in each decode step some are swapped in, as the engine's kernel does it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from hisparse_world import HOT, ROWS
from sglang.srt.managers.hisparse_coordinator import HiSparseCoordinator
from sglang.srt.mem_cache.allocator.hisparse import DeepSeekV4HiSparseTokenToKVPoolAllocator

from sglang_dsv4.testing import ledger, server
from sglang_dsv4.testing.content import PrefixLedger
from sglang_dsv4.testing.forward import WrongRows
from sglang_dsv4.testing.server import ServerSpec
from sglang_dsv4.testing.world import PlainWorld


@dataclass(frozen=True)
class HiSparseSpec(ServerSpec):
    """Holds a plain server's sizes and switches, with HiSparse. hot_pages: of rows on the device."""

    hot_pages: int = 40
    ratios: tuple[int, ...] = (0, 4, 128)
    radix: bool = False

    def pool(self) -> Any:
        """Returns the pool's part of it."""
        found = super().pool()
        return replace(found, hisparse=True, server_args={**found.server_args, "enable_hisparse": True})

    def allocator(self, pool: Any) -> Any:
        """Returns the HiSparse allocator over the usual one."""
        pool.c4_kv_pool.size = self.hot_pages * ROWS
        logical = super().allocator(pool)
        found = DeepSeekV4HiSparseTokenToKVPoolAllocator(logical)
        found.full_attn_allocator, found.swa_attn_allocator = logical.full_attn_allocator, logical.swa_attn_allocator
        return found


class HiSparsePlainWorld(PlainWorld):
    """Plays one plain HiSparse server; only within ``on_cpu``."""

    def __init__(self, **changes: Any) -> None:
        spec = HiSparseSpec(**changes)
        self.chosen = random.Random(spec.hot_pages)
        super().__init__(spec)

    def build_scheduler(self, memory: Any) -> Any:
        """Returns a scheduler with a coordinator."""
        self.coordinator = HiSparseCoordinator(
            req_to_token_pool=memory.table, token_to_kv_pool_allocator=memory.allocator, top_k=HOT,
            device_buffer_size=HOT, device="cpu", tp_group=None,
        )  # fmt: skip
        scheduler = super().build_scheduler(memory)
        scheduler.enable_hisparse, scheduler.hisparse_coordinator = True, self.coordinator
        scheduler.batch_result_processor = server._results(scheduler)
        return scheduler

    def parts(self) -> list[Any]:
        """Returns all but the c4 rows, which ``check_rows`` judges."""
        return [part for part in super().parts() if part.family != "c4_kv"]

    def check_reads(self, ledger: PrefixLedger, slots: torch.Tensor, row: int, whom: str, end: int = 0) -> None:
        """Checks the c4 rows at the places that the next forward reads."""
        super().check_reads(ledger, slots, row, whom, end)
        self.check_rows(ledger, slots, row, whom)

    def write(self, ledger: PrefixLedger, slots: torch.Tensor, first: int, row: int, decode: bool) -> None:
        """Writes the c4 rows through the mapping; a decode step reads some."""
        super().write(ledger, slots, first, row, decode)
        self.write_rows(ledger, slots, first)
        if decode:
            self.swap_in(ledger, len(slots), row)

    def c4_parts(self, host: bool) -> list[Any]:
        """Returns the c4 buffers, on the device or on the host."""
        device = [part for part in super().parts() if part.family == "c4_kv"]
        pages = self.coordinator.mem_pool_host.kv_buffer
        return [part._replace(buffer=pages[part.layer]) for part in device] if host else device

    def write_rows(self, wanted: PrefixLedger, slots: torch.Tensor, first: int) -> None:
        """Writes the compressor's rows, one with each fourth position, through the mapping."""
        positions = torch.arange(first, len(slots))
        positions = positions[positions % 4 == 3]
        rows = self.pool.c4_kv_pool.full_to_hisparse_device_index_mapping[slots[positions] // 4]
        assert bool((rows > 0).all()), "a row has no place on the device"
        for part in self.c4_parts(host=False):
            wanted.put(part, positions, rows)

    def check_rows(self, wanted: PrefixLedger, slots: torch.Tensor, row: int, whom: str) -> None:
        """Checks that all c4 rows of ``slots`` are where the next forward looks."""
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
                raise WrongRows(f"{whom}, {len(slots)} tokens: {wrong[0]}")

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
        """Reads HOT rows of its choice in a step behind ``tokens``, and finds them on the device then."""
        count = tokens // 4
        if count <= HOT:
            return
        for device, host in zip(self.c4_parts(host=False), self.c4_parts(host=True), strict=True):
            asked = self.chosen.sample(range(count), HOT)
            if wrong := self._swapped_in(wanted, device, host, row, count, asked):
                raise WrongRows(f"swapped in, {tokens} tokens: {wrong[0]}")

    def _swapped_in(
        self, wanted: PrefixLedger, device: Any, host: Any, row: int, count: int, asked: list[int]
    ) -> list[str]:  # fmt: skip
        """Returns the wrong rows of ``asked`` on the device, and swaps missing ones into the oldest places. The places
        used longest ago are given to what is missing there.
        """
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
        """Asserts that every row is back, on the host and on the device."""
        host, hot = self.coordinator.mem_pool_host, self.allocator.hisparse_attn_allocator
        assert host.available_size() == host.size, f"{host.size - host.available_size()} host rows are lost"
        assert hot.available_size() == hot.size, f"{hot.size - hot.available_size()} hot rows are lost"


def move_row(source: Any, row: int, target: Any, place: int) -> None:
    """Moves one row of a layer from the host's pages to the device's."""
    for (here, _, _), (there, _, _) in zip(ledger.planes(source), ledger.planes(target), strict=True):
        there[place // target.rows, place % target.rows] = here[row // source.rows, row % source.rows]
