"""``sglang-dsv4 doctor``: every finding, what fails it, and its two ways of showing."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from sglang_dsv4.cli import doctor, serve
from sglang_dsv4.cli.main import main
from sglang_dsv4.engine.hooks import hooks_of
from sglang_dsv4.engine.releases import engine_version
from sglang_dsv4.errors import HostMemoryExhausted
from sglang_dsv4.hostmem import arena, sizing
from sglang_dsv4.settings import TABLE

LOCKED = "locked memory (ulimit -l)"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("DSV4_")] + [serve.MODELS_VARIABLE, "SGLANG_PLUGINS"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def findings(capsys):
    """Runs the command with --json; returns (exit status, checks by name)."""

    def run():
        status = main(["doctor", "--json"])
        found = json.loads(capsys.readouterr().out)
        assert found["ok"] is (status == 0)
        assert found["ok"] is not any(check["status"] == "fail" for check in found["checks"])
        checks = {check["name"]: check for check in found["checks"]}
        assert len(checks) == len(found["checks"])
        assert all(check["todo"] for check in checks.values() if check["status"] != "ok")
        return status, checks

    return run


HOOKS_TWICE = """
import json, sys
from sglang_dsv4.cli import doctor, main
from sglang_dsv4.engine import standalone

install_hooks, standalone.install_hooks = standalone.install_hooks, lambda: None
checks = [check for check in doctor.examine() if check.name.startswith("hook ")]
print(json.dumps([[check.status, check.found] for check in checks]), file=sys.stderr)
standalone.install_hooks = install_hooks
sys.exit(main.main(["doctor", "--json"]))
"""


def test_a_process_of_its_own_finds_every_hook_landed():
    """Because the command loads them, and not what ran before it: without them each is reported."""
    environ = {name: text for name, text in os.environ.items() if not name.startswith("DSV4_")}
    environ[serve.MODELS_VARIABLE] = serve.MODELS
    done = subprocess.run(
        [sys.executable, "-c", HOOKS_TWICE], env=environ, text=True, capture_output=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    every = len(hooks_of(engine_version(), prep=True))
    without = next(json.loads(line) for line in done.stderr.splitlines() if line.startswith("[["))
    assert len(without) == every
    assert all(status == "fail" and text.endswith("is still the engine's own") for status, text in without)

    found = json.loads(done.stdout)
    checks = {check["name"]: check for check in found["checks"]}
    assert found["ok"] is True
    hooks = [check for name, check in checks.items() if name.startswith("hook ")]
    assert len(hooks) == every
    assert {(check["status"], check["found"]) for check in hooks} == {("ok", "landed")}
    assert checks["sglang"]["found"].startswith(f"{engine_version()}, ")
    assert checks["entry point"]["status"] == checks[serve.MODELS_VARIABLE]["status"] == "ok"


def test_what_is_fine_here(findings):
    status, checks = findings()
    assert status == 0
    assert checks["python"]["found"].startswith(".".join(map(str, sys.version_info[:3])))
    assert checks["torch"]["found"].startswith(torch.__version__)
    for name in ("python", "triton", "sglang", "entry point", "host memory", LOCKED, "prometheus_client"):
        assert checks[name]["status"] == "ok", checks[name]
    assert checks["GPU"]["status"] == "warn"
    assert "with torch" in checks["GPU"]["breaks"]
    assert checks[serve.MODELS_VARIABLE]["status"] == "warn"
    for setting in TABLE.values():
        assert checks[setting.variable]["found"] == f"{setting.default} (default)"


def test_a_hook_that_is_not_in_place_fails_by_name(findings, monkeypatch):
    target = "sglang.srt.mem_cache.deepseek_v4_memory_pool.DeepSeekV4IndexerPool"
    monkeypatch.setattr(target, object)
    status, checks = findings()
    assert status == 1
    failed = {name: check["found"] for name, check in checks.items() if check["status"] == "fail"}
    assert failed == {"hook replace DeepSeekV4IndexerPool": f"missing: {target}: is still the engine's own"}


@pytest.mark.parametrize("error", [RuntimeError("broken"), HostMemoryExhausted("none"), AttributeError("gone")])
def test_an_engine_that_cannot_be_loaded_fails_and_the_rest_is_still_checked(findings, monkeypatch, error):
    def fail():
        raise error

    monkeypatch.setattr("sglang_dsv4.engine.standalone.install_hooks", fail)
    status, checks = findings()
    assert status == 1
    assert checks["hooks"]["status"] == "fail"
    assert str(error) in checks["hooks"]["found"]
    assert "GPU" in checks


def test_values_are_shown_and_a_bad_one_is_named(findings, monkeypatch):
    monkeypatch.setenv("DSV4_HOST_COPIES", "7")
    monkeypatch.setenv("DSV4_HOST_GB", "many")
    monkeypatch.setenv("DSV4_HOST_GIB", "1")
    status, checks = findings()
    assert status == 1
    assert checks["DSV4_HOST_COPIES"]["found"] == "7 (set)"
    assert checks["DSV4_HOST_GB"]["status"] == "fail"
    assert checks["DSV4_HOST_GB"]["found"].startswith("DSV4_HOST_GB='many': ")
    assert checks["DSV4_HOST_GIB"]["status"] == "fail"
    assert checks["hooks"]["status"] == "fail"  # the plugin would refuse, too
    assert checks["host memory"]["status"] == "ok"


def test_a_package_that_is_switched_off_is_a_warning(findings, monkeypatch):
    monkeypatch.setenv("DSV4_ENABLED", "0")
    status, checks = findings()
    assert status == 0
    assert checks["hooks"]["status"] == "warn"
    assert checks["hooks"]["todo"] == "unset DSV4_ENABLED"


@pytest.mark.parametrize(
    ("version", "expected", "text"),
    [("0.5.19", "fail", "no adapter"), ("0.5.22", "warn", "not tested"), ("garbage", "fail", "no adapter")],
)
def test_engine_versions(findings, monkeypatch, version, expected, text):
    real = doctor.version
    monkeypatch.setattr(doctor, "version", lambda name: version if name == "sglang" else real(name))
    status, checks = findings()
    assert checks["sglang"]["status"] == expected
    assert text in checks["sglang"]["found"]
    if expected == "fail":
        assert status == 1
        assert checks["hooks"]["status"] == "fail"


def test_no_entry_point(findings, monkeypatch):
    monkeypatch.setattr(serve, "entry_points", lambda group: [])
    status, checks = findings()
    assert (status, checks["entry point"]["status"]) == (1, "fail")
    assert checks["entry point"]["todo"].startswith("pip install --no-deps .")


def test_an_allow_list_without_this_package(findings, monkeypatch):
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    status, checks = findings()
    assert (status, checks["entry point"]["status"]) == (1, "fail")
    assert "SGLANG_PLUGINS='other'" in checks["entry point"]["found"]


def test_the_model_package(findings, monkeypatch):
    monkeypatch.setenv(serve.MODELS_VARIABLE, "their.models")
    status, checks = findings()
    assert (status, checks[serve.MODELS_VARIABLE]["status"]) == (1, "fail")
    assert "unset it" in checks[serve.MODELS_VARIABLE]["todo"]


@pytest.mark.parametrize("missing", ["torch", "triton", "sglang", "prometheus_client"])
def test_what_is_not_installed(findings, monkeypatch, missing):
    real = doctor.version

    def version(name):
        if name == missing:
            raise ModuleNotFoundError(f"No package metadata was found for {name}")
        return real(name)

    monkeypatch.setattr(doctor, "version", version)
    if missing == "torch":
        monkeypatch.setitem(sys.modules, "torch", None)
    status, checks = findings()
    optional = missing == "prometheus_client"
    assert (status, checks[missing]["status"]) == ((0, "warn") if optional else (1, "fail"))
    assert checks["host memory"]["status"] == "ok"


def test_more_host_memory_than_there_is(findings, monkeypatch):
    monkeypatch.setattr(sizing, "free_ram", lambda: 8 << 30)
    status, checks = findings()
    assert (status, checks["host memory"]["status"]) == (0, "ok")
    assert "8.0 GiB free" in checks["host memory"]["found"]
    assert "at most 4.0 GiB" in checks["host memory"]["found"]
    monkeypatch.setenv("DSV4_HOST_GB", "8")
    assert findings()[0] == 0
    monkeypatch.setenv("DSV4_HOST_GB", "8.5")
    status, checks = findings()
    assert (status, checks["host memory"]["todo"]) == (1, "lower DSV4_HOST_GB")


class _Arena:
    """Stands for pinned memory."""

    sizes: tuple[int, ...] = ()

    def __init__(self, nbytes, pin):
        assert pin
        _Arena.sizes += (nbytes,)

    def close(self):
        """Unpin."""


@pytest.fixture
def gpu(monkeypatch):
    """torch as it looks with two GPUs; memory that can be pinned."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda number: SimpleNamespace(name=f"Card {number}", total_memory=3 << 30)
    )
    monkeypatch.setattr(_Arena, "sizes", ())
    monkeypatch.setattr(arena, "Arena", _Arena)


