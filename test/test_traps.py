"""One test for each trap of the cache: what goes wrong without the guard, and that it is seen.

Traps whose guard lives in the engine adapters are tested in test/engine (10 ranks, 11 layouts, 14 weights through
the real hooks) and the length grid (12) in test/pools; each is named here once more, so that the list is whole.
"""

import dataclasses

import numpy as np
import oracle
import pytest
import torch
from worlds import LENGTHS, make_world

from sglang_dsv4.cache.families import Geometry, Group, c4_tail_start, c128_pending_start, families
from sglang_dsv4.cache.rows import Place, plan
from sglang_dsv4.errors import (
    CopyConsumed,
    CopyMismatch,
    HostMemoryExhausted,
    IndexMismatch,
    LayoutRefused,
    StaleWeights,
    VerifyMismatch,
    WindowNotMapped,
)
from sglang_dsv4.pools import host_cache as host_cache_module
from sglang_dsv4.pools.host_cache import Surroundings
from sglang_dsv4.settings import Settings
from sglang_dsv4.transfer.jobs import Rows
from triton_ops.copy_rows import EMPTY, HOST_OFFSET

pytestmark = pytest.mark.cpu


def saved(world, tokens=700, slot=1):
    """(request, its bytes, its copy) of a filled pool."""
    oracle.fill(world.pool, tokens)
    request = world.start(slot, tokens)
    return request, world.read(request), world.save(request)


def test_trap_1_the_state_follows_the_request_slot():
    world = make_world(pages=10)
    request, expected, copy = saved(world)
    world.leave(request)
    oracle.poison(world.pool)
    oracle.compare(expected, world.read(world.resume(copy, 4)))


def test_trap_1_without_a_slot_there_is_no_copy():
    world = make_world(pages=10)
    request = world.start(1, 300)
    with pytest.raises(IndexMismatch, match="slot"):
        world.pool.get_cpu_copy(request.slots)
    copy = world.save(request)
    with pytest.raises(IndexMismatch, match="slot"):
        world.pool.load_cpu_copy(copy, request.slots)
    assert not copy.released
    copy.release()
    world.check_empty()


