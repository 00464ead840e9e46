#!/usr/bin/env python3
"""Seeds the faults of ``mutant_table`` one at a time and runs the tests nearest to each: do they go red?

    python3 -m tools.mutants [--only ID ...] [--jobs N] [--again] [--check]

Everything happens in a copy of the tracked files. The nearest tests must be green there before the first fault is
seeded. A mutant is killed when its tests fail or run out of time; one that survives is a gap in the suite.
A whole run writes docs/results/mutants.json. --again judges only the faults that this file does not have as killed (or
--only ID), and keeps its other rows. Exit status 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sglang_dsv4.bench.results import bound, status, write
from tools.mutant_table import MUTANTS
from tools.mutant_table.entry import Mutant
from tools.warm_pytest import Warm

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "docs" / "results" / "mutants.json"
FEWEST = 60
LEAST_KILLED = 0.9
UNMUTATED_SECONDS = 1800
TIMED_OUT = "timed out"
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+\.py.*?)(?: - .*)?$", re.MULTILINE)


class Refused(Exception):
    """Reports that the run would say nothing; the message says why."""


@dataclass(frozen=True)
class Outcome:
    """Holds the fate of one mutant. killed: None where no interpreter has its release. by: the first failing test."""

    mutant: Mutant
    killed: bool | None
    seconds: float
    by: str

    def row(self) -> dict[str, Any]:
        named = {"id": self.mutant.id, "file": self.mutant.file}
        return named | {"killed": self.killed, "seconds": round(self.seconds, 1), "by": self.by}

    def say(self) -> None:
        word = {None: "skipped", True: "killed", False: "SURVIVED"}[self.killed]
        print(f"{word:8} {self.seconds:5.1f} s  {self.mutant.id}  {self.by}", flush=True)


class Tree:
    """Holds a copy of the tracked files as they are in the working tree."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._warm: dict[Path, Warm] = {}
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    def nearest(self, mutant: Mutant) -> list[str]:
        """Returns the tests of ``mutant``, globs expanded. Raises Refused when one names nothing."""
        found = []
        for pattern in mutant.tests:
            path, *names = pattern.split("::")
            matches = sorted(self.folder.glob(path))
            if not matches:
                raise Refused(f"{mutant.id}: no test at {path}")
            found += ["::".join([str(match.relative_to(self.folder)), *names]) for match in matches]
        return found

    def mutated(self, mutant: Mutant) -> str:
        """Returns the text of the mutant's file with the fault in it. Raises Refused unless the old text is there once.

        Nor may the fault be one of syntax: every test fails at that, and nothing is shown.
        """
        path = self.folder / mutant.file
        text = path.read_text() if path.exists() else ""
        count = text.count(mutant.old)
        if count != 1 or mutant.old == mutant.new:
            raise Refused(f"{mutant.id}: its old text is {count} times in {mutant.file}")
        seeded = text.replace(mutant.old, mutant.new)
        try:
            compile(seeded, mutant.file, "exec")
        except SyntaxError as error:
            raise Refused(f"{mutant.id}: {mutant.file} would be no Python: {error}") from error
        return seeded

    def run(self, python: Path, tests: Iterable[str], seconds: float) -> tuple[int | None, str]:
        """Returns exit status (None: out of time) and output of pytest over ``tests``."""
        if python not in self._warm:
            self._warm[python] = Warm(python, self.folder)
        answer = self._warm[python].run(list(tests), seconds)
        shutil.rmtree(self.folder / ".hypothesis", ignore_errors=True)  # no example goes on to the next mutant
        return answer

    def close(self) -> None:
        for warm in self._warm.values():
            warm.close()

    def judge(self, mutant: Mutant, python: Path, seconds: float) -> Outcome:
        """Seeds the fault, runs its tests, takes the fault out again."""
        path, text = self.folder / mutant.file, self.mutated(mutant)
        original = path.read_text()
        started = time.perf_counter()
        path.write_text(text)
        try:
            code, output = self.run(python, self.nearest(mutant), seconds)
        finally:
            path.write_text(original)
        failed = FAILED.search(output)
        by = TIMED_OUT if code is None else failed[1] if failed else "" if code == 0 else f"exit status {code}"
        return Outcome(mutant, code != 0, time.perf_counter() - started, by)


def interpreters(mutants: list[Mutant]) -> dict[str, Path]:
    """Returns release -> the interpreter that has it, for the releases that have one."""
    releases = {mutant.release for mutant in mutants}
    here: dict[str, Path] = {}
    with contextlib.suppress(PackageNotFoundError):
        here = {version("sglang"): Path(sys.executable)}
    made = {release: ROOT / f".venv-{release}" / "bin" / "python" for release in sorted(releases)}
    found = here | {release: path for release, path in made.items() if path.exists()}
    return {release: path for release, path in found.items() if release in releases}


