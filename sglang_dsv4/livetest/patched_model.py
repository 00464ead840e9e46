"""Puts an experiment's part into a server: a model whose constructor installs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dsv4.models import deepseek_v4


def patched(install: Callable[[], None]) -> type:
    """Returns the model, which calls ``install`` in the scheduler's process: once the hooks have landed, before any
    request.
    """

    class DeepseekV4ForCausalLM(deepseek_v4.DeepseekV4ForCausalLM):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            install()

    return DeepseekV4ForCausalLM
