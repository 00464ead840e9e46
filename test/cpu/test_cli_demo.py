"""``sglang-dsv4 demo``: it compares every byte, ends on any input, and refuses by name what it cannot do."""

import json
import os
import re

import pytest
import torch

from sglang_dsv4.cli import demo
from sglang_dsv4.cli.main import main
from sglang_dsv4.sessions.store import SessionStore
from sglang_dsv4.testing import demo_sessions
from sglang_dsv4.testing.demo_scheduler import MOST_OUTPUT, least_pages

SMALL = ["--device", "cpu", "--requests", "6", "--longest", "400"]


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def ended(argv):
    """The exit status, of argparse's refusals too."""
    try:
        return main(["demo", *argv])
    except SystemExit as error:
        return error.code


@pytest.mark.parametrize(("argv", "environ", "named"), [
    (["--pages", "3", "--requests", "1"], {}, "--pages 3 hold 768 tokens; with --longest 1500 at least 10"),
    (["--device", "cuda"], {}, "--device cuda: torch sees no CUDA device here; use --device cpu"),
    ([], {"DSV4_HOST_GB": "abc"}, "DSV4_HOST_GB='abc'"),
    ([], {"DSV4_ENABLED": "0"}, "DSV4_ENABLED=0: the engine stays as it is"),
    ([], {"DSV4_HOST_GB": "0.0001"}, "raise DSV4_HOST_GB"),
    (["--sessions", "--longest", "1279"], {}, "--longest 1279: with --sessions at least 1280 tokens are needed"),
    (["--sessions", "--pages", "18"], {}, "--pages 18: with --sessions and --longest 1500 at least 19 are needed"),
    (["--sessions", "--device", "cuda"], {}, "--device cuda: with --sessions the server plays on the CPU"),
    (["--sessions"], {"DSV4_SESSIONS": "off"}, "DSV4_SESSIONS=off: there would be no sessions to show"),
    (["--sessions"], {"DSV4_PLAIN": "off"}, "DSV4_PLAIN=off: plain servers alone keep sessions"),
])  # fmt: skip
def test_what_it_cannot_do_is_refused_by_name(capsys, monkeypatch, argv, environ, named):
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    assert ended(["--device", "cpu", *argv]) == 2
    said = capsys.readouterr()
    assert named in said.err
    assert said.out == ""


@pytest.mark.parametrize("model", ["v4", "v41"])
@pytest.mark.parametrize(("longest", "seed"), [(400, 0), (256, 1), (1, 2)])
def test_in_the_fewest_pages_it_still_ends_and_every_byte_is_right(capsys, longest, seed, model):
    pages = str(least_pages(longest))
    argv = ["--device", "cpu", "--requests", "5", "--longest", str(longest), "--pages", pages, "--seed", str(seed)]
    argv += ["--model", model]
    assert ended([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["exact"] == found["resumes"]
    assert found["retracts"] > 0
    assert found["mismatches"] == found["leaks"] == 0
    assert longest + MOST_OUTPUT <= int(pages) * 256


@pytest.mark.parametrize("model", ["v4", "v41"])
def test_a_corrupted_copy_is_found(capsys, model):
    assert ended([*SMALL, "--corrupt", "--model", model]) == 1
    assert "MISMATCH" in capsys.readouterr().out


def test_it_says_how_long_it_takes_and_how_far_it_is_without_a_terminal(capsys, monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.setattr(demo, "EVERY", 0.0)
    try:
        assert ended(SMALL) == 0
        assert torch.get_num_threads() == 1, "more would spin where other programs keep the cores busy"
    finally:
        torch.set_num_threads(threads)
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "6 requests, every byte compared; about 1 s of one core"
    assert any(" of 6 requests, retracts " in line for line in lines)
    assert "\r" not in "".join(lines)


@pytest.mark.parametrize("model", ["v4", "v41"])
def test_conversations_go_on_from_the_host_and_every_byte_is_right(capsys, model):
    pages = str(demo_sessions.least_pages(1300))
    argv = ["--sessions", "--requests", "7", "--longest", "1300", "--pages", pages, "--model", model]
    assert ended([*argv, "--json"]) == 0
    assert "DSV4_SESSIONS" not in os.environ
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["leaks"], found["mismatches"]) == (0, [])
    lost = found["lost"]
    assert [(row["turns"], row["by_window"], row["by_pages"]) for row in lost.values()] == [
        (2, 0, 2), (1, 1, 0), (1, 0, 0), (3, 0, 1)
    ]  # fmt: skip
    for row in lost.values():
        assert row["loaded"] <= row["cached"] and row["tokens"] - row["cached"] <= row["turns"] * (400 + 40 + 256)
    assert lost["all"]["loaded"] == lost["all"]["cached"] and lost["nothing"]["loaded"] == 0


@pytest.mark.parametrize(("verify", "found"), [("0", "WrongRows: "), ("1", "VerifyMismatch: host copy changed")])
def test_a_corrupted_session_is_found(capsys, monkeypatch, verify, found):
    monkeypatch.setenv("DSV4_VERIFY", verify)
    assert ended(["--sessions", "--requests", "1", "--corrupt"]) == 1
    assert f"MISMATCH {found}" in capsys.readouterr().out


def test_a_page_that_stays_behind_is_a_leak(capsys, monkeypatch):
    monkeypatch.setattr(SessionStore, "clear", lambda *_: None)
    assert ended(["--sessions", "--requests", "1"]) == 1
    assert re.search(r"^leaked pages, slots, copies or units: [1-9]", capsys.readouterr().out, re.M)
