"""Writes a model's folder without its weights: config, generation config and tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tools.tiny_checkpoint import tokenizer as text


def write_texts(folder: Path, config: dict[str, Any], words: Tokenizer) -> dict[str, Any]:
    """Writes ``config`` and ``words`` into ``folder``, which is made; returns the config with the ids of its ends."""
    folder.mkdir(parents=True, exist_ok=True)
    text.write(words, folder, config["max_position_embeddings"])
    ends = {"bos_token_id": words.token_to_id(text.BOS), "eos_token_id": words.token_to_id(text.EOS)}
    write_json(folder / "config.json", config | ends)
    write_json(folder / "generation_config.json", ends | {"do_sample": False})
    return config | ends


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes one field a line."""
    path.write_text(json.dumps(content, indent=1) + "\n")
