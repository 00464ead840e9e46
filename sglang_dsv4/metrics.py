"""Counters of one pool's host copies."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)


@dataclass
class Counters:
    """What happened so far. Bytes are payload bytes of the blocks; seconds are host seconds spent in the call."""

    saves: int = 0
    loads: int = 0
    saved_bytes: int = 0
    loaded_bytes: int = 0
    save_seconds: float = 0.0
    load_seconds: float = 0.0
    verified: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)

    def fallback(self, reason: str, message: str) -> None:
        """Count a request that the engine serves in its own way; each reason is logged once."""
        self.fallbacks[reason] += 1
        if self.fallbacks[reason] == 1:
            logger.warning("no host copy, the engine's own behaviour follows (%s): %s", reason, message)
