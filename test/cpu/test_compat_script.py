"""tools/compat.py against small wheels made here."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

SOURCES = {
    "sglang/__init__.py": "from sglang.api import helper as shown\nfrom .star import *\n",
    "sglang/api.py": """
from os import path
from .impl.deep import helper
from sglang.srt import child as child_module
import sglang.srt.base as base_module
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
    class Inner:
        def deep(self): ...
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


@pytest.fixture(scope="module")
def compat() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "tools" / "compat.py"
    spec = importlib.util.spec_from_file_location("compat_script", path)
    assert spec and spec.loader
    module = sys.modules["compat_script"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_wheel(folder: Path, version: str, tag: str = "cp311-cp311-manylinux_2_34_x86_64", **sources: str) -> Path:
    path = folder / f"sglang-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in {**SOURCES, **sources}.items():
            wheel.writestr(name, text)
    return path


def hook(target: str, *params: str, lines: tuple[str, ...] = ("0.5.17", "0.5.23")) -> SimpleNamespace:
    return SimpleNamespace(target=target, kind="around", lines=lines, why="", params=params)


def table(*hooks: SimpleNamespace, line_of: bool = True, **symbols: tuple[str, ...]) -> SimpleNamespace:
    used = {key.strip("v").replace("_", "."): names for key, names in symbols.items()}
    made = SimpleNamespace(HOOKS=hooks, USED_SYMBOLS={"0.5.17": (), "0.5.23": (), **used})
    if line_of:
        made.line_of = {"0.5.17": "0.5.17", "0.5.18": "0.5.23", "0.5.23": "0.5.23"}.get
    return made


def last_json(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize(
    "name",
    [
        "sglang",
        "sglang.srt.child",
        "sglang.impl.deep.helper",
        "sglang.shown",
        "sglang.both.helper",
        "sglang.from_star",
        "sglang.Base.inherited",
        "sglang.api.path",
        "sglang.api.base_module.Base",
        "sglang.api.child_module.Child.run",
        "sglang.srt.child.serve",
        "sglang.srt.child.fast_path",
        "sglang.srt.child.CONSTANT",
        "sglang.srt.child.Child.run",
        "sglang.srt.child.Child.inherited",
        "sglang.srt.child.Child.limit",
        "sglang.srt.child.Child.size",
        "sglang.srt.child.Child.pair",
        "sglang.srt.child.ByModule.inherited",
        "sglang.srt.child.Shown.inherited",
        "sglang.srt.child.Args.port",
        "sglang.srt.base.Base.Inner.deep",
    ],
)
def test_present(compat: ModuleType, tmp_path: Path, name: str) -> None:
    assert compat.Wheel(make_wheel(tmp_path, "0.5.17")).resolve(name)[1] == ""


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("sglang.srt.gone.func", "no module sglang.srt.gone"),
        ("sglang.srt.gone.Cls.method", "no module sglang.srt.gone"),
        ("other.func", "no module other"),
        ("sglang.Missing.method", "sglang has no Missing"),
        ("sglang.srt.base.func", "sglang.srt.base has no func"),
        ("sglang.srt.child.Child.gone", "sglang.srt.child.Child has no gone"),
        ("sglang.srt.child.Child.foreign", "sglang.srt.child.Child has no foreign"),
        ("sglang.srt.child.Cyclic.gone", "sglang.srt.child.Cyclic has no gone"),
        ("sglang.srt.child.Hidden", "sglang.srt.child has no Hidden"),
        ("sglang.loop.around", "sglang.loop has no around"),
        ("sglang.api.path.join", "sglang.api.path has no join"),
    ],
)
def test_missing(compat: ModuleType, tmp_path: Path, name: str, reason: str) -> None:
    assert compat.Wheel(make_wheel(tmp_path, "0.5.17")).resolve(name) == ([], reason)


@pytest.mark.parametrize(
    ("target", "params", "problem"),
    [
        ("sglang.shown", ("a", "b", "rest", "c", "more"), ""),
        ("sglang.shown", ("a", "z", "y"), "no parameter y, z"),
        ("sglang.srt.child.Child.inherited", ("self", "x"), ""),
        ("sglang.srt.child.Child", ("size",), ""),
        ("sglang.srt.child.Child", ("port",), "no parameter port"),
        ("sglang.srt.child.Args", ("port",), ""),
        ("sglang.srt.child.CONSTANT", ("x",), "no parameter x"),
        ("sglang.srt.child.Child.size", (), "only an instance attribute"),
        ("sglang.gone", ("x",), "sglang has no gone"),
    ],
)
def test_hook_problem(compat: ModuleType, tmp_path: Path, target: str, params: tuple[str, ...], problem: str) -> None:
    assert compat.Wheel(make_wheel(tmp_path, "0.5.17")).problem(target, params, hooked=True) == problem


