"""The ring of token ids never overwrites ids that the process may still read."""

from __future__ import annotations

import array
import random

import numpy as np
import pytest

from sglang_dsv4.store.id_ring import IdRing

UNUSED = -7


def ring(size):
    memory = np.full(size, UNUSED, np.int32)
    return memory, IdRing(memory)


def ids(count, first=0):
    return array.array("q", range(first, first + count))


def test_spans_follow_one_another_and_wrap_without_a_break():
    memory, spans = ring(10)
    first, second = spans.put(ids(4), 4), spans.put(ids(4, 10), 4)
    assert (first.at, second.at) == (0, 4)
    assert spans.put(ids(3), 3) is None, "two at the end, none at the beginning"
    spans.free(first)
    assert spans.put(ids(5), 5) is None
    third = spans.put(ids(4, 20), 4)
    assert third.at == 0
    assert memory.tolist() == [20, 21, 22, 23, 10, 11, 12, 13, UNUSED, UNUSED]
    assert spans.put(ids(1), 1) is None, "it would lie on the oldest"
    spans.free(second)
    assert spans.put(ids(6), 6).at == 4


def test_the_whole_ring_and_no_more():
    memory, spans = ring(10)
    for first in (0, 100):
        span = spans.put(ids(10, first), 10)
        assert memory.tolist() == list(range(first, first + 10))
        assert spans.put(ids(1), 1) is None
        spans.free(span)
    assert spans.put(ids(11), 11) is None
    assert spans.put(ids(20), 10) is not None, "the first of more tokens"


def test_one_at_a_time_stays_in_place():
    _, spans = ring(100)
    for _ in range(50):
        span = spans.put(ids(30), 30)
        assert span.at == 0
        spans.free(span)


def test_a_place_behind_an_older_one_waits_for_it():
    _, spans = ring(10)
    oldest, middle, newest = (spans.put(ids(3), 3) for _ in range(3))
    spans.free(middle)
    assert spans.put(ids(3), 3) is None
    spans.free(newest)
    assert spans.put(ids(7), 7).at == 3
    assert spans.put(ids(1), 1) is None
    spans.free(oldest)
    assert spans.put(ids(3), 3).at == 0


def test_clear_frees_all():
    _, spans = ring(10)
    held = [spans.put(ids(3), 3) for _ in range(3)]
    spans.clear()
    assert spans.put(ids(10), 10).at == 0
    for span in held:
        spans.free(span)  # of a dead process: nothing
    assert spans.put(ids(1), 1) is None


@pytest.mark.parametrize("seed", range(20))
def test_random_asks_and_answers(seed):
    """A model that knows only which ids were put and not freed, and a whole ring with nothing in it has room."""
    chance, size = random.Random(seed), 64
    memory, spans = ring(size)
    held, refused, wrapped, last = {}, 0, 0, 0
    for step in range(1500):
        if held and chance.random() < 0.5:
            number = chance.choice([*held][:3])
            spans.free(held.pop(number)[0])
        else:
            count = chance.choice((1, 2, 5, 13, 31, 64))
            span = spans.put(ids(count, 1000 * step), count)
            if span is None:
                refused += 1
                assert held, "nothing is in it"
                continue
            wrapped += span.at < last
            last = span.at
            held[step] = span, count
        for number, (span, count) in held.items():
            assert memory[span.at : span.at + count].tolist() == [*range(1000 * number, 1000 * number + count)]
    assert refused > 50
    assert wrapped > 50
