"""The benchmark of ranks that share an arena runs to its end without a GPU."""

from __future__ import annotations

import json
import pickle
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from processes import FORK

from benchmarks import node_transfer


def forked(target: Any, args: tuple[Any, ...]) -> BaseProcess:
    """A process that has imported the engine; what it is given goes the way of a spawned one's, the queue aside."""
    target, given = pickle.loads(pickle.dumps((target, args[:-1])))
    return FORK.Process(target=target, args=(*given, args[-1]))


def test_three_ranks_move_one_copy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its figures mean nothing here; what it compares and counts does."""
    monkeypatch.setattr(node_transfer, "SPAWN", SimpleNamespace(Queue=FORK.Queue, Process=forked))
    command = "node_transfer --devices cpu,cpu,cpu --layers tiny --tokens 600 --times 1 --out"
    monkeypatch.setattr(sys, "argv", [*command.split(), str(tmp_path)])
    node_transfer.main()
    result = json.loads((tmp_path / "node-transfer.json").read_text())
    bounds = {bound["name"]: bound for bound in result["bounds"]}
    assert len(bounds) == 6
    assert all(bound["ok"] for name, bound in bounds.items() if "over TP" not in name or "bytes" in name), bounds
    alone, together = result["rows"]
    assert together["host_bytes"] == alone["host_bytes"] == sum(together["saved_bytes"])
    for field in ("save_by_rank_ms", "load_by_rank_ms", "enqueued_ms", "saved_bytes"):
        assert len(together[field]) == together["ranks"] == 3 and all(together[field])
    assert together["plain_save_ms"] > 0 < together["plain_load_ms"]
