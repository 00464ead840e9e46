"""Vector clocks prove the order of host, prep stream, forward stream and schedule stream.

Every access to a slab, a frame, a step's tensors or the engine's tables is held against them: a missing wait is always
found, and so is memory that goes back too early.
"""

import pytest
import torch
from clocks import HOST
from hypothesis import given, settings
from hypothesis import strategies as st
from ordered_card import Event, ordered_card
from played_card import OnTheCpu
from random_steps import LAYOUT, flatten, make_world

from sglang_dsv4.prep import builder as module
from sglang_dsv4.prep.builder import FRAMES, MetadataBuilder
from sglang_dsv4.prep.step import Tables

CARD = torch.device("cuda")


class Machine:
    """A scheduler and a forward that use what the builder makes, each on its stream."""

    def __init__(self, patch: pytest.MonkeyPatch, card) -> None:
        self.card, self.clocks = card, card.clocks
        self.forward_stream, self.schedule_stream = card.current, card.Stream()
        self.schedule_stream.name = "schedule"
        for name in ("Stream", "Event", "current_stream", "set_stream", "stream"):
            patch.setattr(torch.cuda, name, getattr(card, name))
        patch.setattr(torch.Tensor, "is_cuda", True)
        fill = module.fill_lengths

        def fill_lengths(*arguments):
            slab = arguments[-1]
            self.clocks.do(HOST, writes=card.parts_at(slab.ctypes.data, slab.nbytes), name="the host's plan")
            fill(*arguments)

        patch.setattr(module, "fill_lengths", fill_lengths)
        self.ends = []  # of each forward, by the operations of its stream

    def schedule(self, world, tables, wait_for, on_device):
        """The scheduler writes the tables, behind the read-done event or behind the whole forward; returns a step."""
        if wait_for is None:
            self.schedule_stream.wait_stream(self.forward_stream)
        else:
            self.schedule_stream.wait_event(wait_for)
        with self.card.stream(self.schedule_stream):
            for table in tables:
                table.add_(0)
            step = world.step(on_device=on_device)
            step = step._replace(slots=step.slots.clone(), out_locs=step.out_locs.clone())
            if on_device:
                step = step._replace(lengths=step.lengths.clone())
        self.forward_stream.wait_stream(self.schedule_stream)
        return step

    def forward(self, metadata):
        """A forward that reads ``metadata``; returns the read-done event, recorded before its layers."""
        read_done = Event(self.card)
        read_done.record(self.forward_stream)
        flatten(metadata)  # clones each of its tensors
        self.ends.append(self.clocks.now("main")["main"])
        return read_done


def run(patch, kinds):
    """Steps of the given kinds: (beside the forward before?, read-done published?, lengths on the device?)."""
    with OnTheCpu(), ordered_card(patch) as card:
        machine = Machine(patch, card)
        with card.stream(start := card.Stream()):
            builder = MetadataBuilder(LAYOUT, CARD)
            builder.warm_up()
        card.main.wait_stream(start)
        worlds = [make_world([5, 300]), make_world([5, 300, 17, 1_000] * 6)]
        tables = [Tables(*(table.clone() for table in world.tables)) for world in worlds]
        read_done, kept = None, []
        for beside, publish, on_device, larger in kinds:
            world, of_world = worlds[larger], tables[larger]
            step = machine.schedule(world, of_world, read_done, on_device)
            made = builder.start(step, of_world, after=machine.schedule_stream if beside else None)
            builder.finish()
            event = machine.forward(made)
            read_done = event if publish else None
            kept = [*kept[-1:], step]  # the engine keeps a batch until the result of its step was taken
        card.main.wait_stream(builder.stream)
        return machine, builder


KIND = st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans())


@settings(max_examples=60, deadline=None)
@given(kinds=st.lists(KIND, min_size=1, max_size=9))
def test_no_step_races(kinds):
    with pytest.MonkeyPatch.context() as patch:
        run(patch, kinds)


def test_the_step_runs_beside_the_forward_before(monkeypatch):
    """Not only safe: with the read-done event, the kernel of step k+1 needs nothing of forward k."""
    machine, builder = run(monkeypatch, [(True, True, False, False)] * 6)
    known = machine.clocks.seen[builder.stream.name]["main"]
    assert machine.ends[-2 - FRAMES] < known <= machine.ends[-1 - FRAMES]
