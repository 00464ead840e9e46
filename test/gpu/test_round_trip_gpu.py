"""Round trips on a real card: every pool, by the copier and by its reference."""

import pytest
from pool_fixture import LENGTHS, NEWER_SPECS, SPECS, make_world, round_trip

NEWER = [pytest.param(spec, id=name) for name, spec in NEWER_SPECS.items()]


@pytest.mark.both_layouts
@pytest.mark.parametrize("transfer", ["auto", "torch"])
@pytest.mark.parametrize("spec", [*(pytest.param(spec, id=name) for name, spec in SPECS.items()), *NEWER])
def test_every_length_of_the_grid(spec, transfer):
    world = make_world(device="cuda", transfer=transfer, verify=True, **spec)
    lengths = LENGTHS if transfer == "auto" else LENGTHS[::3]  # the reference is slow, and every length runs on the CPU
    for tokens in lengths:
        round_trip(world, tokens, seed=tokens)
