"""Plays decode and plain servers with HiSparse on CPU: the engine's coordinator over stand-ins for its copy kernels.

The c4 rows are written where the compressor would write them, and looked for where the swap-in would look.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock
from zlib import crc32

import server_fixture
import torch
from plain_world import naive_pages
from server_fixture import SPEC, World, made_request
from sglang.srt.managers import hisparse_coordinator as coordinator
from sglang.srt.managers.hisparse_coordinator import HiSparseCoordinator
from sglang.srt.mem_cache import memory_pool_host as pools
from sglang.srt.mem_cache.allocator.hisparse import DeepSeekV4HiSparseTokenToKVPoolAllocator
from sglang.srt.runtime_context import get_context

from sglang_dsv4.testing import server
from sglang_dsv4.testing.content import PrefixLedger
from sglang_dsv4.testing.forward import WrongRows
from sglang_dsv4.testing.ledger import Ledger, Part, parts, planes
from sglang_dsv4.testing.server import ServerSpec
from sglang_dsv4.testing.standalone import make_allocator
from sglang_dsv4.testing.world import PlainWorld

HISPARSE = replace(SPEC, pages=24, swa_pages=16, requests=8, hisparse=True)
HOT = 64  # rows of a request on the device
MOST = 4096  # tokens of a request
DECODED = 13  # tokens of a request that were not in its prompt
VALUES, SCALES, ROWS = 576, 8, 64  # bytes of a row's two pieces; rows of a page
NO_STREAMS = mock.MagicMock()  # plays torch.cuda where there is none: everything is done when it is asked for


def _pieces(row: int) -> list[tuple[int, int]]:
    """Returns (byte within a layer's buffer, length) of a row's values and scales."""
    page, inner = divmod(row, ROWS)
    start = page * -(-ROWS * (VALUES + SCALES) // VALUES) * VALUES
    return [(start + inner * VALUES, VALUES), (start + ROWS * VALUES + inner * SCALES, SCALES)]


def transfer_rows(*, src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any) -> None:
    """Plays the engine's transfer_cache_dsv4_mla."""
    for source, target in zip(src_ptrs.tolist(), dst_ptrs.tolist(), strict=True):
        for one, other in zip(src_indices.tolist(), dst_indices.tolist(), strict=True):
            for (start, length), (to, _) in zip(_pieces(one), _pieces(other), strict=True):
                ctypes.memmove(target + to, source + start, length)


def transfer_pages(*, src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, item_size: int,
                   num_layers: int) -> None:  # fmt: skip
    """Plays the engine's transfer_kv_all_layer_mla."""
    for source, target in zip(src_layers.tolist(), dst_layers.tolist(), strict=True):
        for one, other in zip(src_indices.tolist(), dst_indices.tolist(), strict=True):
            ctypes.memmove(target + other * item_size, source + one * item_size, item_size)


def transfer_pages_of_a_layer(*, src: Any, dst: Any, src_indices: Any, dst_indices: Any, item_size: int) -> None:
    """Plays the engine's transfer_kv_per_layer_mla."""
    dst.view(torch.uint8).view(-1, item_size)[dst_indices] = src.view(torch.uint8).view(-1, item_size)[src_indices]


class _Torch:
    """Plays torch, whose tensors need not be pinned."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(*args, **kwargs)

    distributed = SimpleNamespace(get_world_size=lambda group: 1)


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Lets coordinators be built and run without a GPU."""

    def allocate(dims: Any, dtype: Any, **_: Any) -> torch.Tensor:
        return torch.zeros(dims, dtype=dtype)

    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (coordinator, "device_module", NO_STREAMS), (coordinator, "torch", _Torch()),
            (pools, "ALLOC_MEMORY_FUNCS", defaultdict(lambda: allocate)),
            (pools, "transfer_cache_dsv4_mla", transfer_rows), (pools, "transfer_kv_all_layer_mla", transfer_pages),
            (pools, "transfer_kv_per_layer_mla", transfer_pages_of_a_layer),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(module, name, value, create=True))  # CUDA alone has some
        stack.enter_context(mock.patch.object(pools, "host_memory_budget_bytes", lambda *_, **__: 1 << 40))
        stack.enter_context(naive_pages())
        stack.enter_context(mock.patch("sglang_dsv4.engine.hisparse.reserve.ENGINE_LEAVES", 0))
        yield


