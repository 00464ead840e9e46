"""Makes the config of a small model: the base config with fewer layers, experts and words.

Beside this file lie the bases, a folder each: the model path of a server with seeded weights and without a tokenizer.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from tools.tiny_checkpoint.tokenizer import SMALLEST_VOCABULARY

BASES = {name: Path(__file__).with_name(name) / "config.json" for name in ("v4", "v41")}
VOCABULARY_STEP = 64  # the engine pads its embedding to this; ids beyond the vocabulary would have no text
# Layers of a V4.1 model: the window alone, then ratio 2, then ratio 1; of both a layer that owns a cache and one that
# reads it.
FEWEST = {"deepseek_v4": 3, "deepseek_v41": 5}


class BadConfig(ValueError):
    """Reports a model that the engine could not serve; names the option or the field to change."""


def small_config(base: Path, layers: int, experts: int, vocabulary: int, engram: bool = False) -> dict[str, Any]:
    """Returns ``base`` with these sizes. ``engram``: a V4.1 model's n-gram memory, in layer 1 and in a layer of ratio
    2.

    Raises BadConfig when the engine could not serve it.
    """
    config: dict[str, Any] = json.loads(base.read_text())
    kind = config["model_type"]
    if layers < FEWEST[kind]:
        raise BadConfig(f"--layers {layers}: a {kind} model needs {FEWEST[kind]}, for each of its cache families")
    if engram and not is_v41(config):
        raise BadConfig("--engram: only a DeepSeek-V4.1 model has it")
    if experts < config["num_experts_per_tok"]:
        raise BadConfig(f"--experts {experts}: a token is sent to num_experts_per_tok {config['num_experts_per_tok']}")
    if vocabulary < SMALLEST_VOCABULARY or vocabulary % VOCABULARY_STEP:
        raise BadConfig(
            f"--vocab {vocabulary}: it must be a multiple of {VOCABULARY_STEP}, {SMALLEST_VOCABULARY} at least"
        )
    config |= {"num_hidden_layers": layers, "n_routed_experts": experts, "vocab_size": vocabulary}
    config |= _v41_layers(layers) if is_v41(config) else {"compress_ratios": _v4_ratios(layers)}
    if engram:
        config["engram_layer_ids"] = sorted({1, config["kv_source_layer_ids"][-2]})
    _require_whole_blocks(config)
    return config


def is_v41(config: dict[str, Any]) -> bool:
    """Whether layers share their caches, as V4.1's do."""
    return bool(config["model_type"] == "deepseek_v41")


def _v4_ratios(layers: int) -> list[int]:
    ratios = [0] * (1 if layers == FEWEST["deepseek_v4"] else 2)
    return ratios + list(itertools.islice(itertools.cycle((4, 128)), layers - len(ratios)))


def _v41_layers(layers: int) -> dict[str, Any]:
    """Returns ratios, and which layers own caches: each ratio's first layer, and one more of ratio 2 if it is long.

    The last layer chooses positions by itself, among those that the first layer of ratio 1 proposes.
    """
    window, ones = 1 if layers < 8 else 2, max(2, layers // 4)
    twos = layers - window - ones
    sources = sorted({window, window + twos // 2 if twos > 3 else window, window + twos})
    return {
        "compress_ratios": [0] * window + [2] * twos + [1] * ones,
        "kv_source_layer_ids": sources,
        "index_source_layer_ids": [*sources, layers - 1],
        "candidate_source_layer_id": window + twos,
    }


def _require_whole_blocks(config: dict[str, Any]) -> None:
    """Raises BadConfig for part blocks: the block-quantized GEMMs take whole blocks of 128 x 128 only."""
    for field in ("hidden_size", "q_lora_rank", "o_lora_rank", "moe_intermediate_size"):
        if config[field] % 128:
            raise BadConfig(f"{field} {config[field]} is no multiple of 128, the side of a quantized block")
