"""Makes a config with a real model's shape and fewer experts, which fits one card without a checkpoint."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any


def write_model(
    config: Path, folder: Path, experts: int | None = None, layers: int | None = None
) -> tuple[Path, dict[str, Any]]:
    """Writes a model folder of ``config``; returns it with the facts of its config.

    experts: routed ones. layers: so many, with the ratios of the third and the fourth in turn. None: as they are.
    """
    facts = json.loads(config.read_text())
    if experts:
        facts["n_routed_experts"] = experts
    if layers:
        ratios = facts["compress_ratios"]
        turns = itertools.cycle(ratios[2:4])
        facts["compress_ratios"] = [*ratios[:2], *itertools.islice(turns, layers - 2)]
        facts["num_hidden_layers"] = layers
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(facts, indent=1))
    return folder, facts
