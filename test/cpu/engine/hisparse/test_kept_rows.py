"""A retracted HiSparse request comes back with the c4 rows that lay on the host all along, and a copy of the rest."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import oracle
import pytest
import torch
from hisparse_world import HISPARSE, HOT, MOST, ROWS, HiSparseWorld
from server_fixture import SPEC, World
from sglang.srt.managers.schedule_batch import FINISH_LENGTH

from sglang_dsv4.engine.retract.save import drop_copy
from sglang_dsv4.errors import CopyConsumed, RowsNotKept, VerifyMismatch
from sglang_dsv4.testing.ledger import Ledger

# Short and long of the hot rows, which are of 256 tokens; pages of rows; each place in a block of four; few and none.
ANOTHER = Ledger(1, MOST)  # another request's rows
LENGTHS = (3, 4, 63, 64, 255, 256, 257, 260, 261, 512, 900, 901, 902, 903, 1024)


def away_and_back(world: HiSparseWorld, req: Any) -> None:
    """Retracts and resumes ``req``; everything on the device is other in between, and every byte is compared."""
    before = world.read(req)
    world.park(req)
    oracle.poison(world.pool)
    assert world.resume() == [req]
    oracle.compare(before, world.read(req))
    world.check_history(req)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("n", LENGTHS)
def test_every_byte_comes_back_and_the_rows_are_not_copied(n: int, overlap: bool) -> None:
    world = HiSparseWorld(overlap=overlap)
    oracle.fill(world.pool, n)
    req = world.admit(n)
    world.check_history(req)
    away_and_back(world, req)
    for _ in range(9):
        world.step(req)
        world.check_history(req)
    away_and_back(world, req)
    assert world.host.counters.loads == 2 and not world.host.counters.fallbacks
    world.finish(req)
    world.nothing_held()


def test_a_copy_has_less_than_three_tenths_of_the_bytes() -> None:
    """Of the pages of a request; of the tiny model, whose window is as large as any model's."""
    for tokens in (900, 3000):
        copies = [each.park(each.admit(tokens, prompt=tokens)) for each in (HiSparseWorld(), World(spec=SPEC))]
        paged = [copy.in_pages * copy.memory.units.nbytes for copy in copies]
        assert copies[0].nbytes < copies[1].nbytes and paged[0] <= 0.3 * paged[1]


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("n", [256, 900])
def test_a_retract_before_the_first_step_leaves_the_host_rows_alone(n: int, in_flight: bool) -> None:
    """The engine leaves the place of the newest row empty at an admission: what lies there must not be backed up."""
    world = HiSparseWorld()
    oracle.fill(world.pool, 3)
    req = world._arrive(n, "r")
    world.coordinator.admit_request_direct(req)
    if in_flight:
        world._prepare(req)
    away_and_back(world, req)


