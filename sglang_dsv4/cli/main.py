"""``sglang-dsv4``: demo."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sglang_dsv4 import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="sglang-dsv4", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    from sglang_dsv4.cli import demo  # noqa: PLC0415  # imports torch; --version and --help should not

    demo.add_arguments(commands.add_parser("demo", help=demo.__doc__))
    arguments = parser.parse_args(argv)
    return int(arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())
