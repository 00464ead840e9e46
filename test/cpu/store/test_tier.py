"""The tier borrows, keeps and gives back units exactly, whatever a store does; ranks do it alike."""

from __future__ import annotations

import contextlib
import os
import random
from array import array
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from memory_store import MemoryClient, MemoryStore, played_time
from processes import exchange, on_ranks

from sglang_dsv4.engine.ranks import gathered
from sglang_dsv4.errors import HostMemoryExhausted
from sglang_dsv4.hostmem import sharing
from sglang_dsv4.hostmem.board import Board
from sglang_dsv4.hostmem.tickets import Tickets
from sglang_dsv4.pools.copy_service import ServerContext
from sglang_dsv4.sessions.store import SessionStore
from sglang_dsv4.settings import Settings, Store
from sglang_dsv4.store import tier as tier_module
from sglang_dsv4.store.keys import Keys
from sglang_dsv4.store.tier import Tier
from sglang_dsv4.store.told import NUMBERS, Told, What
from sglang_dsv4.store.work import Patience
from sglang_dsv4.testing.standalone import PoolSpec, make_allocator, make_pool

PAGE = 256
UNIT = 49_152
LIMIT = 2.0
GLANCE = 0.002  # seconds of some passes
STEPS = int(os.environ.get("STORE_STEPS", "80"))  # of each random life; 1,700 make 20,000


class Life:
    """One rank of one server's life, with prompts of equal tokens. Bytes are compared by page and by window."""

    def __init__(self, store: MemoryStore, rank: int = 0, ranks: int = 1, units: int = 60, **client: Any) -> None:
        spec = PoolSpec(ratios=(0, 4, 128), pages=16, swa_pages=16)
        self.pool = make_pool(spec)
        self.allocator = make_allocator(spec, self.pool)
        self.weights = 0
        self.glance = GLANCE / (1 + rank)  # each rank has its own clock, and one alone waits
        context = ServerContext(weight_version=lambda: self.weights)
        if ranks > 1:
            context = ServerContext(
                agreed_size=lambda size: size.agreed(gathered(size, ranks, torch.distributed.group.WORLD)),
                ranks=ranks, world=sharing.World(exchange, rank, "all"), weight_version=lambda: self.weights,
            )  # fmt: skip
        settings = Settings(host_gb=units * UNIT / 2**30, store=Store("file", "/nowhere"))
        self.host = self.pool.attach_host(settings, context)
        self.memory = self.host.memory
        self.sessions = SessionStore(self.host, lambda: self.allocator.full_to_swa_index_mapping, False, None)
        self.client = MemoryClient(store, self.memory, **client) if rank == 0 else None
        keys = Keys(self.sessions.trie, b"model", None)
        self.tier = Tier(self.sessions, self.memory, self.client, keys, Patience(LIMIT, 0.0), lambda: self.weights)
        self.fills = 0

    def keep(self, number: int, pages: int) -> Any:
        self.fills += 1
        oracle.fill(self.pool, 1000 * number + self.fills)
        slots = oracle.resume(self.allocator, pages * PAGE)
        tokens = array("q", [number] * pages * PAGE)
        point = self.sessions.keep("a", lambda first: tokens[first:], slots.int())
        self.allocator.free(slots)
        return point

    def finish(self, number: int, pages: int) -> Any:
        point = self.keep(number, pages)
        if point is not None:
            self.tier.write(point)
        return point

    def ask(self, number: int, pages: int) -> Any:
        tokens = array("q", [number] * (pages * PAGE))
        found = self.sessions.lookup.longest("a", tokens, len(tokens)).point
        return self.tier.ask("a", tokens, len(tokens), 0 if found is None else found.tokens)

    def passes(self, count: int = 1, spare: float = 0.0) -> None:
        for _ in range(count):
            self.sessions.end_pass()
            self.tier.end_pass(spare)
            self.check()

    def found(self, number: int, pages: int = 12) -> int:
        point = self.point(number, pages)
        return 0 if point is None else point.tokens // PAGE

    def point(self, number: int, pages: int = 12) -> Any:
        return self.sessions.lookup.longest("a", array("q", [number] * pages * PAGE), pages * PAGE).point

    def bytes_of(self, point: Any) -> list[bytes]:
        units = [*self.sessions.trie.path(point.page), *point.tail]
        return [self.memory.bytes_of(unit).numpy().tobytes() for unit in units]

    def check(self) -> None:
        self.sessions.check_integrity()
        self.memory.check_integrity()
        held = [unit for lease in self.memory._leases.values() for unit in lease.units]
        assert not Counter(self.tier.units()) - Counter(held), "nothing keeps them from others"
        work = () if self.client is None else self.client.open.values()
        assert {unit for one in work for unit in one.units[one.back :]} <= {*held}, "the store's process has them still"
        assert self.memory.pool.held + self.memory.pool.available == self.memory.pool.total


