"""Makes servers and requests for the tests of the retract path, and checks on both."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from server_fixture import World
from sglang.srt.disaggregation.decode import _bootstrap_addr
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_dsv4.engine.decode import recompute

ONE_COPY = {"DSV4_HOST_COPIES": "1"}


def world_with(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], kind: type[World] = World, **kwargs: Any
) -> Any:
    """Returns a server that starts with ``settings`` in its environment."""
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    return kind(**kwargs)


def crowded(monkeypatch: pytest.MonkeyPatch, **kwargs: Any) -> tuple[World, Any]:
    """Returns a server whose only copy is taken, and a running request that will find no room."""
    world = world_with(monkeypatch, ONE_COPY)
    world.park(world.admit(100, "first"))
    return world, world.admit(300, "second", **kwargs)


def prefill_of(world: World, req: Any, rank: int = 0, **info: Any) -> None:
    """Marks ``req`` as from rank ``rank`` of a prefill server, which is known."""
    found = SimpleNamespace(dp_size=1, follow_bootstrap_room=True)
    vars(found).update(info)
    world.queue.kv_manager.prefill_info_table[_bootstrap_addr(req)] = found
    recompute.remember_rank(None, SimpleNamespace(req=req, kv_receiver=SimpleNamespace(prefill_dp_rank=rank)))


def outputs(world: World, lengths: tuple[int, ...], **kwargs: dict[str, Any]) -> list[Any]:
    """Makes running requests in the order in which the engine retracts them: fewest output tokens first."""
    return [world.admit(n, f"r{i}", prompt=n - 2 - i, **kwargs.get(f"r{i}", {})) for i, n in enumerate(lengths)]


def is_503(reason: Any) -> bool:
    """Whether a request that finishes for ``reason`` is answered with 503."""
    return isinstance(reason, FINISH_ABORT) and reason.status_code == 503
