"""Runs the benchmark of a plain server under pressure over fake ones: a bad result misses its bounds."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

from fake_http import Plain, running

from benchmarks import plain_pressure as pressure
from benchmarks.plain_pressure import PACKAGE, STOCK

RETRACTED = "[t] KV cache pool is full. Retract requests. #retracted_reqs: 60, #new_tokens_gained: 9\n"
PREFILL = "[t] Prefill batch, #new-seq: 1, #new-token: 500, #cached-token: 0, #running-req: 3\n"
LOADED = "[t] loaded 700 tokens, 1.9 MB in 1.50 ms; copies alive 0, 0.00 of 1.00 GiB held\n"


LOW_END = "the same, low end of the 99% interval"


def missed(bounds):
    return [bound["name"] for bound in bounds if not bound["ok"]]


def test_a_run_under_pressure_gives_its_rows_and_misses_what_is_bad(tmp_path, monkeypatch):
    words = ["--model-path", "m", "--rounds", "2", "--conversations", "6", "--concurrency", "2", "--shared", "9",
             "--prompt", "3", "40", "--new-tokens", "4", "9"]  # fmt: skip
    arguments = pressure.parse(words)
    posts = pressure.servers.post
    with running(Plain) as url:
        servers = {
            name: SimpleNamespace(url=url, log=tmp_path / file, awake=contextlib.nullcontext, wake=int, suspend=int)
            for name, file in ((PACKAGE, "package.log"), (STOCK, "stock.log"))
        }
        for server in servers.values():
            server.log.touch()

        def post(where, path, body, timeout):
            if not path.startswith("/flush"):
                return posts(where, path, body, timeout)
            for name, one in servers.items():
                one.log.write_text(one.log.read_text() + RETRACTED + PREFILL + LOADED * (name == PACKAGE))

        monkeypatch.setattr(pressure.servers, "post", post)
        monkeypatch.setattr(pressure, "counted_at", lambda _: {"held_bytes_at_end": 0})
        rows = pressure.measure(servers, arguments)
    for row in rows:
        if row["run"] in servers:
            assert (row["whole"], row["engine_retracts"], row["loads"]) == (12, 60, int(row["run"] == PACKAGE))
            row["busy_tokens_a_second"] = 110.0 if row["run"] == PACKAGE else 100.0
    assert missed(pressure.judge(rows, arguments)) == []
    one = next(row for row in rows if row["run"] == PACKAGE and row["round"] == 0)
    for key, value, bound in (
        ("whole", 11, "requests without a whole answer, but for those cut off"),
        ("trouble", ["leak detected"], "trouble in the log"), ("busy_tokens_a_second", 95.0, LOW_END),
    ):  # fmt: skip
        changed = [row | {key: value} if row is one else row for row in rows]
        assert bound in missed(pressure.judge(changed, arguments)), key
    beside_hicache = pressure.parse([*words, "--", "--enable-hierarchical-cache"])
    for rate, slow in ((98.5, False), (97.5, True)):
        changed = [row | {"busy_tokens_a_second": rate} if row is one else row for row in rows]
        assert (LOW_END in missed(pressure.judge(changed, beside_hicache))) == slow, rate
        assert LOW_END in missed(pressure.judge(changed, arguments))
