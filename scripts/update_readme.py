#!/usr/bin/env python3
"""Write the figures of docs/results into the pages, between markers.   python3 scripts/update_readme.py [--check]

Every number in those tables comes from a result file; --check changes nothing and fails when a page is behind.
Prints every bound that a result missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
PAGES = (ROOT / "README.md", RESULTS / "live.md", ROOT / "docs" / "peers.md")  # what states figures
STRESS = (
    ("stress-stock", "stock, forced"),
    ("stress-fake", "forced, fake transfer"),
    ("stress-attach", "the same on a server that `sglang-dsv4 serve` started, attached to"),
    ("stress-pressure", "none forced: a cache that is too small"),
    ("stress-pressure-swa", "none forced: a window pool that is too small"),
    ("stress-nixl", "forced, prefill and decode server, cache over NIXL"),
    ("stress-pairs", "the same, two requests at a time"),
    ("stress-small-arena", "forced, cache over NIXL, host memory for less than one long request"),
    ("stress-tp2", "forced, two GPUs (--tp 2), whose ranks decided alike"),
    ("stress-prep", "forced, without decode graphs, metadata from the prep stream"),
    ("stress-prep-tp2", "the same on two GPUs (--tp 2)"),
    ("stress-fake-0523", "sglang 0.5.23, forced, fake transfer"),
    ("stress-small-arena-0523", "sglang 0.5.23, forced, cache over NIXL, host memory for less than one long request"),
    ("stress-prep-0523", "sglang 0.5.23, forced, without decode graphs, metadata from the prep stream"),
    ("stress-flash", "Flash's shape: 43 layers, 96 experts, forced, fake transfer"),
)
STEPS = (
    ("steps-idle", "0.5.17, decode graphs, package idle"),
    ("steps-idle-0523", "0.5.23, decode graphs, package idle"),
    ("steps-prep", "0.5.17, no graphs, metadata from the prep stream"),
    ("steps-prep-again", "the same again, on a busier machine"),
    ("steps-prep-0523", "0.5.23, no graphs, metadata from the prep stream"),
)
RECOMPUTED = (
    ("retract-recomputed-0523", "stock: computed again by the prefill server"),
    ("retract-copied-0523", "with this package: a copy"),
    ("stress-small-arena-0523", "with this package and too little host memory: both"),
)


def read(name: str) -> dict[str, Any]:
    """One result."""
    return dict(json.loads((RESULTS / f"{name}.json").read_text()))


def transfer() -> list[str]:
    """The headline: 2K to 256K tokens."""
    lines = ["| tokens | save | of the pinned copy | load | of the pinned copy |", "|---|---|---|---|---|"]
    for row in read("transfer")["rows"]:
        if row["tokens"] + 1 in {2048, 16384, 65536, 262144}:
            cells = [f"{row[f'{way}_ms']:.1f} ms | {row[f'{way}_of_link']:.2f}" for way in ("save", "load")]
            lines.append(f"| {(row['tokens'] + 1) // 1024}K | {cells[0]} | {cells[1]} |")
    return lines


def stress() -> list[str]:
    """One line a stress run."""
    lines = [
        "| retracts | finished / refused / lost | saved / loaded, all compared | without a copy | server "
        "| tokens as in a control run |",
        "|---|---|---|---|---|---|",
    ]
    for name, what in STRESS:
        if not (RESULTS / f"{name}.json").exists():
            continue
        rows = read(name)["rows"]
        run = rows[0]
        tokens = next((row for row in rows if row["run"] == "tokens"), None)
        without = sum(run.get("fallbacks", {}).values())  # older runs did not count them
        same = (
            f"{tokens['with_retracts']['same']} of {tokens['with_retracts']['of']} "
            f"(control with itself: {tokens['control']['same']})" if tokens else ""
        )  # fmt: skip
        alive = "dies" if "Scheduler hit an exception" in run["trouble"] else "alive"
        lines.append(
            f"| {what} | {run['finished']} / {run['refused']} / {run['lost']} | {run['saves']} / {run['loads']} "
            f"| {without or ''} | {alive} | {same} |"
        )
    return lines


def at_each_batch(results: tuple[tuple[str, str], ...], cell: str) -> list[str]:
    """One line a result: ``cell`` filled with the fields of its row of each batch."""
    batches = (1, 4, 16)
    lines = [f"| server | {' | '.join(f'batch {batch}' for batch in batches)} |", "|---|---|---|---|"]
    for name, what in results:
        rows = {row["batch"]: row for row in read(name)["rows"] if "batch" in row}
        lines.append(f"| [{what}]({name}.md) | {' | '.join(cell.format(**rows[batch]) for batch in batches)} |")
    return lines


def steps() -> list[str]:
    """Time of a step without the hooks, and that by its time with them."""
    return at_each_batch(STEPS, "{without_ms:.2f} ms, {ratio:.3f} ({low:.3f} to {high:.3f})")


def recomputed() -> list[str]:
    """One line a server: what became of the requests, and what a retract cost its request."""
    lines = [
        "| sglang 0.5.23 | retracts | finished / refused / lost | median stall of a retract |",
        "|---|---|---|---|",
    ]
    for name, what in RECOMPUTED:
        run = read(name)["rows"][0]
        ends = f"{run['finished']} / {run['refused']} / {run['lost']}"
        lines.append(f"| [{what}]({name}.json) | {run['engine_retracts']} | {ends} | {run['stall_p50_ms']:.0f} ms |")
    return lines


def resume() -> list[str]:
    """One line a length: what a resume costs, and what it saves."""
    lines = [
        "| tokens | load | admission to next token | recompute | load is faster | to the next token, faster |",
        "|---|---|---|---|---|---|",
    ]
    for row in read("resume")["rows"]:
        lines.append(
            f"| {row['tokens'] // 1024}K | {row['load_ms']:.1f} ms | {row['to_token_ms']:.0f} ms "
            f"| {row['recompute_ms']:.0f} ms | {row['load_faster']:.0f}x | {row['to_token_faster']:.0f}x |"
        )
    return lines


def peers() -> list[str]:
    """One line a length at which a peer ran."""
    lines = ["| tokens | ours | per-layer gathers, pageable | the engine's page kernels |", "|---|---|---|---|"]
    for row in read("transfer")["rows"]:
        cells = [
            f"{row[f'{who}save_ms']:.1f} / {row[f'{who}load_ms']:.1f}" if f"{who}save_ms" in row else ""
            for who in ("", "reference_", "engine_")
        ]
        if any(cells[1:]):
            lines.append(f"| {(row['tokens'] + 1) // 1024}K | {' | '.join(cells)} |")
    return lines


SECTIONS: dict[str, Callable[[], list[str]]] = {
    "transfer": transfer, "resume": resume, "stress": stress, "peers": peers,
    "steps": steps, "recomputed": recomputed,
}  # fmt: skip


def rebuilt(text: str) -> str:
    """``text`` with every section that it has between markers made anew."""
    for name, make in SECTIONS.items():
        if f"<!-- {name} -->" not in text:
            continue
        start, end = f"<!-- {name} -->", f"<!-- end {name} -->"
        before, rest = text.split(start)
        after = rest.split(end)[1]
        text = "\n".join([before + start, "", *make(), "", end]) + after
    return text


def missed() -> list[str]:
    """Bounds that were not met, by result."""
    found = []
    for path in sorted(RESULTS.glob("*.json")):
        found += [
            f"{path.stem}: {bound['name']} {bound['value']} (bound {bound['bound']})"
            for bound in json.loads(path.read_text())["bounds"]
            if not bound["ok"]
        ]
    return found


def main() -> int:
    """Exit status 1 when --check finds a page behind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    for line in missed():
        print(f"missed  {line}")
    behind = [page for page in PAGES if rebuilt(page.read_text()) != page.read_text()]
    for page in behind:
        print(f"{page.name} is behind docs/results" + (": run this script" if arguments.check else "; written anew"))
        if not arguments.check:
            page.write_text(rebuilt(page.read_text()))
    return int(arguments.check and bool(behind))


if __name__ == "__main__":
    sys.exit(main())
