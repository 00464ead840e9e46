"""A point of a session comes back with every byte below its page end, and changes nothing else."""

import pytest
from pool_fixture import NEWER_SPECS, SPECS, make_world, point_round_trip
from pretended_device import INTERPRETED, Device

pytestmark = pytest.mark.both_layouts


@pytest.mark.parametrize("spec", {**SPECS, **NEWER_SPECS})
def test_every_layout(spec):
    point_round_trip(make_world(pages=10, **{**SPECS, **NEWER_SPECS}[spec]), pages=(2, 3))


@pytest.mark.parametrize("spec", ["plain", "v41_drafts"])
def test_through_the_kernels(monkeypatch, spec):
    world = make_world(pages=10, **{**SPECS, **NEWER_SPECS}[spec])
    Device(monkeypatch, kernels=INTERPRETED).serve(world.pool.host)
    point_round_trip(world, pages=(1, 3))
