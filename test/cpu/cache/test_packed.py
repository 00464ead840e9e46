"""A packed page and a tail have a place for every byte, one after the other in the order that they promise."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_families import family_sets

from sglang_dsv4.cache.families import Geometry, families
from sglang_dsv4.cache.family import Family
from sglang_dsv4.cache.packed import PackedPage, Tail
from sglang_dsv4.errors import GeometryError

LENGTHS = st.one_of(st.integers(0, 300), st.integers(0, 5_000))


def live(family: Family, tokens: int) -> int:
    """Live rows, by the definition: the open block of ``period`` and the ``lag`` before it."""
    block = tokens - tokens % family.period
    return sum(position >= block - family.lag for position in range(max(0, tokens - 1_000), tokens))


def check_page(members: tuple[Family, ...]) -> None:
    """Family by family, each at a multiple of 256; layer by layer, each a whole device page."""
    page, at = PackedPage.of(members), 0
    for family in (family for family in members if family.whole_pages):
        at = -(-at // 256) * 256
        for index in range(len(family.layers)):
            assert page.offset(family, index) == at, family.name
            at += family.page_bytes
    assert page.nbytes == at


def check_tail(members: tuple[Family, ...], tokens: int) -> None:
    """Family by family, each at a multiple of 256; then layer by layer, each at a multiple of 128; live rows alone."""
    tail, at = Tail.of(members, tokens), 0
    for family in (family for family in members if not family.whole_pages):
        at, rows, begins, ends = -(-at // 256) * 256, live(family, tokens), [], []
        for index in range(len(family.layers)):
            at = -(-at // 128) * 128
            begins.append(at)
            for number, plane in enumerate(family.planes):
                for row in range(rows):
                    assert tail.offset(family, index, number, row) == at, family.name
                    assert tail.in_layer(family, number, row) == at - begins[-1]
                    at += plane.row_bytes
            ends.append(at)
        assert [(part.start, part.stop) for part in tail.layers(family)] == [*zip(begins, ends, strict=True)]
        at = -(-at // 128) * 128
    assert tail.nbytes == at


@settings(max_examples=40, deadline=None)
@given(pool=family_sets(), tokens=LENGTHS)
def test_any_families_of_any_stage(pool, tokens):
    _, members = pool
    check_page(members)
    check_tail(members, tokens)


def test_nothing_is_saved_of_no_tokens():
    members = families(Geometry((0, 4, 128, 2), sources=(3,)))
    assert Tail.of(members, 0).nbytes == 0 < Tail.of(members, 1).nbytes


def test_a_layer_that_a_family_has_not_is_named():
    members = {family.name: family for family in families(Geometry((0, 4, 128)))}
    for offset in (
        lambda: PackedPage.of(members.values()).offset(members["c4_kv"], 1),
        lambda: Tail.of(members.values(), 300).offset(members["c4_state"], -1, 0),
    ):
        with pytest.raises(GeometryError, match=r"c4_\w+ has 1 layers, asked for number"):
            offset()
