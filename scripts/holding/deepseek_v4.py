"""The package's own model, which puts the switch in its place."""

from __future__ import annotations

from typing import Any

from holding.switch import install
from sglang_dsv4.models import deepseek_v4


class DeepseekV4ForCausalLM(deepseek_v4.DeepseekV4ForCausalLM):
    """Built in the scheduler process once the hooks have landed, before any request."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        install()


EntryClass = [DeepseekV4ForCausalLM]
