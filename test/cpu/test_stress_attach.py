"""The stress script on servers that run already: what their metrics and their log say, against a fake decode server."""

from __future__ import annotations

import json
import sys

import prometheus_client
import pytest
import stress_retract as stress
import witness
from fake_http import Decode, running

from sglang_dsv4.metrics import Exporter


class Running(Decode):
    """A server that runs already: two tensor-parallel ranks of one replica, whose counters grow with each request."""

    served, held_by_rank = 0, (3, 3)
    dark, verifies = False, True

    def do_POST(self) -> None:
        type(self).served += 1
        super().do_POST()

    def do_GET(self) -> None:
        if self.path == "/model_info":
            self.begin()
            return
        self.begin(404 if self.dark else 200)
        for rank in () if self.dark else range(2):
            registry = prometheus_client.CollectorRegistry()
            labels = {"tp_rank": str(rank), "pp_rank": "0", "dp_rank": "0"}
            exporter = Exporter(labels, 2**30, registry)
            for _ in range(self.held_by_rank[rank] + self.served):
                exporter.saved(1000, 0.002)
                exporter.loaded(1000, 0.004)
                if self.verifies:
                    exporter.verified()
            exporter.fell_back("StaleWeights")
            exporter.holds(0, 0, 2**29)
            self.wfile.write(prometheus_client.generate_latest(registry))


@pytest.fixture
def attached(tmp_path, monkeypatch):
    """Runs the script on a ``Running`` server; returns its exit status and its result."""
    monkeypatch.setattr(stress.time, "sleep", lambda _: None)

    def attach(*more: str) -> tuple[int, dict]:
        words = ["--attach", url, "--requests", "6", "--prompt", "3", "9", "--new-tokens", "4", "8"]
        monkeypatch.setattr(sys, "argv", ["stress", *words, "--out", str(tmp_path), *more])
        status = stress.main()
        path = tmp_path / "stress.json"
        return status, json.loads(path.read_text()) if path.exists() else {}

    with running(Running) as url:
        yield attach
    Running.served, Running.held_by_rank, Running.dark, Running.verifies = 0, (3, 3), False, True


def test_a_server_that_runs_is_told_by_its_metrics(attached):
    status, found = attached("--at-least", "6")
    row = found["rows"][0]
    assert status == 0, found["bounds"]
    assert (row["finished"], row["saves"], row["loads"], row["verified"]) == (6, 6, 6, 6)
    assert (row["saved_bytes"], row["save_ms_mean"], row["load_ms_mean"]) == pytest.approx((6000, 2, 4))
    assert (row["held_bytes_at_end"], row["prep_steps"], row["prep_left"]) == (0, {}, {})
    assert (row["held_high_gib"], row["arena_gib"], row["ranks"], row["ranks_apart"]) == (0.5, 1.0, 2, 0)
    assert row["fallbacks"] == {}, "what happened before is not counted"
    assert "trouble in the log" not in {bound["name"] for bound in found["bounds"]}, "metrics tell of none"


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({"verifies": False}, ["loads not compared with their copy"]),
        ({"held_by_rank": (3, 4)}, []),  # before the run
    ],
)
def test_what_the_metrics_miss_is_a_miss(attached, change, missed):
    for name, value in change.items():
        setattr(Running, name, value)
    status, found = attached()
    assert [bound["name"] for bound in found["bounds"] if not bound["ok"]] == missed and status == bool(missed)
    if "verifies" in change:
        assert attached("--verify", "0")[0] == 0


def test_ranks_that_count_otherwise_are_apart():
    def ranks(*saves: float) -> dict:
        return {("0", "0", str(rank)): {"saves": n, "copies": 1.0} for rank, n in enumerate(saves)}

    assert witness.between(ranks(1, 2, 3), ranks(2, 3, 4))["ranks_apart"] == 0
    assert witness.between(ranks(1, 1, 1), ranks(2, 2, 3))["ranks_apart"] == 1
    replicas = {("0", "0", "0"): {"saves": 1.0}, ("1", "0", "0"): {"saves": 5.0}}
    assert {name: witness.between({}, replicas)[name] for name in ("saves", "ranks", "ranks_apart")} == {
        "saves": 6, "ranks": 1, "ranks_apart": 0,
    }  # fmt: skip


def test_a_server_that_runs_is_told_by_its_log(attached, tmp_path, monkeypatch):
    Running.dark = True
    log = tmp_path / "decode.log"
    line = "[t] {} {} tokens, 1.9 MB in 1.50 ms; copies alive {}, 0.30 of 1.00 GiB held\n"
    log.write_text(line.format("saved", 900, 1))

    class Writing(stress.Witness):
        def tell(self):
            with log.open("a") as out:
                out.write(line.format("saved", 300, 2) + line.format("loaded", 300, 1))
            return super().tell()

    monkeypatch.setattr(stress, "Witness", Writing)
    missed = [bound["name"] for bound in attached("--log", str(log))[1]["bounds"] if not bound["ok"]]
    assert "loads not compared with their copy" in missed, "a log does not tell"
    status, found = attached("--log", str(log), "--verify", "0")
    row = found["rows"][0]
    assert (row["saves"], row["loads"], row["longest_saved"]) == (1, 1, 300), "of the run's own lines alone"
    assert status == 1 and row["copies_alive_at_end"] == 1
    assert "trouble in the log" in {bound["name"] for bound in found["bounds"]}


def test_a_server_that_tells_nothing_is_refused(attached, capsys):
    Running.dark = True
    assert attached() == (2, {})
    assert "--enable-metrics" in capsys.readouterr().err and Running.served == 0


def test_options_of_another_kind_of_run_are_refused():
    for words in (
        [],
        ["--attach", "http://u:1", "--model-path", "m"],
        ["--attach", "http://u:1", "--compare"],
        ["--attach", "http://u:1", "--", "--tp", "2"],
        ["--attach", "u"],
        ["--attach", "http://u:1", "--prefill-url", "u"],
        ["--model-path", "m", "--bootstrap-port", "8998"],
        ["--model-path", "m", "--log", "f"],
        ["--model-path", "m", "--prefill-url", "u"],
    ):
        with pytest.raises(SystemExit):
            stress.parse(words)


def test_the_prefill_server_of_another_host_is_named(monkeypatch):
    seen, fed = [], []
    monkeypatch.setattr(stress.Run, "_stream", lambda _, body, wanted: seen.append(body) or stress.Answer("refused"))
    monkeypatch.setattr(stress.servers, "feed", lambda url, body, timeout: fed.append((url, body)))
    words = ["--attach", "http://decode.example:2/", "--prefill-url", "http://prefill.example:1/", "--requests", "1"]
    arguments = stress.parse([*words, "--bootstrap-port", "1234"])
    given = (arguments.attach, arguments.prefill_url, 7, arguments.bootstrap_port)
    stress.Run(stress.Load.of(arguments), arguments, *given).execute("test")
    where = {"bootstrap_host": "prefill.example", "bootstrap_port": 1234, "bootstrap_room": 7}
    assert seen[0] | where == seen[0] and fed == [("http://prefill.example:1", seen[0])]
