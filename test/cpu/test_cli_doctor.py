"""``sglang-dsv4 doctor``: every finding, what fails it, and its two ways of showing."""

import argparse
import json
import os
import platform
import re
import resource
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fresh_process import run_fresh

from sglang_dsv4.cli import doctor, doctor_installation, doctor_machine, serve
from sglang_dsv4.cli.main import main
from sglang_dsv4.engine.hooks.table import HOOKS, hooks_of
from sglang_dsv4.engine.releases import engine_release, engine_version
from sglang_dsv4.errors import HostMemoryExhausted
from sglang_dsv4.hostmem import arena, sizing
from sglang_dsv4.settings import TABLE

GIB = 1 << 30
LOCKED = "locked memory (ulimit -l)"
EARLY_SEND = "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"
PREFILL = "--disaggregation-mode prefill --disaggregation-transfer-backend"
DECODE = "--disaggregation-mode decode --disaggregation-transfer-backend nixl"
EAGLE = "--speculative-algorithm EAGLE --speculative-eagle-topk 1 --speculative-num-steps"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in (serve.MODELS_VARIABLE, "SGLANG_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def findings(capsys):
    """Runs the command with --json; returns (exit status, checks by name)."""

    def run(*argv):
        status = main(["doctor", "--json", *argv])
        found = json.loads(capsys.readouterr().out)
        assert found["ok"] is (status == 0)
        assert found["ok"] is not any(check["status"] == "fail" for check in found["checks"])
        checks = {check["name"]: check for check in found["checks"]}
        assert all(check["todo"] for check in checks.values() if check["status"] != "ok")
        return status, checks

    return run


def test_a_process_of_its_own_finds_every_hook_landed():
    """Because the command loads them, and not what ran before it."""
    environ = {**os.environ, serve.MODELS_VARIABLE: serve.MODELS}
    done = run_fresh(["-m", "sglang_dsv4.cli.main", "doctor", "--json"], environ)
    assert done.returncode == 0, done.stderr
    checks, version = {check["name"]: check for check in json.loads(done.stdout)["checks"]}, engine_version()
    assert checks["hooks"]["found"] == f"{len(hooks_of(version, 'plain', 'prep'))} landed"
    assert checks["entry point"]["status"] == checks[serve.MODELS_VARIABLE]["status"] == "ok"


def test_what_is_fine_here(findings):
    status, checks = findings()
    assert status == 0
    assert checks["sglang"]["found"].startswith(f"{engine_version()}, ")
    for name in ("python", "triton", "sglang", "entry point", "host memory", LOCKED, "prometheus_client"):
        assert checks[name]["status"] == "ok", checks[name]
    assert checks["GPU"]["status"] == checks[serve.MODELS_VARIABLE]["status"] == "warn"
    for setting in TABLE.values():
        assert checks[setting.variable]["found"] == f"{setting.default} (default)"


@pytest.mark.parametrize(("environ", "name", "status", "text"), [
    ({"DSV4_HOST_GB": "many"}, "DSV4_HOST_GB", "fail", "DSV4_HOST_GB='many': "),
    ({"DSV4_HOST_GIB": "1"}, "DSV4_HOST_GIB", "fail", "rename it to DSV4_HOST_GB"),
    ({"DSV4_NAMESPACE": "x"}, "DSV4_NAMESPACE", "warn", "left alone"),
    ({"DSV4_HOST_COPIES": "7"}, "DSV4_HOST_COPIES", "warn", "left alone"),
    ({"DSV4_SESSIONS": "7"}, "DSV4_SESSIONS", "ok", "7 (set)"),
    ({"DSV4_ENABLED": "0"}, "hooks", "warn", "unset DSV4_ENABLED"),
    ({"SGLANG_PLUGINS": "other"}, "entry point", "fail", "SGLANG_PLUGINS='other'"),
    ({serve.MODELS_VARIABLE: "their.models"}, serve.MODELS_VARIABLE, "fail", "unset it"),
])  # fmt: skip
def test_what_the_environment_says(findings, monkeypatch, environ, name, status, text):
    for variable, value in environ.items():
        monkeypatch.setenv(variable, value)
    found, checks = findings()
    assert found == int(status == "fail")
    assert checks[name]["status"] == status
    assert text in checks[name]["found"] + checks[name]["todo"]
    assert checks["host memory"]["status"] == "ok"
    assert [check["status"] for check in checks.values()].count("fail") == int(status == "fail"), (
        "one cause, one finding"
    )


def test_a_hook_that_is_not_in_place_fails_by_name(findings, monkeypatch):
    target = "sglang.srt.mem_cache.deepseek_v4_memory_pool.DeepSeekV4IndexerPool"
    monkeypatch.setattr(target, object)
    failed = {name: check["found"] for name, check in findings()[1].items() if check["status"] == "fail"}
    assert failed == {"hooks": f"{target}: is still the engine's own"}


def test_an_engine_that_cannot_be_loaded_fails_with_what_it_said_and_the_rest_is_checked(capsys, monkeypatch):
    def fail():
        print("the engine's last words")
        raise RuntimeError("broken")

    monkeypatch.setattr("sglang_dsv4.testing.standalone.install_hooks", fail)
    assert main(["doctor", "--json"]) == 1
    said = capsys.readouterr()
    checks = {check["name"]: check for check in json.loads(said.out)["checks"]}
    assert checks["hooks"]["status"] == "fail" and "broken" in checks["hooks"]["found"]
    assert "GPU" in checks and "the engine's last words" in said.err


@pytest.mark.parametrize(
    ("version", "expected", "text"),
    [("0.5.19", "fail", "not supported"), ("0.5.99", "warn", "not tested"), ("0.5.22", "ok", "tested")],
)
def test_engine_versions(monkeypatch, version, expected, text):
    monkeypatch.setattr(doctor_installation, "version", lambda name: version)
    (check,) = doctor_installation.sglang()
    assert (check.status, text in check.found) == (expected, True)


@pytest.mark.parametrize(("cuda", "versions", "warned"), [
    ("13.0", {"torch": "2.11.0+cu130", "triton": "3.6.0", "python": "3.12.3"}, set()),
    (None, {"torch": "2.13.0+cpu", "triton": "3.4.0", "python": "3.11.7"}, {"torch"}),
    ("13.0", {"torch": "2.13.0+cu130", "triton": "3.4.0", "python": "3.13.1"}, {"torch", "triton", "python"}),
    ("13.0", {"torch": "2.1.0+cu121", "triton": "3.60.0", "python": "3.11.0"}, {"torch", "triton"}),
])  # fmt: skip
def test_it_warns_of_versions_that_were_not_tested(monkeypatch, cuda, versions, warned):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch, "__version__", versions["torch"])
    monkeypatch.setattr(platform, "python_version", lambda: versions["python"])
    monkeypatch.setattr(doctor_installation, "version", lambda name: versions[name])
    found = [
        next(part()) for part in (doctor_installation.python, doctor_installation.torch, doctor_installation.triton)
    ]
    assert {check.name for check in found if check.status == "warn"} == warned
    assert all(check.todo for check in found if check.status == "warn")


