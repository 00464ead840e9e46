"""``sglang-dsv4 stress`` from its command line to its result, over fake servers: started ones, and some that run."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from fake_http import COPIED, Decode, Plain, running, series

from sglang_dsv4.cli import stress
from sglang_dsv4.command_line import to_its_end
from sglang_dsv4.livetest import in_server, load, runs, score
from sglang_dsv4.metrics import SessionCounters

README = (Path(__file__).parents[3] / "benchmarks" / "README.md").read_text()


class Running(Decode):
    """A decode server: two tensor-parallel ranks of one replica, whose counters grow with each request."""

    served, held_by_rank = 0, (3, 3)
    dark, verifies, keeps = False, True, True
    word: Path | None = None  # the file of its switch
    sessions: SessionCounters | None = None
    rooms: ClassVar[list[int]] = []
    prompts: ClassVar[list[list[int]]] = []
    routed: ClassVar[list[int | None]] = []

    def body(self):
        found = super().body()
        self.rooms.append(found.get("bootstrap_room"))
        self.prompts.append(found["input_ids"])
        self.routed.append(found.get("routed_dp_rank"))
        return found

    def answer(self, prompt, count):
        return [token + (self.said() not in {"off", "choices"}) for token in super().answer(prompt, count)]

    def choices(self, tokens, prompt):
        """As the word says, a load has lost what was recorded until then."""
        found = super().choices(tokens, prompt)
        lost = prompt + 2 if self.said() == "choices" else 0
        return self.change([[0] * len(found[0])] * lost + found[lost:])

    @staticmethod
    def change(rows):
        return rows

    def said(self):
        return "off" if self.word is None else self.word.read_text()

    def do_POST(self) -> None:
        if self.path.startswith("/flush_cache"):
            self.flush()
            self.begin()
            return
        type(self).served += 1
        if self.sessions is not None and self.keeps:
            self.go_on(self.sessions)
        super().do_POST()

    def go_on(self, sessions: SessionCounters) -> None:
        """Each request goes on from a point, which is compared, and leaves one."""
        sessions.hits["pages"] += 1
        sessions.verified += 1
        sessions.points += 1
        sessions.held_bytes += 100

    def flush(self) -> None:
        if self.sessions is not None:
            self.sessions.points = self.sessions.held_bytes = 0

    def do_GET(self) -> None:
        if self.path == "/model_info":
            self.begin()
            return
        self.begin(404 if self.dark else 200)
        for rank in () if self.dark else range(2):
            copies = self.held_by_rank[rank] + self.served
            self.wfile.write(series(copies, rank, verified=self.verifies, sessions=self.sessions))


class Prefill(Running):
    """The prefill server of a pair: of both it alone keeps sessions."""

    rooms: ClassVar = []
    prompts: ClassVar = []
    keeps = True


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the command; returns its exit status and its result."""
    monkeypatch.setattr(runs.time, "sleep", lambda _: None)

    def command(*words: str) -> tuple[int, dict]:
        sizes = ["--requests", "6", "--prompt", "3", "9", "--new-tokens", "4", "8"]
        status = stress.main([*sizes, "--out", str(tmp_path), "--logs", str(tmp_path / "logs"), *words])
        path = tmp_path / "stress.json"
        return status, json.loads(path.read_text()) if path.exists() else {}

    yield command
    Running.served, Running.held_by_rank, Running.dark, Running.verifies = 0, (3, 3), False, True
    Running.word, Running.sessions, Running.keeps = None, None, True
    Running.rooms.clear()
    Running.prompts.clear()
    Running.routed.clear()
    Prefill.served = 0


@pytest.fixture
def decode():
    with running(Running) as url:
        yield url


def missed_by(result: dict) -> list[str]:
    return [bound["name"] for bound in result["bounds"] if not bound["ok"]]


