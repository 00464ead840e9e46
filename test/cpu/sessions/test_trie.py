"""The trie finds the longest kept beginning of a prompt, as a list of all kept beginnings does."""

from __future__ import annotations

import gc
import time
from array import array
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from sglang_dsv4.sessions.trie import Point, Trie

PAGE = 4
NAMES = (("lora", None), ("lora", "salt"), (None, None))
NAMESPACES = st.sampled_from(NAMES)
TOKENS = st.lists(st.integers(0, 1), max_size=18)
ACTIONS = st.lists(
    st.tuples(st.sampled_from(("keep", "keep", "keep", "drop", "find")), NAMESPACES, TOKENS, st.integers(0, 20)),
    max_size=40,
)


def whole(tokens, ahead, end):
    """Returns the page ends of a prompt, up to ``end``, at which all that the rows depend on is known."""
    return list(range(PAGE, min(end, len(tokens) - ahead) + 1, PAGE))


@given(st.booleans(), ACTIONS)
def test_it_finds_what_a_list_of_all_finds(bigram, actions):
    trie, ahead, points, made = Trie(PAGE, bigram), int(bigram), {}, 0
    held: dict[tuple, int] = {}  # every page that a point needs, by namespace and tokens: its unit
    names, old = {}, []  # of these pages, and of those that are gone
    for what, namespace, tokens, end in actions:
        ends, version, had = whole(tokens, ahead, end), trie.version, len(points)
        keys = list(trie.keys(array("q", tokens), end))
        assert len(keys) == len(ends)
        half = len(keys) // 2
        assert list(trie.keys(array("q", tokens), end, half * PAGE)) == keys[half:]
        ways = [(namespace, *tokens[: at + ahead]) for at in ends]
        if what == "find":
            walked = trie.walk(namespace, keys)
            found = trie.last_point(walked[-1]) if walked else None
            assert found is next((points[way] for way in reversed(ways) if way in points), None)
            assert trie.walk(namespace, keys) == [held[way] for way in ways if way in held]
        elif what == "keep" and ways and ways[-1] not in points:
            missing = [way for way in ways if way not in held]
            units = (unit for unit in count() if unit not in set(held.values()))  # those of gone pages, too
            held |= dict(zip(missing, units, strict=False))
            there = trie.walk(namespace, keys)
            half = there[: len(there) // 2]
            assert trie.walk(namespace, keys[len(half) :], half[-1] if half else None) == there[len(half) :]
            trie.add(namespace, there[-1] if there else None, keys[len(there) :], [held[way] for way in missing])
            names |= {way: trie.name(held[way]) for way in missing}
            made += 1
            points[ways[-1]] = point = Point(trie.walk(namespace, keys)[-1], ends[-1], [], made)
            came = [trie.came(other) for other in NAMES]
            trie.put(namespace, point)
            assert [trie.came(other) != had for other, had in zip(NAMES, came, strict=True)] == [
                other == namespace for other in NAMES
            ], "the look-ups of other namespaces stay as they are"
            assert trie.path(point.page) == [held[way] for way in ways]
        elif what == "drop" and points:
            way = sorted(points, key=str)[end % len(points)]
            gone = set(trie.take(points.pop(way)))
            needed = {
                (other[0], *other[1 : 1 + at + ahead])
                for other in points
                for at in range(PAGE, len(other) - ahead, PAGE)
            }
            assert gone == {unit for key, unit in held.items() if key not in needed}
            held = {key: unit for key, unit in held.items() if key in needed}
            old += [names.pop(key) for key in [*names] if key not in needed]
        assert (trie.version != version) == (len(points) != had), "a look-up is remembered until points come or go"
        pages = list(trie.pages())
        assert sorted(pages) == sorted(held.values())
        assert {way: trie.named(name) for way, name in names.items()} == held
        assert all(trie.named(name) is None for name in [None, *old]), "another page has its unit, maybe its key"
        trie.check_integrity()
        for page in pages[:1]:
            below = trie.below(page)
            assert set(below) == {other for other in pages if page in trie.path(other)}
            assert all(
                below.index(page) < below.index(before)
                for page in below
                for before in trie.path(page)[:-1]
                if before in below
            )
    for point in points.values():
        trie.take(point)
        trie.check_integrity()
    assert not trie.pages() and not trie._namespaces, "an empty namespace is forgotten"


def test_a_reader_keeps_its_pages_while_all_points_go():
    trie, keys = Trie(PAGE, bigram=False), [b"1", b"2", b"3"]
    trie.add(None, None, keys, [7, 8, 9])
    point = Point(9, 3 * PAGE, [], 1)
    trie.put(None, point)
    trie.used = 8
    trie.check_integrity()
    assert trie.take(point) == [9]
    assert trie.walk(None, keys) == [7, 8]
    trie.used = None
    assert trie.prune(8) == [8, 7]


def test_a_collection_of_garbage_does_not_look_at_each_page():
    """With an object of each, a hundred thousand pages made it 33 ms longer."""
    trie, pages = Trie(PAGE, bigram=False), 20_000
    before = _tracked()
    for first in range(0, pages, 80):
        units = list(range(first, first + 80))
        trie.add("a", None, [unit.to_bytes(8 * PAGE) for unit in units], units)
        trie.put("a", Point(units[-1], 80 * PAGE, [], first))
    assert len(trie.pages()) == pages and _tracked() - before < 0.05 * pages


def _tracked():
    gc.collect()
    return len(gc.get_objects())


def test_the_name_of_a_page_that_went_is_no_other_pages():
    """Not even of one with the same key, parent and unit: that parent may be another page by then."""
    trie = Trie(PAGE, bigram=False)
    trie.add(None, None, [b"1"], [0])
    trie.put(None, Point(0, PAGE, [], 1))
    names = []
    for number in range(2):
        trie.add(None, 0, [b"2"], [1])
        trie.put(None, point := Point(1, 2 * PAGE, [], 2 + number))
        names.append(trie.name(1))
        assert [trie.named(name) for name in names] == [None, 1][1 - number :]
        trie.take(point)
    assert [trie.named(name) for name in (*names, None, trie.name(0))] == [None, None, None, 0]
    name = trie.name(0)
    trie.clear()
    assert trie.named(name) is None


def test_with_drafts_the_token_behind_a_page_is_part_of_it():
    """Trap 9: a draft's row depends on it."""
    tokens, other = array("q", range(2 * PAGE + 1)), array("q", [*range(2 * PAGE), 99])
    plain, drafts = Trie(PAGE, bigram=False), Trie(PAGE, bigram=True)
    cut = [[list(trie.keys(given, 2 * PAGE)) for given in (tokens, other)] for trie in (plain, drafts)]
    assert cut[0][0] == cut[0][1]
    assert cut[1][0][0] == cut[1][1][0] and cut[1][0][1] != cut[1][1][1]
    assert len(list(drafts.keys(tokens[:-1], 2 * PAGE))) == 1, "the last page lacks the token behind it"


def test_a_page_is_cut_when_it_is_asked_for():
    """A prompt of a million tokens parts from all others in its first page; to cut all of it takes milliseconds."""
    tokens = array("q", range(1 << 20))
    assert next(Trie(256, bigram=False).keys(tokens, len(tokens))) == tokens[:256].tobytes()
    started = time.perf_counter()
    for _ in range(100):
        next(Trie(256, bigram=False).keys(tokens, len(tokens)))
    assert (time.perf_counter() - started) / 100 < 1e-3
