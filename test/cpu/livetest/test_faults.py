"""Each drill shows what it must, and says so when it does not."""

from __future__ import annotations

import json
from unittest import mock

import pytest

from sglang_dsv4 import metrics
from sglang_dsv4.cli import drill
from sglang_dsv4.cli.main import main
from sglang_dsv4.engine.hooks.check import Landing
from sglang_dsv4.hostmem.arena import Arena
from sglang_dsv4.livetest import faults
from sglang_dsv4.livetest.faults.scene import Drill, Scene
from sglang_dsv4.pools import token_to_kv
from sglang_dsv4.transfer import verify

BY_NAME = {drill.name: drill for drill in faults.DRILLS}


@pytest.mark.parametrize("name", BY_NAME)
def test_every_scene_is_as_it_must_be(name):
    scenes = list(BY_NAME[name].play())
    assert scenes
    for scene in scenes:
        assert scene.expects
        assert scene.missed == [], f"{scene.what}\n{scene.seen}"


# What the drill must notice: the guard that it provokes does nothing.
SABOTAGE = {
    "settings": lambda: mock.patch.object(Landing, "require", lambda self: None),
    "memory": lambda: mock.patch.object(metrics, "logger", mock.MagicMock()),
    "pinning": lambda: mock.patch.object(Arena, "_pin", lambda *_: None),
    "hooks": lambda: mock.patch.object(Landing, "missing", lambda self: []),
    "layout": lambda: mock.patch.object(token_to_kv, "logger", mock.MagicMock()),
    "damage": lambda: mock.patch.object(verify, "check_host", lambda *_: None),
}


@pytest.mark.parametrize("name", SABOTAGE)
def test_a_guard_that_does_nothing_is_noticed(name):
    with SABOTAGE[name]():
        assert any(scene.missed for scene in BY_NAME[name].play())


GOOD = Scene("what", "log", "the real text", ("real",), {"fact": True})
OTHER_TEXT = Scene("what", "log", "another text", ("real",))
FALSE_FACT = Scene("what", "log", "the real text", ("real",), {"a fact": False})


@pytest.mark.parametrize(
    ("scenes", "status", "printed"),
    [
        ((GOOD,), 0, "1 of 1 scenes"),
        ((GOOD, OTHER_TEXT), 1, "MISSED no text like 'real'"),
        ((FALSE_FACT,), 1, "MISSED not true: a fact"),
    ],
)
def test_the_status_and_the_report(monkeypatch, capsys, scenes, status, printed):
    monkeypatch.setattr(faults, "DRILLS", (Drill("toy", "a toy", "nothing", lambda: iter(scenes)),))
    assert main(["drill", "toy", "--json"]) == status
    out = capsys.readouterr().out
    assert printed in out
    found = json.loads(out.splitlines()[-1])
    assert found["ok"] is (status == 0)
    assert [scene["seen"] for scene in found["drills"]["toy"]] == [scene.seen for scene in scenes]


def test_every_drill_is_listed_and_an_unknown_one_refused(capsys):
    assert main(["drill", "--list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in (*BY_NAME, *drill.LIVE))
    for names in (["flood"], ["damage", "clients"]):
        with pytest.raises(SystemExit) as caught:
            main(["drill", *names])
        assert caught.value.code == 2 and names[-1] in capsys.readouterr().err
