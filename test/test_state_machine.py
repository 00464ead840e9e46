"""Random lives of requests over the real allocator and pools: nothing is lost, leaked or handed out twice.

The model is a list of running requests, a list of saved ones and a list of free request slots. What a copy
must hold is read by the oracle at the save and again after the resume. STATE_MACHINE_EXAMPLES=N runs N
examples: fixed ones up to the usual number, others at every run where N is more.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sglang.srt.mem_cache.allocator import paged

from sglang_dsv4.cache.families import Group
from sglang_dsv4.engine.standalone import PoolSpec, make_allocator, make_pool
from sglang_dsv4.errors import (
    CopyConsumed,
    CopyMismatch,
    HostMemoryExhausted,
    IndexMismatch,
    StaleWeights,
    WindowNotMapped,
)
from sglang_dsv4.hostmem.memory import HostCopy
from sglang_dsv4.pools.host_cache import Surroundings
from sglang_dsv4.pools.token_to_kv import TokenToKVPool
from sglang_dsv4.settings import Settings

pytestmark = pytest.mark.cpu

SPEC = PoolSpec(ratios=(0, 4, 128), pages=12, swa_pages=7, requests=4)
PAGE = SPEC.page_size
LEAST_STEPS = 10_000
EXAMPLES, STEPS_AN_EXAMPLE = 250, 60
NOISE_BYTES = 16 << 20

WHICH = st.integers(0, 11)  # an entry of a list, modulo its length
LENGTHS = (
    st.integers(1, 300)
    | st.integers(1, 900)
    | st.sampled_from((1, 4, 127, 128, 129, 255, 256, 257, 384, 512, 513, 768))
)
BOUNDARIES = st.sampled_from((4, 8, 128, 256))
STEPS = st.integers(1, 8) | st.integers(1, 200) | st.tuples(BOUNDARIES, st.integers(-1, 1))
REFUSED_LOADS = ("short", "long", "mixed", "no slot", "unmapped", "stale", "consumed")
REFUSED_SAVES = ("mixed", "no slot", "far slot", "unmapped", "take fails", "move fails")

done: Counter[str] = Counter()  # what the machine did; "steps" counts the rules it ran


def pages_of(tokens: int) -> int:
    return -(-tokens // PAGE)


def tail_pages(tokens: int) -> int:
    """SWA pages of a request of ``tokens`` tokens whose SWA rows outside of the window are gone."""
    return pages_of(tokens) - max(0, tokens - oracle.WINDOW) // PAGE


@dataclass(eq=False)
class Running:
    """A request on the device. ``evicted``: its first pages that have no SWA page any more."""

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
    """A retracted request: its copy and what the oracle read when it was made."""

    copy: HostCopy
    rows: dict[oracle.RowKey, bytes]

    @property
    def tokens(self) -> int:
        return self.copy.tokens


class LateEvent:
    """A transfer that has not finished until the machine says so, or until somebody waits for it."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed = True


class InterruptedCopyError(Exception):
    """Stands for any failure below the code under test."""


class PlainKernel:
    """The engine's own torch version of its page kernel, launched the same way; the interpreter is slow."""

    def __getitem__(self, grid: tuple[int]) -> PlainKernel:
        return self

    def __call__(self, prefix: Any, total: Any, last: Any, free: Any, out: Any, batch: int, page_size: int) -> None:
        paged.alloc_extend_naive(prefix, total, last, free, out, page_size, out.device)


