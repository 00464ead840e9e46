"""Ranks of a group come to the same answer about host memory, whatever each of them has."""

import random
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import units_by_hand
from plain_world import forget, over, run_to, serving, small_world, world_with_sessions
from pretended_device import Device
from processes import exchange, on_ranks
from server_fixture import Recorder, World

from sglang_dsv4.cache.families import Geometry, families
from sglang_dsv4.cache.units import Units
from sglang_dsv4.engine import ranks as engine_ranks
from sglang_dsv4.engine.ranks import ranks_a_machine
from sglang_dsv4.errors import HostMemoryExhausted, IndexMismatch
from sglang_dsv4.hostmem import reserve
from sglang_dsv4.hostmem.memory import HostMemory
from sglang_dsv4.hostmem.sizing import ArenaSize
from sglang_dsv4.pools.copy_service import ServerContext
from sglang_dsv4.settings import Settings
from sglang_dsv4.testing.standalone import FLASH_RATIOS, PRO_RATIOS, PoolSpec, make_pool
from sglang_dsv4.transfer import reference


def size(count: int, nbytes: int = 4096, tails: tuple[int, ...] = (0, 2)) -> ArenaSize:
    return ArenaSize(Units(nbytes, 1, tails), count)


GIVEN = {
    "two": ([size(100), size(70)], [size(70)] * 2),
    "one refuses": ([None, size(10)], [None, None]),
    # Each keeps its own bytes of a unit.
    "stages": (
        [size(9, 8192, (0, 4)), size(50, tails=(1, 3)), size(60)],
        [size(9, 8192, (1, 4)), *[size(9, tails=(1, 4))] * 2],
    ),
}


@pytest.mark.parametrize("case", GIVEN)
def test_each_rank_gets_the_fewest_units_and_the_longest_tails(tmp_path: Path, case: str) -> None:
    from sglang.srt.distributed import parallel_state

    mine, wanted = GIVEN[case]

    def work(rank: int) -> Any:
        group = SimpleNamespace(cpu_group=torch.distributed.group.WORLD, world_size=len(mine))
        parallel_state.get_world_group = lambda: group
        return engine_ranks.agreed_size(mine[rank])

    assert on_ranks(tmp_path, work, len(mine)) == wanted


