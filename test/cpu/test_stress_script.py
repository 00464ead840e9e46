"""The stress script: its reading of logs, its judgement, its comparison of tokens, against a fake decode server."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import stress_retract as stress
import witness
from fake_http import Decode, Handler, Incremental, running

pytestmark = pytest.mark.cpu

LOG = """\
[t] saved 700 tokens, 1.9 MB in 1.50 ms; copies alive 1, 0.30 of 1.00 GiB held
[t] saved 300 tokens, 1.7 MB in 2.50 ms; copies alive 2, 0.60 of 1.00 GiB held
[t] KV cache pool is full. Retract requests. #retracted_reqs: 2, #new_tokens_gained: 512
[t] loaded 700 tokens, 1.9 MB in 3.00 ms; copies alive 1, 0.30 of 1.00 GiB held
"""


def test_the_log_is_counted(tmp_path):
    path = tmp_path / "decode.log"
    path.write_text(LOG)
    found = witness.read_log(path)
    assert (found["saves"], found["loads"], found["longest_saved"]) == (2, 1, 700)
    assert (found["copies_alive_at_end"], found["copies_alive_peak"], found["fallbacks"]) == (1, 2, {})
    assert (found["held_high_gib"], found["arena_gib"]) == (0.6, 1.0)
    assert found["saved_bytes"] == pytest.approx(3.6e6)
    assert found["trouble"] == []
    path.write_text(LOG + "[t] Scheduler hit an exception: VerifyMismatch: loaded bytes differ\n")
    assert witness.read_log(path)["trouble"] == ["VerifyMismatch", "Scheduler hit an exception"]


def test_ranks_are_counted_once_and_compared(tmp_path):
    path = tmp_path / "decode.log"
    log = LOG + "[t] no host copy, the engine's own behaviour follows (HostMemoryExhausted): full\n"
    log += "[t] no host copy again (HostMemoryExhausted): full\n"
    first, second = (log.replace("[t]", f"[2026-01-01 00:00:00 TP{rank}]").splitlines() for rank in range(2))
    mixed = [line for pair in zip(first, second, strict=True) for line in pair]
    path.write_text("\n".join(["[2026-01-01 00:00:00] server_args=ServerArgs(tp_size=2)", *mixed]))
    found = witness.read_log(path)
    assert (found["saves"], found["loads"], found["engine_retracts"]) == (2, 1, 2)
    assert (found["ranks"], found["ranks_apart"], found["fallbacks"]) == (2, 0, {"HostMemoryExhausted": 2})
    for changed in (second[:-1], second[1:], second[::-1]):
        path.write_text("\n".join([*first, *changed]))
        assert witness.read_log(path)["ranks_apart"] == 1
    path.write_text("\n".join([*mixed, "[2026-01-01 00:00:00 TP1] Scheduler hit an exception"]))
    assert witness.read_log(path)["trouble"] == ["Scheduler hit an exception"]
    path.write_text(LOG)
    assert (witness.read_log(path)["ranks"], witness.read_log(path)["ranks_apart"]) == (1, 0)


def test_stages_of_a_pipeline_decide_alike(tmp_path):
    path = tmp_path / "decode.log"
    stages = [LOG.replace("[t]", f"[2026-01-01 00:00:00 PP{rank}]") for rank in range(2)]
    path.write_text("".join(stages))
    found = witness.read_log(path)
    assert (found["saves"], found["loads"], found["ranks"], found["ranks_apart"]) == (2, 1, 2, 0)
    path.write_text(stages[0] + stages[1].replace("loaded 700", "loaded 800"))
    assert witness.read_log(path)["ranks_apart"] == 1


def test_data_parallel_ranks_decide_for_themselves_and_are_added_up(tmp_path):
    path = tmp_path / "decode.log"
    places = [("DP0", "TP0"), ("DP0", "TP1"), ("DP1", "TP2"), ("DP1", "TP3")]
    logs = [LOG.replace("[t]", f"[2026-01-01 00:00:00 {dp} {tp} EP0]") for dp, tp in places]
    logs[2:] = [log.replace("saved 300 ", "saved 400 ") for log in logs[2:]]
    path.write_text("".join(logs))
    found = witness.read_log(path)
    assert (found["saves"], found["loads"], found["ranks"], found["ranks_apart"]) == (4, 2, 2, 0)
    assert (found["copies_alive_at_end"], found["copies_alive_peak"]) == (2, 2)
    path.write_text("".join([*logs[:3], logs[3].replace("saved 400 ", "saved 500 ")]))
    assert witness.read_log(path)["ranks_apart"] == 1


class Silent(Handler):
    """Takes requests and answers none."""

    over = threading.Event()

    def do_POST(self) -> None:
        self.over.wait()


@pytest.fixture
def decode():
    with running(Decode) as url:
        yield url
    Decode.bad, Decode.cumulative = {}, True


def run(url: str, **options: object) -> stress.Run:
    arguments = stress.parse(["--model-path", "m", "--requests", "6", "--prompt", "3", "9", "--new-tokens", "4", "8"])
    vars(arguments).update(concurrency=3, timeout=10, **options)
    return stress.Run(stress.Load.of(arguments), arguments, url, None, 1).execute("test")


@pytest.mark.parametrize("cumulative", [True, False])
def test_every_token_is_collected(decode, cumulative):
    Decode.cumulative = cumulative
    found = run(decode)
    summary = found.summary()
    assert (summary["finished"], summary["refused"], summary["lost"]) == (6, 0, 0)
    for answer, prompt, new in zip(found.answers, found.load.prompts, found.load.new_tokens, strict=True):
        assert answer.tokens == [sum(prompt) % 97 + i for i in range(new)]


def test_what_goes_wrong_is_told_apart(decode):
    Decode.bad = {1: "http", 3: "abort", 5: "short"}
    summary = run(decode).summary()
    assert (summary["finished"], summary["refused"], summary["lost"]) == (3, 2, 1)
    assert any("no host copy" in error for error in summary["errors"])
    assert any("HTTP 500" in error for error in summary["errors"])


def test_a_token_that_comes_twice_is_a_lost_request(decode):
    Decode.bad = {2: "twice"}
    found = run(decode)
    wanted = found.load.new_tokens[1]
    assert [answer.outcome for answer in found.answers].count("lost") == 1
    assert found.answers[1].error == f"{wanted + 1} of {wanted} tokens"


@pytest.mark.parametrize(
    ("said", "outcome"),
    [
        ([([7], 1), ([8], 2), ([9], 3), ([4], 4)], "finished"),
        ([([7], 1), ([], 0), ([8], 2), ([9, 4], 4)], "finished"),
        ([([7], 1), ([7, 8], 2), ([9], 3), ([4], 4)], "lost"),
        ([([7], 1), ([8], 2), ([8, 9], 3), ([4], 4)], "lost"),
    ],
)
def test_new_tokens_alone_are_put_together(monkeypatch, said, outcome):
    """As a server with --incremental-streaming-output says them; a token that comes twice is one too many."""
    monkeypatch.setattr(Incremental, "said", said)
    with running(Incremental) as url:
        arguments = stress.parse(["--model-path", "m", "--requests", "1", "--new-tokens", "4", "4"])
        vars(arguments).update(concurrency=1, timeout=10)
        (answer,) = stress.Run(stress.Load.of(arguments), arguments, url, None, 1).execute("test").answers
    assert answer.outcome == outcome
    assert outcome == "lost" or answer.tokens == [7, 8, 9, 4]


class Cut(Handler):
    """Dies in the middle of a chunk."""

    def do_POST(self) -> None:
        self.body()
        self.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n40\r\ndata: ")
        self.close_connection = True

    def do_GET(self) -> None:
        self.begin()


def test_an_answer_that_is_cut_off_is_lost():
    with running(Cut) as url:
        summary = run(url).summary()
    assert summary["lost"] == 6 and "IncompleteRead" in summary["errors"][0]


def test_a_server_that_is_gone_loses_requests_and_is_asked_no_more():
    summary = run("http://127.0.0.1:9").summary()
    assert summary["lost"] == 6
    assert "not sent: the server is gone" in summary["errors"]


def test_nobody_waits_for_the_prefill_of_a_lost_request(decode):
    """A prefill server keeps the cache of a request whose decode server is gone, and never answers."""
    Decode.bad = dict.fromkeys(range(1, 7), "short")
    with running(Silent) as prefill:
        arguments = stress.parse(["--model-path", "m", "--requests", "6", "--new-tokens", "4", "8"])
        vars(arguments).update(concurrency=3, timeout=60)
        found = stress.Run(stress.Load.of(arguments), arguments, decode, prefill, 1).execute("test")
        Silent.over.set()
    assert found.summary()["lost"] == 6
    assert found.seconds < 30


def test_a_server_is_not_mistaken_for_one_that_is_there_already(decode, tmp_path, monkeypatch):
    monkeypatch.setitem(stress.servers.PORTS, "decode", int(decode.rsplit(":", 1)[1]))
    with pytest.raises(stress.servers.ServerDied, match="SERVERS_PORT"):
        stress.servers.launch("decode", "model", [], {}, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "ranks"),
    [
        ([], 1), (["--tp", "2"], 2), (["--tp-size=4", "--dp", "2"], 4), (["--x", "--tp-size", "8"], 8),
        (["--tp", "2", "--pp-size", "3"], 6), (["--tp", "8", "--dp-size", "4", "--enable-dp-attention"], 2),
    ],
)  # fmt: skip
def test_a_server_has_the_ranks_it_is_told(given, ranks):
    assert stress.servers.ranks(given) == ranks


def test_servers_drain_at_once_and_are_killed_in_the_end(tmp_path):
    programs = (
        "sleep(9)",
        "signal(SIGTERM, lambda *_: (sleep(1), sys.exit(7))); sleep(9)",
        "signal(SIGTERM, 1); sleep(9)",
    )
    found = []
    for number, program in enumerate(programs):
        words = f"import sys; from signal import *; from time import sleep; print('up', flush=True); {program}"
        process = subprocess.Popen([sys.executable, "-c", words], stdout=subprocess.PIPE, start_new_session=True)
        assert process.stdout.readline() == b"up\n"
        found.append(stress.servers.Server(f"role {number}", 0, process, tmp_path / "log"))
    time.sleep(0.3)  # the handlers are in place
    began = time.monotonic()
    assert stress.servers.stop_all(found, patience=2) == {"role 0": -15, "role 1": 7, "role 2": None}
    assert time.monotonic() - began < 3.5
    assert not any(server.alive for server in found)
    assert found[1].stop() == 7


def test_a_suspended_server_stands_still_goes_on_and_can_be_stopped(tmp_path):
    words = "import itertools, time\nfor n in itertools.count(): print(n, flush=True); time.sleep(0.01)"
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-c", words], stdout=out, start_new_session=True)
    server = stress.servers.Server("decode", 0, process, log)

    def grows() -> bool:
        before = log.stat().st_size
        time.sleep(0.3)
        return log.stat().st_size > before

    while not log.stat().st_size:
        time.sleep(0.01)
    server.suspend()
    time.sleep(0.1)
    assert not grows() and server.alive
    with server.awake():
        assert grows()
    time.sleep(0.1)
    assert not grows()
    assert server.stop() == -15, "SIGTERM reaches a process only when it goes on"
    server.suspend(), server.wake()  # one that has ended


def test_a_script_that_is_told_to_end_ends_its_servers():
    words = """
