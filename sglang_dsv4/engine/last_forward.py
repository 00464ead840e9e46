"""Once the metadata builder tells the scheduler that a forward's tables are read, the scheduler no longer waits for it.

Until its end that forward still reads the weights, and writes the pages and the slot of a request that has finished.
Whoever changes those waits here. Where no builder is in use nobody waits: the engine's own barrier does.
"""

from __future__ import annotations

from typing import Any

import torch

_state: dict[str, Any] = {"stream": None}  # one scheduler a process


def published(stream: Any) -> None:
    """The forward on ``stream`` (None on the CPU) has told the scheduler early."""
    _state["stream"] = stream


def wait_on_this_stream() -> None:
    """The current stream waits: for what gives pages and slots to another request."""
    if _state["stream"] is not None:
        torch.cuda.current_stream().wait_stream(_state["stream"])


def wait_on_the_host() -> None:
    """The host waits: for weight updates, which may come from other processes.

    Paused in place, the last forward may still run, and would read what is written.
    """
    if _state["stream"] is not None:
        _state["stream"].synchronize()
