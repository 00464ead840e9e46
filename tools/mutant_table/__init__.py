"""Lists the faults that the suite must notice.

Each entry is one fault that a user of a server would meet, one or two of a mechanism. After code or tests have moved,
``python3 -m tools.mutants --check`` names the entries that no longer fit.
"""

import importlib
import pkgutil

from tools.mutant_table.entry import Mutant

ROOMS = [importlib.import_module(f"{__name__}.{room.name}") for room in pkgutil.iter_modules(__path__)]
MUTANTS: tuple[Mutant, ...] = tuple(mutant for room in ROOMS for mutant in getattr(room, "MUTANTS", ()))
