"""The byte layout against the published table, number by number."""

from __future__ import annotations

import pytest
from builders import FLASH_RATIOS, PRO_RATIOS

from sglang_dsv4.cache.families import (
    Address,
    Geometry,
    Group,
    c4_tail_start,
    c128_pending_start,
    families,
    kv_page_bytes,
    window_start,
)
from sglang_dsv4.errors import GeometryError

NAMES = ("c4_kv", "c4_indexer", "c128_kv", "swa_kv", "c4_state", "c4_indexer_state", "c128_state")


def named(**changes):
    g = Geometry(**{"ratios": FLASH_RATIOS, **changes})
    return {family.name: family for family in families(g)}


def test_the_seven_families_and_their_reference_names():
    found = named()
    assert tuple(found) == NAMES
    assert {name: family.reference_name for name, family in found.items()} == {
        "swa_kv": "ori",
        "c4_kv": "cmp",
        "c128_kv": "cmp",
        "c4_indexer": "idx",
        "c4_state": "csa_state",
        "c4_indexer_state": "csa_inner_state",
        "c128_state": "hca_state",
    }


@pytest.mark.parametrize(
    ("name", "rows", "row_bytes", "page_bytes", "planes"),
    [
        ("swa_kv", 256, 584, 149_760, [(0, 576), (147_456, 8)]),
        ("c4_kv", 64, 584, 37_440, [(0, 576), (36_864, 8)]),
        ("c128_kv", 2, 584, 1_728, [(0, 576), (1_152, 8)]),
        ("c4_indexer", 64, 132, 8_448, [(0, 128), (8_192, 4)]),
        ("c4_state", 8, 2 * 2 * 512 * 4, 65_536, [(0, 8_192)]),
        ("c4_indexer_state", 8, 2 * 2 * 128 * 4, 16_384, [(0, 2_048)]),
        ("c128_state", 128, 2 * 512 * 4, 524_288, [(0, 4_096)]),
    ],
)
def test_device_pages(name, rows, row_bytes, page_bytes, planes):
    family = named()[name]
    assert (family.rows, family.row_bytes, family.page_bytes) == (rows, row_bytes, page_bytes)
    assert [(p.offset, p.row_bytes) for p in family.planes] == planes


@pytest.mark.parametrize(
    ("name", "host_rows", "host_bytes", "planes"),
    [
        ("swa_kv", 128, 128 * 584, [(0, 576), (128 * 576, 8)]),
        ("c4_kv", 64, 37_440, [(0, 576), (36_864, 8)]),
        ("c128_kv", 2, 1_728, [(0, 576), (1_152, 8)]),
        ("c4_indexer", 64, 8_448, [(0, 128), (8_192, 4)]),
        ("c4_state", 8, 65_536, [(0, 8_192)]),
        ("c4_indexer_state", 8, 16_384, [(0, 2_048)]),
        ("c128_state", 128, 524_288, [(0, 4_096)]),
    ],
)
@pytest.mark.parametrize("rings", [(8, 128), (16, 256)])
def test_host_slots_do_not_depend_on_the_rings(name, host_rows, host_bytes, planes, rings):
    family = named(c4_ring=rings[0], c128_ring=rings[1])[name]
    assert (family.host_rows, family.host_bytes) == (host_rows, host_bytes)
    assert [(p.offset, p.row_bytes) for p in family.host_planes] == planes


@pytest.mark.parametrize(
    ("name", "interleaved", "layer_stride", "row_strides"),
    [
        ("swa_kv", False, 128 * 584, (576, 8)),
        ("c4_kv", False, 37_440, (576, 8)),
        ("c128_kv", False, 1_728, (576, 8)),
        ("c4_indexer", False, 8_448, (128, 4)),
        ("c4_state", False, 65_536, (8_192,)),
        ("c4_indexer_state", False, 16_384, (2_048,)),
        ("c128_state", True, 4_096, (20 * 4_096,)),  # 20 layers of ratio 128
    ],
)
@pytest.mark.parametrize("rings", [(8, 128), (16, 256)])
def test_strides_in_a_host_block(name, interleaved, layer_stride, row_strides, rings):
    family = named(c4_ring=rings[0], c128_ring=rings[1])[name]
    assert (family.interleaved, family.host_layer_stride) == (interleaved, layer_stride)
    assert tuple(family.host_row_stride(k) for k in range(len(family.planes))) == row_strides


def test_strides_of_one_layer_and_of_bf16_states():
    found = named(ratios=(0, 128, 4), c128_state_bytes=2)["c128_state"]
    assert (found.host_layer_stride, found.host_row_stride(0)) == (2_048, 2_048)
    found = named(ratios=(128, 128, 0, 128), c128_state_bytes=2)["c128_state"]
    assert (found.host_layer_stride, found.host_row_stride(0)) == (2_048, 6_144)


