"""Check what a server with this package needs, on this machine and in this environment, and say what it covers."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import textwrap
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sglang_dsv4 import __version__
from sglang_dsv4.cli import doctor_installation as installation
from sglang_dsv4.cli import doctor_machine as machine
from sglang_dsv4.cli.doctor_installation import FAIL, OK, REQUIREMENTS, WARN, Check, Checks
from sglang_dsv4.cli.serve import MODELS_VARIABLE
from sglang_dsv4.engine.hooks import is_wanted
from sglang_dsv4.engine.releases import TESTED, is_supported
from sglang_dsv4.errors import HostCopyError

COLOURS = {OK: "green", WARN: "yellow", FAIL: "red"}
MOST_RANKS = 1024
ENGINE_SAID = "see what the engine said, above"
OFF = "DSV4_ENABLED=0, which is read before any other setting; or pip uninstall sglang-dsv4"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``sglang-dsv4 doctor``."""
    help_ = "ranks of a server on this machine, as its --tp (times --pp and --dp); default: one for each GPU"
    parser.add_argument("--tp", type=_ranks, metavar="N", help=help_)
    help_ = "groups of those ranks with a cache of their own (data-parallel attention, --pp, --dp); default: 1"
    parser.add_argument("--groups", type=_ranks, metavar="N", default=1, help=help_)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def _ranks(text: str) -> int:
    if not 1 <= (ranks := int(text)) <= MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{text[:40]}: needed: 1 to {MOST_RANKS}")
    return ranks


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; 1 when any check fails."""
    said = io.StringIO()  # what the engine says when it is imported, of use only where it cannot be
    checks: list[Check] = []
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            checks = examine(arguments.tp, arguments.groups)
    finally:
        if not checks or any(check.todo.endswith(ENGINE_SAID) for check in checks):
            sys.stderr.write(said.getvalue())
    failed = any(check.status == FAIL for check in checks)
    if arguments.json:
        found = {
            "version": __version__,
            "ok": not failed,
            "checks": [asdict(c) for c in checks],
            "covers": covers(),
            "off": OFF,
        }
        print(json.dumps(found))
    else:
        _print(checks)
    return int(failed)


def parts(ranks: int | None, groups: int) -> dict[str, Callable[[], Checks]]:
    """What is checked, in order. ranks: of a server on this machine; None: one for each GPU. groups: that share."""
    ranks = ranks or max(1, machine.gpus())
    arenas = min(ranks, groups) if installation.settings_or_defaults().share == "auto" else ranks
    return {
        "python": installation.python,
        "torch": installation.torch,
        "triton": installation.triton,
        "sglang": installation.sglang,
        "entry point": installation.entry_point,
        "settings": installation.settings,
        "hooks": installation.hooks,
        "cache layout": installation.layout,
        "early send": installation.early_send,
        MODELS_VARIABLE: installation.models,
        "host memory": partial(machine.host_memory, arenas),
        "locked memory (ulimit -l)": partial(machine.locked_memory, arenas),
        "GPU": machine.gpu,
        "prometheus_client": installation.prometheus,
    }


def examine(ranks: int | None, groups: int) -> list[Check]:
    """Every finding, in order. The hooks are installed into this process."""
    checks: list[Check] = []
    for name, part in parts(ranks, groups).items():
        try:
            for check in part():
                checks.append(check)  # one by one: what was found before an error stays
        except ImportError as error:
            todo = f"{REQUIREMENTS} and what it requires; {ENGINE_SAID}"
            checks.append(Check(name, FAIL, f"cannot be checked: {error}", todo))
        except (HostCopyError, AttributeError, RuntimeError, OSError) as error:
            checks.append(Check(name, FAIL, f"{type(error).__name__}: {error}", ENGINE_SAID))
    return checks


def covers() -> dict[str, str]:
    """What becomes of a retracted request's cache on the installed release, by the way that it is served."""
    try:
        supported = is_supported(version("sglang"))
    except PackageNotFoundError:
        supported = False
    if not supported:
        return {"any server": f"this release is not covered: {REQUIREMENTS}"}
    return {
        "a decode server": "kept in host memory, V4.1's too, also with up to 8 draft tokens and with parallel ranks",
        "its drafts": "their window and state too; where the draft's layout is not covered, a warning and without them",
        "a plain server": _plain_server(),
        "a HiSparse server": "rows kept on the host, the rest copied; no drafts; plain: no mixed chunks, priorities",
        "DSV4_LAYOUT=page-major": _page_major(),
        "more draft tokens": "not covered: the server starts, warns once; computed again",
    }


def _page_major() -> str:
    if version("sglang") not in TESTED:
        return f"the server refuses to start (tested releases: {', '.join(TESTED)})"
    return "as above, the same bytes; not with V4.1, pipelines, HiSparse, context parallelism or a hierarchical cache"


def _plain_server() -> str:
    if not is_wanted(installation.settings_or_defaults().plain, version("sglang")):
        return "computed again, as without this package (not a tested release, or DSV4_PLAIN=off)"
    return "kept in host memory; not with pipelines, context parallelism, a hierarchical cache or SWA bounded replay"


def shortened(checks: list[Check]) -> list[Check]:
    """``checks`` with one line for all hooks that landed; --json has each."""
    fine = [check for check in checks if check.name.startswith("hook ") and check.status == OK]
    hooks = [check for check in checks if check.name.startswith("hook ")]
    if not fine:
        return checks
    found = []
    for check in checks:
        if check is hooks[0]:
            found.append(Check("hooks", OK, f"{len(fine)} of {len(hooks)} landed"))
        if check not in fine:
            found.append(check)
    return found


def _print(checks: list[Check]) -> None:
    checks = shortened(checks)
    try:
        from rich.console import Console  # noqa: PLC0415
        from rich.table import Table  # noqa: PLC0415
    except ImportError:
        print(_plain(checks))
    else:
        _print_table(checks, Console(), Table(title=f"sglang-dsv4 {__version__}"))
    for check in checks:
        if check.breaks:
            print(f"does not work here: {check.breaks} ({check.name})")
    print("the cache of a retracted request:")
    for served, becomes in covers().items():
        print(f"  {served}: {becomes}")
    print(f"to turn it off: {OFF}")


def _print_table(checks: list[Check], console: Any, table: Any) -> None:
    from rich.text import Text  # noqa: PLC0415

    for column in ("check", "", "found -> what to do"):
        table.add_column(column, overflow="fold")
    for check in checks:
        found = f"{check.found}\n-> {check.todo}" if check.todo else check.found
        table.add_row(Text(check.name), Text(check.status, COLOURS[check.status]), Text(found))
    console.print(table)


def _plain(checks: list[Check]) -> str:
    lines = []
    for check in checks:
        lines.append(f"{check.status:4}  {check.name}: {check.found}")
        if check.todo:
            lines.append(textwrap.indent(check.todo, "      -> "))
    return "\n".join(lines)
