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


class Stream:
    cuda_stream: int | None = None

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    wait_stream = wait_event

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def synchronize(self) -> None:
        pass


class Profile:
    """Plays a profile of one kernel and one copy from the host, independent of the run."""

    def __init__(self, **_: Any) -> None:
        pass

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def export_chrome_trace(self, path: str) -> None:
        events = [{"cat": category} for category in ("cuda_runtime", "kernel", "gpu_memcpy")]
        Path(path).write_text(json.dumps({"traceEvents": events}))


class Graph:
    """Captures nothing."""

    def replay(self) -> None:
        pass


@contextlib.contextmanager
def played_card(monkeypatch: Any) -> Iterator[Device]:
    """Provides a GPU inside, as far as a benchmark asks. Its copiers are those of ``pretended_device``."""
    device = Device(monkeypatch)
    stream = Stream()
    played = {
        "is_available": lambda: True, "device_count": lambda: 1, "get_device_name": lambda *_: "a played card",
        "synchronize": device.finish, "Event": Event, "Stream": Stream, "current_stream": lambda *_: stream,
        "stream": lambda _: contextlib.nullcontext(), "set_stream": lambda _: None, "_sleep": lambda _: None,
        "empty_cache": lambda: None, "memory_allocated": lambda: 0, "reset_peak_memory_stats": lambda: None,
        "max_memory_allocated": lambda: 1024, "CUDAGraph": Graph,
        "graph": lambda *_, **__: contextlib.nullcontext(),
    }  # fmt: skip
    for name, value in played.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(copy_engine, "require_driver", lambda: None)
    with OnTheCpu():
        yield device
