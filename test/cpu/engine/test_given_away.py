"""A save that nobody waits for: whoever may get the request's pages next is kept from them, and a wrong one is found.

On a pretended device nothing runs before somebody waits for it, so a guard that is missing shows as wrong bytes.
"""

from itertools import chain, repeat

import oracle
import pytest
from builders import POISON
from pretended_device import Device
from server_fixture import World, device_memory

TOKENS = 700


class Late:
    """A server whose transfers run late; ``req`` is retracted before ``longer``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, order: str = "main", finish_loads: bool = True) -> None:
        self.world = World()
        self.device = Device(monkeypatch, order)
        self.device.serve(self.world.host, finish_loads)
        oracle.fill(self.world.pool, seed=1)
        self.req, self.longer = self.world.admit(TOKENS, "r"), self.world.admit(1000, "longer")
        self.slots, self.expected = self.world.slots(self.req), self.world.read(self.req)

    def retract(self) -> None:
        retracted, _, _ = self.world.retract_decode([self.req, self.longer], chain([True], repeat(True)))
        assert retracted == [self.req]
        self.world.queue.add(self.req, is_retracted=True)

    def overwrite(self) -> None:
        """Somebody else writes: whatever page and row the request had is among these."""
        oracle.poison(self.world.pool)

    def arrives(self) -> None:
        """A transfer from a prefill server gets pages, and writes at once."""
        self.world.admit(300, "new")
        self.overwrite()

    def comes_back(self) -> None:
        self.device.finish()
        assert self.world.resume() == [self.req]
        self.device.finish()
        oracle.compare(self.expected, self.world.read(self.req))


def test_a_transfer_that_writes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in no stream: the host waits for the save before it gives the pages to it."""
    late = Late(monkeypatch)
    late.retract()
    late.arrives()
    late.comes_back()


@pytest.mark.parametrize("saved", [True, False])
def test_a_transfer_comes_after_the_forward_in_flight(monkeypatch: pytest.MonkeyPatch, saved: bool) -> None:
    """That forward still writes the retracted request's last position, whether there was room for a copy or not."""
    late = Late(monkeypatch)
    if not saved:
        late.req.input_embeds = [[0.0]]
    written: list[str] = []
    late.device.forward.enqueue(lambda: written.append("forward"))
    late.world.retract(late.req)
    assert (late.world.copy_of(late.req) is not None) is saved
    assert written == [], "a retract does not wait for it"
    late.world.admit(300, "new")
    assert written == ["forward"]


def test_a_transfer_comes_after_the_forward_of_the_last_request_which_is_aborted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing asks for a copy of it: there is no memory even without all others."""
    late = Late(monkeypatch)
    written: list[str] = []
    late.device.forward.enqueue(lambda: written.append("forward"))
    retracted, _, aborted = late.world.retract_decode([late.req], chain([False], repeat(False)))
    assert (retracted, aborted) == ([], [late.req]) and written == []
    late.world.admit(300, "new")
    assert written == ["forward"]


@pytest.mark.parametrize("writer", ["the next forward", "the current stream"])
@pytest.mark.parametrize("way", ["one retract", "a release by itself"])
def test_what_is_launched_next(monkeypatch: pytest.MonkeyPatch, writer: str, way: str) -> None:
    """The forward waits for the stream that the scheduler runs on, and that one for the save."""
    late = Late(monkeypatch)
    if way == "one retract":
        late.retract()
    else:
        late.world.retract(late.req)
        late.world.queue.add(late.req, is_retracted=True)
    forward, main = late.device.forward, late.device.main
    if writer == "the next forward":
        forward.wait_stream(main)
    (forward if writer == "the next forward" else main).enqueue(late.overwrite)
    late.comes_back()


def test_nothing_waits_on_the_host_within_a_retract(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine may ask the device at each free, and must not find the save before it: that comes after all of them."""
    late = Late(monkeypatch)
    table, main, waiting = late.world.table, late.device.main, []
    free = table.free
    monkeypatch.setattr(table, "free", lambda req: (waiting.append(len(main.queue)), free(req)))
    monkeypatch.setattr(Device, "step", lambda device: pytest.fail("the host waited"))
    late.retract()
    assert waiting == [0]
    assert main.queue, "what comes next is behind the save"


def test_a_transfer_comes_after_a_load_whose_request_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Aborted right after its resume, its load still queued: it must not overwrite what arrives in its pages."""
    late = Late(monkeypatch, finish_loads=False)
    late.retract()
    late.device.finish()
    assert late.world.resume() == [late.req]
    late.world.retract(late.req, offload_kv=False)
    late.arrives()
    late.device.finish()
    assert all(bool((buffer == POISON).all()) for buffer in oracle.buffers(late.world.pool).values())


def test_released_device_memory_was_read_before(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Late(monkeypatch)
    late.retract()
    device_memory(late.world, "release_memory_occupation", "kv_cache")
    late.overwrite()  # it was unmapped
    device_memory(late.world, "resume_memory_occupation", "kv_cache")
    late.comes_back()


def test_a_restore_does_not_wait_for_the_running_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5.23 puts the schedule stream behind that forward between the allocation and the load."""
    late = Late(monkeypatch, finish_loads=False)
    late.retract()
    late.device.finish()
    scheduler, ran = late.world.scheduler, []
    scheduler.enable_overlap = True
    scheduler.schedule_stream, scheduler.forward_stream = late.device.main, late.device.forward
    late.device.forward.enqueue(lambda: ran.append("forward"))
    assert late.world.resume() == [late.req]
    assert ran == [], "the host only waited until the place was found"
    late.device.finish()
    assert ran == ["forward"]
    oracle.compare(late.expected, late.world.read(late.req))
