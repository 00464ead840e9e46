"""Launcher: which calls reach Triton and which go straight to a compiled kernel."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

from triton_ops import _launch
from triton_ops._launch import Launcher

GRID = (3, 2, 1)


class FakeCompiled:
    """What a launch through Triton returns."""

    packed_metadata = ()

    def __init__(self, log: list) -> None:
        self.log = log

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.log.append(("compiled", self, grid, arguments, options))


class FakeKernel:
    """Compiles a variant at every launch. ``compiled``: whether a launch returns it, unlike the interpreter."""

    def __init__(self, compiled: bool = True) -> None:
        self.log: list = []
        self.compiled = compiled
        self.variants: list[FakeCompiled] = []

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.log.append(("triton", grid, arguments, options))
            self.variants.append(FakeCompiled(self.log))
            return self.variants[-1] if self.compiled else object()

        return launch


def test_the_second_call_of_a_key_goes_to_the_compiled_kernel():
    kernel = FakeKernel()
    launcher = Launcher(kernel, num_warps=8, num_stages=2)
    launcher("key", GRID, 1, 2.5)
    launcher("key", (7, 1, 1), 3, 4.5)
    launcher("other", GRID, 5, 6.5)
    launcher("key", (9, 1, 1), 5, 6.5, stream=77)
    assert kernel.log == [
        ("triton", GRID, (1, 2.5), {"num_warps": 8, "num_stages": 2}),
        ("compiled", kernel.variants[0], (7, 1, 1), (3, 4.5), {"stream": None}),
        ("triton", GRID, (5, 6.5), {"num_warps": 8, "num_stages": 2}),
        ("compiled", kernel.variants[0], (9, 1, 1), (5, 6.5), {"stream": 77}),
    ]


def test_the_first_call_on_a_named_stream(monkeypatch):
    """Triton launches on the current stream, so the named one becomes current for that call alone."""
    kernel = FakeKernel()

    @contextlib.contextmanager
    def on(stream):
        kernel.log.append(("enter", stream))
        yield
        kernel.log.append(("leave", stream))

    cuda = SimpleNamespace(stream=on, ExternalStream=lambda handle: f"stream {handle}")
    monkeypatch.setattr(_launch, "torch", SimpleNamespace(cuda=cuda))
    launcher = Launcher(kernel, num_warps=1)
    launcher("key", GRID, 4, stream=0)
    launcher("key", GRID, 5, stream=0)
    assert kernel.log == [
        ("enter", "stream 0"),
        ("triton", GRID, (4,), {"num_warps": 1}),
        ("leave", "stream 0"),
        ("compiled", kernel.variants[0], GRID, (5,), {"stream": 0}),
    ]