def test_a_server_that_runs_is_told_by_its_metrics(run, decode):
    status, found = run("--attach", decode, "--at-least", "6")
    row = found["rows"][0]
    assert status == 0, found["bounds"]
    assert (row["whole"], row["saves"], row["loads"], row["verified"]) == (6, 6, 6, 6)
    assert (row["saved_bytes"], row["save_ms_mean"], row["load_ms_mean"]) == pytest.approx((6000, 2, 4))
    assert (row["held_high_gib"], row["arena_gib"], row["ranks"], row["ranks_apart"]) == (0.5, 1.0, 2, 0)
    assert row["fallbacks"] == {}, "what happened before is not counted"
    Running.verifies = False
    assert missed_by(run("--attach", decode)[1]) == ["loads not compared with their copy"]
    assert run("--attach", decode, "--verify", "0")[0] == 0


def test_a_server_that_runs_is_told_by_its_log(run, decode, tmp_path, monkeypatch):
    Running.dark = True
    log = tmp_path / "decode.log"
    line = "[t] {} {} tokens, 1.9 MB in 1.50 ms; copies alive {}, 0.30 of 1.00 GiB held\n"
    log.write_text(line.format("saved", 900, 1))

    class Writing(runs.RetractStats):
        def read(self):
            with log.open("a") as out:
                out.write(line.format("saved", 300, 2) + line.format("loaded", 300, 1))
            return super().read()

    monkeypatch.setattr(runs, "RetractStats", Writing)
    status, found = run("--attach", decode, "--log", str(log))
    row = found["rows"][0]
    assert (row["saves"], row["loads"], row["longest_saved"]) == (1, 1, 300), "of the run's own lines alone"
    assert status == 1 and missed_by(found) == ["copies alive at the end", "loads not compared with their copy"]


def test_a_server_that_tells_nothing_and_a_port_without_one_are_refused(run, decode, capsys):
    Running.dark = True
    status = partial(to_its_end, "stress")
    assert status(lambda: run("--attach", decode)[0]) == 2
    assert "--enable-metrics" in capsys.readouterr().err and Running.served == 0
    assert status(lambda: run("--attach", "http://127.0.0.1:9")[0]) == 2
    said = capsys.readouterr().err
    assert "http://127.0.0.1:9" in said and "Connection refused" in said and "port" in said
    assert "package" not in said and "metrics" not in said


@pytest.fixture
def launched(monkeypatch, decode):
    """In the place of starting servers: fake ones by role; what each was started with."""
    given: dict[str, SimpleNamespace] = {}
    with running(Prefill) as prefill, running(Plain) as control:
        urls = {"prefill": prefill, "decode": decode, "plain": decode, "control": control}

        def launch(role, model, arguments, environment, folder, transfer="fake", apart=0):
            role = "control" if apart == score.APART else role
            folder.mkdir(parents=True, exist_ok=True)
            log = folder / f"{role}.log"
            ranks = runs.servers.ranks(arguments)
            said = [COPIED.replace("[t]", f"[t TP{rank}]" if ranks > 1 else "[t]") for rank in range(ranks)]
            log.write_text("".join(said) * (6 + len(load.SHAPES) * (role == "plain")))  # one a request
            given[role] = server = SimpleNamespace(
                role=role, url=urls[role], log=log, alive=True, environment=environment, stops=0, given=arguments
            )
            server.stop = lambda: setattr(server, "stops", server.stops + 1)
            Running.keeps &= role != "prefill"
            if in_server.FILE in environment:
                Running.word = Path(environment[in_server.FILE])
            return server

        monkeypatch.setattr(runs.servers, "launch", launch)
        monkeypatch.setattr(runs.servers, "wait_until_up", lambda *_: None)
        monkeypatch.setattr(runs.servers, "stop_all", lambda started: [s.stop() for s in started] and {})
        yield given


