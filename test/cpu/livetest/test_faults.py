"""Each drill shows what it must, and says so when its guard does nothing."""

import json
from unittest import mock

import pytest

from sglang_dsv4 import metrics
from sglang_dsv4.cli import drill
from sglang_dsv4.cli.main import main
from sglang_dsv4.engine.hooks.check import Landing
from sglang_dsv4.livetest import faults
from sglang_dsv4.transfer import verify


def test_every_fault_looks_as_it_must(capsys):
    assert main(["drill", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["ok"] and tuple(found["drills"]) == drill.NAMES == tuple(faults.SCENES)
    assert all(scene["expects"] for scene in found["drills"].values())


SABOTAGE = {
    "memory": lambda: mock.patch.object(metrics, "logger", mock.MagicMock()),
    "hooks": lambda: mock.patch.object(Landing, "missing", lambda self: []),
    "damage": lambda: mock.patch.object(verify, "check_host", lambda *_: None),
}


@pytest.mark.parametrize("name", drill.NAMES)
def test_a_guard_that_does_nothing_is_noticed(capsys, name):
    with SABOTAGE[name]():
        assert main(["drill", name]) == 1
    said = capsys.readouterr().out
    assert "MISSED" in said and "0 of 1 faults" in said
