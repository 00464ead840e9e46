"""The check of one-token extends: what the server noted is counted, answers are scored, and each fault is seen."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from fake_http import Plain, running

from benchmarks.plain import noted_extends
from benchmarks.plain import one_token_extend as bench
from benchmarks.plain.noted_extends import deepseek_v4


class Mixing(Plain):
    """A stock server that notes an extend for each token behind the first one."""

    file: ClassVar[Path]
    notes = True

    def do_POST(self) -> None:
        body = self.body()
        prompt, count = len(body["input_ids"]), body["sampling_params"]["max_new_tokens"]
        if self.notes and count > 1:
            with self.file.open("a") as out:
                print(json.dumps([prompt + n for n in range(1, count)]), file=out)
        super().do_POST()


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Runs the benchmark over a fake server; the bounds that it missed."""

    def launch(role, model, arguments, environment, folder):
        assert role == "plain" and environment["DSV4_ENABLED"] == "0"
        assert arguments == [*bench.SERVER, "--mem-fraction-static", "0.2"]
        Mixing.file = Path(environment[noted_extends.VARIABLE])
        return SimpleNamespace(url=url, stop=lambda: None)

    monkeypatch.setattr(bench.servers, "launch", launch)
    monkeypatch.setattr(bench.servers, "wait_until_up", lambda *_: None)
    words = ["--model-path", "m", "--repeats", "1", "--logs", str(tmp_path), "--", "--mem-fraction-static", "0.2"]

    def command() -> list[str]:
        arguments = bench.parse(words)
        rows, prefixes = bench.measure(arguments)
        return [bound["name"] for bound in bench.judge(rows, prefixes, arguments) if not bound["ok"]]

    with running(Mixing) as url:
        yield command
    Mixing.notes = True


def test_extends_around_each_edge_are_counted_and_their_answers_scored(measured):
    assert measured() == []


def test_a_server_that_never_mixed_shows_nothing(measured):
    Mixing.notes = False
    missed = measured()
    assert missed[0].startswith("extends of one token by tokens") and missed[-1].startswith("extends at the rarest")
    assert len(missed) == 1 + 4 + 1


ROWS = [
    {"run": "control", "lost": 0, "refused": 0, "tokens": 288},
    {"run": bench.EXTENDS, "lost": 0, "refused": 0, "tokens": 288},
    {"run": "score of control", "answers": 12, "mean": -1.4, "unlikely": 0.0},
    {"run": f"score of {bench.EXTENDS}", "answers": 12, "mean": -1.4, "unlikely": 0.0},
    {"run": f"score of {bench.EXCHANGED}", "answers": 12, "mean": -9.0, "unlikely": 0.9},
]


@pytest.mark.parametrize(
    ("row", "change", "missed"),
    [
        (3, {"mean": -2.0}, f"mean log probability of a token, {bench.EXTENDS}"),
        (4, {"mean": -1.5}, f"mean log probability of a token, {bench.EXCHANGED}"),
        (1, {"lost": 1}, "requests lost or refused"),
    ],
)
def test_each_fault_misses_its_bound(row, change, missed):
    arguments = bench.parse(["--model-path", "m", "--repeats", "1"])
    prefixes = [prefix for edge in arguments.edges for prefix in range(edge - 2, edge + 30)] * 3
    assert all(bound["ok"] for bound in bench.judge(ROWS, prefixes, arguments))
    rows = [entry | change if number == row else entry for number, entry in enumerate(ROWS)]
    assert [b["name"] for b in bench.judge(rows, prefixes, arguments) if not b["ok"]] == [missed]


def test_a_mixed_batch_notes_the_prefixes_of_its_extends_of_one_token(tmp_path):
    file = tmp_path / "notes"
    noted = deepseek_v4.noting(lambda scheduler, batch: batch, file)
    for mixed in (True, False):
        mode = SimpleNamespace(is_mixed=lambda mixed=mixed: mixed)
        noted(None, SimpleNamespace(forward_mode=mode, prefix_lens=[0, 127, 256], extend_lens=[500, 1, 1]))
    assert bench.noted(file) == [127, 256]
