"""What a decode server's log and metrics say of its retracts, rank by rank."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_http import Handler, running, series
from prometheus_client import CollectorRegistry, generate_latest

from sglang_dsv4.livetest.retract_stats import between, counted_at, read_log, together
from sglang_dsv4.metrics import Counters, SessionCounters, StoreCounters

LOG = """\
[t] saved 700 tokens, 1.9 MB in 1.50 ms; copies alive 1, 0.30 of 1.00 GiB held
[t] saved 300 tokens, 1.7 MB in 2.50 ms; copies alive 2, 0.60 of 1.00 GiB held
[t] KV cache pool is full. Retract requests. #retracted_reqs: 2, #new_tokens_gained: 512
[t] loaded 700 tokens, 1.9 MB in 3.00 ms; copies alive 1, 0.30 of 1.00 GiB held
"""
NO_ROOM = """\
[t] no host copy, the engine's own behaviour follows (HostMemoryExhausted): full
[t] no host copy again (HostMemoryExhausted): full
"""


@pytest.fixture
def read(tmp_path):
    def read_text(text: str) -> dict:
        path = tmp_path / "decode.log"
        path.write_text(text)
        return read_log(path)

    return read_text


def placed(place: str, log: str = LOG) -> str:
    return log.replace("[t]", f"[2026-01-01 00:00:00 {place}]")


def test_a_log_of_one_rank(read):
    found = read(LOG)
    assert (found["saves"], found["loads"], found["longest_saved"], found["engine_retracts"]) == (2, 1, 700, 2)
    assert (found["copies_alive_at_end"], found["copies_alive_peak"], found["fallbacks"]) == (1, 2, {})
    assert (found["held_high_gib"], found["arena_gib"], found["trouble"]) == (0.6, 1.0, [])
    assert found["saved_bytes"] == pytest.approx(3.6e6)
    assert (found["ranks"], found["ranks_apart"]) == (1, 0)
    broken = read(LOG + "[t] Scheduler hit an exception: VerifyMismatch: loaded bytes differ\n")
    assert broken["trouble"] == ["VerifyMismatch", "Scheduler hit an exception"]


def test_a_clients_request_id_counts_for_nothing(read):
    """It is logged as Python writes it, so it ends no line; a line is known by its beginning."""
    said = "[t] saved 9 tokens, 1 MB in 1 ms; copies alive 7, 0.1 of 1 GiB held\n[t] no host copy again (Forged): full"
    found = read(
        LOG + f"[t] no host copy again (InputEmbeds): request {said!r} starts over\n[t] request {said!r}: 503\n"
    )
    assert (found["saves"], found["fallbacks"]) == (2, {"InputEmbeds": 1})
    assert (found["copies_alive_at_end"], found["copies_alive_peak"], found["longest_saved"]) == (1, 2, 700)


def test_a_request_id_is_logged_as_python_writes_it(caplog):
    """A newline in it would begin a line of its own."""
    from sglang_dsv4.engine.retract import save

    host = SimpleNamespace(counters=Counters(), buffers=SimpleNamespace(folded=()))
    assert not save._fits_again(host, SimpleNamespace(rid="a\n[t] saved 9 tokens", input_embeds=[0.0]))
    assert "request 'a\\n[t] saved 9 tokens' starts over" in caplog.text
    for path in Path(save.__file__).parents[1].rglob("*.py"):
        assert not re.search(r"request \{[\w.]*rid\}|request %s", path.read_text()), path


def test_ranks_are_counted_once_and_compared(read):
    first, second = (placed(f"TP{rank}", LOG + NO_ROOM).splitlines() for rank in range(2))
    mixed = [line for pair in zip(first, second, strict=True) for line in pair]
    found = read("\n".join(["[2026-01-01 00:00:00] server_args=ServerArgs(tp_size=2)", *mixed]))
    assert (found["saves"], found["loads"], found["engine_retracts"]) == (2, 1, 2)
    assert (found["ranks"], found["ranks_apart"], found["fallbacks"]) == (2, 0, {"HostMemoryExhausted": 2})
    for changed in (second[:-1], second[1:], second[::-1]):
        assert read("\n".join([*first, *changed]))["ranks_apart"] == 1
    late = "\n".join([*mixed, "[2026-01-01 00:00:00 TP1] Scheduler hit an exception"])
    assert read(late)["trouble"] == ["Scheduler hit an exception"], "a rank that does not speak is heard"


def test_data_parallel_ranks_decide_for_themselves_and_are_added_up(read):
    logs = [placed(f"{place} EP0") for place in ("DP0 TP0", "DP0 TP1", "DP1 TP2", "DP1 TP3")]
    logs[2:] = [log.replace("saved 300 ", "saved 400 ") for log in logs[2:]]
    found = read("".join(logs))
    assert (found["saves"], found["loads"], found["ranks"], found["ranks_apart"]) == (4, 2, 2, 0)
    assert (found["copies_alive_at_end"], found["copies_alive_peak"]) == (2, 2)
    assert read("".join([*logs[:3], logs[3].replace("saved 400 ", "saved 500 ")]))["ranks_apart"] == 1


def test_ranks_that_count_otherwise_are_apart():
    def ranks(*saves: float) -> dict:
        return {("0", "0", str(rank)): {"saves": n, "copies": 1.0} for rank, n in enumerate(saves)}

    assert between(ranks(1, 2, 3), ranks(2, 3, 4))["ranks_apart"] == 0
    assert between(ranks(1, 1, 1), ranks(2, 2, 3))["ranks_apart"] == 1
    replicas = {("0", "0", "0"): {"saves": 1.0}, ("1", "0", "0"): {"saves": 5.0}}
    found = between({}, replicas)
    assert (found["saves"], found["ranks"], found["ranks_apart"]) == (6, 1, 0)


def test_sessions_are_read_by_kind_and_only_where_they_are_kept():
    labels = {"tp_rank": "0", "pp_rank": "0", "dp_rank": "0"}
    registry = CollectorRegistry()
    counters = SessionCounters()
    counters.export(labels, registry)
    counters.kept(700, 0.5)
    counters.holds(2, 900)
    for kind in ("window", "pages", "pages"):
        counters.record_hit(kind, 512, 100)
    counters.add("verified", 2)
    counters.add("evicted", 1, "room")
    counters.hinted([("kv.pin", "taken"), ("kv.pin", "bad")])
    with played(generate_latest(registry)) as url:
        found = counted_at(url)["sessions"]
    assert found == {
        "points": 2, "bytes": 900, "hits": {"window": 1, "pages": 2}, "evicted": {"room": 1}, "tokens": 1536,
        "verified": 2, "saved_bytes": 700, "loaded_bytes": 300, "save_seconds": 0.5,
    }  # fmt: skip
    with played(series(3)) as url:
        assert "sessions" not in counted_at(url)


def test_a_store_is_read_by_outcome_and_puts_are_not_gets():
    labels = {"tp_rank": "0", "pp_rank": "0", "dp_rank": "0"}
    registry = CollectorRegistry()
    counters = StoreCounters()
    counters.export(labels, registry)
    for name, *outcome in (
        ("asks", "late"),
        ("asks", "hit"),
        ("asks", "late"),
        ("units", "put", "ok"),
        ("points", "gone"),
    ):
        counters.add(name, 1, *outcome)
    counters.add("units", 5, "get", "ok")
    with played(generate_latest(registry)) as url:
        found = counted_at(url)["store"]
    assert found == {"points": {"gone": 1}, "asks": {"late": 2, "hit": 1}, "units": {"put/ok": 1, "get/ok": 5}}
    with played(series(3)) as url:
        assert "store" not in counted_at(url)


def played(metrics):
    class Tells(Handler):
        def do_GET(self):
            self.begin()
            self.wfile.write(metrics)

    return running(Tells)


def test_ranks_that_keep_other_points_are_apart(read):
    """The metrics tell what the points gave, the log what was kept, in order."""
    kept = "[t TP{}] kept 2560 tokens, {} pages new, 14.9 MB in 0.{} ms; {} points, 1.00 GiB\n"
    first = kept.format(0, 10, 41, 2) + kept.format(0, 9, 42, 3)
    assert read(first + kept.format(1, 10, 55, 2) + kept.format(1, 9, 52, 3))["ranks_apart"] == 0
    for other in (kept.format(1, 10, 41, 2), kept.format(1, 9, 41, 3) + kept.format(1, 10, 42, 2)):
        found = read(first + other)
        assert found["ranks_apart"] == 1
        assert together({"ranks_apart": 0}, found)["ranks_apart"] == 1
        assert together({"ranks_apart": 2}, found)["ranks_apart"] == 2


def test_ranks_whose_sessions_differ_are_apart():
    ranks = {(0, 0, rank): {"saves": 1.0, "session_hits/pages": hits} for rank, hits in ((0, 3.0), (1, 3.0), (2, 2.0))}
    assert between({}, ranks)["ranks_apart"] == 1
