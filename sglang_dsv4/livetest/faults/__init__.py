"""What goes wrong, provoked for real, and what the user sees: the faults that ``sglang-dsv4 drill`` plays."""

from __future__ import annotations

from sglang_dsv4.livetest.faults import damage, death, hooks, layout, memory, settings
from sglang_dsv4.livetest.faults.scene import Drill

DRILLS: tuple[Drill, ...] = (
    settings.DRILL,
    memory.DRILL,
    memory.PINNING,
    hooks.DRILL,
    layout.DRILL,
    damage.DRILL,
    death.DRILL,
)
