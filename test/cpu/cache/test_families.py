"""These tests compare the byte layout with the published table, number by number.

A new family asks for its numbers here: its line in FAMILIES, and its bytes in a unit.
"""

import dataclasses

import pytest

from sglang_dsv4.cache.families import Draft, Geometry, families, window_start
from sglang_dsv4.cache.family import Group, stacked
from sglang_dsv4.cache.groups import init_groups
from sglang_dsv4.cache.units import Units
from sglang_dsv4.errors import GeometryError
from sglang_dsv4.testing.standalone import FLASH41_RATIOS, FLASH41_SOURCES, FLASH_RATIOS, PRO_RATIOS

PAGED, WINDOW, REQUEST = Group.PAGED, Group.WINDOW, Group.REQUEST
KV, STATE, INNER = (576, 8), (2 * 2 * 512 * 4,), (2 * 2 * 128 * 4,)
# name, group, tokens a row; rows and bytes of a device page, offsets of its planes, bytes
# of a row by plane; period and lag; whether it is a ring
FAMILIES = [
    ("c4_kv", PAGED, 4, 64, 37_440, (0, 36_864), KV, None, 0, False),
    ("c4_indexer", PAGED, 4, 64, 8_448, (0, 8_192), (128, 4), None, 0, False),
    ("c128_kv", PAGED, 128, 2, 1_728, (0, 1_152), KV, None, 0, False),
    ("swa_kv", WINDOW, 1, 256, 149_760, (0, 147_456), KV, 1, 127, False),
    ("c4_state", WINDOW, 1, 8, 65_536, (0,), STATE, 4, 4, True),
    ("c4_indexer_state", WINDOW, 1, 8, 16_384, (0,), INNER, 4, 4, True),
    ("c128_state", REQUEST, 1, 128, 524_288, (0,), (2 * 512 * 4,), 128, 0, True),
]
# bytes of a unit; units of the tail of a whole number of pages, and of the longest
UNITS = {"flash": (999_424, 5, 16), "pro": (1_433_600, 5, 16)}


def named(**changes):
    g = Geometry(**{"ratios": FLASH_RATIOS, **changes})
    return {family.name: family for family in families(g)}


def numbers(family):
    return (
        family.name, family.group, family.ratio, family.rows, family.page_bytes,
        tuple(p.offset for p in family.planes), tuple(p.row_bytes for p in family.planes),
        family.period, family.lag, family.ring,
    )  # fmt: skip


def test_every_number_of_every_family():
    assert [numbers(family) for family in named().values()] == FAMILIES


@pytest.mark.parametrize("reach", [127, 128], ids=["EAGLE", "DSpark"])
def test_a_draft_adds_its_window_and_changes_nothing_else(reach):
    """Its layers have the draft model's own numbers. DSpark's row more moves the start of the window."""
    found = named(draft=Draft(3, reach, "v41_new", 4))
    draft = found.pop("draft_swa_kv")
    assert [numbers(family) for family in found.values()] == FAMILIES
    assert (draft.layers, draft.tiles, draft.row_bytes) == ((0, 1, 2), 4, 528)
    plain = named(draft=Draft(1, reach))["draft_swa_kv"]
    assert (plain.page_bytes, plain.live_rows(1_000), plain.moved_bytes(256, 1_000)) == (149_760, reach, reach * 584)
    assert plain.live_from(1_000) == 1_000 - reach == window_start(Geometry((0,), draft=Draft(1, reach)), 1_000)


@pytest.mark.parametrize(("ratios", "model"), [(FLASH_RATIOS, "flash"), (PRO_RATIOS, "pro")])
def test_units_of_a_model(ratios, model):
    units = Units.of(Geometry(ratios))
    assert (units.nbytes, units.tail(8 * 256), units.longest_tail) == UNITS[model]


@pytest.mark.parametrize(
    "changes",
    [
        {"ratios": (0, 8)}, {"ratios": (4, -4)}, {"ratios": (4,), "page_size": 2}, {"page_size": 0},
        {"ratios": (0, 128), "page_size": 192}, {"window": 7}, {"window": 257}, {"rings": {4: 4}}, {"rings": {4: 12}},
        {"folded": (128,), "rings": {128: 128}}, {"folded": (4,)},
        {"rings": {128: 64}}, {"rings": {128: 192}}, {"ratios": (2,), "sources": (0,), "rings": {2: 3}},
        {"kv_rows": {0: "uniform_fp8"}}, {"index_rows": {4: "int8"}}, {"draft": Draft(1, 0)}, {"draft": Draft(1, 257)},
        {"draft": Draft(1, 127, "v50")}, {"sources": (2,)}, {"ratios": (0, 1), "sources": (2,)},
    ],
    ids=str,
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(changes):
    with pytest.raises(GeometryError):
        Geometry(**{"ratios": FLASH_RATIOS, **changes})


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("c4_indexer", {"ring": True, "planes": stacked(64, 128)}),
        ("c4_kv", {"page_bytes": 37_448}), ("c4_kv", {"page_bytes": 37_360}), ("c4_kv", {"period": 1}),
        ("swa_kv", {"ratio": 4}), ("swa_kv", {"planes": stacked(256, 576, 4)}), ("swa_kv", {"period": None}),
        ("swa_kv", {"period": 0, "lag": 0}), ("swa_kv", {"tiles": 3}), ("c4_state", {"page_bytes": 65_536 + 16}),
        ("c4_state", {"tiles": 2}), ("c128_state", {"ring": False}), ("c128_state", {"lag": 1}),
        ("c128_state", {"planes": stacked(128, 2_048, 2_048)}), ("c128_state", {"folded": True}),
        ("c128_state", {"planes": stacked(128, 4_088), "page_bytes": 128 * 4_088}),
    ],
)  # fmt: skip
def test_a_family_that_cannot_be_moved_is_refused_by_name(name, changes):
    with pytest.raises(GeometryError, match=f"family {name}: "):
        dataclasses.replace(named()[name], **changes)


