"""Both paths move the same bytes, the right ones, and only those; Triton in two launches."""

from __future__ import annotations

import oracle
import pytest
import torch
from builders import DEVICE, FLASH_RATIOS, POISON, FakeEvent, Served, served, wait
from guarded import count_launches

from sglang_dsv4.cache.families import Group
from sglang_dsv4.errors import SettingError
from sglang_dsv4.transfer.paths import TorchPath, TritonPath, make_path
from sglang_dsv4.transfer.staging import StagingRing
from triton_ops import copy_pages, copy_rows

PATHS = (TorchPath, TritonPath)
SPECS = {
    "plain": {},
    "drafts": {"draft_tokens": 4},
    "bf16 states, fp4 indexer": {"state_dtype": torch.bfloat16, "fp4_indexer": True},
    "stage": {"ratios": (0, 4, 128, 4, 128), "stage": (2, 5)},
    "without c128": {"ratios": (0, 4)},
    "without c4": {"ratios": (0, 128)},
    "window only": {"ratios": (0, 0), "blocks": 0},
}


def move(path, jobs, save: bool, begin: bool) -> None:
    """As a Mover does it. ``begin``: with the head start that a path can have."""
    if begin and save:
        path.begin_save(jobs.pages, jobs.blocks)
    elif begin:
        path.begin_load(jobs.blocks, jobs.image)
    path.move(jobs, save)
    path.end()
    path.guard(None)


def saved_arena(world: Served, path_class, request, begin: bool) -> torch.Tensor:
    """The whole arena, poisoned before the save; blocks other than number 0."""
    world.memory.arena.region.fill_(POISON)
    first, copy = (world.memory.allocate(n, world.side.geometry) for n in (200, request.n))
    move(path_class(world.side, world.memory), world.jobs(copy, request, save=True), True, begin)
    wait()
    copy.release()
    first.release()
    return world.memory.arena.region.clone()


# Every spec once, every length and both ways of beginning more than once.
CASES = [
    ("plain", 130, True), ("plain", 257, False), ("drafts", 389, True), ("bf16 states, fp4 indexer", 130, False),
    ("stage", 257, True), ("without c128", 389, False), ("without c4", 130, True), ("window only", 257, False),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "n", "begin"), CASES)
