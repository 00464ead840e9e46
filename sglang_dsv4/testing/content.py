"""Stands in for a model: bytes and next tokens are functions of the tokens before.

Requests with the same beginning share pages, so a row's content must follow from the tokens up to its own. A request
that is computed again, from other pages, gets the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sglang_dsv4.testing.ledger import Ledger, Part

VOCABULARY = 50_000
_WORDS = 8  # of eight bytes: as wide as the ledger's noise


def _mixed(values: np.ndarray) -> np.ndarray:
    """Hashes by splitmix64: every bit of the result depends on every bit of ``values``."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(values ^ (values >> np.uint64(31)))


def fingerprints(tokens: Sequence[int]) -> np.ndarray:
    """Returns one number a position, of all tokens up to it and of their order."""
    ids = np.asarray(tokens, np.int64).astype(np.uint64)
    places = np.arange(1, len(ids) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return np.cumsum(_mixed(ids + places), dtype=np.uint64)


def next_token(tokens: Sequence[int]) -> int:
    """Returns the stand-in's sample after ``tokens``."""
    return int(_mixed(fingerprints(tokens)[-1:])[0] % np.uint64(VOCABULARY))


class PrefixLedger(Ledger):
    """Gives the content of the rows of ``tokens``, by position; a draft's rows depend on the token after, too."""

    def __init__(self, tokens: Sequence[int]) -> None:
        words = fingerprints(tokens)[:, None] + np.arange(_WORDS, dtype=np.uint64) * np.uint64(0xD1B54A32D192ED03)
        self._noise = _mixed(words).view(np.uint8).reshape(len(words), -1)

    def row(self, part: Part, positions: torch.Tensor) -> torch.Tensor:
        """Returns the bytes of ``positions`` in ``part``, ``[n, row bytes]``."""
        return super().row(part, positions + part.family.startswith("draft"))
