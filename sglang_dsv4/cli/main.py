"""Runs a subcommand: serve, doctor, plan, demo, bench, stress, drill."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Sequence

from sglang_dsv4 import __version__
from sglang_dsv4.command_line import Parser, to_its_end

COMMANDS = {
    "serve": "start an SGLang server with this package in it",
    "doctor": "check what such a server needs, on this machine",
    "plan": "what a model's cache costs, and its copies in host memory, from its config",
    "demo": "retract and resume requests of real pools, comparing every byte",
    "bench": "measure transfers and decode metadata on this machine, against its limits",
    "stress": "force retracts on live servers: nothing lost, every load exact, tokens as likely as without",
    "drill": "provoke five faults, and show what a user sees of each",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    return to_its_end(" ".join(["sglang-dsv4", *argv[:1]]), functools.partial(_main, argv))


def _main(argv: Sequence[str]) -> int:
    parser = Parser(
        "sglang-dsv4", description=__doc__, epilog="\n".join(f"  {name:8} {what}" for name, what in COMMANDS.items())
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("command", choices=COMMANDS, help="each has its own --help")
    return _run(parser.parse_args(argv[:1]).command, argv[1:])


def _run(name: str, argv: Sequence[str]) -> int:
    command = importlib.import_module(f"sglang_dsv4.cli.{name}")  # here: the demo's imports torch
    if name in {"serve", "doctor", "bench", "stress"}:
        return int(command.main(argv))  # they parse for themselves: what is behind -- is for another program
    parser = Parser(f"sglang-dsv4 {name}", description=command.__doc__)
    command.add_arguments(parser)
    arguments = parser.parse_args(argv)
    return int(arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())
