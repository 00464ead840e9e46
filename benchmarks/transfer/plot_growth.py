#!/usr/bin/env python3
"""Plot of a growth result.   python3 benchmarks/transfer/plot_growth.py RESULT.json"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Milliseconds against layers and against requests at once, and the time the link alone would take."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4))
    for axis, key in ((axes[0], "layers"), (axes[1], "at_once")):
        found = [row for row in rows if key in row]
        x = [row[key] for row in found]
        for way in ("save", "load"):
            axis.plot(x, [row[f"{way}_ms"] for row in found], "o-", label=way)
        link = [row["load_ms"] * row["load_of_link"] for row in found]
        axis.plot(x, link, ":", color="grey", label="the link alone")
        axis.set(xlabel={"layers": "layers", "at_once": "requests at once"}[key], ylabel="ms")
        axis.set_title(f"{found[0]['tokens'] + 1} tokens a request")
        axis.legend()
        axis.grid(visible=True, alpha=0.3)
    axes[0].set_ylim(0)
    axes[1].set(xscale="log", yscale="log")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    result = Path(sys.argv[1])
    plot(json.loads(result.read_text())["rows"], result.with_suffix(".png"))
