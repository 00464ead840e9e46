"""Plays ``torch.cuda`` on the CPU, so that a command that needs a GPU runs to its end without one.

Tensors of the card are made on the CPU, streams run their work at once, and clocks tell made-up times.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from pretended_device import Device
from torch.overrides import TorchFunctionMode

from sglang_dsv4.transfer import copy_engine


class OnTheCpu(TorchFunctionMode):
    """Moves made tensors of the card to the CPU; nothing is pinned."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: _moved(value) for name, value in (kwargs or {}).items()}
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*map(_moved, args), **kwargs)


def _moved(value: Any) -> Any:
    on_card = (isinstance(value, torch.device) and value.type == "cuda") or (
        isinstance(value, str) and value.split(":")[0] == "cuda"
    )
    return torch.device("cpu") if on_card else value


class Event:
    """Records and passes at once; each is a tenth of a millisecond after the one before."""

    clock = itertools.count(1)

    def __init__(self, **_: Any) -> None:
        self.at = 0

    def record(self, stream: Any = None) -> None:
        self.at = next(self.clock)

    def elapsed_time(self, other: Event) -> float:
        return (other.at - self.at) / 10

    def query(self) -> bool:
        return False  # a device that is busy: what is clocked behind other work was enqueued in time

    def synchronize(self) -> None:
        pass


def export_chrome_trace(path: str) -> None:
    """Writes a profile of one kernel and one copy from the host, independent of the run."""
    events = [{"cat": category} for category in ("cuda_runtime", "kernel", "gpu_memcpy")]
    Path(path).write_text(json.dumps({"traceEvents": events}))


@contextlib.contextmanager
def played_card(monkeypatch: Any) -> Iterator[Device]:
    """Provides a GPU inside, as far as a benchmark asks. Its copiers are those of ``pretended_device``."""
    device = Device(monkeypatch)
    stream = mock.MagicMock(cuda_stream=None)  # runs its work at once
    stream.record_event.side_effect = lambda event=None: event or Event()
    played = {
        "is_available": lambda: True, "device_count": lambda: 1, "get_device_name": lambda *_: "a played card",
        "synchronize": device.finish, "Event": Event, "Stream": lambda *_, **__: stream,
        "current_stream": lambda *_: stream, "memory_allocated": lambda: 0, "max_memory_allocated": lambda: 1024,
        "CUDAGraph": mock.Mock,
    }  # fmt: skip
    quiet = ("stream", "set_stream", "graph", "_sleep", "empty_cache", "reset_peak_memory_stats")
    played |= dict.fromkeys(quiet, mock.MagicMock())
    for name, value in played.items():
        monkeypatch.setattr(torch.cuda, name, value)
    profile = mock.MagicMock()
    profile.return_value.__enter__.return_value.export_chrome_trace = export_chrome_trace
    monkeypatch.setattr(torch.profiler, "profile", profile)
    monkeypatch.setattr(copy_engine, "require_driver", lambda: None)
    with OnTheCpu():
        yield device
