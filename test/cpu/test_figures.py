"""README and docs/ say what the results say; results are of this release, and of commands that this tree has."""

import argparse
import importlib
import json
import os
import re
import shlex
import sys
from unittest import mock

import check_results
import figures
import pytest
from figures import live, of_results, pages, readme

from sglang_dsv4 import __version__

RESULTS = {path.stem: json.loads(path.read_text()) for path in of_results.RESULTS.glob("*.json")}


def test_readme_and_docs_say_what_the_results_say():
    assert check_results.apart() == [], "run make results ARGS=--write"


def test_a_missed_bound_and_a_result_without_bounds_are_listed(tmp_path, monkeypatch):
    monkeypatch.setattr(of_results, "RESULTS", tmp_path)
    bound = {"name": "lost", "bound": "<= 0", "value": 1, "ok": False}
    for name, bounds in {"a": [bound], "b": [], "c": [bound | {"ok": True}]}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"bounds": bounds}))
    assert check_results.missed() == ["a: lost 1 (<= 0)", "b: no bounds"]


def test_a_line_that_is_not_the_results_is_shown(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- x -->\n\nold\n\n<!-- end x -->\n")
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "BLOCKS", {"page.md": {"x": lambda: "new"}})
    monkeypatch.setattr(sys, "argv", ["check_results.py"])
    assert [line for line in check_results.apart() if line[1:] in {"old", "new"}] == ["-old", "+new"]
    assert check_results.main() == 1
    monkeypatch.setattr(sys, "argv", ["check_results.py", "--write"])
    assert check_results.main() == 0 and "\nnew\n" in page.read_text()
    monkeypatch.setattr(figures, "BLOCKS", {"page.md": {"x": str}})
    assert check_results.main() == 0 and page.read_text() == "before\n<!-- x -->\n<!-- end x -->\n"


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Writes a made-up result of a run with the rows given."""
    monkeypatch.setattr(of_results, "RESULTS", tmp_path)

    def write(name: str, *rows: dict, command: str = "") -> None:
        facts = {"machine": {"gpu": "NVIDIA H200"}, "versions": {"sglang": "0.5.23"}, "command": command, "bounds": []}
        (tmp_path / f"{name}.json").write_text(json.dumps({**facts, "rows": rows}))

    return write


def test_the_first_figure_tells_each_kind_of_outcome(made):
    command = "sglang-dsv4 stress --interval 60 --timeout 30"
    none = dict.fromkeys(("too_many", "too_few", "never_ended", "refused", "failed", "unsent"), 0)
    made("retract-recomputed", {"asked": 100, "whole": 56, **none, "too_many": 30, "never_ended": 10, "refused": 4})
    assert readme.answers() == "", "not without both"
    made("retract-copied", {"asked": 100, "whole": 100, "verified": 36, **none}, command=command)
    assert readme.answers() == (
        "- **56 of 100 whole answers become 100 of 100.** The same requests over NIXL on one H200, "
        "a retract every 60 steps, 30 s a request, sglang 0.5.23. "
        "With [stock](docs/results/retract-recomputed.json) 30 had too many tokens, 10 never ended, 4 got 503. "
        "With [this package](docs/results/retract-copied.json) all have the tokens asked for, 36 loads compared."
    )


def test_a_stress_is_told_by_its_kinds_of_outcome_too(made):
    counted = {
        "asked": 120, "whole": 118, "refused": 2, "saves": 67, "loads": 67, "verified": 66, "engine_retracts": 102,
    }  # fmt: skip
    row = {**counted, "fallbacks": {"HostMemoryExhausted": 35}, "stall_p50_ms": 12.8}
    means = ({"run": f"score of {name}", "mean": mean} for name, mean in (("control", -1), ("retracts", -2)))
    made("small-arena-stress", row, *means, {"run": "score of swa_kv zeroed", "mean": -9})
    assert live.under_retracts().splitlines()[-1] == (
        "| [prefill and decode, host memory for less than one long request](small-arena-stress.json) | one H200 | "
        "118 of 120 | 67 | 67, 66 compared | 35 `HostMemoryExhausted` | -1.000, -2.000, -9.000 `swa_kv` |"
    )
    made("retract-copied", row)
    assert live.beside_stock().splitlines()[-1] == (
        "| [with this package: a copy](retract-copied.json) | one H200 | 102 | 118 of 120 | 2 got 503 | 13 ms |"
    )


def test_a_figure_without_its_result_is_left_out_and_comes_with_it(made):
    blocks = [make for page in figures.BLOCKS.values() for make in page.values()]
    assert [make() for make in blocks] == [""] * len(blocks)
    times = {"save_ms_p50": 1.01, "save_ms_p99": 1.5, "load_ms_p50": 0.85, "load_ms_p99": 0.9, "gap_ms_p50": 11}
    gaps = {"gap_at_save_ms_p50": 12.3, "gap_at_load_ms_p50": 16.4, "pinned_gib": 32, "pinned_s": 4.5}
    made("stall", {"tokens": 65536, "saves": 111, **times, **gaps})
    assert readme.speed() == (
        "Of the scheduler's time, a save of 64K tokens takes 1.01 ms (1.50 at the 99th percentile) and a load 0.85 ms "
        "(0.90 at the 99th percentile), medians of 111. Another running request waits 12.3 ms for a token at a save "
        "and 16.4 ms at a load, 11.0 ms without. The start pinned 32 GiB in 4.5 s ([stall](docs/results/stall.json), "
        "one H200)."
    )
    graph = {"way": "graph", "batch": 1, "queries": 1, "context": 1 << 20, "engine_us": 39.4, "ours_us": 2.6}
    rows = [graph | {"batch": b, "queries": q, "context": c} for b in (1, 8) for q in (1, 4) for c in (65536, 1 << 20)]
    made("prep", *rows[:-1], rows[-1] | {"engine_us": 125.2})
    assert "| verification of 3 drafts | 39 to 125 us | 39 to 39 us | 3 to 3 us |" in pages.graphs()
    one, two = {"save_ms": 5.35, "load_ms": 5.0, "tokens": 65535}, {"save_ms": 3.13, "load_ms": 5.07, "tokens": 65535}
    made("node-transfer", one, two, command="python3 -m benchmarks.node_transfer --devices 0,1")
    assert live.ranks().startswith("[Two ranks](node-transfer.json), two H200: a save of 65,535 tokens, each rank its")


def test_each_result_is_of_this_release():
    others = {name: result["versions"]["sglang-dsv4"] for name, result in RESULTS.items()}
    assert {name: release for name, release in others.items() if release != __version__} == {}, "older ones go"
    assert "results/older" not in (figures.ROOT / "README.md").read_text()


class Parsed(Exception):
    """Ends a command whose arguments were parsed."""


def refusal(command: str) -> str | None:
    """Why a command of this tree does not begin; None where its arguments are parsed. Nothing of it runs."""
    words = shlex.split(command)
    at = next(at for at, word in enumerate(words) if not re.match(r"[A-Z0-9_]+=", word))
    environment, words = dict(word.split("=", 1) for word in words[:at]), words[at:]
    parse_args = argparse.ArgumentParser.parse_args

    def parse(self, args=None, namespace=None):
        parse_args(self, args, namespace)
        raise Parsed

    match words:
        case ["sglang-dsv4", "bench", name, *rest]:
            module, given = f"sglang_dsv4.bench.{name}", rest[rest.index("--") + 1 :] if "--" in rest else []
        case ["sglang-dsv4", name, *given]:
            module = f"sglang_dsv4.cli.{name}"
        case ["python3", "-m", module, *given]:
            pass
        case ["python3", script, *given] if script.startswith("scripts/"):
            module = script.removeprefix("scripts/").removesuffix(".py")
        case _:
            return "no command of this tree"
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(sys, "argv", [module, *given]),
        mock.patch.object(argparse.ArgumentParser, "parse_args", parse),
    ):
        try:
            found = importlib.import_module(module)
            found.main(given) if module.startswith("sglang_dsv4.cli.") else found.main()
        except Parsed:
            return None
        except (ModuleNotFoundError, SystemExit) as error:
            return repr(error)
    return "its arguments were not parsed"


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder from which commands find what they name: the configs of this tree, and an exported exam."""
    for name in ("benchmarks", "tools"):
        (tmp_path / name).symlink_to(figures.ROOT / name)
    (tmp_path / "EXAM").mkdir()
    for name in ("EXAM/config.json", "EXAM/problems.jsonl", "EXAM.pt"):
        (tmp_path / name).write_text("{}")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("checkout")
@pytest.mark.parametrize("name", RESULTS)
def test_the_command_of_a_result_runs_in_this_tree(name):
    command = RESULTS[name]["command"]
    assert refusal(command) is None, command
    command = re.sub(r"^(.* )?DSV4_STORE=/tmp/[\w-]+ ", "", command)  # absolute by its rule, and as the tables have it
    assert not re.search(r"(^|[ =])/", command), "a path of the machine that it ran on"


@pytest.mark.usefixtures("checkout")
def test_the_commands_of_the_benchmarks_are_parsed():
    table = (figures.ROOT / "benchmarks" / "README.md").read_text()
    rows = re.findall(r"^\| [\w-]* *\| `((?:\w+=\S+ )*(?:python3|sglang-dsv4) [^`]+)` \|", table, re.MULTILINE)
    assert len(rows) > 30 and {row: found for row in rows if (found := refusal(row))} == {}
    assert "benchmarks.bread" in refusal("python3 -m benchmarks.bread --name x")
    assert refusal("DSV4_VERIFY=1 sglang-dsv4 stress --model-path m --bogus 3") == "SystemExit(2)"
    assert refusal("python3 benchmarks/stall.py") == "no command of this tree"
