"""A request comes back with every byte that later steps may read, and changes nothing else."""

import pytest
from pool_fixture import LENGTHS, NEWER_SPECS, SPECS, make_world, round_trip
from pretended_device import INTERPRETED, Device

pytestmark = pytest.mark.both_layouts

INTERPRETED_SPECS = ("v41_drafts", "v41_short_swa_pages")
CORNERS = (1, 4, 127, 129, 256, 385, 513, 1000)


ALL_SPECS = {**SPECS, **NEWER_SPECS}


@pytest.mark.parametrize("spec", [*SPECS, *NEWER_SPECS])
def test_every_length_of_the_grid(spec):
    """All of the grid where families meet, its corners elsewhere."""
    lengths = LENGTHS if spec in {"plain", "all_at_once", "v41", "v41_drafts"} else CORNERS
    for pages, some in ((6, [n for n in lengths if n < 1000]), (20, [n for n in lengths if n >= 1000])):
        world = make_world(pages=pages, **ALL_SPECS[spec])
        for number, tokens in enumerate(some):
            round_trip(world, tokens, seed=tokens, evict=number % 2 == 1)


@pytest.mark.parametrize("spec", ["all_at_once", *INTERPRETED_SPECS])
def test_the_corners_of_the_grid_through_the_kernels(monkeypatch, spec):
    world = make_world(pages=7, **ALL_SPECS[spec])
    Device(monkeypatch, kernels=INTERPRETED).serve(world.pool.host)
    for number, tokens in enumerate(CORNERS):
        round_trip(world, tokens, seed=tokens, evict=number % 2 == 1)
