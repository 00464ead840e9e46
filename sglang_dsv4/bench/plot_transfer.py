"""Plots a transfer result. python -m sglang_dsv4.bench.plot_transfer RESULT.json"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Plots time and GB/s against tokens."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    tokens = [row["tokens"] + 1 for row in rows]
    for way, colour in (("save", "tab:blue"), ("load", "tab:orange")):
        left.loglog(tokens, [row[f"{way}_ms"] for row in rows], "o-", color=colour, label=way)
        right.semilogx(tokens, [row[f"{way}_gbps"] for row in rows], "o-", color=colour, label=way)
        right.axhline(rows[0][f"{way}_limit_gbps"], color=colour, linestyle=":", label=f"{way}: 1 GiB pinned copy")
        known = [row for row in rows if row.get(f"reference_{way}_ms")]
        left.loglog(
            [row["tokens"] + 1 for row in known], [row[f"reference_{way}_ms"] for row in known], "x--", color=colour,
            label=f"{way}, per-layer gathers to pageable memory",
        )  # fmt: skip
    left.set(xlabel="tokens", ylabel="ms", title="one request, end to end")
    right.set(xlabel="tokens", ylabel="GB/s", title="bytes moved a second", ylim=0)
    for axis in (left, right):
        axis.legend(fontsize=8)
        axis.grid(visible=True, alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    result = Path(sys.argv[1])
    plot(json.loads(result.read_text())["rows"], result.with_suffix(".png"))
