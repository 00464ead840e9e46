"""Which servers bring their retracted requests back from copies, and which leave them to the engine."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from plain_world import small_world
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dsv4.engine.coverage import launch
from sglang_dsv4.engine.plain import start
from sglang_dsv4.engine.plain.serving import plain_of
from sglang_dsv4.testing.world import PlainWorld

LOG = start.__name__


def bare(**changes: Any) -> Any:
    """A world's scheduler before anything was attached; ``changes``: its attributes."""
    world = small_world()
    vars(world.pool).pop(start.NAME)
    vars(world.scheduler).update(changes)
    return world.scheduler


def with_changes(bag: Any, changes: dict[str, Any]) -> SimpleNamespace:
    """A copy of a namespace of the engine's configuration, with ``changes``."""
    return SimpleNamespace(**({name: getattr(bag, name) for name in dir(bag) if not name.startswith("_")} | changes))


NOT_COVERED: dict[str, dict[str, Any]] = {  # the reason given: attributes of the scheduler, or of the launch
    "speculative decoding by NGRAM": {"scheduler": {"spec_algorithm": SpeculativeAlgorithm.NGRAM}},
    "prefix cache SimpleNamespace": {"scheduler": {"tree_cache": SimpleNamespace()}},
    "context parallel attention": {"parallel": {"attn_cp_size": 2}},
    "decode context parallelism": {"parallel": {"dcp_enabled": True}},
    "pipeline parallelism": {"args": {"pp_size": 2}},
    "HiSparse": {"memory": {"enable_hisparse": True}},
    "storage backend": {"memory": {"enable_hierarchical_cache": True, "hicache_storage_backend": "file"}},
    "watermark": {"memory": {"enable_hisparse": True}, "features": {"enable_watermark": True}},
    "encoder SWA bounded replay": {"features": {"enable_encoder_swa_bounded_replay": True}},
    "": {"features": {"enable_watermark": True}},  # covered, but beside HiSparse: a watermark begins with an extend
}


@pytest.mark.parametrize("reason", NOT_COVERED)
def test_what_is_not_covered_is_the_engines(reason: str, caplog: pytest.LogCaptureFixture) -> None:
    changes = NOT_COVERED[reason]
    scheduler = bare(**changes.get("scheduler", {}))
    said = launch(drafts=scheduler.spec_algorithm)
    known = {bag: with_changes(getattr(said, bag), changes[bag]) for bag in ("args", "memory") if bag in changes}
    if "features" in changes:
        known["exec"] = SimpleNamespace(features=with_changes(said.exec.features, changes["features"]))
    known["parallel"] = SimpleNamespace(**{"attn_cp_size": 1, "dcp_enabled": False, **changes.get("parallel", {})})
    on = replace(said, **known, hisparse=changes.get("memory", {}).get("enable_hisparse", False))
    found = list(start._reasons(scheduler, on))
    assert any(reason in text for text in found) if reason else not found
    if "scheduler" in changes:
        with caplog.at_level(logging.WARNING, LOG):
            start.start_plain_serving(None, scheduler)
        assert plain_of(scheduler.token_to_kv_pool_allocator) is None and reason in caplog.text


@pytest.mark.parametrize("mode", [DisaggregationMode.DECODE, DisaggregationMode.PREFILL])
def test_other_servers_are_not_touched(mode: Any, caplog: pytest.LogCaptureFixture) -> None:
    scheduler = bare(disaggregation_mode=mode)
    caplog.clear()
    start.start_plain_serving(None, scheduler)
    assert plain_of(scheduler.token_to_kv_pool_allocator) is None and not caplog.records


def test_without_it_a_retract_is_the_engines_own() -> None:
    """A server that was not attached: the hooks are there, and do nothing."""
    world: PlainWorld = small_world()
    vars(world.pool).pop(start.NAME)
    req = world.submit(range(500), max_new=20)
    for _ in range(8):
        world.step()
    world.retract(req)
    world.evict(1 << 20, 1 << 20)
    assert world.step().extend_lens[0] >= len(req.origin_input_ids)
    world.run()
    assert world.pool.host.counters.saves == 0