class Device:
    """One pool with its allocator, built once; examples put it back as it was."""

    def __init__(self) -> None:
        self.pool = make_pool(SPEC)
        self.allocator = make_allocator(SPEC, self.pool)
        assert type(self.pool) is TokenToKVPool
        oracle.fill(self.pool, seed=1)
        self.buffers = oracle.buffers(self.pool)
        self.first = oracle.snapshot(self.pool)
        # Compared eight bytes at a time: every page and state row is a multiple of that.
        self.words = {key: buffer.view(torch.int64) for key, buffer in self.buffers.items()}
        self.before = {key: words.clone() for key, words in self.words.items()}
        self.rings = {
            (family, layer): int(oracle._state_pool(self.pool, family, layer).ring_size)
            for family, layer in self.buffers
            if family in oracle.STATE_FAMILIES
        }
        self.noise = torch.from_numpy(np.random.default_rng(2).integers(0, 256, NOISE_BYTES, dtype=np.uint8))
        self.planes = {key: self._planes(key[0], buffer) for key, buffer in self.buffers.items()}
        memory = self.pool.attach_host(Settings(transfer="torch")).memory
        self.strides = {group: region.packed.block_stride for group, region in memory.regions.items()}

    def _planes(self, family: str, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Views [page, row, byte], one for the values and one for the scales of the rows."""
        rows = oracle._rows_a_page(self.pool, family)
        values, scales = oracle._row_layout(self.pool, family, buffer.shape[1])
        planes = [buffer[:, : rows * values].unflatten(1, (rows, values))]
        if scales:
            planes.append(buffer[:, rows * values : rows * (values + scales)].unflatten(1, (rows, scales)))
        return planes

    def start(self) -> None:
        """Free pages in their first order and the first bytes everywhere."""
        assert self.clean()
        self.allocator.clear()
        for key, buffer in self.buffers.items():
            buffer.copy_(self.first[key])

    def clean(self) -> bool:
        full, swa = self.allocator.full_available_size(), self.allocator.swa_available_size()
        mapped = bool(self.allocator.full_to_swa_index_mapping[:-1].any())
        return (full, swa, mapped) == (SPEC.pages * PAGE, SPEC.swa_pages * PAGE, False)

    def remember(self) -> None:
        for key, words in self.words.items():
            self.before[key].copy_(words)

    def assert_unchanged(self) -> None:
        for key, words in self.words.items():
            assert torch.equal(self.before[key], words), f"{key} changed"

    def places(self, family: str, layer: int, slots: torch.Tensor, req_slot: int) -> torch.Tensor:
        """Rows of a buffer (pages, or rows of states) that belong to the request at ``slots``."""
        starts = slots[::PAGE]
        swa = self.allocator.full_to_swa_index_mapping[starts]
        swa = swa[swa > 0] // PAGE
        if family not in oracle.STATE_FAMILIES:
            return swa if family == "swa_kv" else starts // PAGE
        ring = self.rings[(family, layer)]
        pages = torch.tensor([req_slot]) if family == "c128_state" else swa
        return (pages[:, None] * ring + torch.arange(ring)).flatten()

    def assert_only_changed_at(self, slots: torch.Tensor, req_slot: int) -> None:
        """No page, no ring and no sentinel of anybody else differs from what ``remember`` saw."""
        for (family, layer), words in self.words.items():
            changed = (self.before[(family, layer)] != words).any(dim=1).nonzero().flatten()
            strange = set(changed.tolist()) - set(self.places(family, layer, slots, req_slot).tolist())
            assert not strange, f"{family} layer {layer}: pages or rows {sorted(strange)} changed"


class Requests(RuleBasedStateMachine):
    """Requests come, grow, are retracted, resumed, aborted; ``device`` is set by the test."""

    device: Device

    def __init__(self) -> None:
        super().__init__()
        self.device.start()
        self.pool, self.allocator = self.device.pool, self.device.allocator
        self.running: list[Running] = []
        self.saved: list[Saved] = []
        self.free_slots = list(range(SPEC.requests))
        self.reading: list[tuple[LateEvent, dict[Group, Any]]] = []  # loads and the host blocks they read
        self.consumed: HostCopy | None = None
        self.news = {"scribble", "load", "save"}  # worth doing: something happened since the last time
        self.weights = 1
        self.leaks = 0
        self.offsets = np.random.default_rng(3)

    @initialize(
        blocks=st.integers(1, 16),
        copies=st.integers(1, 6),
        late=st.booleans(),
        tokens=LENGTHS,
        tail=st.booleans(),
    )
    def attach(self, blocks: int, copies: int, late: bool, tokens: int, tail: bool) -> None:
        """Host memory of exactly ``blocks`` pages and ``copies`` copies, and a first request."""
        strides = self.device.strides
        nbytes = blocks * strides[Group.BLOCK] + copies * (strides[Group.WINDOW] + strides[Group.REQUEST])
        configured = Settings(host_gb=nbytes / 2**30, host_copies=copies, transfer="torch", verify=False)
        self.pool.host = None  # a second attach would keep the first arena
        host = self.pool.attach_host(configured, Surroundings(weight_version=lambda: self.weights))
        assert host is self.pool.host
        self.memory = host.memory
        self.totals = {Group.BLOCK: blocks, Group.WINDOW: copies, Group.REQUEST: copies}
        assert {group: pool.total for group, pool in self.memory.pools.items()} == self.totals
        if late:  # a transfer on the CPU leaves no event
            host._mover._end = LateEvent
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
        used = sum(pages_of(saved.tokens) for saved in self.saved)
        enough = pages_of(tokens) <= self.totals[Group.BLOCK] - used
        return enough and len(self.saved) < self.totals[Group.REQUEST]

    def _room(self, running: Running) -> int:
        """Tokens by which a running request can grow."""
        return -running.tokens % PAGE + PAGE * min(self.free_pages, self.free_swa_pages)

    def _take_slot(self, which: int) -> int:
        return self.free_slots.pop(which % len(self.free_slots))

    def _leave(self, running: Running) -> None:
        """Give back the pages and the slot of a request."""
        self.allocator.free(running.slots[::PAGE])  # it frees whole pages: one slot of each will do
        self.free_slots.append(running.request.req_slot)
        self.running.remove(running)

    def _save(self, running: Running, tokens: int) -> HostCopy:
        return self.pool.get_cpu_copy(running.slots[:tokens], req_pool_index=running.request.req_slot)

    def _refuse_load(self, error: type[Exception], copy: HostCopy, slots: torch.Tensor, slot: int | None) -> None:
        held = self.memory.held_bytes
        self.device.remember()
        with pytest.raises(error):
            self.pool.load_cpu_copy(copy, slots, req_pool_index=slot)
        self.device.assert_unchanged()
        assert self.memory.held_bytes == held

    # ------------------------------------------------------------------------------------- the bytes

    def _noise(self, nbytes: int) -> torch.Tensor:
        start = int(self.offsets.integers(0, NOISE_BYTES - nbytes))
        return self.device.noise[start : start + nbytes]

    def _write(self, running: Running, first: int) -> None:
        """What a forward over the positions from ``first`` on leaves: new rows only."""
        request = running.request
        slots = request.slots[first:].numpy()
        positions = np.arange(first, running.tokens)
        swa = self.allocator.full_to_swa_index_mapping[request.slots[first:]].numpy()
        for (family, layer), planes in self.device.planes.items():
            if family == "swa_kv":
                rows = swa[swa > 0]
            elif family == "c128_kv":
                rows = slots[slots % 128 == 127] // 128
            elif family in ("c4_kv", "c4_indexer"):
                rows = slots[slots % 4 == 3] // 4
            else:
                ring = self.device.rings[(family, layer)]
                mapped = swa[swa > 0]
                rows = mapped // PAGE * ring + mapped % ring
                if family == "c128_state":
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

    @precondition(lambda self: self._fits(1))
    @rule(tokens=LENGTHS, which=WHICH, tail=st.booleans())
    def admit(self, tokens: int, which: int, tail: bool) -> None:
        self._admit(tokens, which, tail)
        self._did("admit")

    @precondition(lambda self: any(self._room(r) for r in self.running))
    @rule(which=WHICH, step=STEPS)
    def extend(self, which: int, step: int | tuple[int, int]) -> None:
        """By some tokens, or to just before, onto or just behind a page, block or ring boundary."""
        choices = [r for r in self.running if self._room(r)]
        running = choices[which % len(choices)]
        first = running.tokens
        tokens = step if isinstance(step, int) else max(1, -first % step[0] + step[1])
        oracle.grow(self.allocator, running.request, min(tokens, self._room(running)))
        self._write(running, first)
        self._did("extend")

    @precondition(lambda self: any(r.evictable for r in self.running))
    @rule(which=WHICH)
    def evict(self, which: int) -> None:
        choices = [r for r in self.running if r.evictable]
        running = choices[which % len(choices)]
        running.request.n = running.tokens
        oracle.evict_out_of_window(self.allocator, running.request)
        running.evicted += running.evictable
        self._did("evict")

    @precondition(lambda self: len(self.running) > 1)
    @rule(which=WHICH)
    def finish(self, which: int) -> None:
        self._leave(self.running[which % len(self.running)])
        self._did("finish")

    @precondition(lambda self: "scribble" in self.news and self._fits(1))
    @rule(which=WHICH, pages=st.integers(1, SPEC.pages))
    def scribble(self, which: int, pages: int) -> None:
        """A request gets the pages freed last, writes over whole pages and over its rings, and leaves."""
        tokens = PAGE * pages
        while not self._fits(tokens):
            tokens -= PAGE
        running = Running(oracle.new_request(self.allocator, self._take_slot(which)))
        request = running.request
        request.slots = oracle.resume(self.allocator, tokens)
        self.running.append(running)
        for (family, layer), buffer in self.device.buffers.items():
            rows = self.device.places(family, layer, request.slots, request.req_slot)
            buffer[rows] = self._noise(len(rows) * buffer.shape[1]).view(-1, buffer.shape[1])
        self._leave(running)
        self._did("scribble", quiet="scribble")

    # --------------------------------------------------------------------------------- host copies

    def _retract(self, which: int, in_flight: bool) -> None:
        """Save all tokens but the one in flight, as the engine does (seqlen - 1), and leave the device."""
        running = self.running[which % len(self.running)]
        tokens = max(1, running.tokens - in_flight)
        room, held = self._host_room(tokens), self.memory.held_bytes
        self.device.remember()
        if not room:
            with pytest.raises(HostMemoryExhausted, match="DSV4_HOST_"):
                self._save(running, tokens)
            self.device.assert_unchanged()
            assert self.memory.held_bytes == held
            self._did("exhausted", quiet="save")
            return
        copy = self._save(running, tokens)
        self.device.assert_unchanged()
        assert copy.tokens == tokens
        assert not copy.released
        assert self.memory.held_bytes == held + copy.nbytes
        self.saved.append(Saved(copy, oracle.read(self.pool, running.slots, tokens, running.request.req_slot)))
        self._leave(running)
        self._did("retract")

    def _resume(self, which: int, slot: int) -> None:
        """Other pages, another slot, the same bytes; nothing else on the device changes."""
        saved = self._fitting()[which % len(self._fitting())]
        tokens, copy, blocks = saved.tokens, saved.copy, dict(saved.copy.blocks)
        request = oracle.Request(oracle.resume(self.allocator, tokens), self._take_slot(slot), tokens)
        self.running.append(Running(request, pages_of(tokens) - tail_pages(tokens)))
        self.device.remember()
        self.pool.load_cpu_copy(copy, request.slots, req_pool_index=request.req_slot)
        self.saved.remove(saved)
        rows = oracle.read(self.pool, request.slots, tokens, request.req_slot)
        if rows != saved.rows:
            oracle.compare(saved.rows, rows)  # names the byte
        self.device.assert_only_changed_at(request.slots, request.req_slot)
        assert oracle.cleared_ring_ok(self.pool, request.req_slot, tokens)
        assert copy.released
        if copy.lease.used_by is not None:
            self.reading.append((copy.lease.used_by, blocks))
        self.consumed = copy
        self._did("resume")

    @precondition(lambda self: self.running)
    @rule(which=WHICH, in_flight=st.booleans())
    def retract(self, which: int, in_flight: bool) -> None:
        self._retract(which, in_flight)

    @precondition(lambda self: self._fitting())
    @rule(which=WHICH, slot=WHICH)
    def resume(self, which: int, slot: int) -> None:
        self._resume(which, slot)

    # Rules are drawn evenly, and an example goes without some of them: what matters most has several names.

    @precondition(lambda self: self._fits(1))
    @rule(tokens=LENGTHS, which=WHICH, tail=st.booleans())
    def admit_more(self, tokens: int, which: int, tail: bool) -> None:
        self._admit(tokens, which, tail)
        self._did("admit")

    @precondition(lambda self: self.running)
    @rule(which=WHICH, in_flight=st.booleans())
    def retract_more(self, which: int, in_flight: bool) -> None:
        self._retract(which, in_flight)

    @precondition(lambda self: self._fitting())
    @rule(which=WHICH, slot=WHICH)
    def resume_more(self, which: int, slot: int) -> None:
        self._resume(which, slot)

    @precondition(lambda self: self.saved)
    @rule(which=WHICH, how=st.sampled_from(("abort", "abort twice", "drop")))
    def abort(self, which: int, how: str) -> None:
        """A retracted request is aborted. A handle that dies unreleased is counted as a leak."""
        copy = self.saved.pop(which % len(self.saved)).copy
        if how == "drop":
            self.leaks += 1
        else:
            copy.release()
            if how == "abort twice":
                copy.release()
            assert copy.released
            self.consumed = copy
        self._did(how)

    @precondition(lambda self: self.reading)
    @rule()
    def time_passes(self) -> None:
        """The oldest load has finished."""
        self.reading.pop(0)[0].passed = True
        self._did("time passes")

    # -------------------------------------------------------------------------------- what is refused

    @precondition(lambda self: "load" in self.news and self._fitting())
    @rule(which=WHICH, slot=WHICH, how=st.sampled_from(REFUSED_LOADS))
    def refused_load(self, which: int, slot: int, how: str) -> None:
        """A load that must not happen changes nothing, and the copy can still be loaded afterwards."""
        saved = self._fitting()[which % len(self._fitting())]
        tokens = saved.tokens
        request = oracle.Request(oracle.resume(self.allocator, tokens), self._take_slot(slot), tokens)
        self.running.append(Running(request, pages_of(tokens) - tail_pages(tokens)))
        slots, target = request.slots, request.req_slot
        if how == "short":
            self._refuse_load(CopyMismatch, saved.copy, slots[:-1], target)
        elif how == "long":
            self._refuse_load(CopyMismatch, saved.copy, torch.cat([slots, slots[-1:] + 1]), target)
        elif how == "mixed":
            self._refuse_load(IndexMismatch, saved.copy, slots - 1, target)
        elif how == "no slot":
            self._refuse_load(IndexMismatch, saved.copy, slots, None)
        elif how == "unmapped":
            oracle.evict(self.allocator, slots, pages_of(tokens) * PAGE)
            self.running[-1].evicted = pages_of(tokens)
            self._refuse_load(WindowNotMapped, saved.copy, slots, target)
        elif how == "consumed" and self.consumed is not None:
            self._refuse_load(CopyConsumed, self.consumed, slots, target)
        else:
            how = "stale"
            self.weights += 1
            self._refuse_load(StaleWeights, saved.copy, slots, target)
            self.weights -= 1
        assert not saved.copy.released
        self._leave(self.running[-1])
        self._did(f"load {how}", quiet="load")

    @precondition(lambda self: "save" in self.news and self.running)
    @rule(which=WHICH, how=st.sampled_from(REFUSED_SAVES))
    def refused_save(self, which: int, how: str) -> None:
        """A save that fails takes nothing, wherever it fails."""
        running = self.running[which % len(self.running)]
        slots, slot = running.slots, running.request.req_slot
        error: type[Exception] = IndexMismatch
        self.device.remember()
        with pytest.MonkeyPatch.context() as patch:
            if how == "mixed":
                slots = slots.clone()
                slots[-1] += 1
                error = IndexMismatch if self._host_room(running.tokens) else HostMemoryExhausted
            elif how == "no slot":
                slot = None
            elif how == "far slot":
                slot = 1000
            elif how == "unmapped":
                error = WindowNotMapped if self._host_room(running.tokens) else HostMemoryExhausted
                oracle.evict(self.allocator, slots, pages_of(running.tokens) * PAGE)
                running.evicted = pages_of(running.tokens)
            elif self._host_room(running.tokens):
                error = InterruptedCopyError
                if how == "take fails":
                    patch.setattr(self.memory.pools[Group.REQUEST], "take", interrupt)
                else:
                    patch.setattr(self.pool.host._mover._path, "move", interrupt)
            else:
                error = HostMemoryExhausted
            with pytest.raises(error):
                self.pool.get_cpu_copy(slots, req_pool_index=slot)
        self.device.assert_unchanged()
        if how == "unmapped":
            self._leave(running)  # its window is gone
        self._did(f"save {how}", quiet="save" if how != "unmapped" else None)

    # ------------------------------------------------------------------------------------ invariants

    def _did(self, what: str, quiet: str | None = None) -> None:
        """Count a step. A quiet one changed nothing and need not be repeated before something happens."""
        done["steps"] += 1
        done[what] += 1
        if quiet is None:
            self.news = {"scribble", "load", "save"}
        self.news.discard(quiet)

    @invariant()
    def host_blocks_are_accounted(self) -> None:
        memory = self.memory
        memory.check_integrity()
        assert memory.copies == len(self.saved)
        assert memory.leaks == self.leaks
        assert memory.held_bytes == sum(saved.copy.nbytes for saved in self.saved)
        used = Counter({Group.WINDOW: len(self.saved), Group.REQUEST: len(self.saved)})
        used[Group.BLOCK] = sum(pages_of(saved.tokens) for saved in self.saved)
        for group, total in self.totals.items():
            assert memory.pools[group].available == total - used[group]

    @invariant()
    def no_host_block_has_two_users(self) -> None:
        """Not two copies, and not a copy while a load still reads the block."""
        self.reading = [(event, blocks) for event, blocks in self.reading if not event.query()]
        for group in Group:
            users = [saved.copy.blocks[group] for saved in self.saved]
            users += [blocks[group] for _, blocks in self.reading]
            numbers = np.concatenate(users) if users else np.empty(0)
            assert len(np.unique(numbers)) == len(numbers), f"{group.value}: {numbers}"

    @invariant()
    def device_pages_are_accounted(self) -> None:
        assert self.allocator.full_available_size() == PAGE * self.free_pages
        assert self.allocator.swa_available_size() == PAGE * self.free_swa_pages
        pages, swa_pages = [], []
        for running in self.running:
            starts = running.slots[::PAGE]
            swa = self.allocator.full_to_swa_index_mapping[starts].tolist()
            assert [row > 0 for row in swa] == [page >= running.evicted for page in range(len(swa))]
            pages += starts.tolist()
            swa_pages += swa[running.evicted :]
        assert len(set(pages)) == len(pages) == SPEC.pages - self.free_pages
        assert len(set(swa_pages)) == len(swa_pages) == SPEC.swa_pages - self.free_swa_pages

    @invariant()
    def no_slot_has_two_users(self) -> None:
        slots = [running.request.req_slot for running in self.running]
        assert sorted(slots + self.free_slots) == list(range(SPEC.requests))

    def teardown(self) -> None:
        try:
            for running in list(self.running):
                self._leave(running)
            while self.saved:
                self.saved.pop().copy.release()
            assert sorted(self.free_slots) == list(range(SPEC.requests))
            assert self.device.clean()
            assert self.memory.copies == self.memory.held_bytes == 0
            assert self.memory.leaks == self.leaks
            for group, pool in self.memory.pools.items():
                assert pool.available == pool.total == self.totals[group]
                everything = pool.take(pool.total)  # waits for the loads that still read
                assert everything.tolist() == list(range(pool.total))
                pool.give_back(everything, None)
            self.memory.check_integrity()
            assert all(event.passed for event, _ in self.reading)
        finally:
            self.allocator.clear()
            self.pool.host = None


def interrupt(*_: Any, **__: Any) -> None:
    raise InterruptedCopyError


@pytest.fixture
def one_thread():
    """Buffers are small: threads cost more than they save, and the machine may be shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_random_lives_of_requests(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "alloc_extend_kernel", PlainKernel())  # 0.5.23 does so itself on the CPU
    caplog.set_level(logging.ERROR, "sglang_dsv4")  # every dropped handle is a warning
    examples = int(os.environ.get("STATE_MACHINE_EXAMPLES", EXAMPLES))
    Requests.device = Device()
    done.clear()
    run_state_machine_as_test(
        Requests,
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS_AN_EXAMPLE,
            deadline=None,
            database=None,
            derandomize=examples <= EXAMPLES,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
        ),
    )
    print(dict(done))
    if examples < EXAMPLES:
        return
    assert done["steps"] >= LEAST_STEPS
    for what in ("admit", "extend", "finish", "scribble", "retract", "resume"):
        assert done[what] >= LEAST_STEPS // 50, what
    refused = [f"load {how}" for how in REFUSED_LOADS] + [f"save {how}" for how in REFUSED_SAVES]
    for what in ("evict", "abort", "abort twice", "drop", "time passes", "exhausted", *refused):
        assert done[what], what
