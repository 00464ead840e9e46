"""The config of a small model: the base config with fewer layers, experts and words."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from tools.tiny_checkpoint.tokenizer import SMALLEST_VOCABULARY

BASE = Path(__file__).with_name("base_config.json")
VOCABULARY_STEP = 64  # the engine pads its embedding to this; ids beyond the vocabulary would have no text


class BadConfig(ValueError):
    """A checkpoint that the engine could not serve; names the option or the field to change."""


def small_config(base: Path, layers: int, experts: int, vocabulary: int) -> dict[str, Any]:
    """``base`` with these sizes. Raises BadConfig when the engine could not serve it."""
    config: dict[str, Any] = json.loads(base.read_text())
    if layers < 3:
        raise BadConfig(f"--layers {layers}: a model needs 3, one for each compression ratio (0, 4, 128)")
    if experts < config["num_experts_per_tok"]:
        raise BadConfig(f"--experts {experts}: a token is sent to num_experts_per_tok {config['num_experts_per_tok']}")
    if vocabulary < SMALLEST_VOCABULARY or vocabulary % VOCABULARY_STEP:
        raise BadConfig(
            f"--vocab {vocabulary}: it must be a multiple of {VOCABULARY_STEP}, {SMALLEST_VOCABULARY} at least"
        )
    ratios = [0] * (1 if layers == 3 else 2)
    ratios += itertools.islice(itertools.cycle((4, 128)), layers - len(ratios))
    config |= {
        "num_hidden_layers": layers,
        "compress_ratios": ratios,
        "n_routed_experts": experts,
        "vocab_size": vocabulary,
    }
    _require_whole_blocks(config)
    return config


def _require_whole_blocks(config: dict[str, Any]) -> None:
    """The block-quantized GEMMs take whole blocks of 128 x 128 only."""
    for field in ("hidden_size", "q_lora_rank", "o_lora_rank", "moe_intermediate_size"):
        if config[field] % 128:
            raise BadConfig(f"{field} {config[field]} is no multiple of 128, the side of a quantized block")
