"""Second turns after restores: what is compared with what, when a retract falls due, and each missed bound."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from fake_http import Handler, running

from benchmarks.plain import second_turn as bench
from benchmarks.plain.conversations import PAGE, WINDOW
from benchmarks.plain.retract_at.deepseek_v4 import retracting
from sglang_dsv4.cache.families import Geometry
from sglang_dsv4.engine.plain.tree import half_loaded_page

WORDS = ["--model-path", "m", "--conversations", "4"]
LOADED = "[t] loaded 700 tokens, 1.9 MB in 1.50 ms; copies alive 0, 0.00 of 1.00 GiB held\n"
FEW_TOKENS = 256  # of a copy, behind what the tree has: it is not loaded


@pytest.mark.parametrize("name", [bench.SOON, bench.LATER])
def test_half_of_what_a_second_turn_reads_first_lies_before_the_rows_that_were_loaded(name):
    for turn in bench.turns_of(bench.parse(["--model-path", "m"]), bench.AFTER[name]):
        saved, tokens = len(turn.prompt) + turn.retract_at - 1, len(turn.prompt) + turn.new_tokens
        assert saved - len(turn.prompt) // PAGE * PAGE > FEW_TOKENS
        edge = bench.edge_of([0] * tokens)
        assert edge == (saved // PAGE + (name == bench.LATER)) * PAGE and tokens - edge > bench.READ
        assert half_loaded_page(Geometry((0, 4, 128)), saved) == saved // PAGE * PAGE - PAGE
        assert saved % PAGE >= WINDOW // 2


class Server(Handler):
    """A plain server with a prefix tree of whole pages; ``wrong``: how far pages of a restored request that are not
    repaired move a log probability."""

    tree: set[tuple[int, ...]] = set()  # noqa: RUF012
    wrong, off, log = 0.0, 0.0, None
    noise = random.Random(1)

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
        if any(sign in body.get("rid", "") for sign in "@!"):
            with self.log.open("a") as out:
                out.write(LOADED)
        if "rid" in body:  # the request beside them has none
            type(self).off = self.wrong * ("!" in body["rid"])
        tokens = [7] * count
        self.tree.add((*ids, *tokens))
        for end in (1, count):
            self.chunk({"output_ids": tokens[:end], "meta_info": {"completion_tokens": end, "finish_reason": None}})

    def read(self, ids, start):
        known = any(len(kept) - 1 >= start and tuple(ids[:start]) == kept[:start] for kept in self.tree)
        listed = [[None, ids[start], None]]
        off = known * self.off + self.noise.gauss(0, 0.1)
        listed += [[-1.0 + off, token, None] for token in ids[start + 1 :]]
        text = str(listed).replace("None", "null")
        meta = f'"input_token_logprobs": {text}, "cached_tokens": {start if known else 0}'
        self.wfile.write(f'{{"meta_info": {{{meta}}}}}'.encode())


@pytest.mark.parametrize(("wrong", "seen"), [(-1.0, True), (0.0, False)])
def test_only_pages_that_are_wrong_make_a_second_turn_fall(tmp_path, monkeypatch, wrong, seen):
    monkeypatch.setattr(bench.time, "sleep", lambda _: None)
    monkeypatch.setattr(bench, "warm_up", lambda *_: None)
    monkeypatch.setattr(bench, "counted_at", lambda _: {"verified": 12, "held_bytes_at_end": 0})
    monkeypatch.setattr(bench.servers, "wait_until_up", lambda *_: None)
    log = tmp_path / "server.log"
    log.touch()
    for name, value in (("log", log), ("wrong", wrong), ("noise", random.Random(1)), ("tree", set())):
        monkeypatch.setattr(Server, name, value)
    with running(Server) as url:
        server = SimpleNamespace(url=url, log=log, stop=lambda: None)
        monkeypatch.setattr(bench.servers, "launch", lambda *_: server)
        arguments = bench.parse([*WORDS, "--logs", str(tmp_path)])
        rows = bench.measure(arguments)
    assert [(row["run"], row["loads"]) for row in rows] == [
        (bench.CONTROL, 0), (bench.SOON, 4), (bench.LATER, 4), (bench.DAMAGED, 4), ("server", 12)
    ]  # fmt: skip
    assert [row["cached"] for row in rows[:-1]] == [1.0] * 4
    missed = [bound["name"] for bound in bench.judge(rows, arguments) if not bound["ok"]]
    assert missed == ([] if seen else [f"{FALL}, {bench.DAMAGED}"])


FALL = "fall of a second turn's log probabilities and 3 standard errors"
GOOD = {"conversations": 4, "cached": 0.7, "lost": 0, "loads": 4, "fall": 0.02, "fall_error": 0.05}
SERVER = {"run": "server", "loads": 12, "verified": 12, "trouble": [], "held_bytes_at_end": 0}


@pytest.mark.parametrize(
    ("row", "change", "missed"),
    [
        (1, {}, None),
        (0, {"fall": 0.9}, None),
        (0, {"fall": -0.9}, f"{FALL}, {bench.DAMAGED}"),
        (1, {"fall": -0.31}, f"{FALL}, {bench.SOON}"),
        (2, {"fall": -0.31}, f"{FALL}, {bench.LATER}"),
        (3, {"fall": -0.29}, f"{FALL}, {bench.DAMAGED}"),
        (3, {"fall_error": 1.0}, f"{FALL}, {bench.DAMAGED}"),
        (1, {"loads": 3}, f"loads, {bench.SOON}"),
        (3, {"loads": 3}, f"loads, {bench.DAMAGED}"),
        (1, {"lost": 1}, "first turns lost"),
        (2, {"cached": 0.0}, f"of a second turn, found in the prefix tree, {bench.LATER}"),
        (0, {"loads": 1}, "loads, never retracted"),
        (4, {"verified": 11}, "loads not compared with their copy"),
        (4, {"trouble": ["leak detected"]}, "trouble in the log"),
        (4, {"held_bytes_at_end": 9}, "host memory held at the end, bytes"),
    ],
)
def test_each_fault_misses_its_bound(row, change, missed):
    names = (bench.CONTROL, *bench.AFTER, bench.DAMAGED)
    rows = [*(GOOD | {"run": name} for name in names), dict(SERVER)]
    rows[0] |= {"loads": 0}
    rows[3] |= {"fall": -1.0}
    rows[row] |= change
    bounds = bench.judge(rows, bench.parse(WORDS))
    assert [bound["name"] for bound in bounds if not bound["ok"]] == ([missed] if missed else [])


def test_a_request_is_retracted_once_at_the_token_that_its_name_says():
    engine = SimpleNamespace(TEST_RETRACT=False, TEST_RETRACT_INTERVAL=3)
    seen = []
    update = retracting(lambda *_: seen.append((engine.TEST_RETRACT, engine.TEST_RETRACT_INTERVAL)), engine)
    one, two, keeper = (
        SimpleNamespace(rid=rid, output_ids=[0] * count, finished=lambda: False)
        for rid, count in (("restored 3@5", 4), ("restored 4!8", 4), ("keeper", 90))
    )
    for reqs, count in (
        ([one, keeper], 4),
        ([one], 5),
        ([one, keeper], 6),
        ([one, two, keeper], 7),
        ([two, keeper], 8),
    ):
        one.output_ids = two.output_ids = [0] * count
        update(None, SimpleNamespace(reqs=reqs))
    assert seen == [(False, 3), (False, 3), (True, 1), (False, 3), (True, 1)]
    assert (engine.TEST_RETRACT, engine.TEST_RETRACT_INTERVAL) == (False, 3)
