"""tools/compat.py against small wheels made here, and against the installed engine with one thing changed."""

from __future__ import annotations

import json
import re
import subprocess
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
    "sglang/__init__.py": "from sglang.api import helper as shown\nfrom .star import *\n",
    "sglang/api.py": """
from os import path
from .impl.deep import helper
from sglang.srt import child as child_module
""",
    "sglang/impl/deep.py": "def helper(a, /, b, *rest, c=1, **more): ...\n",
    "sglang/both.py": "from .impl.deep import helper\n",
    "sglang/both/data.py": "",
    "sglang/star.py": "from sglang.srt.base import Base\n\ndef from_star(): ...\n",
    "sglang/loop.py": "from sglang.loop import around\nfrom sglang.loop2 import *\n",
    "sglang/loop2.py": "from sglang.loop import *\n",
    "sglang/srt/base.py": """
class Base(Generic[T]):
    limit: int = 3
    def inherited(self, x): ...
    def __init__(self, size):
        self.size, (self.pair, other.foreign) = size, (1, 2)
""",
    "sglang/srt/child.py": """
from dataclasses import dataclass
from typing import TYPE_CHECKING
import sglang.srt.base
from ..star import Base
if TYPE_CHECKING:
    from sglang.srt.base import Base as Hidden
else:
    Shown = Base
try:
    import fast
except ImportError:
    def fast_path(req): ...
class Child(Base):
    if True:
        def run(self, req): ...
class ByModule(sglang.srt.base.Base): ...
class Cyclic(Cyclic): ...
@dataclass
class Args:
    port: int
async def serve(args): ...
CONSTANT = 1
""",
}


def make_wheel(folder: Path, version: str, tag: str = "cp311-cp311-manylinux_2_34_x86_64", **sources: str) -> Path:
    path = folder / f"sglang-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in {**SOURCES, **sources}.items():
            wheel.writestr(name, text)
    return path


def small(tmp_path: Path) -> Sources:
    return Sources(make_wheel(tmp_path, "0.5.17"), "sglang")


def last_json(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize(
    "name",
    [
        "sglang", "sglang.srt.child", "sglang.impl.deep.helper", "sglang.shown", "sglang.both.helper",
        "sglang.from_star", "sglang.Base.inherited", "sglang.api.child_module.Child.run", "sglang.srt.child.serve",
        "sglang.srt.child.fast_path", "sglang.srt.child.CONSTANT", "sglang.srt.child.Child.run",
        "sglang.srt.child.Child.inherited", "sglang.srt.child.Child.limit", "sglang.srt.child.Child.pair",
        "sglang.srt.child.ByModule.inherited", "sglang.srt.child.Shown.inherited", "sglang.srt.child.Args.port",
    ],
)  # fmt: skip
def test_present(tmp_path: Path, name: str) -> None:
    assert small(tmp_path).resolve(name)[1] == ""


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("sglang.srt.gone.func", "no module sglang.srt.gone"),
        ("sglang.srt.base.func", "sglang.srt.base has no func"),
        ("sglang.srt.child.Child.gone", "sglang.srt.child.Child has no gone"),
        ("sglang.srt.child.Cyclic.gone", "sglang.srt.child.Cyclic has no gone"),
        ("sglang.srt.child.Hidden", "sglang.srt.child has no Hidden"),
        ("sglang.loop.around", "sglang.loop has no around"),
    ],
)
def test_missing(tmp_path: Path, name: str, reason: str) -> None:
    assert small(tmp_path).resolve(name) == ([], reason)


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
        for line in compat.problems(engine, ours, hook, VERSION)
    ]
    assert found == ([problem] if problem else [])