def test_an_older_python_fails(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    (check,) = doctor_installation.python()
    assert (check.status, check.todo) == ("fail", "use Python 3.11 or later")


@pytest.mark.parametrize(("environ", "status"), [
    ({"DSV4_ENABLED": "0"}, "warn"), ({EARLY_SEND: "0"}, "ok"),
    ({}, "ok" if engine_release().nixl_gets_the_event else "warn"),
], ids=str)  # fmt: skip
def test_a_chunk_that_is_sent_before_it_is_written(monkeypatch, environ, status):
    """It takes neither this package nor a retract: the operator of a prefill server with NIXL has to know."""
    monkeypatch.delenv(EARLY_SEND, raising=False)
    for variable, value in environ.items():
        monkeypatch.setenv(variable, value)
    (check,) = doctor.parts(doctor.Examination(1, 1))["early send"]()
    assert check.status == status
    assert (f"{EARLY_SEND}=0" in check.todo) is (status == "warn")


@pytest.mark.parametrize(("words", "warned"), [
    ([], True), ([PREFILL, "nixl"], True), ([PREFILL, "mooncake"], False), (["--tp 2"], False), ([DECODE], False),
    ([DECODE, "--enable-pd-role-switch"], True), (["--no-such-flag"], False),
], ids=str)  # fmt: skip
def test_it_is_said_for_servers_that_send_over_nixl(findings, monkeypatch, words, warned):
    monkeypatch.delenv(EARLY_SEND, raising=False)
    monkeypatch.setenv("DSV4_ENABLED", "0")
    behind = ["--", "--model-path", "V4", *" ".join(words).split()] if words else []
    assert ("early send" in findings(*behind)[1]) is warned


def test_without_the_client_of_prometheus_a_server_starts(findings, monkeypatch):
    real = doctor_installation.version

    def version(name):
        if name == "prometheus_client":
            raise ModuleNotFoundError(f"No package metadata was found for {name}")
        return real(name)

    monkeypatch.setattr(doctor_installation, "version", version)
    status, checks = findings()
    assert (status, checks["prometheus_client"]["status"]) == (0, "warn")


def test_another_machine_may_have_more_memory(findings, monkeypatch):
    monkeypatch.setattr(sizing, "free_ram", lambda: 8 * GIB)
    monkeypatch.setenv("DSV4_HOST_GB", "9")
    assert findings()[1]["host memory"]["status"] == "fail"
    assert findings("--gpu", "sm100")[1]["host memory"]["status"] == "warn"


EIGHT = ["--tp", "8", "--groups", "8"]


@pytest.mark.parametrize(("argv", "host_gb", "expected", "text"), [
    ([], None, "ok", "8.0 GiB can be taken; DSV4_HOST_GB=auto gives one arena at most 4.0 GiB, pinned while"),
    (["--tp", "8"], None, "ok", "auto gives one arena at most 4.0 GiB, pinned while"),
    (EIGHT, None, "ok", "auto gives 8 arenas at most 512.0 MiB each, 4.0 GiB together, pinned while"),
    ([], "8.5", "fail", "lower it to less than 8.00"),
    (EIGHT, "1", "ok", "DSV4_HOST_GB=1 gives 8 arenas at most 1.0 GiB each, 8.0 GiB together"),
    (EIGHT, "1.25", "fail", "lower it to less than 1.00, or set auto"),
])  # fmt: skip
def test_host_memory_is_judged_for_all_arenas(findings, monkeypatch, argv, host_gb, expected, text):
    monkeypatch.setattr(sizing, "free_ram", lambda: 8 * GIB)
    if host_gb is not None:
        monkeypatch.setenv("DSV4_HOST_GB", host_gb)
    status, checks = findings(*argv)
    check = checks["host memory"]
    assert (status, check["status"]) == (int(expected == "fail"), expected)
    assert text in f"{check['found']} {check['todo']}"


@pytest.mark.parametrize("named", [False, True], ids=["ranks alone", "its arguments"])
def test_ranks_that_cannot_share_have_an_arena_each(findings, monkeypatch, named):
    """A processor on which no rank may rely on another's words in shared memory."""
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    monkeypatch.setattr(sizing, "free_ram", lambda: 50 * GIB)
    monkeypatch.setenv("DSV4_HOST_GB", "20")
    status, checks = findings(*(["--", "--model-path", "M", "--tp", "4"] if named else ["--tp", "4"]))
    assert (status, checks["shared memory"]["status"]) == (1, "warn")
    assert "a riscv64 may see another rank's writes" in checks["shared memory"]["found"]
    assert "for each of 4 arenas is 80 GiB" in checks["host memory"]["found"]


@pytest.fixture
def gpu(monkeypatch):
    """torch as it looks with two GPUs; returns what was pinned."""
    pinned = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda number: SimpleNamespace(name=f"Card {number}", total_memory=3 * GIB)
    )

    def pin(nbytes, pin):
        pinned.append((nbytes, pin))
        return SimpleNamespace(close=lambda: pinned.append("closed"))

    monkeypatch.setattr(arena, "Arena", pin)
    return pinned


