"""Points of sessions on a real card: every pool, by the copier and by its reference."""

import pytest
from pool_fixture import NEWER_SPECS, SPECS, make_world, point_round_trip


@pytest.mark.both_layouts
@pytest.mark.parametrize("transfer", ["auto", "torch"])
@pytest.mark.parametrize("spec", {**SPECS, **NEWER_SPECS})
def test_every_layout(spec, transfer):
    world = make_world(device="cuda", transfer=transfer, verify=True, **{**SPECS, **NEWER_SPECS}[spec])
    point_round_trip(world, pages=(2, 16))
