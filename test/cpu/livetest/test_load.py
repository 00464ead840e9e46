"""The requests of a run against a fake decode server: every token collected, what goes wrong told apart."""

from __future__ import annotations

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


def run(url: str, requests: int = 6, most: int = 8) -> Run:
    words = ["--requests", str(requests), "--prompt", "3", "9", "--new-tokens", "4", str(most)]
    arguments = stress.parse(["--model-path", "m", *words])
    vars(arguments).update(concurrency=3, timeout=10)
    return Run(Load.of(arguments), arguments, url, None, 1).execute("test")


@pytest.mark.parametrize("cumulative", [True, False])
def test_every_token_is_collected(decode, cumulative):
    Decode.cumulative = cumulative
    found = run(decode)
    summary = found.summary()
    assert (summary["finished"], summary["refused"], summary["lost"]) == (6, 0, 0)
    for answer, prompt, new in zip(found.answers, found.load.prompts, found.load.new_tokens, strict=True):
        assert answer.tokens == [sum(prompt) % 97 + i for i in range(new)]


def test_what_goes_wrong_is_told_apart(decode):
    Decode.bad = {1: "http", 2: "twice", 3: "abort", 5: "short"}
    found = run(decode)
    summary = found.summary()
    assert (summary["finished"], summary["refused"], summary["lost"]) == (2, 2, 2)
    assert any("no host copy" in error for error in summary["errors"])
    assert any("HTTP 500" in error for error in summary["errors"])
    wanted = found.load.new_tokens[1]
    assert found.answers[1].error == f"{wanted + 1} of {wanted} tokens", "a token came twice"


def test_a_server_that_is_gone_loses_requests_and_is_asked_no_more():
    summary = run("http://127.0.0.1:9").summary()
    assert summary["lost"] == 6
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