def test_gpus_are_the_ranks_and_a_little_is_pinned(findings, monkeypatch, gpu, tmp_path):
    monkeypatch.setattr(sizing, "free_ram", lambda: 8 * GIB)
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Mon Oct 13")
    monkeypatch.setattr(doctor_machine, "DRIVER", tmp_path / "version")
    status, checks = findings()
    assert status == 0
    assert checks["pinning"]["found"].startswith("64.0 MiB in ")
    assert checks["GPU driver"]["found"] == "580.65.06"
    assert gpu == [(64 << 20, True), "closed"]
    assert "one arena at most 4.0 GiB" in checks["host memory"]["found"]

    def refuse(nbytes, pin):
        raise HostMemoryExhausted("cannot pin")

    monkeypatch.setattr(arena, "Arena", refuse)
    status, checks = findings()
    assert (status, checks["pinning"]["status"]) == (1, "fail")
    assert "ulimit -l" in checks["pinning"]["todo"]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("limit", "expected"), [(2 * GIB, "ok"), (2 * GIB - 1, "warn")])
def test_the_locked_memory_limit_is_held_against_the_arena(findings, monkeypatch, limit, expected):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, resource.RLIM_INFINITY))
    monkeypatch.setattr(sizing, "free_ram", lambda: 8 * GIB)
    status, checks = findings("--tp", "2", "--groups", "2")
    assert (status, checks[LOCKED]["status"]) == (0, expected)
    assert "arena up to 2.0 GiB" in checks[LOCKED]["found"]


