"""``sglang-dsv4 doctor``: every finding, what fails it, and its two ways of showing."""

import json
import logging
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.runtime_context import get_context

from sglang_dsv4.cli import doctor, doctor_installation, doctor_server, serve
from sglang_dsv4.cli.main import main
from sglang_dsv4.cli.plan_config import EXAMPLES
from sglang_dsv4.engine.hooks.table import HOOKS, hooks_of
from sglang_dsv4.engine.releases import engine_version
from sglang_dsv4.errors import HostMemoryExhausted
from sglang_dsv4.hostmem import arena, sizing
from sglang_dsv4.settings import TABLE, Settings
from sglang_dsv4.testing.standalone import boot
from tools.recipes import ONLINE, UNIFIED

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
LOCKED = "locked memory (ulimit -l)"
EARLY_SEND = "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"


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
    command = [sys.executable, "-m", "sglang_dsv4.cli.main", "doctor", "--json"]
    environ = {**os.environ, serve.MODELS_VARIABLE: serve.MODELS}
    done = subprocess.run(command, env=environ, text=True, capture_output=True, timeout=300, check=False)
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


@pytest.mark.parametrize(
    ("environ", "name", "status", "text"),
    [
        ({"DSV4_HOST_GB": "many"}, "DSV4_HOST_GB", "fail", "DSV4_HOST_GB='many': "),
        ({"DSV4_HOST_GB": "many"}, "hooks", "fail", "DSV4_HOST_GB='many'"),  # the pool would refuse, too
        ({"DSV4_HOST_GIB": "1"}, "DSV4_HOST_GIB", "fail", "rename it to DSV4_HOST_GB"),
        ({"DSV4_NAMESPACE": "x"}, "DSV4_NAMESPACE", "warn", "left alone"),
        ({"DSV4_HOST_COPIES": "7"}, "DSV4_HOST_COPIES", "ok", "7 (set)"),
        ({"DSV4_ENABLED": "0"}, "hooks", "warn", "unset DSV4_ENABLED"),
        ({"SGLANG_PLUGINS": "other"}, "entry point", "fail", "SGLANG_PLUGINS='other'"),
        ({serve.MODELS_VARIABLE: "their.models"}, serve.MODELS_VARIABLE, "fail", "unset it"),
    ],
)
def test_what_the_environment_says(findings, monkeypatch, environ, name, status, text):
    for variable, value in environ.items():
        monkeypatch.setenv(variable, value)
    found, checks = findings()
    assert found == int(status == "fail")
    assert checks[name]["status"] == status
    assert text in checks[name]["found"] + checks[name]["todo"]
    assert checks["host memory"]["status"] == "ok"


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


@pytest.mark.parametrize(
    ("environ", "status"),
    [({}, "warn"), ({EARLY_SEND: "0"}, "ok"), ({"DSV4_LAYOUT": "page-major"}, "ok")],
    ids=str,
)
def test_a_chunk_that_is_sent_before_it_is_written(monkeypatch, environ, status):
    """It takes neither this package nor a retract: the operator of a prefill server with NIXL has to know."""
    monkeypatch.delenv(EARLY_SEND, raising=False)
    for variable, value in environ.items():
        monkeypatch.setenv(variable, value)
    (check,) = doctor.parts(doctor.Examination(1, 1))["early send"]()
    assert check.status == status
    assert (f"{EARLY_SEND}=0" in check.todo) is (status == "warn")


def test_without_the_client_of_prometheus_a_server_starts(findings, monkeypatch):
    real = doctor_installation.version

    def version(name):
        if name == "prometheus_client":
            raise ModuleNotFoundError(f"No package metadata was found for {name}")
        return real(name)

    monkeypatch.setattr(doctor_installation, "version", version)
    status, checks = findings()
    assert (status, checks["prometheus_client"]["status"]) == (0, "warn")


EIGHT = ["--tp", "8", "--groups", "8"]


