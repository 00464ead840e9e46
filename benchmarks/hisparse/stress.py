#!/usr/bin/env python3
"""Hundreds of forced retracts on a live HiSparse server: nothing lost, every kept row and every loaded byte compared.

    python3 -m benchmarks.hisparse.stress --model-path MODEL [--requests 500 --at-least 843 ...] [-- server arguments]

This is ``sglang-dsv4 stress`` on a decode server with the fake transfer and HiSparse, with prompts longer than the hot
rows, so that each step reads rows from the host. With DSV4_VERIFY=1 the host pages of a request are summed at its
retract and again at its resume, before they are used, and a difference ends the server. Its options are those of
stress; what is given wins.
"""

from __future__ import annotations

import sys

from benchmarks.hisparse.gate import server_arguments
from sglang_dsv4.cli import stress

HOT, RATIO = 512, 2  # rows of a request on the device; host rows by device rows: hot rows for sixteen requests
WORDS = (  # noqa: SIM905
    "--requests 500 --at-least 843 --interval 5 --prompt 2000 8000 --new-tokens 40 160 --concurrency 14 --timeout 120 "
    "--patience 200 --name hisparse-stress"
).split()


def words(argv: list[str]) -> list[str]:
    """The command line of stress: the usual words, those given, and for the server the same."""
    end = argv.index("--") if "--" in argv else len(argv)
    return [*WORDS, *argv[:end], "--", *server_arguments(HOT, RATIO), *argv[end + 1 :]]


if __name__ == "__main__":
    sys.exit(stress.main(words(sys.argv[1:])))
