"""The trie finds the longest kept beginning of a prompt, as a list of all kept beginnings does."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from sglang_dsv4.sessions.trie import Point, Trie

PAGE = 4
NAMESPACES = st.sampled_from((("lora", None), ("lora", "salt"), (None, None)))
TOKENS = st.lists(st.integers(0, 1), max_size=18)
ACTIONS = st.lists(
    st.tuples(st.sampled_from(("keep", "keep", "keep", "drop", "find")), NAMESPACES, TOKENS, st.integers(0, 20)),
    max_size=40,
)


def whole(tokens, ahead, end):
    """Returns the page ends of a prompt, up to ``end``, at which all that the rows depend on is known."""
    return list(range(PAGE, min(end, len(tokens) - ahead) + 1, PAGE))


@given(st.booleans(), ACTIONS)
def test_it_finds_what_a_list_of_all_finds(pairs, actions):
    trie, ahead, points, made = Trie(PAGE, pairs), int(pairs), {}, 0
    blocks = iter(range(10**6))
    held: dict[tuple, int] = {}  # every page that a point needs, by namespace and tokens: its block
    for what, namespace, tokens, end in actions:
        ends, version, had = whole(tokens, ahead, end), trie.version, len(points)
        keys = trie.keys(array("q", tokens), end)
        assert len(keys) == len(ends)
        ways = [(namespace, *tokens[: at + ahead]) for at in ends]
        if what == "find":
            found = trie.longest(namespace, keys)
            assert found is next((points[way] for way in reversed(ways) if way in points), None)
            assert [page.block for page in trie.walk(namespace, keys)] == [held[way] for way in ways if way in held]
        elif what == "keep" and ways and ways[-1] not in points:
            missing = [way for way in ways if way not in held]
            held |= {way: next(blocks) for way in missing}
            there = trie.walk(namespace, keys)
            half = there[: len(there) // 2]
            assert trie.walk(namespace, keys[len(half) :], half[-1] if half else None) == there[len(half) :]
            added = trie.add(
                namespace, there[-1] if there else None, keys[len(there) :], [held[way] for way in missing]
            )
            assert [page.block for page in added] == [held[way] for way in missing]
            made += 1
            points[ways[-1]] = point = Point(trie.walk(namespace, keys)[-1], ends[-1], 0, made)
            trie.put(point)
            assert [page.block for page in point.page.path()] == [held[way] for way in ways]
        elif what == "drop" and points:
            way = sorted(points, key=str)[end % len(points)]
            gone = {page.block for page in trie.take(points.pop(way))}
            needed = {
                (other[0], *other[1 : 1 + at + ahead])
                for other in points
                for at in range(PAGE, len(other) - ahead, PAGE)
            }
            assert gone == {block for key, block in held.items() if key not in needed}
            held = {key: block for key, block in held.items() if key in needed}
        assert (trie.version != version) == (len(points) != had), "a look-up is remembered until points come or go"
        assert sorted(page.block for page in trie.pages()) == sorted(held.values())
    for point in points.values():
        trie.take(point)
    assert not list(trie.pages()) and not trie._first, "an empty namespace is forgotten"


def test_a_reader_keeps_its_pages_while_all_points_go():
    trie, keys = Trie(PAGE, pairs=False), [b"1", b"2", b"3"]
    pages = trie.add(None, None, keys, [7, 8, 9])
    point = Point(pages[-1], 3 * PAGE, 0, 1)
    trie.put(point)
    trie.used = pages[1]
    assert [page.block for page in trie.take(point)] == [9]
    assert trie.walk(None, keys) == pages[:2]
    trie.used = None
    assert [page.block for page in trie.prune(pages[1])] == [8, 7]


def test_with_drafts_the_token_behind_a_page_is_part_of_it():
    """Trap 9: a draft's row depends on it."""
    tokens, other = array("q", range(2 * PAGE + 1)), array("q", [*range(2 * PAGE), 99])
    plain, drafts = Trie(PAGE, pairs=False), Trie(PAGE, pairs=True)
    assert plain.keys(tokens, 2 * PAGE) == plain.keys(other, 2 * PAGE)
    assert drafts.keys(tokens, 2 * PAGE)[0] == drafts.keys(other, 2 * PAGE)[0]
    assert drafts.keys(tokens, 2 * PAGE)[1] != drafts.keys(other, 2 * PAGE)[1]
    assert len(drafts.keys(tokens[:-1], 2 * PAGE)) == 1, "the last page lacks the token behind it"
