"""The decode benchmark: its arithmetic on made-up passes, its pass over a fake decode server, its judgement."""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import bench_decode as bench
import decode_pairs
import numpy as np
import pytest
from fake_http import Handler, running


class Decode(Handler):
    """Streams what was asked for with a pause a token; ``slow`` gets a long one, ``broken`` ends early."""

    pause, slow = 0.001, 0.0
    broken = False
    seen: ClassVar[list[dict]] = []

    def do_POST(self) -> None:
        body = self.body()
        self.seen.append(body)
        self.begin()
        count = body["sampling_params"]["max_new_tokens"] - self.broken
        for end in range(1, count + 1):
            time.sleep(self.slow if self.slow and end == 3 else self.pause)
            meta = {"completion_tokens": end, "finish_reason": None}
            self.chunk({"output_ids": [7] * end, "meta_info": meta})


@pytest.fixture
def decode():
    with running(Decode) as url:
        yield url
    Decode.slow, Decode.broken = 0.0, False
    Decode.seen.clear()


def arguments(*more: str) -> SimpleNamespace:
    found = bench.parse(["--model-path", "m", "--batches", "1", "3", "--new-tokens", "14", "--prompt", "5", "9", *more])
    found.timeout = 10
    return found


def made_up(
    round_: int, variant: str, speed: float, batch: int = 1, gap: float | None = None, lost: int = 0
) -> bench.Pass:
    return bench.Pass(round_, variant, batch, lost, speed, 1e3 / speed if gap is None else gap, 2e3 / speed)


def runs(factor: float, rounds: int = 3, passes: int = 6, noise: float = 0.01, seed: int = 0) -> list[bench.Pass]:
    """Rounds that differ much from one another, passes that differ little; the package ``factor`` times as fast."""
    draw = np.random.default_rng(seed)
    found = []
    for round_ in range(rounds):
        level = 1000 * (1 + round_)
        for variant, by in (("stock", 1.0), ("package", factor)):
            found += [
                made_up(round_, variant, level * by * (1 + noise * draw.standard_normal())) for _ in range(passes)
            ]
    return found


@pytest.mark.parametrize("factor", [0.9, 1.0, 1.25])
def test_the_interval_holds_the_ratio_and_rounds_cancel(factor):
    middle, low, high = decode_pairs.ratio(runs(factor), 1, "tokens_a_second")
    assert low < factor < high and low < middle < high
    assert high - low < 0.04, "rounds are drawn together for both kinds: their levels must not widen the interval"


@pytest.mark.parametrize("confidence", [0.8, 0.9])
def test_the_interval_covers_as_often_as_it_says(monkeypatch, confidence):
    monkeypatch.setattr(decode_pairs, "DRAWS", 1000)
    found = [decode_pairs.ratio(runs(1.1, 1, 30, 0.05, seed), 1, "tokens_a_second", confidence) for seed in range(300)]
    covered = np.mean([low <= 1.1 <= high for _, low, high in found])
    assert covered == pytest.approx(confidence, abs=0.04)


def test_servers_that_differ_from_start_to_start_widen_the_interval():
    passes = []
    for round_, by in enumerate((0.9, 1.0, 1.1)):
        for _ in range(9):
            passes += [made_up(round_, "stock", 1000), made_up(round_, "package", 1000 * by)]
    assert decode_pairs.ratio(passes, 1, "tokens_a_second") == pytest.approx((1.0, 0.9, 1.1))


def test_what_slows_both_passes_of_a_pair_does_not_widen_the_interval():
    weather = np.random.default_rng(0).uniform(0.5, 1.0, 12)
    passes = [made_up(0, kind, 1000 * by * w) for kind, by in (("stock", 1), ("package", 1.1)) for w in weather]
    assert decode_pairs.ratio(passes, 1, "tokens_a_second") == pytest.approx((1.1, 1.1, 1.1))


