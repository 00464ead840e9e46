"""The byte layout against the published table, number by number. No other test of the package says these numbers.

A new family asks for its numbers here: its line in FAMILIES, and what it adds to a block.
"""

from __future__ import annotations

import dataclasses

import pytest
from builders import FLASH_RATIOS, PRO_RATIOS

from sglang_dsv4.cache.families import (
    Geometry,
    Group,
    c4_tail_start,
    c128_pending_start,
    families,
    kv_page_bytes,
    stacked,
    whole_history,
    window_start,
)
from sglang_dsv4.cache.groups import init_groups
from sglang_dsv4.cache.packed import PackedBlock
from sglang_dsv4.errors import GeometryError

PAGED, WINDOW, REQUEST = Group.PAGED, Group.WINDOW, Group.REQUEST
KV, STATE, INNER = (576, 8), (2 * 2 * 512 * 4,), (2 * 2 * 128 * 4,)
# name, what the reference calls it, group, tokens a row; rows and bytes of a device page, offsets of its planes, bytes
# of a row by plane; rows and bytes of a host slot, offsets of its planes; whether it is a ring
FAMILIES = [
    ("c4_kv", "cmp", PAGED, 4, 64, 37_440, (0, 36_864), KV, 64, 37_440, (0, 36_864), False),
    ("c4_indexer", "idx", PAGED, 4, 64, 8_448, (0, 8_192), (128, 4), 64, 8_448, (0, 8_192), False),
    ("c128_kv", "cmp", PAGED, 128, 2, 1_728, (0, 1_152), KV, 2, 1_728, (0, 1_152), False),
    ("swa_kv", "ori", WINDOW, 1, 256, 149_760, (0, 147_456), KV, 128, 74_752, (0, 73_728), False),
    ("c4_state", "csa_state", WINDOW, 1, 8, 65_536, (0,), STATE, 8, 65_536, (0,), True),
    ("c4_indexer_state", "csa_inner_state", WINDOW, 1, 8, 16_384, (0,), INNER, 8, 16_384, (0,), True),
    ("c128_state", "hca_state", REQUEST, 1, 128, 524_288, (0,), (2 * 512 * 4,), 128, 524_288, (0,), True),
]
# bytes of a packed block of each group
STRIDES = {"flash": (999_424, 4_935_680, 10_485_760), "pro": (1_433_600, 7_020_544, 16_252_928)}


def named(**changes):
    g = Geometry(**{"ratios": FLASH_RATIOS, **changes})
    return {family.name: family for family in families(g)}


def numbers(family):
    return (
        family.name, family.reference_name, family.group, family.ratio, family.rows, family.page_bytes,
        tuple(p.offset for p in family.planes), tuple(p.row_bytes for p in family.planes), family.host_rows,
        family.host_bytes, tuple(p.offset for p in family.host_planes), family.ring,
    )  # fmt: skip


def test_every_number_of_every_family():
    assert [numbers(family) for family in named().values()] == FAMILIES


def test_longer_rings_change_the_device_alone():
    """With drafts rings are twice as long; a host slot stays as it is."""
    for before, after in zip(FAMILIES, named(c4_ring=16, c128_ring=256).values(), strict=True):
        times = 2 if before[-1] else 1
        assert numbers(after) == (*before[:4], before[4] * times, before[5] * times, *before[6:])


def test_fp4_indexer_and_bf16_states():
    found = named(index_value_bytes=64, c4_state_bytes=2, c128_state_bytes=2)
    index = found["c4_indexer"]
    assert (index.row_bytes, index.page_bytes) == (68, 64 * 68)
    assert [(p.offset, p.row_bytes) for p in index.planes] == [(0, 64), (4_096, 4)]
    widths = [found[name].row_bytes for name in ("c4_state", "c4_indexer_state", "c128_state")]
    assert widths == [4_096, 1_024, 2_048]


@pytest.mark.parametrize(("ratios", "strides"), [(FLASH_RATIOS, "flash"), (PRO_RATIOS, "pro")])
def test_bytes_of_a_block(ratios, strides):
    packed = [PackedBlock.of(spec).block_stride for spec in init_groups(Geometry(ratios)).values()]
    assert tuple(packed) == STRIDES[strides]


