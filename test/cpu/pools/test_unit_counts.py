"""The units of every pool are those that its buffers come to, counted by hand; and what they hold."""

import itertools
from collections.abc import Sequence

import pytest
import units_by_hand
from pool_fixture import NEWER_SPECS, SPECS, make_world

from sglang_dsv4.cache.families import Geometry
from sglang_dsv4.cache.units import Units
from sglang_dsv4.hostmem.pool import UnitPool
from sglang_dsv4.hostmem.sizing import PoolSize, arena_size
from sglang_dsv4.settings import Settings
from sglang_dsv4.testing.standalone import FLASH_RATIOS

EVERY = {**SPECS, **NEWER_SPECS, "no history": {"ratios": (0, 0)}, "c128 alone": {"ratios": (128,)}}


@pytest.mark.parametrize("spec", EVERY)
def test_units_are_counted_as_by_hand(spec: str) -> None:
    pool = make_world(pages=3, **EVERY[spec]).pool
    units, stride = pool.host.memory.units, units_by_hand.unit_bytes(pool)
    assert units.nbytes == stride
    for tokens in (0, 1, 3, 4, 127, 128, 255, 256, 257, 383, 511, 512, 513, 639, 1_000, 2_559, 70_001):
        pages, tail = -(-tokens // 256), -(-units_by_hand.tail_bytes(pool, tokens) // stride)
        assert (units.pages(tokens), units.tail(tokens)) == (pages, tail), tokens


@pytest.mark.parametrize(("lengths", "least"), [(range(1_921, 2_049), 200), ((2_047,), 170)], ids=["mean", "longest"])
def test_retracts_of_flash_that_four_gib_hold(lengths: Sequence[int], least: int) -> None:
    """Of eight pages, and a tail of any length; of 2,047 tokens it has all that a tail can have."""
    size = arena_size(Units.of(Geometry(FLASH_RATIOS)), PoolSize(1, 1), Settings(host_gb=4), ram=1 << 60)
    pool, count = UnitPool(size.count), 0
    for tokens in itertools.cycle(lengths):
        if pool.available < size.units.count(tokens):
            break
        pool.take(size.units.count(tokens))
        count += 1
    assert count >= least