def test_one_renamed_method_is_one_failure_and_nothing_is_promised(capsys, monkeypatch):
    """The installation changes nothing then, so every other hook is missing because of it."""
    target = "sglang.srt.managers.scheduler.Scheduler.handle_pd_role_switch"
    renamed = replace(next(hook for hook in HOOKS if hook.target == target), target=f"{target}_renamed")
    hooks = (renamed, *(hook for hook in HOOKS if hook.target != target))
    monkeypatch.setattr(doctor_installation, "hooks_for", lambda settings, version: hooks)
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines if line.startswith("fail")] == ["fail  hooks"]
    assert lines[0].startswith(f"fail  hooks: {target}_renamed: ")
    assert lines[-1].startswith(f"A DeepSeek-V4 server will refuse to start: {target}_renamed: ")


@pytest.mark.parametrize(("words", "text"), [
    ("--no-such-flag", "unrecognized arguments: --no-such-flag"), (f"{EAGLE} 3 --speculative-algorithm NGRAM", "EAGLE"),
])  # fmt: skip
def test_arguments_that_the_engine_refuses_are_one_failure(findings, tmp_path, words, text):
    status, checks = findings("--", "--model-path", str(tmp_path), *words.split())
    assert status == 1
    assert checks["server arguments"]["status"] == "fail" and text in checks["server arguments"]["found"]


@pytest.mark.parametrize(("words", "end"), [
    ("--no-such-flag", "This server will not start: the engine's parser says: unrecognized arguments: --no-such-flag"),
    ("--mem-fraction-statc 1", "This server will not start: the engine's parser says: unrecognized arguments: "
     "--mem-fraction-statc 1 (did you mean --mem-fraction-static?)"),
    ("--enable-prefill-cp", "This server will not start: the engine refuses these arguments: DeepSeekV4 only supports"),
])  # fmt: skip
def test_after_refused_arguments_it_does_not_ask_for_them(capsys, words, end):
    assert main(["doctor", "--", "--model-path", "V4", "--tp", "8", *words.split()]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(end) and "name its arguments" not in last


def test_a_model_type_that_transformers_lacks_is_no_fault_of_the_arguments(findings, tmp_path):
    config = {"architectures": ["DeepseekV4VisionForCausalLM"], "model_type": "deepseek_v4_vision"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    check = findings("--", "--model-path", str(tmp_path))[1]["server arguments"]
    assert check["found"] == "the installed transformers has no model type 'deepseek_v4_vision'"
    assert check["todo"].startswith("serve it with a release of SGLang that knows it")


@pytest.mark.parametrize(("argv", "said"), [
    (["--model-path", "M"], "go behind --"), (["--tp", "4", "sglang", "serve"], "go behind --"),
    (["--tp", "x"], "--tp: invalid int value: 'x'"), (["--tp", "8", "--groups", "3"], "it must divide the number of"),
    (["--groups", "2"], "it must divide the number of ranks, 1 (--tp)"), (["--gpu", "h100"], "sm90"),
])  # fmt: skip
def test_its_own_arguments_are_refused_in_a_line(capsys, argv, said):
    with pytest.raises(SystemExit) as end:
        main(["doctor", *argv])
    text = capsys.readouterr().err
    assert end.value.code == 2 and said in text and text.count("\n") == 1


def test_its_help_names_options_that_the_engine_takes(capsys):
    from sglang.srt.server_args import ServerArgs

    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    ours = {"--tp", "--groups", "--gpu", "--store", "--json", "--help"}
    named = set(re.findall(r"--[a-z][\w-]+", capsys.readouterr().out)) - ours
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    assert named and named <= set(parser._option_string_actions)
