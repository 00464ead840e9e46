"""Lists the faults that the suite must notice.

Each entry is one fault that somebody could really make. After code or tests have moved,
``python3 -m tools.mutants --check`` names the entries that no longer fit.
"""

from __future__ import annotations

from tools.mutant_table import (
    cache,
    commands,
    drafts,
    engine,
    exam,
    hisparse,
    hostmem,
    packed,
    plain,
    pools,
    prep,
    sessions,
    transfer,
    triton_ops,
    v41,
)  # fmt: skip
from tools.mutant_table.entry import Mutant

ROOMS = (
    cache, pools, packed, hostmem, transfer, prep, drafts, engine, plain, hisparse, sessions, v41, triton_ops, commands,
    exam,
)  # fmt: skip
MUTANTS: tuple[Mutant, ...] = tuple(mutant for room in ROOMS for mutant in room.MUTANTS)