def test_tokens_are_scored_and_zeroed_families_are_seen(run, launched):
    Running.held_by_rank = (0, 0)
    started = ("--model-path", "m", "--transfer", "nixl", "--interval", "3")
    status, found = run(*started, "--score", "4", "--zero", "c4_kv", "c4_state")
    assert status == 0, missed_by(found)
    scores = {row["run"].removeprefix("score of "): row for row in found["rows"][1:]}
    tokens = scores["control"]["tokens"]
    assert {name: (row["mean"], row["tokens_unlike_control"]) for name, row in scores.items()} == {
        "control": (-1, 0), "retracts": (-1, 0), "retracts again": (-1, 0),
        "c4_kv zeroed": (-15, tokens), "c4_state zeroed": (-15, tokens),
    }  # fmt: skip
    assert found["rows"][0]["verified"] == 6, "the requests sent again are not part of the run"
    assert len(set(Running.rooms)) == len(Running.rooms) == 18, "a room that was used is never used again"
    environment, control = launched["decode"].environment, launched["control"].environment
    assert environment["SGLANG_TEST_RETRACT_INTERVAL"] == "3" and environment["DSV4_VERIFY"] == "1"
    assert control["DSV4_ENABLED"] == "0" and "SGLANG_TEST_RETRACT" not in control
    assert {name: server.stops for name, server in launched.items()} == {"prefill": 1, "decode": 1, "control": 1}


def test_a_plain_server_is_warmed_up_and_its_control_stands_beside_it(run, launched):
    Running.held_by_rank = (0, 0)
    status, found = run("--model-path", "m", "--plain", "--interval", "3", "--score", "4", "--at-least", "17")
    assert status == 0, missed_by(found)
    assert launched.keys() == {"plain", "control"} and set(Running.rooms) == {None}
    environment = launched["plain"].environment
    assert environment["SGLANG_RADIX_FORCE_MISS"] == environment["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY"] == "1"
    assert [server.stops for server in launched.values()] == [1, 1]


TURNS = ["--model-path", "m", "--plain", "--turns", "3", "--interval", "3", "--at-least", "17"]
HICACHE = ["--", stress.servers.HICACHE]
CACHED, BROUGHT = (
    "tokens of the scored prompts that were cached, share",
    "tokens of prompts that HiCache brought from the host",
)


def finds(share: float = 0.5, on_host: int = 3) -> property:
    """Makes what chunks tell of a server that has this share of each prompt in its cache."""
    details = {"device": 5, "host": on_host}
    return property(
        lambda self: {"cached_tokens": share * len(self.given["input_ids"]), "cached_tokens_details": details}
    )


@pytest.fixture
def cached(monkeypatch):
    """The tested server finds a part of each prompt in its cache, some of it on the host."""
    monkeypatch.setattr(Running, "facts", finds())


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
@pytest.mark.parametrize(
    ("facts", "words", "missed"),
    [
        (finds(), HICACHE, []),
        (finds(0.29), [], [CACHED]),
        (finds(on_host=0), HICACHE, [BROUGHT]),
        (finds(0.31, on_host=0), [], []),
    ],
)
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
@pytest.mark.parametrize(
    ("method", "missed"),
    [
        ("go_on", ["sessions kept at the end of the run, points", "later turns that went on from a session, share"]),
        ("flush", ["points left after a flush", "bytes of sessions left after a flush"]),
    ],
)
def test_a_server_without_sessions_and_one_that_a_flush_leaves_full_are_seen(run, monkeypatch, method, missed):
    monkeypatch.setattr(Running, method, lambda *_: None)
    assert missed_by(run(*TURNS, "--score", "0")[1]) == missed


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({}, []),
        ({"verified": 11}, ["loads of sessions not compared with their copy"]),
        ({"hits": {"pages": 5, "window": 4}, "verified": 9}, ["later turns that went on from a session, share"]),
        ({"hits": {"pages": 5, "window": 5}, "verified": 10}, []),
    ],
)
def test_each_fault_of_sessions_misses_its_bound(change, missed):
    counted = {"points_before": 3, "points": 0, "bytes": 0, "hits": {"pages": 12}, "verified": 12} | change
    log = {"engine_retracts": 10, "sessions": counted}
    assert judged(log, plain=True, sessions=True, requests=5, turns=5) == missed
    log = {"engine_retracts": 10, "sessions": counted | {"fallbacks": {stress.NOT_MATCHED: 1}}}
    missing = judged(log, plain=True, sessions=True, requests=5, turns=5)
    assert missing == ["points loaded that their request did not find", *missed]


