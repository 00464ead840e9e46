"""What nobody asked for must have been measured: DSV4_PREP=auto, and what comes with it, follow from recorded results.

graph    every result of GRAPHS is there and missed no bound, some step is faster beyond its interval, and eager steps
         are faster in line than with the engine's builder
stream   else, where eager steps are faster than with the engine's builder, and an early start slows none
engine   else
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_dsv4.engine.hooks import HOOKS, PREP_MEASURED
from sglang_dsv4.engine.releases import TESTED

RESULTS = Path(__file__).parents[3] / "docs" / "results"
SUFFIXES = {"0.5.17": "", "0.5.23": "-0523"}
STEPS = ("graph-step", "graph-step-drafts")
GRAPHS = ("graph-fields", "graph-metadata", "graph-stress", *STEPS)

Found = dict[str, dict[str, Any]]


def recorded(release: str, folder: Path = RESULTS) -> Found:
    """The results of a release by name, its suffix apart."""
    suffix = SUFFIXES[release]
    names = [*GRAPHS, "steps-inline", "steps-prep", "steps-early", "prefill-sync"]
    paths = {name: folder / f"{name}{suffix}.json" for name in names}
    found = {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}
    assert all(result["versions"]["sglang"] == release for result in found.values())
    return found


def holds(result: dict[str, Any] | None) -> bool:
    """Whether it is there, and has bounds, and missed none."""
    return result is not None and bool(result["bounds"]) and all(bound["ok"] for bound in result["bounds"])


def gains(result: dict[str, Any] | None) -> bool:
    """Whether it is there, and every step in it was faster."""
    return result is not None and bool(result["rows"]) and all(row["ratio"] > 1 for row in result["rows"])


def way(found: Found) -> str:
    """What auto means where that was found."""
    graphs = [row for name in STEPS if name in found for row in found[name]["rows"]]
    held = all(holds(found.get(name)) for name in GRAPHS) and any(row["low"] > 1 for row in graphs)
    if held and gains(found.get("steps-inline")):
        return "graph"
    early = found.get("steps-early", {"rows": []})["rows"]
    return "stream" if gains(found.get("steps-prep")) and all(row["high"] >= 1 for row in early) else "engine"


def test_auto_is_what_was_measured():
    measured = {release: way(recorded(release)) for release in TESTED}
    assert measured == PREP_MEASURED


def faster(result: dict[str, Any]) -> bool:
    """Nothing differs, no row is slower beyond its interval, some row is faster, and a card of each speed was tried."""
    fields = next(bound for bound in result["bounds"] if bound["name"] == "fields that differ")
    rows = result["rows"]
    tried = {row["forward"] for row in rows} == {"half", "even", "twice"}
    return tried and fields["ok"] and all(row["high"] >= 1 for row in rows) and any(row["low"] > 1 for row in rows)


def test_a_chunk_waits_for_the_device_until_it_was_measured_without():
    """Its two hooks come with graphs until then, and those are not auto; later by default, or not at all."""
    entries = [hook.part for hook in HOOKS if hook.ours.startswith("engine.prefill_chunk:")]
    result = recorded("0.5.17").get("prefill-sync")
    if result is None:
        assert entries == ["graphs"] * 2 and PREP_MEASURED["0.5.17"] != "graph"
    else:
        assert entries == (["prep"] * 2 if faster(result) else [])


def made_up(ratio: float, width: float = 0.02, missed: bool = False) -> dict[str, Any]:
    row = {"ratio": ratio, "low": ratio - width / 2, "high": ratio + width / 2}
    return {"rows": [row], "bounds": [{"ok": not missed}]}


EVERY = {name: made_up(1.02) for name in (*GRAPHS, "steps-inline", "steps-prep", "steps-early")}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "graph"),
        *[({name: None}, "stream") for name in GRAPHS],
        *[({name: made_up(1.02, missed=True)}, "stream") for name in GRAPHS],
        *[({name: made_up(1.02) | {"bounds": []}}, "stream") for name in GRAPHS],
        ({name: made_up(1.005) for name in STEPS}, "stream"),
        ({"graph-step": made_up(1.0)}, "graph"),
        ({"steps-early": made_up(0.98)}, "graph"),
        ({"steps-inline": None}, "stream"),
        ({"steps-inline": made_up(0.999)}, "stream"),
        ({"graph-step": None, "steps-early": made_up(0.999)}, "stream"),
        ({"graph-step": None, "steps-early": None}, "stream"),
        ({"graph-step": None, "steps-early": made_up(0.98)}, "engine"),
        ({"graph-step": None, "steps-prep": made_up(0.99)}, "engine"),
        ({"graph-step": None, "steps-prep": None}, "engine"),
    ],
    ids=str,
)
def test_each_figure_leads_somewhere(change, expected):
    found = {name: result for name, result in (EVERY | change).items() if result is not None}
    assert way(found) == expected
