"""The gsm8k script against fake servers: what is asked, what counts as right, and what a worse run looks like."""

import json
import re
import threading
from decimal import Decimal

import pytest
import run_gsm8k as script
from fake_http import Handler, running


class Speaker(Handler):
    """Answers question N with 10 N, but for those in ``wrong`` and ``broken``; counts its retracts."""

    wrong: tuple[int, ...] = ()
    broken: tuple[int, ...] = ()
    retracts = 0
    asked: list[dict]
    lock = threading.Lock()

    def do_GET(self) -> None:
        self.begin()
        if self.path == "/metrics":
            labels = '{dp_rank="0",pp_rank="0",tp_rank="0"}'
            text = f"# TYPE sglang_dsv4_saves counter\nsglang_dsv4_saves_total{labels} {type(self).retracts}\n"
            self.wfile.write(text.encode())

    def do_POST(self) -> None:
        body = self.body()
        number = int(re.findall(r"q(\d+)", body["text"])[-1])
        with self.lock:
            self.asked.append(body)
            if type(self).retracts:
                type(self).retracts += 1
        self.begin(500 if number in self.broken else 200)
        text = f" so {1 if number in self.wrong else 10 * number}."
        self.wfile.write(json.dumps({"text": text, "meta_info": {"finish_reason": {"type": "stop"}}}).encode())


@pytest.fixture
def speakers():
    """A server that retracts and one that does not."""
    kinds = [type(name, (Speaker,), {"asked": []}) for name in ("Retracting", "Control")]
    kinds[0].retracts = 5
    with running(kinds[0]) as first, running(kinds[1]) as second:
        yield kinds, (first, second)


@pytest.fixture
def run(tmp_path, speakers):
    data = tmp_path / "data.jsonl"
    lines = [{"question": f"q{i}", "answer": f"Not {i + 1} but more.\n#### {10 * i}"} for i in range(22)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def call(*words: str) -> tuple[int, dict]:
        given = ["--data", str(data), "--shots", "2", "--out", str(tmp_path), "--concurrency", "4", *words]
        status = script.main(given)
        return status, json.loads((tmp_path / "gsm8k.json").read_text()) if status < 2 else {}

    return call


def missed_by(result: dict) -> list[str]:
    return [bound["name"] for bound in result["bounds"] if not bound["ok"]]


def test_a_pair_says_accuracy_of_both_and_the_retracts(run, speakers):
    (retracting, control), (url, other) = speakers
    retracting.wrong, control.wrong = (7,), (8,)
    status, found = run("--url", url, "--control-url", other)
    first, second, pair = found["rows"]
    assert status == 0, missed_by(found)
    assert (first["asked"], first["right"], first["accuracy"], first["retracts"]) == (20, 19, 0.95, 20)
    assert (second["right"], second["retracts"]) == (19, 0)
    assert (pair["only_with_retracts_right"], pair["only_control_right"], pair["same_text"]) == (1, 1, 18)
    prompts = [sorted(body["text"] for body in kind.asked) for kind in (retracting, control)]
    assert prompts[0] == prompts[1] and len(set(prompts[0])) == 20, "both are asked the same"
    assert all(prompt.count("Answer:") == 3 and "Question: q0\n" in prompt for prompt in prompts[0])


def test_too_few_right_answers_or_no_retracts_are_a_miss(run, speakers):
    (retracting, control), (url, other) = speakers
    retracting.wrong = tuple(range(2, 7))
    assert missed_by(run("--url", url, "--control-url", other)[1]) == ["right answers fewer than the control's"]
    retracting.wrong, retracting.retracts, control.retracts = (2, 3, 4), 0, 3
    assert missed_by(run("--url", url, "--control-url", other)[1]) == ["retracts", "retracts of the control"]


def test_a_failed_request_is_no_wrong_answer(run, speakers):
    (retracting, _), (url, _) = speakers
    retracting.broken = (9,)
    status, found = run("--url", url)
    (row,) = found["rows"]
    assert (status, row["failed"], row["right"], row["accuracy"]) == (1, 1, 19, 1.0)
    assert "HTTP Error 500" in row["errors"][0]


NUMBERS = {"so 1,234.50.": "1234.5", "$18": "18", "3 + 4 = 7 apples": "7", "none": None, "it is -3": "-3", "5.": "5"}


@pytest.mark.parametrize(("text", "number"), NUMBERS.items())
def test_the_last_number_of_a_text(text, number):
    assert script.last_number(text) == (None if number is None else Decimal(number))
