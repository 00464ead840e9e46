#!/usr/bin/env python3
"""Runs ``sglang-dsv4 stress`` from a checkout.   python3 scripts/stress_retract.py --help"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from sglang_dsv4.command_line import to_its_end


def main() -> int:
    from sglang_dsv4.cli import stress  # noqa: PLC0415 - what it needs may not be installed

    return stress.main()


if __name__ == "__main__":
    sys.exit(to_its_end("stress_retract.py", main))
