"""The traps of order: what waits for what around a save and a load, and who gets host blocks that are still in use."""

import pytest
import torch
from pool_fixture import make_world

from sglang_dsv4.cache.families import Group
from triton_ops.copy_rows import EMPTY, HOST_OFFSET


class FakeEvent:
    """An event that passes when told to."""

    def __init__(self, log):
        self.log, self.passed = log, False

    def record(self, stream):
        self.log.append(("record on", stream))

    def query(self):
        return self.passed

    def synchronize(self):
        self.log.append(("host waits for", "event"))
        self.passed = True


class FakeStream:
    """Records what waits for what."""

    def __init__(self, log, name):
        self.log, self.name = log, name

    def __repr__(self):
        return self.name

    def wait_stream(self, other):
        self.log.append((self, "waits for", other))

    def wait_event(self, event):
        self.log.append((self, "waits for", "event"))


@pytest.fixture
def ordered(monkeypatch):
    """A world whose mover believes in streams, the log of their order, and the streams by name."""
    log = []
    world = make_world(pages=10)
    mover = world.pool.host._mover
    streams = {name: FakeStream(log, name) for name in ("current", "transfer", "forward")}
    mover._stream, mover._fences = streams["transfer"], lambda: (streams["forward"],)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: streams["current"])
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: log.append(("on", stream)))
    monkeypatch.setattr(torch.cuda, "Event", lambda: FakeEvent(log))

    def watch(thing, name, note):
        real = getattr(thing, name)

        def watched(*given, **named):
            log.append((name, *note(*given, **named)))
            return real(*given, **named)

        monkeypatch.setattr(thing, name, watched)

    for name in ("look", "window_pages"):
        watch(mover.locator, name, lambda *_: ())
    for name in ("begin_save", "begin_load", "end"):
        watch(mover._path, name, lambda *_: ())
    watch(mover._path, "move", lambda jobs, save: (save, bool((jobs.rows.table[:, HOST_OFFSET] == EMPTY).any())))
    watch(mover._path, "guard", lambda event: (type(event),))
    return world, log, streams


def test_traps_4_and_5_order_of_streams(ordered):
    world, log, streams = ordered
    current, transfer, forward = streams["current"], streams["transfer"], streams["forward"]
    request = world.start(1, 300)
    copy = world.save(request)
    # A save returns only when the bytes are on the host: its pages may be written from outside any stream next. Its
    # pages are on their way before the host knows that they are right, and whatever happens, an event follows.
    assert log == [
        ("on", transfer), (transfer, "waits for", current), ("look",), ("begin_save",), ("window_pages",),
        ("move", True, False), ("end",), ("record on", transfer), ("guard", FakeEvent), ("on", current),
        ("host waits for", "event"),
    ]  # fmt: skip
    log.clear()
    world.leave(request)
    world.resume(copy, 2)
    # A load first brings the copy near, which writes nothing to the cache and waits for nobody.
    assert log[:2] == [("on", transfer), ("begin_load",)]
    # Then it waits for the current stream, finds its place, and waits for the forward stream too (a finished
    # request's last forward may write these pages) before it resets and copies rows and pages; the current stream,
    # hence the next forward, waits for it. The host waits only until the place is found.
    assert log[2:] == [
        (transfer, "waits for", current), ("look",), ("window_pages",), (transfer, "waits for", forward),
        ("move", False, True), ("end",), ("record on", transfer), ("guard", FakeEvent), ("on", current),
        (current, "waits for", "event"),
    ]  # fmt: skip


@pytest.mark.parametrize("at", ["look", "begin_save", "window_pages", "move"])
def test_traps_5_and_7_a_save_that_fails_half_way(ordered, monkeypatch, at):
    """What it enqueued may still write to its blocks: they come back, but nobody gets them before its event."""
    world, log, _ = ordered
    mover, memory = world.pool.host._mover, world.pool.host.memory
    request = world.start(1, 300)

    def broken(*_, **__):
        raise RuntimeError("no transfer")

    with monkeypatch.context() as patch:
        patch.setattr(mover.locator if hasattr(mover.locator, at) else mover._path, at, broken)
        with pytest.raises(RuntimeError, match="no transfer"):
            world.save(request)
    assert ("guard", FakeEvent) in log
    assert ("host waits for", "event") not in log
    pool = memory.pools[Group.PAGED]
    assert (pool.held, pool.returning) == (0, 2)
    copy = world.save(request)
    assert pool.returning == 2, "there are others, so these were not waited for"
    copy.release()
    memory.check_integrity()


@pytest.mark.parametrize("at", ["begin_load", "look", "window_pages", "move"])
def test_traps_4_and_7_a_load_that_fails_half_way(ordered, monkeypatch, at):
    """The copy stays; once it is released, its blocks wait for the event of what was enqueued."""
    world, log, _ = ordered
    mover, memory = world.pool.host._mover, world.pool.host.memory
    request = world.start(1, 300)
    copy = world.save(request)
    saved_by = copy.lease.used_by
    log.clear()

    def broken(*_, **__):
        raise RuntimeError("no transfer")

    with monkeypatch.context() as patch:
        patch.setattr(mover.locator if hasattr(mover.locator, at) else mover._path, at, broken)
        with pytest.raises(RuntimeError, match="no transfer"):
            world.load(copy, request)
    assert ("guard", FakeEvent) in log
    assert not copy.released
    assert copy.lease.used_by is not saved_by
    copy.release()
    assert memory.pools[Group.PAGED].returning == 2
    memory.check_integrity()


def test_trap_7_blocks_are_reused_only_after_the_load(ordered):
    world, _, _ = ordered
    request = world.start(1, 300)
    copy = world.save(request)
    pool = world.pool.host.memory.pools[Group.PAGED]
    blocks = set(copy.blocks[Group.PAGED].tolist())
    world.leave(request)
    resumed = world.resume(copy, 2)
    assert pool.held == 0 and pool.returning == len(blocks), "released, but the load may still read them"
    second = world.save(resumed)
    assert not blocks & set(second.blocks[Group.PAGED].tolist())
    second.release()
    world.pool.host.memory.check_integrity()