@pytest.mark.parametrize("factor", [0.95, 1.0])
def test_passes_that_share_a_core_do_not_decide(factor):
    """As seen on live servers: some passes of either kind take half as long again."""
    draw = np.random.default_rng(2)
    found = []
    for p in runs(factor, 2, 40):
        slowed = 1.45 if draw.random() < 0.2 else 1.0
        found.append(dataclasses.replace(p, tokens_a_second=p.tokens_a_second / slowed))
    middle, low, high = decode_pairs.ratio(found, 1, "tokens_a_second")
    assert low < factor < high and middle == pytest.approx(factor, abs=0.01) and high - low < decode_pairs.RESOLUTION


def test_the_control_is_compared_as_the_package_is():
    passes = runs(0.9)
    passes += [dataclasses.replace(p, variant="control") for p in runs(1.02, seed=3) if p.variant == "package"]
    row = decode_pairs.summarise(passes, SimpleNamespace(batches=[1]))[0]
    assert (row["tokens_a_second_ratio"], row["control_tokens_a_second_ratio"]) == pytest.approx((0.9, 1.02), abs=0.02)
    assert row["control_tokens_a_second_low"] < 1.02 < row["control_tokens_a_second_high"]
    lines = decode_pairs.table_of([row])
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| 1, package", "| 1, control"]
    bounds = decode_pairs.judge([row], passes, SimpleNamespace(batches=[1]))
    assert not all(bound["ok"] for bound in bounds), "the package is judged, not the control"


def test_a_control_is_a_second_stock_server(monkeypatch):
    order = []
    monkeypatch.setattr(bench, "serving", lambda group, _: nullcontext({kind: kind for kind in group}))
    monkeypatch.setattr(
        bench, "one_pass", lambda server, kind, batch, *_: order.append(kind) or made_up(*kind, 1.0, batch)
    )
    bench.measure(arguments("--together", "--control", "--rounds", "1", "--passes", "2", "--warm-up", "0"))
    assert [variant for _, variant in order[:3]] == ["stock", "package", "control"]
    assert [variant for _, variant in order[6:9]] == ["control", "package", "stock"]
    assert bench.environment_of("control", "stream") == bench.environment_of("stock", "stream")


def test_what_the_median_hides_is_counted():
    passes = [made_up(0, kind, 1000) for kind in bench.VARIANTS for _ in range(12)]
    passes += [made_up(0, kind, by) for kind, by in (("stock", 1000), ("package", 700)) for _ in range(5)]
    row = decode_pairs.summarise(passes, SimpleNamespace(batches=[1]))[0]
    assert (row["tokens_a_second_ratio"], row["stock_slow"], row["package_slow"]) == (1.0, 0, 5)
    json.dumps(row)
    assert decode_pairs.table_of([row])[2].endswith("| 0, 5 of 17 |")


def test_passes_that_do_not_differ_have_no_interval():
    assert decode_pairs.ratio(runs(1.5, rounds=1, noise=0), 1, "tokens_a_second") == pytest.approx((1.5, 1.5, 1.5))


def test_only_the_batch_asked_for_counts():
    others = [dataclasses.replace(p, batch=4, tokens_a_second=1.0) for p in runs(1.0)]
    assert decode_pairs.ratio(runs(1.2) + others, 1, "tokens_a_second")[0] == pytest.approx(1.2, rel=0.02)


@pytest.mark.parametrize(
    ("passes", "missed"),
    [
        (runs(1.0), []),
        (runs(1.3), []),
        (runs(0.9), ["tokens a second, high end", "inter-token p50, low end"]),
        (runs(1.0, noise=0.3), ["tokens a second, width of the interval"]),
        ([*runs(1.0)[:-1], made_up(2, "package", 3000.0, lost=1)], ["requests lost"]),
        ([*runs(1.0)[:-1], made_up(2, "package", 3000.0, gap=math.nan)], ["inter-token p50, low end"]),
    ],
)
def test_each_fault_misses_its_bound(passes, missed):
    judged = SimpleNamespace(batches=[1])
    bounds = decode_pairs.judge(decode_pairs.summarise(passes, judged), passes, judged)
    assert [bound["name"].rpartition(": ")[2] for bound in bounds if not bound["ok"]] == missed


