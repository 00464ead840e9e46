"""tools/compat.py against the installed engine, whole and with parts of it gone."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from server_fixture import HOOKS_HERE, VERSION
from sglang.srt.managers.schedule_batch import Req

from sglang_dsv4.command_line import CommandError
from sglang_dsv4.engine.hooks import PARTS
from sglang_dsv4.engine.hooks.table import hooks_of
from tools import compat

HOOKS, NEWEST = len(HOOKS_HERE), len(hooks_of("0.5.24", *PARTS))
SYMBOLS = len(list(compat.symbols_of(VERSION)))


@dataclass
class Fields:
    field: int


class Engines(Fields):
    value = 1

    def __init__(self) -> None:
        self.assigned = self.value
        self.called.inside()  # type: ignore[attr-defined]


def test_the_installed_release_has_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert compat.main([]) == 0
    assert capsys.readouterr().out == f"{VERSION}  ok, tested: hooks {HOOKS}/{HOOKS}, symbols {SYMBOLS}/{SYMBOLS}\n"
    assert SYMBOLS > 200


def test_what_a_later_release_lacks_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Req, "build_rebootstrap_payload")
    monkeypatch.delattr(Req, "seqlen")
    assert compat.main(["--as", "0.5.24"]) == 1
    path = "sglang.srt.managers.schedule_batch.Req"
    assert capsys.readouterr().out.splitlines() == [
        f"0.5.24  missing, not tested: hooks {NEWEST - 1}/{NEWEST}, symbols {SYMBOLS - 1}/{SYMBOLS}",
        f"  hook {path}.build_rebootstrap_payload: type object 'Req' has no attribute 'build_rebootstrap_payload'",
        f"  symbol {path}.seqlen: {path} has no seqlen",
    ]


@pytest.mark.parametrize("name", ["field", "value", "assigned"])
def test_a_name_is_an_attribute_a_field_or_assigned_by_a_method(name: str) -> None:
    assert compat.lacks(f"{__name__}.Engines", name) == ""


@pytest.mark.parametrize(("path", "name", "reason"), [
    ("Engines", "called", "Engines has no called"), ("Engines", "inside", "Engines has no inside"),
    ("Engines", "value.real", ""), ("Gone", "value", "has no attribute 'Gone'"),
])  # fmt: skip
def test_a_name_that_is_gone_is_told(path: str, name: str, reason: str) -> None:
    said = compat.lacks(f"{__name__}.{path}", name)
    assert reason in said and bool(said) is bool(reason)


def test_a_name_may_be_of_some_releases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "symbols.txt"
    file.write_text("# a comment\na.B since=0.5.24\n    new both\na.B before=0.5.24\n    old both\n")
    monkeypatch.setattr(compat, "SYMBOLS", file)
    assert [name for _, name in compat.symbols_of("0.5.23")] == ["old", "both"]
    assert list(compat.symbols_of("0.5.24")) == [("a.B", "new"), ("a.B", "both")]


def test_a_release_before_the_window_is_named() -> None:
    with pytest.raises(CommandError, match=r"0\.5\.21 is not supported: 0\.5\.22 or later"):
        compat.main(["--as", "0.5.21"])
