"""Two ranks that share an arena keep the same points, each saves its share, and loads are exact on both."""

from __future__ import annotations

import random
import time
from array import array
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from processes import exchange, on_ranks
from stateful.store import Search

from sglang_dsv4.engine.ranks import gathered
from sglang_dsv4.errors import CopyEngineError, HostMemoryExhausted, IndexMismatch
from sglang_dsv4.hostmem import board, sharing
from sglang_dsv4.pools.copy_service import ServerContext
from sglang_dsv4.sessions.hints import Hints, Rank
from sglang_dsv4.sessions.store import SessionStore
from sglang_dsv4.settings import Settings
from sglang_dsv4.testing.standalone import PoolSpec, make_allocator, make_pool

PAGE = 256
ROOM = 36 * 49_152 / 2**30  # units: of three windows, of six each, and a retract's longest tail, of 17; see test_store


class OneRank:
    """Holds one rank's pool and store. skew: seconds that the clock of rank 1 runs ahead."""

    def __init__(self, rank: int, skew: float = 0.0, verify: bool = False) -> None:
        spec = PoolSpec(ratios=(0, 4, 128), pages=12, swa_pages=12)
        self.pool = make_pool(spec)
        self.allocator = make_allocator(spec, self.pool)
        context = ServerContext(
            agreed_size=lambda size: size.agreed(gathered(size, 2, torch.distributed.group.WORLD)),
            ranks=2,
            world=sharing.World(exchange, rank, "all"),
        )
        self.host = self.pool.attach_host(Settings(host_gb=ROOM, verify=verify, sessions=None), context)
        assert self.host.memory.ranks == 2
        self.store = SessionStore(self.host, lambda: self.allocator.full_to_swa_index_mapping, False, None)
        self.now = 0.0
        self.store.order.clock = lambda: self.now + skew * rank

    def keep(self, number: int, pages: int, hints: Hints = Hints(), seed: int | None = None) -> Any:  # noqa: B008
        """Keeps a prompt of equal tokens, whose bytes are the same on both ranks unless ``seed`` says otherwise."""
        oracle.fill(self.pool, number if seed is None else seed)
        slots = oracle.resume(self.allocator, pages * PAGE)
        rows = oracle.read(self.pool, slots, pages * PAGE, 0)
        tokens = array("q", [number] * pages * PAGE)
        point = self.store.keep("a", lambda first: tokens[first:], slots.int(), hints)
        self.allocator.free(slots)
        self.check()
        return point, rows

    def load(self, point: Any, first: int = 0) -> dict[oracle.RowKey, bytes]:
        oracle.poison(self.pool)
        slots = oracle.resume(self.allocator, point.tokens)
        self.store.load(point, slots, first)
        rows = oracle.read(self.pool, slots, point.tokens, 0)
        self.allocator.free(slots)
        return rows

    def check(self) -> None:
        self.store.check_integrity()
        self.host.memory.check_integrity()

    def index(self) -> list[Any]:
        """Returns everything that both ranks must have alike."""
        paths = [self.store.trie.path(point.page) for point in self.store.order]
        return [
            (*point.order, point.number, point.tail, path) for point, path in zip(self.store.order, paths, strict=True)
        ]


def test_each_rank_saves_its_share_and_both_load_all_of_it(tmp_path: Path) -> None:
    """The ranks hold different bytes here, so that it shows whose were saved."""

    def work(rank: int) -> Any:
        mine = OneRank(rank)
        point, rows = mine.keep(1, 4, seed=rank)
        longer, _ = mine.keep(1, 6, seed=10 + rank)
        return rows, mine.load(point), mine.load(longer), mine.store.counters.saved_bytes, mine.store.kept.held_bytes

    (own, loaded, longer, saved, held), (others, also, longer_too, saved_too, _) = on_ranks(tmp_path, work)
    assert loaded == also and longer == longer_too and loaded not in (own, others)
    assert 2 * saved == 2 * saved_too == held == (6 + 2 * 6) * 49_152
    for where, row in loaded.items():  # a border of units may lie in the midst of a row
        pieces = zip(row, own[where], others[where], strict=True)
        assert all(byte in pair for byte, *pair in pieces), where
    first = {where: row for where, row in loaded.items() if oracle.grows(where[0])}
    assert first.items() <= longer.items(), "its first pages are those of the shorter point, saved once"


