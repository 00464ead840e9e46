#!/usr/bin/env python3
"""Seeds the faults of ``mutant_table`` one at a time and runs the tests nearest to each: do they go red?

    python3 -m tools.mutants [--only ID ...] [--jobs N] [--json FILE] [--again FILE] [--check]

Everything happens in a copy of the tracked files. The nearest tests must be green there before the first fault is
seeded. A mutant is killed when its tests fail or run out of time; one that survives is a gap in the suite.
A whole run writes docs/results/mutants.json. After a test was added, --again spares the others: only faults that FILE
does not have as killed (or --only ID) are judged, and the other rows are those of FILE. Exit status 1 when a bound is
missed.
"""

from __future__ import annotations

import argparse
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

from rich.console import Console
from rich.markup import escape
from rich.table import Table

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

console = Console()


class Refused(Exception):
    """Reports that the run would say nothing; the message says why."""


@dataclass(frozen=True)
class Outcome:
    """Holds the fate of one mutant. killed: None where no interpreter has its release. by: the first failing test."""

    mutant: Mutant
    killed: bool | None
    seconds: float
    by: str

    @property
    def word(self) -> str:
        """Returns the outcome as the table has it."""
        if self.killed is None:
            return "skipped"
        if self.by == TIMED_OUT:
            return TIMED_OUT
        return "killed" if self.killed else "SURVIVED"

    def row(self) -> dict[str, Any]:
        """Returns the outcome as the result has it."""
        return {
            "id": self.mutant.id,
            "file": self.mutant.file,
            "killed": self.killed,
            "seconds": round(self.seconds, 1),
            "by": self.by,
        }


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
        """Ends the processes started for the runs."""
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


def interpreters(mutants: list[Mutant], given: list[str]) -> dict[str, Path]:
    """Returns release -> the interpreter that has it, for the releases that have one."""
    named = dict(pair.split("=", 1) for pair in given)
    found = {}
    for release in sorted({mutant.release for mutant in mutants}):
        path = Path(named[release]).absolute() if release in named else ROOT / f".venv-{release}" / "bin" / "python"
        if path.exists():
            found[release] = path
        elif _running() == release:
            found[release] = Path(sys.executable)
    return found


def _running() -> str | None:
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def require_green(tree: Tree, mutants: list[Mutant], pythons: dict[str, Path], *options: str) -> None:
    """Raises Refused unless nearest tests pass without a fault, or with --collect-only are there; a run a release."""
    for release, python in pythons.items():
        tests = dict.fromkeys(test for m in mutants if m.release == release for test in tree.nearest(m))
        started = time.perf_counter()
        code, output = tree.run(python, [*tests, *options], UNMUTATED_SECONDS)
        if code != 0:
            tail = "\n".join(output.splitlines()[-20:])
            raise Refused(f"{release}: the nearest tests are not green without a fault (exit status {code})\n{tail}")
        console.print(f"{release}: {output.splitlines()[-1]} without a fault, {time.perf_counter() - started:.0f} s")


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
        console.print(f"{outcome.word:9} {outcome.seconds:5.1f} s  {mutant.id}", highlight=False)
        return outcome

    with ThreadPoolExecutor(len(trees)) as workers:
        return list(workers.map(one, mutants))


def show(outcomes: list[Outcome]) -> None:
    """Prints all outcomes as a table."""
    table = Table("mutant", "file", "outcome", "s", "by")
    for outcome in outcomes:
        mutant, style = outcome.mutant, "" if outcome.killed else "dim" if outcome.killed is None else "bold red"
        table.add_row(mutant.id, mutant.file, outcome.word, f"{outcome.seconds:.1f}", escape(outcome.by), style=style)
    console.print(table)


def bounds_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns how many mutants there are, and the share that was killed."""
    killed = sum(row["killed"] is True for row in rows)
    judged = sum(row["killed"] is not None for row in rows)
    return [
        bound("mutants", f">= {FEWEST}", len(rows)),
        bound("killed share", f">= {LEAST_KILLED}", killed / max(judged, 1)),
    ]


def arguments() -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", metavar="ID", help="these mutants; writes no result unless --json is given"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="mutants at a time, each in its own copy")
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"the result (default: {RESULT.relative_to(ROOT)})")
    parser.add_argument("--again", type=Path, metavar="FILE", help="a result whose killed mutants are not judged again")
    parser.add_argument("--python", action="append", default=[], metavar="LINE=FILE", help="interpreter of that engine")
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


def rows_of(result: Path) -> dict[str, dict[str, Any]]:
    """Returns the rows of an earlier result by the id of their mutant."""
    return {row["id"]: row for row in json.loads(result.read_text())["rows"]}


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


def main() -> int:
    """Judges the mutants; returns the exit status."""
    args = arguments()
    again = rows_of(args.again) if args.again else {}
    spared = {name for name, row in again.items() if row["killed"]}
    try:
        mutants = chosen(args.only or ([m.id for m in MUTANTS if m.id not in spared] if args.again else None))
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
            trees = [Tree(Path(folder) / str(i)) for i in range(1 if args.check else args.jobs)]
            check(trees[0], mutants)
            pythons = interpreters(mutants, args.python)
            try:
                if args.check:
                    require_green(trees[0], mutants, pythons, "--collect-only")
                    console.print(f"{len(mutants)} mutants fit")
                    return 0
                require_green(trees[0], mutants, pythons)
                outcomes = judge_all(trees, mutants, pythons, args.timeout)
            finally:
                for tree in trees:
                    tree.close()
    except Refused as error:
        console.print(str(error), markup=False, highlight=False)
        return 2
    show(outcomes)
    if args.only and args.json is None and not again:
        return int(not all(outcome.killed for outcome in outcomes))
    result = (args.json or RESULT).absolute()
    found = {**again, **{outcome.mutant.id: outcome.row() for outcome in outcomes}}
    rows = [found[mutant.id] for mutant in MUTANTS if mutant.id in found]
    bounds = bounds_of(rows)
    write(result.stem, rows, bounds, result.parent)
    return status(bounds)


if __name__ == "__main__":
    sys.exit(main())
