"""The benchmark of a pair with a store runs to its end beside played servers, and each bad figure misses its bound."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_http import Handler, Plain, play_servers, running

from benchmarks import store_pair, store_servers
from benchmarks.store_servers import OURS
from sglang_dsv4.sessions.store import FEWEST_TOKENS

CONFIG = Path(__file__).parents[3] / "benchmarks" / "flash_config.json"
NEW, ANSWER, AGENTS, TURNS = 200, 6, 2, 1


class Prefill(Handler):
    """Logs the tokens that it computes, and lets the decode server begin."""

    log, computes, wait, trouble = None, NEW, 0.0, ""

    def do_POST(self) -> None:
        if self.path.startswith("/generate"):
            time.sleep(self.wait)
            with self.log.open("a") as log:
                log.write(f"[t] Prefill batch, #new-seq: 1, #new-token: {self.computes}, #cached\n{self.trouble}")
            assert self.body()["bootstrap_port"] == self.port and self.body()["bootstrap_room"] not in self.rooms
            self.rooms.add(self.body()["bootstrap_room"])
        self.begin()
        self.wfile.write(b"{}")


class Answers(Plain):
    """Waits before each token."""

    cumulative, gap, wait = False, 0.0, 0.0

    def chunk(self, content) -> None:
        time.sleep(self.gap if content["meta_info"]["completion_tokens"] > 1 else self.wait)
        super().chunk(content)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the benchmark; returns its status, the bounds that it misses and its rows. ours, other: of the servers."""
    stack = contextlib.ExitStack()

    def command(ours, other=None):
        def launch(role, model, words, environment, folder, transfer, apart):
            assert transfer == "nixl" and environment["DSV4_SESSIONS"] == "auto"
            state = ours if environment["DSV4_STORE"] != "off" else (other or {"computes": NEW + ANSWER, "wait": 0.05})
            folder.mkdir(parents=True, exist_ok=True)
            log = folder / f"{role}.log"
            log.write_text("")
            if role == "prefill":
                port = int(words[words.index("--disaggregation-bootstrap-port") + 1])
                state = {"wait": 0.0} | state | {"log": log, "port": port, "rooms": set()}
            url = stack.enter_context(running(type("Up", (Prefill if role == "prefill" else Answers,), state)))
            return SimpleNamespace(url=url, log=log, stop=int, suspend=int, awake=contextlib.nullcontext)

        play_servers(monkeypatch, launch)
        monkeypatch.setattr(store_servers, "QUIET", 0.02)
        status = store_pair.main([
            "--config", str(CONFIG), "--experts", "2", "--logs", str(tmp_path), "--out", str(tmp_path),
            "--tokens", "1024", "--turn", str(NEW + ANSWER), "--answer", str(ANSWER), "--agents", str(AGENTS),
            "--turns", str(TURNS), "--rounds", "1", "--timeout", "20",
        ])  # fmt: skip
        found = json.loads((tmp_path / "pd-store-agents.json").read_text())
        return status, [b["name"] for b in found["bounds"] if not b["ok"]], found["rows"]

    with stack:
        yield command


FAIR = {"gap": 0.01, "wait": 0.01}


def test_answers_that_come_back_are_not_prefilled(run):
    status, missed, rows = run(FAIR, {"computes": NEW + ANSWER, "gap": 0.02, "wait": 0.05})
    assert (status, missed) == (0, [])
    assert len(rows) == 2 + 2 and rows[0]["asked"] == rows[0]["whole"] == AGENTS * (1 + TURNS)
    by_name = {row["run"]: row for row in rows}
    assert by_name[f"all rounds {OURS}"]["prefilled_by_new"] == 1.0
    assert by_name["all rounds without"]["prefilled_by_new"] == (NEW + ANSWER) / NEW
    assert by_name[f"all rounds {OURS}"]["gap_p50_ms"] >= 9


@pytest.mark.parametrize(("ours", "bound"), [
    ({"computes": 3 * NEW}, "tokens prefilled for a later turn, by its new words"),
    ({"wait": 0.4}, "first token of a later turn, median, by that without"),
    ({"gap": 0.1}, "gap between tokens, p99, by that without"),
    ({"trouble": "leak detected\n"}, "trouble in a log"),
])  # fmt: skip
def test_a_bad_figure_misses_its_bound(run, ours, bound):
    status, missed, _ = run(FAIR | ours, {"computes": NEW + ANSWER, "gap": 0.04, "wait": 0.1})
    assert status == 1 and bound in missed


def test_answers_end_at_other_places_of_a_page():
    """Each agent leaves another part of its last page, which is prefilled again; equal lengths would leave the same."""
    arguments = store_pair.parse(["--config", str(CONFIG), "--tokens", "2048"])
    agents = store_pair.PairAgents(None, 0, arguments)
    assert [len(said) for said in agents.said] == [2048, 1984, 1920, 1856]


@pytest.mark.parametrize("more", [[], ["--tokens", "2048", "--turn", "1700", "--answer", "1500"]])
def test_a_warm_up_prefills_as_much_in_a_later_turn(more):
    """Both answers are stored up to as many tokens before the later prompt, which are worth an ask."""
    arguments = store_pair.parse(["--config", str(CONFIG), *more])
    short, page = store_pair.short(arguments, True), store_pair.PAGE
    prompts = [(said.tokens + said.turn, (said.tokens + said.answer) // page * page) for said in (arguments, short)]
    assert prompts[0][0] - prompts[0][1] == prompts[1][0] - prompts[1][1]
    assert prompts[1][1] - short.tokens // page * page >= FEWEST_TOKENS
    assert more or short.tokens + short.answer < arguments.tokens / 3
    assert short.agents == arguments.agents
    alone = store_pair.short(arguments, False)
    assert (alone.turn, alone.answer) == (arguments.turn, arguments.answer)
