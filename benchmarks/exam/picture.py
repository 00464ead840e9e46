"""Plots the right answers of each arm, beside the first result: exam.json -> exam.png.

python3 -m benchmarks.exam.picture bench-results/exam.json bench-results/exam-plain.json
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

from sglang_dsv4.command_line import Parser, readable_file

mpl.use("Agg")
import matplotlib.pyplot as plt

ARM = "finals of "
CHANCE = 0.1


def plot(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draws a bar for each arm of each result: the share of right finals, with a standard error."""
    figure, all_axes = plt.subplots(1, len(runs), figsize=(6 * len(runs), 5), squeeze=False)
    for axis, (name, rows) in zip(all_axes[0], runs.items(), strict=True):
        asked = [max(1, row["short_asked"] + row["long_asked"]) for row in rows]
        right = [(row["short_right"] + row["long_right"]) / n for row, n in zip(rows, asked, strict=True)]
        errors = [(share * (1 - share) / n) ** 0.5 for share, n in zip(right, asked, strict=True)]
        labels = [row["run"].removeprefix(ARM).split(",")[0] for row in rows]
        colours = ["tab:red" if "zeroed" in label else "tab:blue" for label in labels]
        axis.barh(labels[::-1], right[::-1], xerr=errors[::-1], color=colours[::-1])
        axis.axvline(CHANCE, color="black", linestyle=":", label="chance")
        axis.set(title=name, xlabel="share of final numbers that are right", xlim=(0, 1.02))
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the results and writes the picture."""
    parser = Parser("python3 -m benchmarks.exam.picture", description=__doc__)
    parser.add_argument("results", type=readable_file, nargs="+", help="of benchmarks.exam.ask")
    paths = parser.parse_args(argv).results
    found = {path.stem: json.loads(path.read_text())["rows"] for path in paths}
    arms = {name: [row for row in rows if row["run"].startswith(ARM)] for name, rows in found.items()}
    plot(arms, paths[0].with_suffix(".png"))


if __name__ == "__main__":
    main()
