"""Order of streams and events in a save and in a load, with a device that only takes notes."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from sglang_dsv4.transfer import mover
from sglang_dsv4.transfer.mover import Mover

pytestmark = pytest.mark.cpu


class Notes:
    """A device, a path and a copy that write down what is asked of them."""

    def __init__(self, monkeypatch, kind: str) -> None:
        self.log: list[str] = []
        self.stack = ["main"]
        self.failing = False
        self.event = SimpleNamespace(
            record=lambda stream: self.note(f"record on {stream.name}"),
            synchronize=lambda: self.note("host waits for event"),
        )
        self.streams = {name: self.stream(name) for name in ("main", "transfer", "fence")}
        cuda = SimpleNamespace(
            Stream=lambda device: self.streams["transfer"],
            Event=lambda: self.event,
            current_stream=lambda device: self.streams["main"],
            stream=self.on,
        )
        monkeypatch.setattr(mover, "torch", SimpleNamespace(cuda=cuda))
        monkeypatch.setattr(mover, "describe", lambda side, copy, plan: ("jobs of", plan))
        self.side = SimpleNamespace(device=SimpleNamespace(type=kind))
        self.copy = SimpleNamespace(lease=SimpleNamespace(used_by="nothing yet"))
        self.guarded: list[object] = []
        self.mover = Mover(self.side, self, self.fences)

    def note(self, text: str) -> None:
        self.log.append(text)

    def stream(self, name: str) -> SimpleNamespace:
        def wait_event(event):
            assert event is self.event
            self.note(f"{name} waits for event")

        return SimpleNamespace(
            name=name,
            wait_stream=lambda other: self.note(f"{name} waits for {other.name}"),
            wait_event=wait_event,
        )

    @contextlib.contextmanager
    def on(self, stream):
        self.stack.append(stream.name)
        yield
        self.stack.pop()

    def fences(self):
        return [self.streams["fence"]]

    def move(self, jobs, save):
        assert jobs == ("jobs of", "plan")
        if self.failing:
            raise RuntimeError("no launch")
        self.note(f"{'save' if save else 'load'} on {self.stack[-1]}")

    def clear(self, slot):
        self.note(f"clear {slot} on {self.stack[-1]}")

    def guard(self, event):
        self.guarded.append(event)


def test_a_save_returns_when_the_bytes_are_on_the_host(monkeypatch):
    notes = Notes(monkeypatch, "cuda")
    notes.mover.save(notes.copy, "plan")
    assert notes.log == ["transfer waits for main", "save on transfer", "record on transfer", "host waits for event"]
    assert notes.copy.lease.used_by is notes.event
    assert notes.guarded == [notes.event]


def test_a_load_is_between_the_fences_and_the_next_forward(monkeypatch):
    notes = Notes(monkeypatch, "cuda")
    notes.mover.load(notes.copy, "plan", 5)
    assert notes.log == [
        "transfer waits for main",
        "transfer waits for fence",
        "clear 5 on transfer",
        "load on transfer",
        "record on transfer",
        "main waits for event",
    ]
    assert notes.copy.lease.used_by is notes.event
    assert notes.guarded == [notes.event]


def test_without_a_stream_everything_is_in_order(monkeypatch):
    notes = Notes(monkeypatch, "cpu")
    notes.mover.save(notes.copy, "plan")
    notes.mover.load(notes.copy, "plan", 2)
    assert notes.log == ["save on main", "clear 2 on main", "load on main"]
    assert notes.copy.lease.used_by is None


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_a_failed_launch_is_not_hidden(monkeypatch, kind):
    notes = Notes(monkeypatch, kind)
    notes.failing = True
    with pytest.raises(RuntimeError, match="no launch"):
        notes.mover.save(notes.copy, "plan")
    with pytest.raises(RuntimeError, match="no launch"):
        notes.mover.load(notes.copy, "plan", 1)
    assert not any("event" in line for line in notes.log)