@pytest.mark.parametrize(
    ("ratios", "growing", "window", "states", "pending"),
    [(FLASH_RATIOS, 3_850, 3.2e6, 1.7e6, 10.5e6), (PRO_RATIOS, 5_511, 4.6e6, 2.5e6, 16.3e6)],
    ids=["flash", "pro"],
)
def test_model_totals(ratios, growing, window, states, pending):
    """What the model's authors publish: bytes a token, and bytes a request."""
    found = named(ratios=ratios)

    def total(*names):
        return sum(found[n].row_bytes * found[n].host_rows * len(found[n].layers) for n in names)

    assert round(total("c4_kv", "c4_indexer", "c128_kv") / 256) == growing
    assert total("swa_kv") == pytest.approx(window, abs=0.05e6)
    assert total("c4_state", "c4_indexer_state") == pytest.approx(states, abs=0.05e6)
    assert total("c128_state") == pytest.approx(pending, abs=0.06e6)


@pytest.mark.parametrize("rows", [1, 2, 3, 63, 64, 71, 72, 73, 256])
def test_kv_pages_are_padded_to_576(rows):
    padded = next(size for size in range(0, 10**6, 576) if size >= 584 * rows)
    assert kv_page_bytes(rows) == padded


def test_layers_of_a_pipeline_stage_are_absolute():
    found = named(ratios=(4, 128, 0, 4), first_layer=10)
    assert found["swa_kv"].layers == (10, 11, 12, 13)
    for name in ("c4_kv", "c4_indexer", "c4_state", "c4_indexer_state"):
        assert found[name].layers == (10, 13)
    assert found["c128_kv"].layers == found["c128_state"].layers == (11,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ratios": (0, 2)}, "ratio 2 is not covered"),
        ({"ratios": (4, -4)}, "ratio -4 is not covered"),
        ({"ratios": (4,), "page_size": 2}, "page_size 2 .* ratio 4"),
        ({"ratios": (0, 128), "page_size": 192}, "page_size 192 .* ratio 128"),
        ({"page_size": 0}, "page_size 0"),
        ({"window": 7}, "window 7"),
        ({"window": 257}, "window 257"),
        ({"c4_ring": 4}, "c4_ring 4"),
        ({"c4_ring": 12}, "c4_ring 12"),
        ({"c128_ring": 64}, "c128_ring 64"),
        ({"c128_ring": 192}, "c128_ring 192"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(GeometryError, match=message):
        Geometry(**{"ratios": FLASH_RATIOS, **changes})


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("c4_indexer", {"ring": True, "planes": stacked(64, 128)}, "whole pages"),
        ("c4_kv", {"host_rows": 63}, "the rows of a page"),
        ("c4_kv", {"page_bytes": 37_448}, "multiple of 16"),
        ("c4_kv", {"page_bytes": 37_360}, "does not hold 64 rows"),
        ("swa_kv", {"ratio": 4}, "stands for one token"),
        ("swa_kv", {"planes": stacked(256, 576, 4)}, "multiples of 8"),
        ("c4_state", {"page_bytes": 65_536 + 16}, "no padding"),
        ("c128_state", {"ring": False}, "ring of one plane"),
        ("c128_state", {"planes": stacked(128, 2_048, 2_048)}, "ring of one plane"),
        (
            "c128_state",
            {"planes": stacked(128, 4_088), "page_bytes": 128 * 4_088},
            "row of 4088 bytes",
        ),
    ],
)
def test_a_family_that_cannot_be_moved_is_refused_by_name(name, changes, message):
    with pytest.raises(GeometryError, match=f"family {name}: .*{message}"):
        dataclasses.replace(named()[name], **changes)


@pytest.mark.parametrize("n", [0, 1, 3, 4, 5, 7, 8, 126, 127, 128, 129, 255, 256, 1000, 4095, 4096, 4097])
def test_first_live_positions(n):
    g = Geometry(FLASH_RATIOS)
    # The step at position n reads positions n-127..n of its window, itself included.
    assert window_start(g, n) == min((p for p in range(n) if n - p < 128), default=0)
    # Ratio 4 keeps the open block (n % 4 rows) and the whole block before it.
    assert c4_tail_start(g, n) == min((p for p in range(n) if p // 4 >= n // 4 - 1), default=0)
    pending = [p for p in range(n) if p // 128 == n // 128]
    assert c128_pending_start(g, n) == (pending[0] if pending else n)


def test_what_lives_of_each_family():
    rules = {name: family.first_live for name, family in named().items()}
    assert rules == {
        "c4_kv": whole_history, "c4_indexer": whole_history, "c128_kv": whole_history, "swa_kv": window_start,
        "c4_state": c4_tail_start, "c4_indexer_state": c4_tail_start, "c128_state": c128_pending_start,
    }  # fmt: skip
