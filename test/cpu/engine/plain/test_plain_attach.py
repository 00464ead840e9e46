"""Which servers bring their retracted requests back from copies, and which leave them to the engine."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from plain_world import serving, small_world
from sglang.srt import runtime_context
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dsv4.engine.hooks import HOOKS, hooks_of, is_wanted
from sglang_dsv4.engine.plain import attach
from sglang_dsv4.engine.plain.waiting import plain_of
from sglang_dsv4.engine.releases import TESTED, engine_version
from sglang_dsv4.testing.world import PlainWorld

LOG = attach.__name__


def bare(**changes: Any) -> Any:
    """A world's scheduler before anything was attached; ``changes``: its attributes."""
    world = small_world()
    vars(world.pool).pop(attach.NAME)
    vars(world.scheduler).update(changes)
    return world.scheduler


def attached(scheduler: Any, **parallel: Any) -> bool:
    """Whether the hook takes that server."""
    topology = SimpleNamespace(**{"attn_cp_size": 1, "dcp_enabled": False, **parallel})
    with mock.patch.object(runtime_context, "get_parallel", lambda: topology):
        attach.attach(None, scheduler)
    return plain_of(scheduler.token_to_kv_pool_allocator) is not None


def test_a_plain_server_says_so_at_start(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, LOG):
        world = small_world()
    assert [record.getMessage() for record in caplog.records] == [
        "plain serving: a retracted request comes back from its host copy, without a prefill"
    ]
    assert serving(world).host is world.pool.host


@pytest.mark.parametrize("mode", [DisaggregationMode.DECODE, DisaggregationMode.PREFILL])
def test_other_servers_are_not_touched(mode: Any, caplog: pytest.LogCaptureFixture) -> None:
    scheduler = bare(disaggregation_mode=mode)
    caplog.clear()
    with caplog.at_level(logging.INFO, LOG):
        assert not attached(scheduler)
    assert not caplog.records


@pytest.mark.parametrize(
    ("change", "parallel", "reason"),
    [
        ({"spec_algorithm": SpeculativeAlgorithm.NGRAM}, {}, "speculative decoding by NGRAM"),
        ({"tree_cache": SimpleNamespace()}, {}, "prefix cache SimpleNamespace"),
        ({}, {"attn_cp_size": 2}, "context parallel attention"),
        ({}, {"dcp_enabled": True}, "decode context parallelism"),
    ],
)
def test_what_is_not_covered_is_the_engines(
    change: dict[str, Any], parallel: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = bare(**change)
    caplog.clear()
    with caplog.at_level(logging.WARNING, LOG):
        assert not attached(scheduler, **parallel)
    assert [reason in record.getMessage() for record in caplog.records] == [True]


def test_pipelines_are_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = bare()
    found = SimpleNamespace(server_args=SimpleNamespace(pp_size=2))
    monkeypatch.setattr(runtime_context, "get_context", lambda: found)
    with get_parallel().override(attn_cp_size=1):
        assert "pipeline parallelism" in next(attach._reasons(scheduler))


def with_changes(bag: Any, changes: dict[str, Any]) -> SimpleNamespace:
    """A copy of a namespace of the engine's configuration, with ``changes``."""
    return SimpleNamespace(**({name: getattr(bag, name) for name in dir(bag) if not name.startswith("_")} | changes))


@pytest.mark.parametrize(
    ("name", "reason"), [("enable_hisparse", "HiSparse"), ("enable_hierarchical_cache", "hierarchical cache")]
)
def test_other_tiers_are_the_engines(name: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = bare()
    memory = with_changes(runtime_context.get_memory(), {name: True})
    monkeypatch.setattr(runtime_context, "get_memory", lambda: memory)
    with get_parallel().override(attn_cp_size=1):
        assert reason in next(attach._reasons(scheduler))


def test_a_watermark_beside_hisparse_is_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restored HiSparse request cannot be an extend, and a watermark begins with one."""
    scheduler = bare()
    found = SimpleNamespace(features=with_changes(runtime_context.get_exec().features, {"enable_watermark": True}))
    memory = with_changes(runtime_context.get_memory(), {"enable_hisparse": True})
    monkeypatch.setattr(runtime_context, "get_exec", lambda: found)
    with get_parallel().override(attn_cp_size=1):
        assert not [reason for reason in attach._reasons(scheduler) if "watermark" in reason]
        monkeypatch.setattr(runtime_context, "get_memory", lambda: memory)
        assert "watermark" in next(attach._reasons(scheduler))


def test_a_server_that_returns_choices_says_that_it_publishes_less(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, LOG):
        world = small_world(server_args={"enable_return_routed_experts": True})
    assert ["restored requests are not published" in record.getMessage() for record in caplog.records] == [True]
    assert not serving(world).publishes


@pytest.mark.parametrize("name", ["enable_encoder_swa_bounded_replay", "enable_decoder_swa_bounded_replay"])
def test_trap_18_a_replay_of_windows_is_the_engines(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = bare()
    found = SimpleNamespace(features=with_changes(runtime_context.get_exec().features, {name: True}))
    monkeypatch.setattr(runtime_context, "get_exec", lambda: found)
    with get_parallel().override(attn_cp_size=1):
        assert "replay" in next(attach._reasons(scheduler))


def test_the_setting_takes_the_hooks_or_leaves_them() -> None:
    version = engine_version()
    plain = [hook for hook in HOOKS if hook.part == "plain"]
    assert len(plain) == 6
    assert [hook for hook in hooks_of(version, "plain") if hook.part == "plain"] == plain
    assert not [hook for hook in hooks_of(version) if hook.part == "plain"]
    assert is_wanted("auto", TESTED[0])
    assert not is_wanted("auto", "0.5.99")
    assert not is_wanted("off", TESTED[0])


def test_without_it_a_retract_is_the_engines_own() -> None:
    """A server that was not attached: the hooks are there, and do nothing."""
    world: PlainWorld = small_world()
    vars(world.pool).pop(attach.NAME)
    req = world.submit(range(500), max_new=20)
    for _ in range(8):
        world.step()
    world.retract(req)
    world.evict(1 << 20, 1 << 20)
    assert world.step().extend_lens[0] >= len(req.origin_input_ids)
    world.run()
    assert world.pool.host.counters.saves == 0
