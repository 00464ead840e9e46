"""Ranks of a group come to the same answer about host memory, whatever each of them has."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain_world import forget, over, run_to, serving, small_world, world_with_sessions
from pretended_device import Device
from processes import on_ranks
from server_fixture import Recorder, World

from sglang_dsv4.cache.family import Group
from sglang_dsv4.engine import memory as engine_ranks
from sglang_dsv4.engine.memory import min_over_ranks, ranks_a_machine, smallest_counts
from sglang_dsv4.errors import HostMemoryExhausted, IndexMismatch
from sglang_dsv4.hostmem import reserve
from sglang_dsv4.pools.copy_service import ServerContext
from sglang_dsv4.settings import Settings
from sglang_dsv4.testing.standalone import PoolSpec, make_pool
from sglang_dsv4.transfer import reference


def counts(paged: int, window: int, request: int) -> dict[Group, int]:
    return dict(zip(Group, (paged, window, request), strict=True))


GIVEN = {
    "two": ([counts(100, 3, 9), counts(70, 5, 8)], [counts(70, 3, 8)] * 2),
    "one refuses": ([None, counts(10, 2, 2)], [None, None]),
    # No layer of the first pipeline stage compresses: it limits nobody, and runs out of blocks with the others.
    "stages": ([counts(0, 4, 0), counts(50, 6, 7), counts(60, 9, 0)], [counts(50, 4, 7)] * 3),
    "nobody has pages": ([counts(0, 4, 3), counts(0, 6, 7)], [counts(0, 4, 3)] * 2),
}


@pytest.mark.parametrize("case", GIVEN)
def test_each_rank_gets_the_smallest_counts(tmp_path: Path, case: str) -> None:
    from sglang.srt.distributed import parallel_state

    mine, wanted = GIVEN[case]

    def work(rank: int) -> Any:
        parallel_state.get_world_group = lambda: SimpleNamespace(cpu_group=torch.distributed.group.WORLD)
        return min_over_ranks(mine[rank])

    assert on_ranks(tmp_path, work, len(mine)) == wanted


@pytest.mark.parametrize("stages", [((0, 4), (2, 6)), ((0, 2), (2, 6))], ids=["alike", "one has no pages"])
def test_ranks_with_different_memory_find_room_for_the_same_requests(tmp_path: Path, stages: Any) -> None:
    """Else one stage of a pipeline keeps a request that the other sends back, and nothing is admitted any more."""

    def work(rank: int) -> Any:
        pool = make_pool(PoolSpec(stage=stages[rank]))
        agree = lambda counts: smallest_counts(counts, torch.distributed.group.WORLD)  # noqa: E731
        settings = Settings(host_gb=(0.01, 0.004)[rank])
        host = pool.attach_host(settings, ServerContext(min_over_ranks=agree))
        answers, copies = [], []
        for tokens in (300, 1, 1000, 513, 2000, 40, 256, 700):
            try:
                copies.append(host.memory.allocate(tokens, host.buffers.geometry))
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


def lockstep(attention: int = 2) -> None:
    """In a child: the engine's groups are those of the children. attention: ranks that share a request's heads."""
    from sglang.srt.distributed import parallel_state

    def group(ranks: int) -> SimpleNamespace:
        here = torch.distributed.get_rank()
        members = list(range(ranks)) if ranks > 1 else [here]
        gloo = torch.distributed.group.WORLD
        return SimpleNamespace(world_size=ranks, cpu_group=gloo, rank_in_group=members.index(here), ranks=members)

    engine_ranks._parts_of_requests = lambda: False
    parallel_state.get_world_group = lambda: group(2)
    parallel_state.get_attn_tp_group = lambda: group(attention)


def decode_rank(fails: bool, late: bool) -> tuple[Any, dict[str, int]]:
    """((waits with a copy, resumed, computed again), reasons) of a decode server; late: its device tells later."""
    with pytest.MonkeyPatch.context() as patch:
        world = World()
        device = Device(patch)
        if late:
            device.serve(world.host)
        elif fails:
            world.host._copier.save = Recorder(error=IndexMismatch("a slot out of range"))
        req = world.admit(300)
        if fails and late:
            world.pool.full_to_swa_index_mapping[world.slots(req)[250]] = 0
        world.retract(req)
        world.requeue(req)
        waits = len(world.queue.retracted_queue)
        found = waits, len(world.resume()), len(world.rebootstrapped)
        device.finish()
        world.nothing_held()
        return found, dict(world.host.counters.fallbacks)


def plain_rank(fails: bool) -> tuple[Any, dict[str, int]]:
    """(tokens of the extend after a retract, None where it decodes at once; reasons) of a plain server."""
    world = small_world()
    if fails:
        serving(world).host._copier.save = Recorder(error=IndexMismatch("a slot out of range"))
    req = world.submit(range(415), max_new=20)
    run_to(world, req, 420)
    world.retract(req)
    forget(world)
    batch = world.step()
    extended = None if batch.forward_mode.is_decode() else batch.extend_lens
    over(world)
    return extended, dict(serving(world).host.counters.fallbacks)


def session_rank(fails: bool) -> tuple[Any, dict[str, int]]:
    """(tokens that a next turn prefills, tokens that went on from the session) of a plain server; reasons."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSV4_SESSIONS", "auto")
        world, store = world_with_sessions()
        req = world.submit(range(1300), max_new=3)
        world.run()
        forget(world)
        if fails:
            patch.setattr(reference, "find_request_spans", Recorder(error=IndexMismatch("a slot out of range")))
        world.second_turn(req, range(40), max_new=3)
        extended = world.step().extend_lens
        patch.undo()
        over(world)
        return (extended, store.counters.tokens), dict(serving(world).host.counters.fallbacks)