def stored(pages: int = 9) -> MemoryStore:
    """Returns what a life leaves of so many pages of prompt 1."""
    store = MemoryStore()
    life = Life(store)
    life.finish(1, pages)
    life.passes(4)
    return store


def test_a_second_life_has_the_bytes_of_the_first() -> None:
    store = MemoryStore()
    first = Life(store)
    point = first.finish(1, 9)
    written = first.bytes_of(point)
    first.passes(4)
    assert not first.tier.units() and len(store.objects) == len(written)
    second = Life(store)
    second.memory.arena.region.fill_(0xEE)
    ask = second.ask(1, 12)
    second.passes(1)
    assert ask.waits, "it was found, and is being read"
    second.passes(2)
    assert not ask.waits and second.found(1) == 9
    read = second.point(1)
    assert second.bytes_of(read) == written and read.from_store
    assert second.tier.counters.asks == {"hit": 1} and second.tier.counters.tokens == 9 * PAGE
    assert second.finish(1, 9) is read
    second.passes(3)
    assert not [op for op, _ in second.tier.counters.units if op == "put"], "what came from the store is there"


def test_only_new_pages_are_written_and_those_that_failed_come_again() -> None:
    store = MemoryStore()
    life = Life(store)
    tail = life.sessions.kept.in_tail
    life.finish(1, 5)
    life.passes(4)
    life.finish(1, 7)
    life.passes(4)
    assert life.tier.counters.units["put", "ok"] == 7 + 2 * tail
    life.client.trouble = 1.0  # refused
    life.finish(1, 8)
    life.passes(4)
    life.client.trouble = 0.0
    life.finish(1, 9)
    life.passes(4)
    assert life.tier.counters.units["put", "ok"] == 9 + 3 * tail, "page 8 with page 9"
    assert not life.tier.units()


def test_a_point_counts_as_sent_only_when_the_process_took_all_of_it() -> None:
    life = Life(MemoryStore())
    writes, taken = life.client.write, iter([True, False, True, True])
    life.client.write = lambda pieces, group: writes(pieces, group) if next(taken) else None
    life.finish(1, 9)
    life.passes(4)
    assert life.tier.counters.points == {"sent": 1}
    life.finish(2, 9)  # as where the process is not there
    life.passes(4)
    assert life.tier.counters.points == {"sent": 1, "dropped": 1}
    life.finish(3, 9)
    life.passes(4)
    assert life.tier.counters.points == {"sent": 2, "dropped": 1}


def test_units_that_a_process_had_copied_before_it_died_are_counted() -> None:
    life = Life(MemoryStore())
    life.finish(1, 9)
    life.passes(1)
    copied = life.client.poll()
    assert [event.name for event in copied] == ["copied"]
    life.client.fail()
    lost, life.client.events = [*life.client.events], []
    told = [copied, lost]
    life.client.poll = lambda: told.pop(0) if told else ()
    life.passes(4)
    assert life.tier.counters.units == {("put", "failed"): 9 + life.sessions.kept.in_tail}