def test_report_and_status(compat: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for version in ("0.5.16", "0.5.17", "0.5.18", "0.5.18.post1", "0.5.23rc1"):
        make_wheel(tmp_path, version)
    make_wheel(tmp_path, "0.5.23", "cp312-cp312-manylinux_2_34_x86_64")
    fake = table(
        hook("sglang.impl.deep.helper", "a"),
        hook("sglang.impl.deep.helper", "absent", lines=("0.5.23",)),
        v0_5_17=("sglang.srt.child.Args.port",),
        v0_5_23=("sglang.srt.child.Args.port", "sglang.srt.gone.func"),
    )
    args = ["--cache", str(tmp_path), "--offline"]
    assert compat.main([*args, "--only", "0.5.17"], fake) == 0
    assert last_json(capsys)["releases"][0]["fits"] == ["0.5.17"]

    assert compat.main([*args, "--only", "0.5.18", "0.5.17", "0.5.23"], fake) == 1
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert [(r["version"], r["status"], r["line"]) for r in result["releases"]] == [
        ("0.5.17", "ok", "0.5.17"),
        ("0.5.18", "missing", "0.5.23"),
        ("0.5.23", "no wheel", None),
    ]
    assert result["releases"][1]["hooks"] == [1, 2]
    assert result["releases"][1]["symbols"] == [1, 2]
    assert "0.5.18: hook sglang.impl.deep.helper: no parameter absent" in lines
    assert "0.5.18: symbol sglang.srt.gone.func: no module sglang.srt.gone" in lines

    compat.main(args, fake)
    assert [r["version"] for r in last_json(capsys)["releases"]] == ["0.5.17", "0.5.18"]
    compat.main([*args, "--all"], fake)
    assert [r["version"] for r in last_json(capsys)["releases"]] == [
        "0.5.17",
        "0.5.18",
        "0.5.18.post1",
        "0.5.23rc1",
    ]


def test_best_fit_without_line_of(compat: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_wheel(tmp_path, "0.5.20", "cp39-abi3-manylinux_2_28_x86_64")
    fake = table(line_of=False, v0_5_17=("sglang.shown",), v0_5_23=("sglang.gone",))
    assert compat.main(["--cache", str(tmp_path), "--offline"], fake) == 0
    row = last_json(capsys)["releases"][0]
    assert (row["line"], row["fits"], row["note"]) == ("0.5.17", ["0.5.17"], "best fit of 0.5.17, 0.5.23")


def test_unsupported_version(compat: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_wheel(tmp_path, "0.6.0", "py3-none-any")
    assert compat.main(["--cache", str(tmp_path), "--offline"], table(v0_5_23=("sglang.gone",))) == 0
    row = last_json(capsys)["releases"][0]
    assert (row["status"], row["line"], row["fits"]) == ("unsupported", None, ["0.5.17"])


@pytest.mark.parametrize("broken", ["not a zip", "bad source"])
def test_unreadable_wheel(compat: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], broken: str) -> None:
    if broken == "bad source":
        make_wheel(tmp_path, "0.5.17", **{"sglang/__init__.py": "def ("})
    else:
        (tmp_path / "sglang-0.5.17-py3-none-any.whl").write_text("text")
    make_wheel(tmp_path, "0.5.18")
    fake = table(hook("sglang.shown"))
    assert compat.main(["--cache", str(tmp_path), "--offline"], fake) == 2
    assert [r["status"] for r in last_json(capsys)["releases"]] == ["error", "ok"]


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
        ("0.5.18, 0.5.17.post1, 0.5.17, 0.5.9", "ERROR: No matching distribution", 0, ["ok", "no wheel"], ""),
        ("0.5.18, 0.5.17", "WARNING: Retrying (Retry(total=0", 2, ["ok", "error"], ""),
        ("0.5.18", "ERROR: No matching distribution", 2, ["no wheel"], ""),
        ("", "WARNING: Retrying (Retry(total=0\nERROR: No matching distribution", 2, [], "no network"),
        ("", "ERROR: No matching distribution", 2, [], "lists no sglang"),
        ("", "/bin/python: No module named pip", 2, [], "no pip"),
        ("", "ERROR: disk full", 2, [], "pip index failed: ERROR: disk full"),
        ("0.5.9", "", 2, [], "no sglang release from 0.5.17 on"),
    ],
)
def test_package_index(
    compat: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    listing: str,
    stderr: str,
    status: int,
    rows: list[str],
    error: str,
) -> None:
    monkeypatch.setattr(compat.subprocess, "run", fake_pip(tmp_path, listing, stderr))
    assert compat.main(["--cache", str(tmp_path)], table(hook("sglang.shown"))) == status
    result = last_json(capsys)
    assert [r["status"] for r in result["releases"]] == rows
    assert error in result["error"]
    assert bool(error) == bool(result["error"])


def test_no_hook_table(
    compat: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "TABLE_MODULE", "no_such_package.hooks")
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert compat.main(["--cache", str(tmp_path), "--offline"]) == 2
    assert "cannot import the hook table no_such_package.hooks" in last_json(capsys)["error"]