def test_a_row_states_medians():
    passes = [*runs(1.0, 1, 5, noise=0), made_up(0, "stock", 10.0), made_up(0, "package", 10.0)]
    found = decode_pairs.summarise(passes, SimpleNamespace(batches=[1]))[0]
    assert (found["stock_tokens_a_second"], found["package_gap_p50_ms"]) == pytest.approx((1000, 1.0))


def test_a_row_states_both_kinds():
    found = decode_pairs.summarise(runs(2.0, noise=0), SimpleNamespace(batches=[1]))[0]
    assert (found["batch"], found["passes"]) == (1, 18)
    assert (found["stock_tokens_a_second"], found["package_tokens_a_second"]) == pytest.approx((2000, 4000))
    assert found["gap_p50_ms_ratio"] == pytest.approx(0.5)
    assert len(decode_pairs.table_of([found])) == 3 and "2000, 4000 | 2.000" in decode_pairs.table_of([found])[2]


class Up:
    """A server that says when it is awake."""

    def __init__(self, url: str) -> None:
        self.url, self.log, self.awakes, self.is_awake = url, Path("logs/decode.log"), 0, False

    @contextmanager
    def awake(self):
        self.awakes, self.is_awake = self.awakes + 1, True
        yield self
        self.is_awake = False


STOCK = (0, "stock")


def test_a_pass_measures_the_server(decode):
    server = Up(decode)
    found = bench.one_pass(server, STOCK, 3, 50, arguments())
    assert server.awakes == 1 and not server.is_awake
    assert (found.lost, found.batch) == (0, 3)
    assert 1.0 <= found.gap_p50_ms <= found.gap_p99_ms
    assert found.tokens_a_second <= 3 * 1000
    assert {body["bootstrap_room"] for body in Decode.seen} == {50, 51, 52}


def test_the_ramp_is_left_out(decode):
    Decode.slow = 0.2
    assert bench.one_pass(Up(decode), STOCK, 1, 1, arguments()).gap_p99_ms < 100


def test_a_request_that_ends_early_is_lost(decode):
    Decode.broken = True
    assert bench.one_pass(Up(decode), STOCK, 3, 1, arguments()).lost == 3


def test_a_server_that_is_gone_ends_the_measurement(monkeypatch):
    with pytest.raises(bench.servers.ServerDied, match=r"the stock server: .*decode\.log"):
        bench.one_pass(Up("http://127.0.0.1:9"), STOCK, 2, 1, arguments())


FOUR = [(0, "stock"), (0, "package"), (1, "stock"), (1, "package")]


@pytest.mark.parametrize(("together", "order"), [(False, [[kind] for kind in FOUR]), (True, [FOUR])])
def test_rounds_and_passes_take_turns(monkeypatch, together, order):
    groups, log = [], []

    @contextmanager
    def serving(group, _):
        groups.append(list(group))
        yield {kind: kind for kind in group}

    def one_pass(server, kind, batch, room, _):
        assert server == kind
        log.append((*kind, batch, room))
        return made_up(*kind, 1.0, batch)

    monkeypatch.setattr(bench, "serving", serving)
    monkeypatch.setattr(bench, "one_pass", one_pass)
    more = ["--rounds", "2", "--passes", "3", "--warm-up", "1", *(["--together"] if together else [])]
    kept = bench.measure(arguments(*more))
    assert groups == order
    assert len(log) == 2 * 2 * 2 * 4 and len(kept) == 2 * 2 * 2 * 3
    for kind in FOUR:  # no room twice on one server
        rooms = [n for r, v, batch, room in log if (r, v) == kind for n in range(room, room + batch)]
        assert len(rooms) == len(set(rooms)) == 4 * 4
    if together:  # the passes of a pair follow each other, and neither kind is always first
        pairs = [(first[0], first[2], second[0], second[2]) for first, second in zip(log[::2], log[1::2], strict=True)]
        assert all(pair[:2] == pair[2:] for pair in pairs)
        assert {first[1] for first in log[::2]} == set(bench.VARIANTS)


def test_the_requests_are_the_same_every_time():
    first, second = bench.load_of(3, arguments()), bench.load_of(3, arguments())
    assert first == second and first.new_tokens == [14] * 3
    assert bench.load_of(3, arguments("--seed", "2")) != first
    assert all(5 <= len(prompt) <= 9 for prompt in first.prompts)