def test_a_key_of_a_client_that_is_no_utf_8_is_a_key() -> None:
    """JSON may hold half a surrogate pair, and the engine lets it through."""
    store = MemoryStore()
    life = Life(store)
    halves = [("\ud800", None), ("\ud801", None), (None, "\ud800")]
    hashed = [(b"a hash", None), ("a hash", None), (str(b"a hash"), None)]
    roots = {life.tier.keys.root(namespace) for namespace in [*halves, *hashed]}
    assert len(roots) == 6
    tokens = array("q", [1] * 12 * PAGE)
    assert life.tier.ask(halves[0], tokens, len(tokens), 0).waits


def test_a_point_that_goes_before_it_is_written_leaves_no_window() -> None:
    """Else the store would have a window under pages that are others by then."""
    store = MemoryStore()
    life = Life(store)
    point = life.finish(1, 5)
    life.sessions.kept.let_go(point, "room")
    life.passes(3)
    assert not store.objects and life.tier.counters.points == {"gone": 1}


def test_a_wrong_save_is_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    life = Life(store)
    life.finish(1, 5)
    monkeypatch.setattr(life.sessions, "_is_right", lambda copy: False)
    life.passes(3)
    assert not store.objects


def test_nothing_is_sent_before_it_is_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's process is behind no stream."""
    store = MemoryStore()
    life = Life(store)
    over = False
    monkeypatch.setattr(life.memory.tickets, "is_over", lambda ticket: over)
    life.finish(1, 5)
    life.passes(4)
    assert not store.objects and life.tier.units()
    over = True
    life.passes(4)
    assert len(store.objects) == 5 + life.sessions.kept.in_tail and not life.tier.units()


def test_tickets_are_over_when_their_transfers_are_on_every_rank() -> None:
    class Transfer:
        passed = False

        def query(self) -> bool:
            return self.passed

    one, boards = Transfer(), [Board(memory, rank, 2) for memory in [bytearray(Board.bytes_for(2))] for rank in (0, 1)]
    tickets = [Tickets(board) for board in boards]
    first = tickets[0].issue(one)  # type: ignore[arg-type]
    assert not tickets[0].is_over(first)
    one.passed = True
    assert not tickets[0].is_over(first), "the other rank has not come so far"
    tickets[1].issue(None)
    assert tickets[0].is_over(first)


