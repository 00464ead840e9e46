"""Writes a checkpoint's folder, part by part: config and tokenizer, then weights in files with an index."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from tools.tiny_checkpoint import tokenizer as text
from tools.tiny_checkpoint.config import BadConfig
from tools.tiny_checkpoint.tensors import Specs, parts

INDEX = "model.safetensors.index.json"


def require_empty(folder: Path) -> None:
    """Makes ``folder``. Raises BadConfig where something is in it."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise BadConfig(f"{folder} is not empty: name a new folder")


def write_texts(folder: Path, config: dict[str, Any], words: Tokenizer) -> dict[str, Any]:
    """Writes configs and tokenizer; returns the config with the ids of its ends."""
    text.write(words, folder, config["max_position_embeddings"])
    ends = {"bos_token_id": words.token_to_id(text.BOS), "eos_token_id": words.token_to_id(text.EOS)}
    write_json(folder / "config.json", config | ends)
    write_json(folder / "generation_config.json", ends | {"do_sample": False})
    return config | ends


def write_weights(folder: Path, config: dict[str, Any], values: Callable[[Specs], dict[str, torch.Tensor]]) -> int:
    """Writes the tensors that ``values`` gives for each part's names, shapes and types; returns their bytes."""
    total, where = 0, {}
    count = config["num_hidden_layers"] + 1
    for number, specs in enumerate(parts(config), start=1):
        name = f"model-{number:05}-of-{count:05}.safetensors"
        tensors = values(specs)
        save_file(tensors, folder / name, metadata={"format": "pt"})
        total += sum(tensor.nbytes for tensor in tensors.values())
        where |= dict.fromkeys(tensors, name)
        print(f"  {name}: {len(tensors)} tensors", flush=True)
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    return total


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes one field a line."""
    path.write_text(json.dumps(content, indent=1) + "\n")