def test_groups_addresses_ratios():
    expected = {
        "swa_kv": (Group.WINDOW, Address.SWA_PAGE, 1),
        "c4_kv": (Group.PAGED, Address.FULL_PAGE, 4),
        "c4_indexer": (Group.PAGED, Address.FULL_PAGE, 4),
        "c128_kv": (Group.PAGED, Address.FULL_PAGE, 128),
        "c4_state": (Group.WINDOW, Address.SWA_PAGE, 1),
        "c4_indexer_state": (Group.WINDOW, Address.SWA_PAGE, 1),
        "c128_state": (Group.REQUEST, Address.REQUEST_SLOT, 1),
    }
    assert {f.name: (f.group, f.address, f.ratio) for f in named().values()} == expected
    assert {f.name for f in named().values() if f.whole_pages} == {"c4_kv", "c4_indexer", "c128_kv"}


def test_fp4_indexer_and_bf16_states():
    found = named(index_value_bytes=64, c4_state_bytes=2, c128_state_bytes=2)
    index = found["c4_indexer"]
    assert (index.row_bytes, index.page_bytes) == (68, 64 * 68)
    assert [(p.offset, p.row_bytes) for p in index.planes] == [(0, 64), (4_096, 4)]
    widths = [found[name].row_bytes for name in ("c4_state", "c4_indexer_state", "c128_state")]
    assert widths == [4_096, 1_024, 2_048]


def test_rings_with_speculation():
    found = named(c4_ring=16, c128_ring=256)
    assert (found["c4_state"].rows, found["c4_state"].page_bytes) == (16, 16 * 8_192)
    assert (found["c4_indexer_state"].rows, found["c4_indexer_state"].page_bytes) == (16, 16 * 2_048)
    assert (found["c128_state"].rows, found["c128_state"].page_bytes) == (256, 256 * 4_096)


@pytest.mark.parametrize(
    ("ratios", "layers", "c4", "c128", "growing", "window", "states", "pending"),
    [
        (FLASH_RATIOS, 43, 21, 20, 3_850, 3.2e6, 1.7e6, 10.5e6),
        (PRO_RATIOS, 61, 30, 31, 5_511, 4.6e6, 2.5e6, 16.3e6),
    ],
    ids=["flash", "pro"],
)
def test_model_totals(ratios, layers, c4, c128, growing, window, states, pending):
    found = named(ratios=ratios)
    count = {name: len(family.layers) for name, family in found.items()}
    assert count == {
        "swa_kv": layers, "c4_kv": c4, "c4_indexer": c4, "c4_state": c4, "c4_indexer_state": c4,
        "c128_kv": c128, "c128_state": c128,
    }  # fmt: skip

    def total(*names):
        return sum(found[n].row_bytes * found[n].host_rows * count[n] for n in names)

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


def test_a_family_may_have_no_layer():
    found = named(ratios=(0, 0))
    assert {name for name, family in found.items() if family.layers} == {"swa_kv"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ratios": (0, 2)}, "ratio 2 is not covered"),
        ({"ratios": (1,)}, "ratio 1 is not covered"),
        ({"ratios": (4, -4)}, "ratio -4 is not covered"),
        ({"ratios": (128,), "page_size": 64, "window": 64}, "page_size 64 .* ratio 128"),
        ({"ratios": (4,), "page_size": 2}, "page_size 2 .* ratio 4"),
        ({"ratios": (0, 128), "page_size": 192}, "page_size 192 .* ratio 128"),
        ({"page_size": 0}, "page_size 0"),
        ({"window": 7}, "window 7"),
        ({"window": 257}, "window 257"),
        ({"c4_ring": 4}, "c4_ring 4"),
        ({"c4_ring": 12}, "c4_ring 12"),
        ({"c4_ring": 0}, "c4_ring 0"),
        ({"c128_ring": 64}, "c128_ring 64"),
        ({"c128_ring": 192}, "c128_ring 192"),
        ({"c128_ring": 0}, "c128_ring 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(GeometryError, match=message):
        Geometry(**{"ratios": FLASH_RATIOS, **changes})


@pytest.mark.parametrize("n", [0, 1, 3, 4, 5, 7, 8, 126, 127, 128, 129, 255, 256, 1000, 4095, 4096, 4097])
def test_first_live_positions(n):
    g = Geometry(FLASH_RATIOS)
    # The step at position n reads positions n-127..n of its window, itself included.
    assert window_start(g, n) == min((p for p in range(n) if n - p < 128), default=0)
    # Ratio 4 keeps the open block (n % 4 rows) and the whole block before it.
    assert c4_tail_start(n) == min((p for p in range(n) if p // 4 >= n // 4 - 1), default=0)
    pending = [p for p in range(n) if p // 128 == n // 128]
    assert c128_pending_start(n) == (pending[0] if pending else n)
