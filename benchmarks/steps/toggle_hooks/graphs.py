"""What a graph does is decided when it is captured: to compare two ways in one server, each graph is captured twice.

With this package's metadata kernel inside, and with the engine's. Both have the same pool, the same inputs and outputs
of their own; which of them is replayed is switched between two steps. The draft model's graphs are switched with them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any


class Graphs:
    """Every graph of this process, both ways; a place like those of ``switch``, put in and out with them.

    methods: the places of the methods that are captured.
    """

    def __init__(self, methods: Sequence[Any]) -> None:
        self.methods = methods
        self._kept: list[tuple[Any, Any, dict[bool, tuple[Any, Any]]]] = []  # backend, shape, (graph, output) by way
        self._hooked: bool | None = None

    def capture(self, original: Callable[..., None]) -> Callable[..., None]:
        """Around ``FullCudaGraphBackend.capture_one``."""

        @functools.wraps(original)
        def captured(
            backend: Any, shape_key: Any, forward_fn: Any, capture_inputs: Any = None, post_warmup_hook: Any = None
        ) -> None:
            ways = {}
            for hooked in (False, True):
                for place in self.methods:
                    place.put(hooked)
                if ways and post_warmup_hook is not None:
                    post_warmup_hook()  # what the first capture left is no raw metadata
                original(backend, shape_key, forward_fn, capture_inputs, post_warmup_hook)
                ways[hooked] = backend._graphs[shape_key], backend._outputs[shape_key]
            self._kept.append((backend, shape_key, ways))
            self._hooked = True

        return captured

    def put(self, hooked: bool) -> None:
        """Replay the graphs with this package's kernel, or the engine's, from now on."""
        for backend, shape_key, ways in self._kept:
            backend._graphs[shape_key], backend._outputs[shape_key] = ways[hooked]
        self._hooked = hooked if self._kept else None

    @property
    def is_in(self) -> bool | None:
        """Whether graphs with this package's kernel are replayed; None: no graph was captured."""
        return self._hooked