class HotRows:
    """Writes and judges the c4 rows of a server's requests, on the device and on the host."""

    pool: Any
    coordinator: Any

    def c4_parts(self, host: bool) -> list[Part]:
        """Returns the c4 buffers, on the device or on the host."""
        device = [part for part in parts(self.pool) if part.family == "c4_kv"]
        pages = self.coordinator.mem_pool_host.kv_buffer
        return [part._replace(buffer=pages[part.layer]) for part in device] if host else device

    def put_rows(self, wanted: Ledger, numbers: torch.Tensor, places: torch.Tensor, host: bool = False) -> None:
        """Writes the c4 rows ``numbers`` of a request into ``places``, in each layer."""
        for part in self.c4_parts(host):
            wanted.put(part, numbers * 4 + 3, places.long())

    def wrong_rows(self, wanted: Ledger, row: int, count: int) -> list[str]:
        """Names the first of ``count`` c4 rows that is wrong where the next swap-in looks, by layer; row: of tables."""
        layers = zip(self.c4_parts(host=False), self.c4_parts(host=True), strict=True)
        return [wrong for device, host in layers for wrong in self._step_reads(wanted, device, host, row, count)]

    def _step_reads(self, wanted: Ledger, device: Part, host: Part, row: int, count: int) -> list[str]:
        owner, positions = self.coordinator, torch.arange(count) * 4 + 3
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


