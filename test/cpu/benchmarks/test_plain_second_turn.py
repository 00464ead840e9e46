"""Second turns after restores: what is compared with what, when a retract falls due, and each missed bound."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fake_http import Handler, running

from benchmarks.plain import second_turn as bench
from benchmarks.plain.conversations import PAGE, WINDOW
from benchmarks.plain.retract_at.deepseek_v4 import retracting

WORDS = ["--model-path", "m", "--conversations", "4", "--prompt", "300", "600"]
LOADED = "[t] loaded 700 tokens, 1.9 MB in 1.50 ms; copies alive 0, 0.00 of 1.00 GiB held\n"


def test_a_retract_falls_behind_an_edge_with_enough_tokens_to_be_loaded():
    for turn in bench.turns_of(bench.parse(["--model-path", "m"])):
        saved = len(turn.prompt) + turn.retract_at - 1
        assert 0 < saved % PAGE < WINDOW
        assert saved - len(turn.prompt) // PAGE * PAGE > bench.FEW_TOKENS
        assert turn.new_tokens > turn.retract_at


class Server(Handler):
    """A plain server with a prefix tree of whole pages; ``wrong``: what its restored pages add to a log probability."""

    tree: set[tuple[int, ...]] = set()  # noqa: RUF012
    wrong, off, log = 0.0, 0.0, None

    def do_POST(self) -> None:
        body = self.body()
        self.begin()
        if self.path.startswith("/flush"):
            self.tree.clear()
            return
        ids, sampling = body["input_ids"], body["sampling_params"]
        if "logprob_start_len" in body:
            self.read(ids, body["logprob_start_len"])
            return
        count = min(sampling["max_new_tokens"], 900)
        if "@" in body.get("rid", ""):
            with self.log.open("a") as out:
                out.write(LOADED)
            type(self).off = self.wrong
        tokens = [7] * count
        self.tree.add((*ids, *tokens))
        for end in (1, count):
            self.chunk({"output_ids": tokens[:end], "meta_info": {"completion_tokens": end, "finish_reason": None}})

    def read(self, ids, start):
        known = any(len(kept) - 1 >= start and tuple(ids[:start]) == kept[:start] for kept in self.tree)
        listed = [[None, ids[start], None]]
        listed += [[-1.0 - known * (0.001 + self.off), token, None] for token in ids[start + 1 :]]
        text = str(listed).replace("None", "null")
        meta = f'"input_token_logprobs": {text}, "cached_tokens": {start if known else 0}'
        self.wfile.write(f'{{"meta_info": {{{meta}}}}}'.encode())


@pytest.fixture
def rows_with(tmp_path, monkeypatch):
    """The rows of a run whose restored pages are wrong by so much."""
    monkeypatch.setattr(bench.time, "sleep", lambda _: None)
    monkeypatch.setattr(bench, "warm_up", lambda *_: None)
    monkeypatch.setattr(bench, "counted_at", lambda _: {"verified": 4, "held_bytes_at_end": 0})
    monkeypatch.setattr(bench.servers, "wait_until_up", lambda *_: None)
    Server.log = tmp_path / "server.log"

    def run(wrong: float) -> list[dict]:
        Server.log.write_text("")
        Server.tree.clear()
        Server.wrong, Server.off = wrong, 0.0
        with running(Server) as url:
            server = SimpleNamespace(url=url, log=Server.log, stop=lambda: None)
            monkeypatch.setattr(bench.servers, "launch", lambda *_: server)
            return bench.measure(bench.parse([*WORDS, "--logs", str(tmp_path)]))

    return run


def test_warm_and_flushed_second_turns_are_compared(rows_with):
    control, restored, server, zeroed = rows_with(0.5)
    assert (control["conversations"], control["loads"], restored["loads"], server["loads"]) == (4, 0, 4, 4)
    assert (control["cached"], control["found_nothing"]) == (1.0, 0)
    assert control["difference_largest"] == pytest.approx(0.001)
    assert restored["difference_median"] == zeroed["difference_largest"] == pytest.approx(0.501)


GOOD = {"conversations": 4, "found_nothing": 0, "lost": 0, "loads": 4, "difference_median": 0.02,
        "difference_largest": 0.05}  # fmt: skip
SERVER = {"loads": 4, "verified": 4, "trouble": [], "held_bytes_at_end": 0}
MEAN = "mean difference of a second turn's log probabilities"


@pytest.mark.parametrize(
    ("row", "change", "missed"),
    [
        (1, {}, None),
        (1, {"difference_median": 0.05}, f"{MEAN}, restored: median"),
        (1, {"difference_largest": 0.11}, f"{MEAN}, restored: largest"),
        (1, {"loads": 3}, "loads, restored"),
        (1, {"lost": 1}, "first turns lost"),
        (1, {"found_nothing": 3}, "second turns that found a prefix, restored"),
        (0, {"loads": 1}, "loads, never retracted"),
        (2, {"verified": 3}, "loads not compared with their copy"),
        (2, {"trouble": ["leak detected"]}, "trouble in the log"),
        (2, {"held_bytes_at_end": 9}, "host memory held at the end, bytes"),
        (3, {"difference_largest": 0.09}, f"{MEAN}, c4_kv zeroed: largest"),
    ],
)
def test_each_fault_misses_its_bound(row, change, missed):
    rows = [GOOD | {"loads": 0}, dict(GOOD), dict(SERVER), GOOD | {"run": "c4_kv zeroed", "difference_largest": 2.0}]
    rows[row] |= change
    bounds = bench.judge(rows, bench.parse(WORDS))
    assert [bound["name"] for bound in bounds if not bound["ok"]] == ([missed] if missed else [])


def test_a_request_is_retracted_once_at_the_token_that_its_name_says():
    engine = SimpleNamespace(TEST_RETRACT=False, TEST_RETRACT_INTERVAL=3)
    seen = []
    update = retracting(lambda *_: seen.append((engine.TEST_RETRACT, engine.TEST_RETRACT_INTERVAL)), engine)
    one, keeper = (
        SimpleNamespace(rid=rid, output_ids=[0] * count, finished=lambda: False)
        for rid, count in (("restored 3@5", 4), ("keeper", 90))
    )
    for reqs, count in (([one, keeper], 4), ([one], 5), ([one, keeper], 6), ([one, keeper], 7)):
        one.output_ids = [0] * count
        update(None, SimpleNamespace(reqs=reqs))
    assert seen == [(False, 3), (False, 3), (True, 1), (False, 3)]
    assert (engine.TEST_RETRACT, engine.TEST_RETRACT_INTERVAL) == (False, 3)
