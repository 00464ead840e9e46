"""Ranks of a group come to the same answer about host memory, whatever each of them has."""

from __future__ import annotations

import multiprocessing
import queue
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from plain_world import forget, naive_pages, nothing_is_held, run_to, serving, small_world
from server_fixture import Recorder, World

from sglang_dsv4.cache.families import Group
from sglang_dsv4.engine.ranks import min_over_ranks, ranks_a_machine, smallest_counts, true_on_every_rank
from sglang_dsv4.engine.standalone import PoolSpec, make_pool
from sglang_dsv4.errors import HostMemoryExhausted, IndexMismatch
from sglang_dsv4.hostmem.blocks import BlockPool
from sglang_dsv4.pools.copy_service import ServerContext
from sglang_dsv4.settings import Settings

BLOCK, WINDOW, REQUEST = Group.PAGED, Group.WINDOW, Group.REQUEST


def _child(rank: int, ranks: int, store: str, work: Callable[[int], Any], answers: Any) -> None:
    try:
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        answers.put((rank, work(rank)))
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    except BaseException:  # noqa: BLE001  # the parent shows it
        answers.put((rank, traceback.format_exc()))


def on_ranks(tmp_path: Path, work: Callable[[int], Any], ranks: int = 2) -> list[Any]:
    """``work(rank)`` in as many processes with a gloo group; a hang is an error after a minute."""
    context = multiprocessing.get_context("fork")  # the children inherit the imported engine
    answers = context.Queue()
    store = str(tmp_path / "store")
    children = [
        context.Process(target=_child, args=(rank, ranks, store, work, answers), daemon=True) for rank in range(ranks)
    ]
    for child in children:
        child.start()
    try:
        found = dict(answers.get(timeout=60) for _ in children)
    except queue.Empty:
        pytest.fail("the ranks wait for one another")
    finally:
        for child in children:
            child.join(10)
            if child.is_alive():
                child.kill()
    for rank, answer in found.items():
        assert not (isinstance(answer, str) and "Traceback" in answer), f"rank {rank}: {answer}"
    return [found[rank] for rank in range(ranks)]


@pytest.mark.parametrize("entry", ("smallest_counts", "min_over_ranks"))
def test_each_rank_gets_the_smallest_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str) -> None:
    from sglang.srt.distributed import parallel_state

    mine = [{BLOCK: 100, WINDOW: 3, REQUEST: 9}, {BLOCK: 70, WINDOW: 5, REQUEST: 8}]

    def work(rank: int) -> Any:
        group = torch.distributed.group.WORLD
        if entry == "smallest_counts":
            return smallest_counts(mine[rank], group)
        parallel_state.get_world_group = lambda: SimpleNamespace(cpu_group=group)
        return min_over_ranks(mine[rank])

    smallest = {BLOCK: 70, WINDOW: 3, REQUEST: 8}
    assert on_ranks(tmp_path, work) == [smallest, smallest]


@pytest.mark.parametrize("refusing", (0, 1))
def test_one_refusing_rank_stops_all(tmp_path: Path, refusing: int) -> None:
    def work(rank: int) -> Any:
        counts = None if rank == refusing else {BLOCK: 10, WINDOW: 2, REQUEST: 2}
        return smallest_counts(counts, torch.distributed.group.WORLD)

    assert on_ranks(tmp_path, work) == [None, None]


def test_a_stage_without_a_group_limits_nobody(tmp_path: Path) -> None:
    mine = [
        {BLOCK: 0, WINDOW: 4, REQUEST: 0},  # no layer of this pipeline stage compresses
        {BLOCK: 50, WINDOW: 6, REQUEST: 7},
        {BLOCK: 60, WINDOW: 9, REQUEST: 0},
    ]

    def work(rank: int) -> Any:
        return smallest_counts(mine[rank], torch.distributed.group.WORLD)

    assert on_ranks(tmp_path, work, ranks=3) == [
        {BLOCK: 0, WINDOW: 4, REQUEST: 0},
        {BLOCK: 50, WINDOW: 4, REQUEST: 7},
        {BLOCK: 50, WINDOW: 4, REQUEST: 0},
    ]


