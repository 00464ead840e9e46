"""The benchmark of ranks that share an arena runs to its end without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_three_ranks_move_one_copy(tmp_path: Path) -> None:
    """Its figures mean nothing here; what it compares and counts does."""
    command = "benchmarks.node_transfer --devices cpu,cpu,cpu --layers tiny --tokens 600 --times 1 --out"
    run = subprocess.run(
        [sys.executable, "-m", *command.split(), str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert (tmp_path / "node-transfer.json").exists(), run.stderr[-2000:]
    result = json.loads((tmp_path / "node-transfer.json").read_text())
    bounds = {bound["name"]: bound for bound in result["bounds"]}
    assert len(bounds) == 6
    assert all(bound["ok"] for name, bound in bounds.items() if "over TP" not in name or "bytes" in name), bounds
    alone, together = result["rows"]
    assert together["host_bytes"] == alone["host_bytes"] == sum(together["saved_bytes"])
    for field in ("save_by_rank_ms", "load_by_rank_ms", "enqueued_ms", "saved_bytes"):
        assert len(together[field]) == together["ranks"] == 3 and all(together[field])
    assert together["plain_save_ms"] > 0 < together["plain_load_ms"]
