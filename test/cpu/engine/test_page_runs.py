"""Pages in runs: whatever comes and goes, each page has one owner, none is lost, and long requests lie together."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from server_fixture import World
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

from sglang_dsv4.engine import page_runs
from sglang_dsv4.engine.page_runs import MANY, PageRuns, by_run
from sglang_dsv4.engine.standalone import FLASH_RATIOS, PoolSpec, make_allocator, make_pool

STOCK = PagedTokenToKVPoolAllocator
POOL = PoolSpec(pages=8, swa_pages=4, requests=2)
PAGE = 4  # tokens: the interpreter of the engine's kernels is slow


class Strided(PageRuns):
    """Page ids that are multiples of 21, as where the pages of 21 layers lie together."""

    step = 21

    def clear(self) -> None:
        super().clear()
        self.free_pages = self.free_pages * self.step


def allocator(kind: type, pages: int):
    return kind(pages * PAGE, PAGE, torch.float8_e4m3fn, "cpu", None, True)


@dataclass
class Server:
    """Requests of an allocator, and who has which page."""

    pages: object
    held: dict[int, list[int]] = field(default_factory=dict)  # slots
    number: int = 0

    def admit(self, tokens: int) -> int | None:
        """A request with so many tokens; its name, or None without room."""
        lengths = torch.tensor([tokens])
        given_slots = self.pages.alloc_extend(
            torch.zeros_like(lengths), torch.zeros_like(lengths), lengths, lengths, torch.tensor([-1]), tokens
        )
        if given_slots is None:
            return None
        self.number += 1
        self.held[self.number] = given_slots.tolist()
        return self.number

    def decode(self, names: list[int]) -> bool:
        """A token more for each; whether there was room."""
        if not names:
            return True
        lengths = torch.tensor([len(self.held[name]) + 1 for name in names])
        last = torch.tensor([self.held[name][-1] for name in names])
        slots = self.pages.alloc_decode(lengths, lengths, last)
        if slots is not None:
            for name, slot in zip(names, slots.tolist(), strict=True):
                self.held[name].append(slot)
        return slots is not None

    def end(self, name: int) -> None:
        self.pages.free(torch.tensor(self.held.pop(name)))

    def pages_of(self, name: int) -> list[int]:
        """In order; each page's tokens lie in order."""
        slots, size = np.array(self.held[name]), self.pages.page_size
        assert (slots % size == np.arange(len(slots)) % size).all()
        pages = slots // size
        assert (pages == pages[np.arange(len(slots)) // size * size]).all()
        return pages[::size].tolist()

    def free(self) -> list[int]:
        waiting = getattr(self.pages, "staged_pages", None)
        waiting = [self.pages.release_pages] if waiting is None else waiting
        return torch.cat((self.pages.free_pages, *waiting)).tolist()

    def check(self) -> None:
        """Each page belongs to one request or is free; none is another's, none is lost, none is new."""
        step = getattr(self.pages, "step", 1)
        held = [page for name in self.held for page in self.pages_of(name)]
        assert sorted(held + self.free()) == [page * step for page in range(1, self.pages.num_pages + 1)]


def runs(pages: list[int], step: int = 1) -> int:
    return 1 + int((np.diff(pages) != step).sum())


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.integers(1, 30 * PAGE)),
        st.tuples(st.just("decode"), st.integers(0, 255)),
        st.tuples(st.just("end"), st.integers(0, 1000)),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, kind=st.sampled_from([PageRuns, Strided]), pages=st.integers(1, 90), late=st.integers(0, 4))
def test_each_page_has_one_owner_and_none_is_lost(steps, kind, pages, late) -> None:
    """As much is free as with the engine's own, after every step, however late forwards end."""
    stream = Stream()
    with mock.patch.dict(page_runs._process, writer_streams=lambda: (stream,)), mock.patch.object(page_runs, "REST", 0):
        live(steps, kind, pages, late, stream)