class HiSparseWorld(HotRows, World):
    """Plays a decode server with HiSparse.

    overlap: a step's result is seen after the next step was prepared. ranks: the coordinator's group.
    """

    def __init__(self, overlap: bool = False, hot_pages: int = 20, ranks: Any = None, **kwargs: Any) -> None:
        self.overlap, self.hot_pages, self.ranks = overlap, hot_pages, ranks
        self.ledgers: dict[str, Ledger] = {}  # of the c4 rows, by request
        with mock.patch.object(server_fixture, "make_allocator", self._make_allocator):
            super().__init__(**{"spec": HISPARSE} | kwargs)

    def _make_allocator(self, spec: Any, pool: Any, need_sort: bool = False) -> Any:
        part = pool.c4_kv_pool
        part.size = self.hot_pages * ROWS  # less than the logical cache has, as on a server
        return DeepSeekV4HiSparseTokenToKVPoolAllocator(make_allocator(spec, pool, need_sort))

    def _scheduler(self) -> Any:
        # A server resolves its choice of a backup later.
        early = {"disaggregation_decode_retraction_backup": None}
        early |= {"disaggregation_mode": "decode", "disable_radix_cache": True, "enable_hisparse": True}
        with get_context().override_server_args(**early):
            self.coordinator = HiSparseCoordinator(
                req_to_token_pool=self.table, token_to_kv_pool_allocator=self.allocator, top_k=HOT,
                device_buffer_size=HOT, device="cpu", tp_group=self.ranks,
            )  # fmt: skip
        scheduler = super()._scheduler()
        scheduler.enable_hisparse, scheduler.hisparse_coordinator = True, self.coordinator
        return scheduler

    @property
    def kept(self) -> Any:
        """Returns the requests that keep rows."""
        return self.pool.kept_rows

    @property
    def host_pool(self) -> Any:
        return self.coordinator.mem_pool_host

    # -------------------------------------------------------------------------------------- requests

    def admit(self, n: int, rid: str = "r", prompt: int | None = None, **kwargs: Any) -> Any:
        """Admits as the base does: the prompt's rows arrive on the host, and the rest is decoded step by step."""
        prompt = max(1, n - DECODED) if prompt is None else prompt
        assert prompt <= n
        req = self._arrive(prompt, rid, **kwargs)
        self.coordinator.admit_request_direct(req)
        if prompt // 4 > HOT:
            self._mend_newest(req, prompt)
        for _ in range(n - prompt):
            self.step(req)
        if self.overlap and n > prompt:
            self._prepare(req)  # of the step in flight, whose token is not known
        return req

    def _arrive(self, prompt: int, rid: str, fake: bool = False, input_embeds: Any = None) -> Any:
        """Returns a request whose prompt was just transferred."""
        req = made_request(rid, prompt, fake=fake, input_embeds=input_embeds)
        req.output_ids.append(7)
        self.queue._pre_alloc(req)
        count, self.ledgers[rid] = prompt // 4, Ledger(crc32(rid.encode()), MOST)
        places = self.coordinator.req_to_host_pool[self.slot(req), :count]
        self.put_rows(self.ledgers[rid], torch.arange(count), places, host=True)
        return req

    def _mend_newest(self, req: Any, tokens: int) -> None:
        """Fills the place of the newest row, which the engine leaves empty; see ``engine/hisparse/rows.py``."""
        place = self.coordinator.req_to_device_buffer[self.slot(req), HOT : HOT + 1]
        self.put_rows(self.ledgers[req.rid], torch.tensor([tokens // 4 - 1]), place)

    def step(self, req: Any) -> None:
        """Runs one decode step of ``req``, prepared, computed and seen; with overlap it was prepared a step ago."""
        n = req.seqlen - 1
        if self.committed(req) == n:
            self._prepare(req)
        self._compute(req, n + 1)
        req.output_ids.append(100 + n)
        self._evict_window(req, n)

    def _prepare(self, req: Any) -> None:
        place = req.kv
        total = self.committed(req) + 1
        lengths, slot = torch.tensor([total]), torch.tensor([self.slot(req)])
        last = self.table.req_to_token[self.slot(req), total - 2 : total - 1].to(torch.int64)
        new = self.allocator.alloc_decode(lengths, lengths, last)
        assert new is not None
        self.table.write((self.slot(req), slice(total - 1, total)), new.to(torch.int32))
        req.kv.kv_allocated_len = place.kv_committed_len = total
        self.coordinator.map_last_loc_to_buffer(lengths, new.to(torch.int64), slot, lengths, slot)

    def _compute(self, req: Any, tokens: int) -> None:
        """Writes a row with each fourth token through the mapping, as the compressor does."""
        if tokens % 4:
            return
        location = int(self.table.req_to_token[self.slot(req), tokens - 1]) // 4
        place = self.pool.c4_kv_pool.full_to_hisparse_device_index_mapping[location : location + 1]
        assert int(place) > 0, "the newest row has no place"
        self.put_rows(self.ledgers[req.rid], torch.tensor([tokens // 4 - 1]), place)

    def check_history(self, req: Any) -> None:
        """Checks each row that the next step may read; all but the newest lie on the host too."""
        wanted, row, count = self.ledgers[req.rid], self.slot(req), (req.seqlen - 1) // 4
        wrong = self.wrong_rows(wanted, row, count)
        numbers = torch.arange(max(0, count - 1))
        places = self.coordinator.req_to_host_pool[row, : len(numbers)].long()
        for part in self.c4_parts(host=True):
            wrong += [f"on the host: {text}" for text in wanted.differences(part, numbers * 4 + 3, places)]
        assert not wrong, f"request {req.rid} of {count} rows: {wrong[0]}"

    # ------------------------------------------------------------------------------ the engine's path

    def read(self, req: Any) -> dict[Any, bytes]:
        """Returns all families but the c4 rows, which ``check_history`` reads."""
        with mock.patch("oracle._c4_kv_row", lambda pool, compressed: 0):
            found = super().read(req)
        return {key: text for key, text in found.items() if key[0] != "c4_kv"}

    def retract(self, req: Any, offload_kv: bool = True) -> Any:
        """Returns the engine's ScheduleBatch.release_req; without offload_kv, as a pause retracts."""
        if not offload_kv:
            return super().retract(req, offload_kv=False)
        return self._batch([req]).release_req(0, 0)

    def finish(self, req: Any) -> None:
        """Tells the coordinator first."""
        self.coordinator.request_finished(req)
        super().finish(req)

    def host_pages(self) -> dict[str, int]:
        """Returns pages of the host pool: free, kept, and of running requests by the coordinator's own table."""
        running = int(self.coordinator.req_to_host_pool_allocated_len.sum()) // ROWS
        return {"free": self.host_pool.available_size() // ROWS, "kept": self.kept.held, "running": running}

    def nothing_held(self) -> None:
        """Asserts that every host block and every page is back, on the host and on the device."""
        super().nothing_held()
        pages = self.host_pages()
        assert pages == {"free": self.host_pool.size // ROWS, "kept": 0, "running": 0}, pages
        slots = torch.cat([self.host_pool.free_slots, *self.host_pool.release_slots])
        assert torch.equal(slots.sort().values, torch.arange(self.host_pool.size)), "a page is free twice"
        hot = self.allocator.hisparse_attn_allocator
        assert hot.available_size() == hot.size, f"{hot.size - hot.available_size()} hot rows are lost"
        assert self.allocator.logical_attn_allocator.full_available_size() == self.allocator.size_full


@dataclass(frozen=True)
class HiSparseSpec(ServerSpec):
    """Holds a plain server's sizes and switches, with HiSparse. hot_pages: of rows on the device."""

    hot_pages: int = 40
    ratios: tuple[int, ...] = (0, 4, 128)
    radix: bool = False

    def pool(self) -> Any:
        found = super().pool()
        return replace(found, hisparse=True, server_args={**found.server_args, "enable_hisparse": True})

    def allocator(self, pool: Any) -> Any:
        """Returns the HiSparse allocator over the usual one."""
        pool.c4_kv_pool.size = self.hot_pages * ROWS
        logical = super().allocator(pool)
        found = DeepSeekV4HiSparseTokenToKVPoolAllocator(logical)
        found.full_attn_allocator, found.swa_attn_allocator = logical.full_attn_allocator, logical.swa_attn_allocator
        return found


class HiSparsePlainWorld(HotRows, PlainWorld):
    """Plays one plain HiSparse server; only within ``on_cpu``."""

    def __init__(self, **changes: Any) -> None:
        spec = HiSparseSpec(**changes)
        self.chosen = random.Random(spec.hot_pages)
        super().__init__(spec)

    def build_scheduler(self, memory: Any) -> Any:
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

    def write_rows(self, wanted: PrefixLedger, slots: torch.Tensor, first: int) -> None:
        """Writes the compressor's rows, one with each fourth position, through the mapping."""
        numbers = torch.arange(first // 4, len(slots) // 4)
        places = self._mapped(slots, numbers)
        assert bool((places > 0).all()), "a row has no place on the device"
        self.put_rows(wanted, numbers, places)

    def _mapped(self, slots: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return self.pool.c4_kv_pool.full_to_hisparse_device_index_mapping[slots[numbers * 4 + 3] // 4]

    def check_rows(self, wanted: PrefixLedger, slots: torch.Tensor, row: int, whom: str) -> None:
        """Checks that all c4 rows of ``slots`` are where the next forward looks."""
        count = len(slots) // 4
        if int(self.coordinator.req_device_buffer_size[row]):
            wrong = self.wrong_rows(wanted, row, count)
        else:  # before its first step
            numbers, wrong = torch.arange(count), []
            for part in self.c4_parts(host=False):
                wrong += wanted.differences(part, numbers * 4 + 3, self._mapped(slots, numbers))
        if wrong:
            raise WrongRows(f"{whom}, {len(slots)} tokens: {wrong[0]}")

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
        host, hot = self.coordinator.mem_pool_host, self.allocator.hisparse_attn_allocator
        assert host.available_size() == host.size, f"{host.size - host.available_size()} host rows are lost"
        assert hot.available_size() == hot.size, f"{hot.size - hot.available_size()} hot rows are lost"


def move_row(source: Any, row: int, target: Any, place: int) -> None:
    """Moves one row of a layer from the host's pages to the device's."""
    for (here, _, _), (there, _, _) in zip(planes(source), planes(target), strict=True):
        there[place // target.rows, place % target.rows] = here[row // source.rows, row % source.rows]