def require_green(tree: Tree, mutants: list[Mutant], pythons: dict[str, Path], *options: str) -> None:
    """Raises Refused unless nearest tests pass without a fault, or with --collect-only are there; a run a release."""
    for release, python in pythons.items():
        tests = dict.fromkeys(test for m in mutants if m.release == release for test in tree.nearest(m))
        started = time.perf_counter()
        code, output = tree.run(python, [*tests, *options], UNMUTATED_SECONDS)
        if code != 0:
            tail = "\n".join(output.splitlines()[-20:])
            raise Refused(f"{release}: the nearest tests are not green without a fault (exit status {code})\n{tail}")
        print(f"{release}: {output.splitlines()[-1]} without a fault, {time.perf_counter() - started:.0f} s")


def judge_all(trees: list[Tree], mutants: list[Mutant], pythons: dict[str, Path], seconds: float) -> list[Outcome]:
    """Returns the outcomes, in the order of the mutants; each tree holds one fault at a time."""
    idle: queue.SimpleQueue[Tree] = queue.SimpleQueue()
    for tree in trees:
        idle.put(tree)

    def one(mutant: Mutant) -> Outcome:
        python = pythons.get(mutant.release)
        if python is None:
            return Outcome(mutant, None, 0.0, f"no interpreter with sglang {mutant.release}")
        tree = idle.get()
        try:
            outcome = tree.judge(mutant, python, seconds)
        finally:
            idle.put(tree)
        outcome.say()
        return outcome

    with ThreadPoolExecutor(len(trees)) as workers:
        return list(workers.map(one, mutants))


def bounds_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns how many mutants there are, and the share that was killed."""
    killed = sum(row["killed"] is True for row in rows)
    judged = sum(row["killed"] is not None for row in rows)
    return [
        bound("mutants", f">= {FEWEST}", len(rows)),
        bound("killed share", f">= {LEAST_KILLED}", killed / max(judged, 1)),
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="ID", help="these mutants; writes no result without --again")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="mutants at a time, each in its own copy")
    parser.add_argument("--again", action="store_true", help="only those that were not killed in the last whole run")
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS", help="for the tests of one mutant")
    parser.add_argument("--check", action="store_true", help="only say which entries or tests are not there")
    return parser.parse_args()


def chosen(only: list[str] | None) -> list[Mutant]:
    """Returns the mutants asked for. Raises Refused for an unknown or a doubled id."""
    known = {mutant.id: mutant for mutant in MUTANTS}
    unknown = sorted(set(only or ()) - set(known))
    if unknown or len(known) != len(MUTANTS):
        raise Refused(f"no mutant {', '.join(unknown)}" if unknown else "two mutants have one id")
    return [mutant for mutant in MUTANTS if only is None or mutant.id in only]


def check(tree: Tree, mutants: list[Mutant]) -> None:
    """Raises Refused with every mutant that does not fit ``tree``."""
    problems = []
    for mutant in mutants:
        try:
            tree.mutated(mutant)
            tree.nearest(mutant)
        except Refused as error:
            problems.append(str(error))
    if problems:
        raise Refused("\n".join(problems))


def run(args: argparse.Namespace, mutants: list[Mutant]) -> list[Outcome]:
    """Returns the outcomes; none with --check, which runs no test. Raises Refused."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees = [Tree(Path(folder) / str(i)) for i in range(1 if args.check else args.jobs)]
        check(trees[0], mutants)
        pythons = interpreters(mutants)
        try:
            require_green(trees[0], mutants, pythons, *["--collect-only"] * args.check)
            return [] if args.check else judge_all(trees, mutants, pythons, args.timeout)
        finally:
            for tree in trees:
                tree.close()


def main() -> int:
    args = arguments()
    earlier = {row["id"]: row for row in json.loads(RESULT.read_text())["rows"]} if args.again else {}
    unkilled = [mutant.id for mutant in MUTANTS if not earlier.get(mutant.id, {}).get("killed")]
    try:
        mutants = chosen(args.only or (unkilled if args.again else None))
        outcomes = run(args, mutants)
    except Refused as error:
        print(error)
        return 2
    if args.check:
        print(f"{len(mutants)} mutants fit")
        return 0
    survived = [outcome for outcome in outcomes if not outcome.killed]
    print(f"{len(outcomes) - len(survived)} of {len(outcomes)} killed; not: {[o.mutant.id for o in survived]}")
    if args.only and not args.again:
        return int(bool(survived))
    found = {**earlier, **{outcome.mutant.id: outcome.row() for outcome in outcomes}}
    rows = [found[mutant.id] for mutant in MUTANTS if mutant.id in found]
    bounds = bounds_of(rows)
    write(RESULT.stem, rows, bounds, RESULT.parent)
    return status(bounds)


if __name__ == "__main__":
    sys.exit(main())