@pytest.mark.usefixtures("gpu")
def test_gpus_and_the_pinned_probe(findings):
    status, checks = findings()
    assert status == 0
    assert [checks[f"GPU {i}"]["found"] for i in range(2)] == ["Card 0, 3.0 GiB", "Card 1, 3.0 GiB"]
    assert checks["pinning"]["found"].startswith("64 MiB in ")
    assert _Arena.sizes == (64 << 20,)


@pytest.mark.usefixtures("gpu")
def test_memory_that_cannot_be_pinned_fails(findings, monkeypatch):
    def refuse(nbytes, pin):
        raise HostMemoryExhausted("cannot pin")

    monkeypatch.setattr(arena, "Arena", refuse)
    status, checks = findings()
    assert (status, checks["pinning"]["status"]) == (1, "fail")
    assert "ulimit -l" in checks["pinning"]["todo"]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("limit", "expected"), [(resource.RLIM_INFINITY, "ok"), (2 << 30, "ok"), ((2 << 30) - 1, "warn"), (65536, "warn")]
)
def test_the_locked_memory_limit_is_held_against_the_arena(findings, monkeypatch, limit, expected):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, resource.RLIM_INFINITY))
    monkeypatch.setenv("DSV4_HOST_GB", "2")
    status, checks = findings()
    assert (status, checks[LOCKED]["status"]) == (0, expected)
    assert "arena up to 2.0 GiB" in checks[LOCKED]["found"]
    monkeypatch.delenv("DSV4_HOST_GB")
    monkeypatch.setattr(sizing, "free_ram", lambda: 4 << 30)
    assert findings()[1][LOCKED]["status"] == expected


