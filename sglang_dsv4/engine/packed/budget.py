"""The engine sizes its pools by the bytes of a token, and knows nothing of a longer map and of rows that nobody uses.

Ids that are multiples of L make the map from full slots to window slots L times as long, and a family with fewer than L
layers has pages that are as long as the others'. Told of both, the engine counts fewer tokens: 2% for Flash.
"""

from __future__ import annotations

from typing import Any

from sglang_dsv4.cache.families import Geometry
from sglang_dsv4.cache.page_major import is_covered, piece_figures


def after_bytes_per_full_token(result: float, configurator: Any) -> float:
    """AFTER DSV4PoolConfigurator._get_bytes_per_full_token: with what the layout costs beside the rows."""
    ratios = tuple(configurator.stage_compress_ratios)
    return result + (piece_figures(Geometry(ratios))[-1].extra_bytes if is_covered(ratios) else 0.0)
