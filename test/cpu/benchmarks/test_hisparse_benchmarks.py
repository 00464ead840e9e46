"""Runs the benchmark of HiSparse transfers on the CPU, and reads the command line of the stress."""

import json
from argparse import Namespace

import pytest
from hisparse_world import on_cpu

from benchmarks import hisparse_stress as stress
from benchmarks import hisparse_transfer as transfer
from sglang_dsv4.cli import stress as command


def test_a_transfer_is_measured_with_and_without_hisparse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "HOT", 64)
    arguments = Namespace(model="tiny", tokens=[1024, 1023], count=1, device="cpu", transfer="torch")
    with on_cpu():
        rows = list(transfer.measure(arguments))
    pages = 4 * 2 * 37440  # of c4 rows, of two layers
    assert [row["usual_bytes"] - row["hisparse_bytes"] for row in rows] == [pages, pages]
    bounds = transfer.judge(rows, arguments.tokens)
    assert [bound["ok"] for bound in bounds] == [False, True], "at 1024 tokens the window is most of it"
    assert not transfer.judge(rows[1:], arguments.tokens)[-1]["ok"], "cut off, it says so"


def test_the_stress_is_of_a_hisparse_server_with_prompts_beyond_the_hot_rows() -> None:
    for given in ([], ["--plain"]):
        arguments = command.parse(stress.words(["--model-path", "m", *given, "--requests", "9", "--", "--tp", "2"]))
        assert arguments.requests == 9 and arguments.plain == bool(given) and arguments.server[-2:] == ["--tp", "2"]
        config = json.loads(arguments.server[arguments.server.index("--hisparse-config") + 1])
        assert max(arguments.prompt) // 4 > config["device_buffer_size"]
