#!/usr/bin/env python3
"""Forces hundreds of retracts on a live HiSparse server, and compares every kept row and every loaded byte.

    python3 -m benchmarks.hisparse_stress --model-path MODEL [--requests 500 --at-least 843 ...] [-- server arguments]
    python3 -m benchmarks.hisparse_stress --model-path MODEL --plain

This is ``sglang-dsv4 stress`` on a decode server with the fake transfer and HiSparse, with prompts longer than the hot
rows, so that each step reads rows from the host. With DSV4_VERIFY=1 the host pages of a request are summed at its
retract and again at its resume, before they are used, and a difference ends the server. Its options are those of
stress; given ones win. A minute and a half after its start (--most-seconds) nothing more is sent: with a start of
70 s it takes less than three minutes.

With --plain the server computes its prompts, and answers are scored by a stock server beside it, without HiSparse,
which would run full of requests that end with their prefill. They are compared with those of a stock server that has it
and never retracts. Some requests of the load end with their prefill: of these the engine leaves places on the
device behind, and no restored request may take them for its own.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from sglang_dsv4.cli import stress
from sglang_dsv4.livetest.load import Load

HOT, RATIO = 512, 2  # rows of a request on the device; host rows by device rows: hot rows for sixteen requests
WORDS = (  # noqa: SIM905
    "--requests 500 --at-least 843 --interval 3 --prompt 2000 8000 --new-tokens 40 160 --concurrency 14 --timeout 60 "
    "--patience 200 --most-seconds 85 --name hisparse-stress"
).split()
PLAIN = (  # noqa: SIM905
    "--requests 150 --at-least 200 --interval 5 --prompt 2000 4000 --new-tokens 40 160 --concurrency 14 --timeout 90 "
    "--patience 200 --most-seconds 60 --score 40 --name hisparse-plain-stress"
).split()

# With --plain each fourth request is one more, which ends with its prefill.
ENDS_EVERY, ENDS_PROMPT = 4, 150


def server_arguments() -> list[str]:
    """Returns the arguments that turn HiSparse on."""
    config = {"top_k": HOT, "device_buffer_size": HOT, "host_to_device_ratio": RATIO}
    return ["--enable-hisparse", "--disable-radix-cache", "--hisparse-config", json.dumps(config)]


def words(argv: Sequence[str]) -> list[str]:
    """Returns the command line of stress: the usual words, those given, and for the server the same."""
    end = argv.index("--") if "--" in argv else len(argv)
    usual = PLAIN if "--plain" in argv[:end] else WORDS
    return [*usual, *argv[:end], "--", *server_arguments(), *argv[end + 1 :]]


def load_of(arguments: argparse.Namespace) -> Load:
    """Returns the requests of stress, and with --plain among them some that end with their prefill."""
    load = Load.of(arguments)
    for number in range(1, arguments.requests if arguments.plain else 0, ENDS_EVERY):
        load.prompts.insert(number, load.prompts[number][:ENDS_PROMPT])
        load.new_tokens.insert(number, 1)
    return load


def main(argv: Sequence[str] | None = None) -> int:
    return stress.main(words(sys.argv[1:] if argv is None else argv), load_of)


if __name__ == "__main__":
    sys.exit(main())
