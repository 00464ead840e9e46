"""tools/compat.py against small wheels made here, and against the installed engine with one thing changed."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import sglang
from server_fixture import HOOKS_HERE, VERSION

from sglang_dsv4.engine.hooks import Hook
from sglang_dsv4.engine.releases import TESTED
from tools import compat
from tools.sources import Sources

SOURCES = {
    "sglang/__init__.py": "from .star import *\n",
    "sglang/star.py": "from sglang.srt.base import Base\n",
    "sglang/srt/base.py": "class Base:\n    def inherited(self, x): ...\n",
    "sglang/srt/child.py": "class Args:\n    port: int\n",
}


def make_wheel(folder: Path, version: str, tag: str = "cp311-cp311-manylinux_2_34_x86_64", **sources: str) -> Path:
    path = folder / f"sglang-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in {**SOURCES, **sources}.items():
            wheel.writestr(name, text)
    return path


def last_json(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def changed(module: str, before: str, after: str) -> Sources:
    """The installed engine, with a text of one module replaced."""
    engine = Sources(INSTALLED, "sglang")
    path = f"{module.replace('.', '/')}.py"
    text, found = re.subn(before, after, engine.files[path]().decode())
    assert found, before
    engine.files[path] = text.encode
    return engine


def test_the_installed_release_is_as_the_table_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert compat.main(["--source", str(INSTALLED), "--as", VERSION]) == 0
    (row,) = last_json(capsys)["releases"]
    assert row["tested"] is (VERSION in TESTED) and row["hooks"] == [len(HOOKS_HERE)] * 2 and row["symbols"][0] > 50


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


@pytest.fixture
def one_hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A table of one hook and two symbols, of which each release above lacks one."""
    hook = Hook(target="sglang.Base.inherited", kind="around", ours="engine.decode.recompute:abort_request",
                why="", gone_when="")  # fmt: skip
    monkeypatch.setattr(compat, "hooks_of", lambda *_: (hook,))
    monkeypatch.setattr(compat, "symbols_of", lambda version: ("sglang.srt.child.Args.port", "sglang.srt.gone.func"))


def test_report_and_status(one_hook: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for version in ("0.5.21", "0.5.22", "0.5.24", "0.5.24.post1", "0.5.24rc1"):
        make_wheel(tmp_path, version)
    make_wheel(tmp_path, "0.5.23", "cp312-cp312-manylinux_2_34_x86_64")
    args = ["--cache", str(tmp_path), "--offline"]
    assert compat.main([*args, "--only", "0.5.21", "0.5.22", "0.5.23"]) == 1
    lines = capsys.readouterr().out.splitlines()
    releases = json.loads(lines[-1])["releases"]
    assert [(r["version"], r["status"], r["tested"]) for r in releases] == [
        ("0.5.21", "unsupported", False), ("0.5.22", "missing", True), ("0.5.23", "no wheel", False),
    ]  # fmt: skip
    assert releases[1]["hooks"] == [0, 1] and releases[1]["symbols"] == [1, 2]
    assert "0.5.22: hook sglang.Base.inherited: has no parameter recv_req" in lines
    assert "0.5.22: symbol sglang.srt.gone.func: no module sglang.srt.gone" in lines
    compat.main(args)
    assert [r["version"] for r in last_json(capsys)["releases"]] == ["0.5.22", "0.5.24"]
