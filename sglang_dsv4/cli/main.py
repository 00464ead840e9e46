"""``sglang-dsv4``: serve, doctor, plan, demo, bench, stress, drill."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Sequence

from sglang_dsv4 import __version__

COMMANDS = {
    "serve": "start an SGLang server with this package in it",
    "doctor": "check what such a server needs, on this machine",
    "plan": "what a model's cache costs on the GPU and in host memory, from its config",
    "demo": "retract and resume requests of real pools, comparing every byte",
    "bench": "measure transfers and decode metadata on this machine, against its limits",
    "stress": "force retracts on live servers: nothing lost, every load exact, tokens as likely as without",
    "drill": "provoke what goes wrong, and see what happens",
}
# What writing to standard output may end with, and the exit status: a reader such as `head` left, or a disk is full.
UNWRITABLE = {errno.EPIPE: 128 + 13, errno.ENOSPC: 1}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(
        prog="sglang-dsv4", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"  {name:8} {what}" for name, what in COMMANDS.items()),
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("command", choices=COMMANDS, help="each has its own --help")
    try:
        name = parser.parse_args(argv[:1]).command
        status = _run(name, argv[1:])
        sys.stdout.flush()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "sglang_dsv4":
            raise
        print(f"sglang-dsv4 {name}: {missing_module(error.name)}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
        if error.errno != errno.EPIPE:
            print(f"sglang-dsv4: standard output: {error.strerror}", file=sys.stderr)
        return UNWRITABLE[error.errno]
    return status


def missing_module(name: str) -> str:
    """What to do where the module ``name`` is not installed."""
    return (
        f"{name} is not installed for {sys.executable}: use the Python environment that your server runs in; "
        "`sglang-dsv4 doctor` says what one needs"
    )


def _run(name: str, argv: Sequence[str]) -> int:
    command = importlib.import_module(f"sglang_dsv4.cli.{name}")  # here: the demo's imports torch
    if name in {"serve", "bench", "stress", "drill"}:
        return int(command.main(argv))  # they parse for themselves: what is behind -- is for another program
    parser = argparse.ArgumentParser(prog=f"sglang-dsv4 {name}", description=command.__doc__)
    command.add_arguments(parser)
    arguments = parser.parse_args(argv)
    return int(arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())