ROWS = {
    name: shlex.split(command)
    for name, command in re.findall(
        r"^\| ([\w-]+) \| `((?:DSV4_\w+=\S+ )*sglang-dsv4 stress [^`]+)`", README, re.MULTILINE
    )
}
SCORE = "mean log probability of a token, after retracts"
MADE = "eager steps, or ranks' graphs, whose metadata is made here"
FELL_BACK = "retracts without a copy because of HostMemoryExhausted"
KILLED = "store processes killed"
# A played server prepares nothing, has room, and no store process.
MISSED = {"graph-stress": [MADE], "small-arena-stress": [FELL_BACK], "store-stress": [KILLED]}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_the_benchmarks_runs_to_its_end(run, launched, monkeypatch, name):
    """With fewer and shorter requests; a server that loses a token misses a bound."""
    Running.held_by_rank = (0, 0)
    words = ROWS[name]
    monkeypatch.setattr(Running, "facts", finds())
    Running.sessions = SessionCounters() if {"--turns", "--keep-tree"} & set(words) else None
    end = words.index("--")
    first = words.index("stress") + 1
    for setting in words[: first - 2]:
        monkeypatch.setenv(*setting.split("=", 1))
    few = ["--requests", "6", "--prompt", "3", "9", "--new-tokens", "4", "8", "--at-least", "6"]
    few += ["--score", "4"] if "--score" in words else []
    command = [*words[first:end], *few, "--name", "stress", *words[end:]]
    status, found = run(*command)
    assert missed_by(found) == MISSED.get(name, []) and status == int(name in MISSED)
    least = {bound["name"]: bound["bound"] for bound in found["bounds"]}.get(SCORE)
    within = float(words[words.index("--within") + 1]) if "--within" in words else score.MEAN_SLACK
    assert least == (f">= {-1 - within:.4f}" if "control" in launched else None)
    tested = launched["plain" if "--plain" in words else "decode"]
    assert tested.given[-len(words[end + 1 :]) :] == words[end + 1 :]
    monkeypatch.setattr(Running, "bad", dict.fromkeys((0, 1), "short"))
    assert missed_by(run(*command)[1])[0].startswith("whole answers")


CHOICES = ["--model-path", "tools/tiny_checkpoint/v4", "--choices", "--score", "4"]
WAYS = {"pair": ["--transfer", "nixl"], "plain": ["--plain", "--at-least", "17"]}
BY_TOKEN = "positions that chose otherwise by token id"
FOREIGN, ZEROED = "share of foreign positions, after retracts", "share of foreign positions, choices zeroed"


@pytest.mark.parametrize("way", WAYS)
def test_choices_are_compared_where_they_are_recorded(run, launched, way):
    """A decode server has none of a prompt. The choices of zeroed copies are seen, and their tokens are as likely."""
    Running.held_by_rank = (0, 0)
    status, found = run(*CHOICES, *WAYS[way])
    assert status == 0, missed_by(found)
    rows = {row["run"].removeprefix("score of "): row for row in found["rows"][1:]}
    prompts = [answer.prompt for answer in found_answers(run)]
    control, zeroed = rows["control"], rows["choices zeroed"]
    assert control["choices_compared"] == zeroed["choices_compared"] == 4 and control["foreign"] == 0
    assert control["positions"] == control["tokens"] - 4 + sum(prompts) * (way == "plain")
    assert zeroed["foreign"] == zeroed["by_token_differ"] / zeroed["positions"] > 0.05 and zeroed["mean"] == -1
    assert all("--enable-return-routed-experts" in server.given for server in launched.values())


