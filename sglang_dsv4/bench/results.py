"""Writes the result of a run to a file, with its machine and its command."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import sys
import textwrap
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from sglang_dsv4 import __version__
from sglang_dsv4.command_line import Parser, file_name, folder

DEFAULT_FOLDER = Path("bench-results")
WIDTH = 120  # of printed rows


def parser(about: str | None, name: str, prog: str | None = None) -> Parser:
    """Returns the command line parser of a run that writes a result, called ``name`` unless --name says otherwise; see
    ``add_out``.
    """
    made = Parser(prog, description=about)
    made.add_argument("--name", type=file_name, default=name, help=f"of the result ({name})")
    return made


def add_out(parser: ArgumentParser) -> None:
    """Adds the folder of the results; one that cannot be written to is refused."""
    help_ = f"folder of the results ({DEFAULT_FOLDER})"
    parser.add_argument("--out", type=folder, default=str(DEFAULT_FOLDER), help=help_)


def machine() -> dict[str, Any]:
    """Returns GPU, processor and memory of this machine."""
    import torch  # noqa: PLC0415 - takes seconds, and a script may stop before it has a result

    count = torch.cuda.device_count()
    name = torch.cuda.get_device_name() if count else None
    return {
        "gpu": f"{count} x {name}" if count > 1 else name,
        "cpu": f"{os.cpu_count()} x {platform.processor() or platform.machine()}",
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }


def versions() -> dict[str, str]:
    """Returns the versions of the software measured with."""
    import torch  # noqa: PLC0415 - as above

    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "sglang"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found | {"sglang-dsv4": __version__}  # of the code that runs: what is installed may be older than a checkout


def bound(name: str, limit: str, value: float) -> dict[str, Any]:
    """Judges one figure by its bound, for example ">= 0.90" or "<= 150"."""
    sign, number = limit.split()
    ok = value >= float(number) if sign == ">=" else value <= float(number)
    return {"name": name, "bound": limit, "value": round(value, 4), "ok": bool(ok)}


def _command() -> str:
    """Returns the command line that a reader can repeat, with this package's settings, without where its files lie."""
    program = Path(sys.argv[0]).resolve()
    given = [part for word in sys.argv[1:] for part in (word.split("=", 1) if word.startswith("--") else (word,))]
    for option in ("--out", "--logs"):
        while option in given:
            del given[given.index(option) : given.index(option) + 2]
    if program.parent == Path(__file__).parent:  # --device is an option of `bench` itself; others are for the benchmark
        at = given.index("--device") if "--device" in given else len(given)
        own, given = given[at : at + 2], given[:at] + given[at + 2 :]
        words = ["sglang-dsv4", "bench", program.stem, *own, *(["--", *given] if given else [])]
    elif program.name in {"sglang-dsv4", "main.py"}:
        words = ["sglang-dsv4", *given]
    else:
        words = ["python3", *_in_checkout(program), *given]
    words = [Path(word).name if Path(word).is_absolute() else word for word in words]
    settings = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("DSV4_")]
    return shlex.join([*settings, *words])


def _in_checkout(program: Path) -> list[str]:
    """Returns a script by its place in this checkout, a module of a room by its name; elsewhere the file's name."""
    checkout = Path(__file__).parents[2]
    if not program.is_relative_to(checkout):
        return [program.name]
    place = program.relative_to(checkout)
    return [str(place)] if place.parts[0] == "scripts" else ["-m", ".".join(place.with_suffix("").parts)]


def write(name: str, rows: list[dict[str, Any]], bounds: list[dict[str, Any]], folder: Path) -> Path:
    """Writes ``name``.json; returns its path. Prints each bound, and all as the run's last line, as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    result = {
        "bench": name,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": _command(),
        "machine": machine(),
        "versions": versions(),
        "rows": rows,
        "bounds": bounds,
    }
    path = folder / f"{name}.json"
    path.write_text(text_of(result))
    for entry in bounds:
        print(f"{'ok  ' if entry['ok'] else 'MISS'} {entry['name']}: {entry['value']} ({entry['bound']})")
    print(json.dumps({"bench": name, "bounds": bounds}), flush=True)
    return path


def text_of(result: dict[str, Any]) -> str:
    """Returns ``result`` as JSON, one row and one bound a line: readable, and fit for a diff."""
    parts = []
    for name, value in result.items():
        if isinstance(value, list) and value:
            lines = ",\n".join(f"  {json.dumps(entry)}" for entry in value)
            parts.append(f" {json.dumps(name)}: [\n{lines}\n ]")
        else:
            parts.append(f" {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def show(rows: list[dict[str, Any]]) -> None:
    """Prints the figures of each row by their names, floats short."""
    for row in rows:
        text = "  ".join(_figures(row))
        print(textwrap.fill(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False), flush=True)


def _figures(found: dict[str, Any], within: str = "") -> Iterator[str]:
    """Yields name=figure; what is nested has the names of what holds it in front."""
    for name, value in found.items():
        if isinstance(value, dict) and value:
            yield from _figures(value, f"{within}{name}.")
        else:
            figure = f"{round(value, 4):g}" if isinstance(value, float) else value
            yield f"{within}{name}={figure if figure not in ({}, [], None) else 'none'}"


def status(bounds: list[dict[str, Any]]) -> int:
    """Returns the exit status of a run: 1 when a bound is missed."""
    return int(not all(entry["ok"] for entry in bounds))


def finish(arguments: Namespace, rows: list[dict[str, Any]], bounds: list[dict[str, Any]]) -> int:
    """Writes the result where the command line of ``parser`` wants it; the exit status."""
    write(arguments.name, rows, bounds, arguments.out)
    return status(bounds)


def headline(result: dict[str, Any]) -> str:
    """Returns machine, date, versions and command of a result, in one line of Markdown."""
    numbers = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    return f"{result['machine']['gpu']}, {result['date']}, {numbers}. `{result['command']}`"