def live(steps, kind, pages, late, stream) -> None:
    ours, engines = Server(allocator(kind, pages)), Server(allocator(STOCK, pages))
    for what, number in steps:
        for server in (ours, engines):
            names = sorted(server.held)
            if what == "admit" and number <= server.pages.available_size():
                server.admit(number)
            elif what == "decode" and len(names) * PAGE <= server.pages.available_size():
                assert server.decode([name for at, name in enumerate(names) if number >> at % 8 & 1])
            elif what == "end" and names:
                server.end(names[number % len(names)])
        stream.ended = stream.recorded - late
        ours.check()
        assert ours.pages.available_size() == engines.pages.available_size()


@given(lengths=st.lists(st.integers(1, 9), max_size=9), wanted=st.integers(0, 20), step=st.sampled_from([1, 21]))
def test_the_shortest_run_that_holds_it(lengths, wanted, step) -> None:
    """Runs of these lengths, with a page between them that is not free."""
    found: list[list[int]] = []
    for length in lengths:
        start = found[-1][-1] + 2 if found else 1
        found.append([*range(start, start + length)])
    pages = [page for run in found for page in run]
    best = min((run for run in found if len(run) >= wanted), key=len, default=None)
    longest = [page for run in sorted(found, key=len, reverse=True) for page in run]
    first = (best or longest)[:wanted]
    left = [[page for page in run if page not in first] for run in found]
    ordered = by_run(torch.tensor(pages, dtype=torch.int64) * step, step, wanted)
    assert ordered[:wanted].tolist() == [page * step for page in first]
    lengths = {page * step: len(run) for run in found for page in run}
    rest = [lengths[page] for page in ordered[wanted:].tolist()]
    assert rest == sorted(rest) and sorted(ordered.tolist()) == [page * step for page in pages]
    assert runs(ordered[wanted:].tolist(), step) <= max(1, sum(map(bool, left)))


