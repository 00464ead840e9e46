"""0.5.17: weights are updated with a flush, the default, while a copy waits, which holds nothing of the device."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
from server_fixture import World, only_old

pytestmark = only_old


@pytest.fixture
def paused():
    """A paused server with a copy, and what its flushes did."""
    from sglang.srt.managers.scheduler import Scheduler

    world = World()
    world.copy = world.park(world.admit(300, "away"))
    world.flushes = []
    scheduler = world.scheduler
    vars(scheduler).update(
        running_batch=SimpleNamespace(reqs=[], is_empty=lambda: True), last_batch=None, _engine_paused=True,
        enable_hierarchical_cache=False, decode_offload_manager=None, cur_batch_for_debug=None, draft_worker=None,
        result_queue=[], dllm_manager=SimpleNamespace(any_staging_reqs=lambda: False),
        _pp_microbatches_drained=lambda: True,
        grammar_manager=SimpleNamespace(grammar_queue=[], clear=lambda: None),
        metrics_reporter=SimpleNamespace(
            reset_metrics=lambda: world.flushes.append("flushed"), is_stats_logging_rank=False
        ),
        req_to_token_pool=world.table, token_to_kv_pool_allocator=world.allocator,
    )  # fmt: skip
    scheduler.is_fully_idle = lambda *given, **named: Scheduler.is_fully_idle(scheduler, *given, **named)
    world.flush = lambda **_: Scheduler.flush_cache(scheduler, empty_cache=False)
    return world


def update(world: World) -> SimpleNamespace:
    """The engine's ``update_weights_from_disk``, with its flush."""
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    manager = object.__new__(SchedulerWeightUpdaterManager)
    manager.draft_worker = manager.metrics_collector = manager.tp_cpu_group = None
    manager.scheduler = SimpleNamespace(record_weight_version_change=lambda new_version: None)
    manager.tp_worker = SimpleNamespace(update_weights_from_disk=lambda *_: (True, "ok"), weight_update_runners=list)
    manager.flush_cache = world.flush
    return manager.update_weights_from_disk(mock.MagicMock(flush_cache=True))


def test_weights_are_updated_and_the_request_is_computed_again(paused):
    assert update(paused).success and paused.flushes == ["flushed"]
    assert [req.rid for req in paused.queue.retracted_queue] == ["away"], "the request waits as before"
    paused.scheduler._engine_paused = False  # generation continues
    assert paused.resume() == [] and paused.copy.released
    assert [req.rid for req in paused.rebootstrapped] == ["away"]
    paused.nothing_held()


def test_a_flush_alone_leaves_the_copy_good(paused):
    before = paused.copy.tokens
    assert paused.flush() and [req.rid for req in paused.resume()] == ["away"]
    assert before == 300 and not paused.queue.retracted_queue


def test_what_runs_still_forbids_a_flush(paused):
    paused.scheduler.running_batch.is_empty = lambda: False
    assert not paused.flush() and paused.flushes == []
    assert [req.rid for req in paused.queue.retracted_queue] == ["away"]


def test_a_failing_flush_loses_nobody(paused):
    paused.scheduler.tree_cache = SimpleNamespace(reset=mock.Mock(side_effect=OSError("broken")))
    with pytest.raises(OSError, match="broken"):
        paused.flush()
    assert [req.rid for req in paused.queue.retracted_queue] == ["away"]
