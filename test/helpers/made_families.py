"""Families that no engine has, of any size, so that tests of the mechanics do not lean on those of the real ones."""

from __future__ import annotations

from hypothesis import strategies as st

from sglang_dsv4.cache.families import (
    BUFFER_ALIGNMENT,
    RATIOS,
    Family,
    Geometry,
    Group,
    c4_tail_start,
    c128_pending_start,
    families,
    stacked,
    whole_history,
    window_start,
)

GEOMETRIES = st.builds(
    Geometry,
    ratios=st.lists(st.sampled_from(RATIOS), min_size=1, max_size=12).map(tuple),
    first_layer=st.integers(0, 50),
    page_size=st.sampled_from((128, 256, 512)),
    c4_ring=st.sampled_from((8, 16)),
    c128_ring=st.sampled_from((128, 256)),
    index_value_bytes=st.sampled_from((128, 64)),
    c4_state_bytes=st.sampled_from((2, 4)),
    c128_state_bytes=st.sampled_from((2, 4)),
)
LAYERS = st.lists(st.integers(0, 60), max_size=4, unique=True).map(lambda layers: tuple(sorted(layers)))
WIDTHS = st.lists(st.integers(1, 6).map(lambda words: 8 * words), min_size=1, max_size=3)


@st.composite
def made(draw, g: Geometry) -> tuple[Family, ...]:
    """One of each kind: paged with padding, window in pages of planes, window in a ring, request."""
    paged, window, ring = draw(WIDTHS), draw(WIDTHS), draw(WIDTHS)
    ring = ring if sum(ring) % BUFFER_ALIGNMENT == 0 else [*ring, 8]
    ratio, page = draw(st.sampled_from((1, 4, 128))), g.page_size
    rows = page // ratio
    padded = (-(-rows * sum(paged) // BUFFER_ALIGNMENT) + draw(st.integers(0, 3))) * BUFFER_ALIGNMENT
    wide, pending = page * sum(window) + 16 * draw(st.integers(0, 4)), 16 * draw(st.integers(1, 6))
    return (
        Family(
            "made_paged", "none", Group.PAGED, draw(LAYERS), ratio, rows, stacked(rows, *paged), padded, rows,
            whole_history,
        ),
        Family(
            "made_window", "none", Group.WINDOW, draw(LAYERS), 1, page, stacked(page, *window), wide, g.window,
            window_start,
        ),
        Family(
            "made_ring", "none", Group.WINDOW, draw(LAYERS), 1, g.c4_ring, stacked(g.c4_ring, *ring),
            g.c4_ring * sum(ring), 8, c4_tail_start, ring=True,
        ),
        Family(
            "made_request", "none", Group.REQUEST, draw(LAYERS), 1, g.c128_ring, stacked(g.c128_ring, pending),
            g.c128_ring * pending, 128, c128_pending_start, ring=True,
        ),
    )  # fmt: skip


@st.composite
def family_sets(draw) -> tuple[Geometry, tuple[Family, ...]]:
    """A geometry and the families of a pool: the real ones and one made of each kind, in any order."""
    g = draw(GEOMETRIES)
    return g, tuple(draw(st.permutations((*families(g), *draw(made(g))))))
