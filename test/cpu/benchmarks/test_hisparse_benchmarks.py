"""What is measured of HiSparse runs, as far as it can without a GPU."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any
from unittest import mock

import pytest
from hisparse_world import on_cpu

from benchmarks import hisparse_stress as stress
from benchmarks import hisparse_transfer as transfer
from sglang_dsv4.cli import stress as command
from sglang_dsv4.livetest.servers import ServerDied


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


@pytest.mark.parametrize("how", [KeyboardInterrupt(), ServerDied("decode server is not up\n--- tail")])
def test_a_stress_that_is_ended_early_leaves_what_the_log_says(
    how: BaseException, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "logs" / "hisparse-stress" / "decode.log"
    log.parent.mkdir(parents=True)
    saved = "[2026] saved 300 tokens, 1.0 MB in 0.50 ms; copies alive 1, 0.10 of 1.00 GiB held\n"
    log.write_text(saved * 3 + "sglang_dsv4.errors.VerifyMismatch: host pages changed\n" + "[2026] bye\n" * 40)
    monkeypatch.setattr(command, "main", mock.Mock(side_effect=how))
    folders = ["--logs", str(tmp_path / "logs"), "--out", str(tmp_path)]
    assert stress.main(["--model-path", "m", *folders]) == 1
    result = json.loads((tmp_path / "hisparse-stress.json").read_text())
    assert result["rows"][0]["saves"] == 3 and "VerifyMismatch" in result["rows"][0]["reason"]
    assert not any(bound["ok"] for bound in result["bounds"])
    assert "host pages changed" in capsys.readouterr().out, "above the tail"
