"""Tables of a result of the prep benchmark, and its timeline.   RESULT.json SPANS.json"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from sglang_dsv4.bench.report import NO_PLOT
from sglang_dsv4.bench.results import headline

TITLES = {
    "engine": "the engine's builder, on the forward stream",
    "behind": "ours, its kernel behind the previous forward (the engine's barrier in force)",
    "beside": "ours, beside the previous forward",
}
LANES = ("CPU", "prep stream", "forward stream")
COLOURS = {"prepare": "tab:orange", "metadata": "tab:red", "forward": "tab:blue"}
MEANINGS = {"prepare": "ours: plan, copy, kernel", "metadata": "metadata in the forward's way", "forward": "forward"}
SHORTEST = 0.004  # of the picture's width, so that a span of a few microseconds can be seen

# Columns of the two tables of times.
ALONE = ("batch", "queries", "engine_host_us", "engine_idle_us", "engine_busy_us", "ours_host_us", "ours_idle_us",
         "ours_busy_us", "ours_beside_host_us")  # fmt: skip
LOOP = ("batch", "queries", "engine_metadata_us", "in_line_metadata_us", "behind_metadata_us", "beside_metadata_us",
        "none_step_us", "engine_step_us", "in_line_step_us", "behind_step_us", "beside_step_us")  # fmt: skip
LATE = ("batch", "queries", "engine_late_percent", "in_line_late_percent", "behind_late_percent",
        "beside_late_percent")  # fmt: skip

Rows = list[dict[str, Any]]


def columns(rows: Rows, names: tuple[str, ...]) -> Rows:
    """``rows`` with these columns alone."""
    return [{name: row[name] for name in names} for row in rows]


def plot(pictured: Rows, path: Path) -> None:
    """One panel a builder: its spans of the shown steps on the CPU and on the streams, on one scale."""
    import matplotlib as mpl  # noqa: PLC0415  # the tables need none

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415
    from matplotlib.patches import Patch  # noqa: PLC0415

    longest = max(span["end_us"] for row in pictured for span in row["spans"])
    size = (13, 2.1 * len(pictured) + 0.8)
    figure, axes = plt.subplots(len(pictured), 1, figsize=size, sharex=True, squeeze=False, layout="constrained")
    for axis, row in zip(axes[:, 0], pictured, strict=True):
        for span in row["spans"]:
            word, _, number = span["name"].partition(" ")
            width = max(span["end_us"] - span["start_us"], SHORTEST * longest)
            lane = LANES[::-1].index(span["lane"])
            axis.barh(lane, width, left=span["start_us"], height=0.75, color=COLOURS[word], edgecolor="white", lw=0.6)
            if width > 0.03 * longest:
                axis.text(span["start_us"] + width / 2, lane, number, ha="center", va="center", fontsize=8)
        axis.set_yticks(range(len(LANES)), LANES[::-1])
        axis.set_title(f"{TITLES[row['timeline']]}; batch {row['batch']}, {row['queries']} a request", fontsize=10)
        axis.set_xlim(0, longest)
        axis.grid(visible=True, axis="x", alpha=0.3)
    axes[-1, 0].set_xlabel("microseconds (with the profiler on)")
    patches = [Patch(color=COLOURS[word], label=meaning) for word, meaning in MEANINGS.items()]
    figure.legend(handles=patches, fontsize=8, loc="outside upper right", ncols=len(patches))
    figure.savefig(path, dpi=110)


def table(rows: Rows) -> list[str]:
    """Rows of equal keys as Markdown."""
    names = list(rows[0])
    lines = [f"| {' | '.join(name.replace('_', ' ') for name in names)} |", "|" + "---|" * len(names)]
    for row in rows:
        cells = (f"{row[name]:.1f}" if isinstance(row[name], float) else str(row[name]) for name in names)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def document(result: dict[str, Any], picture: str) -> str:
    """The result as Markdown."""
    rows = result["rows"]
    timed = [row for row in rows if "engine_busy_us" in row]
    parts = [
        "# Decode metadata: the prep stream against the engine's eager builder", "",
        headline(result), "",
        "Two queries a request: one draft token is verified. The planners of DeepGEMM and top-k stay the engine's; "
        "only the row \"all\" has them.", "",
        "Launches and uploads of one step:", "",
        *table([row for row in rows if "builder" in row]), "",
        "Alone on one stream, ours in line, microseconds. host: until it is enqueued. idle: on an idle device, where "
        "launches show. busy: behind other work, device time only.", "",
        *table(columns(timed, ALONE)), "",
        "In a loop of steps, microseconds: metadata on the forward stream, and the whole step (none: no metadata). "
        "behind, beside: from the prep stream, see the picture.", "",
        *table(columns(timed, LOOP)), "",
        "Steps in which the host was too late to enqueue the metadata behind a running forward:", "",
        *table(columns(timed, LATE)), "",
        "The plan on the CPU, token by token, and as small operations on the device, microseconds:", "",
        *table([row for row in rows if "plan_us" in row]), "",
        f"![a few steps]({picture})", "",
        *(f"- {'met' if b['ok'] else 'missed'}: {b['name']}: {b['value']} ({b['bound']})" for b in result["bounds"]),
    ]  # fmt: skip
    return "\n".join(parts) + "\n"


def make_report(path: Path, pictured: Rows) -> None:
    """Write RESULT.md beside ``path``, RESULT.json, and RESULT.png where there is matplotlib (else it is said).

    pictured: the rows of ``prep.timeline``.
    """
    result = json.loads(path.read_text())
    path.with_suffix(".md").write_text(document(result, path.with_suffix(".png").name))
    if importlib.util.find_spec("matplotlib") is None:
        print(NO_PLOT, file=sys.stderr)
        return
    plot(pictured, path.with_suffix(".png"))


if __name__ == "__main__":
    make_report(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()))
