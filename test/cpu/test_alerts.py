"""The alert rules ask for series, labels and label values that are exported, and name settings that exist."""

import dataclasses
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from sglang_dsv4.engine.memory import ranks_of
from sglang_dsv4.metrics import Counters, PrepCounts, SessionCounters, StoreCounters
from sglang_dsv4.settings import TABLE

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "grafana" / "alerts.yaml").read_text()
RULES = [rule for group in yaml.safe_load(TEXT)["groups"] for rule in group["rules"]]
SETTINGS = {setting.variable for setting in TABLE.values()}
FIELDS = {
    f"sglang_dsv4_{field.metadata['series']}": field.metadata
    for kind in (Counters, SessionCounters, StoreCounters, PrepCounts)
    for field in dataclasses.fields(kind)
    if field.metadata
}
RANKS = set(ranks_of(SimpleNamespace(labels={"tp_rank": 0, "pp_rank": 0, "dp_rank": 0, "model_name": "M"})))
ADDED = {"instance", "job", "namespace", "pod"}  # by Prometheus
SERIES = re.compile(r"\bsglang(?:_dsv4_|:)\w+")
MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')


def labels_of(series: str) -> set[str]:
    own = FIELDS[series]["labels"] if series in FIELDS else ()
    return RANKS | ADDED | set(own)


def values_of(series: str, label: str) -> set[str]:
    """Values of a label of its own that are exported from the start."""
    place = FIELDS[series]["labels"].index(label)
    return {values[place] for values in FIELDS[series]["known"]}


def argument(text: str) -> str:
    """Returns the inside of the parenthesis that ``text`` begins with."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[1:place]
    raise AssertionError(f"no end: {text}")


def troubles(expr: str) -> list[str]:
    """Lists the names and labels of an expression that nothing exports."""
    named = set(SERIES.findall(expr))
    found = [name for name in sorted(named) if name.startswith("sglang_dsv4_") and name not in FIELDS]
    if found or not named:
        return found or ["no series"]
    for series, inside in re.findall(r"(sglang_dsv4_\w+)\{([^}]*)\}", expr):
        for label, _, values in MATCHER.findall(inside):
            if label not in labels_of(series):
                found.append(f"{series}{{{label}}}")
            elif label in FIELDS[series]["labels"]:
                found += sorted(set(values.split("|")) - values_of(series, label))
    for by in re.finditer(r"\bby \(([^)]*)\) (?=\()", expr):
        for series in SERIES.findall(argument(expr[by.end() :])):
            found += [f"{series} by {label}" for label in by[1].split(", ") if label not in labels_of(series)]
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_it_asks_for_what_is_exported(rule):
    assert troubles(rule["expr"]) == []


@pytest.mark.parametrize("expr", [
    "rate(sglang_dsv4_savings_total[5m]) > 0",
    'sglang_dsv4_fallbacks_total{cause="NoRoom"} > 0',
    'sglang_dsv4_fallbacks_total{reason=~"NoRoom|NoRome"} > 0',
    'sglang_dsv4_store_units_total{op="get",outcome=~"no_seal|torn"} > 0',
    "sum by (instance, reason) (max by (instance, dp_rank) (rate(sglang_dsv4_saves_total[5m]))) > 0",
    "up == 0",
])  # fmt: skip
def test_what_is_not_exported_is_noticed(expr):
    assert troubles(expr)


def test_series_of_the_engine_are_the_engines():
    named = {name for rule in RULES for name in SERIES.findall(rule["expr"]) if name.startswith("sglang:")}
    (engine,) = importlib.util.find_spec("sglang").submodule_search_locations
    made = Path(engine, "srt", "observability", "metrics_collector.py").read_text()
    assert named and not [name for name in named if f'name="{name}"' not in made]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_it_says_what_to_do(rule):
    said = " ".join(rule["annotations"].values())
    settings = set(re.findall(r"\bDSV4_[A-Z_]*[A-Z]", said))
    assert settings <= SETTINGS
    assert settings or "docs/operating.md" in said
    used = set(re.findall(r"\$labels\.(\w+)", said))
    (kept,) = {frozenset(by.split(", ")) for by in re.findall(r"^\(*\w+ by \(([^)]*)\)", rule["expr"])}
    assert used <= kept
    assert rule["labels"]["severity"] in {"warning", "critical"}


def test_the_operating_guide_lists_every_alert():
    text = (DOCS / "operating.md").read_text()
    assert re.findall(r"^\| `(Dsv4\w+)` \|", text, re.MULTILINE) == [rule["alert"] for rule in RULES]
