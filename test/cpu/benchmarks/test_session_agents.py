"""Agents beside played servers: the benchmark runs to its end, and each bad figure misses its bound."""

import contextlib
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from fake_http import Plain, play_servers, running, series

from benchmarks import session_agents as agents
from benchmarks.session_agents import HICACHE, RESIDENT, SESSIONS, STOCK
from sglang_dsv4.livetest.score import APART
from sglang_dsv4.metrics import SessionCounters

ROOT = Path(__file__).parents[3]
TINY, FLASH = ROOT / "tools" / "tiny_checkpoint" / "v4" / "config.json", ROOT / "benchmarks" / "flash_config.json"
POOLS = """\
[t] Allocating 0.54 GB host memory for V4 paged pool 'swa' (layers=2, pages=512, item_bytes=524288, layout=page_first).
[t] Allocating 0.54 GB host memory for V4 state pool 's' (layers=1, pages=1024, state_page_bytes=524288, layout=p).
"""
KEPT = """\
[t] kept 1280 tokens, 1 pages new, 1.9 MB in 0.20 ms; 3 points, 0.10 GiB
[t] kept 1024 tokens, 9 pages new, 19.9 MB in 7.00 ms; 3 points, 0.10 GiB
"""
SLOW = 0.05  # seconds of a prefill


class Stock(Plain):
    """A server that holds the sessions of the last ``most`` agents; an agent is known by its first tokens."""

    held: ClassVar[list[tuple[int, ...]]] = []
    most, log = 2, Path()  # of six agents in turn it has lost each

    def do_POST(self) -> None:
        if self.path.startswith("/flush_cache"):
            self.held.clear()
            self.begin()
            return
        prompt = self.body()["input_ids"]
        agent = tuple(prompt[:9])
        self.found = agent in self.held
        self.facts = {"cached_tokens": (len(prompt) - 1) * self.found}
        if not self.found:
            time.sleep(SLOW)
        self.held[:] = [*(one for one in self.held if one != agent), agent][-self.most :] if self.most else []
        super().do_POST()


class HiCache(Stock):
    held: ClassVar = []
    most = 1


