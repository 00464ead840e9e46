"""StagedPath on a pretended device: streams run late and in any order that the events allow, and no byte is wrong."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from builders import DEVICE, POISON, Served, served

from sglang_dsv4 import streams
from sglang_dsv4.cache.families import Group
from sglang_dsv4.transfer import staged, verify
from sglang_dsv4.transfer.staged import StagedPath
from sglang_dsv4.transfer.staging import StagingRing
from triton_ops.copy_pages import copy_pages_torch
from triton_ops.copy_rows import copy_rows_torch

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="a real device is tested in test_stress_gpu")


class Event:
    """Recorded again and again, like a CUDA event: a wait is for the last record before it."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.recorded = self.passed = 0

    def record(self, stream: Stream | None = None) -> None:
        self.recorded += 1
        number = self.recorded

        def passes() -> None:
            self.passed = max(self.passed, number)

        (stream or self.device.current).enqueue(passes)

    def query(self) -> bool:
        return self.passed >= self.recorded

    def synchronize(self) -> None:
        while not self.query():
            assert self.device.step(), "a wait that never ends"


class Stream:
    """Work in order. An entry is something to do, or an event and the record of it to wait for."""

    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name
        self.cuda_stream = len(device.streams)
        self.queue: deque[Any] = deque()

    def enqueue(self, work: Callable[[], None]) -> None:
        self.queue.append(work)
        self.device.time_passes()

    def wait_event(self, event: Event) -> None:
        self.queue.append((event, event.recorded))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.device)
        event.record(self)
        return event

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def step(self) -> bool:
        """Do the next thing, if it need not wait."""
        while self.queue and isinstance(self.queue[0], tuple):
            event, number = self.queue[0]
            if event.passed < number:
                return False
            self.queue.popleft()
        if not self.queue:
            return False
        self.queue.popleft()()
        return True


class Device:
    """``order``: the name of the stream that is always ahead, or a seed for any order."""

    def __init__(self, order: str | int, lazy: bool) -> None:
        self.streams: list[Stream] = []
        self.order, self.lazy = order, lazy
        self.random = random.Random(str(order))
        self.current = self.stream("kernels")

    def stream(self, name: str) -> Stream:
        self.streams.append(Stream(self, name))
        return self.streams[-1]

    def step(self) -> bool:
        order = list(self.streams)
        self.random.shuffle(order)
        order.sort(key=lambda stream: stream.name != self.order)
        return any(stream.step() for stream in order)

    def time_passes(self) -> None:
        """While the host goes on enqueueing."""
        for _ in range(0 if self.lazy else self.random.randrange(4)):
            self.step()

    def finish(self) -> None:
        while self.step():
            pass
        assert not any(stream.queue for stream in self.streams), "a wait that never ends"

    def set_stream(self, stream: Stream) -> None:
        self.current = stream

    @contextlib.contextmanager
    def on(self, stream: Stream):
        outer, self.current = self.current, stream
        yield
        self.current = outer

    # what a path enqueues

    def copy_pages(self, table, host, pages, blocks, save, stream=None) -> None:
        on = self.current if stream is None else self.streams[stream]
        on.enqueue(lambda: copy_pages_torch(table, host, pages, blocks, save))

    def copy_rows(self, table, host, segments, layers, nbytes, save, dtype, stream=None) -> None:
        on = self.current if stream is None else self.streams[stream]
        segments = segments.clone()  # they come by a copy on the same stream
        on.enqueue(lambda: copy_rows_torch(table, host, segments, layers, nbytes, save, dtype))

    def copy(self, host: torch.Tensor, device: torch.Tensor, save: bool) -> None:
        self.current.enqueue(lambda: (host if save else device).copy_(device if save else host))


@pytest.fixture
def pretend(monkeypatch):
    """Makes a Device, and lets StagedPath believe in it."""

    def make(order: str | int, lazy: bool, blocks_a_slot: int, short: int, world: Served) -> tuple[Device, StagedPath]:
        device = Device(order, lazy)
        cuda = SimpleNamespace(
            Stream=lambda *_, **__: device.stream("engine"),
            Event=lambda *_, **__: Event(device),
            current_stream=lambda _=None: device.current,
            set_stream=device.set_stream,
            stream=device.on,
        )
        named = {name: getattr(torch, name) for name in ("empty", "arange", "int64", "uint8", "Tensor")}
        monkeypatch.setattr(staged, "torch", SimpleNamespace(cuda=cuda, **named))
        monkeypatch.setattr(streams, "torch", SimpleNamespace(cuda=cuda))
        monkeypatch.setattr(staged, "copy_pages", device.copy_pages)
        monkeypatch.setattr(staged, "copy_rows", device.copy_rows)
        monkeypatch.setattr(staged, "_copy", device.copy)
        monkeypatch.setattr(staged, "StagingRing", lambda pin: StagingRing(pin=False))
        stride = world.memory.regions[Group.PAGED].packed.block_stride
        monkeypatch.setattr(staged, "SLOT_BYTES", blocks_a_slot * stride + 5)
        monkeypatch.setattr(staged, "SHORT_BYTES", short * stride + 5)
        return device, StagedPath(world.side, world.memory)

    return make