def churn(kind: type, seed: int, pages: int = 2000, steps: int = 80) -> dict[int, float]:
    """Mean runs of requests of 16, 64 and 256 pages, as they are admitted to a decode server that is nine tenths full.

    They end in no order after having grown by some pages.
    """
    draw, server = np.random.default_rng(seed), Server(allocator(kind, pages))
    until: dict[int, int] = {}
    seen: dict[int, list[int]] = {16: [], 64: [], 256: []}
    for _ in range(steps):
        while server.pages.available_size() - (wanted := int(draw.choice(list(seen), p=(0.6, 0.3, 0.1)))) * PAGE > (
            pages * PAGE // 10
        ):
            name = server.admit(wanted * PAGE)
            seen[wanted].append(runs(server.pages_of(name)))
            until[name] = (wanted + int(draw.integers(1, 12))) * PAGE
        server.decode([name for name in server.held if draw.random() < 0.8])
        for name in [name for name in server.held if len(server.held[name]) >= until[name]]:
            server.end(name)
    return {size: statistics.mean(found[len(found) // 4 :]) for size, found in seen.items()}


def test_long_requests_lie_together_under_churn() -> None:
    """In one run, nearly always; the engine's own list breaks them."""
    before, after = churn(STOCK, 1), churn(PageRuns, 1)
    assert min(before[64], before[256]) > 8
    assert max(after.values()) < 1.5


def test_few_pages_come_from_the_shortest_runs() -> None:
    """So the long ones stay whole for requests that need them."""
    server = Server(allocator(PageRuns, 100))
    names = [server.admit(MANY * PAGE) for _ in range(12)]  # 96 of 100 pages
    for name in names[0], names[4], names[5], names[10]:  # 8, 16 and 8 + nothing behind it
        server.end(name)
    server.admit(MANY * PAGE)  # the shortest left is that at the end
    single = server.admit(1)
    assert server.pages_of(single)[0] > 96
    assert runs(server.pages_of(server.admit(16 * PAGE))) == 1


@pytest.mark.parametrize(("longest", "searched"), [(1, 0), (MANY - 1, 0), (MANY, 1)])
def test_short_requests_search_for_nothing_however_many_come_at_once(longest: int, searched: int) -> None:
    """As a prefill of many prompts, or a step with drafts."""
    pages = allocator(PageRuns, 100)
    lengths = torch.tensor([longest * PAGE, *[PAGE] * MANY])
    none = torch.zeros_like(lengths)
    with mock.patch.object(pages, "_order") as order:
        slots = pages.alloc_extend(none, none, lengths, lengths, torch.full_like(lengths, -1), int(lengths.sum()))
    assert slots is not None and order.call_count == searched


def test_a_list_used_up_begins_with_the_shortest_runs() -> None:
    """Growing requests take one page after the other from it."""
    server = Server(allocator(PageRuns, 20))
    long, stays, short = (server.admit(pages * PAGE) for pages in (12, 1, 7))
    assert not len(server.pages.free_pages)
    for name in (long, short):
        server.end(name)
    assert server.decode([stays])
    assert server.pages_of(stays) == [13, 14]
    assert runs(server.pages_of(server.admit(12 * PAGE))) == 1


@pytest.mark.parametrize(
    ("layout", "need_sort", "arguments", "kind"),
    [
        ("runs", True, {}, PageRuns),
        ("runs", False, {}, STOCK),
        ("stock", True, {}, STOCK),
        ("runs", True, {"attn_cp_size": 2}, STOCK),
        ("runs", True, {"dcp_size": 2}, STOCK),
    ],
)
def test_only_servers_that_transfer(monkeypatch: pytest.MonkeyPatch, layout, need_sort, arguments, kind) -> None:
    """Others, and windows, keep the engine's own; so does everybody with the setting off, or context parallelism."""
    monkeypatch.setenv("DSV4_LAYOUT", layout)
    found = make_allocator(POOL, make_pool(replace(POOL, server_args=arguments)), need_sort)
    assert type(found.full_attn_allocator) is kind
    assert type(found.swa_attn_allocator) is STOCK
    assert found.full_attn_allocator.size == POOL.pages * 256


def test_page_major_ids_have_runs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours differ by the layers of a page: those of a request are neighbours where the transfer counts them."""
    monkeypatch.setenv("DSV4_LAYOUT", "page-major")
    spec = PoolSpec(pages=40, swa_pages=4, requests=2, ratios=FLASH_RATIOS)
    pages = make_allocator(spec, make_pool(spec), need_sort=True).full_attn_allocator
    assert type(pages) is PageRuns and pages.step == 21
    server = Server(pages)
    held = [server.admit(256) for _ in range(30)]
    for name in [*held[3:9], *held[12:25]]:
        server.end(name)
    server.check()
    long = server.pages_of(server.admit(13 * 256))
    assert [page // 21 for page in long] == [*range(13, 26)]
    server.check()


class Stream:
    """A stream whose forwards end when they are told to."""

    def __init__(self) -> None:
        self.ended = 0
        self.recorded = 0

    def record_event(self) -> SimpleNamespace:
        self.recorded += 1
        number = self.recorded
        return SimpleNamespace(query=lambda: number <= self.ended)


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """That of a decode server on which enough time passes."""
    stream = Stream()
    monkeypatch.setattr(page_runs, "REST", 0.0)
    monkeypatch.setitem(page_runs._process, "writer_streams", lambda: (stream,))
    return stream


def test_pages_that_a_forward_may_still_write_are_not_handed_out(forwards: Stream) -> None:
    """The shortest run that holds a request is one that was given back just now."""
    server = Server(allocator(PageRuns, 100))
    first, second, _ = (server.admit(MANY * PAGE) for _ in range(3))
    old, new = server.pages_of(first), server.pages_of(second)
    server.end(first)
    server.end(second)
    forwards.ended = 1
    assert server.pages_of(server.admit(MANY * PAGE)) == old
    assert not {*server.pages_of(server.admit(MANY * PAGE))} & {*new}
    forwards.ended = 2
    assert server.pages_of(server.admit(MANY * PAGE)) == new
    server.check()
    for _ in range(50):
        server.end(server.admit(1))
        forwards.ended = forwards.recorded
    assert len(server.pages._resting) == 1


@pytest.mark.parametrize("ended", [0, 1, 2])
def test_when_there_are_no_others_they_are(forwards: Stream, ended: int) -> None:
    """Then the engine would hand them out, too; what is left of them is in the list."""
    server = Server(allocator(PageRuns, 5 * MANY))
    names = [server.admit(MANY * PAGE) for _ in range(5)]
    for name in names[1:4]:
        server.end(name)
    forwards.ended = ended
    assert server.pages_of(server.admit(2 * MANY * PAGE - 1)) == [*range(MANY + 1, 3 * MANY + 1)]
    server.check()
    assert server.admit(MANY * PAGE) is not None
    server.check()


@pytest.mark.parametrize("grows", [False, True])
def test_pages_that_the_list_has_rest_no_more(forwards: Stream, grows: bool) -> None:
    """Counted all the same, they would stand for those that were given back after them."""
    server = Server(allocator(PageRuns, 100))
    long, single, short, _, _ = (server.admit(pages * PAGE) for pages in (60, 1, 10, 1, 28 if grows else 21))
    server.end(long)
    if grows:
        assert server.decode([single])
    else:
        server.admit(30 * PAGE)
    last = server.pages_of(short)
    server.end(short)
    assert not {*server.pages_of(server.admit(MANY * PAGE))} & {*last}
    server.check()


def test_pages_that_rested_before_a_flush_are_forgotten(forwards: Stream) -> None:
    server = Server(allocator(PageRuns, 100))
    server.end(server.admit(MANY * PAGE))
    server.pages.clear()
    _, long, _ = (server.admit(pages * PAGE) for pages in (1, 20, 1))
    last = server.pages_of(long)
    server.end(long)
    assert not {*server.pages_of(server.admit(MANY * PAGE))} & {*last}
    server.check()


def test_a_list_that_the_engine_would_sort_again_has_all(forwards: Stream) -> None:
    """It asks for more pages than a request can need, and with fewer it begins with the shortest runs."""
    server = Server(allocator(PageRuns, 100))
    run, _, single, _, rests, _ = (server.admit(pages * PAGE) for pages in (MANY, 1, 1, 1, 10, 79))
    pages = server.pages_of(run)
    for name in (run, single, rests):
        server.end(name)
    forwards.ended = 2
    assert server.pages_of(server.admit(MANY * PAGE)) == pages
    server.check()


def test_pages_rest_for_a_time(monkeypatch: pytest.MonkeyPatch, forwards: Stream) -> None:
    """A transfer that was posted before its request was aborted may still write to them."""
    monkeypatch.setattr(page_runs, "REST", 2.0)
    clock = SimpleNamespace(now=10.0)
    monkeypatch.setattr(page_runs, "time", SimpleNamespace(monotonic=lambda: clock.now))
    server = Server(allocator(PageRuns, 100))
    first, _ = (server.admit(MANY * PAGE) for _ in range(2))
    pages = server.pages_of(first)
    server.end(first)
    forwards.ended = 1
    clock.now += 1.9
    second = server.admit(MANY * PAGE)
    assert server.pages_of(second) != pages
    clock.now += 0.1
    assert server.pages_of(server.admit(MANY * PAGE)) == pages
    server.check()


def test_a_decode_servers_queue_says_who_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(page_runs._process, "writer_streams", None)
    World()
    assert tuple(page_runs._process["writer_streams"]()) == ()  # of a scheduler without CUDA
