"""Models running requests, saved requests and free request slots, and the bytes they hold.

The oracle reads the bytes of a copy at the save and again after the resume.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import oracle
import torch
from builders import FakeEvent
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize

from sglang_dsv4.hostmem.memory import HostCopy
from sglang_dsv4.pools.copy_service import ServerContext
from sglang_dsv4.settings import Settings
from sglang_dsv4.transfer.locate import Request
from sglang_dsv4.transfer.reference import ReferenceCopier
from stateful.pool import NOISE_BYTES, PAGE, SPEC, Device, pages_of, tail_pages

WHICH = st.integers(0, 11)  # an entry of a list, modulo its length
LENGTHS = (
    st.integers(1, 300)
    | st.integers(1, 900)
    | st.sampled_from((1, 4, 127, 128, 129, 255, 256, 257, 384, 512, 513, 768))
)

done: Counter[str] = Counter()  # what the machine did; "steps" counts the rules it ran


@dataclass(eq=False)
class Running:
    """Holds a request on the device. ``evicted``: its first pages that have no SWA page any more."""

    request: oracle.Request
    evicted: int = 0

    @property
    def slots(self) -> torch.Tensor:
        return self.request.slots

    @property
    def tokens(self) -> int:
        return len(self.request.slots)

    @property
    def evictable(self) -> int:
        return max(0, self.tokens - oracle.WINDOW) // PAGE - self.evicted


@dataclass(eq=False)
class Saved:
    """Holds a retracted request: its copy and the oracle's reading when it was made."""

    copy: HostCopy
    rows: dict[oracle.RowKey, bytes]

    @property
    def tokens(self) -> int:
        return self.copy.tokens


class LateLoads:
    """Copies with loads that go on reading their units; on the CPU a load leaves no event."""

    def __init__(self, copier: ReferenceCopier) -> None:
        self.save, self._load = copier.save, copier.load

    def load(self, copy: HostCopy, request: Request, first_page: int) -> None:
        self._load(copy, request, first_page)
        copy.lease.used_by = FakeEvent()


class Requests(RuleBasedStateMachine):
    """Tracks where requests are, and the room left; the rules of the subclasses change it."""

    device: Device

    def __init__(self) -> None:
        super().__init__()
        self.device.start()
        self.pool, self.allocator = self.device.pool, self.device.allocator
        self.running: list[Running] = []
        self.saved: list[Saved] = []
        self.free_slots = list(range(SPEC.requests))
        self.reading: list[tuple[FakeEvent, list[int]]] = []  # loads and the host units they read
        self.consumed: HostCopy | None = None
        self.news = {"scribble", "load", "save"}  # worth doing: something happened since the last time
        self.weights = 1
        self.leaks = 0
        self.offsets = np.random.default_rng(3)

    @initialize(more=st.integers(0, 60), late=st.booleans(), tokens=LENGTHS, tail=st.booleans())
    def attach(self, more: int, late: bool, tokens: int, tail: bool) -> None:
        """Attaches host memory of the fewest units and ``more``, and a first request."""
        self.total = self.device.least_units + more
        configured = Settings(host_gb=self.total * self.device.unit / 2**30, transfer="torch", verify=False)
        self.pool.host = None  # a second attach would keep the first arena
        host = self.pool.attach_host(configured, ServerContext(weight_version=lambda: self.weights))
        assert host is self.pool.host
        self.memory = host.memory
        assert self.memory.pool.total == self.total
        if late:
            host._copier = LateLoads(host._copier)
        self._admit(tokens, 0, tail)

    # ------------------------------------------------------------------------------------- the model

    @property
    def free_pages(self) -> int:
        return SPEC.pages - sum(pages_of(r.tokens) for r in self.running)

    @property
    def free_swa_pages(self) -> int:
        return SPEC.swa_pages - sum(pages_of(r.tokens) - r.evicted for r in self.running)

    def _fits(self, tokens: int) -> bool:
        pages, swa = pages_of(tokens), tail_pages(tokens)
        return bool(self.free_slots) and pages <= self.free_pages and swa <= self.free_swa_pages

    def _fitting(self) -> list[Saved]:
        return [saved for saved in self.saved if self._fits(saved.tokens)]

    def _host_room(self, tokens: int) -> bool:
        return self.device.units(tokens) <= self.total - self._host_used()

    def _host_used(self) -> int:
        return sum(self.device.units(saved.tokens) for saved in self.saved)

    def _room(self, running: Running) -> int:
        """Returns tokens by which a running request can grow."""
        return -running.tokens % PAGE + PAGE * min(self.free_pages, self.free_swa_pages)

    def _take_slot(self, which: int) -> int:
        return self.free_slots.pop(which % len(self.free_slots))

    def _leave(self, running: Running) -> None:
        self.allocator.free(running.slots[::PAGE])  # it frees whole pages: one slot of each will do
        self.free_slots.append(running.request.req_slot)
        self.running.remove(running)

    def _save(self, running: Running, tokens: int) -> HostCopy:
        return self.pool.get_cpu_copy(running.slots[:tokens], req_pool_index=running.request.req_slot)

    # ------------------------------------------------------------------------------------- the bytes

    def _noise(self, nbytes: int) -> torch.Tensor:
        start = int(self.offsets.integers(0, NOISE_BYTES - nbytes))
        return self.device.noise[start : start + nbytes]

    def _write(self, running: Running, first: int) -> None:
        """Writes the rows of a forward over the positions from ``first`` on: new rows only."""
        request = running.request
        slots = request.slots[first:].numpy()
        positions = np.arange(first, running.tokens)
        swa = self.allocator.full_to_swa_index_mapping[request.slots[first:]].numpy()
        for (family, layer), planes in self.device.planes.items():
            if family == "swa_kv":
                rows = swa[swa > 0]
            elif not oracle.FAMILIES[family].ring:
                ratio = oracle.ratio_of(family)
                rows = slots[slots % ratio == ratio - 1] // ratio
            else:
                ring = self.device.rings[(family, layer)]
                mapped = swa[swa > 0]
                rows = mapped // PAGE * ring + mapped % ring
                if oracle.FAMILIES[family].by == "slot":
                    rows = request.req_slot * ring + positions % ring
                rows = np.unique(rows)  # a ring row keeps one of its values, any of them will do
            for plane in planes:
                row = torch.from_numpy(rows)
                noise = self._noise(len(rows) * plane.shape[2])
                plane[row // plane.shape[1], row % plane.shape[1]] = noise.view(-1, plane.shape[2])

    # ------------------------------------------------------------------------- requests on the device

    def _admit(self, tokens: int, which: int, tail: bool) -> None:
        if tail:
            while not self._fits(tokens):
                tokens //= 2
        else:
            tokens = min(tokens, PAGE * min(self.free_pages, self.free_swa_pages))
        running = Running(oracle.new_request(self.allocator, self._take_slot(which)))
        if tail:  # as decode preallocation does
            running.request.slots = oracle.resume(self.allocator, tokens)
            running.evicted = pages_of(tokens) - tail_pages(tokens)
        else:
            oracle.grow(self.allocator, running.request, tokens)
        self.running.append(running)
        self._write(running, 0)

    def _did(self, what: str, quiet: str | None = None) -> None:
        """Counts a step. A quiet one changed nothing and need not be repeated before something happens."""
        done["steps"] += 1
        done[what] += 1
        if quiet is None:
            self.news = {"scribble", "load", "save"}
        self.news.discard(quiet)