# V4.1 on the rows of an sm_90 server, and on those of an sm_100 one. What lives is the same.
V41_FAMILIES = {
    "v4": [
        ("c1_kv", PAGED, 1, 256, 149_760, (0, 147_456), KV, None, 0, False),
        ("c1_indexer", PAGED, 1, 256, 17_408, (0, 4_096), (64, 4), None, 0, False),
        ("c2_kv", PAGED, 2, 128, 74_880, (0, 73_728), KV, None, 0, False),
        ("c2_indexer", PAGED, 2, 128, 8_704, (0, 4_096), (64, 4), None, 0, False),
        FAMILIES[3],
        ("c2_state", REQUEST, 1, 2, 8_192, (0,), (4_096,), 2, 0, True),
    ],
    "v41": [
        ("c1_kv", PAGED, 1, 256, 73_728, (0, 65_536), (256, 32), None, 0, False),
        ("c1_indexer", PAGED, 1, 256, 17_408, (0, 4_096), (64, 4), None, 0, False),
        ("c2_kv", PAGED, 2, 128, 36_864, (0, 32_768), (256, 32), None, 0, False),
        ("c2_indexer", PAGED, 2, 128, 8_704, (0, 4_096), (64, 4), None, 0, False),
        ("swa_kv", WINDOW, 1, 256, 135_168, (0, 131_072), (512, 16), 1, 127, False),
        ("c2_state", REQUEST, 1, 2, 8_192, (0,), (4_096,), 2, 0, True),
    ],
}
V41_ROWS = {"v4": {}, "v41": {0: "v41", 1: "v41_fp4", 2: "v41_fp4"}}
# bytes of a page, of 127 rows of the window, of one pending pair
V41_BYTES = {"v4": [417_920, 40 * 127 * 584, 3 * 4_096], "v41": [227_840, 40 * 127 * 528, 3 * 4_096]}


def v41(**changes):
    return Geometry(**{"ratios": FLASH41_RATIOS, "sources": FLASH41_SOURCES, **changes})


@pytest.mark.parametrize("rows", V41_ROWS)
def test_every_number_of_v41(rows):
    g = v41(kv_rows=V41_ROWS[rows])
    assert [numbers(family) for family in families(g)] == V41_FAMILIES[rows]
    assert [family.tiles for family in families(g)] == [1, 4, 1, 2, 1, 1]
    assert [spec.nbytes(255) for spec in init_groups(g).values()] == V41_BYTES[rows]


@pytest.mark.parametrize(("ratios", "layers"), [(FLASH_RATIOS, 20), (PRO_RATIOS, 31)])
def test_online_compression_folds_a_block_into_one_row(ratios, layers):
    """It takes the place of the ring. The step at n % 128 == 0 reads no row."""
    g = Geometry(ratios, folded=(128,))
    online = families(g)[-1]
    assert numbers(online) == (
        "c128_online_state", REQUEST, 1, 1, 6_144, (0,), (3 * 512 * 4,), 128, 0, True
    )  # fmt: skip
    assert [numbers(family) for family in families(g)[:-1]] == FAMILIES[:-1]
    assert init_groups(g)[REQUEST].nbytes(1_000) == layers * 6_144
    wanted = {0: 0, 1: 1, 2: 1, 126: 1, 127: 1, 128: 0, 129: 1, 255: 1, 256: 0, 1000: 1}
    assert {n: online.live_rows(n) for n in wanted} == wanted


def test_tiles_are_as_long_as_the_pool_says():
    """Indexer pages of 128 rows where the GPU reads them so; SWA pages of 64 rows on SM120, padded one by one."""
    assert [f.tiles for f in families(v41(index_page=128))] == [1, 2, 1, 1, 1, 1]
    swa = named(swa_tiles=4)["swa_kv"]
    assert (swa.rows, swa.tile_rows, swa.page_bytes, swa.tile_bytes) == (256, 64, 4 * 37_440, 37_440)
    assert swa.row_offset(1, 200) == 3 * 37_440 + 64 * 576 + 8 * 8
    assert [swa.row_at(byte) for byte in (0, 576, 36_864 + 8, 37_439, 37_440)] == [0, 1, 1, 63, 64]


POSITIONS = [0, 1, 2, 3, 4, 5, 7, 8, 126, 127, 128, 129, 255, 256, 1000, 4095, 4096, 4097]


LIVE = {f.name: f.live_from for f in families(Geometry((0, 4, 128, 2), sources=(3,)))}
PAIRS = [("c2_state", ring, drafts + 1) for ring, drafts in ((2, 0), (4, 1), (4, 2), (8, 3), (8, 6), (16, 8))]


@pytest.mark.parametrize("tokens", POSITIONS)
@pytest.mark.parametrize(
    ("state", "ring", "written"),
    [("c4_state", 8, 1), ("c4_state", 16, 9), ("c128_state", 128, 1), ("c128_state", 256, 9), *PAIRS],
)
def test_the_forward_in_flight_writes_no_saved_ring_row(tokens, state, ring, written):
    """Without speculation it writes position n; with d draft tokens n .. n+d at most."""
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import get_compress_state_ring_size

    if state == "c2_state":  # its ring follows from the drafts
        assert get_compress_state_ring_size(2, written - 1) == ring
    saved = {p % ring for p in range(LIVE[state](tokens), tokens)}
    assert not saved & {p % ring for p in range(tokens, tokens + written)}
