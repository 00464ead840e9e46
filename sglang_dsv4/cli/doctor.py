"""Checks the needs of a server with this package on this machine, and says which servers it covers."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from sglang_dsv4 import __version__
from sglang_dsv4.cli import doctor_installation as installation
from sglang_dsv4.cli import doctor_machine as machine
from sglang_dsv4.cli import doctor_server
from sglang_dsv4.cli.doctor_installation import (
    ENGINE_SAID,
    FAIL,
    HOST_COPIES,
    NO_SERVER,
    OK,
    REFUSES,
    REQUIREMENTS,
    WARN,
    Check,
    Checks,
)  # fmt: skip
from sglang_dsv4.cli.doctor_server import Server
from sglang_dsv4.cli.launch_command import Command, LaunchError, read_command
from sglang_dsv4.cli.launch_gpu import GPUS
from sglang_dsv4.cli.serve import MODELS_VARIABLE
from sglang_dsv4.command_line import Parser, gpus, number
from sglang_dsv4.errors import HostCopyError
from sglang_dsv4.hostmem.fences import why_unordered

MOST_RANKS = 1024
NOT_INSTALLED = "is not installed for"
UNNAMED = "What one server will do: name its arguments, or its command, behind --."
UNTOLD = "What this server will do cannot be told"
OFF = "DSV4_ENABLED=0, which is read before any other setting; or pip uninstall sglang-dsv4"
BEHIND = "the arguments of a server, or its command, go behind --"


def main(argv: Sequence[str]) -> int:
    """Prints the findings; 1 when any check fails. What is behind ``--`` is a server's."""
    own, words = list(argv), []
    if "--" in own:
        own, words = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = Parser(
        "sglang-dsv4 doctor", description=__doc__, usage="%(prog)s [options] [-- SERVER ARGUMENTS]",
        epilog=f"{BEHIND[0].upper()}{BEHIND[1:]}; the doctor ends with what that server will do.",
    )  # fmt: skip
    add_arguments(parser)
    arguments, unknown = parser.parse_known_args(own)
    if unknown:
        parser.error(f"no options of the doctor: {' '.join(unknown)}; {BEHIND}")
    ranks = arguments.tp or max(1, gpus())
    if not words and ranks % arguments.groups:
        parser.error(f"--groups {arguments.groups}: it must divide the number of ranks, {ranks} (--tp)")
    try:
        command = read_command(words)
    except LaunchError as error:
        parser.error(str(error))
    return run(arguments, command)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the doctor's own options."""
    count = number(int, 1, MOST_RANKS)
    help_ = "ranks of a server on this machine, as its --tp-size (times --pp-size and --dp-size); default: one a GPU"
    parser.add_argument("--tp", type=count, metavar="N", help=help_)
    help_ = (
        "groups of those ranks with a cache of their own (data-parallel attention, --pp-size, --dp-size); default: 1"
    )
    parser.add_argument("--groups", type=count, metavar="N", default=1, help=help_)
    help_ = "judge the server for this GPU; default: this machine's"
    parser.add_argument("--gpu", choices=GPUS, help=help_)
    help_ = "check the store of DSV4_STORE, too: two processes put and get a few dozen MB"
    parser.add_argument("--store", action="store_true", help=help_)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace, command: Command) -> int:
    """Prints the findings; 1 when any check fails."""
    said = io.StringIO()  # what the engine says when it is imported, of use only where it cannot be
    exam = Examination(arguments.tp, arguments.groups, command.arguments, arguments.gpu, arguments.store)
    environ = dict(os.environ)
    os.environ.update({"HF_HUB_OFFLINE": "1", **command.variables})  # the checks ask the environment; none downloads
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            exam.examine()
        outlook = exam.outlook()
    finally:
        os.environ.clear()
        os.environ.update(environ)
        if not exam.checks or any(check.todo.endswith(ENGINE_SAID) for check in exam.checks):
            sys.stderr.write(said.getvalue())
    failed = any(check.status == FAIL for check in exam.checks)
    if arguments.json:
        found = {
            "version": __version__,
            "ok": not failed,
            "checks": [asdict(c) for c in exam.checks],
            "server": outlook,
            "off": OFF,
        }
        print(json.dumps(found))
    else:
        _print(exam.checks, outlook)
    return int(failed)


