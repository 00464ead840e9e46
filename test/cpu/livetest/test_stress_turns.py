"""Conversations of several turns in ``sglang-dsv4 stress``: scored last turns, and sessions that are gone on from."""

from __future__ import annotations

import itertools

import pytest
from fake_http import Decode
from stress_servers import SCORE, Running, finds, judged, missed_by

from sglang_dsv4.cli import stress
from sglang_dsv4.livetest import load
from sglang_dsv4.metrics import SessionCounters

TURNS = ["--model-path", "m", "--plain", "--turns", "3", "--interval", "3", "--at-least", "17"]
HICACHE = ["--", stress.servers.HICACHE]
CACHED, BROUGHT = (
    "tokens of the scored prompts that were cached, share",
    "tokens of prompts that HiCache brought from the host",
)


@pytest.fixture
def published(monkeypatch):
    """Turns of the tested server's requests, whose loads lose a family as the word says: right ones, and published so.

    An answer is wrong where its prompt goes on from such a turn. Until a flush, what was published first stays.
    """
    Running.held_by_rank = (0, 0)
    monkeypatch.setenv("DSV4_SESSIONS", "off")
    damaged: dict[tuple[int, ...], bool] = {}

    def answer(self, prompt, count):
        wrong = any(damaged.get(tuple(prompt[:end]), False) for end in range(len(prompt)))
        found = [token + wrong for token in Decode.answer(self, prompt, count)]
        damaged.setdefault((*prompt, *found), wrong or self.said() != "off")
        return found

    monkeypatch.setattr(Running, "answer", answer)
    monkeypatch.setattr(Running, "flush", lambda _: damaged.clear())


@pytest.mark.usefixtures("launched", "published", "cached")
@pytest.mark.parametrize("way", [["--plain", "--at-least", "17"], ["--transfer", "nixl", "--at-least", "6"]])
def test_last_turns_are_scored_and_read_what_a_damaged_load_published(run, way):
    """In first turns nothing is wrong: each run holds whole conversations, on a cache of its own."""
    words = ["--model-path", "m", *way, "--turns", "3", "--score", "4", "--zero", "c4_kv", "c4_state"]
    status, found = run(*words)
    assert status == 0, missed_by(found)
    scores = {row["run"].removeprefix("score of "): row for row in found["rows"][1:]}
    assert {name: (row["mean"], row.get("tokens_unlike_control")) for name, row in scores.items()} == {
        "control": (-1, 0), "retracts": (-1, 0), "retracts again": (-1, 0),
        "c4_kv zeroed": (-15, None), "c4_state zeroed": (-15, None),  # whose prompts are others
    }  # fmt: skip
    if "nixl" in way:
        assert len(set(Running.rooms)) == len(Running.rooms) == 18 + 3 * 12, "a room that was used is never used again"


@pytest.mark.usefixtures("launched", "published", "cached")
def test_last_turns_that_read_bad_pages_without_damage_are_seen(run, monkeypatch):
    monkeypatch.setattr(Running, "said", lambda _: "c4_kv")
    unlikely = "share of tokens below -4, after retracts"
    assert missed_by(run(*TURNS, "--score", "4")[1]) == [SCORE, unlikely]


@pytest.mark.usefixtures("launched", "published")
@pytest.mark.parametrize(("facts", "words", "missed"), [
    (finds(), HICACHE, []), (finds(0.29), [], [CACHED]), (finds(on_host=0), HICACHE, [BROUGHT]),
    (finds(0.31, on_host=0), [], []),
])  # fmt: skip
def test_last_turns_that_read_no_cache_are_seen(run, monkeypatch, facts, words, missed):
    monkeypatch.setattr(Running, "facts", facts)
    assert missed_by(run(*TURNS, "--score", "4", *words)[1]) == missed


@pytest.fixture
def keeps(monkeypatch):
    """The tested server keeps sessions; its counters grow by each request."""
    monkeypatch.setenv("DSV4_SESSIONS", "auto")
    Running.held_by_rank = (0, 0)
    Running.sessions = SessionCounters()


@pytest.mark.usefixtures("keeps", "cached")
def test_conversations_of_several_turns_go_on_from_their_sessions(run, launched):
    status, found = run(*TURNS, "--score", "4")
    assert status == 0, missed_by(found)
    row = found["rows"][0]
    warm = len(load.SHAPES)
    assert row["whole"] == 18 and row["sessions"]["hits"] == {"pages": warm + 18}
    assert row["sessions"]["points_before"] == warm + 18
    assert row["sessions"]["points"] == row["sessions"]["bytes"] == 0
    assert "SGLANG_RADIX_FORCE_MISS" not in launched["plain"].environment, "the server keeps no sessions with it"
    turns = [Running.prompts[warm + 6 * turn :][:6] for turn in range(3)]
    for before, after in itertools.pairwise(turns):
        for prompt in before:
            answer = Decode.answer(None, prompt, 4)
            assert sum(later[: len(prompt) + 4] == [*prompt, *answer] for later in after) == 1, (
                "it is behind its answer"
            )


