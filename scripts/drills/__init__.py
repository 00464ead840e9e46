"""What goes wrong, provoked for real, and what the user sees: the drills of ``scripts/failure_drills.py``."""

from __future__ import annotations

from drills import damage, death, hooks, layout, memory, settings
from drills.scene import Drill

DRILLS: tuple[Drill, ...] = (
    settings.DRILL,
    memory.DRILL,
    memory.PINNING,
    hooks.DRILL,
    layout.DRILL,
    damage.DRILL,
    death.DRILL,
)
