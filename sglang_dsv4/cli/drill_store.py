"""Provokes a store that lies: ``sglang-dsv4 drill store``. Imported with the hooks installed, and pools on the CPU."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

from sglang_dsv4.cli.demo_sessions import SHORTEST
from sglang_dsv4.cli.demo_store import HOST_GB, require_disk
from sglang_dsv4.livetest.faults import Scene
from sglang_dsv4.testing.demo_store import Life, Server, flip_bits, next_turns, prompts

CONVERSATIONS = 3
SPEC: dict[str, Any] = {"pages": 28, "ratios": (0, 4, 128)}


def scene() -> Scene:
    """Changes a bit in a third of a store's objects between two lives of a server. Raises SettingError."""
    require_disk()
    rng = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="sglang_dsv4-drill-") as name:
        folder = Path(name)
        first = Server(folder, HOST_GB, **SPEC)
        written = first.play(prompts(rng, CONVERSATIONS, SHORTEST, SHORTEST + 200))
        flipped = {path: path.read_bytes() for path in flip_bits(folder)}
        read = Server(folder, HOST_GB, **SPEC).play(next_turns(rng, first.answered))
        replaced = sum(path.read_bytes() != changed for path, changed in flipped.items())
    return Scene(
        f"A bit changes in {len(flipped)} of {written.put} objects of a store, while its server is away",
        "the metrics of the next server", _metrics(read),
        "Nothing is lost but time: such prompts are prefilled, and what they leave replaces the wrong objects. Look at "
        "the disk, or for another writer to the store; sglang-dsv4 doctor --store tries it.",
        (r'outcome="wrong"\} [1-9]',),
        {
            "the first server wrote to the store": written.put > 0 and bool(flipped),
            "every turn has its answer": read.turns == written.turns == CONVERSATIONS,
            "no request read a wrong byte": not (written.mismatches or read.mismatches),
            "wrong objects were replaced": replaced > 0,
            "nothing is left behind": not (written.leaks or read.leaks),
        },
    )  # fmt: skip


def _metrics(life: Life) -> str:
    """Returns the series of a life as a scrape shows them; behind them what stopped it, if anything."""
    rows = {"ok": life.got, "wrong": life.wrong}
    lines = [f'sglang_dsv4_store_units_total{{op="get",outcome="{name}"}} {count}' for name, count in rows.items()]
    return "\n".join([*lines, f"sglang_dsv4_store_tokens_total {life.stored}", *life.mismatches])