def stages(ratios: tuple[int, ...], count: int, sources: tuple[int, ...] = ()) -> list[Geometry]:
    """Returns the geometries of as many stages of a pipeline."""
    edges = [len(ratios) * stage // count for stage in range(count + 1)]
    return [
        Geometry(ratios[first:end], first, sources=tuple(layer for layer in sources if first <= layer < end))
        for first, end in pairwise(edges)
    ]


PIPELINES = {
    "flash": stages(FLASH_RATIOS, 2),
    "pro": stages(PRO_RATIOS, 8),
    "v41": stages((0,) * 4 + (2,) * 8 + (1,) * 4, 4, sources=(4, 8, 12)),
    "no history on one": stages((0, 0, 4, 128, 4, 128), 3),
}


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_stages_with_other_units_give_out_the_same_ones_and_refuse_alike(pipeline: str) -> None:
    """One that had room alone would keep what the others send back; ranks of each number the units of shares alike."""
    mine = [ArenaSize(Units.of(g), 90 + 10 * number) for number, g in enumerate(PIPELINES[pipeline])]
    assert len({each.units.tails for each in mine}) > 1 and len({each.units.nbytes for each in mine}) > 1
    memories = [
        HostMemory(families(g), each.agreed(mine), pin=False) for g, each in zip(PIPELINES[pipeline], mine, strict=True)
    ]
    draw, alive, refused = random.Random(1), [[] for _ in memories], 0
    for _ in range(600):
        tokens = draw.choice((draw.randint(1, 5_000), draw.randint(1, 600), 256 * draw.randint(1, 20)))
        taken = []
        for memory, copies, g in zip(memories, alive, PIPELINES[pipeline], strict=True):
            try:
                copies.append(memory.allocate(tokens, g))
                taken.append((copies[-1].units, copies[-1].in_tail))
            except HostMemoryExhausted:
                taken.append(None)
        assert taken == [taken[0]] * len(taken), tokens
        refused += taken[0] is None
        while len(alive[0]) > draw.choice((1, 5, 20)):
            leaves = draw.randrange(len(alive[0]))
            for copies in alive:
                copies.pop(leaves).release()
    assert 50 < refused < 550
    for memory in memories:
        memory.check_integrity()
        memory.close()


def attached(stage: tuple[int, int], units: int) -> Any:
    """In a child: a stage's host memory, for so many units of its own and what is left of one."""
    engine_ranks.of_every_rank = exchange
    pool = make_pool(PoolSpec(stage=stage))
    settings = Settings(host_gb=(units + 0.9) * units_by_hand.unit_bytes(pool) / 2**30)
    return pool.attach_host(settings, ServerContext(agreed_size=engine_ranks.agreed_size))


STAGES = pytest.mark.parametrize("stages", [((0, 4), (2, 6)), ((0, 2), (2, 6))], ids=["alike", "one has no pages"])


@STAGES
def test_ranks_with_different_memory_find_room_for_the_same_requests(tmp_path: Path, stages: Any) -> None:
    """Else one stage of a pipeline keeps a request that the other sends back, and nothing is admitted any more."""

    def work(rank: int) -> Any:
        host = attached(stages[rank], (70, 41)[rank])
        answers, copies = [], []
        for tokens in (300, 1, 1000, 513, 2000, 40, 256, 700):
            try:
                copies.append(host.memory.allocate(tokens, host.buffers.geometry))
                answers.append(list(copies[-1].units))
            except HostMemoryExhausted:
                answers.append(None)
                if copies:
                    copies.pop(0).release()
        for copy in copies:
            copy.release()
        return answers, host.memory.pool.total

    first, second = on_ranks(tmp_path, work)
    assert first == second
    assert first[1] == 41
    assert None in first[0] and any(first[0]), "the sequence reaches the limit"


@STAGES
def test_what_is_too_little_once_agreed_is_refused_on_every_rank(tmp_path: Path, stages: Any) -> None:
    """It was enough for the one with short tails, and the other had more."""
    least = [units_by_hand.least(make_pool(PoolSpec(stage=stage))) for stage in stages]
    short = least.index(min(least))
    assert least[short] < least[1 - short]

    def work(rank: int) -> str:
        with pytest.raises(HostMemoryExhausted) as caught:
            attached(stages[rank], least[short] if rank == short else 3 * least[rank])
        return str(caught.value)

    for said in on_ranks(tmp_path, work):
        assert "hold not one request" in said and "raise DSV4_HOST_GB" in said


def test_a_rank_whose_pool_is_refused_stops_the_others(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        engine_ranks.of_every_rank = exchange
        pool = make_pool(PoolSpec(hisparse=rank == 1))
        host = pool.attach_host(Settings(), ServerContext(agreed_size=engine_ranks.agreed_size))
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


@pytest.mark.parametrize(("share", "attention", "first"), [("auto", 2, [True, False]), ("auto", 1, [True] * 2),
                                                           ("off", 2, [False] * 2)])  # fmt: skip
def test_one_rank_of_an_arena_starts_a_store_early(
    tmp_path: Path, share: str, attention: int, first: list[bool]
) -> None:
    def work(rank: int) -> bool:
        lockstep(attention)
        return engine_ranks.will_be_first(share)

    assert on_ranks(tmp_path, work) == first


@pytest.mark.parametrize("machines", (1, 2))
def test_ranks_under_launchers_of_their_own_are_one_server(tmp_path: Path, machines: int) -> None:
    """Two of --nnodes on one machine, each with half of the ranks: the first one's launcher names the server."""

    def work(rank: int) -> Any:
        lockstep()
        engine_ranks.machine = lambda: f"machine {rank % machines}"
        engine_ranks.launcher = lambda: f"launcher {rank}"
        place = engine_ranks.place(SimpleNamespace(enable_dp_attention=False, dp_size=1, nnodes=2))
        return place.ranks, place.launcher

    apart = [(1, "launcher 0"), (1, "launcher 1")]
    assert on_ranks(tmp_path, work) == ([(2, "launcher 0")] * 2 if machines == 1 else apart)


def test_a_server_claims_under_its_first_ranks_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr("sglang_dsv4.engine.memory.place", lambda args: engine_ranks.Place(2, "the first", {1}))
    real = reserve.Claim
    monkeypatch.setattr(reserve, "Claim", lambda *given: (made.append(given), real(*given))[1])
    assert World().host.context.ranks == 2
    assert made == [(2, "the first", {1})]


@pytest.mark.parametrize(
    ("attention_dp", "dp", "tp", "pp", "nodes", "ranks"),
    [(False, 1, 8, 1, 1, 8), (True, 8, 8, 1, 1, 8), (False, 2, 4, 1, 1, 8), (False, 1, 16, 1, 2, 8),
     (False, 1, 4, 2, 2, 4)],
)  # fmt: skip
def test_ranks_that_share_a_machine(attention_dp: bool, dp: int, tp: int, pp: int, nodes: int, ranks: int) -> None:
    args = SimpleNamespace(enable_dp_attention=attention_dp, dp_size=dp, tp_size=tp, pp_size=pp, nnodes=nodes)
    assert ranks_a_machine(args) == ranks