def test_trap_2_live_state_rows_only_and_each_once():
    """The reference saves state rows for every token; positions that share a ring row then overwrite each other."""
    world = make_world(pages=10)
    request, expected, copy = saved(world, tokens=702)
    ring = 8
    every_token = [
        (swa // 256) * ring + swa % ring for swa in (oracle.swa_row(world.pool, int(s)) for s in request.slots)
    ]
    assert len(set(every_token)) < len(every_token), "the trap is there: rows repeat"
    world.leave(request)
    oracle.poison(world.pool)
    oracle.compare(expected, world.read(world.resume(copy, 2)))


@pytest.mark.parametrize("tokens", LENGTHS)
def test_trap_2_no_row_is_planned_twice(tokens):
    geometry = Geometry((0, 4, 128))
    first = max(0, tokens - 127)
    place = Place(tokens, np.arange(1, -(-tokens // 256) + 1), np.arange(first, tokens) + 256, 1)
    for spans in plan(geometry, families(geometry), place):
        rows = [
            (page, row + k)
            for page, row, count in zip(spans.pages, spans.rows, spans.counts, strict=True)
            for k in range(count)
        ]
        assert len(set(rows)) == len(rows), spans.family.name


def test_trap_3_a_window_position_without_a_new_row_is_an_error():
    world = make_world(pages=10)
    request, expected, copy = saved(world, tokens=600)
    world.leave(request)
    slots = oracle.resume(world.allocator, 600)
    mapping = world.pool.full_to_swa_index_mapping
    kept = int(mapping[slots[480]])
    mapping[slots[480]] = 0
    resumed = oracle.Request(slots, 2, 600)
    before = oracle.snapshot(world.pool)
    with pytest.raises(WindowNotMapped, match="position 480 of 600"):
        world.load(copy, resumed)
    for key, buffer in oracle.buffers(world.pool).items():
        assert torch.equal(before[key], buffer), "a refused load wrote something"
    mapping[slots[480]] = kept
    world.load(copy, resumed)  # the copy survived the refusal
    oracle.compare(expected, world.read(resumed))


def test_trap_3_nor_can_it_be_saved():
    world = make_world(pages=10)
    request = world.start(1, 600)
    world.pool.full_to_swa_index_mapping[request.slots[473]] = 0
    with pytest.raises(WindowNotMapped, match="position 473"):
        world.save(request)
    world.check_empty()


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("ring4, ring128, written", [(8, 128, 1), (16, 256, 9)])
def test_trap_4_the_forward_in_flight_writes_no_saved_ring_row(tokens, ring4, ring128, written):
    """Without speculation it writes position n; with 8 draft tokens n .. n+8 at most."""
    in_flight = range(tokens, tokens + written)
    saved4 = {p % ring4 for p in range(c4_tail_start(tokens), tokens)}
    saved128 = {p % ring128 for p in range(c128_pending_start(tokens), tokens)}
    assert not saved4 & {p % ring4 for p in in_flight}
    assert not saved128 & {p % ring128 for p in in_flight}


def test_trap_4_more_draft_tokens_are_refused():
    assert {p % 16 for p in range(c4_tail_start(7), 7)} & {(7 + 9) % 16}, "n+9 lands on n-7 when n % 4 == 3"
    make_world(pages=6, draft_tokens=8)
    with pytest.raises(AssertionError, match="9 draft tokens"):
        make_world(pages=6, draft_tokens=9)


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
    pool = memory.pools[Group.BLOCK]
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
    assert memory.pools[Group.BLOCK].returning == 2
    memory.check_integrity()


def test_trap_5_pages_overwritten_right_after_the_save():
    world = make_world(pages=10)
    request, expected, copy = saved(world)
    oracle.fill(world.pool, 99)  # a request admitted in the same iteration
    world.leave(request)
    oracle.compare(expected, world.read(world.resume(copy, 3)))


def test_trap_6_online_c128_is_refused():
    world = make_world(pages=6)
    state = next(p for p in world.pool.compress_state_pools if p is not None and p.ratio == 128)
    state.ring_size = 1
    world.pool.host = None
    assert world.pool.attach_host(Settings(host_gb=0.1)) is None
    assert "c128_ring 1" in world.pool.refusal


def test_trap_7_blocks_are_reused_only_after_the_load(ordered):
    world, _, _ = ordered
    request = world.start(1, 300)
    copy = world.save(request)
    pool = world.pool.host.memory.pools[Group.BLOCK]
    blocks = set(copy.blocks[Group.BLOCK].tolist())
    world.leave(request)
    resumed = world.resume(copy, 2)
    assert pool.held == 0 and pool.returning == len(blocks), "released, but the load may still read them"
    second = world.save(resumed)
    assert not blocks & set(second.blocks[Group.BLOCK].tolist())
    second.release()
    world.pool.host.memory.check_integrity()


def test_trap_7_release_is_explicit_and_a_dropped_handle_is_counted():
    world = make_world(pages=6)
    request = world.start(1, 300)
    memory = world.pool.host.memory
    copy = world.save(request)
    copy.release()
    assert memory.leaks == 0 and memory.copies == 0
    copy = world.save(request)
    del copy
    assert memory.leaks == 1
    world.check_empty()


@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("tokens", [128, 129, 255])
def test_trap_8_a_load_resets_the_rest_of_the_ring(tokens, drafts):
    """Of its own slot alone; a save resets nothing."""
    world = make_world(pages=6, draft_tokens=drafts)
    request, expected, copy = saved(world, tokens=tokens)
    oracle.compare(expected, world.read(request))
    world.leave(request)
    oracle.poison(world.pool)  # the previous owner's rows
    before = oracle.snapshot(world.pool)
    resumed = world.resume(copy, 3)
    assert oracle.cleared_ring_ok(world.pool, 3, tokens)
    oracle.compare(expected, world.read(resumed))
    oracle.assert_only_changed(before, world.pool, oracle.may_change(world.pool, resumed.slots, tokens, 3))


def test_trap_9_hisparse_is_refused_by_name():
    with pytest.raises(AssertionError, match="HiSparse"):
        make_world(pages=6, hisparse=True)


def test_trap_9_nor_does_such_a_pool_copy_silently():
    from sglang_dsv4.engine.standalone import PoolSpec, make_allocator, make_pool

    spec = PoolSpec(hisparse=True)
    pool = make_pool(spec)
    make_allocator(spec, pool)
    with pytest.raises(LayoutRefused, match="HiSparse"):
        pool.get_cpu_copy(torch.arange(256, 300), req_pool_index=1)


def test_trap_12_the_grid_covers_every_residue():
    assert {n % 4 for n in LENGTHS} == {0, 1, 2, 3}
    assert {n % 128 for n in LENGTHS} >= {0, 1, 2, 127}


def test_trap_14_a_copy_of_other_weights_is_not_loaded():
    version = [7]
    world = make_world(pages=10)
    world.pool.host = None
    world.pool.attach_host(Settings(host_gb=0.1), Surroundings(weight_version=lambda: version[0]))
    request, _, copy = saved(world, tokens=300)
    world.leave(request)
    version[0] = 8
    before = oracle.snapshot(world.pool)
    slots = oracle.resume(world.allocator, 300)
    with pytest.raises(StaleWeights, match=r"7.*8"):
        world.load(copy, oracle.Request(slots, 2, 300))
    for key, buffer in oracle.buffers(world.pool).items():
        assert torch.equal(before[key], buffer)
    copy.release()


class TestBadInput:
    """Named errors; nothing changed, nothing leaked."""

    def test_a_load_of_the_wrong_length(self):
        world = make_world(pages=10)
        _, _, copy = saved(world, tokens=300)
        other = world.start(2, 299)
        with pytest.raises(CopyMismatch, match=r"300 tokens .* 299"):
            world.load(copy, other)
        copy.release()
        world.check_empty()

    def test_slots_off_their_page(self):
        world = make_world(pages=10)
        request = world.start(1, 700)
        request.slots[300] = request.slots[301]
        with pytest.raises(IndexMismatch, match="position 300"):
            world.save(request)
        world.check_empty()

    @pytest.mark.parametrize("bad", [-1, -(2**31), 2**31 - 1, 10 * 256 + 256])
    @pytest.mark.parametrize("position", [0, 256, 511, 699])
    def test_slots_out_of_range(self, position, bad):
        world = make_world(pages=10)
        request = world.start(1, 700)
        request.slots[position] = bad
        with pytest.raises(IndexMismatch):
            world.save(request)
        world.check_empty()

    @pytest.mark.parametrize("slot", [-1, 6, 1 << 40])
    def test_a_request_slot_out_of_range(self, slot):
        world = make_world(pages=10)
        request = world.start(1, 300)
        with pytest.raises(IndexMismatch, match="slot"):
            world.pool.get_cpu_copy(request.slots, req_pool_index=slot)
        world.check_empty()

    def test_a_copy_from_another_geometry(self):
        one, other = make_world(pages=6), make_world(pages=6, fp4_indexer=True)
        _, _, copy = saved(one, tokens=300)
        with pytest.raises(CopyMismatch, match="geometry"):
            other.load(copy, other.start(1, 300))
        copy.release()
        one.check_empty()

    def test_a_copy_of_another_pool(self):
        one, other = make_world(pages=6), make_world(pages=6)
        _, _, copy = saved(one, tokens=300)
        with pytest.raises(CopyMismatch, match="not a copy of this pool"):
            other.load(copy, other.start(1, 300))
        with pytest.raises(CopyMismatch, match="not a copy of this pool"):
            one.pool.load_cpu_copy(object(), one.start(2, 300).slots, req_pool_index=2)
        copy.release()

    def test_a_second_load(self):
        world = make_world(pages=10)
        request, _, copy = saved(world, tokens=300)
        world.leave(request)
        resumed = world.resume(copy, 2)
        with pytest.raises(CopyConsumed):
            world.load(copy, resumed)
        world.check_empty()

    def test_a_load_after_abort(self):
        world = make_world(pages=10)
        request, _, copy = saved(world, tokens=300)
        copy.release()
        with pytest.raises(CopyConsumed):
            world.load(copy, request)
        world.check_empty()

    def test_host_memory_too_small_for_one_request(self):
        world = make_world(pages=20, host_gb=0.0025, host_copies=1)
        request = world.start(1, 4000)
        with pytest.raises(HostMemoryExhausted, match="DSV4_HOST_GB"):
            world.save(request)
        world.check_empty()

    def test_more_copies_than_the_arena_keeps(self):
        world = make_world(pages=10, host_copies=1)
        request, _, copy = saved(world, tokens=300)
        with pytest.raises(HostMemoryExhausted, match="DSV4_HOST_COPIES"):
            world.save(request)
        copy.release()
        world.save(request).release()
        world.check_empty()

    def test_a_transfer_that_fails_gives_the_blocks_back(self, monkeypatch):
        world = make_world(pages=10)
        request = world.start(1, 300)

        def broken(jobs, save):
            raise RuntimeError("no transfer")

        monkeypatch.setattr(world.pool.host._mover._path, "move", broken)
        with pytest.raises(RuntimeError, match="no transfer"):
            world.save(request)
        world.check_empty()


def test_a_second_attach_keeps_the_arena():
    """A server may build its queues again; reserving and pinning once more would double the memory."""
    world = make_world(pages=6)
    first = world.pool.host
    assert world.pool.attach_host(Settings(host_gb=0.5)) is first


class TestVerify:
    """DSV4_VERIFY finds what went wrong, and where."""

    def test_a_load_that_misses_a_family(self, monkeypatch):
        world = make_world(pages=10, verify=True)
        request, _, copy = saved(world, tokens=700)
        world.leave(request)
        oracle.poison(world.pool)
        real = world.pool.host._mover._path.move
        first = world.pool.host.side.row_base["c128_state"]

        def forgetful(jobs, save):
            table = jobs.rows.table
            kept = table[(table[:, 0] != first) | (table[:, HOST_OFFSET] == EMPTY)]
            assert len(kept) < len(table)
            fewer = Rows(kept, jobs.rows.most_layers, jobs.rows.most_bytes)
            real(dataclasses.replace(jobs, rows=fewer), save)

        monkeypatch.setattr(world.pool.host._mover._path, "move", forgetful)
        with pytest.raises(VerifyMismatch, match=r"family c128_state, layer 3, position \d+, byte"):
            world.resume(copy, 2)

    def test_a_host_block_overwritten_while_the_request_was_away(self):
        world = make_world(pages=10, verify=True)
        request, _, copy = saved(world, tokens=700)
        memory = world.pool.host.memory
        region = memory.regions[Group.BLOCK]
        block = int(copy.blocks[Group.BLOCK][2])
        memory.region_tensor(Group.BLOCK)[block * region.packed.block_stride + 11] ^= 1
        with pytest.raises(VerifyMismatch, match="family c4_kv, layer 2, from position 515"):
            world.load(copy, request)
        copy.release()

    def test_every_load_is_counted(self):
        world = make_world(pages=10, verify=True)
        request, expected, copy = saved(world, tokens=700)
        world.leave(request)
        oracle.compare(expected, world.read(world.resume(copy, 2)))
        assert world.pool.host.counters.verified == 1

    def test_a_load_without_it_is_not_re_read(self, monkeypatch):
        world = make_world(pages=10)
        monkeypatch.setattr(host_cache_module.verify, "check_device", None)
        request, _, copy = saved(world, tokens=300)
        world.leave(request)
        world.resume(copy, 2)
