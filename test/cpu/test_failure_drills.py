"""Each drill shows what it must, and says so when it does not."""

from __future__ import annotations

import json
import logging
from unittest import mock

import failure_drills
import pytest
from drills import DRILLS
from drills.scene import NOTHING, Drill, Scene, raised, server_log, without_frames

from sglang_dsv4 import metrics
from sglang_dsv4.engine.landed import Landing
from sglang_dsv4.errors import SettingError
from sglang_dsv4.hostmem.arena import Arena
from sglang_dsv4.pools import token_to_kv
from sglang_dsv4.transfer import verify

BY_NAME = {drill.name: drill for drill in DRILLS}


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
    "pinning": lambda: mock.patch.object(Arena, "_pin", lambda self: None),
    "hooks": lambda: mock.patch.object(Landing, "missing", lambda self: []),
    "layout": lambda: mock.patch.object(token_to_kv, "logger", mock.MagicMock()),
    "damage": lambda: mock.patch.object(verify, "check_host", lambda copy, plan: None),
}


@pytest.mark.parametrize("name", SABOTAGE)
def test_a_guard_that_does_nothing_is_noticed(name):
    with SABOTAGE[name]():
        assert any(scene.missed for scene in BY_NAME[name].play())


def drill(*scenes: Scene) -> Drill:
    return Drill("toy", "a toy", "nothing", lambda: iter(scenes))


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
    import drills

    monkeypatch.setattr(drills, "DRILLS", (drill(*scenes),))
    assert failure_drills.main(["toy", "--json"]) == status
    out = capsys.readouterr().out
    assert printed in out
    found = json.loads(out.splitlines()[-1])
    assert found["ok"] is (status == 0)
    assert [scene["seen"] for scene in found["drills"]["toy"]] == [scene.seen for scene in scenes]


def test_the_list_and_an_unknown_name(capsys):
    assert failure_drills.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in BY_NAME)
    with pytest.raises(SystemExit) as caught:
        failure_drills.main(["flood"])
    assert caught.value.code == 2
    assert "no drill flood" in capsys.readouterr().err


def test_the_log_is_kept_without_frames_and_put_back():
    logger = logging.getLogger("sglang_dsv4")
    before = logger.level, logger.propagate, list(logger.handlers)
    with server_log() as lines:
        logging.getLogger("sglang_dsv4.toy").info("seen")
        try:
            raise SettingError("DSV4_X")
        except SettingError:
            logging.getLogger("sglang_dsv4.toy").exception("failed")
    assert (logger.level, logger.propagate, logger.handlers) == before
    assert lines[0] == "INFO seen"
    assert lines[1].splitlines()[0] == "ERROR failed"
    assert lines[1].splitlines()[-1] == "sglang_dsv4.errors.SettingError: DSV4_X"
    assert "File" not in lines[1]


def test_only_errors_of_this_package_count_as_shown():
    assert raised(lambda: None) == NOTHING
    with pytest.raises(KeyError):
        raised(lambda: {}["x"])
    assert without_frames("plain\n  indented") == "plain\n  indented"
