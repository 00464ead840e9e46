"""Makes families of any size that no engine has, so that tests do not lean on the real ones."""

from hypothesis import strategies as st

from sglang_dsv4.cache.families import COMPRESSIONS, INDEX_ROWS, KV_ROWS, RATIOS, Draft, Geometry, families
from sglang_dsv4.cache.family import BUFFER_ALIGNMENT, Family, Group, stacked

RINGS = {2: (2, 4, 8), 4: (8, 16), 128: (128, 256)}


@st.composite
def geometries(draw) -> Geometry:
    """Returns any mix of ratios, V4's with V4.1's, and any rows."""
    ratios = draw(st.lists(st.sampled_from(RATIOS), min_size=1, max_size=12).map(tuple))
    first = draw(st.integers(0, 50))
    shared = [first + i for i, ratio in enumerate(ratios) if ratio and COMPRESSIONS[ratio].shared]
    return Geometry(
        ratios, first, draw(st.sampled_from((128, 256, 512))),
        sources=tuple(layer for layer in shared if draw(st.booleans())),
        rings={ratio: draw(st.sampled_from(rows)) for ratio, rows in RINGS.items()},
        kv_rows={ratio: draw(st.sampled_from(sorted(KV_ROWS))) for ratio in RATIOS},
        index_rows={ratio: draw(st.sampled_from(sorted(INDEX_ROWS))) for ratio in RATIOS},
        state_bytes={ratio: draw(st.sampled_from((2, 4))) for ratio in RINGS},
        swa_tiles=draw(st.sampled_from((1, 2, 4))), index_page=draw(st.sampled_from((64, 128))),
        draft=draw(st.sampled_from((None, Draft(1, 127), Draft(3, 128, "v41_new", 4), Draft(2, 60, "v41", 2)))),
    )  # fmt: skip


LAYERS = st.lists(st.integers(0, 60), min_size=1, max_size=4, unique=True).map(lambda layers: tuple(sorted(layers)))
WIDTHS = st.lists(st.integers(1, 6).map(lambda words: 8 * words), min_size=1, max_size=3)


@st.composite
def made(draw, g: Geometry) -> tuple[Family, ...]:
    """Returns one of each kind: paged with padding, window in pages of planes, window in a ring, request."""
    paged, window, ring = draw(WIDTHS), draw(WIDTHS), draw(WIDTHS)
    ring = ring if sum(ring) % BUFFER_ALIGNMENT == 0 else [*ring, 8]
    ratio, page = draw(st.sampled_from((1, 4, 128))), g.page_size
    rows = page // ratio
    padded = (-(-rows * sum(paged) // BUFFER_ALIGNMENT) + draw(st.integers(0, 3))) * BUFFER_ALIGNMENT
    tiles = draw(st.sampled_from((1, 2)))
    wide, pending = page // tiles * sum(window) + 16 * draw(st.integers(0, 4)), 16 * draw(st.integers(1, 6))
    short, long = draw(st.sampled_from(RINGS[4])), draw(st.sampled_from(RINGS[128]))
    return (
        Family(
            name="made_paged", group=Group.PAGED, layers=draw(LAYERS), ratio=ratio, rows=rows,
            planes=stacked(rows, *paged), page_bytes=padded,
        ),
        Family(
            name="made_window", group=Group.WINDOW, layers=draw(LAYERS), ratio=1, rows=page,
            planes=stacked(page // tiles, *window), page_bytes=tiles * wide, period=1,
            lag=g.window - 1, tiles=tiles,
        ),
        Family(
            name="made_ring", group=Group.WINDOW, layers=draw(LAYERS), ratio=1, rows=short,
            planes=stacked(short, *ring), page_bytes=short * sum(ring), period=4, lag=4, ring=True,
        ),
        Family(
            name="made_request", group=Group.REQUEST, layers=draw(LAYERS), ratio=1, rows=long,
            planes=stacked(long, pending), page_bytes=long * pending, period=128, ring=True,
        ),
    )  # fmt: skip


@st.composite
def family_sets(draw) -> tuple[Geometry, tuple[Family, ...]]:
    """Draws a geometry and the families of a pool: the real ones and one made of each kind, in any order."""
    g = draw(geometries())
    return g, tuple(draw(st.permutations((*families(g), *draw(made(g))))))
