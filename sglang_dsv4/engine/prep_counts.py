"""How many steps were prepared here, and why the others were left to the engine. Each reason is logged once."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

from sglang_dsv4.metrics import PrepExporter

logger = logging.getLogger(__name__)


@dataclass
class PrepCounts:
    """overlapped: prepared beside the forward before. inline: on the forward's own stream. left: by reason."""

    overlapped: int = 0
    inline: int = 0
    left: Counter[str] = field(default_factory=Counter)
    listener: PrepExporter | None = field(default=None, repr=False, compare=False)

    def prepared(self, where: str) -> None:
        """Count a step that was prepared ``overlapped`` or ``inline``."""
        setattr(self, where, getattr(self, where) + 1)
        if self.listener is not None:
            self.listener.prepared(where)

    def leave(self, reason: str) -> None:
        """Count a step whose metadata the engine makes."""
        self.left[reason] += 1
        if self.left[reason] == 1:
            logger.info("decode metadata of such steps is left to the engine: %s", reason)
        if self.listener is not None:
            self.listener.left(reason)