def test_ranks_with_different_memory_find_room_for_the_same_requests(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        pool = make_pool(PoolSpec(stage=((0, 4), (2, 6))[rank]))
        agree = lambda counts: smallest_counts(counts, torch.distributed.group.WORLD)  # noqa: E731
        settings = Settings(host_gb=(0.01, 0.004)[rank])
        host = pool.attach_host(settings, ServerContext(min_over_ranks=agree))
        answers, copies = [], []
        for tokens in (300, 1, 1000, 513, 2000, 40, 256, 700):
            try:
                copies.append(host.memory.allocate(tokens, host.side.geometry))
                answers.append(True)
            except HostMemoryExhausted:
                answers.append(False)
                if copies:
                    copies.pop(0).release()
        for copy in copies:
            copy.release()
        return answers, {group: region.blocks for group, region in host.memory.regions.items()}

    first, second = on_ranks(tmp_path, work)
    assert first == second
    assert {True, False} <= set(first[0]), "the sequence reaches the limit"


def test_a_rank_whose_pool_is_refused_stops_the_others(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        pool = make_pool(PoolSpec(hisparse=rank == 1))
        agree = lambda counts: smallest_counts(counts, torch.distributed.group.WORLD)  # noqa: E731
        host = pool.attach_host(Settings(), ServerContext(min_over_ranks=agree))
        return host is None, pool.refusal

    first, second = on_ranks(tmp_path, work)
    assert first == (True, "another rank has no host copies")
    assert second[0] is True
    assert "HiSparse" in second[1]


def test_without_a_process_group_a_rank_decides_alone() -> None:
    counts = {BLOCK: 3, WINDOW: 1, REQUEST: 1}
    assert min_over_ranks(counts) is counts
    assert min_over_ranks(None) is None


# ------------------------------------------------------------------------------- one rank fails alone


def lockstep(attention: int = 2) -> None:
    """In a child: the engine's groups are those of the children. attention: ranks that share a request's heads."""
    from sglang.srt.distributed import parallel_state

    def group(ranks: int) -> SimpleNamespace:
        return SimpleNamespace(world_size=ranks, cpu_group=torch.distributed.group.WORLD)

    parallel_state.get_world_group = lambda: group(2)
    parallel_state.get_attn_tp_group = lambda: group(attention)


@pytest.mark.parametrize("failing", (0, 1, None))
def test_a_rank_that_cannot_save_alone_does_not_leave_the_others(tmp_path: Path, failing: int | None) -> None:
    """Their queues would differ for ever: one waits with a copy, the other computes again."""

    def work(rank: int) -> Any:
        lockstep()
        world = World()
        if rank == failing:
            world.pool.get_cpu_copy = Recorder(error=IndexMismatch("a slot out of range"))
        req = world.admit(300)
        world.retract(req)
        world.requeue(req)
        found = {"waits": len(world.queue.retracted_queue), "again": len(world.rebootstrapped)}
        return found, dict(world.host.counters.fallbacks), world.host.memory.copies

    answers = on_ranks(tmp_path, work)
    alike = {"waits": 1, "again": 0} if failing is None else {"waits": 0, "again": 1}
    assert [answer[0] for answer in answers] == [alike, alike]
    assert [answer[2] for answer in answers] == [alike["waits"]] * 2, "the other rank's copy is released"
    if failing is not None:
        assert answers[failing][1] == {"IndexMismatch": 1} and answers[1 - failing][1] == {"AnotherRank": 1}


def plain_rank(fails: bool) -> tuple[Any, dict[str, int]]:
    """(tokens of its request's extend after a retract, reasons) of a plain server whose rank cannot save, or can."""
    with naive_pages():
        world = small_world()
        if fails:
            world.pool.get_cpu_copy = Recorder(error=IndexMismatch("a slot out of range"))
        req = world.submit(range(415), max_new=20)
        run_to(world, req, 420)
        world.retract(req)
        forget(world)
        extended = world.step().extend_lens
        world.run()
        nothing_is_held(world)
        return extended, dict(serving(world).host.counters.fallbacks)


@pytest.mark.parametrize("failing", (0, 1, None))
def test_a_plain_rank_that_cannot_save_alone_does_not_leave_the_others(tmp_path: Path, failing: int | None) -> None:
    """One would extend by one token where the other prefills."""

    def work(rank: int) -> Any:
        lockstep()
        return plain_rank(rank == failing)

    answers = on_ranks(tmp_path, work)
    assert [extended for extended, _ in answers] == [[1 if failing is None else 421]] * 2
    if failing is not None:
        assert answers[failing][1] == {"IndexMismatch": 1}
        assert answers[1 - failing][1] == {"AnotherRank": 1}


def test_ranks_with_requests_of_their_own_do_not_ask_one_another(tmp_path: Path) -> None:
    """Data-parallel attention: one rank retracts, and the other, which does not, is not waited for."""

    def work(rank: int) -> Any:
        lockstep(attention=1)
        if rank == 0:
            return plain_rank(fails=False)
        with naive_pages():
            small_world()  # its host memory is agreed on with the other's
        return None

    assert on_ranks(tmp_path, work) == [([1], {}), None]


def test_one_rank_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: pytest.fail("asked"))
    assert true_on_every_rank(True) and not true_on_every_rank(False)


@pytest.mark.parametrize(
    ("attention_dp", "dp", "tp", "pp", "nodes", "ranks"),
    [
        (False, 1, 8, 1, 1, 8),
        (True, 8, 8, 1, 1, 8),
        (False, 2, 4, 1, 1, 8),
        (False, 1, 16, 1, 2, 8),
        (False, 1, 4, 2, 2, 4),
    ],
)
def test_ranks_that_share_a_machine(attention_dp: bool, dp: int, tp: int, pp: int, nodes: int, ranks: int) -> None:
    args = SimpleNamespace(enable_dp_attention=attention_dp, dp_size=dp, tp_size=tp, pp_size=pp, nnodes=nodes)
    assert ranks_a_machine(args) == ranks


# ------------------------------------------------------------------------------------- timing of events


@dataclass
class FakeEvent:
    """An event that passes after so many questions, or when waited for."""

    questions: int
    waited: int = 0

    def query(self) -> bool:
        self.questions -= 1
        return self.questions < 0 or self.waited > 0

    def synchronize(self) -> None:
        self.waited += 1


def _run(patience: int) -> list[tuple[int, bool]]:
    """A fixed sequence of takes and releases, with events that need ``patience`` questions to pass."""
    pool, held, answers = BlockPool(BLOCK, 10), [], []
    for count in (4, 3, 3, 2, 4, 1, 5, 2, 3, 10, 1):
        fits = count <= pool.available
        answers.append((pool.available, fits))
        if fits:
            blocks = pool.take(count)
            assert len(blocks) == len(set(blocks.tolist())) == count
            held.append(blocks)
        if len(held) > 1:
            pool.give_back(held.pop(0), FakeEvent(patience))
        pool.check_integrity(np.concatenate(held) if held else np.empty(0, np.int64))
    return answers


def test_availability_does_not_depend_on_how_far_a_stream_is() -> None:
    at_once = _run(0)
    assert {fits for _, fits in at_once} == {True, False}
    for patience in (1, 2, 5, 1 << 30):
        assert _run(patience) == at_once


def test_a_returning_block_is_reused_only_after_its_event() -> None:
    pool = BlockPool(BLOCK, 4)
    slow = FakeEvent(1 << 30)
    pool.give_back(pool.take(4), slow)
    assert (pool.available, pool.returning, slow.waited) == (4, 4, 0)
    pool.take(1)
    assert slow.waited == 1
