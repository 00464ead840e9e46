#!/usr/bin/env python3
"""``sglang-dsv4 bench transfer`` with its results in docs/results.   python3 scripts/bench_transfer.py [--help]"""

from __future__ import annotations

import results

from sglang_dsv4.bench import transfer

if __name__ == "__main__":
    transfer.main(out=results.FOLDER)
