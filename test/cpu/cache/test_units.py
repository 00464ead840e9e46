"""A request takes the units that its pages and its live rows fill, at every length."""

import dataclasses

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from made_families import geometries

from sglang_dsv4.cache.families import Geometry, families
from sglang_dsv4.cache.units import Units

EVERY = range(128)  # what is left of any block: the longest has 128 tokens


def tail_bytes(g: Geometry, tokens: int) -> int:
    """Bytes of the live rows: each layer padded to 128, each family to 256 but for the last."""
    at = 0
    for family in families(g):
        if family.period is not None:
            open_tokens = tokens % family.period
            rows = min(tokens, family.lag + open_tokens)
            layer = -(-rows * family.row_bytes // 128) * 128
            at = -(-at // 256) * 256 + layer * len(family.layers)
    return at


def unit_bytes(g: Geometry) -> int:
    """Bytes of one page of all layers; without any, a quarter of the longest tail. Both rounded up to 4,096."""
    at = 0
    for family in families(g):
        if family.period is None:
            at = -(-at // 256) * 256 + family.page_bytes * len(family.layers)
    at = at or -(-max(tail_bytes(g, 1_024 + left) for left in EVERY) // 4)
    return -(-at // 4_096) * 4_096


@settings(max_examples=40, deadline=None)
@given(g=geometries(), tokens=st.one_of(st.integers(0, 1_200), st.integers(0, 2**20)))
@example(g=Geometry((0,) * 8 + (128,), page_size=128, state_bytes={128: 2}), tokens=60)  # pads of layers fill a unit
def test_units_of_any_length(g, tokens):
    units, nbytes = Units.of(g), unit_bytes(g)
    assert (units.nbytes, units.page_size) == (nbytes, g.page_size)
    assert units.pages(tokens) == -(-tokens // g.page_size)
    assert units.tail(tokens) == -(-tail_bytes(g, tokens) // nbytes)
    assert units.count(tokens) == units.pages(tokens) + units.tail(tokens)
    longest = max(-(-tail_bytes(g, 1_024 + left) // nbytes) for left in EVERY)
    assert (units.longest_tail, units.least) == (longest, 1 + longest)


@pytest.mark.parametrize("page", [128, 256, 512])
def test_lengths_at_which_the_table_turns(page):
    """No token takes nothing; below one page fewer rows may live than at the same remainder later."""
    g = Geometry((0, 4, 128), page_size=page)
    units = Units.of(g)
    assert units.count(0) == 0
    for tokens in (1, 2, page - 1, page, page + 1, 2 * page - 1, 2 * page, 7 * page + 3):
        assert units.tail(tokens) == -(-tail_bytes(g, tokens) // unit_bytes(g)), tokens


@pytest.mark.parametrize("g", [Geometry((0,)), Geometry((1, 2))], ids=["window only", "V4.1 without a source"])
def test_pages_take_a_unit_on_a_stage_that_has_no_page(g):
    """Else it would never run out where the others do."""
    assert all(family.period is not None for family in families(g))
    units = Units.of(g)
    assert (units.pages(1_000), units.tail(1_000), units.longest_tail) == (4, 4, 4)


def test_tails_that_ranks_agreed_on_count():
    units = Units.of(Geometry((0, 4, 128)))
    longer = dataclasses.replace(units, tails=tuple(tail + 2 for tail in units.tails))
    assert longer.count(1_000) == units.count(1_000) + 2 and longer.least == units.least + 2