@pytest.mark.parametrize("with_rich", [True, False])
def test_both_ways_of_showing_hold_everything(capsys, monkeypatch, with_rich):
    if not with_rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setenv("DSV4_HOST_GB", "[b]many")
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert ("┃" in shown) is with_rich
    for text in ("DSV4_HOST_GB='[b]many'", "change or unset DSV4_HOST_GB", "fail", "sglang", "does not work here: "):
        assert text in shown
    assert "any server (DSV4_HOST_GB)" in shown


def test_json_is_all_of_the_standard_output(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "PARTS", {"noise": lambda: iter([doctor.Check("noise", "ok", str(print("heard")))])})
    assert main(["doctor", "--json"]) == 0
    streams = capsys.readouterr()
    assert json.loads(streams.out)["checks"] == [
        {"name": "noise", "status": "ok", "found": "None", "todo": "", "breaks": ""}
    ]
    assert "heard" in streams.err


def test_hooks_that_landed_take_one_line():
    landed = [doctor.Check(f"hook {name}", "ok", "landed") for name in "abc"]
    lost = doctor.Check("hook d", "fail", "missing: d")
    others = doctor.Check("python", "ok", "3.11"), doctor.Check("GPU", "warn", "none")
    shown = doctor.shortened([others[0], *landed, others[1]])
    assert [(c.name, c.found) for c in shown] == [("python", "3.11"), ("hooks", "3 of 3 landed"), ("GPU", "none")]
    shown = doctor.shortened([lost, *landed])
    assert [(c.name, c.status, c.found) for c in shown] == [
        ("hooks", "ok", "3 of 4 landed"),
        ("hook d", "fail", lost.found),
    ]
    assert doctor.shortened([lost]) == [lost]
