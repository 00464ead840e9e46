#!/usr/bin/env python3
"""Lists the results without bounds, every bound that is missed, and the figures of README that are not the results'.

    python3 tools/docs/check_results.py

Exit status 1 when it lists anything.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"


def read(name: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / f"{name}.json").read_text()))


def troubles() -> list[str]:
    """Returns one line a result without bounds, and one a bound that is not met."""
    found = []
    for name in sorted(path.stem for path in RESULTS.glob("*.json")):
        bounds = read(name).get("bounds", [])
        found += [] if bounds else [f"{name}: no bounds"]
        found += [f"{name}: {b['name']} {b['value']} ({b['bound']})" for b in bounds if b.get("ok") is not True]
    return found


def figures() -> list[str]:
    """Returns the lines that README must have: the two headline figures, and the rows of its table of performance."""
    stock, ours = (read(f"retract-{how}-0523")["rows"][0] for how in ("recomputed", "copied"))
    asked = sum(ours[end] for end in ("finished", "refused", "lost"))
    saves = {row["tokens"] + 1: row["save_ms"] for row in read("transfer")["rows"]}
    resumes = {row["tokens"]: row for row in read("resume")["rows"]}
    long = resumes[65536]
    return [
        f"{stock['finished']} of {asked} right answers become {ours['finished']} of {asked}",
        f"{long['recompute_ms'] / 1e3:.1f} s become {long['to_token_ms']:.0f} ms",
        *(
            f"| {tokens // 1024}K | {row['bytes'] / 1e6:.0f} MB | {saves[tokens]:.1f} ms | {row['load_ms']:.1f} ms "
            f"| {row['to_token_ms']:.0f} ms | {row['recompute_ms']:,.0f} ms | {row['to_token_faster']:.0f}x |"
            for tokens, row in resumes.items()
        ),
    ]


def main() -> int:
    """Returns exit status 1 when something is listed."""
    readme = (ROOT / "README.md").read_text()
    found = troubles() + [f"README does not say: {figure}" for figure in figures() if figure not in readme]
    print("\n".join(found) or "every bound is met, and README quotes the results")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