SIZES = {"one a slot": (1, 1), "three a slot": (3, 2), "all in one": (100, 40)}
# Every size in every order of the streams; lateness and the head start go with them so that all pairs occur.
CASES = [
    (order, (row + column) % 2 == 0, (row + column // 2) % 2 == 0, size)
    for row, order in enumerate(["engine", "kernels", 1, 2])
    for column, size in enumerate(SIZES)
]
TOKENS = (1_900, 130, 1_000, 257, 2_047)


def transfer(path: StagedPath, jobs, save: bool, begin: bool, event: Event) -> None:
    """As a Mover does it."""
    if begin and save:
        path.begin_save(jobs.pages, jobs.blocks)
    elif begin:
        path.begin_load(jobs.blocks, jobs.image)
    path.move(jobs, save)
    path.end()
    event.record()
    path.guard(event)


def give_up(path: StagedPath, jobs, save: bool, event: Event) -> None:
    """A request that turns out to be wrong."""
    path.begin_save(jobs.pages, jobs.blocks) if save else path.begin_load(jobs.blocks, jobs.image)
    path.end()
    event.record()
    path.guard(event)


def pages_of(world: Served, request: oracle.Request) -> dict[oracle.BufferKey, list[int]]:
    """Pages or state rows of each buffer that are the request's alone."""
    found = {}
    for key in oracle.buffers(world.pool):
        rows = [row for _, row in oracle.live_rows(world.pool, key, request.slots, request.n, request.req_slot)]
        if key[0] == "swa_kv":
            rows = [row // 256 for row in rows]
        elif key[0] not in oracle.STATE_FAMILIES:
            rows = (request.slots[::256] // 256).tolist()
        found[key] = sorted(set(rows))
    return found


@pytest.fixture(scope="module")
def world() -> Served:
    return served((4, 128), blocks=80, copies=10, pages=40, swa_pages=40, requests=8)


@pytest.mark.parametrize(("order", "late", "begin", "size"), CASES)
def test_transfers_one_after_the_other(pretend, world, order, late, begin, size):
    """The host waits for a save and for no load, as a Mover does; some transfers are given up."""
    device, path = pretend(order, late, *SIZES[size], world)
    oracle.fill(world.pool, seed=3)
    world.memory.arena.region.fill_(POISON)
    pool, copies, wanted = world.memory.pools[Group.PAGED], [], []
    everything = pool.take(pool.total)
    pool.give_back(everything[everything % 3 != 0], None)  # no more than two neighbours
    for number, tokens in enumerate(TOKENS):
        request, other = world.start(tokens, slot=number), world.start(600, slot=7)
        copy, spare = (world.memory.allocate(n, world.side.geometry) for n in (tokens, 600))
        wanted.append(oracle.read(world.pool, request.slots, tokens, number))
        if number % 2:
            give_up(path, world.jobs(spare, other, save=True), True, Event(device))
        event = Event(device)
        transfer(path, world.jobs(copy, request, save=True), True, begin, event)
        event.synchronize()
        for key, rows in pages_of(world, request).items():  # they are somebody else's at once
            oracle.buffers(world.pool)[key][rows] = POISON
        for one in (request, other):
            oracle.release(world.allocator, one.slots)
        spare.release()
        copies.append(copy)

    loaded, again = [], []
    for number in (3, 0, 4, 2, 1):
        tokens, slot = TOKENS[number], 6 - number
        request = world.resume(tokens, slot)
        if number % 2:
            give_up(path, world.jobs(copies[number - 1], request, save=False), False, Event(device))
        transfer(path, world.jobs(copies[number], request, save=False), False, begin, Event(device))
        loaded.append((number, request))
        if number in {0, 2}:  # and at once out again
            again.append((number, world.memory.allocate(tokens, world.side.geometry), request))
            transfer(path, world.jobs(again[-1][1], request, save=True), True, begin, Event(device))
    device.finish()
    for number, request in loaded:
        oracle.compare(wanted[number], oracle.read(world.pool, request.slots, request.n, request.req_slot))
        assert oracle.cleared_ring_ok(world.pool, request.req_slot, request.n)
    for number, copy, request in again:
        spans = world.plan(request)
        for first, second in zip(verify.pieces(copies[number], spans), verify.pieces(copy, spans), strict=True):
            assert torch.equal(first.host, second.host), (number, first.spans.family.name, first.layer)
    for _, request in loaded:
        oracle.release(world.allocator, request.slots)
    for copy in (*copies, *(copy for _, copy, _ in again)):
        copy.release()
    pool.give_back(everything[everything % 3 == 0], None)
    world.memory.check_integrity()