def test_a_request_waits_no_longer_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    store = stored()
    now = [100.0]
    monkeypatch.setattr(tier_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    life = Life(store)
    life.client.hangs = True
    ask = life.ask(1, 12)
    life.passes(2)
    assert ask.waits
    now[0] += LIMIT + 0.01
    life.passes(1)
    assert not ask.waits and life.found(1) == 0
    life.client.hangs = False
    life.passes(4)
    assert life.found(1) == 9 and life.tier.counters.asks == {"late": 1}, "the next turn has it"


def test_the_time_of_a_long_pass_is_not_the_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill of other requests is longer than the limit of an answer; what was found meanwhile is still loaded."""
    store, now = stored(), [100.0]
    monkeypatch.setattr(tier_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    life = Life(store)
    life.client.hangs = True
    ask = life.ask(1, 12)
    life.passes(1)
    now[0] += 10 * LIMIT
    life.client.hangs = False
    life.passes(1)  # the first answer
    assert ask.waits and ask.end and life.tier._loading
    life.client.hangs = True
    now[0] += LIMIT - 0.01
    life.passes(1)
    assert ask.waits
    now[0] += 0.02
    life.passes(1)
    assert not ask.waits, "the limit is the load's from there"
    life.client.hangs = False
    life.passes(4)
    assert life.found(1) == 9


def test_other_weights_end_it_and_nothing_read_under_them_is_kept() -> None:
    store = stored()
    life = Life(store)
    ask = life.ask(1, 12)
    life.passes(1)
    life.weights = 1
    life.passes(4)
    assert not ask.waits and life.found(1) == 0 and not life.tier.units() and not life.memory.pool.held
    life.finish(2, 5)
    life.passes(4)
    assert len(store.objects) == 9 + life.sessions.kept.in_tail and life.ask(1, 12) is None


def test_an_ask_that_finds_no_room_takes_nothing() -> None:
    store = MemoryStore()
    first = Life(store)
    first.finish(1, 12)
    first.passes(4)
    small = Life(store, units=30)  # 12 pages and a window are more than half
    ask = small.ask(1, 12)
    small.passes(3)
    assert not ask.waits and small.tier.counters.asks == {"room": 1} and not small.memory.pool.held
    assert not small.client.open, "the store's process forgets its chain"


class Random:
    """A random life: the same steps on every rank."""

    def __init__(self, life: Life, seed: int, clock: list[float]) -> None:
        self.life, self.rng, self.clock = life, random.Random(seed), clock
        self.known: dict[tuple[int, int, int], set[bytes]] = {}  # number, page, part: what was ever kept there
        self.asks: list[tuple[float, Any]] = []
        self.copies: list[Any] = []

    def step(self) -> None:
        rng, life = self.rng, self.life
        what, number, pages = rng.random(), rng.randrange(4), rng.randint(4, 12)
        if what < 0.15:
            point = life.finish(number, pages)
            if point is not None:
                self._learn(number, point)
        elif what < 0.3:
            ask = life.ask(number, pages)
            if ask is not None:
                self.asks.append((self.clock[0], ask))
        elif what < 0.36 and len(self.copies) < 2:
            with contextlib.suppress(HostMemoryExhausted):
                self.copies.append(life.memory.allocate(pages * PAGE - 3, life.host.buffers.geometry))
        elif what < 0.42 and self.copies:
            self.copies.pop().release()
        elif 0.42 <= what < 0.48:
            self.hang(what < 0.44)
        else:
            self.clock[0] += 0.3
            life.passes(spare=rng.choice((0.0, life.glance)))
            self.asks = [(since, ask) for since, ask in self.asks if ask.waits]
            most = LIMIT + 2 * (0.3 + GLANCE)  # a pass until the first answer is seen does not count
            assert all(self.clock[0] <= since + most for since, _ in self.asks), "later than its limit"
        life.check()
        self._judge()

    def hang(self, hangs: bool) -> None:
        """Lets the store say nothing more, or all that it has to say."""
        if self.life.client is not None:
            self.life.client.hangs = hangs

    def _parts(self, number: int, point: Any) -> Any:
        for page, unit in enumerate(self.life.sessions.trie.path(point.page)):
            yield (number, page, 0), unit
        for part, unit in enumerate(point.tail, 1):
            yield (number, point.tokens // PAGE, part), unit

    def _learn(self, number: int, point: Any) -> None:
        for where, unit in self._parts(number, point):
            self.known.setdefault(where, set()).add(self.life.memory.bytes_of(unit).numpy().tobytes())

    def _judge(self) -> None:
        for point in self.life.sessions.order:
            if point.from_store:
                number = int(self.life.sessions.trie.key(point.page)[0])
                for where, unit in self._parts(number, point):
                    assert self.life.memory.bytes_of(unit).numpy().tobytes() in self.known[where], where

    def index(self) -> list[Any]:
        life = self.life
        path = life.sessions.trie.path
        return [(point.order, point.number, point.tail, path(point.page)) for point in life.sessions.order]


@pytest.mark.parametrize("seed", range(3))
def test_random_lives_over_a_store_that_loses_lags_refuses_and_dies(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(tier_module, "time", played_time(clock))
    store, known = MemoryStore(), {}
    outcomes: dict[str, int] = {}
    for number in range(4):
        life = Life(store, seed=seed + number, at_once=False, trouble=(0.0, 0.05, 0.3)[seed % 3])
        one = Random(life, 10 * seed + number, clock)
        one.known = known
        for _ in range(STEPS):
            one.step()
        for copy in one.copies:
            copy.release()
        one.hang(False)
        life.client.trouble, life.client.at_once = 0.0, True
        life.passes(30)
        assert not life.tier.units() and not life.tier._open
        for name, times in life.tier.counters.asks.items():
            outcomes[name] = outcomes.get(name, 0) + times
    assert outcomes["miss"] and (outcomes.get("hit") or seed == 2), outcomes


@pytest.mark.parametrize("seed", [0, 1])
def test_two_ranks_keep_the_same_points(tmp_path: Path, seed: int) -> None:
    """The second one has no client, and other clocks."""

    def work(rank: int) -> Any:
        store, indexes, hits, clock = MemoryStore(), [], 0, [100.0]
        tier_module.time = played_time(clock, 1000.0 * rank)  # type: ignore[attr-defined]
        for number in range(2):
            life = Life(store, rank, 2, seed=seed, at_once=False, trouble=0.02)
            one = Random(life, 10 * seed + number, clock)
            one._judge = one._learn = lambda *a: None  # each rank saves a part of the bytes
            for _ in range(100):
                one.step()
                indexes.append((one.index(), life.memory.pool.held, [ask.waits for _, ask in one.asks]))
            one.hang(False)
            life.passes(40)
            hits += life.tier.counters.asks["hit"]
        return indexes, hits

    (first, hits), (second, _) = on_ranks(tmp_path, work)
    assert first == second
    assert hits


def objects_of(store: MemoryStore) -> dict[str, bytes]:
    return {name: unit.numpy().tobytes() for name, unit in store.objects.items()}


def store_of(objects: dict[str, bytes]) -> MemoryStore:
    store = MemoryStore()
    store.objects = {name: torch.frombuffer(bytearray(unit), dtype=torch.uint8) for name, unit in objects.items()}
    return store


def test_a_server_of_one_rank_reads_what_two_wrote(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        store = MemoryStore()
        life = Life(store, rank, 2)
        point = life.finish(1, 9)
        life.passes(6)
        return life.bytes_of(point), objects_of(store)

    (written, objects), _ = on_ranks(tmp_path, work)
    alone = Life(store_of(objects))
    alone.ask(1, 12)
    alone.passes(4)
    assert alone.found(1) == 9
    assert alone.bytes_of(alone.point(1)) == written


def test_a_server_of_two_ranks_reads_what_one_wrote(tmp_path: Path) -> None:
    """Each of them has all of it on its device, by the oracle; the second one has no client."""
    store, tokens = MemoryStore(), 9 * PAGE
    alone = Life(store)
    oracle.fill(alone.pool, 1)
    slots = oracle.resume(alone.allocator, tokens)
    computed = oracle.read(alone.pool, slots, tokens, 1)
    alone.tier.write(alone.sessions.keep("a", lambda first: array("q", [1] * tokens)[first:], slots.int()))
    alone.passes(4)
    written, objects = alone.bytes_of(alone.point(1)), objects_of(store)

    def work(rank: int) -> Any:
        life = Life(store_of(objects), rank, 2)
        if rank == 0:
            life.memory.arena.region.fill_(0xEE)
        oracle.poison(life.pool)
        ask = life.ask(1, 12)
        waited = [(life.passes(), ask.waits)[1] for _ in range(4)]
        point, slots = life.point(1), oracle.resume(life.allocator, tokens)
        life.sessions.load(point, slots, 0)
        return waited, point.tokens, life.bytes_of(point), oracle.read(life.pool, slots, tokens, 1)

    one, other = on_ranks(tmp_path, work)
    for waited, length, read, loaded in (one, other):
        assert waited == one[0] and not waited[-1] and length == tokens
        assert read == written
        oracle.compare(computed, loaded)


def test_the_numbers_of_tickets_fit_the_board_for_ever() -> None:
    """At 500 a second they reach 2^31 after 50 days."""
    board = Board(bytearray(Board.bytes_for(1)), 0, 1)  # type: ignore[arg-type]
    tier = SimpleNamespace(_numbers=NUMBERS - 1, _open={})
    told = [Told(Tier._number(tier, one), What.STORED, 1) for one in (None, None)]  # type: ignore[arg-type]
    assert [one.number for one in told] == [NUMBERS, 1] == [*tier._open]
    assert [Told.unpacked(number) for number in board.tell([one.packed() for one in told])] == told