def test_the_variants_differ_in_the_package_alone():
    stock, package = (bench.environment_of(variant, "stream") for variant in bench.VARIANTS)
    assert {name for name in stock.keys() | package.keys() if stock.get(name) != package.get(name)} == {
        "DSV4_ENABLED", "DSV4_PREP",
    }  # fmt: skip
    assert "DSV4_PREP" not in bench.environment_of("package", None)


@pytest.mark.parametrize("variant", bench.VARIANTS)
def test_a_server_of_the_wrong_kind_is_refused(tmp_path, variant):
    logs = {"stock": tmp_path / "a", "package": tmp_path / "b"}
    logs["stock"].write_text("up\n")
    logs["package"].write_text("[t] host copies: 4.00 GiB, block 9 blocks\nup\n")
    bench.check_kind(variant, None, logs[variant])
    other = next(name for name in bench.VARIANTS if name != variant)
    with pytest.raises(bench.WrongServer, match=variant):
        bench.check_kind(variant, None, logs[other])


def test_a_server_without_the_builder_asked_for_is_refused(tmp_path):
    log = tmp_path / "log"
    log.write_text("[t] host copies: 4.00 GiB, block 9 blocks\n")
    bench.check_kind("package", "engine", log)
    for prep in ("stream", "auto"):
        with pytest.raises(bench.WrongServer, match="decode metadata"):
            bench.check_kind("package", prep, log)
    log.write_text(log.read_text() + "[t] decode metadata of eager steps is prepared by this package (auto)\n")
    for prep in ("auto", None):
        bench.check_kind("package", prep, log)
    with pytest.raises(bench.WrongServer, match="decode metadata"):
        bench.check_kind("package", "engine", log)


def test_the_lines_looked_for_are_the_packages_own():
    package = Path(bench.__file__).resolve().parent.parent / "sglang_dsv4"
    sources = "".join(path.read_text() for path in sorted(package.rglob("*.py")))
    for line in (bench.PACKAGE_AT_WORK, bench.PREP_AT_WORK, bench.LEFT_TO_ENGINE.pattern.partition("(")[0]):
        assert f'"{line}' in sources


def test_servers_are_apart_and_stopped_whatever_happens(tmp_path, monkeypatch):
    launched, stopped, suspended = [], [], []

    class Process:
        pid = 0

        def poll(self):
            return None

    def launch(role, model, options, environment, folder, apart):
        log = folder / "decode.log"
        folder.mkdir(parents=True)
        log.write_text("up\n")  # the package is at work in none of them
        launched.append((apart, options, environment["DSV4_ENABLED"]))
        return bench.servers.Server(role, bench.servers.PORTS[role] + apart, Process(), log)

    monkeypatch.setattr(bench.servers, "launch", launch)
    monkeypatch.setattr(bench.servers, "wait_until_up", lambda *_: None)
    monkeypatch.setattr(bench.servers, "stop_all", lambda found, patience: stopped.extend(found))
    found = arguments("--logs", str(tmp_path), "--", "--disable-cuda-graph")
    monkeypatch.setattr(bench.servers.Server, "_signal", lambda server, which: suspended.append((server, which)))
    with bench.serving([STOCK], found) as started:
        assert started[STOCK].url.endswith(str(bench.servers.PORTS["decode"]))
        assert suspended == [(started[STOCK], signal.SIGSTOP)]
    with pytest.raises(bench.WrongServer), bench.serving(FOUR[2:], found):
        pass
    ports = [apart for apart, *_ in launched]
    assert ports[0] == ports[1] == 0 < ports[2]
    assert all(options == ["--disable-cuda-graph"] for _, options, _ in launched)
    assert [enabled for *_, enabled in launched] == ["0", "0", "1"]
    assert len(stopped) == 3


def test_arguments_that_measure_nothing_are_refused():
    with pytest.raises(SystemExit):
        arguments("--passes", "0")
    with pytest.raises(SystemExit):
        arguments("--together", "--", "--tp", "2")
    assert arguments("--", "--disable-cuda-graph").server == ["--disable-cuda-graph"]
