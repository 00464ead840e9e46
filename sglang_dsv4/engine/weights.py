"""A copy holds what one set of weights computed: under other weights it must not be loaded."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

from sglang_dsv4.engine import last_forward

_updates = itertools.count(1)
_state = {"version": 0}  # one model a process


def weight_version() -> int:
    """Changes with each weight update of this process."""
    return _state["version"]


@contextmanager
def changing_weights() -> Iterator[None]:
    """Around whatever may write weights. What fails counts too: it may have written a part."""
    last_forward.wait_on_the_host()
    try:
        yield
    finally:
        _state["version"] = next(_updates)