class Sessions(Stock):
    held: ClassVar = []
    most, places = 99, ("[t]",)
    sessions = SessionCounters()
    worn: ClassVar[list[str]] = []  # turns that each flush plays

    def do_POST(self) -> None:
        file = self.log.parent / "worn.txt"
        if self.path.startswith("/flush_cache") and file.exists():
            self.worn.append(file.read_text())
        super().do_POST()
        counts = self.sessions
        counts.points, counts.held_bytes = len(self.held), len(self.held) * 2**26
        counts.hits["pages"] += getattr(self, "found", False)
        with self.log.open("a") as out:
            out.write("".join(KEPT.replace("[t]", place) for place in self.places))

    def do_GET(self) -> None:
        self.begin()
        if self.path == "/metrics":
            self.wfile.write(series(0, sessions=self.sessions))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the command beside played servers; returns its status, the bounds it misses, its rows and its servers."""
    started = {}

    def launch(role, model, words, environment, folder, apart=0):
        handler = {0: Sessions, APART: Stock, agents.HICACHE_APART: HiCache}[apart]
        folder.mkdir(parents=True, exist_ok=True)
        handler.log = folder / "plain.log"
        handler.log.write_text(POOLS if handler is HiCache else "")
        assert json.loads((Path(model) / "config.json").read_text())["n_routed_experts"] == 2
        started[handler] = words, environment
        url = stack.enter_context(running(handler))
        awake = contextlib.nullcontext
        return SimpleNamespace(url=url, log=handler.log, stop=written, suspend=int, awake=awake)

    def written():
        assert (tmp_path / "sessions-agents.json").exists(), "the run may be cut off while servers end"

    def command(*words):
        sizes = "--contexts 1024 --device-tokens 5000 --over 2 --turn 300 --answer 4 --experts 2"
        folders = ["--config", str(FLASH), "--logs", str(tmp_path), "--out", str(tmp_path)]
        status = agents.main([*folders, *sizes.split(), *words])
        found = json.loads((tmp_path / "sessions-agents.json").read_text())
        return status, [b["name"] for b in found["bounds"] if not b["ok"]], found["rows"], started

    play_servers(monkeypatch, launch)
    monkeypatch.setattr(agents, "warm_up", lambda *_: None)
    monkeypatch.setattr(agents, "LONG", 1024)
    monkeypatch.setattr(agents, "FIRST_TOKEN", 0.9)  # of played servers on a busy machine
    monkeypatch.setattr(agents, "TURNS", 1.1)
    monkeypatch.setattr(agents, "ON_DEVICE", 1000)
    monkeypatch.setattr(agents, "COLD", 0.7)
    monkeypatch.setattr(Sessions, "sessions", SessionCounters())
    with contextlib.ExitStack() as stack:
        yield command


@pytest.mark.parametrize("places", [("[t]",), ("[t TP0]", "[t TP1]")])
def test_three_servers_run_to_their_end_with_the_same_host_memory(run, monkeypatch, places):
    monkeypatch.setattr(Sessions, "places", places)
    status, missed, rows, started = run("--", "--mem-fraction-static", "0.5")
    assert (status, missed) == (0, [])
    stock, hicache, ours, resident = rows
    assert [row["run"] for row in rows] == [STOCK, HICACHE, SESSIONS, RESIDENT]
    assert [(row["agents"], row["whole"]) for row in rows] == [(6, 12)] * 3 + [(2, 4)]
    assert resident["found"] == 1 and stock["found"] <= 0.5 and (ours["found"], ours["hits"]) == (1, {"pages": 12})
    assert hicache["host_gib"] == 1.0
    assert (ours["saves"], ours["save_p50_ms"]) == (12, 0.2), "saves of a turn's pages alone, of one rank"
    words, environment = started[Sessions]
    assert environment["DSV4_HOST_GB"] == "1.000000" and environment["DSV4_SESSIONS"] == "auto"
    assert started[HiCache][0] == [*words, *agents.WITH_HICACHE] and started[Stock][0] == words
    assert started[HiCache][1]["DSV4_ENABLED"] == started[Stock][1]["DSV4_ENABLED"] == "0"
    assert words[-2:] == ["--mem-fraction-static", "0.5"]


def test_an_arena_is_worn_down_once_a_round_before_it_is_measured(run):
    Sessions.worn.clear()
    run("--worn", "30000")
    warm_up, measured = Sessions.worn[:2], Sessions.worn[2:]
    assert (warm_up, measured) == (["0", "0"], ["30000", "0"])


def test_a_server_that_holds_no_sessions_misses_its_bounds(run, monkeypatch):
    monkeypatch.setattr(Sessions, "most", 0)
    status, missed, _, _ = run()
    assert status == 1 and {
        "turns that went on from a session, share, at 1024 tokens",
        "first token, median, by stock's, at 1024 tokens",
    } <= set(missed)


LONGEST = "--without-hicache --contexts 2048 --device-tokens 4096 --over 1.25 --concurrency 1 --turns 1 --host-gb 2"
BY_COLD = "first token of a later turn, by the cold one's, at 2048 tokens"


@pytest.mark.parametrize(("held", "bounds"), [(99, []), (0, [BY_COLD])])
def test_two_agents_by_turns_run_without_hicache_and_are_judged_by_their_first_turns(run, monkeypatch, held, bounds):
    monkeypatch.setattr(agents, "VERY_LONG", 2048)
    monkeypatch.setattr(agents, "WARM_UP_CONTEXT", 1024)
    monkeypatch.setattr(Stock, "most", 1)
    monkeypatch.setattr(Sessions, "most", held)
    said, turn = [], agents.Agents.turn

    def seen(these, url, order, label):
        said.append((order, label, len(these.said[0])))
        return turn(these, url, order, label)

    monkeypatch.setattr(agents.Agents, "turn", seen)
    status, missed, rows, started = run(*LONGEST.split())
    assert [bound for bound in missed if bound == BY_COLD] == bounds and status == bool(bounds)
    assert [(row["run"], row["agents"]) for row in rows] == [(STOCK, 2), (SESSIONS, 2), (RESIDENT, 1)]
    assert all(row["cold_first_token_p50_ms"] >= SLOW * 1e3 for row in rows) and rows[0]["found"] == 0
    assert HICACHE not in started and started[Sessions][1]["DSV4_HOST_GB"] == "2.000000"
    orders = {tuple(order) for order, label, _ in said if STOCK in label and RESIDENT not in label}
    assert orders == {(0, 1)}, "each comes behind the other one"
    assert {length for _, label, length in said if "round -1, first" in label} == {1024}, "a short warm-up"


def test_sessions_where_the_device_holds_all_are_timed_beside_stock_alone(run, monkeypatch):
    monkeypatch.setattr(Stock, "most", 99)
    monkeypatch.setattr(agents, "IDLE", 0.2)
    turned, turn = [], agents.Talk.turn
    monkeypatch.setattr(agents.Talk, "turn", lambda talk: (turned.append(talk._row["run"]), turn(talk)))
    status, missed, rows, started = run("--idle", "--rounds", "3", "--host-gb", "2")
    assert (status, missed) == (0, []) and HiCache not in started
    assert [row["run"] for row in rows] == [STOCK, SESSIONS, SESSIONS, STOCK, STOCK, SESSIONS], "by turns"
    assert turned[4:12] == [STOCK, SESSIONS, SESSIONS, STOCK, SESSIONS, STOCK, STOCK, SESSIONS], "in each round, too"
    assert started[Sessions][1]["DSV4_HOST_GB"] == "2.000000"


GOOD = {
    STOCK: {"found": 0.1, "first_token_p50_ms": 3500.0, "turns_a_second": 1.0, "cold_first_token_p50_ms": 8000.0},
    HICACHE: {"turns_a_second": 7.0, "host_gib": 8.0},
    SESSIONS: {"first_token_p50_ms": 385.0, "turns_a_second": 7.0, "host_gib": 8.0, "saves": 9, "save_p50_ms": 0.5,
               "hits": {"pages": 6, "window": 4}, "session_points": 5, "cold_first_token_p50_ms": 7700.0},
    RESIDENT: {"first_token_p50_ms": 335.0},
}  # fmt: skip
ALL = {"asked": 20, "whole": 20, "trouble": [], "found": 1.0}


def judged(changed: dict[str, dict], *words: str, config: Path = FLASH, context: int = 65536) -> list[str]:
    """The bounds that a run misses, without where; ``changed``: of each server."""
    sizes = ["--contexts", str(context), "--device-tokens", "3000000"]
    arguments = agents.parse(["--config", str(config), *sizes, *words])
    rows = [
        {"run": name, **ALL, "context": context, **good, **changed.get(name, {})}
        for name, good in GOOD.items()
        if name != HICACHE or not arguments.without_hicache
    ]
    return [b["name"].removesuffix(f", at {context} tokens") for b in agents.judge(rows, arguments) if not b["ok"]]


IDLE, ALONE = ("--idle",), ("--without-hicache",)
QUIET = {"found": 1.0, "turn_seconds": [0.1] * 20}
RATE, WHOLE = (f"turns a second, by stock's, {what}" for what in ("median turn", "all turns"))


def slower(by: float) -> dict[str, list[float]]:
    """Returns the turns of a server that take ``by`` times as long as those of QUIET."""
    return {"turn_seconds": [seconds * by for seconds in QUIET["turn_seconds"]]}


@pytest.mark.parametrize(("changed", "missed", "words"), [
    ({}, [], ()), ({}, [], ALONE), ({STOCK: QUIET, SESSIONS: slower(1.009)}, [], IDLE),
    ({STOCK: QUIET, SESSIONS: slower(1.011)}, [RATE, WHOLE, "median turn, low end of the 99% interval"], IDLE),
    ({STOCK: QUIET, SESSIONS: {"turn_seconds": [*QUIET["turn_seconds"][1:], 0.3]}}, [WHOLE], IDLE),
    ({STOCK: QUIET, SESSIONS: {**slower(1.009), "session_points": 0}}, ["points of sessions"], IDLE),
    ({HICACHE: {"whole": 19}}, ["turns without a whole answer"], ()),
    ({SESSIONS: {"trouble": ["leak detected"]}}, ["trouble in a log"], ()),
    ({STOCK: {"found": 0.6}}, ["turns that stock finds on the device, share"], ()),
    ({RESIDENT: {"found": 0.8}}, ["turns that it finds where it holds all, share"], ()),
    ({SESSIONS: {"hits": {"pages": 9}}}, ["turns that went on from a session, share"], ()),
    ({SESSIONS: {"host_gib": 8.1}}, ["host memory, by HiCache's"], ()),
    ({STOCK: {"first_token_p50_ms": 3490.0}}, ["first token, median, by stock's"], ()),
    ({RESIDENT: {"first_token_p50_ms": 334.0}}, ["first token, median, by that on the device"], ()),
    ({STOCK: {"turns_a_second": 1.1}}, ["turns a second, by stock's"], ()),
    ({STOCK: {"turns_a_second": 1.1}}, ["turns a second, by stock's"], ALONE),
    ({HICACHE: {"turns_a_second": 7.1}}, ["turns a second, by HiCache's"], ()),
    ({SESSIONS: {"save_p50_ms": 0.6}}, ["save of a turn, median, ms"], ()),
    ({SESSIONS: {"saves": 0}}, ["saves of a turn seen"], ()),
])  # fmt: skip
def test_each_bad_figure_misses_its_bound(changed, missed, words):
    assert judged(changed, *words) == missed


SLOW_STOCK = {"first_token_p50_ms": 385.0, "turns_a_second": 7.0}


@pytest.mark.parametrize(("changed", "missed"), [
    ({STOCK: SLOW_STOCK}, []),
    ({STOCK: SLOW_STOCK | {"first_token_p50_ms": 384.0}}, ["first token, median, by stock's"]),
    ({STOCK: SLOW_STOCK | {"turns_a_second": 7.1}}, ["turns a second, by stock's"]),
    ({STOCK: SLOW_STOCK, RESIDENT: {"first_token_p50_ms": 334.0}}, ["first token, median, by that on the device"]),
])  # fmt: skip
def test_a_model_of_few_layers_need_not_be_many_times_as_fast(changed, missed):
    assert judged(changed, config=TINY) == missed


def test_a_short_context_is_not_judged_by_the_bounds_of_long_ones():
    assert judged({STOCK: SLOW_STOCK, RESIDENT: {"first_token_p50_ms": 1.0}}, context=16384) == []


@pytest.mark.parametrize(("who", "cold"), [(STOCK, 7690.0), (SESSIONS, 7690.0), (None, 7700.0)])
def test_a_later_turn_of_a_million_tokens_is_judged_by_the_faster_first_one(who, cold):
    expected = [] if who is None else ["first token of a later turn, by the cold one's"]
    found = judged({who: {"cold_first_token_p50_ms": cold}}, *ALONE, "--concurrency", "1", context=1_000_000)
    assert found == expected


def test_a_log_without_pools_is_no_hicache(tmp_path):
    log = tmp_path / "plain.log"
    log.write_text("[t] request 'Allocating 0.54 GB host memory'\n")
    with pytest.raises(agents.servers.ServerDied, match="no host pools"):
        agents.pinned_bytes(log)
