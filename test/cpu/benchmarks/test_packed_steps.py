"""What the benchmark of forwards with packed pages notes of a server, and what it makes of its notes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.packed import step
from benchmarks.packed.timed_steps import clock
from benchmarks.shapes import write_model
from sglang_dsv4.livetest import servers


class Event:
    """An event of a pretended stream, on which each forward takes as long as it has requests."""

    def __init__(self, stream: list[float]) -> None:
        self.stream, self.at = stream, 0.0

    def record(self, stream: list[float]) -> None:
        assert stream is self.stream
        self.at = sum(stream)

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


def test_what_a_forward_takes_is_noted_when_others_have_followed(tmp_path: Path) -> None:
    stream: list[float] = []
    steps = clock.Steps(tmp_path / "notes", lambda: Event(stream))
    scheduler = SimpleNamespace(forward_stream=stream)
    for number in range(1, 4 + clock.BEHIND):
        mode = SimpleNamespace(is_decode=lambda number=number: number % 2 == 0)
        batch = SimpleNamespace(forward_mode=mode, reqs=[None] * number, extend_num_tokens=100 * number)
        assert steps.run_batch(lambda _, batch: stream.append(len(batch.reqs)), scheduler, batch) is None
    notes = [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()]
    assert [(note["number"], note["ms"], note["decode"], note["tokens"]) for note in notes] == [
        (0, 1, False, 100), (1, 2, True, 2), (2, 3, False, 300)
    ]  # fmt: skip
    for tokens, host in ((step.LONG + 1, 5.0), (step.LONG, 1.0)):  # a chunk, and a short prompt
        with (tmp_path / "notes").open("a") as out:
            out.write(json.dumps(notes[0] | {"tokens": tokens, "host_ms": host}) + "\n")
    subject = step.Subject("stock", SimpleNamespace(), tmp_path / "notes")
    assert step.facts_of(subject) == {"stock_host_ms": pytest.approx((notes[1]["host_ms"] + 5.0) / 2)}


def groups_of(faster: float, count: int = 12) -> list[step.Blocks]:
    """Groups in which page-major is so many times faster, one forward in ten is slow, and servers drift."""
    found = []
    for number in range(count):
        times = [5.0 + 0.01 * number + 30 * (forward % 10 == 0) for forward in range(50)]
        quick = [ms / faster for ms in times]
        found.append({"stock": [times, times[:40]], "page-major": [quick, quick]})
    return found


FACTS = {"pool_gb": 60.1}


@pytest.mark.parametrize(("faster", "ok"), [(1.0, True), (1.02, True), (0.98, False)])
def test_a_slower_layout_is_seen(faster: float, ok: bool, tmp_path: Path) -> None:
    row = step.row_of("decode", groups_of(faster), FACTS)
    assert row["ratio"] == pytest.approx(faster) and row["groups"] == 12
    arguments = step.parse(["--config", "c", "--out", str(tmp_path)])
    assert [bound["ok"] for bound in step.report(arguments, [row])] == [True, True, ok]
    assert f"{faster:.4f}" in (tmp_path / "packed-step.md").read_text()


def test_chunks_that_the_host_launched_slowly_have_a_row_without_them() -> None:
    """The host was slow for the first half of page-major; where the card is timed, page-major is slower by 2%."""
    slow, even = [170.0, 170.0], [130.0, 131.0]
    group = {"stock": [[*even, 150.0, 160.0]] * 2, "page-major": [[*slow, 153.0, 163.2]] * 2}
    whole, later = step.rows_of("prefill", [group] * 12, FACTS | {"stock_host_ms": 1.0})
    assert (whole["role"], later["role"]) == ("prefill", step.LATER)
    assert whole["ratio"] < 0.9 and later["ratio"] == pytest.approx(1 / 1.02)
    assert "stock_host_ms" in whole and "stock_host_ms" not in later  # of all chunks
    assert [bound["ok"] for bound in step.judge([later])] == [True, True, False]


def test_few_groups_or_a_small_pool_show_nothing() -> None:
    rows = [step.row_of("prefill", groups_of(1.0, 2), {"pool_gb": 3.0}), step.row_of("decode", [], FACTS)]
    assert [bound["ok"] for bound in step.judge(rows)] == [False, False, True, False, True, False]
    assert step.ratio_of({"stock": [[1.0], []], "page-major": [[1.0], [1.0]]}) is None


def test_blocks_come_in_turn() -> None:
    live = SimpleNamespace(alive=True, log="its log")
    subjects, seen = [SimpleNamespace(layout=layout, server=live) for layout in step.LAYOUTS], []
    block = lambda subject: [float(seen.append(subject.layout) is None)]  # noqa: E731
    for number, group in enumerate(step.groups(subjects, block, 60)):
        assert group == {"stock": [[1.0]] * 2, "page-major": [[1.0]] * 2}
        if number == 1:
            break
    assert seen == ["stock", "page-major", "page-major", "stock", "page-major", "stock", "stock", "page-major"]
    live.alive = False
    with pytest.raises(servers.ServerDied, match="stock: its log"):
        next(step.groups(subjects, block, 60))


def test_the_pool_is_as_large_as_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 43 layers, 60 GB hold 15 million tokens."""
    seen = {}

    def launch(role, model, given, environment, folder, way, apart):
        seen[role, environment["DSV4_LAYOUT"]] = (int(given[given.index("--max-total-tokens") + 1]), way, apart)
        (folder / "steps.jsonl").write_text(json.dumps({"order_ms": 0.2, "free": 60_000}) + "\n")
        log = folder / "log"
        log.write_text(
            f"[t] max_total_num_tokens={seen[role, environment['DSV4_LAYOUT']][0]}, chunked_prefill_size=1\n"
        )
        return SimpleNamespace(kill=lambda: None, log=log)

    monkeypatch.setattr(servers, "launch", launch)
    monkeypatch.setattr(servers, "wait_until_up", lambda *_: None)
    for role in step.BLOCKS:
        monkeypatch.setitem(step.BLOCKS, role, lambda *_: iter(groups_of(1.0)))
    config = Path(step.__file__).parents[2] / "tools/tiny_checkpoint/v4/config.json"
    arguments = step.parse(["--config", str(config), "--layers", "43", "--logs", str(tmp_path), "--out", str(tmp_path)])
    model, _ = write_model(config, tmp_path / "model", arguments.experts, arguments.layers)
    bounds = step.measure(arguments, model)
    assert len(bounds) == 9 and all(bound["ok"] for bound in bounds)
    rows = json.loads((tmp_path / "packed-step.json").read_text())["rows"]
    assert [(row["role"], row["order_ms"], row["free_pages"]) for row in rows] == [
        ("decode", 0.2, 60_000), ("prefill", 0.2, 60_000), (step.LATER, 0.2, 60_000)
    ]  # fmt: skip
    tokens = seen["decode", "stock"][0]
    assert 15_000_000 < tokens < 16_000_000 and tokens % 256 == 0
    assert seen == {
        (role, layout): (tokens, way, apart)
        for role, way in (("decode", "fake"), ("prefill", "nixl"))
        for layout, apart in (("stock", 0), ("page-major", 50))
    }
