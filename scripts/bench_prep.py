#!/usr/bin/env python3
"""``sglang-dsv4 bench prep`` with its results in docs/results.   python3 scripts/bench_prep.py [--help]"""

from __future__ import annotations

import sys

import results

from sglang_dsv4.bench import prep

if __name__ == "__main__":
    sys.exit(prep.main(out=results.FOLDER))
