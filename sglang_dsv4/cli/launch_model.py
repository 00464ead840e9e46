"""Finds the config of a server's model on this machine, or the example that stands in for it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from sglang_dsv4.cli.plan_config import EXAMPLES

CONFIG = "config.json"
# What a model's name says, first match wins: the example that stands in for it, and its name. None has vision.
EXAMPLE_OF = (
    (re.compile(r"v4[._-]?1", re.IGNORECASE), "v41-flash", "DeepSeek-V4.1-Flash"),
    (re.compile(r"v4.*pro", re.IGNORECASE), "pro", "DeepSeek-V4-Pro"),
    (re.compile(r"v4(?!.*vision)", re.IGNORECASE), "flash", "DeepSeek-V4-Flash"),
)
# The first checkpoints of V4 have no DSpark drafts in them; those with a date do, as V4.1's.
WITHOUT_DRAFTS = re.compile(r"v4-(flash|pro)$", re.IGNORECASE)
DRAFTS = "dspark_"  # such a field's name begins with it


@dataclass(frozen=True)
class ModelConfig:
    """Holds the folder of a model's config. note: what stands in for the model; empty where it is on this machine."""

    folder: str
    note: str = ""


def find_config(model: str, scratch: Path, is_draft: bool = False) -> ModelConfig:
    """Finds the config of ``model``: a folder, or a name in the cache of Hugging Face. Else writes an example's.

    scratch: the folder that is made for it. is_draft: whether it is for a server's drafts.
    """
    if (Path(model) / CONFIG).is_file():
        return ModelConfig(model)
    if (cached := _cached(model)) is not None:
        return ModelConfig(str(cached))
    example, name, asked = _example(model)
    fields = json.loads((EXAMPLES / f"{example}.json").read_text())
    drafts = is_draft or not WITHOUT_DRAFTS.search(model)
    if not drafts:
        fields = {field: value for field, value in fields.items() if not field.startswith(DRAFTS)}
    scratch.mkdir()
    (scratch / CONFIG).write_text(json.dumps(fields))
    why = "as its name says" if asked else "though its name does not say so"
    checkpoint = "" if drafts else ", without drafts of its own"
    named = f"{model} (drafts)" if is_draft else model
    return ModelConfig(str(scratch), f"{named} is not on this machine: judged as {name}{checkpoint}, {why}.")


def _example(model: str) -> tuple[str, str, bool]:
    """Returns (example, its name, whether ``model`` asks for it)."""
    for words, example, name in EXAMPLE_OF:
        if words.search(model):
            return example, name, True
    _, example, name = EXAMPLE_OF[-1]
    return example, name, False


def _cached(model: str) -> Path | None:
    """Returns the folder of a model's files that were downloaded before."""
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - it comes with transformers
    from huggingface_hub.errors import HFValidationError  # noqa: PLC0415

    try:
        found = try_to_load_from_cache(model, CONFIG)
    except HFValidationError:  # a path
        return None
    return Path(found).parent if isinstance(found, str) else None
