#!/usr/bin/env python3
"""Writes the config and the tokenizer of a small DeepSeek-V4: its server has seeded weights, and text goes in and out.

    python3 -m tools.tiny_checkpoint FOLDER [--model v41 [--engram]]
    sglang-dsv4 serve --model-path FOLDER --load-format dummy ...     # without --skip-tokenizer-init

Real attention widths, few layers and experts; the tokenizer is trained on this repository's own texts. The text that
the model writes means nothing, but it depends on every byte of the cache. The widths stay those of the base config
because the engine's kernels are made for them: 64 heads of 448 + 64, hidden_size 4096 (the hyper-connection kernels
take 4096, 7168 and V4.1's 5120 only) and whole quantized blocks of 128.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tools.tiny_checkpoint import engram
from tools.tiny_checkpoint import tokenizer as text
from tools.tiny_checkpoint.config import BASES, BadConfig, small_config

REPOSITORY = Path(__file__).resolve().parents[2]
TEXTS = ("LICENSE", "*.md", "scripts/gsm8k_smoke.jsonl", "triton_ops/*.py")
LAYERS = {"v4": 3, "v41": 8}


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """Writes ``config`` and its tokenizer into ``folder``, which must be empty or new.

    Raises BadConfig when the engine could not serve it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise BadConfig(f"{folder} is not empty: name a new folder")
    texts = (path.read_text() for pattern in TEXTS for path in sorted(REPOSITORY.glob(pattern)))
    words = text.train(texts, config["vocab_size"])
    text.write(words, folder, config["max_position_embeddings"])
    ends = {"bos_token_id": words.token_to_id(text.BOS), "eos_token_id": words.token_to_id(text.EOS)}
    _write_json(folder / "config.json", config | ends)
    _write_json(folder / "generation_config.json", ends | {"do_sample": False})
    if config.get("engram_layer_ids"):
        _write_json(folder / "config.json", config | engram.sizes(config, folder) | ends)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def main(argv: list[str] | None = None) -> int:
    """Returns exit status 2 for a model that could not be served."""
    parser = argparse.ArgumentParser(
        prog="python3 -m tools.tiny_checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="where to write; empty or new")
    parser.add_argument("--model", choices=BASES, default="v4")
    parser.add_argument("--layers", type=int, help="of the model (v4: 3, v41: 8)")
    parser.add_argument("--experts", type=int, default=8, help="routed experts a layer")
    parser.add_argument("--vocab", type=int, default=2048, help="words of tokenizer and model")
    parser.add_argument("--base", type=Path, help="the config to start from (that of --model)")
    parser.add_argument("--engram", action="store_true", help="with Engram, V4.1's memory of n-grams")
    arguments = parser.parse_args(argv)
    base, layers = arguments.base or BASES[arguments.model], arguments.layers or LAYERS[arguments.model]
    try:
        config = small_config(base, layers, arguments.experts, arguments.vocab, arguments.engram)
        write_model(arguments.folder, config)
    except BadConfig as error:
        parser.error(str(error))
    print(f"{arguments.folder}: {layers} layers, compression ratios {config['compress_ratios']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
