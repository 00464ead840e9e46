"""Refuses to build the model without the hooks, and fills it with seeded weights for a dummy load.

Without the refusal a server whose plugin was not loaded would serve as stock, unnoticed.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.models.deepseek_v4 import DeepseekV4ForCausalLM as StockDeepseekV4ForCausalLM
from sglang.srt.runtime_context import get_server_args

from sglang_dsv4.engine.hooks.install import require_landed
from sglang_dsv4.models.seeded import fill
from sglang_dsv4.settings import read_settings

logger = logging.getLogger(__name__)


class DeepseekV4ForCausalLM(StockDeepseekV4ForCausalLM):
    """Requires the hooks: its constructor raises HooksNotLanded, and the server stops.

    It is the first of a server that knows of all settings, so a store's process is started here.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        require_landed()
        if read_settings().store.backend:
            from sglang_dsv4.engine.store_start import start_early  # noqa: PLC0415 - others have nothing of a store

            start_early()
        super().__init__(*args, **kwargs)
        self._seeded = False

    def seed(self) -> int:
        """Overwrites the dummy weights; returns the number of tensors."""
        return fill(self)

    def post_load_weights(self, *args: Any, **kwargs: Any) -> None:
        """Draws dummy weights anew before the engine's own fix-ups; called by it once weights are loaded."""
        if is_dummy(get_server_args()) and not self._seeded:
            self._seeded = True
            logger.info("%d tensors of seeded dummy weights", self.seed())
        super().post_load_weights(*args, **kwargs)


def is_dummy(server_args: Any) -> bool:
    """Returns whether the server runs with ``--load-format dummy``; the engine holds an enum or a string."""
    load_format = server_args.load_format
    return str(getattr(load_format, "value", load_format)) == "dummy"


EntryClass = [DeepseekV4ForCausalLM]
