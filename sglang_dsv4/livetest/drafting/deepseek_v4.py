"""The package's own model and the engine's NextN draft, with weights that agree."""

from __future__ import annotations

import logging
import os
from typing import Any

from sglang.srt.models.deepseek_v4_nextn import DeepseekV4ForCausalLMNextN as StockDraft
from sglang.srt.runtime_context import get_server_args

from sglang_dsv4.livetest.drafting import WORD
from sglang_dsv4.livetest.drafting.switch import install
from sglang_dsv4.livetest.drafting.weights import fill_draft, fill_target
from sglang_dsv4.livetest.patched_model import patched
from sglang_dsv4.models.deepseek_v4 import is_dummy

logger = logging.getLogger(__name__)


class DeepseekV4ForCausalLM(patched(lambda: install() if WORD in os.environ else None)):  # type: ignore[misc]
    """The target."""

    def seed(self) -> int:
        """Overwrite the dummy weights; how many tensors."""
        return fill_target(self)


class DeepseekV4ForCausalLMNextN(StockDraft):
    """The draft."""

    def post_load_weights(self, *args: Any, **kwargs: Any) -> None:
        """Called by the engine after the weights are there; dummy weights are drawn anew before its own fix-ups."""
        if is_dummy(get_server_args()) and not getattr(self, "_seeded", False):
            self._seeded = True
            logger.info("%d tensors of seeded dummy weights", fill_draft(self))
        super().post_load_weights(*args, **kwargs)


EntryClass = [DeepseekV4ForCausalLM, DeepseekV4ForCausalLMNextN]
