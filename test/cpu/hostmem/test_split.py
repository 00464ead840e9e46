"""Ranks that share an arena save even parts, each unit once."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dsv4.cache.families import Geometry
from sglang_dsv4.cache.units import Units
from sglang_dsv4.hostmem.split import split
from sglang_dsv4.testing.standalone import FLASH_RATIOS, PRO_RATIOS


@given(ranks=st.integers(1, 16), count=st.integers(0, 300), saved=st.integers(0, 300))
def test_each_new_unit_is_one_ranks_and_no_rank_has_two_more_than_another(ranks, count, saved):
    shares = split(ranks, count, saved)
    assert list(itertools.chain(*shares)) == list(range(saved, saved + count))
    assert len(shares) == ranks and max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(
    ("ratios", "tokens", "most"),
    [
        # a rank that had a whole window and request block saved 10.4 MB of Flash, and 16.1 MB of Pro
        (FLASH_RATIOS, 2_047, 10_400_000 // 3),
        (FLASH_RATIOS, 16_383, 10_100_000),
        (PRO_RATIOS, 2_047, 16_100_000 // 3),
    ],
)
def test_the_tail_is_no_more_for_one_rank_than_for_another(ratios, tokens, most):
    units = Units.of(Geometry(ratios))
    busiest = max(len(share) for share in split(8, units.count(tokens)))
    assert busiest * units.nbytes <= most