@pytest.fixture
def one_hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A table of one hook and two symbols, of which each release above lacks one."""
    hook = Hook(target="sglang.Base.inherited", kind="around", ours="engine.v0_5_17:commit_transfer_to_req",
                why="", gone_when="")  # fmt: skip
    monkeypatch.setattr(compat, "hooks_of", lambda version, prep, plain: (hook,))
    monkeypatch.setattr(compat, "symbols_of", lambda version: ("sglang.srt.child.Args.port", "sglang.srt.gone.func"))


@pytest.fixture
def no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "hooks_of", lambda version, prep, plain: ())
    monkeypatch.setattr(compat, "symbols_of", lambda version: ())


def test_report_and_status(one_hook: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for version in ("0.5.16", "0.5.17", "0.5.18", "0.5.18.post1", "0.5.23rc1"):
        make_wheel(tmp_path, version)
    make_wheel(tmp_path, "0.5.23", "cp312-cp312-manylinux_2_34_x86_64")
    args = ["--cache", str(tmp_path), "--offline"]
    assert compat.main([*args, "--only", "0.5.18", "0.5.17", "0.5.23"]) == 1
    lines = capsys.readouterr().out.splitlines()
    releases = json.loads(lines[-1])["releases"]
    assert [(r["version"], r["status"], r["line"], r["tested"]) for r in releases] == [
        ("0.5.17", "missing", "0.5.17", True), ("0.5.18", "unsupported", None, False),
        ("0.5.23", "no wheel", None, False),
    ]  # fmt: skip
    assert releases[0]["hooks"] == [0, 1] and releases[0]["symbols"] == [1, 2]
    assert "0.5.17: hook sglang.Base.inherited: has no parameter decode_req" in lines
    assert "0.5.17: symbol sglang.srt.gone.func: no module sglang.srt.gone" in lines
    compat.main(args)
    assert [r["version"] for r in last_json(capsys)["releases"]] == ["0.5.17", "0.5.18"]


def test_a_wheel_that_is_not_released(no_hooks: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel = make_wheel(tmp_path, "0.5.24.dev1", "py3-none-any")
    assert compat.main(["--source", str(wheel)]) == 0
    (row,) = last_json(capsys)["releases"]
    assert (row["version"], row["line"], row["tested"]) == ("0.5.24.dev1", "0.5.22", False)
    assert compat.main(["--source", str(tmp_path)]) == 2
    assert "Give --as VERSION" in capsys.readouterr().err
    assert compat.main(["--source", str(tmp_path / "none"), "--as", "0.5.24"]) == 2


def test_unreadable_wheel(one_hook: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_wheel(tmp_path, "0.5.17", **{"sglang/__init__.py": "def ("})
    assert compat.main(["--cache", str(tmp_path), "--offline"]) == 2
    assert [r["status"] for r in last_json(capsys)["releases"]] == ["error"]


def fake_pip(cache: Path, listing: str, stderr: str):
    """subprocess.run that lists `listing`, and downloads 0.5.17 alone."""

    def run(cmd: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        if "index" in cmd and listing:
            return subprocess.CompletedProcess(cmd, 0, f"sglang (1)\nAvailable versions: {listing}\n", "")
        if "download" in cmd and "sglang==0.5.17" in cmd:
            make_wheel(cache, "0.5.17")
            return subprocess.CompletedProcess(cmd, 0, "", "")
        return subprocess.CompletedProcess(cmd, 1, "", stderr)

    return run


@pytest.mark.parametrize(
    ("listing", "stderr", "status", "rows", "error"),
    [
        ("0.5.22, 0.5.17.post1, 0.5.17, 0.5.9", "ERROR: No matching distribution", 0, ["ok", "no wheel"], ""),
        ("0.5.22, 0.5.17", "WARNING: Retrying (Retry(total=0", 2, ["ok", "error"], ""),
        ("", "WARNING: Retrying (Retry(total=0\nERROR: No matching distribution", 2, [], "no network"),
        ("", "/bin/python: No module named pip", 2, [], "no pip"),
        ("", "ERROR: disk full", 2, [], "pip index failed: ERROR: disk full"),
    ],
)
@pytest.mark.usefixtures("no_hooks")
def test_package_index(tmp_path, capsys, monkeypatch, listing, stderr, status, rows, error) -> None:
    monkeypatch.setattr(compat.subprocess, "run", fake_pip(tmp_path, listing, stderr))
    assert compat.main(["--cache", str(tmp_path)]) == status
    result = last_json(capsys)
    assert [r["status"] for r in result["releases"]] == rows
    assert error in result["error"] and bool(error) == bool(result["error"])
