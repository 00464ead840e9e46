#!/usr/bin/env python3
"""Judges the public ways to serve these models: does a retracted request come back from a copy, and if not, why?

    python3 -m tools.recipes [--table] [--out FOLDER]

The recipes are in public_recipes/, with their arguments:

    group, source   where they are: a repository and a path in it, with the commit that was read, or a page
    number          recipes behind a row; 0: an option that the source describes, or the other half of a recipe
    among           true: they are counted in the row above
    commands        each distinct set of arguments, as the source has it
    short           true: the arguments are those that matter here; the rest of the file is left out
    gpu             which the engine is told that it has
    settings        the verdict, with renamed flags renamed: "covered", or part of the reason against it
    refused         the flag that the parser of SGLang 0.5.23 does not take as it is written

Models, sizes and paths differ among the recipes of a row. The judge is that of `sglang-dsv4 doctor -- COMMAND`, which
asks the functions that refuse in a server. Exit status 1 where a verdict is not the one expected.
"""

import os
import shlex
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from sglang_dsv4.bench.results import add_out, bound, finish, parser
from sglang_dsv4.testing.standalone import boot

FOLDER = Path(__file__).with_name("public_recipes")
RENAMED = {"--cuda-graph-max-bs": "--cuda-graph-max-bs-decode"}
GONE = ("--prefill-round-robin-balance",)  # switches
COVERED, NO_MODEL = "covered", "no such model"
REFUSED = "refused: "  # by the engine; such a verdict begins with it
SAID = {COVERED: "from its copy"}


class Recipe(NamedTuple):
    """Describes one row of a group."""

    name: str
    gpu: str
    settings: str
    commands: list[str]
    source: str
    number: int = 0
    among: bool = False
    short: bool = False
    refused: str = ""


def read_groups() -> dict[str, list[Recipe]]:
    """Returns the rows of each group, in the order of the page."""
    found: dict[str, list[Recipe]] = {}
    for path in sorted(FOLDER.glob("*.toml")):
        for group in tomllib.loads(path.read_text())["group"]:
            found[group["name"]] = [Recipe(**{"source": group["source"], **row}) for row in group["row"]]
    return found


GROUPS = read_groups()
RECIPES = [recipe for rows in GROUPS.values() for recipe in rows]


def parsers_refusal(command: str) -> str:
    """Returns what the engine's parser says against a command as it is written; empty where it takes it."""
    from sglang_dsv4.cli.launch_args import parse  # noqa: PLC0415 - it needs the engine
    from sglang_dsv4.cli.launch_command import LaunchError, read_command  # noqa: PLC0415

    boot()
    try:
        parse(read_command(shlex.split(command)).arguments)
    except LaunchError as error:
        return str(error)
    return ""


def verdict(recipe: Recipe, command: str) -> str:
    """Returns COVERED, or the reason why the engine alone treats retracted requests; of the settings of a command."""
    from sglang_dsv4.cli import doctor_server  # noqa: PLC0415 - it needs the engine
    from sglang_dsv4.cli.launch_command import LaunchError, read_command  # noqa: PLC0415
    from sglang_dsv4.settings import Settings  # noqa: PLC0415

    if recipe.settings == NO_MODEL:  # which only a later release could judge
        return NO_MODEL
    boot()
    words = [RENAMED.get(word, word) for word in shlex.split(command) if word not in GONE]
    variables, arguments = read_command(words)
    with mock.patch.dict(os.environ, variables):
        try:
            server = doctor_server.read(arguments, None, Settings(), recipe.gpu)
        except LaunchError as error:
            return f"{REFUSED}{error}"
    return server.refuses or server.stock or COVERED


def is_expected(recipe: Recipe, found: str) -> bool:
    """Returns whether a verdict is the one of the row."""
    wanted, refuses = recipe.settings.removeprefix(REFUSED), recipe.settings.startswith(REFUSED)
    return found == wanted if wanted in SAID else wanted in found and refuses == found.startswith(REFUSED)


class Counts(NamedTuple):
    """Counts recipes: all, covered by their settings, and taken as written by the parser."""

    recipes: int
    covered: int
    as_written: int


def count(recipes: Sequence[Recipe]) -> Counts:
    """Counts the recipes of these rows."""
    covered = sum(recipe.number for recipe in recipes if recipe.settings == COVERED)
    as_written = sum(recipe.number for recipe in recipes if not recipe.refused)
    return Counts(sum(recipe.number for recipe in recipes), covered, as_written)


def table() -> Iterator[str]:
    """Yields the lines of the table in docs/supported.md."""
    yield "| recipes | number | with these settings a retracted request comes back | its text is taken by 0.5.23 |"
    yield "|---|---|---|---|"
    for name, rows in GROUPS.items():
        counts = count(rows)
        yield f"| **{name}** | **{counts.recipes}** | {counts.covered} from copies | {counts.as_written} |"
        for place, recipe in enumerate(rows):
            above = next((row.number for row in reversed(rows[:place]) if not row.among), 0)
            number = f"of the {above}" if recipe.among else recipe.number or "–"  # noqa: RUF001
            said = f"no: `{recipe.refused}`" if recipe.refused else "yes"
            yield f"| {recipe.name}{' *' if recipe.short else ''} | {number} | {_said(recipe.settings)} | {said} |"


def _said(settings: str) -> str:
    if settings.startswith(REFUSED):
        return f"SGLang refuses: {settings.removeprefix(REFUSED)}"
    return SAID.get(settings) or (f"{NO_MODEL} in 0.5.23" if settings == NO_MODEL else f"as stock: {settings}")


def row(recipe: Recipe, command: str) -> dict[str, Any]:
    """Returns the result of one command."""
    found, parsed = verdict(recipe, command), parsers_refusal(command)
    expected = is_expected(recipe, found) and (recipe.refused in parsed if recipe.refused else not parsed)
    return {
        "recipes": recipe.name, "number": recipe.number, "gpu": recipe.gpu, "verdict": found, "parser": parsed,
        "as_expected": expected,
    }  # fmt: skip


def main(words: Sequence[str] | None = None) -> int:
    """Prints a line a command and writes the result; returns the exit status."""
    own = parser(__doc__, "recipes")
    own.add_argument("--table", action="store_true", help="print the table of docs/supported.md instead")
    add_out(own)
    arguments = own.parse_args(words)
    if arguments.table:
        print("\n".join(table()))
        return 0
    rows = []
    for recipe in RECIPES:
        rows += [row(recipe, command) for command in recipe.commands]
        print(f"{recipe.number:3d} {recipe.name}: {rows[-1]['verdict']}; {rows[-1]['parser'] or 'taken'}", flush=True)
    wrong = sum(not one["as_expected"] for one in rows)
    bounds = [
        bound("verdicts that are not as expected", "<= 0", wrong),
        bound("recipes covered", ">= 230", count(RECIPES).covered),
    ]
    return finish(arguments, rows, bounds)


if __name__ == "__main__":
    sys.exit(main())