@pytest.mark.parametrize("seed", [0, 1])
def test_after_a_random_life_both_have_the_same_points(tmp_path: Path, seed: int) -> None:
    def work(rank: int) -> Any:
        mine, rng = OneRank(rank, skew=0.4), random.Random(seed)
        kept: dict[Any, Any] = {}
        copies, indexes = [], []
        for _ in range(60):
            what, number, pages = rng.random(), rng.randrange(4), rng.randint(1, 5)
            if what < 0.5:
                ranks = (Rank.PLAIN, Rank.DEMOTED, Rank.RETAINED, Rank.PINNED)
                hints = Hints(rng.choice(ranks), ttl_seconds=rng.choice((None, 1.0, 3.0)))
                point, rows = mine.keep(number, pages, hints)
                kept.setdefault(point, rows)
            elif what < 0.7:
                point = mine.store.lookup.longest("a", array("q", [number] * 5 * PAGE), 5 * PAGE).point
                if point is not None:
                    oracle.compare({w: r for w, r in kept[point].items() if not oracle.grows(w[0])},
                                   {w: r for w, r in mine.load(point).items() if not oracle.grows(w[0])})  # fmt: skip
            elif what < 0.8 and len(copies) < 2:
                try:
                    copies.append(mine.host.memory.allocate(pages * PAGE - 3, mine.host.buffers.geometry))
                except HostMemoryExhausted:
                    copies.append(None)
            elif what < 0.9 and copies:
                copy = copies.pop()
                if copy is not None:
                    copy.release()
            else:
                mine.now += rng.random() + 0.01 * rank
                mine.store.end_pass()
            mine.check()
            indexes.append(mine.index())
        return indexes, dict(mine.store.counters.evicted), mine.host.memory.pool.held

    first, second = on_ranks(tmp_path, work)
    assert first == second
    assert first[1], "something was evicted"


def test_a_time_is_over_when_it_is_over_on_both_clocks(tmp_path: Path) -> None:
    """Trap 15: else the ranks would evict different points."""

    def work(rank: int) -> Any:
        mine = OneRank(rank)
        mine.keep(1, 1, Hints(Rank.RETAINED, ttl_seconds=5.0))
        found = []
        for pages, times in enumerate(((4.9, 4.9), (5.1, 4.9), (4.9, 5.1), (5.1, 5.1)), 1):
            mine.now = times[rank]
            mine.keep(2, pages)
            mine.store.end_pass()
            found.append(next(point.order[0] for point in mine.store.order if point.number == 1))
        return found

    first, second = on_ranks(tmp_path, work)
    assert first == second == [Rank.RETAINED] * 3 + [Rank.EXPIRED]


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("error", [CopyEngineError, IndexMismatch])
@pytest.mark.parametrize("verify", [False, True])
def test_a_save_that_fails_on_one_rank_leaves_no_point_on_either(
    tmp_path: Path, error: Any, failing: int, verify: bool
) -> None:
    """It goes with all that was built on it: one that is given up half-way, and one whose search finds it at fault."""

    def work(rank: int) -> Any:
        mine = OneRank(rank, verify=verify)
        copier, real = mine.host._copier, mine.host._copier.save

        def save(*given: Any) -> Any:
            real(*given)
            if error is CopyEngineError:
                raise error("played")
            return Search(right=False)

        copier.save = save if rank == failing else real
        mine.keep(1, 3)
        copier.save = real
        mine.keep(1, 4), mine.keep(2, 2)
        before = mine.index()
        mine.store.end_pass()
        mine.check()
        return before, mine.index(), dict(mine.host.counters.fallbacks)

    answers = on_ranks(tmp_path, work)
    first, second = (answer[:2] for answer in answers)
    counts = [2, 2] if verify else [3, 1]  # at once, before another is built on it
    assert first == second and [len(index) for index in first] == counts, "that of another prompt stays"
    others = {"AnotherRank": 1} if verify else {}
    assert [answer[2] for answer in answers] == [{error.__name__: 1} if rank == failing else others for rank in (0, 1)]


@pytest.mark.parametrize("ttl", [None, 60.0])
@pytest.mark.parametrize("early", [0, 1])
def test_a_save_does_not_wait_for_the_other_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, early: int, ttl: float | None
) -> None:
    """Else it would hold up a scheduler until the other comes to the end of the same request."""
    monkeypatch.setattr(board, "PATIENCE", 5.0)
    saved = tmp_path / "saved"

    def work(rank: int) -> Any:
        mine = OneRank(rank)
        mine.keep(1, 1, Hints(Rank.RETAINED, ttl_seconds=ttl))
        mine.store.end_pass()
        while rank != early and not saved.exists():
            time.sleep(0.01)
        point, _ = mine.keep(1, 3)
        again = mine.store.keep_again(point)
        saved.touch()
        mine.store.end_pass()
        return point.tokens, again, len(mine.index())

    assert on_ranks(tmp_path, work) == [(3 * PAGE, True, 2)] * 2


class BehindAForward:
    """Ends a load, whose kernels wait for the forward in flight, perhaps a prefill of seconds."""

    def __init__(self) -> None:
        self.waited = False

    def query(self) -> bool:
        return self.waited

    def synchronize(self) -> None:
        self.waited = True


def test_a_load_does_not_wait_for_another_one_of_the_same_pages(tmp_path: Path) -> None:
    """Both only read them: forks of one prompt, admitted in one pass."""

    def work(rank: int) -> Any:
        mine, ends = OneRank(rank), []
        point, rows = mine.keep(1, 4)
        mine.store.end_pass()
        load = mine.host._copier.load

        def ends_late(copy: Any, *given: Any) -> None:
            load(copy, *given)
            copy.lease.used_by = BehindAForward()
            ends.append(copy.lease.used_by)

        mine.host._copier.load = ends_late  # type: ignore[method-assign]
        found = [mine.load(point) for _ in range(3)]
        return [end.waited for end in ends], found == [rows] * 3

    assert on_ranks(tmp_path, work) == [([False] * 3, True)] * 2
