#!/usr/bin/env python3
"""Writes the config and the tokenizer of a small DeepSeek-V4: its server has seeded weights, and text goes in and out.

    python3 -m tools.tiny_checkpoint FOLDER [--model v41 [--engram]]
    sglang-dsv4 serve --model-path FOLDER --load-format dummy ...     # without --skip-tokenizer-init

The configs lie beside this file, a folder each: the model path of a server that gets token ids. They have real
attention widths, which the engine's kernels are made for, few layers, and a layer of each cache family at least. The
tokenizer is trained on this repository's own texts. The text that the model writes means nothing, but it depends on
every byte of the cache.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang_dsv4.command_line import Parser
from sglang_dsv4.testing.standalone import boot
from tools.tiny_checkpoint.tokenizer import train, write_json, write_texts

REPOSITORY = Path(__file__).resolve().parents[2]
TEXTS = ("LICENSE", "*.md", "scripts/gsm8k_smoke.jsonl", "triton_ops/*.py")
CONFIGS = {name: Path(__file__).with_name(name) / "config.json" for name in ("v4", "v41")}


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """Writes ``config`` and its tokenizer into ``folder``."""
    texts = (path.read_text() for pattern in TEXTS for path in sorted(REPOSITORY.glob(pattern)))
    config = write_texts(folder, config, train(texts, config["vocab_size"]))
    if config.get("engram_layer_ids"):  # the engine's sizes follow from the tokenizer that was written
        write_json(folder / "config.json", config | engram_sizes(config, folder))


def engram_sizes(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the fields of ``config`` that the engine checks against the tokenizer in ``folder`` and its primes."""
    boot(device="cpu")
    from sglang.srt.layers.engram import EngramLayout, build_compressed_token_map  # noqa: PLC0415
    from transformers import AutoTokenizer  # noqa: PLC0415

    layout = EngramLayout.from_config(SimpleNamespace(**config))
    _, words = build_compressed_token_map(AutoTokenizer.from_pretrained(folder))
    rows = [layout.column_bounds(layer)[-1] for layer in range(len(layout.layer_ids))]
    return {"engram_num_embeddings": rows, "engram_compressed_vocab_size": words}


def main(argv: list[str] | None = None) -> int:
    """Writes the model that the arguments name. Exits with 2 for a folder that has something in it."""
    parser = Parser("python3 -m tools.tiny_checkpoint", description=__doc__)
    parser.add_argument("folder", type=Path, help="where to write; empty or new")
    parser.add_argument("--model", choices=CONFIGS, default="v4")
    parser.add_argument("--engram", action="store_true", help="with Engram, V4.1's memory of n-grams")
    arguments = parser.parse_args(argv)
    config = json.loads(CONFIGS[arguments.model].read_text())
    if arguments.engram:
        if arguments.model != "v41":
            parser.error("--engram: only a DeepSeek-V4.1 model has it")
        config["engram_layer_ids"] = [1, config["kv_source_layer_ids"][1]]
    if arguments.folder.is_dir() and any(arguments.folder.iterdir()):
        parser.error(f"{arguments.folder} is not empty: name a new folder")
    write_model(arguments.folder, config)
    return 0


if __name__ == "__main__":
    sys.exit(main())
