"""Bad arguments of every command end in one line and exit status 2, and so do results that could not be written."""

import errno
import functools
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import run_gsm8k

from benchmarks import session_agents
from sglang_dsv4.bench import prep, transfer
from sglang_dsv4.cli.main import COMMANDS, main
from sglang_dsv4.command_line import end_when_told, to_its_end
from sglang_dsv4.livetest import servers

ROOT = Path(__file__).parents[2]
BAD = {
    "": ("", "none", "dem"),
    "demo": ("--requests 0", "--requests 1e3", "--longest -1", "--pages 2001", "--req 5", "--seed x", "more",
        "--store 5", "--store --sessions"),
    "plan": (
        "flash --requests 0", "flash --tok 5", "/nosuch", "flash --store 0", "flash --store --store-rate 0",
        "flash --store --hisparse",
    ),
    "doctor": ("--tp 0", "--gro 2", "--store x"),
    "serve": ("--dsv4-host-gb", "--dsv4-verify 7", "--dsv4-host-gb -3"),
    "bench": ("none", "--out /dev/null/out", "--out /proc/out", "--qui", "transfer -- --name=foo", "-- --count 3"),
    "bench transfer": (
        "--count 0", "--tokens -5", "--tokens 0", "--tokens", "--mod pro", "--model none", "--device gpu",
        "--name a/b", "--name .", "--out /dev/null", "--count nan",
    ),
    "bench prep": (
        "--batches 0", "--batches 1 -1", "--repeats 0", "--context 5", "--contexts 5", "--suffix /x",
    ),
    "stress --model-path m": (
        "--concurrency 0", "--concurrency -1", "--requests -5 --at-least 0", "--requests 0", "--prompt -5 -5",
        "--prompt 0 0", "--prompt 9 3", "--new-tokens 5 -5", "--new-tokens 5 4", "--vocabulary 0", "--vocabulary 10",
        "--interval -1", "--score -1", "--may-refuse -1", "--at-least -1", "--patience 0", "--timeout nan",
        "--most-seconds -1", "--verify 2", "--name a/b", "--out /dev/null/x", "--logs /dev/null/x", "--conc 4",
        "--log /nosuch", "--model-path /nosuch", "--model-path /dev", "--within -0.1", "--turns 2", "--plain --turns 0",
        "--choices", "--choices --plain", "--choices --plain --score 0", "--choices --plain --stock",
    ),
    "stress": (
        "", "--attach u", "--attach http://a/b", "--attach http://a:b", "--attach http://:1", "--attach http://a:99999",
        "--attach 'http://a b'", "--attach http://127.0.0.1:9", "--attach http://a..b:1", "--attach http://u:1 --log /",
        "--attach http://u:1 --bootstrap-port 0", "--attach http://u:1 --stock", "--attach http://u:1 --score 5",
        "--model-path m --score 5", "--model-path m --recompute", "--model-path m --plain --transfer nixl",
        "--attach http://u:1 --plain --prefill-url http://p:1", "--attach http://u:1 --plain --choices",
        "--attach http://u:1 --plain-url http://p:1 --prefill-url http://q:1 --beside",
    ),
    "drill": ("none", "--js", "clients"),
    "run_gsm8k": ("--url u",),
    "run_gsm8k --url http://127.0.0.1:9": (
        "", "--questions 0", "--questions -1", "--concurrency 0", "--shots -1", "--max-new-tokens 0", "--timeout 0",
        "--bootstrap-port 0", "--data /nosuch", "--data /", f"--data {__file__}", "--data /dev/null", "--name a/b",
        "--out /dev/null/x", "--quest 5",
    ),
    f"session_agents --config {ROOT}/tools/tiny_checkpoint/v4/config.json": (
        "--contexts 3", "--turn 5 --answer 5", "--device-tokens 9999", "--over 0", "--conf x", "--host-gb 0",
    ),
}  # fmt: skip
MAINS = {"bench transfer": transfer.main, "bench prep": prep.main, "run_gsm8k": run_gsm8k.main}
MAINS |= {"session_agents": session_agents.main}


