"""Measures transfers and decode metadata on this machine: tables, and bounds that are met or missed."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_dsv4.bench.results import add_out
from sglang_dsv4.command_line import CommandError, Parser, end_when_told, gpus

BENCHMARKS = ("transfer", "prep")
ON_CPU = ["--device", "cpu", "--model", "tiny", "--tokens", "255", "1023", "4095", "--count", "3"]
NO_DEVICE = (
    "no CUDA device, and what is measured is the link between one and host memory "
    "(`sglang-dsv4 bench transfer --device cpu` runs the torch path instead; its figures say nothing about a GPU)"
)


def main(argv: Sequence[str]) -> int:
    """Runs ``sglang-dsv4 bench``; the arguments behind ``--`` are for the benchmark. Returns the exit status."""
    own, rest = list(argv), []
    if "--" in own:
        own, rest = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = Parser(
        "sglang-dsv4 bench", description=__doc__, usage="%(prog)s [options] [{transfer,prep,all}] [-- ARGUMENTS]",
        epilog="ARGUMENTS are for the one benchmark named: sglang-dsv4 bench transfer -- --help",
    )  # fmt: skip
    add_arguments(parser)
    return run(parser.parse_args(own), rest)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``bench`` itself."""
    parser.add_argument("which", nargs="?", choices=(*BENCHMARKS, "all"), default="all", help="default: all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    add_out(parser)


def run(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    """Runs each benchmark in a process of its own; returns exit status 1 when one misses a bound.

    Raises CommandError for one that cannot run.
    """
    check(arguments, rest)
    wanted = BENCHMARKS if arguments.which == "all" else (arguments.which,)
    arguments.out.mkdir(parents=True, exist_ok=True)
    end_when_told()
    missed, written = 0, list[Path]()
    for name in wanted:
        given = ON_CPU if arguments.device == "cpu" else []
        done, files = _measure([*command(name), *given, *rest], arguments.out)
        written += files
        path = arguments.out / f"{name}.json"
        if path not in files:  # its own message has said why; the result of an earlier run stays as it is
            return done
        result = json.loads(path.read_text())
        print(verdict(result))
        missed = missed or done
    print(f"results: {', '.join(map(str, written))}")
    return missed


def check(arguments: argparse.Namespace, rest: Sequence[str]) -> None:
    """Raises CommandError for a benchmark that cannot be run here."""
    if rest and arguments.which == "all":
        raise CommandError(f"{' '.join(rest)}: name the one benchmark that these are for")
    for word in {word.partition("=")[0] for word in rest} & {"--out", "--name", "--device"}:
        raise CommandError(f"{word} behind --: the result would not be found (--out and --device go before it)")
    if arguments.device == "cpu" and arguments.which != "transfer":
        raise CommandError("--device cpu: only transfer runs without a CUDA device")
    for name in ("torch", "sglang"):
        if importlib.util.find_spec(name) is None:
            raise CommandError(f"{name} is not installed here: this package belongs beside sglang, in its environment")
    if arguments.device == "cuda" and not gpus() and "--help" not in rest:
        raise CommandError(NO_DEVICE)


def verdict(result: dict[str, Any]) -> str:
    """Returns one line: nothing to judge, all bounds met, or how many were missed."""
    name, bounds = result["bench"], result["bounds"]
    if result["machine"]["gpu"] is None or not bounds:
        return f"{name}: no verdict: bounds are for a CUDA device"
    missed = sum(not bound["ok"] for bound in bounds)
    return f"{name}: {missed} of {len(bounds)} bounds missed" if missed else f"{name}: all {len(bounds)} bounds met"


def _measure(words: list[str], out: Path) -> tuple[int, list[Path]]:
    """Runs a benchmark in a folder of its own; its exit status, and its files, which are then in ``out``."""
    with tempfile.TemporaryDirectory(dir=out, prefix=".running-") as running:
        status = _waited_for([*words, "--out", running])
        return status, [path.replace(out / path.name) for path in sorted(Path(running).iterdir())]


def _waited_for(words: list[str]) -> int:
    """Returns the exit status of a program. Ctrl-C is for this process alone, which then ends the program's."""
    process = subprocess.Popen(words, start_new_session=True)
    try:
        return process.wait()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


def command(name: str) -> list[str]:
    """Returns the command line of a benchmark."""
    return [sys.executable, "-m", f"sglang_dsv4.bench.{name}"]
