"""Order of streams and events in a save and in a load, with a device that only takes notes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import oracle
import pytest
import torch
from builders import served

from sglang_dsv4 import streams
from sglang_dsv4.cache.families import Group
from sglang_dsv4.transfer import mover
from sglang_dsv4.transfer.locate import Request
from sglang_dsv4.transfer.mover import Mover
from sglang_dsv4.transfer.paths import TorchPath, TritonPath

SLOT, TOKENS = 5, 300
REQUEST = Request("indices", "map", SLOT)


class Broken(Exception):
    """What fails in a test."""


class Notes:
    """A device, a path, a locator and a copy that write down what is asked of them, and on which stream."""

    def __init__(self, monkeypatch, kind: str, window_pages: tuple[int, ...] | None = (7, 8)) -> None:
        self.log: list[str] = []
        self.current = "main"
        self.failing = ""
        self._window_pages = window_pages
        self.moved: list[object] = []
        self.guarded: list[object] = []
        self.events: list[SimpleNamespace] = []
        self.streams = {name: self.stream(name) for name in ("main", "transfer", "fence")}
        cuda = SimpleNamespace(
            Stream=lambda device: self.streams["transfer"],
            Event=self.event,
            current_stream=lambda device: self.streams[self.current],
            set_stream=self.set_stream,
        )
        for module in (mover, streams):
            monkeypatch.setattr(module, "torch", SimpleNamespace(cuda=cuda))
        monkeypatch.setattr(mover, "Locator", lambda *_: self)
        monkeypatch.setattr(mover, "RowTemplates", SimpleNamespace(of=lambda *_: self))
        for name in ("plan", "plan_rows", "check_range", "row_image"):
            monkeypatch.setattr(mover, name, getattr(self, name))
        self.geometry, self.families, self.pages = "geometry", "families", {"swa_kv": 9, "c4_kv": 11}
        self.device = SimpleNamespace(type=kind, index=0)
        self.copy = SimpleNamespace(
            tokens=TOKENS, blocks={Group.PAGED: "blocks"}, lease=SimpleNamespace(used_by="nothing yet")
        )
        self.mover = Mover(self, "memory", self, self.writer_streams)

    def note(self, text: str) -> None:
        """What happens now, on the stream of the moment."""
        self.log.append(f"{self.current}: {text}")
        if self.failing and text.startswith(self.failing):
            raise Broken(text)

    # streams and events

    def event(self) -> SimpleNamespace:
        made = SimpleNamespace(
            record=lambda stream: self.note(f"record on {stream.name}"),
            synchronize=lambda: self.note("host waits for event"),
        )
        self.events.append(made)
        return made

    def stream(self, name: str) -> SimpleNamespace:
        def wait_event(event):
            assert event is self.events[-1]
            self.note(f"{name} waits for event")

        return SimpleNamespace(
            name=name,
            wait_stream=lambda other: self.note(f"{name} waits for {other.name}"),
            wait_event=wait_event,
        )

    def set_stream(self, stream):
        self.current = stream.name

    def writer_streams(self):
        return [self.streams["fence"]]

    # the locator

    def look(self, request):
        assert request is REQUEST
        self.note("look")
        return "pages"

    def window_pages(self):
        self.note("window pages")
        return self._window_pages

    def read(self, request):
        assert request is REQUEST
        self.note("read")
        return "place"

    # rows

    def rows(self, tokens, window_pages, slot, save):
        assert (tokens, window_pages, slot) == (TOKENS, self._window_pages, SLOT)
        return f"rows of a template, save {save}"

    def plan(self, geometry, families, place):
        assert (geometry, families, place) == ("geometry", "families", "place")
        families = [SimpleNamespace(name=name, layers=layers) for name, layers in (("swa_kv", (0,)), ("c4_kv", ()))]
        return [SimpleNamespace(family=family) for family in families]

    def check_range(self, spans, device_pages):
        self.note(f"check {spans.family.name} of {device_pages}")

    def plan_rows(self, side, memory, plan, cleared_slot):
        assert (side, memory) == (self, "memory")
        assert [spans.family.name for spans in plan] == ["swa_kv", "c4_kv"]
        return f"planned rows, slot {cleared_slot} is cleared"

    def row_image(self, copy):
        assert copy is self.copy
        return "image"

    # the path

    def begin_save(self, pages, blocks):
        assert (pages, blocks) == ("pages", "blocks")
        self.note("begin save")

    def begin_load(self, blocks, image):
        assert (blocks, image) == ("blocks", "image")
        self.note("begin load")

    def move(self, jobs, save):
        self.moved.append((jobs.pages, jobs.blocks, jobs.rows, jobs.image))
        self.note(f"move, {'save' if save else 'load'}")

    def end(self):
        self.note("end")

    def guard(self, event):
        self.guarded.append(event)
        self.note("guard")


SAVE = [
    "transfer: transfer waits for main",
    "transfer: look",
    "transfer: begin save",
    "transfer: window pages",
    "transfer: move, save",
    "transfer: end",
    "transfer: record on transfer",
    "transfer: guard",
    "main: host waits for event",
]
LOAD = [
    "transfer: begin load",
    "transfer: transfer waits for main",
    "transfer: look",
    "transfer: window pages",
    "transfer: transfer waits for fence",
    "transfer: move, load",
    "transfer: end",
    "transfer: record on transfer",
    "transfer: guard",
    "main: main waits for event",
]


def test_a_save_returns_when_the_bytes_are_on_the_host(monkeypatch):
    """It is behind the current stream, and behind no fence."""
    notes = Notes(monkeypatch, "cuda")
    notes.mover.save(notes.copy, REQUEST)
    assert notes.log == SAVE
    assert notes.moved == [("pages", "blocks", "rows of a template, save True", "image")]
    assert notes.copy.lease.used_by is notes.events[0]
    assert notes.guarded == notes.events
    assert len(notes.events) == 1


def test_a_load_is_between_the_fences_and_the_next_forward(monkeypatch):
    """Only what writes nothing to the cache comes before the waits."""
    notes = Notes(monkeypatch, "cuda")
    notes.mover.load(notes.copy, REQUEST)
    assert notes.log == LOAD
    assert notes.moved == [("pages", "blocks", "rows of a template, save False", "image")]
    assert notes.copy.lease.used_by is notes.events[0]
    assert notes.guarded == notes.events
    assert len(notes.events) == 1


def test_each_transfer_has_an_event_of_its_own(monkeypatch):
    notes = Notes(monkeypatch, "cuda")
    notes.mover.save(notes.copy, REQUEST)
    notes.mover.load(notes.copy, REQUEST)
    assert len(notes.events) == 2
    assert notes.guarded == notes.events
    assert notes.copy.lease.used_by is notes.events[1]


def test_without_a_stream_everything_is_in_order(monkeypatch):
    notes = Notes(monkeypatch, "cpu")
    notes.mover.save(notes.copy, REQUEST)
    wanted = ("look", "begin save", "window pages", "move, save", "end", "guard")
    assert notes.log == [f"main: {what}" for what in wanted]
    assert notes.copy.lease.used_by is None
    notes.log.clear()
    notes.mover.load(notes.copy, REQUEST)
    wanted = ("begin load", "look", "window pages", "move, load", "end", "guard")
    assert notes.log == [f"main: {what}" for what in wanted]
    assert notes.copy.lease.used_by is None
    assert notes.guarded == [None, None]


@pytest.mark.parametrize(("save", "cleared"), [(True, None), (False, SLOT)])
def test_a_request_that_does_not_lie_page_by_page_is_read_and_planned(monkeypatch, save, cleared):
    """In the place of the template; the pages that were found stay, and every span is in range of its pool."""
    notes = Notes(monkeypatch, "cuda", window_pages=None)
    (notes.mover.save if save else notes.mover.load)(notes.copy, REQUEST)
    wanted = SAVE if save else LOAD
    after = wanted.index("transfer: window pages") + 1
    assert notes.log == [*wanted[:after], "transfer: read", "transfer: check swa_kv of 9", *wanted[after:]]
    assert notes.moved == [("pages", "blocks", f"planned rows, slot {cleared} is cleared", "image")]


BROKEN_SAVES = ("transfer waits for main", "look", "begin save", "window pages", "read", "check", "move")
BROKEN_LOADS = ("begin load", *BROKEN_SAVES[:2], *BROKEN_SAVES[3:6], "transfer waits for fence", "move")


@pytest.mark.parametrize(
    ("save", "step"), [*((True, step) for step in BROKEN_SAVES), *((False, step) for step in BROKEN_LOADS)]
)
def test_a_failure_is_not_hidden_and_leaves_an_event(monkeypatch, save, step):
    """What was enqueued before still reads the tables and the blocks; the host waits for nothing."""
    notes = Notes(monkeypatch, "cuda", window_pages=None if step in {"read", "check"} else (7, 8))
    notes.failing = step
    with pytest.raises(Broken, match=step):
        (notes.mover.save if save else notes.mover.load)(notes.copy, REQUEST)
    assert notes.log[-4].startswith(f"transfer: {step}")
    assert notes.log[-3:] == ["transfer: end", "transfer: record on transfer", "transfer: guard"]
    assert len(notes.events) == 1
    assert notes.copy.lease.used_by is notes.events[0]
    assert notes.guarded == notes.events
    assert notes.current == "main"
    assert len(notes.moved) == (step == "move")


@pytest.mark.parametrize("step", ["look", "begin", "window pages", "move"])
def test_a_failure_without_a_stream(monkeypatch, step):
    notes = Notes(monkeypatch, "cpu")
    notes.failing = step
    for transfer in (notes.mover.save, notes.mover.load):
        notes.log.clear()
        with pytest.raises(Broken, match=step):
            transfer(notes.copy, REQUEST)
        assert notes.log[-2:] == ["main: end", "main: guard"]
    assert notes.copy.lease.used_by is None


@pytest.mark.parametrize("path_class", [TorchPath, TritonPath])
@pytest.mark.parametrize("ratios", [(0, 4, 128), (0, 0)])
def test_warming_up_moves_nothing(path_class, ratios):
    world = served(ratios, blocks=2 if ratios[1] else 0)
    oracle.fill(world.pool, seed=2)
    before, arena = oracle.snapshot(world.pool), world.memory.arena.region.clone()
    Mover(world.side, world.memory, path_class(world.side, world.memory), lambda: ()).warm_up()
    for key, tensor in oracle.snapshot(world.pool).items():
        assert torch.equal(tensor, before[key]), key
    assert torch.equal(world.memory.arena.region, arena)


def test_warming_up_goes_both_ways(monkeypatch):
    """As a transfer does: behind the current stream, its tables guarded. No page, no row."""
    notes = Notes(monkeypatch, "cuda")
    cuda = mover.torch.cuda
    monkeypatch.setattr(mover, "torch", SimpleNamespace(cuda=cuda, full=lambda *_, **__: "page -1", int64="int64"))
    notes.mover.warm_up()
    assert [line.removeprefix("transfer: ") for line in notes.log] == [
        "transfer waits for main", "move, save", "move, load", "end", "record on transfer", "guard",
    ]  # fmt: skip
    for pages, blocks, rows, image in notes.moved:
        assert (pages, blocks.tolist(), image) == ("page -1", [0], ())
        assert np.array_equal(rows.table, np.zeros((1, 8)))
