"""The exam asked of played servers, from its command line to its result."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from fake_http import COPIED, Plain, play_servers, running

from benchmarks.exam import ask, export, problems, recipe
from sglang_dsv4.command_line import to_its_end
from sglang_dsv4.livetest import in_server, runs, score

FAMILIES = ("swa_kv", "c4_indexer")
CHOSEN = recipe.toy()


class Pupil(Plain):
    """Knows every answer. Where a family is lost, it errs in the chapters, but for the indexer in long ones alone."""

    known: ClassVar[dict[tuple[int, ...], problems.Problem]] = {}
    word: Path | None = None  # the file of its switch
    torchs = 0.01  # how far it is from torch's log probabilities
    careless = False  # errs once, as after a retract that lost something

    def answer(self, prompt, count):
        problem = self.known[tuple(prompt)]
        lost = self.word.read_text() if self.word else "off"
        said = list(problem.answer_ids)
        if self.careless or lost == "swa_kv" or (lost == "c4_indexer" and len(prompt) > 400):
            said[6] += 1
            said[-2] = CHOSEN.task.values
        return said[:count]

    def scores(self, prompt, answer):
        given = [*prompt, *answer]
        (problem,) = (one for one in self.known.values() if given == [*one.input_ids, *one.answer_ids])
        return [value + self.torchs for value in problem.logprobs[len(prompt) - 1 :]]


@pytest.fixture
def folder(tmp_path):
    """An exported folder without its weights, whose answers are never 0."""
    at = tmp_path / "EXAM"
    at.mkdir()
    (at / "config.json").write_text("{}")
    drawn = [export.draw(CHOSEN, 20, limits, (4, 6), seed) for seed, limits in ((1, (132, 260)), (2, (516, 600)))]
    zero = CHOSEN.task.values
    short, long = ([one for one in some if problems.number_of(one.answer_ids) != zero] for some in drawn)
    read = [
        problems.Problem(**(vars(one) | {"logprobs": [-1.0] * (len(one.input_ids + one.answer_ids) - 1)}))
        for one in problems.by_turns(short, long)
    ]
    for name, some in ((problems.SHORT, short), (problems.LONG, long), (problems.PARITY, read[:3])):
        problems.write(at / name, some)
    Pupil.known = {tuple(one.input_ids): one for one in read}
    yield at
    Tested.word, Careless.word, Pupil.torchs = None, None, 0.01


class Tested(Pupil):
    """Stands for the server that retracts."""


class Careless(Tested):
    """Stands for one whose answers a retract changes."""

    careless = True


@pytest.fixture(autouse=True)
def _metadata_in_graphs(monkeypatch):
    monkeypatch.setenv("DSV4_PREP", "auto")  # the command would set it for good


@pytest.fixture
def asked(folder, tmp_path, monkeypatch):
    """Runs the command beside played servers; returns its exit status and the bounds that were missed."""

    def command(*words: str, tested: type[Tested] = Tested) -> tuple[int, list[str]]:
        with running(Pupil) as pupil, running(tested) as under_test:

            def launch(role, model, arguments, environment, folder, transfer="fake", apart=0):
                folder.mkdir(parents=True, exist_ok=True)
                log = folder / f"{role}.log"
                log.write_text(COPIED * 60)
                if in_server.FILE in environment:
                    tested.word = Path(environment[in_server.FILE])
                url = under_test if environment.get("DSV4_VERIFY") else pupil
                return SimpleNamespace(role=f"{role}{apart}", url=url, log=log, alive=True, stop=lambda: None)

            play_servers(monkeypatch, launch)
            monkeypatch.setattr(runs.servers, "stop_all", lambda _: {})
            monkeypatch.setattr(runs, "warm_up", lambda *_: None)
            monkeypatch.setattr(runs.time, "sleep", lambda _: None)
            given = [
                "--model-path", str(folder), "--zero", *FAMILIES, "--score", "16", "--at-least", "60", "--concurrency",
                "4",
            ]  # fmt: skip
            monkeypatch.setattr(
                ask.sys, "argv", ["ask", *given, "--out", str(tmp_path), "--logs", str(tmp_path), *words]
            )
            status = ask.main()
        name = "exam-plain" if "--plain" in words else "exam"
        found = [json.loads((tmp_path / f"{one}.json").read_text()) for one in (name, f"{name}-parity")]
        return status, [bound["name"] for one in found for bound in one["bounds"] if not bound["ok"]]

    return command


# What no log of a played server says.
UNTOLD = ["metrics of this package", "loads not compared with their copy",
          "eager steps, or ranks' graphs, whose metadata is made here"]  # fmt: skip


@pytest.mark.parametrize("way", [(), ("--plain",)])
def test_the_exam_runs_to_its_result(asked, tmp_path, way):
    _, missed = asked(*way)
    assert sorted(missed) == sorted(UNTOLD)
    path = tmp_path / ("exam-plain.json" if way else "exam.json")
    rows = {row["run"].removeprefix("finals of "): row for row in json.loads(path.read_text())["rows"][1:]}
    assert rows.keys() == {
        score.CONTROL, score.RECOMPUTED, score.RETRACTS, score.RETRACTS_AGAIN, *(f"{name} zeroed" for name in FAMILIES),
        *(() if way else (ask.STOCK_PAIR,)),
    }  # fmt: skip
    if not way:
        assert (rows[ask.STOCK_PAIR]["asked"], rows[ask.STOCK_PAIR]["retracts"]) == (16, 60)
    lost, indexer = (rows[f"{name} zeroed"] for name in FAMILIES)
    assert (lost["asked"], lost["short_right"], lost["long_right"], lost["fall"]) == (16, 0, 0, -1)
    assert (indexer["short_right"], indexer["long_right"], indexer["fall"]) == (8, 0, -1), "judged by long ones"
    assert lost["first_wrong"] == {"chapter": 16} and rows[score.CONTROL]["first_wrong"] == {}
    assert rows[score.CONTROL]["whole"] == rows[score.CONTROL]["asked"] == len(Pupil.known)
    assert rows[score.RECOMPUTED]["retracts"] == 60
    assert "| 0 of 8 | 0 of 8 | 0 of 16 | chapter 16 |" in path.with_suffix(".md").read_text()


def test_without_zeroed_families_the_rest_is_asked_and_judged(asked, tmp_path):
    assert sorted(asked("--score", "0")[1]) == sorted(UNTOLD)
    rows = json.loads((tmp_path / "exam.json").read_text())["rows"][1:]
    assert [row["run"] for row in rows] == [
        f"finals of {run}" for run in (score.CONTROL, score.RECOMPUTED, score.RETRACTS, ask.STOCK_PAIR)
    ]


def test_answers_that_retracts_change_and_other_probabilities_are_missed(asked):
    Pupil.torchs = 0.03
    status, missed = asked(tested=Careless)
    assert status == 1
    for part in (
        "apart from control",
        "token by token",
        "swa_kv zeroed",
        "c4_indexer zeroed",
        "server and torch",
        "of a prompt",
    ):
        assert any(part in name for name in missed), part


def test_a_control_that_knows_too_little_misses_its_bound():
    base = {"asked": 200, "answered": 200, "short_asked": 200, "short_right": 190, "answers_unlike_control": 3}
    fine = [{"run": f"finals of {name}", **base} for name in (score.CONTROL, score.RETRACTS)]
    assert all(bound["ok"] for bound in ask.judge(fine))
    for change, count in (({"short_right": 189}, 2), ({"answered": 199}, 1)):
        assert [bound["ok"] for bound in ask.judge([fine[0] | change, fine[1]])].count(False) == 1, count
    assert not all(bound["ok"] for bound in ask.judge([fine[0], fine[1] | {"short_right": 193}]))


def test_a_folder_without_problems_is_refused_in_one_line(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert to_its_end("ask", lambda: ask.main(["--model-path", str(tmp_path)])) == 2
    assert "no problems of benchmarks.exam.export" in capsys.readouterr().err
