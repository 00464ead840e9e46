"""Two ranks that share an arena load the bytes that all of them saved, whoever is late or fails."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
import units_by_hand
from pool_fixture import World
from processes import exchange, on_ranks

from sglang_dsv4.engine import ranks as engine_ranks
from sglang_dsv4.errors import HostMemoryExhausted, VerifyMismatch
from sglang_dsv4.hostmem import arena, claims, sharing
from sglang_dsv4.pools import token_to_kv
from sglang_dsv4.pools.copy_service import ServerContext
from sglang_dsv4.settings import Settings
from sglang_dsv4.testing.standalone import PoolSpec, make_allocator, make_pool

TOKENS = 2_060  # of nine pages rank 0 saves seven, rank 1 two and the tail of seven units


def attached(
    rank: int, full: bool = False, verify: bool = False, ranks: int = 2, share: str = "auto", rows: Any = ()
) -> World:
    """A rank's pool of the tiny model; what it holds follows from the rank. full: one copy fills it. rows: the engine's
    on the host, by full slot.
    """
    spec = PoolSpec(pages=24, swa_pages=24)
    pool = make_pool(spec)
    engine_ranks.of_every_rank = exchange
    context = ServerContext(
        agreed_size=engine_ranks.agreed_size,
        ranks=ranks,
        world=sharing.World(exchange, rank, "all") if share == "auto" else None,
        host_rows=rows,
    )
    host_gb = units_by_hand.least(pool) * units_by_hand.unit_bytes(pool) / 2**30 if full else 0.03
    pool.attach_host(Settings(host_gb=host_gb, verify=verify, share=share), context)
    return World(pool, make_allocator(spec, pool))


@pytest.mark.parametrize("replicas", [1, 3])
def test_every_replica_counts_the_arenas_of_the_others(tmp_path: Path, replicas: int) -> None:
    """--dp-size: each replica knows its own ranks alone, and all of them take of the same memory."""

    def work(rank: int) -> list[int]:
        counted, real = [], token_to_kv.wanted_size
        token_to_kv.wanted_size = lambda *given: (counted.append(given[3]), real(*given))[1]
        attached(rank, ranks=2 * replicas)
        return counted

    assert on_ranks(tmp_path, work) == [[replicas]] * 2


class Late:
    """The end of a transfer that has not begun: it happens when it is waited for."""

    def __init__(self, transfer: Callable[[], None]) -> None:
        self.transfer, self.over = transfer, False

    def query(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        if not self.over:
            time.sleep(0.3)
            self.transfer()
            self.over = True


def test_each_rank_loads_what_all_of_them_saved(tmp_path: Path) -> None:
    """The ranks hold different bytes here, so that it shows whose were saved."""

    def work(rank: int) -> Any:
        world = attached(rank)
        host = world.pool.host
        oracle.fill(world.pool, seed=rank)
        request = world.start(1, TOKENS)
        own = world.read(request)
        copy = world.save(request)
        held, saved, nbytes = host.memory.held_bytes, host.counters.saved_bytes, copy.nbytes
        world.leave(request)
        oracle.poison(world.pool)
        loaded = world.read(world.resume(copy, 3))
        world.check_empty()
        return own, loaded, (held, nbytes, host.memory.arena.nbytes, host.memory.leaks), saved

    (first, loaded, held, saved), (second, also, held_too, saved_too) = on_ranks(tmp_path, work)
    assert loaded == also, "both ranks have the same bytes now"
    assert loaded not in (first, second)
    assert held == held_too and held[0] == held[1] and held[2] <= 0.03 * 2**30
    assert saved + saved_too == held[1] and 0.4 < saved / held[1] < 0.6, "each saved its half, once"


def test_the_first_rank_gets_its_rows_back_beside_the_bytes_of_all(tmp_path: Path) -> None:
    """It answers requests. Both count the rows in the size of the arena, which they map alike."""

    def work(rank: int) -> Any:
        rows = torch.arange(24 * 256 * 6, dtype=torch.int32).view(24 * 256, 3, 2) + rank
        world = attached(rank, rows=[rows])
        oracle.fill(world.pool, seed=7)
        request = world.start(1, TOKENS)
        expected, chosen = world.read(request), rows[request.slots].clone()
        copy = world.save(request)
        world.leave(request)
        oracle.poison(world.pool)
        rows.fill_(-1)
        resumed = world.resume(copy, 3)
        oracle.compare(expected, world.read(resumed))
        back = torch.equal(rows[resumed.slots], chosen)
        others = rows.clone()
        others[resumed.slots] = -1
        units = world.pool.host.memory.units
        return back, bool((others == -1).all()), bool((rows == -1).all()), units.host_rows // 256

    first, second = on_ranks(tmp_path, work)
    assert first == (True, True, False, 24), "a token's rows, and nothing beside them"
    assert second[2:] == (True, 24), "the other one's are left alone"


@pytest.mark.parametrize("slow", [0, 1])
def test_a_load_waits_for_the_share_of_a_slow_rank(tmp_path: Path, slow: int) -> None:
    loads = tmp_path / "loads"

    def work(rank: int) -> Any:
        world = attached(rank)
        oracle.fill(world.pool, seed=7)
        request = world.start(1, TOKENS)
        expected = world.read(request)
        if rank == slow:
            copier = world.pool.host._copier
            real = copier.save

            def enqueue(copy: Any, *arguments: Any) -> None:
                copy.lease.used_by = Late(lambda: real(copy, *arguments))

            copier.save = enqueue
        copy = world.pool.get_cpu_copy(request.slots.int(), req_pool_index=1, wait=False)
        while rank == slow and not loads.exists():
            time.sleep(0.01)
        time.sleep(
            0.3 * (rank == slow)
        )  # the other waits meanwhile: a card's load reads the units before all vote on it
        loads.touch()
        memory = world.pool.host.memory
        memory.wait_for_shares(copy)
        held = [zlib.crc32(memory.bytes_of(unit).numpy()) for unit in copy.units]
        oracle.poison(world.pool)
        oracle.compare(expected, world.read(world.resume(copy, 3)))
        return held

    first, second = on_ranks(tmp_path, work)
    assert first == second, "one rank saw units that the other had not written"


def flipped(world: World, request: Any, family: str, page: int, byte: int) -> None:
    """Changes one byte of the request's ``page``-th page, full or of the window, in the family's second layer."""
    buffer = world.pool.host.buffers.buffers[family][1].view(-1)
    size = next(f.page_bytes for f in world.pool.host.buffers.families if f.name == family)
    slot = request.slots[page * 256]
    slot = world.pool.full_to_swa_index_mapping[slot] if family == "swa_kv" else slot
    buffer[int(slot) // 256 * size + byte] ^= 1


# 2,060 tokens leave 61 of the last page's 64 rows dead.
@pytest.mark.parametrize(
    ("family", "page", "byte", "said"),
    [
        ("c4_kv", 0, 100, {1: "rank 1 has other bytes than rank 0 saved: family c4_kv, layer 4, position 3, byte 100"}),
        (
            "c4_kv",
            8,
            577,
            {0: "rank 0 has other bytes than rank 1 saved: family c4_kv, layer 4, position 2055, byte 577"},
        ),
        (
            "swa_kv",
            8,
            5,
            {0: "rank 0 has other bytes than rank 1 saved: family swa_kv, layer 1, position 2048, byte 5"},
        ),
        ("c4_kv", 0, 37_439, {}),
        ("c4_kv", 8, 60 * 576, {}),
        ("swa_kv", 7, 5, {}),
    ],
    ids=["of rank 0", "of rank 1", "of the tail", "padding", "dead row", "dead row of the window"],
)
def test_a_byte_that_differs_between_ranks_is_named(
    tmp_path: Path, family: str, page: int, byte: int, said: dict[int, str]
) -> None:
    def work(rank: int) -> str | None:
        world = attached(rank, verify=True)
        oracle.fill(world.pool, seed=3)
        request = world.start(1, TOKENS)
        if rank == 1:
            flipped(world, request, family, page, byte)
        try:
            copy = world.save(request)
        except VerifyMismatch as mismatch:
            return str(mismatch)
        if not said:
            world.resume(copy, 3)
        return None

    answers = dict(enumerate(on_ranks(tmp_path, work)))
    for rank, answer in answers.items():
        wanted = said.get(rank)
        assert answer is None if wanted is None else answer.startswith(wanted), answer


@pytest.mark.parametrize("failing", [0, 1])
def test_where_memory_cannot_be_shared_each_rank_has_its_own(tmp_path: Path, failing: int) -> None:
    def work(rank: int) -> Any:
        if rank == failing:

            def refuse(*_: Any) -> None:
                raise HostMemoryExhausted("the control group is full")

            arena.populate = refuse
        world = attached(rank)
        oracle.fill(world.pool, seed=rank)
        request = world.start(1, TOKENS)
        expected, copy = world.read(request), world.save(request)
        oracle.poison(world.pool)
        oracle.compare(expected, world.read(world.resume(copy, 3)))
        return world.pool.host.memory.ranks

    assert on_ranks(tmp_path, work) == [1, 1]


@pytest.mark.parametrize("why", ["a rank", "the setting"])
def test_memory_for_one_arena_and_not_for_one_a_rank_is_refused_with_the_cause(tmp_path: Path, why: str) -> None:
    """RAM for one arena of that size is there: it is not to blame, but that the ranks cannot share."""

    def work(rank: int) -> tuple[str, str]:
        def refuse(*_: Any) -> None:
            raise HostMemoryExhausted("cannot pin it (CUDA error 2); raise the locked-memory limit (ulimit -l)")

        claims.free_ram = lambda _: int(0.05 * 2**30)
        claims.Claim.__init__.__defaults__ = (None, (str(tmp_path),))
        if rank == 1 and why == "a rank":
            arena.populate = refuse
        with pytest.raises(HostMemoryExhausted) as caught:
            attached(rank, share="off" if why == "the setting" else "auto")
        return str(caught.value), str(caught.value.__cause__)

    said, cause = set(on_ranks(tmp_path, work)).pop()
    refused = "rank 1: cannot pin it (CUDA error 2); raise the locked-memory limit (ulimit -l)"
    assert cause == (refused if why == "a rank" else "None")
    assert said.startswith("each of 2 ranks pins 0.03 GiB of its own, they do not share ")
    assert f"({refused if why == 'a rank' else 'DSV4_SHARE=off'}): DSV4_HOST_GB=0.03 for each of 2 arenas" in said


def test_a_handle_that_died_on_one_rank_is_nobodys_until_it_died_on_all(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        world = attached(rank, full=True)
        request = world.start(1, TOKENS)
        copy = world.save(request)
        found = []
        for dying in (0, 1):
            if rank == dying:
                del copy
            try:
                again = world.save(request)
                found.append(list(again.units))
                again.release()
            except HostMemoryExhausted:
                found.append("full")
        memory = world.pool.host.memory
        return found, memory.leaks, memory.copies, memory.pool.held

    first, second = on_ranks(tmp_path, work)
    assert first == second and first[0][0] == "full" and first[0][1] != "full" and first[1:] == (1, 0, 0)
