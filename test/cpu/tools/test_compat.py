"""tools/compat.py against small wheels made here, and against the installed engine with one thing changed."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest
import sglang
from server_fixture import HOOKS_HERE, VERSION

from sglang_dsv4.command_line import CommandError
from sglang_dsv4.engine.hooks import Hook
from tools import compat
from tools.sources import Sources

SOURCES = {
    "sglang/__init__.py": "from .star import *\n",
    "sglang/star.py": "from sglang.srt.base import Base\n",
    "sglang/srt/base.py": "class Base:\n    def inherited(self, x): ...\n",
    "sglang/srt/child.py": "class Args:\n    port: int\n",
}


def make_wheel(folder: Path, version: str) -> Path:
    path = folder / f"sglang-{version}-cp311-cp311-manylinux_2_34_x86_64.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in SOURCES.items():
            wheel.writestr(name, text)
    return path


def changed(module: str, before: str, after: str) -> Sources:
    """The installed engine, with a text of one module replaced."""
    engine = Sources(INSTALLED, "sglang")
    path = f"{module.replace('.', '/')}.py"
    text, found = re.subn(before, after, engine.files[path]().decode())
    assert found, before
    engine.files[path] = text.encode
    return engine


def test_the_installed_release_is_as_the_table_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert compat.main([]) == compat.main([str(INSTALLED), "--as", VERSION]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second
    assert first.startswith(f"{VERSION}  ok, tested: hooks {len(HOOKS_HERE)}/{len(HOOKS_HERE)}, symbols ")


INSTALLED = Path(sglang.__file__).parent.parent
QUEUE = "sglang.srt.disaggregation.decode"
BATCH = "sglang.srt.managers.schedule_batch"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ((QUEUE, r"def add\(\n        self, req: Req,", "def add(self, req: Req, *, urgent: bool,"),
         "DecodePreallocQueue: its add has a parameter that this package does not know: urgent"),
        ((QUEUE, "is_retracted: bool = False", "retracted: bool = False"),
         "DecodePreallocQueue: its add has no parameter is_retracted"),
        ((QUEUE, r"def _prealloc_required_tokens\(", "def _required("),
         "DecodePreallocQueue: has no _prealloc_required_tokens"),
        ((BATCH, r"    def build_rebootstrap_payload\(", "    def payload_of_rebootstrap("),
         f"build_rebootstrap_payload: {BATCH}.Req has no build_rebootstrap_payload"),
        (("sglang.srt.managers.scheduler", r"def flush_cache\(self, ", "def flush_cache(self, why: str, "), None),
    ],
)  # fmt: skip
def test_what_a_later_release_changes_is_named(change: tuple[str, str, str], problem: str | None) -> None:
    engine, ours = changed(*change), Sources(compat.ROOT, "sglang_dsv4")
    found = [
        f"{hook.target.rsplit('.', 1)[1]}: {line}"
        for hook in HOOKS_HERE
        for line in compat.problems(engine, ours, hook)
    ]
    assert found == ([problem] if problem else [])


def test_a_wheel_is_named_with_what_it_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = Hook(target="sglang.Base.inherited", kind="around", ours="engine.decode.recompute:abort_request",
                why="", gone_when="")  # fmt: skip
    monkeypatch.setattr(compat, "hooks_of", lambda *_: (hook,))
    monkeypatch.setattr(compat, "symbols_of", lambda version: ("sglang.srt.child.Args.port", "sglang.srt.gone.func"))
    assert compat.main([str(make_wheel(tmp_path, "0.5.24"))]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "0.5.24  missing, not tested: hooks 0/1, symbols 1/2",
        "  hook sglang.Base.inherited: has no parameter recv_req",
        "  symbol sglang.srt.gone.func: no module sglang.srt.gone",
    ]


def test_a_release_that_cannot_be_checked_is_named(tmp_path: Path) -> None:
    (tmp_path / "sglang-0.5.23-broken.whl").write_text("no archive")
    for words, said in (
        ([str(make_wheel(tmp_path, "0.5.21"))], "0.5.21 is not supported: 0.5.22 or later"), (["none"], "no such file"),
        ([str(tmp_path)], "Give --as VERSION"), ([str(tmp_path / "sglang-0.5.23-broken.whl")], "no readable wheel"),
    ):  # fmt: skip
        with pytest.raises(CommandError, match=said):
            compat.main(words)