FAILS: dict[str, tuple[Callable[[bool], Any], Any, Any, str]] = {  # a rank's life, if none fails, if one does, why
    "cannot save": (partial(decode_rank, late=False), (1, 1, 0), (0, 0, 1), "IndexMismatch"),
    "turns out wrong": (partial(decode_rank, late=True), (1, 1, 0), (1, 0, 1), "WindowNotMapped"),
    "session": (session_rank, ([63], 1280), ([1343], 0), "IndexMismatch"),  # another batch than the other's
    "plain": (plain_rank, None, [421], "IndexMismatch"),  # one would decode where the other prefills
}


@pytest.mark.parametrize("failing", (0, 1, None))
@pytest.mark.parametrize("case", FAILS)
def test_a_rank_that_fails_alone_does_not_leave_the_others(tmp_path: Path, case: str, failing: int | None) -> None:
    """Their queues would differ for ever: one waits with a copy, the other computes again."""
    life, fine, again, why = FAILS[case]

    def work(rank: int) -> Any:
        lockstep()
        return life(rank == failing)

    answers = on_ranks(tmp_path, work)
    assert [found for found, _ in answers] == [fine if failing is None else again] * 2
    if failing is not None:
        assert answers[failing][1] == {why: 1} and answers[1 - failing][1] == {"AnotherRank": 1}


def test_ranks_with_requests_of_their_own_do_not_ask_one_another(tmp_path: Path) -> None:
    """Data-parallel attention: one rank retracts, and the other, which does not, is not waited for."""

    def work(rank: int) -> Any:
        lockstep(attention=1)
        if rank == 0:
            return plain_rank(fails=False)
        small_world()  # its host memory is agreed on with the other's
        return None

    assert on_ranks(tmp_path, work) == [(None, {}), None]


@pytest.mark.parametrize("machines", (1, 2))
def test_ranks_under_launchers_of_their_own_are_one_server(tmp_path: Path, machines: int) -> None:
    """Two of --nnodes on one machine, each with half of the ranks: the first one's launcher names the server."""

    def work(rank: int) -> Any:
        lockstep()
        engine_ranks.machine = lambda: f"machine {rank % machines}"
        engine_ranks.launcher = lambda: f"launcher {rank}"
        return tuple(engine_ranks.place(SimpleNamespace(enable_dp_attention=False, dp_size=1, nnodes=2)))

    apart = [(1, "launcher 0"), (1, "launcher 1")]
    assert on_ranks(tmp_path, work) == ([(2, "launcher 0")] * 2 if machines == 1 else apart)


def test_a_server_claims_under_its_first_ranks_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr("sglang_dsv4.engine.memory.place", lambda args: engine_ranks.Place(2, "the first"))
    real = reserve.Claim
    monkeypatch.setattr(reserve, "Claim", lambda *given: (made.append(given), real(*given))[1])
    assert World().host.context.ranks == 2
    assert made == [(2, "the first")]


@pytest.mark.parametrize(
    ("attention_dp", "dp", "tp", "pp", "nodes", "ranks"),
    [(False, 1, 8, 1, 1, 8), (True, 8, 8, 1, 1, 8), (False, 2, 4, 1, 1, 8), (False, 1, 16, 1, 2, 8),
     (False, 1, 4, 2, 2, 4)],
)  # fmt: skip
def test_ranks_that_share_a_machine(attention_dp: bool, dp: int, tp: int, pp: int, nodes: int, ranks: int) -> None:
    args = SimpleNamespace(enable_dp_attention=attention_dp, dp_size=dp, tp_size=tp, pp_size=pp, nnodes=nodes)
    assert ranks_a_machine(args) == ranks
