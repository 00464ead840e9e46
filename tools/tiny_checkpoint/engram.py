"""Computes the sizes of Engram's tables by the engine's own code, from the tokenizer and from primes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang_dsv4.testing.standalone import boot


def sizes(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the fields of ``config`` that the engine checks against the tokenizer in ``folder`` and against its
    primes.
    """
    boot(device="cpu")
    from sglang.srt.layers.engram import EngramLayout, build_compressed_token_map  # noqa: PLC0415
    from transformers import AutoTokenizer  # noqa: PLC0415

    layout = EngramLayout.from_config(SimpleNamespace(**config))
    _, words = build_compressed_token_map(AutoTokenizer.from_pretrained(folder))
    rows = [layout.column_bounds(layer)[-1] for layer in range(len(layout.layer_ids))]
    return {"engram_num_embeddings": rows, "engram_compressed_vocab_size": words}
