#!/usr/bin/env python3
"""Plot and table of a bench_prep result.   python3 scripts/report_prep.py RESULT.json"""

from __future__ import annotations

import sys
from pathlib import Path

from sglang_dsv4.bench.stepping.report import make_report

if __name__ == "__main__":
    make_report(Path(sys.argv[1]))