@pytest.mark.usefixtures("keeps", "launched")
def test_sessions_go_before_each_run_that_is_scored(run, monkeypatch):
    flushed = []
    monkeypatch.setattr(Running, "flush", lambda self: flushed.append(self.said()))
    run("--model-path", "m", "--plain", "--keep-tree", "--score", "4")
    assert flushed == ["off", "off", "swa_kv"], "the first one before the counts are read"


PAIR = ["--model-path", "m", "--transfer", "nixl", "--turns", "3", "--score", "0", "--at-least", "6"]


@pytest.mark.usefixtures("keeps")
def test_later_turns_of_a_pair_go_on_at_its_prefill_server(run, launched):
    status, found = run(*PAIR)
    assert status == 0, missed_by(found)
    row = found["rows"][0]
    assert row["sessions"]["hits"] == {"pages": 18} and row["sessions"]["points_before"] == 18
    assert "--enable-metrics" in launched["prefill"].given and len(set(Running.rooms)) == 18, "a room for each turn"


def test_a_prefill_server_that_is_not_asked_keeps_nothing(run, launched):
    """The default is of plain servers; they lose it with their prefix cache, or by name."""
    Running.held_by_rank = (0, 0)
    names = {bound["name"] for bound in run(*PAIR)[1]["bounds"]}
    assert not [name for name in names if "session" in name] and "--enable-metrics" not in launched["prefill"].given


@pytest.mark.parametrize(("given", "words", "kept"), [
    (None, ["--turns", "2"], True), (None, ["--keep-tree"], True), (None, [], False), ("auto", [], True),
    ("off", ["--turns", "2"], False), (None, ["--turns", "2", "--stock"], False),
])  # fmt: skip
def test_a_plain_server_keeps_sessions_unless_it_loses_its_tree(monkeypatch, given, words, kept):
    if given is not None:
        monkeypatch.setenv("DSV4_SESSIONS", given)
    arguments = stress.parse(["--model-path", "m", "--plain", *words])
    assert arguments.sessions is kept and arguments.keep_tree is (kept or "--turns" in words)


def test_sessions_of_a_default_server_that_refuses_them_are_not_judged(run, launched, monkeypatch):
    """As beside HiCache; where the user asks for them, none is a fault."""
    Running.held_by_rank = (0, 0)
    words = ["--model-path", "m", "--plain", "--turns", "3", "--score", "0", "--at-least", "17"]
    assert not [bound["name"] for bound in run(*words)[1]["bounds"] if "session" in bound["name"]]
    monkeypatch.setenv("DSV4_SESSIONS", "auto")
    assert "sessions kept at the end of the run, points" in missed_by(run(*words)[1])


def test_sessions_of_a_server_that_runs_already_are_not_judged(run, decode):
    Running.sessions, Running.held_by_rank = SessionCounters(), (0, 0)
    names = [bound["name"] for bound in run("--attach", decode, "--plain")[1]["bounds"]]
    assert not [name for name in names if "session" in name or name.startswith("retracts answered")]


def test_a_conversation_stays_with_its_data_parallel_rank(run, launched):
    Running.held_by_rank, Running.sessions = (0, 0), SessionCounters()
    run(*TURNS, "--score", "0", "--", "--tp", "2", "--dp", "2", "--enable-dp-attention")
    bodies = [(len(prompt), rank) for prompt, rank in zip(Running.prompts, Running.routed, strict=True)]
    assert sorted(rank for _, rank in bodies[-6:]) == [0, 0, 0, 1, 1, 1]


@pytest.mark.usefixtures("keeps", "launched")
@pytest.mark.parametrize(("method", "missed"), [
    ("go_on", ["sessions kept at the end of the run, points", "later turns that went on from a session, share"]),
    ("flush", ["points left after a flush", "bytes of sessions left after a flush"]),
])  # fmt: skip
def test_a_server_without_sessions_and_one_that_a_flush_leaves_full_are_seen(run, monkeypatch, method, missed):
    monkeypatch.setattr(Running, method, lambda *_: None)
    assert missed_by(run(*TURNS, "--score", "0")[1]) == missed


@pytest.mark.parametrize(("change", "missed"), [
    ({}, []),
    ({"verified": 11}, ["loads of sessions not compared with their copy"]),
    ({"hits": {"pages": 5, "window": 4}, "verified": 9}, ["later turns that went on from a session, share"]),
    ({"hits": {"pages": 5, "window": 5}, "verified": 10}, []),
])  # fmt: skip
def test_each_fault_of_sessions_misses_its_bound(change, missed):
    counted = {"points_before": 3, "points": 0, "bytes": 0, "hits": {"pages": 12}, "verified": 12} | change
    log = {"engine_retracts": 10, "sessions": counted}
    assert judged(log, plain=True, sessions=True, requests=5, turns=5) == missed
    log = {"engine_retracts": 10, "sessions": counted | {"fallbacks": {stress.NOT_MATCHED: 1}}}
    missing = judged(log, plain=True, sessions=True, requests=5, turns=5)
    assert missing == ["points loaded that their request did not find", *missed]
