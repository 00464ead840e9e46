"""Pretends a GPU whose streams run late and in any allowed order: a missing wait shows as a wrong byte.

``Device`` stands where the copier takes ``torch.cuda``. Kernels and copies are enqueued on the stream that they name;
they run when the device takes a step, which it does while the host goes on enqueueing or waits.
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable
from typing import Any
from unittest import mock

from sglang_dsv4.transfer import copier, locate, templates
from sglang_dsv4.transfer.copier import Copier
from sglang_dsv4.transfer.pages_in_use import PagesInUse
from triton_ops.copy_pages import copy_pages, copy_pages_torch
from triton_ops.copy_rows import copy_rows, copy_rows_torch
from triton_ops.locate import locate as locate_kernel
from triton_ops.locate import locate_torch

TORCH = {"copy_pages": copy_pages_torch, "copy_rows": copy_rows_torch, "locate": locate_torch}
INTERPRETED = {"copy_pages": copy_pages, "copy_rows": copy_rows, "locate": locate_kernel}
_PLANNED: dict[str, dict[tuple[int, bool], Any]] = {}


class PlannedOnce(templates.RowTemplates):
    """Plans the thousand templates of a layout once in a process: a quarter of a second each time."""

    def __init__(self, buffers: Any) -> None:
        planned = _PLANNED.setdefault(repr((buffers.geometry, buffers.families, buffers.first_row_buffer)), {})
        build = templates.build_template

        def build_once(of: Any, tokens: int, save: bool) -> Any:
            if (tokens, save) not in planned:
                planned[tokens, save] = build(of, tokens, save)
            return planned[tokens, save]

        with mock.patch.object(templates, "build_template", build_once):
            super().__init__(buffers)


class Event:
    """Records again and again, like a CUDA event: a wait is for the last record before it."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.recorded = self.passed = 0

    def record(self, stream: Stream) -> None:
        self.recorded += 1
        number = self.recorded

        def passes() -> None:
            self.passed = max(self.passed, number)

        stream.enqueue(passes)

    def query(self) -> bool:
        return self.passed >= self.recorded

    def synchronize(self) -> None:
        while not self.query():
            assert self.device.step(), "a wait that never ends"


class Stream:
    """Queues work in order. An entry is something to do, or an event and the record of it to wait for."""

    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name, self.cuda_stream = device, name, len(device.streams)
        self.queue: deque[Any] = deque()

    def enqueue(self, work: Callable[[], None]) -> None:
        self.queue.append(work)
        self.device.time_passes()

    def wait_event(self, event: Event) -> None:
        self.queue.append((event, event.recorded))

    def wait_stream(self, other: Stream) -> None:
        event = Event(self.device)
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        event = Event(self.device)
        event.record(self)
        event.synchronize()

    def run(self) -> None:
        """Does everything up to the work that must wait."""
        while self.step():
            pass

    def step(self) -> bool:
        """Does the next thing, if it need not wait."""
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
    """Pretends the device; order: the stream always ahead ("kernels", "engine", "finder", "main", "forward"), or a
    seed. Where another is ahead, the forward is last.

    lazy: nothing runs before the host waits. kernels: TORCH (quick) or INTERPRETED.
    """

    def __init__(self, monkeypatch: Any, order: str | int = 0, lazy: bool = True, kernels: Any = None) -> None:
        self.order, self.lazy = order, lazy
        self.random = random.Random(str(order))
        self.streams: list[Stream] = []
        self.main = self._make("main")
        self.forward = self._make("forward")
        self._names = ["finder", "engine", "kernels"]
        monkeypatch.setattr(copier, "RowTemplates", PlannedOnce)
        for module, name in ((copier, "copy_pages"), (copier, "copy_rows"), (locate, "locate")):
            monkeypatch.setattr(module, name, self._enqueued((kernels or TORCH)[name]))
        for name in ("copy_to_host", "copy_to_device"):
            monkeypatch.setattr(copier, name, self._move)

    def copier(self, buffers: Any, memory: Any) -> Copier:
        """Returns a Copier on this device; its loads wait for the ``forward`` stream."""
        return Copier(buffers, memory, lambda: (self.forward,), cuda=self)

    def serve(self, host: Any, finish_loads: bool = True) -> None:
        """Lets ``host`` copy on this device from now on. finish_loads: they have been written when they return.

        What the caller does next, on the host, is as if it were queued on ``main``: so that is run as far as it goes.
        """
        host._copier = copier = self.copier(host.buffers, host.memory)
        host.pages_in_use = PagesInUse(host.buffers.device, lambda: (self.forward,), self)
        save, load = copier.save, copier.load

        def save_and_go_on(*arguments: Any) -> Any:
            try:
                return save(*arguments)
            finally:
                self.main.run()

        def load_and_finish(*arguments: Any) -> None:
            load(*arguments)
            self.finish()

        copier.save = save_and_go_on
        if finish_loads:
            copier.load = load_and_finish

    # what torch.cuda has

    def Stream(self, _: Any) -> Stream:
        return self._make(self._names.pop())

    def Event(self) -> Event:
        return Event(self)

    def current_stream(self, _: Any = None) -> Stream:
        return self.main

    # how it runs

    def _make(self, name: str) -> Stream:
        self.streams.append(Stream(self, name))
        return self.streams[-1]

    def _enqueued(self, op: Callable[..., None]) -> Callable[..., None]:
        def launch(*arguments: Any) -> None:
            *arguments, stream = arguments
            self.streams[stream].enqueue(lambda: op(*arguments))

        return launch

    def _move(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self.streams[stream].enqueue(lambda: ctypes.memmove(target, source, nbytes))

    def step(self) -> bool:
        order = list(self.streams)
        self.random.shuffle(order)
        if isinstance(self.order, str):
            order.sort(key=lambda stream: (stream.name != self.order, stream is self.forward))
        return any(stream.step() for stream in order)

    def time_passes(self) -> None:
        """Runs work while the host goes on enqueueing."""
        for _ in range(0 if self.lazy else self.random.randrange(4)):
            self.step()

    def finish(self) -> None:
        while self.step():
            pass
        assert not any(stream.queue for stream in self.streams), "a wait that never ends"