def test_both_paths_save_and_load_the_same_bytes(spec, n, begin):
    world = served(**SPECS[spec])
    oracle.fill(world.pool, seed=n)
    request = world.start(n, slot=2)
    wanted = oracle.read(world.pool, request.slots, n, 2)
    device = oracle.snapshot(world.pool)
    arenas = [saved_arena(world, path, request, begin) for path in PATHS]
    assert torch.equal(arenas[0], arenas[1])
    assert not bool((arenas[0] == POISON).all())
    nothing = {key: torch.zeros_like(buffer, dtype=torch.bool) for key, buffer in device.items()}
    oracle.assert_only_changed(device, world.pool, nothing)

    # The request comes back elsewhere, in another slot; everything else keeps its bytes.
    oracle.release(world.allocator, request.slots)
    other = world.start(300, slot=0)  # takes the pages that were given back
    again = world.resume(n, slot=1)
    assert not set((again.slots // 256).tolist()) & set((other.slots // 256).tolist())
    results = []
    first, copy = (world.memory.allocate(k, world.side.geometry) for k in (200, n))
    for path_class in PATHS:
        oracle.fill(world.pool, seed=7)
        before = oracle.snapshot(world.pool)
        move(path_class(world.side, world.memory), world.jobs(copy, again, save=False), False, begin)
        wait()
        oracle.compare(wanted, oracle.read(world.pool, again.slots, n, 1))
        oracle.assert_only_changed(before, world.pool, oracle.may_change(world.pool, again.slots, n, 1))
        assert oracle.cleared_ring_ok(world.pool, 1, n)
        results.append(oracle.snapshot(world.pool))
    for key, tensor in results[0].items():
        assert torch.equal(tensor, results[1][key]), key
    assert torch.equal(world.memory.arena.region, arenas[1]), "a load changed the arena"
    copy.release()
    first.release()
    world.memory.check_integrity()


@pytest.mark.parametrize("begin", [True, False], ids=["begun", "not begun"])
@pytest.mark.parametrize("ratios", [(0, 4, 128), FLASH_RATIOS], ids=["3 layers", "43 layers"])
def test_launches_do_not_depend_on_the_layers(monkeypatch, ratios, begin):
    """One for the pages and one for the rows, those that are reset included."""
    world = served(ratios, blocks=3, copies=1, pages=2, swa_pages=2, requests=1)
    launchers = (copy_pages._copy_pages, copy_pages._copy_pages_to_host, copy_rows._copy_rows)
    counted = [count_launches(monkeypatch, launcher, run=False) for launcher in launchers]
    request = world.start(389, slot=0)
    copy = world.memory.allocate(389, world.side.geometry)
    path = TritonPath(world.side, world.memory)
    for save in (True, False):
        move(path, world.jobs(copy, request, save), save, begin)
        near, far, rows = (len(kernel.grids) for kernel in counted)
        assert (near + far, rows) == (1, 1)
        for kernel in counted:
            kernel.grids.clear()
    copy.release()


@pytest.mark.parametrize("path_class", PATHS)
def test_a_load_that_is_begun_writes_nothing_to_the_cache(path_class):
    world = served()
    oracle.fill(world.pool, seed=1)
    before = oracle.snapshot(world.pool)
    copy = world.memory.allocate(389, world.side.geometry)
    jobs = world.jobs(copy, world.start(389, slot=1), save=False)
    path = path_class(world.side, world.memory)
    path.begin_load(jobs.blocks, jobs.image)
    path.end()
    path.guard(None)
    wait()
    for key, tensor in oracle.snapshot(world.pool).items():
        assert torch.equal(tensor, before[key]), key
    copy.release()


@pytest.mark.parametrize("path_class", PATHS)
def test_a_save_that_is_begun_and_given_up_leaves_no_trace(path_class):
    """Neither in blocks of others, nor in the load and the save that follow, whose pages are others."""
    world = served(blocks=9)
    oracle.fill(world.pool, seed=4)
    given_up, request = world.start(257, slot=0), world.start(389, slot=1)
    wanted = oracle.read(world.pool, request.slots, 389, 1)
    path = path_class(world.side, world.memory)
    copies = [world.memory.allocate(n, world.side.geometry) for n in (257, 389)]
    jobs = world.jobs(copies[0], given_up, save=True)
    path.begin_save(jobs.pages, jobs.blocks)
    path.end()
    path.guard(None)
    wait()
    stride = world.memory.regions[Group.PAGED].packed.block_stride
    blocks = world.memory.region_tensor(Group.PAGED).view(-1, stride)
    others = [k for k in range(9) if k not in jobs.blocks.tolist()]
    assert bool((blocks[others] == POISON).all())
    move(path, world.jobs(copies[1], request, save=True), True, begin=False)
    oracle.poison(world.pool)
    again = world.resume(389, slot=2)
    move(path, world.jobs(copies[1], again, save=False), False, begin=False)
    wait()
    oracle.compare(wanted, oracle.read(world.pool, again.slots, 389, 2))
    for copy in copies:
        copy.release()


def test_jobs_without_rows_or_pages():
    """Nothing to do is nothing done, on both paths."""
    world = served()
    oracle.fill(world.pool, seed=1)
    before = oracle.snapshot(world.pool)
    copy = world.memory.allocate(0, world.side.geometry)
    for path_class in PATHS:
        for save in (True, False):
            for begin in (True, False):
                move(path_class(world.side, world.memory), world.jobs(copy, None, save), save, begin)
    wait()
    assert bool((world.memory.arena.region == POISON).all())
    for key, tensor in oracle.snapshot(world.pool).items():
        assert torch.equal(tensor, before[key])
    copy.release()


@pytest.mark.parametrize("begin", [True, False], ids=["begun", "not begun"])
def test_staged_indices_are_those_of_their_own_call(monkeypatch, begin):
    """Five transfers in a row go through a ring of four tables: each kernel sees its own indices."""
    world = served(blocks=9)
    seen, rows_seen, rows_wanted = [], [], []

    def keep(table, host, pages, blocks, save):
        seen.append((pages.tolist(), blocks.tolist()))

    def keep_rows(table, host, segments, most_layers, most_bytes, save, state_dtype):
        assert segments.is_contiguous()
        assert state_dtype == torch.float32
        rows_seen.append((segments.tolist(), most_layers, most_bytes))

    monkeypatch.setattr("sglang_dsv4.transfer.paths.copy_pages", keep)
    monkeypatch.setattr("sglang_dsv4.transfer.paths.copy_rows", keep_rows)
    path, wanted = TritonPath(world.side, world.memory), []
    for _ in range(5):
        request = world.start(257, slot=0)
        copy = world.memory.allocate(257, world.side.geometry)
        jobs = world.jobs(copy, request, save=True)
        move(path, jobs, True, begin)
        rows_wanted.append((jobs.rows_in_arena().tolist(), jobs.rows.most_layers, jobs.rows.most_bytes))
        wanted.append(([int(request.slots[0]) // 256, int(request.slots[256]) // 256], copy.lease.blocks))
        copy.release()
        oracle.release(world.allocator, request.slots)
    assert [pages for pages, _ in seen] == [pages for pages, _ in wanted]
    assert [blocks for _, blocks in seen] == [b[Group.PAGED].tolist() for _, b in wanted]
    assert rows_seen == rows_wanted


@pytest.mark.parametrize("save", [True, False], ids=["save", "load"])
@pytest.mark.parametrize("failed", [True, False], ids=["given up", "moved"])
def test_the_tables_of_a_transfer_wait_for_its_event(failed, save):
    """Whatever a kernel may still read is reused only behind the event, moved or not."""
    world = served()
    copy, request = world.memory.allocate(389, world.side.geometry), world.start(389, slot=1)
    jobs, event = world.jobs(copy, request, save), FakeEvent()
    path = TritonPath(world.side, world.memory)
    path.begin_save(jobs.pages, jobs.blocks) if save else path.begin_load(jobs.blocks, jobs.image)
    if not failed:
        path.move(jobs, save)
    path.end()
    path.guard(event)
    taken = sum(guard is event for guard in path._tables._events)
    for _ in range(StagingRing.SLOTS):
        path._tables.put(jobs.blocks)
    path.guard(None)
    assert event.waits == taken
    assert taken or (failed and not save)
    wait()
    copy.release()


def test_the_path_is_chosen_by_name():
    world = served()
    assert type(make_path("torch", world.side, world.memory)) is TorchPath
    assert type(make_path("triton", world.side, world.memory)) is TritonPath
    auto = make_path("auto", world.side, world.memory)
    assert auto.name == ("staged" if DEVICE == "cuda" else "torch")
    if DEVICE != "cuda":
        with pytest.raises(SettingError, match="needs a GPU"):
            make_path("staged", world.side, world.memory)
