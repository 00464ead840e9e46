"""Ranks agree and wait by their words on the board, and name the rank that is late."""

from __future__ import annotations

import mmap
import random
import threading
import time

import pytest
from processes import together

from sglang_dsv4.errors import RankNotHeard
from sglang_dsv4.hostmem import board as board_module
from sglang_dsv4.hostmem.board import Board
from sglang_dsv4.hostmem.tickets import Tickets


def boards(ranks: int) -> list[Board]:
    memory = mmap.mmap(-1, Board.bytes_for(ranks))
    return [Board(memory, rank, ranks) for rank in range(ranks)]


def test_votes_of_processes_that_come_at_any_time():
    """Each sees every other's answer to the same question, however far ahead another rank is."""
    ranks, votes = 4, 300
    shared = boards(ranks)
    answers = [[random.Random(f"{rank}.{vote}").random() < 0.8 for vote in range(votes)] for rank in range(ranks)]

    def ask(rank: int) -> list[bool]:
        late = random.Random(rank)
        found = []
        for answer in answers[rank]:
            if late.random() < 0.01:
                time.sleep(0.002)
            found.append(shared[rank].vote(answer))
        return found

    wanted = [all(column) for column in zip(*answers, strict=True)]
    assert {True, False} == set(wanted)
    assert together(ask, [(rank,) for rank in range(ranks)]) == [wanted] * ranks


def test_what_the_first_rank_tells_is_heard_by_all_in_order():
    """However far it is ahead: it waits where its next words would take the place of some that were not heard."""
    ranks, times = 3, 400
    shared = boards(ranks)
    tellings = [[1 + 1000 * time_ + number for number in range(time_ % 5)] for time_ in range(times)]

    def hear(rank: int) -> list[list[int]]:
        late, found = random.Random(rank), []
        for telling in tellings:
            if late.random() < 0.02:
                time.sleep(0.002)
            found.append(shared[rank].tell(telling if rank == 0 else []))
        return found

    assert together(hear, [(rank,) for rank in range(ranks)]) == [tellings] * ranks


def test_a_fence_comes_before_each_word_that_tells_of_others():
    """Of names before their ballot, and of whatever was done before a ticket is published."""
    (board,) = boards(1)
    seen = []
    board._fence = lambda: seen.append(board._mine.copy())
    for number in (5, 6):
        board.publish(number)
        assert board.common([10 + number]) == [10 + number]
    tickets, named = seen[::2], seen[1::2]
    assert [line[board_module._DONE] for line in tickets] == [0, 5], "the fence, then the word"
    for number, line in enumerate(named):
        ballots, names = line[1:3], line[board_module._NAMES :]
        assert 15 + number in names and ballots.max() == 2 * number + (number > 0)


def test_a_rank_that_is_not_heard_is_named_with_the_setting(monkeypatch):
    monkeypatch.setattr(board_module, "PATIENCE", 0.05)
    first, second = boards(2)
    second.publish(7)
    with pytest.raises(RankNotHeard, match=r"rank 1 of 2 is at ticket 7, and 8 was waited for .* DSV4_SHARE=off"):
        first.publish(8)
        first.wait_done(8)
    answers = [threading.Thread(target=board.vote, args=(True,)) for board in (first, second)]
    for answer in answers:
        answer.start()
    for answer in answers:
        answer.join()
    for number in (2, 3):  # ballots alternate between two places
        with pytest.raises(RankNotHeard, match=f"rank 1 of 2 is at ballot 1, and {number} was waited for"):
            first.vote(True)


def test_a_ticket_is_over_when_it_is_over_on_every_rank():
    from builders import FakeEvent

    first, second = boards(2)
    mine, other = Tickets(first), Tickets(second)
    mine.issue(None)
    event = FakeEvent()
    other.issue(event)
    waiter = threading.Thread(target=mine.reach, args=(1,), daemon=True)
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive(), "the other rank's transfer is not over"
    other.issue(None)
    waiter.join(0.05)
    assert waiter.is_alive(), "a later ticket does not end an earlier one"
    other.reach(1)
    waiter.join(5)
    assert event.waits == 1 and not waiter.is_alive()
