"""``sglang-dsv4 demo --store`` and ``drill store``: a server's two lives, and what is wrong there is seen."""

import json
import sys
import tempfile
from types import SimpleNamespace

import pytest

from sglang_dsv4.cli import demo_store, drill_store
from sglang_dsv4.cli.main import main
from sglang_dsv4.store.tier import Tier
from sglang_dsv4.testing import demo_store as played
from sglang_dsv4.testing.demo_store import Life

FEW = ["demo", "--store", "--requests", "2", "--longest", "1300", "--json"]
DEAD = (sys.executable, "-c", "raise SystemExit('no store here')")


def last(capsys):
    text = capsys.readouterr().out
    return text, json.loads(text.splitlines()[-1])


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_the_second_life_reads_what_the_first_one_wrote(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("DSV4_STORE", "/nosuch/folder/of/the/user")
    secret = tmp_path / "secret"
    secret.write_text("s" * 16)
    monkeypatch.setenv("DSV4_STORE_SECRET", f"@{secret}")
    assert main([*FEW, "--model", "v41"]) == 0
    text, found = last(capsys)
    first, without, with_ = (found["lives"][name] for name in (demo_store.FIRST, demo_store.WITHOUT, demo_store.WITH))
    assert "DSV4_STORE_SECRET: set" in text and found["faults"] == []
    assert first["turns"] == without["turns"] == with_["turns"] == 2
    assert without["tokens"] == with_["tokens"] > first["tokens"]
    assert (without["stored"], without["put"], without["got"]) == (0, 0, 0)
    assert with_["stored"] > 1024 and with_["cached"] - without["cached"] >= with_["stored"]
    assert with_["tokens"] - with_["cached"] <= 2 * (400 + 40 + 256)
    assert first["put"] >= with_["got"] > 0 and found["stored_bytes"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["secret"], "its folder goes with it"


def test_a_byte_that_was_wrong_before_it_was_sealed_is_found_by_who_reads_it(capsys):
    assert main([*FEW, "--corrupt"]) == 1
    text, found = last(capsys)
    assert "MISMATCH second, with: WrongRows: " in text and found["lives"][demo_store.FIRST]["mismatches"] == []


def test_where_nothing_comes_from_the_store_it_fails(capsys, monkeypatch):
    monkeypatch.setattr(played, "COMMAND", DEAD)
    assert main(FEW) == 1
    text, found = last(capsys)
    assert "NOTHING came from the store, to which the first life wrote 0 units" in text
    assert found["lives"][demo_store.WITH]["turns"] == 2


def test_a_unit_that_stays_borrowed_is_a_leak(capsys, monkeypatch):
    """The store's process dies at once, so that no unit comes back but by its failure."""
    monkeypatch.setattr(played, "COMMAND", DEAD)
    monkeypatch.setattr(played.Server, "_busy", lambda self: False)
    monkeypatch.setattr(Tier, "_take_of_write", lambda self, told, write: self._open.pop(told.number))
    assert main(FEW) == 1
    text, found = last(capsys)
    assert "LEAK first life: " in text and found["lives"][demo_store.FIRST]["leaks"] > 0


@pytest.mark.parametrize(("argv", "environ", "named"), [
    (["--longest", "1279"], {}, "--longest 1279: with --store at least 1280 tokens are needed"),
    (["--pages", "18"], {}, "--pages 18: with --store and --longest 1500 at least 19 are needed"),
    (["--device", "cuda"], {}, "--device cuda: with --store the server plays on the CPU"),
    (["--sessions"], {}, "--store with --sessions: choose one"),
    ([], {"DSV4_SESSIONS": "off"}, "DSV4_SESSIONS=off"),
    ([], {"DSV4_PLAIN": "off"}, "DSV4_PLAIN=off"),
])  # fmt: skip
def test_what_it_cannot_do_is_refused_by_name(capsys, monkeypatch, argv, environ, named):
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    assert main(["demo", "--store", *argv]) == 2
    said = capsys.readouterr()
    assert named in said.err and said.out == ""


def test_a_disk_without_room_is_refused_by_demo_and_drill(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(demo_store.shutil, "disk_usage", lambda _: SimpleNamespace(free=16 << 30))
    for argv in (["demo", "--store"], ["drill", "store"]):
        assert main(argv) == 2
        assert f"{tmp_path} has 16.0 GiB free" in capsys.readouterr().err


@pytest.mark.parametrize(("first", "second", "missed"), [
    ({}, {"wrong": 0}, "no text like"),
    ({"put": 0}, {}, "the first server wrote to the store"),
    ({}, {"turns": 2}, "every turn has its answer"),
    ({}, {"mismatches": ["WrongRows: r0"]}, "no request read a wrong byte"),
    ({}, {"leaks": 1}, "nothing is left behind"),
    ({"put": 9}, {}, "wrong objects were replaced"),
])  # fmt: skip
def test_a_drill_with_a_fact_that_is_not_true_is_noticed(capsys, monkeypatch, first, second, missed):
    """The lives are made up, and nothing is replaced in any of them."""
    lives = iter([first, second])

    class Played:
        def __init__(self, folder, *_, **__):
            self.answered = []
            if not list(folder.iterdir()):
                (folder / "object.bin").write_bytes(bytes(300))

        def play(self, turns):
            return Life(**{"turns": 3, "put": 9, "got": 3, "wrong": 2, **next(lives)})

    monkeypatch.setattr(drill_store, "Server", Played)
    assert main(["drill", "store"]) == 1
    said = capsys.readouterr().out
    assert f"MISSED {missed}" in said.replace("not true: ", "") and "0 of 1 faults" in said
    assert said.count(": NO") == (1 if missed in ("no text like", "wrong objects were replaced") else 2)
