"""sglang-dsv4 bench: what it refuses, what it runs, and its verdict on a result."""

import json
import os
import sys

import pytest
import torch
from fresh_process import ROOT, run_fresh

from sglang_dsv4.bench import results, subject, transfer
from sglang_dsv4.bench.transfer import link_bounds, peer_bounds
from sglang_dsv4.cli import bench
from sglang_dsv4.cli.main import main

# Stands for a benchmark: writes what it is told to, and what it was called with.
FAKE = """
import json, pathlib, sys
at = sys.argv.index("--out")
folder = pathlib.Path(sys.argv[at + 1])
(folder / "{name}.words").write_text(json.dumps(sys.argv[1:at] + sys.argv[at + 2:]))
{write}
sys.exit({status})
"""


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


def result(name: str = "transfer", ok: bool = True, gpu: str | None = "Some GPU") -> dict:
    row = {"tokens": 2047, "bytes": 12_300_000}
    for way, share in (("save", 0.755), ("load", 0.865)):
        row |= {f"{way}_ms": 1.234, f"{way}_gbps": 41.0, f"{way}_of_link": share, f"{way}_limit_gbps": 55.4}
    return {
        "bench": name, "date": "2026-01-01", "command": f"sglang-dsv4 bench {name}",
        "machine": {"gpu": gpu, "cpu": "2 x some", "memory_gib": 3.0}, "versions": {"torch": "9.9"},
        "rows": [row] if name == "transfer" else [{"batch": 1}],
        "bounds": [{"name": "a figure", "bound": ">= 0.5", "value": 0.755 if ok else 0.4, "ok": ok}],
    }  # fmt: skip


@pytest.fixture
def fakes(monkeypatch, tmp_path):
    """Puts scripts in the place of the benchmarks; ``fakes(name=(result or None, exit status))``."""

    def make(**given):
        found = {}
        for name, (content, status) in given.items():
            script = tmp_path / f"fake_{name}.py"
            write = f"(folder / '{name}.json').write_text({json.dumps(content)!r})" if content else ""
            script.write_text(FAKE.format(name=name, write=write, status=status))
            found[name] = [sys.executable, str(script)]
        monkeypatch.setattr(bench, "command", lambda name: found[name])
        return tmp_path / "out"

    return make


@pytest.mark.parametrize(("argv", "message"), [
    (["--", "--count", "3"], "--count 3: name the one benchmark"),
    (["prep", "--device", "cpu"], "only transfer runs without"), (["--device", "cpu"], "only transfer runs without"),
    (["transfer", "--", "--out", "else"], "--out behind --"), (["transfer", "--", "--name=else"], "--name behind --"),
    (["prep"], "no CUDA device"), ([], "bench transfer --device cpu"), ([], "beside sglang"),
])  # fmt: skip
def test_what_cannot_be_run_is_refused_before_anything_runs(fakes, capsys, monkeypatch, argv, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "CUDA" not in message and "cpu" not in message)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    if message == "beside sglang":
        monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    out = fakes(transfer=(result(), 0), prep=(result("prep"), 0))
    assert main(["bench", "--out", str(out), *argv]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""
    assert not out.exists()


@pytest.mark.usefixtures("gpu")
def test_both_benchmarks_run_by_default_each_with_its_verdict(fakes, capsys):
    out = fakes(transfer=(result(), 0), prep=(result("prep", ok=False), 1))
    assert main(["bench", "--out", str(out)]) == 1
    said = capsys.readouterr().out
    for text in ("all 1 bounds met", "1 of 1 bounds missed", "transfer.json", "prep.json"):
        assert text in said
    assert "no verdict" in bench.verdict(result(gpu=None))
    assert [json.loads(path.read_text()) for path in out.glob("*.words")] == [[], []], "they are given --out alone"
    assert main(["bench", "transfer", "--out", str(out)]) == 0


@pytest.mark.usefixtures("gpu")
def test_a_benchmark_that_fails_has_no_verdict_and_loses_no_earlier_result(fakes, capsys):
    out = fakes(transfer=(None, 7), prep=(result("prep"), 0))
    out.mkdir()
    earlier = {"transfer.json": json.dumps(result()), "my-notes.txt": "mine"}
    for name, text in earlier.items():
        (out / name).write_text(text)
    assert main(["bench", "--out", str(out)]) == 7
    assert "bounds" not in capsys.readouterr().out
    assert {path.name: path.read_text() for path in out.iterdir() if path.suffix != ".words"} == earlier


@pytest.mark.parametrize("model", ["tiny", "v41"])
def test_the_torch_path_is_measured_where_it_is_asked_for(monkeypatch, tmp_path, capfd, model):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    limit = subject.link_limit
    monkeypatch.setattr(subject, "link_limit", lambda device, arena: limit(device, arena[: 1 << 20]))
    argv = ["--device", "cpu", "--model", model, "--tokens", "255", "--count", "1"]
    monkeypatch.setattr(sys, "argv", [transfer.__file__, "--out", str(tmp_path), *argv])  # as python -m does
    transfer.main()
    said = capfd.readouterr()
    assert "says nothing about a link" in said.out
    found = json.loads((tmp_path / "transfer.json").read_text())
    assert json.loads(said.out.splitlines()[-1])["bounds"] == found["bounds"] == []
    assert found["command"] == f"sglang-dsv4 bench transfer --device cpu -- --model {model} --tokens 255 --count 1"
    assert found["machine"]["gpu"] is None
    assert min(found["rows"][0]["save_ms"], found["rows"][0]["load_ms"]) > 0


def test_bounds_of_a_line():
    row = result()["rows"][0] | {"tokens": 16383, "reference_save_ms": 12.34, "reference_load_ms": 12.34}
    found = {bound["name"]: bound for bound in link_bounds(row, "flash") + peer_bounds(row)}
    assert found["save 16384 of the link"] == results.bound("save 16384 of the link", ">= 0.90", 0.755)
    assert found["save 16384 of the link"]["ok"] is found["load 16384 of the link"]["ok"] is False
    assert found["save 16384 x reference"]["value"] == pytest.approx(10)
    assert (found["save 16384 x reference"]["ok"], found["load 16384 x reference"]["ok"]) == (False, True)
    assert link_bounds(row | {"tokens": 4095}, "flash") == []
    ends = [row | {"tokens": tokens} for tokens in (2047, 262143)]
    assert [len(link_bounds(end, model)) for end in ends for model in ("flash", "v41")] == [2, 0, 2, 0]
    assert link_bounds(row, "v41") == link_bounds(row, "flash")


@pytest.mark.parametrize("command", [
    "demo --requests 1 --device cpu", "drill memory", "bench transfer --device cpu -- --count 1 --tokens 255",
])  # fmt: skip
def test_nothing_is_said_of_a_gpu_that_is_not_needed(tmp_path, command):
    """By the command itself, nor by the process of a benchmark, which imports all anew."""
    words = ["-m", "sglang_dsv4.cli.main", *command.split()]
    done = run_fresh(words, {**os.environ, "PYTHONPATH": str(ROOT)}, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_rows_are_printed_by_their_names(capsys):
    results.show([{"run": "retracts", "stall_p50_ms": 12.34567, "fallbacks": {}, "hits": {"window": 3}, "exit": None}])
    assert capsys.readouterr().out == "run=retracts  stall_p50_ms=12.3457  fallbacks=none  hits.window=3  exit=none\n"
