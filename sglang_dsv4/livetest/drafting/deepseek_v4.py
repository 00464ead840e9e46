"""The package's own model and the engine's drafts of it, NextN and DSpark, with weights that agree."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, ClassVar

from sglang.srt.models.deepseek_v4_dspark import DeepseekV4ForCausalLMDSpark as StockBlockDraft
from sglang.srt.models.deepseek_v4_nextn import DeepseekV4ForCausalLMNextN as StockDraft
from sglang.srt.runtime_context import get_server_args

from sglang_dsv4.livetest.drafting import WORD, recall, weights
from sglang_dsv4.livetest.drafting.switch import install
from sglang_dsv4.livetest.patched_model import patched
from sglang_dsv4.models.deepseek_v4 import is_dummy

logger = logging.getLogger(__name__)


class DeepseekV4ForCausalLM(patched(lambda: install() if WORD in os.environ else None)):  # type: ignore[misc]
    """The target: of a DSpark draft where its config has one."""

    def seed(self) -> int:
        """Overwrite the dummy weights; how many tensors."""
        drafts_blocks = getattr(self.config, "dspark_block_size", None) is not None
        return recall.fill_target(self) if drafts_blocks else weights.fill_target(self)


class _Seeded:
    """Before a draft of the engine: draws its dummy weights anew, before the engine's own fix-ups."""

    fill: ClassVar[Callable[[Any], int]]
    _seeded = False

    def post_load_weights(self, *args: Any, **kwargs: Any) -> None:
        """Called by the engine after the weights are there."""
        if is_dummy(get_server_args()) and not self._seeded:
            self._seeded = True
            logger.info("%d tensors of seeded dummy weights", self.fill())
        fix_up = getattr(super(), "post_load_weights", None)  # 0.5.22's DSpark has none
        if fix_up is not None:
            fix_up(*args, **kwargs)


class DeepseekV4ForCausalLMNextN(_Seeded, StockDraft):
    """The draft that has its own tokens."""

    fill = weights.fill_draft


class DeepseekV4ForCausalLMDSpark(_Seeded, StockBlockDraft):
    """The draft of a whole block."""

    fill = recall.fill_draft


EntryClass = [DeepseekV4ForCausalLM, DeepseekV4ForCausalLMNextN, DeepseekV4ForCausalLMDSpark]
