"""``sglang-dsv4 bench prep`` with a recorded result.   python3 -m benchmarks.prep.run [--help]"""

from __future__ import annotations

import sys
from pathlib import Path

from sglang_dsv4.bench import prep

RECORDED = Path(__file__).resolve().parents[2] / "docs" / "results"

if __name__ == "__main__":
    sys.exit(prep.main(out=RECORDED))