class Examination:
    """Holds every finding, in order, and their consequences.

    ranks: of a server on this machine; None: one for each GPU. groups: of them, that share. words: the arguments of one
    server, which then say both. gpu: that it is judged for; None: this machine's. with_store: its store is tried.
    """

    def __init__(
        self, ranks: int | None, groups: int, words: Sequence[str] = (), gpu: str | None = None,
        with_store: bool = False,
    ) -> None:  # fmt: skip
        self.tp, self.groups, self.words, self.gpu, self.with_store = ranks, groups, words, gpu, with_store
        self.checks: list[Check] = []
        self.server: Server | None = None
        self.refused = ""  # by the engine: the server's arguments

    @property
    def ranks(self) -> int:
        """Returns the ranks of a server on this machine."""
        return self.server.ranks if self.server else self.tp or max(1, gpus())

    @property
    def arenas(self) -> int:
        """Returns the groups of ranks of a server on this machine."""
        if self.server:
            return self.server.arenas
        shared = installation.settings_or_defaults().share == "auto" and why_unordered() is None
        return min(self.ranks, self.groups) if shared else self.ranks

    def launch(self) -> Checks:
        """Checks the launch arguments."""
        if self.words:
            from sglang_dsv4.testing.standalone import boot  # noqa: PLC0415 - it needs torch

            boot()
            try:
                settings = installation.settings_or_defaults()
                self.server = doctor_server.read(self.words, self.tp, settings, self.gpu)
            except LaunchError as error:
                self.refused = str(error)
                yield Check("server arguments", FAIL, self.refused, error.todo, "that server")
                return
            status, todo = (FAIL, "change the setting") if self.server.refuses else (OK, "")
            breaks = REFUSES if self.server.refuses else ""
            yield Check("server arguments", status, self.server.refuses or "read", todo, breaks)

    def early_send(self) -> Checks:
        """Checks what a prefill server may send too early; any one where no server is named."""
        asked = self.server.sends_by_nixl if self.server else not self.words
        if asked:
            yield from installation.early_send()

    def host_memory(self) -> Checks:
        """Checks the memory that the server would reserve; one that is as stock reserves nothing.

        Judged for another machine's GPU, a server may have more RAM there.
        """
        if self.server is None or not self.server.stock:
            for check in machine.host_memory(self.arenas, self.ranks):
                elsewhere = check.status == FAIL and self.gpu is not None
                yield replace(check, status=WARN, breaks="") if elsewhere else check

    def store(self) -> Checks:
        """Checks the store, where that was asked for: it writes to it."""
        if self.with_store:
            from sglang_dsv4.cli import doctor_store  # noqa: PLC0415 - it needs torch

            yield from doctor_store.store()

    def _broken(self, what: str) -> str:
        """Returns why ``what`` does not work here; empty where it does."""
        return next((check.found for check in self.checks if check.breaks.startswith(what)), "")

    def outlook(self) -> str:
        """Returns the prospects of the one server, or of any one where none could be read."""
        refuses, stock = self._broken(NO_SERVER), self._broken(HOST_COPIES)
        if self.server is not None:
            server = replace(self.server, refuses=self.server.refuses or refuses, stock=self.server.stock or stock)
            host_gb = installation.settings_or_defaults().host_gb
            return doctor_server.paragraph(server, host_gb, machine.each(self.arenas))
        if refuses:
            return f"A DeepSeek-V4 server will refuse to start: {refuses}"
        if stock:
            return f"Any server will behave as stock: {stock}"
        if self.refused:
            return f"This server will not start: {self.refused}"
        missing = [check.found for check in self.checks if check.status == FAIL and NOT_INSTALLED in check.found]
        if missing:
            return f"None starts here: {missing[0]}"
        return f"{UNTOLD}: {self._broken_part('server arguments')}" if self.words else UNNAMED

    def _broken_part(self, name: str) -> str:
        return next(check.found for check in self.checks if check.name == name)

    def examine(self) -> list[Check]:
        """Makes every check. The hooks are installed into this process."""
        for name, part in parts(self).items():
            try:
                for check in part():
                    self.checks.append(check)  # one by one: what was found before an error stays
            except ImportError as error:
                self.checks.append(_missing(name, error))
            except (HostCopyError, AttributeError, RuntimeError, OSError) as error:
                self.checks.append(Check(name, FAIL, f"{type(error).__name__}: {error}", ENGINE_SAID))
        return self.checks


def _missing(name: str, error: ImportError) -> Check:
    """Returns the finding for a part whose module is missing, always in the same words."""
    module = error.name if isinstance(error, ModuleNotFoundError) else None
    if module is None:
        return Check(name, FAIL, f"cannot be checked: {error}", f"{REQUIREMENTS} and what it requires; {ENGINE_SAID}")
    found = f"{module.partition('.')[0]} {NOT_INSTALLED} {sys.executable}"
    todo = f"use the Python environment that your server runs in, or {REQUIREMENTS} and what it requires into this one"
    return Check(name, FAIL, found, todo)


def parts(exam: Examination) -> dict[str, Callable[[], Checks]]:
    """Returns the parts to check, in order."""
    return {
        "python": installation.python,
        "torch": installation.torch,
        "triton": installation.triton,
        "sglang": installation.sglang,
        "entry point": installation.entry_point,
        "settings": installation.settings,
        "hooks": installation.hooks,
        MODELS_VARIABLE: installation.models,
        "server arguments": exam.launch,
        "early send": exam.early_send,
        "host memory": exam.host_memory,
        "locked memory (ulimit -l)": lambda: machine.locked_memory(exam.arenas),
        "GPU": machine.gpu,
        "store": exam.store,
        "prometheus_client": installation.prometheus,
    }


def grouped(checks: list[Check]) -> list[Check]:
    """Returns ``checks`` with one failure for one cause, ahead of the others."""
    by_cause: dict[str, list[Check]] = {}
    for check in checks:
        if check.status == FAIL:
            by_cause.setdefault(check.found, []).append(check)
    failures = []
    for same in by_cause.values():
        names = ", ".join(check.name for check in same)
        breaks = next((check.breaks for check in same if check.breaks), "")
        failures.append(replace(same[0], name=names, breaks=breaks))
    return failures + [check for check in checks if check.status != FAIL]


def _print(checks: list[Check], outlook: str) -> None:
    checks = grouped(checks)
    for check in checks:
        print(f"{check.status:4}  {check.name}: {check.found}")
        if check.todo:
            print(textwrap.indent(check.todo, "      -> "))
    for check in checks:
        if check.breaks:
            print(f"does not work here: {check.breaks} ({check.name})")
    print(f"to turn it off: {OFF}")
    print(outlook)
