"""Vector clocks prove the order of host, prep stream, forward stream and schedule stream.

Every access to a slab, a frame or the engine's tables asks whether all that it must not overtake happened before it, in
every execution that the waits allow: a missing wait is always found.
"""

import contextlib
import itertools
from collections import defaultdict
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_steps import LAYOUT, make_world

from sglang_dsv4.prep import builder as module
from sglang_dsv4.prep.builder import FRAMES, MetadataBuilder
from sglang_dsv4.prep.frame import Views
from sglang_dsv4.prep.slab import Slabs

HOST = "host"


class Race(AssertionError):
    """Two accesses in no order."""


class Clocks:
    """What has happened before the next operation of each actor: actor -> number of its operations."""

    def __init__(self) -> None:
        self.seen = defaultdict(lambda: defaultdict(int))
        self.writes, self.reads = {}, defaultdict(dict)
        self.current = None

    def learn(self, actor, clock) -> None:
        for other, count in clock.items():
            self.seen[actor][other] = max(self.seen[actor][other], count)

    def do(self, actor, reads=(), writes=()) -> None:
        """An operation; the host enqueues, so that a stream knows what the host knew."""
        if actor != HOST:
            self.learn(actor, self.seen[HOST])
        self.seen[actor][actor] += 1
        for thing in (*reads, *writes):
            self._follows(actor, thing, "write", self.writes.get(thing))
        for thing in writes:
            for reader in self.reads.pop(thing, {}).items():
                self._follows(actor, thing, "read", reader)
            self.writes[thing] = actor, self.seen[actor][actor]
        for thing in reads:
            self.reads[thing][actor] = self.seen[actor][actor]

    def _follows(self, actor, thing, kind, access) -> None:
        if access and self.seen[actor][access[0]] < access[1]:
            raise Race(f"{actor} uses {thing} beside a {kind} on {access[0]}")


class Machine:
    """torch.cuda as the builder uses it, and a forward and a scheduler that use what it makes."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        clocks = self.clocks = Clocks()
        machine, frames = self, itertools.count()

        class Stream:
            def __init__(self, name="prep") -> None:
                self.name = self.cuda_stream = name

            def wait_event(self, event) -> None:
                clocks.learn(self.name, event.clock)

            def wait_stream(self, other) -> None:
                clocks.learn(self.name, clocks.seen[HOST])
                clocks.learn(self.name, clocks.seen[other.name])

        class Event:
            def __init__(self) -> None:
                self.clock = {}

            def record(self, stream) -> None:
                clocks.learn(stream.name, clocks.seen[HOST])
                self.clock = dict(clocks.seen[stream.name])

            def synchronize(self) -> None:
                clocks.learn(HOST, self.clock)

        def make_frame(*_):
            name = f"frame {next(frames)}"

            def copy(slab, non_blocking) -> None:
                assert non_blocking
                clocks.do(clocks.current, [f"slab {slab.data_ptr()}"], [name])

            head = SimpleNamespace(shape=(64,), copy_=copy)  # its part that the plan is copied to
            return SimpleNamespace(views=lambda _: (Views(head, name, name), False))

        @contextlib.contextmanager
        def on_stream(inner, outer):
            clocks.current = inner.name
            yield
            clocks.current = outer.name

        self.streams = {name: Stream(name) for name in ("forward", "schedule")}
        self.event, self.stream = Event, Stream
        cuda = SimpleNamespace(
            Stream=lambda _: Stream(), Event=Event, current_stream=lambda _: machine.streams["forward"]
        )
        patch.setattr(module, "torch", SimpleNamespace(cuda=cuda, device=torch.device))
        patch.setattr(module, "on_stream", on_stream)
        patch.setattr(module, "Frame", make_frame)
        unpinned = mock.Mock(COUNT=Slabs.COUNT, side_effect=lambda pin: Slabs(pin=not pin))  # there may be no GPU
        patch.setattr(module, "Slabs", unpinned)
        patch.setattr(module, "check_prep_rows", lambda *_: None)
        patch.setattr(module, "fill_lengths", lambda *args: clocks.do(HOST, writes=[f"slab {args[-1].ctypes.data}"]))
        patch.setattr(module, "prep_rows", self._kernel)
        clocks.current = "forward"

    def _kernel(self, sizes, inputs, outputs, stream=None) -> None:
        self.clocks.do(stream or self.clocks.current, ["tables"], [outputs])

    def schedule(self, wait_for) -> None:
        """The scheduler writes the tables, behind the read-done event or behind the whole forward."""
        schedule = self.streams["schedule"]
        if wait_for is None:
            schedule.wait_stream(self.streams["forward"])
        else:
            schedule.wait_event(wait_for)
        self.clocks.do("schedule", writes=["tables"])
        self.streams["forward"].wait_stream(schedule)

    def forward(self, metadata):
        """A forward that reads ``metadata``; the read-done event, recorded before its layers."""
        read_done = self.event()
        read_done.record(self.streams["forward"])
        self.clocks.do("forward", reads=[metadata])
        return read_done


def run(patch, kinds):
    """Steps of the given kinds: (beside the forward before?, read-done published?, lengths on the device?)."""
    machine = Machine(patch)
    builder = MetadataBuilder(LAYOUT, torch.device("cuda"))
    world = make_world([5, 300])
    read_done = None
    used = []
    for beside, publish, on_device in kinds:
        machine.schedule(read_done)
        step = world.step(on_device=on_device)
        made = builder.start(step, world.tables, after=machine.streams["schedule"] if beside else None)
        builder.finish()
        event = machine.forward(made)
        read_done = event if publish else None
        used.append(made)
    assert used == [f"frame {k % FRAMES}" for k in range(len(kinds))]
    return machine


KIND = st.tuples(st.booleans(), st.booleans(), st.booleans())


@settings(max_examples=60, deadline=None)
@given(kinds=st.lists(KIND, min_size=1, max_size=9))
def test_no_step_races(kinds):
    with pytest.MonkeyPatch.context() as patch:
        run(patch, kinds)


def test_the_step_runs_beside_the_forward_before(monkeypatch):
    """Not only safe: with the read-done event, the kernel of step k+1 needs nothing of forward k."""
    machine = run(monkeypatch, [(True, True, False)] * 6)
    clocks = machine.clocks
    forwards, known = clocks.seen["forward"]["forward"], clocks.seen["prep"]["forward"]
    assert (forwards, known) == (6, 6 - FRAMES)