@pytest.mark.parametrize(("argv", "host_gb", "expected", "text"), [
    ([], None, "ok", "8.0 GiB can be taken; DSV4_HOST_GB=auto gives one arena at most 4.0 GiB, pinned while"),
    (["--tp", "8"], None, "ok", "auto gives one arena at most 4.0 GiB, pinned while"),
    (EIGHT, None, "ok", "auto gives 8 arenas at most 512 MiB each, 4.0 GiB together, pinned while"),
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


def test_gpus_are_the_ranks_and_a_little_is_pinned(findings, monkeypatch, gpu):
    monkeypatch.setattr(sizing, "free_ram", lambda: 8 * GIB)
    status, checks = findings()
    assert status == 0
    assert checks["pinning"]["found"].startswith("64 MiB in ")
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


FLASH, V41 = "flash", "v41-flash"
PREFILL = "--disaggregation-mode prefill"
DECODE = "--disaggregation-mode decode --disaggregation-transfer-backend nixl"
EAGLE = "--speculative-algorithm EAGLE --speculative-eagle-topk 1 --speculative-num-steps"
ON = "Metadata kernels of this package: on, in decode graphs"
STOCK = "will behave as stock and reserve no host memory: "


@pytest.fixture
def judged(tmp_path):
    """Reads the launch arguments of a server with an example's config; returns the verdict."""

    def read(example, text, tp=8, **settings):
        boot()
        folder = tmp_path / example
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text((EXAMPLES / f"{example}.json").read_text())
        words = ["--model-path", str(folder), *text.split()]
        return doctor_server.paragraph(doctor_server.read(words, tp, Settings(**settings)), 64, 0)

    return read


@pytest.mark.parametrize(("example", "text", "verdict"), [
    (FLASH, DECODE, "will keep retracted requests"),
    (FLASH, f"{DECODE} {EAGLE} 3", f"{STOCK}online c128 compression with drafts"),
    (FLASH, f"{DECODE} --enable-hisparse", f"{STOCK}online c128 compression with HiSparse"),
    (V41, DECODE, "will keep retracted requests"),
    (FLASH, "", f"{STOCK}no paged SWA pool (unified_kv"),
])  # fmt: skip
def test_switches_of_the_environment_are_judged_by_what_is_beside_them(judged, monkeypatch, example, text, verdict):
    monkeypatch.setenv(*next(iter((UNIFIED if "unified" in verdict else ONLINE).items())))
    assert verdict in judged(example, text)


@pytest.mark.parametrize(("states", "part"), [
    ({}, "refuse to start: 2.000 GiB"), (ONLINE, "will keep"),
    ({"SGLANG_DSV4_COMPRESS_STATE_DTYPE": "bfloat16"}, "will keep"),
])  # fmt: skip
def test_smaller_states_than_the_config_tells_may_fit(judged, monkeypatch, states, part):
    for name, value in states.items():
        monkeypatch.setenv(name, value)
    assert part in judged(FLASH, DECODE, host_gb=2, host_copies=200)


@pytest.mark.parametrize(("example", "text", "settings", "parts"), [
    (FLASH, DECODE, {}, ["(decode, 8 ranks", "will keep retracted requests", "64 GiB, reserved once and shared", ON]),
    (FLASH, "", {}, ["(plain, 8 ranks", "will keep retracted requests", "Plain serving: yes", ON, "HiSparse: no"]),
    (FLASH, "--enable-hierarchical-cache", {}, ["(plain", "will keep retracted requests", "Plain serving: yes", ON]),
    (FLASH, "--enable-hierarchical-cache --hicache-storage-backend file", {}, [f"{STOCK}a hierarchical cache with a"]),
    (FLASH, "--enable-hierarchical-cache", {"layout": "page-major"}, ["refuse to start", "a hierarchical cache"]),
    (FLASH, "--enable-pdmux", {}, [f"{STOCK}PD multiplexing"]),
    (FLASH, "", {"plain": "off", "prep": "off"}, [f"{STOCK}DSV4_PLAIN=off", "off: DSV4_PREP=off"]),
    (FLASH, "", {"enabled": False}, [f"{STOCK}DSV4_ENABLED=0"]),
    (FLASH, "--disaggregation-mode prefill", {}, ["(prefill", f"{STOCK}a prefill server retracts nothing"]),
    (FLASH, f"{DECODE} --disaggregation-decode-retraction-backup none", {}, [f"{STOCK}retraction backup is none"]),
    (FLASH, f"{DECODE} {EAGLE} 3", {}, ["will keep retracted requests"]),
    (FLASH, f"{DECODE} {EAGLE} 9", {}, [f"{STOCK}10 draft tokens: more than 8"]),
    (FLASH, f"{DECODE} --enable-hisparse", {}, ["rows are kept on the host", "off: HiSparse reads its own mapping"]),
    (FLASH, f"{DECODE} --enable-hisparse {EAGLE} 3", {}, [f"{STOCK}HiSparse keeps the history"]),
    (FLASH, "--enable-dp-attention --dp-size 8", {}, ["64 GiB for each of 8 arenas, 512.0 GiB together"]),
    (FLASH, DECODE, {"share": "off"}, ["64 GiB for each of 8 arenas, 512.0 GiB together"]),
    (FLASH, "--nnodes 2 --node-rank 0 --dist-init-addr 10.0.0.1:5", {}, ["4 ranks on this machine"]),
    (V41, "", {}, ["will keep retracted requests", "Plain serving: yes", "off: compression ratios [1, 2]"]),
    (V41, "--enable-encoder-swa-bounded-replay --max-running-requests 8", {}, [f"{STOCK}encoder SWA bounded replay"]),
    (V41, DECODE, {"layout": "page-major"}, ["refuse to start: DSV4_LAYOUT=page-major", "compression ratios"]),
    (FLASH, DECODE, {"host_gb": 0.001}, ["refuse to start: 0.001 GiB of host memory", "raise DSV4_HOST_GB"]),
    (FLASH, "", {"host_gb": 1, "host_copies": 10**5}, ["refuse to start: 1.000 GiB", "or lower DSV4_HOST_COPIES"]),
    (FLASH, "", {"host_copies": 10**7}, ["refuse to start", "or lower DSV4_HOST_COPIES"]),
    (FLASH, DECODE, {"host_gb": 1, "host_copies": 40}, ["will keep retracted requests"]),
], ids=str)  # fmt: skip
def test_one_server_is_judged_by_its_launch_arguments(judged, example, text, settings, parts):
    """By the functions that refuse in the server, on what the engine resolves; the machine has no GPU."""
    verdict = judged(example, text, **settings)
    assert not [part for part in parts if part not in verdict], verdict


KEPT, NOT_KEPT = "Sessions: yes, in all host memory that no", "Sessions: no, and no memory for them: "


@pytest.mark.parametrize(("text", "settings", "part"), [
    ("", {}, f"{NOT_KEPT}DSV4_SESSIONS=off."),
    ("", {"sessions": None}, KEPT),
    ("", {"sessions": 8.0}, "Sessions: yes, in at most 8 GiB of the host memory (DSV4_SESSIONS=8)."),
    (f"{EAGLE} 3", {"sessions": None}, KEPT),
    ("--enable-dp-attention --dp-size 8", {"sessions": None, "share": "off"}, KEPT),
    (DECODE, {"sessions": None}, f"{NOT_KEPT}prompts come to a decode server computed"),
    (PREFILL, {"sessions": None}, KEPT),
    (PREFILL, {"sessions": None}, "will keep finished prompts in host memory: 64 GiB, reserved once"),
    (PREFILL, {}, f"{STOCK}a prefill server retracts nothing"),
    (f"{PREFILL} --enable-hierarchical-cache", {"sessions": None}, f"{STOCK}beside a hierarchical cache"),
    (f"{PREFILL} --pp-size 2", {"sessions": None}, f"{STOCK}pipeline parallelism"),
    ("--disable-radix-cache", {"sessions": None}, f"{NOT_KEPT}there is no prefix cache"),
    ("--enable-hisparse --disable-radix-cache", {"sessions": None}, f"{NOT_KEPT}there is no prefix cache"),
    ("--enable-hierarchical-cache", {"sessions": None}, f"{NOT_KEPT}beside a hierarchical cache"),
    ("--pp-size 2", {"sessions": None}, f"{NOT_KEPT}this server is as stock"),
    ("--enable-return-routed-experts", {"sessions": None}, f"{NOT_KEPT}expert or indexer choices are returned"),
    ("", {"sessions": None, "share": "off"}, f"{NOT_KEPT}tensor-parallel ranks that do not share"),
    ("--nnodes 2 --node-rank 0 --dist-init-addr 10.0.0.1:5", {"sessions": None}, f"{NOT_KEPT}tensor-parallel ranks"),
    ("", {"sessions": None, "plain": "off"}, f"{NOT_KEPT}this server is as stock"),
], ids=str)  # fmt: skip
def test_it_says_whether_sessions_are_kept_and_why_not(judged, text, settings, part):
    verdict = judged(FLASH, text, **settings)
    assert part in verdict, verdict


def test_reading_the_arguments_leaves_the_process_as_it_was(judged):
    judged(FLASH, "")
    environ, handlers, args = dict(os.environ), logging.getLogger().handlers[:], get_context().server_args
    assert "decode" in judged(V41, DECODE)
    assert dict(os.environ) == environ and logging.getLogger().handlers == handlers
    assert get_context().server_args is not args, "boot made anew"
    assert get_context().server_args.model_path == "dummy"


@pytest.mark.parametrize(("words", "text"), [
    ("--no-such-flag", "unrecognized arguments: --no-such-flag"), (f"{EAGLE} 3 --speculative-algorithm NGRAM", "EAGLE"),
])  # fmt: skip
def test_arguments_that_the_engine_refuses_are_one_failure(findings, tmp_path, words, text):
    status, checks = findings("--", "--model-path", str(tmp_path), *words.split())
    assert status == 1
    assert checks["server arguments"]["status"] == "fail" and text in checks["server arguments"]["found"]


@pytest.mark.parametrize("begin", [
    "sglang-dsv4 serve --dsv4-host-gb 7", "/usr/bin/env DSV4_HOST_GB=7 X=1 python3 -m sglang.launch_server",
    "SGLANG_EXTERNAL_MODEL_PACKAGE=sglang_dsv4.models DSV4_HOST_GB=7 sglang serve",
])  # fmt: skip
def test_the_whole_command_is_read_with_our_options_and_ends_the_output(capsys, monkeypatch, begin):
    monkeypatch.setattr(sizing, "free_ram", lambda: 80 * GIB)
    command = f"{begin} --model-path /no/such/model --tp 4 {DECODE}"
    assert main(["doctor", "--", *command.split()]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1].startswith(
        "This server (decode, 4 ranks on this machine) will keep retracted requests in host memory: 7 GiB, "
        "reserved once and shared by its 4 ranks."
    )
    assert "No config.json in /no/such/model here: taken for DeepSeek-V4." in shown
    assert "DSV4_HOST_GB" not in os.environ
    assert main(["doctor", "--tp", "4", "--json", "--", "--dsv4-host-gb", "81", "--model-path", "M"]) == 1
    verdict = json.loads(capsys.readouterr().out)["server"]
    assert verdict.startswith(
        "This server (plain, 4 ranks on this machine) will refuse to start: DSV4_HOST_GB=81: 80.00"
    )


WITHOUT = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in GONE else self.finder.find_spec(name, path, target)

    def find_distributions(self, context):
        return [] if context.name in GONE else self.finder.find_distributions(context)

sys.meta_path[:] = [Without(finder) if hasattr(finder, "find_distributions") else finder for finder in sys.meta_path]
"""


@pytest.fixture(params=["torch triton sglang", "sglang"], ids=["neither", "torch alone"])
def elsewhere(request, tmp_path):
    """Runs a command in a process where the engine, or torch too, is not installed."""
    (tmp_path / "sitecustomize.py").write_text(f"GONE = {request.param.split()}\n{WITHOUT}")

    def run(*argv):
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
        command = [sys.executable, "-m", "sglang_dsv4.cli.main", *argv]
        return subprocess.run(command, env=environ, text=True, capture_output=True, timeout=120, check=False)

    run.gone = request.param.split()
    return run


@pytest.mark.parametrize("argv", [
    ["demo"], ["serve", "--model-path", "M"], ["drill", "memory"], ["bench"],
    ["bench", "transfer", "--device", "cpu"], ["stress", "--model-path", "M"],
], ids=" ".join)  # fmt: skip
def test_without_the_engine_a_command_ends_in_a_line(elsewhere, argv, tmp_path):
    done = elsewhere(*argv, *(["--out", str(tmp_path / "out")] if argv[0] in ("bench", "stress") else []))
    assert done.returncode in (1, 2), done
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stderr.strip(), done.stdout


def test_without_the_engine_doctor_says_what_is_missing_and_how_to_get_it(elsewhere):
    done = elsewhere("doctor", "--tp", "8")
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    for text in (*(f"{name} is not installed for" for name in elsewhere.gone), "install sglang", "None starts here"):
        assert text in done.stdout


def test_without_the_engine_a_cache_can_be_planned(elsewhere):
    done = elsewhere("plan", "flash", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["requests"][-1]["moved_bytes"] > 1_000_000_000
