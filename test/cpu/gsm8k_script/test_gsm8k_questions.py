"""The data file: shots, prompts, bad lines, and the problems that come with the script."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_server import SMOKE, Run, Server, asked, lines, right
from gsm8k.questions import last_number, read_lines


def test_train_file_leaves_all_data(run: Run, serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve(right)
    assert run(server.url, "--train", str(lines(tmp_path / "train.jsonl", 9, first=50))) == 0
    prompts = [body["text"] for _, body in server.asked]
    assert len(prompts) == 12
    assert all(prompt.startswith("Question: q50\n") and prompt.count("Question: ") == 3 for prompt in prompts)
    assert not any("q52" in prompt for prompt in prompts)


@pytest.mark.parametrize("spelling", ["data.jsonl", "./sub/../data.jsonl"])
def test_train_is_data(run: Run, serve: Callable[..., Server], tmp_path: Path, spelling: str) -> None:
    (tmp_path / "sub").mkdir()
    server = serve(right)
    assert run(server.url, "--train", str(tmp_path / spelling)) == 0
    assert {asked(body) for _, body in server.asked} == {f"q{i}" for i in range(2, 12)}


def test_no_shots(run: Run, serve: Callable[..., Server]) -> None:
    server = serve(right)
    assert run(server.url, "--shots", "0") == 0
    assert sorted(body["text"] for _, body in server.asked)[0] == "Question: q0\nAnswer:"
    assert len(server.asked) == 12


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "3",
        '"text"',
        "{}",
        '{"question": "a"}',
        '{"question": 3, "answer": "#### 1"}',
        '{"question": "a", "answer": null}',
        '{"question": " ", "answer": "#### 1"}',
        '{"question": "a", "answer": "1"}',
        '{"question": "a", "answer": "#### one"}',
    ],
)
@pytest.mark.parametrize("flag", ["--data", "--train"])
def test_bad_line(run: Run, serve: Callable[..., Server], tmp_path: Path, flag: str, line: str) -> None:
    path = lines(tmp_path / "bad.jsonl", 3, first=50)
    path.write_text(path.read_text() + f"\n{line}\n")  # line 4 is empty
    assert run(serve(right).url, flag, str(path)) == 2
    assert f"{flag} {path}: line 5 " in run.err


def test_not_text(run: Run, serve: Callable[..., Server], tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_bytes(b"\xff\xfe")
    assert run(serve(right).url, "--data", str(tmp_path / "bad.jsonl")) == 2
    assert "cannot be read" in run.err


def test_short_or_overlapping_train(run: Run, serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve(right)
    assert run(server.url, "--train", str(lines(tmp_path / "short.jsonl", 1, first=50))) == 2
    assert "short.jsonl: 1 lines, --shots 2 needs as many" in run.err
    assert run(server.url, "--train", str(lines(tmp_path / "same.jsonl", 2, first=11))) == 2
    assert "question 11 (from 0) is also a shot" in run.err
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    assert run(server.url, "--data", str(empty), "--train", str(run.data)) == 2
    assert "empty.jsonl: no lines" in run.err


def test_smoke_data() -> None:
    entries = read_lines(SMOKE, "--data")
    assert len(entries) == 16
    assert len({entry["question"] for entry in entries}) == 16
    for entry in entries:
        *steps, last = entry["answer"].split("\n")
        assert re.fullmatch(r"#### -?\d{1,3}(,\d{3})*", last)
        assert "####" not in "".join(steps)
        assert entry["question"].endswith("?")
        assert last_number(steps[-1]) == entry["gold"]


def test_smoke_arithmetic() -> None:
    checked = 0
    for entry in read_lines(SMOKE, "--data"):
        found = re.findall(r"([\d*/+()-]+)=\$?<<([\d*/+()-]+)=(-?\d+)>>(-?[\d,]+)", entry["answer"])
        assert len(found) == entry["answer"].count("<<") >= 2
        for said, sum_, value, shown in found:
            assert said == sum_
            # eval of digits and operators alone
            assert eval(sum_) == int(value) == int(shown.replace(",", "").rstrip("."))
            checked += 1
        assert found[-1][2] == entry["gold"]
    assert checked >= 40
