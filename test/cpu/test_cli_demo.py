"""``sglang-dsv4 demo``: it compares every byte, ends on any input, and refuses by name what it cannot do."""

from __future__ import annotations

import json

import pytest
import torch

from sglang_dsv4.cli import demo
from sglang_dsv4.cli.main import main
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


@pytest.mark.parametrize(
    ("argv", "environ", "named"),
    [
        (["--pages", "3", "--requests", "1"], {}, "--pages 3 hold 768 tokens; with --longest 1500 at least 10"),
        (["--device", "cuda"], {}, "--device cuda: torch sees no CUDA device here; use --device cpu"),
        ([], {"DSV4_HOST_GB": "abc"}, "DSV4_HOST_GB='abc'"),
        ([], {"DSV4_ENABLED": "0"}, "DSV4_ENABLED=0: the engine stays as it is"),
        ([], {"DSV4_HOST_GB": "0.0001"}, "raise DSV4_HOST_GB"),
    ],
)
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