def test_a_retract_waits_for_the_last_backup(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs on a stream of its own: a row that arrives later is missing in what verify mode sums up."""
    monkeypatch.setenv("DSV4_VERIFY", "1")
    world = HiSparseWorld()
    req = world.admit(701)
    owner, newest = world.coordinator, torch.tensor([174])
    place = owner.req_to_host_pool[world.slot(req), newest]
    world.put_rows(ANOTHER, newest, place, host=True)

    def arrives(stream: Any) -> None:
        world.put_rows(world.ledgers["r"], newest, place, host=True)

    owner._backup_done_event, owner._has_pending_backup = SimpleNamespace(wait=arrives), True
    away_and_back(world, req)


def test_a_retract_waits_for_the_forward_that_makes_the_newest_row(monkeypatch: pytest.MonkeyPatch) -> None:
    world = HiSparseWorld()
    req = world.admit(704)
    owner, newest = world.coordinator, torch.tensor([175])
    place = owner.req_to_device_buffer[world.slot(req), HOT : HOT + 1]
    world.put_rows(ANOTHER, newest, place)

    def ends(stream: Any) -> None:
        world.put_rows(world.ledgers["r"], newest, place)

    owner.decode_producer_stream = object()
    current = SimpleNamespace(wait_stream=ends)
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(current_stream=lambda: current))
    away_and_back(world, req)


def test_requests_that_run_never_lack_a_page_however_much_is_kept() -> None:
    world = HiSparseWorld()
    reqs = [world.admit(2000, f"r{i}", prompt=2000) for i in range(2)]
    for req in reqs:
        world.park(req)
    world.queue.retracted_queue.clear()  # they wait; who comes now fills the whole logical cache
    more = [world.admit(1984, f"s{i}", prompt=1960) for i in range(3)]
    assert world.allocator.logical_attn_allocator.full_available_size() < 256
    for req in more:
        for _ in range(60):
            world.step(req)
        world.check_history(req)
    assert world.host_pages()["running"] + world.kept.held > world.host_pool.num_host_pages - world.kept.reserve


def test_no_more_is_kept_than_the_reserve(caplog: pytest.LogCaptureFixture) -> None:
    world = HiSparseWorld()
    world.kept.reserve = 3
    first, second = world.admit(700, "first"), world.admit(300, "second")
    world.park(first)
    world.retract(second)
    assert world.copy_of(second) is None and world.host.counters.fallbacks == {"HostMemoryExhausted": 1}
    assert "raise DSV4_HOST_GB" in caplog.text and world.kept.held == 3
    world.requeue(second)
    assert world.rebootstrapped == [second]
    assert world.resume() == [first]
    world.check_history(first)
    world.finish(first)
    world.nothing_held()


def test_a_request_waits_until_there_are_hot_rows() -> None:
    world = HiSparseWorld(hot_pages=4)  # for two requests
    first, second = world.admit(700, "first"), world.admit(500, "second")
    world.park(first)
    third = world.admit(300, "third")
    assert world.resume() == [] and world.queue.retracted_queue == [first]
    world.finish(third)
    assert world.resume() == [first]
    for req in (first, second):
        world.check_history(req)


def test_two_requests_of_one_id_wait_for_hot_rows_of_two() -> None:
    """Each tokenizer worker knows its own ids alone."""
    world = HiSparseWorld(hot_pages=4)
    first, second = world.admit(700, "same"), world.admit(500, "other")
    second.rid = "same"
    world.park(first)
    third = world.admit(300, "third")
    world.park(second)
    assert world.resume() == [first] and world.queue.retracted_queue == [second]
    world.finish(third)
    assert world.resume() == [second] and world.queue.retracted_queue == []
    second.rid = "other"
    for req in (first, second):
        world.check_history(req)


def test_transfers_have_hot_rows_before_who_was_retracted() -> None:
    world = HiSparseWorld(hot_pages=4)
    first, _ = world.admit(700, "first"), world.admit(500, "second")
    world.park(first)
    arriving = world._arrive(300, "arriving")
    transfers = world.scheduler.disagg_decode_transfer_queue
    transfers.queue.append(SimpleNamespace(req=arriving, host_staged=False))
    transfers.pop_transferred = lambda: [transfers.queue.pop().req] if transfers.queue else []
    assert world.resume() == [] and world.scheduler.waiting_queue == [arriving]
    world.check_history(arriving)  # it was admitted, its newest row too
    assert world.queue.retracted_queue == [first]


def test_nobody_resumes_where_transfers_lack_hot_rows() -> None:
    world = HiSparseWorld(hot_pages=4)
    first, second = world.admit(700, "first"), world.admit(500, "second")
    for req in (first, second):
        world.park(req)
    transfers = [world._arrive(100, f"arriving{i}") for i in range(3)]  # hot rows are there for two
    world.scheduler.disagg_decode_transfer_queue.queue.extend(
        SimpleNamespace(req=req, host_staged=False) for req in transfers
    )
    assert world.resume() == [] and world.queue.retracted_queue == [first, second]


def test_only_those_resume_on_whom_the_stages_of_a_pipeline_agree() -> None:
    world = HiSparseWorld()
    first, second = world.admit(700, "first"), world.admit(500, "second")
    for req in (first, second):
        world.park(req)
    free = world.allocator.hisparse_attn_allocator
    with mock.patch.object(free, "available_size", lambda: world.kept.hot_rows):  # for one of them
        assert world.queue.resume_retracted_reqs(["second"]) == [second] and world.queue.retracted_queue == [first]
    world.check_history(second)


def retracted(world: HiSparseWorld) -> Any:
    """A request that waits with kept rows."""
    req = world.admit(700)
    world.park(req)
    assert world.kept.held == 3
    return req


def finished(world: HiSparseWorld, req: Any) -> None:
    """The coordinator has freed its rows already, and its slot must not get a page for the newest of them."""
    world.coordinator.request_finished(req)
    req.finished_reason = FINISH_LENGTH(length=1)
    world.retract(req)


def lacks_a_page(world: HiSparseWorld, req: Any) -> None:
    """Not all of its history is on the host."""
    owner, slot = world.coordinator, world.slot(req)
    world.host_pool.free(owner.req_to_host_pool[slot, 2 * ROWS : 3 * ROWS].clone())
    owner.req_to_host_pool[slot, 2 * ROWS :] = -1
    owner.req_to_host_pool_allocated_len[slot] = 2 * ROWS
    world.retract(req)


def staged(world: HiSparseWorld, req: Any) -> None:
    req.hisparse_staging = True
    world.retract(req)


def the_last(world: HiSparseWorld, req: Any) -> None:
    """Aborted for want of memory."""
    assert world.retract_decode([req], iter([False, False, False]))[2] == [req]


RELEASES: dict[str, tuple[int, Callable[[HiSparseWorld, Any], Any], bool]] = {  # tokens, way, counted
    "pause": (700, lambda world, req: world.retract(req, offload_kv=False), False),
    "finish": (700, lambda world, req: world.finish(req), False),
    "the last": (700, the_last, False),
    "staged": (700, staged, True),
    "finished": (704, finished, True),
    "a page is missing": (702, lacks_a_page, True),
}


@pytest.mark.parametrize("why", RELEASES)
def test_a_release_without_a_copy_keeps_nothing(why: str) -> None:
    tokens, release, counted = RELEASES[why]
    world = HiSparseWorld()
    req = world._arrive(tokens, "r") if why == "staged" else world.admit(tokens)
    release(world, req)
    assert world.copy_of(req) is None and world.host.counters.fallbacks == ({"RowsNotKept": 1} if counted else {})
    world.nothing_held()


def test_a_save_that_finds_no_room_keeps_nothing() -> None:
    world = HiSparseWorld()
    world.park(world.admit(500, "first"))
    units = world.host.memory.pool
    units.take(units.available)  # for others
    second = world.admit(300, "second")
    world.retract(second)
    assert world.copy_of(second) is None and world.kept.held == 2
    assert world.host.counters.fallbacks == {"HostMemoryExhausted": 1}


def test_rows_are_kept_on_every_rank_or_on_none() -> None:
    """A rank that cannot keep them takes part in the vote, and in the order of host units, like those that can."""
    able, unable = HiSparseWorld(), HiSparseWorld()
    unable.kept.reserve = 2
    votes, units = [], []
    for world, reason in ((unable, "HostMemoryExhausted"), (able, "AnotherRank")):
        world.host.true_on_every_rank = lambda mine: votes.append(mine) or False
        req = world.admit(700)
        world.retract(req)
        assert world.copy_of(req) is None and world.host.counters.fallbacks == {reason: 1}
        world.nothing_held()
        world.host.true_on_every_rank = lambda mine: mine
        for rid in ("later", "last"):
            after = world.admit(250, rid)
            world.retract(after)
            units.append(list(world.copy_of(after).units))
            if rid == "later":
                drop_copy(after)
    assert votes == [False, True]
    assert units[:2] == units[2:], "ranks that share an arena would save into each other's units"


def test_rows_that_changed_while_away_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_VERIFY", "1")
    world = HiSparseWorld()
    req = world.admit(700)
    away_and_back(world, req)
    world.park(req)
    copy = world.copy_of(req)
    world.host_pool.kv_buffer[1][int(copy.lease.detached.pages[1]), 77] += 1
    with pytest.raises(VerifyMismatch, match="c4 rows of 700 tokens"):
        world.resume()


def test_a_copy_is_not_loaded_without_its_rows() -> None:
    world = HiSparseWorld()
    req = retracted(world)
    copy = world.copy_of(req)
    other = world.admit(700, "other", prompt=700)
    with pytest.raises(RowsNotKept, match="were not adopted"):
        world.pool.load_cpu_copy(copy, world.slots(other), req_pool_index=world.slot(other))
    assert not copy.released


def test_a_copy_takes_the_rows_of_its_own_length_alone() -> None:
    world = HiSparseWorld()
    req = world.admit(700)
    with (
        world.kept.detaching(world.slot(req), 700, computed=False),
        pytest.raises(RowsNotKept, match="no c4 rows of 690 tokens"),
    ):
        world.pool.get_cpu_copy(world.slots(req)[:690], req_pool_index=world.slot(req))
    assert world.kept.held == 0 and world.host.memory.copies == 0
    world.finish(req)
    world.nothing_held()


def test_rows_that_were_released_are_nobodys_to_adopt() -> None:
    world = HiSparseWorld()
    copy = world.copy_of(retracted(world))
    world.abort("r")
    with pytest.raises(CopyConsumed, match="are released"):
        world.kept.put_back(copy, 1)
    world.nothing_held()


def test_rows_that_a_resume_did_not_adopt_are_not_for_the_next_request() -> None:
    """It got no place; who comes then has pages of its own."""
    world = HiSparseWorld()
    copy = world.copy_of(retracted(world))
    with world.kept.adopting(copy):
        pass
    other = world.admit(700, "other")
    world.check_history(other)
    assert copy.lease.detached.state == "with a copy" and world.kept.held == 3
    world.finish(other)
    world.abort("r")
    world.nothing_held()


def test_as_many_requests_as_a_page_has_rows_are_backed_up_row_by_row() -> None:
    """0.5.22 takes their rows for one page; the first of them would carry its whole page over others' rows."""
    world = HiSparseWorld(spec=replace(HISPARSE, pages=70, swa_pages=70, requests=66), hot_pages=68)
    owner, count = world.coordinator, ROWS
    lengths, slots = torch.full((count,), 5), torch.arange(1, count + 1)
    owner.req_to_device_buffer[slots, 0] = places = slots * ROWS + slots % ROWS
    world.put_rows(ANOTHER, slots, places)
    owner._eager_backup_previous_token(lengths, slots, lengths, slots)
    for part in world.c4_parts(host=True):
        assert not ANOTHER.differences(part, slots * 4 + 3, owner.req_to_host_pool[slots, 0].long())
