"""Provides the package's own model, which calls the experiment's function in the scheduler's process."""

import importlib
import os
from pathlib import Path
from typing import Any

from sglang_dsv4.livetest.in_server import FILE, FUNCTION
from sglang_dsv4.models import deepseek_v4

_module, _name = os.environ[FUNCTION].split(":")
_install = getattr(importlib.import_module(_module), _name)


class DeepseekV4ForCausalLM(deepseek_v4.DeepseekV4ForCausalLM):
    """Calls it when it was built: the hooks have landed, and no request is there yet."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _install(Path(os.environ[FILE]))


EntryClass = [DeepseekV4ForCausalLM]
