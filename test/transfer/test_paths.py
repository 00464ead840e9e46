"""Both paths move the same bytes, the right ones, and only those; Triton in three launches at most."""

from __future__ import annotations

import oracle
import pytest
import torch
from builders import DEVICE, FLASH_RATIOS, POISON, Counted, Served, served, wait

from sglang_dsv4.errors import SettingError
from sglang_dsv4.transfer.jobs import describe
from sglang_dsv4.transfer.paths import TorchPath, TritonPath, make_path
from triton_ops import clear_rings, copy_pages, copy_rows

pytestmark = pytest.mark.cpu

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


def saved_arena(world: Served, path_class, request) -> torch.Tensor:
    """The whole arena, poisoned before the save; blocks other than number 0."""
    world.memory.arena.region.fill_(POISON)
    first, copy = (world.memory.allocate(n, world.side.geometry) for n in (200, request.n))
    path_class(world.side, world.memory).move(describe(world.side, copy, world.plan(request)), save=True)
    wait()
    copy.release()
    first.release()
    return world.memory.arena.region.clone()


@pytest.mark.parametrize("n", [130, 257, 389])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_both_paths_save_and_load_the_same_bytes(spec, n):
    world = served(**spec)
    oracle.fill(world.pool, seed=n)
    request = world.start(n, slot=2)
    wanted = oracle.read(world.pool, request.slots, n, 2)
    device = oracle.snapshot(world.pool)
    arenas = [saved_arena(world, path, request) for path in PATHS]
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
        path = path_class(world.side, world.memory)
        path.clear(1)
        path.move(describe(world.side, copy, world.plan(again)), save=False)
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


@pytest.mark.parametrize("ratios", [(0, 4, 128), FLASH_RATIOS], ids=["3 layers", "43 layers"])
def test_launches_do_not_depend_on_the_layers(monkeypatch, ratios):
    world = served(ratios, blocks=3, copies=1, pages=2, swa_pages=2, requests=1)
    kernels = {}
    for module, name in (
        (copy_pages, "_copy_pages_kernel"), (copy_rows, "_copy_rows_kernel"), (clear_rings, "_clear_rings_kernel"),
    ):  # fmt: skip
        kernels[name] = Counted()
        monkeypatch.setattr(module, name, kernels[name])
    request = world.start(389, slot=0)
    copy = world.memory.allocate(389, world.side.geometry)
    jobs = describe(world.side, copy, world.plan(request))
    path = TritonPath(world.side, world.memory)
    for save, clears in ((True, 0), (False, 1)):
        for kernel in kernels.values():
            kernel.grids.clear()
        if not save:
            path.clear(0)
        path.move(jobs, save=save)
        assert [len(kernel.grids) for kernel in kernels.values()] == [1, 1, clears]
    copy.release()


def test_jobs_without_rows_or_pages():
    """Nothing to do is nothing done, on both paths."""
    world = served()
    oracle.fill(world.pool, seed=1)
    before = oracle.snapshot(world.pool)
    copy = world.memory.allocate(0, world.side.geometry)
    jobs = describe(world.side, copy, ())
    for path_class in PATHS:
        for save in (True, False):
            path_class(world.side, world.memory).move(jobs, save)
    wait()
    assert bool((world.memory.arena.region == POISON).all())
    for key, tensor in oracle.snapshot(world.pool).items():
        assert torch.equal(tensor, before[key])
    copy.release()


def test_staged_indices_are_those_of_their_own_call(monkeypatch):
    """Five transfers in a row go through a ring of four tables: each kernel sees its own indices."""
    world = served(blocks=9)
    seen, rows_seen, rows_wanted = [], [], []

    def keep(table, host, pages, blocks, save):
        seen.append((pages.tolist(), blocks.tolist()))

    def keep_rows(table, host, segments, most_layers, most_bytes, save):
        assert segments.is_contiguous()
        rows_seen.append((segments.tolist(), most_layers, most_bytes))

    monkeypatch.setattr("sglang_dsv4.transfer.paths.copy_pages", keep)
    monkeypatch.setattr("sglang_dsv4.transfer.paths.copy_rows", keep_rows)
    path, wanted = TritonPath(world.side, world.memory), []
    for _ in range(5):
        request = world.start(257, slot=0)
        copy = world.memory.allocate(257, world.side.geometry)
        jobs = describe(world.side, copy, world.plan(request))
        path.move(jobs, save=True)
        path.guard(None)
        rows_wanted.append((jobs.rows_in_arena().tolist(), jobs.most_layers, jobs.most_bytes))
        wanted.append(([int(request.slots[0]) // 256, int(request.slots[256]) // 256], copy.lease.blocks))
        copy.release()
        oracle.release(world.allocator, request.slots)
    assert [pages for pages, _ in seen] == [pages for pages, _ in wanted]
    assert [blocks for _, blocks in seen] == [next(iter(b.values())).tolist() for _, b in wanted]
    assert rows_seen == rows_wanted


def test_the_path_is_chosen_by_name():
    world = served()
    assert type(make_path("torch", world.side, world.memory)) is TorchPath
    assert type(make_path("triton", world.side, world.memory)) is TritonPath
    auto = make_path("auto", world.side, world.memory)
    assert auto.name == ("staged" if DEVICE == "cuda" else "torch")
    if DEVICE != "cuda":
        with pytest.raises(SettingError, match="needs a GPU"):
            make_path("staged", world.side, world.memory)