def found_answers(run) -> list[load.Answer]:
    """The first scored requests of the command's load."""
    words = ["--model-path", "m", "--requests", "6", "--prompt", "3", "9", "--new-tokens", "4", "8"]
    return [load.Answer("whole", prompt=len(prompt)) for prompt in load.Load.of(stress.parse(words)).prompts[:4]]


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        (lambda rows: rows[1:] + rows[-1:], [BY_TOKEN, FOREIGN, "share of experts swapped, after retracts"]),
        (lambda rows: [*rows[:-1], [9] * len(rows[0])], [BY_TOKEN, FOREIGN]),
        (lambda rows: rows[1:], ["whole answers without a row", "choices compared, answers after retracts", ZEROED]),
        (lambda rows: [], ["whole answers without a row", "choices compared, answers after retracts", ZEROED]),
    ],
    ids=["shifted", "last row foreign", "one lost", "none"],
)  # fmt: skip
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("launched")
def test_a_server_that_returns_wrong_choices_misses_its_bounds(run, monkeypatch, way, change, missed):
    Running.held_by_rank = (0, 0)
    monkeypatch.setattr(Running, "change", staticmethod(change))
    found = missed_by(run(*CHOICES, *WAYS[way])[1])
    assert all(any(name.startswith(part) for name in found) for part in missed), found


GOOD = {
    "asked": 9, "whole": 9, "refused": 0, "alive": True, "trouble": [], "saves": 10, "loads": 10,
    "copies_alive_at_end": 0, "ranks": 2, "ranks_apart": 0, "fallbacks": {}, "verified": 10, "held_bytes_at_end": 0,
}  # fmt: skip


def judged(change: dict, **options: object) -> list[str]:
    """Bounds that a run with ``change`` misses."""
    asked = {"may_refuse": 0, "at_least": 10, "server": ["--tp", "2"], "falls_back": None, "attach": None}
    asked |= {"verify": 1, "stock": False, "plain": False, "sessions": False, **options}
    log = {name: value for name, value in (GOOD | change).items() if value is not None}  # what the metrics did not tell
    found = SimpleNamespace(log=log, run=SimpleNamespace(summary=lambda: log), alive=log["alive"])
    return [bound["name"] for bound in stress.judge(found, SimpleNamespace(**asked)) if not bound["ok"]]


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({}, []),
        ({"fallbacks": {"StaleWeights": 3}}, []),
        ({"whole": 8}, ["whole answers, of 9"]),
        ({"whole": 8, "refused": 1}, ["whole answers, of 9"]),
        ({"alive": False}, ["server alive at the end"]),
        ({"trouble": ["VerifyMismatch"]}, ["trouble in the log"]),
        ({"saves": 9}, ["retracts with a copy", "saves without a load"]),
        ({"loads": 9}, ["saves without a load"]),
        ({"copies_alive_at_end": 1}, ["copies alive at the end"]),
        ({"ranks_apart": 1}, ["ranks that decided otherwise than the first"]),
        ({"ranks": 1}, ["ranks that said what they decided"]),
        ({"verified": 9}, ["loads not compared with their copy"]),
        ({"held_bytes_at_end": 1}, ["host memory held at the end, bytes"]),
        ({"held_bytes_at_end": None}, ["metrics of this package"]),
        # on a plain server every retract has a load or a reason
        ({"engine_retracts": 10}, []),
        ({"engine_retracts": 9}, ["retracts"]),
        ({"engine_retracts": 11}, ["retracts with neither a load nor a reason"]),
        ({"engine_retracts": 14, "fallbacks": {"YoungRequest": 4}}, []),
        ({"engine_retracts": 21, "fallbacks": {"YoungRequest": 11}}, ["retracts answered by a load, share"]),
    ],
)
def test_each_fault_misses_its_bound(change, missed):
    assert judged(change, plain="engine_retracts" in change) == missed


@pytest.mark.parametrize(("refused", "failed", "fine"), [(2, 0, True), (3, 0, False), (1, 1, False), (0, 1, False)])
def test_requests_may_be_refused_but_not_fail(refused, failed, fine):
    change = {"whole": 9 - refused - failed, "refused": refused}
    assert judged(change, may_refuse=2) == ([] if fine else ["whole answers, of 9"])