def ended(words: list[str]) -> int:
    """The exit status of a command line; a benchmark and a script are entered as their own process enters them."""
    name = next((name for name in MAINS if words[: len(name.split())] == name.split()), None)
    try:
        if name is None or (words[0] == "bench" and "--" in words):
            return main(words)
        return to_its_end(name, functools.partial(MAINS[name], words[len(name.split()) :]))
    except SystemExit as error:
        return error.code


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("command", "bad"), [(command, bad) for command, bads in BAD.items() for bad in bads])
def test_bad_arguments_end_in_one_line(capsys, tmp_path, command, bad):
    assert ended(shlex.split(f"{command} {bad}")) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and said.err.endswith("\n") and len(said.err) < 600, said.err
    assert said.out == ""
    assert not list(tmp_path.iterdir()), "nothing was begun"


def test_every_command_is_given_bad_arguments():
    assert {command.split()[0] for command in BAD if command} == {*COMMANDS, *MAINS} - {"bench transfer", "bench prep"}


def test_a_port_that_is_none_is_refused_and_help_still_helps(monkeypatch, capsys):
    monkeypatch.setattr(servers, "GIVEN_BASE", "abc")
    assert ended(["stress", "--help"]) == 0 and "--attach" in capsys.readouterr().out
    assert ended(["stress", "--model-path", "m"]) == 2 and "SERVERS_PORT='abc'" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------ how a command ends


@pytest.mark.parametrize("told", [signal.SIGINT, signal.SIGTERM])
def test_who_is_interrupted_says_so(capsys, told):
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def run():
        end_when_told()
        os.kill(os.getpid(), told)
        time.sleep(5)

    try:
        assert to_its_end("some command", run) == 128 + told
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert capsys.readouterr().err == f"some command: interrupted ({told.name})\n"


@pytest.mark.parametrize("number", [errno.EPIPE, errno.EBADF, errno.ENOENT])
def test_an_output_that_cannot_be_written_is_no_traceback(capfd, number):
    with open(os.devnull, "w") as null:  # noqa: PTH123
        words = (
            "import sys, functools; from sglang_dsv4.command_line import to_its_end\n"
            f"def run(): raise OSError({number}, 'it says')\n"
            "sys.exit(to_its_end('c', run))"
        )
        done = subprocess.run(
            [sys.executable, "-c", words], stdout=null, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == {errno.EPIPE: 141, errno.EBADF: 1}.get(number, 1)
    assert ("Traceback" in done.stderr) == (number == errno.ENOENT)


def test_a_closed_output_is_said(tmp_path):
    words = [sys.executable, "-m", "sglang_dsv4.cli.main", "--version"]
    done = subprocess.run(
        ["sh", "-c", f"{shlex.join(words)} >&-"], cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, "sglang-dsv4 --version: standard output is closed\n")


def test_a_benchmark_ends_with_the_command_that_began_it(tmp_path):
    """Ctrl-C reaches ``bench`` alone; its benchmark, and what that launched, must not stay."""
    program = """import os, subprocess, time
child = subprocess.Popen(["sleep", "60"], stderr=subprocess.DEVNULL)
print(os.getpid(), child.pid, flush=True)
time.sleep(60)"""
    words = f"""
import sys
from sglang_dsv4.cli import bench
from sglang_dsv4.command_line import end_when_told, to_its_end
end_when_told()
sys.exit(to_its_end("bench", lambda: bench._waited_for([sys.executable, "-c", {program!r}])))
"""
    with subprocess.Popen(
        [sys.executable, "-c", words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as told:
        pids = [int(word) for word in told.stdout.readline().split()]
        told.send_signal(signal.SIGINT)
        assert told.wait(20) == 130
        assert told.stderr.read() == "bench: interrupted (SIGINT)\n"
    for pid in pids:
        assert gone(pid), pid


def gone(pid: int) -> bool:
    """Whether the process ends soon; a zombie that nobody waits for has ended."""
    stat = Path(f"/proc/{pid}/stat")
    for _ in range(100):
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False
