"""``sglang-dsv4 bench transfer`` with a recorded result.   python3 -m benchmarks.transfer.run [--help]"""

from __future__ import annotations

from pathlib import Path

from sglang_dsv4.bench import transfer

RECORDED = Path(__file__).resolve().parents[2] / "docs" / "results"

if __name__ == "__main__":
    transfer.main(out=RECORDED)
