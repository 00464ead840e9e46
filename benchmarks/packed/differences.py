"""Two ends that hold different bytes say nothing of who was wrong, and when.

A request that is compared is looked at four times (``timed_transfers.switch``), page by page of each region: when each
piece was posted, when all was sent, when it had arrived, and a little later. What changed between two looks tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sglang_dsv4.cache.families import Geometry, families
from sglang_dsv4.cache.family import Group

SIDES = ("posted", "sent", "arrived", "later")
SHOWN = 8


def looks(notes: Sequence[dict[str, Any]]) -> dict[int, dict[str, dict[str, Any]]]:
    """Of each room that was looked at on both ends: the notes, by side."""
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for note in notes:
        if "side" in note:
            found.setdefault(note["room"], {})[note["side"]] = note
    return {room: sides for room, sides in found.items() if set(sides) == set(SIDES)}


def differs(sides: dict[str, dict[str, Any]]) -> bool:
    """Whether a request arrived otherwise than it was sent."""
    return bool(sides["sent"]["checksum"] != sides["arrived"]["checksum"])


def difference(room: int, sides: dict[str, dict[str, Any]], regions: Sequence[str]) -> dict[str, Any]:
    """What is known of it. Places are a region and the number of the page in the request.

    written_after_posting: of the places that differ, those that the sender's own forward wrote after they were posted.
    as_posted: those that arrived as they were when they were posted. landed_late: those that were right a little later.
    """
    posted, sent, arrived, later = (np.load(sides[side]["sums"]) for side in SIDES)
    if sent.shape != arrived.shape:
        return {"room": room, "shapes": [sent.shape, arrived.shape]}
    wrong = sent != arrived
    places = np.argwhere(wrong)
    names = regions if len(regions) == len(sent) else [f"region {number}" for number in range(len(sent))]
    return {
        "room": room, "places": len(places), "of": sent.size,
        "regions": [names[region] for region in np.flatnonzero(wrong.any(1))][:SHOWN],
        "pages": np.flatnonzero(wrong.any(0))[:SHOWN].tolist(), "last_page": int(places[:, 1].max()),
        "written_after_posting": int((posted != sent)[wrong].sum()),
        "as_posted": int((posted == arrived)[wrong].sum()),
        "landed_late": int((later == sent)[wrong].sum()),
    }  # fmt: skip


def region_names(geometry: Geometry) -> list[str]:
    """Of the engine's regions of history, in its order: a layer of a family each."""
    history = [family for family in families(geometry) if family.group is Group.PAGED]
    return [f"{family.name} {layer}" for family in history for layer in family.layers]
