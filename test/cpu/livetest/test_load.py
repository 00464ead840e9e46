"""The requests of a run against a fake decode server: every token collected, what goes wrong told apart."""

import signal
import threading
import time

import pytest
from fake_http import Decode, Handler, running

from sglang_dsv4.cli import stress
from sglang_dsv4.livetest.load import Load, Run


@pytest.fixture
def decode():
    with running(Decode) as url:
        yield url
    Decode.bad, Decode.cumulative = {}, True


def run(url: str, requests: int = 6, timeout: float = 10) -> Run:
    words = ["--requests", str(requests), "--prompt", "3", "9", "--new-tokens", "4", "8"]
    arguments = stress.parse(["--model-path", "m", *words])
    vars(arguments).update(concurrency=3, timeout=timeout)
    return Run(Load.of(arguments), arguments, url, None, 1).execute("test")


@pytest.mark.parametrize("cumulative", [True, False])
def test_every_token_is_collected(decode, cumulative):
    Decode.cumulative = cumulative
    found = run(decode)
    assert found.summary()["whole"] == found.summary()["asked"] == 6
    for answer, prompt, new in zip(found.answers, found.load.prompts, found.load.new_tokens, strict=True):
        assert answer.tokens == [sum(prompt) % 97 + i for i in range(new)]


FATES = {  # what happens to each request, and its outcome
    1: ("", "whole"), 2: ("twice", "too_many"), 3: ("short", "too_few"), 4: ("silent", "never_ended"),
    5: (503, "refused"), 6: ("abort 503", "refused"), 7: ("error 503", "refused"),
    8: (500, "failed"), 9: ("abort 500", "failed"), 10: ("error 400", "failed"), 11: ("hang up", "too_few"),
}  # fmt: skip


@pytest.mark.parametrize("cumulative", [True, False])
def test_each_outcome_is_counted_by_its_kind(decode, cumulative, capsys):
    Decode.cumulative, Decode.bad = cumulative, {room: fate for room, (fate, _) in FATES.items()}
    Decode.over = threading.Event()
    found = run(decode, len(FATES), timeout=1)
    Decode.over.set()
    assert {room: answer.outcome for room, answer in enumerate(found.answers, 1)} == {
        room: outcome for room, (_, outcome) in FATES.items()
    }
    summary = found.summary()
    counted = {"whole": 1, "too_many": 1, "too_few": 2, "never_ended": 1, "refused": 3, "failed": 3, "unsent": 0}
    assert {name: summary[name] for name in counted} == counted and summary["asked"] == 11
    said = "1 of 11 whole, 1 too many, 2 too few, 1 never ended, 3 refused, 3 failed"
    assert f"  test: {said}\n" in capsys.readouterr().out
    wanted = found.load.new_tokens[1]
    assert found.answers[1].error == f"{wanted + 1} of {wanted} tokens", "a token came twice"
    assert found.answers[4].error.startswith("HTTP 503") and found.answers[5].error == "no host copy"


def test_a_server_that_is_gone_loses_requests_and_is_asked_no_more():
    summary = run("http://127.0.0.1:9").summary()
    assert summary["failed"] == 6
    assert "not sent: the server is gone" in summary["errors"]


class Stalled(Handler):
    """Begins an answer and says no more until the test is over."""

    over = threading.Event()

    def do_POST(self) -> None:
        self.body()
        self.begin()
        self.over.wait(20)


def test_an_interrupt_waits_for_no_answer():
    """The servers would outlive a driver that is killed while it waits."""
    main = threading.main_thread().ident
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    with running(Stalled) as url:
        threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT)).start()
        began = time.monotonic()
        try:
            with pytest.raises(KeyboardInterrupt):
                run(url)
            assert time.monotonic() - began < 5
        finally:
            signal.signal(signal.SIGINT, before)
            Stalled.over.set()
