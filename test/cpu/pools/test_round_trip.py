"""A request comes back with every byte that later steps may read, and changes nothing else."""

import dataclasses

import pytest
import units_by_hand
from pool_fixture import LENGTHS, NEWER_SPECS, SPECS, V41, make_world, point_round_trip, round_trip
from pretended_device import INTERPRETED, Device

from sglang_dsv4.hostmem.pool import UnitPool
from sglang_dsv4.pools import token_to_kv

GRID = tuple(n for n in LENGTHS if n not in (4095, 4096))  # one long request here; on a GPU all of them
CORNERS = (1, 4, 127, 129, 256, 385, 513, 1000)
ALL_SPECS = {**SPECS, **NEWER_SPECS, "without_c4": {"ratios": (0, 128)}, "window_only": {"ratios": (0, 0)}}
# Through the interpreted kernels, which are slow: some corners where families meet, else two. test_templates has every
# word that moves at each length, and the kernels' own tests the pages and rows of any request.
THROUGH_KERNELS = dict.fromkeys(("all_at_once", "online", "v41_drafts", "v41_short_swa_pages"), (1, 127, 256, 385, 513))
THROUGH_KERNELS |= dict.fromkeys(("plain", "stage_without_c128", "without_c4", "window_only"), (128, 257))
WAYS = [*((spec, "stock") for spec in THROUGH_KERNELS), ("all_at_once", "page-major")]


@pytest.mark.both_layouts
@pytest.mark.parametrize("spec", ALL_SPECS)
def test_every_length_of_the_grid(spec):
    """All of the grid where families meet, its corners elsewhere."""
    lengths = GRID if spec in {"plain", "online", "all_at_once", "v41", "v41_drafts"} else CORNERS
    for pages, some in ((6, [n for n in lengths if n < 1000]), (20, [n for n in lengths if n >= 1000])):
        world = make_world(pages=pages, **ALL_SPECS[spec])
        for number, tokens in enumerate(some):
            round_trip(world, tokens, seed=tokens, evict=number % 2 == 1)


@pytest.mark.parametrize(("spec", "layout"), WAYS)
def test_lengths_of_the_grid_through_the_kernels(monkeypatch, spec, layout):
    monkeypatch.setenv("DSV4_LAYOUT", layout)
    world = make_world(pages=7, **ALL_SPECS[spec])
    Device(monkeypatch, kernels=INTERPRETED).serve(world.pool.host)
    for number, tokens in enumerate(THROUGH_KERNELS[spec]):
        round_trip(world, tokens, seed=tokens, evict=number % 2 == 1)


@pytest.mark.parametrize(
    ("spec", "transfer"), [("stage", "reference"), ("stage", "kernels"), ("window_only", "verify")]
)
def test_a_stage_whose_tail_is_longer_elsewhere(monkeypatch, spec, transfer):
    """All stages of a pipeline take the units of the longest tail: here the last ones hold nothing."""
    real = token_to_kv.wanted_size

    def agreed(*given):
        size = real(*given)
        tails = tuple(tail + 3 for tail in size.units.tails)
        return size.agreed([size, dataclasses.replace(size, units=dataclasses.replace(size.units, tails=tails))])

    chosen = UnitPool._choose
    monkeypatch.setattr(UnitPool, "_choose", lambda *given: chosen(*given)[::-1])  # no two are neighbours
    monkeypatch.setattr(token_to_kv, "wanted_size", agreed)
    world = make_world(pages=10, verify=transfer == "verify", **ALL_SPECS[spec])
    if transfer == "kernels":
        Device(monkeypatch, kernels=INTERPRETED).serve(world.pool.host)
    for tokens in (257,) if transfer == "kernels" else (1, 128, 257, 511):
        assert world.pool.host.memory.units.count(tokens) == units_by_hand.units(world.pool, tokens) + 3
        round_trip(world, tokens, seed=tokens)
    point_round_trip(world, pages=(1, 2))


@pytest.mark.parametrize("engine", [None, "sm_100"])
def test_tiles_of_v41_that_make_no_page_are_left_over(engine):
    world = make_world(pages=6, engine=engine, **V41)
    side = world.pool.host.buffers
    for ratio in (1, 2):
        family = next(f for f in side.families if f.name == f"c{ratio}_indexer")
        raw = world.pool.index_pools[ratio].index_k_with_scale_buffer[0]
        assert raw.shape[1] * family.tiles == family.page_bytes
        assert len(side.buffers[family.name][0]) == len(raw) // family.tiles >= 7
    round_trip(world, 513)
