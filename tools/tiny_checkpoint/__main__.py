#!/usr/bin/env python3
"""Writes a small real DeepSeek-V4 checkpoint: the engine's own loader reads it, and text goes in and out.

    python3 -m tools.tiny_checkpoint FOLDER [--model v41 [--engram]]
    sglang-dsv4 serve --model-path FOLDER --load-format auto ...     # without --skip-tokenizer-init

Real attention widths, few layers and experts, fp8 weights with e8m0 block scales, seeded values; the tokenizer is
trained on this repository's own texts. The text that the model writes means nothing, but it depends on every byte of
the cache. The widths stay those of the base config because the engine's kernels are made for them: 64 heads of
448 + 64, hidden_size 4096 (the hyper-connection kernels take 4096, 7168 and V4.1's 5120 only) and whole quantized
blocks of 128. --no-weights leaves them to a server's seeded dummy load (--load-format dummy).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from sglang_dsv4.models.seeded import SEED
from tools.tiny_checkpoint import engram, tokenizer
from tools.tiny_checkpoint.config import BASES, BadConfig, small_config
from tools.tiny_checkpoint.folder import require_empty, write_json, write_texts, write_weights
from tools.tiny_checkpoint.tensors import draw

REPOSITORY = Path(__file__).resolve().parents[2]
TEXTS = ("LICENSE", "*.md", "scripts/gsm8k_smoke.jsonl", "triton_ops/*.py")
LAYERS = {"v4": 3, "v41": 8}


def write_checkpoint(folder: Path, config: dict[str, Any], seed: int, weights: bool = True) -> int:
    """Writes config, tokenizer and weights of ``config`` into ``folder``, which must be empty or new.

    Returns the bytes of the weights. Raises BadConfig when the engine could not serve it.
    """
    require_empty(folder)
    texts = (path.read_text() for pattern in TEXTS for path in sorted(REPOSITORY.glob(pattern)))
    config = write_texts(folder, config, tokenizer.train(texts, config["vocab_size"]))
    if config.get("engram_layer_ids"):
        config |= engram.sizes(config, folder)
        write_json(folder / "config.json", config)
    return write_weights(folder, config, lambda specs: draw(specs, config, seed)) if weights else 0


def main(argv: list[str] | None = None) -> int:
    """Returns exit status 2 for a checkpoint that could not be served."""
    parser = argparse.ArgumentParser(
        prog="python3 -m tools.tiny_checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="where to write; empty or new")
    parser.add_argument("--model", choices=BASES, default="v4")
    parser.add_argument("--layers", type=int, help="107 MB each without experts (v4: 3, v41: 8)")
    parser.add_argument("--experts", type=int, default=8, help="routed experts a layer; 3 MB each")
    parser.add_argument("--vocab", type=int, default=2048, help="words of tokenizer and model")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--base", type=Path, help="the config to start from (that of --model)")
    parser.add_argument("--engram", action="store_true", help="with Engram, V4.1's memory of n-grams")
    parser.add_argument("--no-weights", action="store_true", help="config and tokenizer alone")
    arguments = parser.parse_args(argv)
    base, layers = arguments.base or BASES[arguments.model], arguments.layers or LAYERS[arguments.model]
    try:
        config = small_config(base, layers, arguments.experts, arguments.vocab, arguments.engram)
        written = write_checkpoint(arguments.folder, config, arguments.seed, not arguments.no_weights)
    except BadConfig as error:
        parser.error(str(error))
    print(f"{arguments.folder}: {written / 1e6:.0f} MB, compression ratios {config['compress_ratios']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
