"""Plays a HiSparse decode server on CPU with the engine's coordinator, allocator and pools; copy kernels are plain.

Rows are written where the compressor would write them and read where the swap-in would read them, one row at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import server_fixture
import torch
from plain_world import naive_pages
from server_fixture import SPEC, World, made_request
from sglang.srt.managers import hisparse_coordinator as coordinator
from sglang.srt.managers.hisparse_coordinator import HiSparseCoordinator
from sglang.srt.mem_cache import memory_pool_host as pools
from sglang.srt.mem_cache.allocator.hisparse import DeepSeekV4HiSparseTokenToKVPoolAllocator
from sglang.srt.runtime_context import get_context

from sglang_dsv4.testing.standalone import make_allocator

HISPARSE = replace(SPEC, pages=24, swa_pages=16, requests=8, hisparse=True)
HOT = 64  # rows of a request on the device
DECODED = 13  # tokens of a request that were not in its prompt
VALUES, SCALES, ROWS = 576, 8, 64  # bytes of a row's two pieces; rows of a page


class FakeDevice:
    """Plays torch.cuda where there is none: everything is done when it is asked for."""

    class Event:
        """Has passed."""

        def record(self, *_: Any) -> None: ...
        def wait(self, *_: Any) -> None: ...
        def query(self) -> bool:
            return True

    class Stream:
        """Runs at once."""

        def wait_stream(self, *_: Any) -> None: ...
        def synchronize(self) -> None: ...

    current_stream = Stream
    stream = staticmethod(lambda _: contextlib.nullcontext())


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
            (coordinator, "device_module", FakeDevice), (coordinator, "torch", _Torch()),
            (pools, "ALLOC_MEMORY_FUNCS", defaultdict(lambda: allocate)),
            (pools, "transfer_cache_dsv4_mla", transfer_rows), (pools, "transfer_kv_all_layer_mla", transfer_pages),
            (pools, "transfer_kv_per_layer_mla", transfer_pages_of_a_layer),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(module, name, value, create=True))  # CUDA alone has some
        stack.enter_context(mock.patch.object(pools, "host_memory_budget_bytes", lambda *_, **__: 1 << 40))
        stack.enter_context(naive_pages())
        stack.enter_context(mock.patch("sglang_dsv4.engine.hisparse.reserve.ENGINE_LEAVES", 0))
        yield


class HiSparseWorld(World):
    """Plays a decode server with HiSparse.

    overlap: a step's result is seen after the next step was prepared. ranks: the coordinator's group.
    """

    def __init__(
        self, overlap: bool = False, hot_pages: int = 20, seed: int = 0, ranks: Any = None, **kwargs: Any
    ) -> None:
        self.overlap, self.hot_pages, self.ranks = overlap, hot_pages, ranks
        self.noise = random.Random(seed)
        self.history: dict[str, list[list[bytes]]] = {}  # by request: its rows, each a layer
        with mock.patch.object(server_fixture, "make_allocator", self._make_allocator):
            super().__init__(**{"spec": HISPARSE} | kwargs)

    def _make_allocator(self, spec: Any, pool: Any, need_sort: bool = False) -> Any:
        part = pool.c4_kv_pool
        part.size = self.hot_pages * ROWS  # less than the logical cache has, as on a server
        return DeepSeekV4HiSparseTokenToKVPoolAllocator(make_allocator(spec, pool, need_sort))

    def _scheduler(self) -> SimpleNamespace:
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
        """Returns the coordinator's pool on the host."""
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
        self.history[rid] = []
        slots = self.coordinator.req_to_host_pool[self.slot(req), : prompt // 4].tolist()
        for slot in slots:
            row = self._new_row()
            write_row(self.host_pool.kv_buffer, slot, row)
            self.history[rid].append(row)
        return req

    def _mend_newest(self, req: Any, tokens: int) -> None:
        """Fills the place of the newest row, which the engine leaves empty; see ``engine/hisparse/rows.py``."""
        place = int(self.coordinator.req_to_device_buffer[self.slot(req), HOT])
        write_row(self.coordinator.mem_pool_device.kv_buffer, place, self.history[req.rid][-1])

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
        row, location = self._new_row(), int(self.table.req_to_token[self.slot(req), tokens - 1]) // 4
        place = int(self.pool.c4_kv_pool.full_to_hisparse_device_index_mapping[location])
        assert place > 0, "the newest row has no place"
        write_row(self.coordinator.mem_pool_device.kv_buffer, place, row)
        self.history[req.rid].append(row)

    def _new_row(self) -> list[bytes]:
        return [self.noise.randbytes(VALUES + SCALES) for _ in range(self.coordinator.mem_pool_device.layer_num)]

    # ------------------------------------------------------------------------------------ the oracle

    def read_history(self, req: Any) -> list[list[bytes]]:
        """Gives c4 rows that the next step's swap-in finds, row by row and layer by layer, as its kernel looks."""
        owner, slot, rows = self.coordinator, self.slot(req), (req.seqlen - 1) // 4
        found: list[list[bytes]] = [[] for _ in range(rows)]
        for number in range(owner.mem_pool_device.layer_num):
            hot = owner.req_device_buffer_tokens[number, slot, :HOT].tolist()
            places = owner.req_device_buffer_token_locs[number, slot].tolist()
            for row in range(rows):
                if rows <= HOT:
                    buffer, place = owner.mem_pool_device.kv_buffer[number], places[row]
                elif row == rows - 1:
                    buffer, place = owner.mem_pool_device.kv_buffer[number], places[HOT]
                elif row in hot:
                    buffer, place = owner.mem_pool_device.kv_buffer[number], places[hot.index(row)]
                else:
                    buffer, place = self.host_pool.kv_buffer[number], int(owner.req_to_host_pool[slot, row])
                assert place >= 0, f"row {row} of {rows} has no place"
                found[row] += read_row([buffer], place)
        return found

    def check_history(self, req: Any) -> None:
        """Checks each row that the next step may read; all but the newest lie on the host too."""
        wanted = self.history[req.rid][: (req.seqlen - 1) // 4]
        for row, (want, have) in enumerate(zip(wanted, self.read_history(req), strict=True)):
            assert want == have, f"request {req.rid}: row {row} of {len(wanted)} is another"
        for row, want in enumerate(wanted[:-1]):
            place = int(self.coordinator.req_to_host_pool[self.slot(req), row])
            assert place >= 0, f"request {req.rid}: row {row} has no place on the host"
            assert read_row(self.host_pool.kv_buffer, place) == want, f"row {row} on the host"

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


def write_row(layers: Any, row: int, texts: list[bytes]) -> None:
    """Writes a row into each layer."""
    for buffer, text in zip(layers, texts, strict=True):
        flat, done = buffer.view(torch.uint8).view(-1), 0
        for start, length in _pieces(row):
            flat[start : start + length] = torch.frombuffer(bytearray(text[done : done + length]), dtype=torch.uint8)
            done += length


def read_row(layers: Any, row: int) -> list[bytes]:
    """Returns a row of each layer."""
    flats = [buffer.view(torch.uint8).view(-1) for buffer in layers]
    return [
        b"".join(flat[start : start + length].numpy().tobytes() for start, length in _pieces(row)) for flat in flats
    ]
