"""Round trips on a real card: every pool, by each of the ways in which bytes move."""

import pytest
from pool_fixture import LENGTHS, SPECS, make_world, round_trip


@pytest.mark.parametrize("transfer", ["auto", "torch"])
@pytest.mark.parametrize("spec", SPECS)
def test_every_length_of_the_grid(spec, transfer):
    world = make_world(device="cuda", transfer=transfer, verify=True, **SPECS[spec])
    for tokens in LENGTHS:
        round_trip(world, tokens, seed=tokens)