import subprocess, sys, time
import servers
servers.end_when_told()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
server = servers.Server("decode", 0, child, None)
server.suspend()
try:
    print(child.pid, flush=True)
    time.sleep(60)
finally:
    servers.stop_all([server], patience=0)
"""
    scripts = Path(stress.__file__).parent
    with subprocess.Popen(
        [sys.executable, "-c", words], cwd=scripts, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as told:
        pid = int(told.stdout.readline())
        told.terminate()
        told.wait(10)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_interrupted_run_ends(decode, monkeypatch):
    monkeypatch.setattr(stress.Run, "_one", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        run(decode)
    assert threading.active_count() <= before


def test_tokens_are_compared_request_by_request(decode):
    first, second = run(decode), run(decode)
    assert stress.same_tokens(first, second) == {"same": 6, "of": 6, "common_beginning": 1.0}
    second.answers[2].tokens[1] += 1
    found = stress.same_tokens(first, second)
    assert found["same"] == 5 and found["common_beginning"] < 1


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({}, []),
        ({"lost": 1}, ["requests lost"]),
        ({"refused": 1}, ["requests refused"]),
        ({"alive": False}, ["server alive at the end"]),
        ({"trouble": ["VerifyMismatch"]}, ["trouble in the log"]),
        ({"saves": 9}, ["retracts with a copy", "saves without a load"]),
        ({"loads": 9}, ["saves without a load"]),
        ({"copies_alive_at_end": 1}, ["copies alive at the end"]),
        ({"ranks": 2, "ranks_apart": 1}, ["ranks that decided otherwise than the first"]),
        ({"ranks": 1}, ["ranks that said what they decided"]),
        ({"verified": 9}, ["loads not compared with their copy"]),
        ({"held_bytes_at_end": 1}, ["host memory held at the end, bytes"]),
        ({"held_bytes_at_end": None}, ["metrics of this package"]),
    ],
)
def test_each_fault_misses_its_bound(change, missed):
    state = {"lost": 0, "refused": 0, "alive": True, "trouble": [], "saves": 10, "loads": 10, "copies_alive_at_end": 0}
    state |= {"ranks": 2, "ranks_apart": 0, "fallbacks": {}, "verified": 10, "held_bytes_at_end": 0}
    state |= change
    assert missed_by(state) == missed


def missed_by(state: dict, **options: object) -> list[str]:
    judged = {"may_refuse": 0, "at_least": 10, "server": ["--tp", "2"], "falls_back": None, "attach": None}
    judged |= {"verify": 1, "stock": False, **options}
    log = {name: value for name, value in state.items() if value is not None}  # what the metrics did not tell
    found = {"log": log, "summaries": [log], "alive": log["alive"]}
    return [bound["name"] for bound in stress.judge(found, SimpleNamespace(**judged)) if not bound["ok"]]


FULL = "HostMemoryExhausted"


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({}, []),
        ({"lost": 1}, ["requests lost"]),
        ({"fallbacks": {"StaleWeights": 3}}, [f"retracts without a copy because of {FULL}"]),
        ({"loads": 9, "verified": 9}, ["saves without a load"]),
    ],
)
def test_retracts_without_a_copy_lose_nothing_and_are_counted(change, missed):
    state = {"lost": 0, "refused": 0, "alive": True, "trouble": [], "saves": 10, "loads": 10, "copies_alive_at_end": 0}
    state |= {"ranks": 2, "ranks_apart": 0, "fallbacks": {FULL: 3}, "verified": 10, "held_bytes_at_end": 0}
    assert missed_by(state | change, falls_back=FULL) == missed


@pytest.mark.parametrize(("way", "steps", "missed"), [("stream", 0, 1), ("stream", 5, 0), ("auto", 0, 0)])
def test_a_builder_that_was_asked_for_and_did_nothing_is_a_fault(monkeypatch, way, steps, missed):
    monkeypatch.setenv("DSV4_PREP", way)
    state = {"lost": 0, "refused": 0, "alive": True, "trouble": [], "saves": 10, "loads": 10, "copies_alive_at_end": 0}
    state |= {"ranks": 2, "ranks_apart": 0, "fallbacks": {}, "verified": 10, "held_bytes_at_end": 0}
    state["prep_steps"] = {"overlapped": steps}
    assert missed_by(state) == ["eager steps prepared here"] * missed


@pytest.mark.parametrize(
    ("same", "repeated", "missed"),
    [(55, 55, []), (48, 55, []), (46, 55, ["control"]), (1, 18, ["compare", "control"]), (18, 18, ["compare"])],
)
def test_tokens_are_judged_by_a_control_that_can_tell(same, repeated, missed):
    bounds = stress.judge_tokens({"same": same}, {"same": repeated, "of": 60})
    assert [bound["name"].rpartition(" ")[2] for bound in bounds if not bound["ok"]] == missed


def test_the_stall_is_the_median_of_one_longest_gap_a_retract():
    answers = [stress.Answer("finished", gaps_ms=gaps) for gaps in ([3.0, 90.0, 4.0], [70.0, 5.0, 80.0])]
    assert stress.stall_ms(answers, 3) == 80.0
    assert stress.stall_ms(answers, 1) == 90.0
    assert stress.stall_ms(answers, 0) == 0.0
