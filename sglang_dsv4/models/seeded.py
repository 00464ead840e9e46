"""Draws seeded random weights at a sane scale for servers without a checkpoint.

With the engine's dummy weights every token is equally likely, regardless of the cache. These keep activations near one,
separate the next-token logits and let attention choose among positions, so that a wrong byte in any cache family shows
in the output.

A tensor's values follow from its name and shape alone, so that ranks agree on shared tensors.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping

import torch
from torch import nn

SEED = 7
SCALE_SUFFIX = "_scale_inv"
# Gain by the last part of a projection's name; 1 elsewhere. Scores of a spread of about 3 make attention choose.
GAINS = {"wq_b": 3.0, "wo_b": 2.0, "lm_head": 4.0}
TABLES = ("embed_tokens", "embed")  # read row by row, of words and of hashed n-grams: no sum divides their spread
PASSING = ("q_weight", "k_weight")  # of Engram's gate: they weigh normed values, as a norm's weight does


def fill(model: nn.Module, called: Callable[[str], str] = str) -> int:
    """Overwrites every floating-point tensor of ``model``; returns their number. Integer tables stay as they are.

    called: name of a tensor -> the name that its values follow from.
    """
    state = model.state_dict()
    scales = _scales(state)
    quantized = set(scales.values())
    filled = 0
    for name, tensor in state.items():
        if not torch.is_floating_point(tensor):
            continue
        filled += 1
        if name in scales:
            tensor.data.fill_(block_scale(called(scales[name]), state[scales[name]].shape))
        else:
            _fill_one(called(name), tensor.data, name in quantized)
    return filled


def _scales(state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Maps scales to their quantized tensors: X_scale_inv lies beside X, Engram's scale beside weight."""
    pairs = {name: name.removesuffix(SCALE_SUFFIX) for name in state if name.endswith(SCALE_SUFFIX)}
    pairs |= {name: name.removesuffix("scale") + "weight" for name in state if name.endswith(".embed.scale")}
    return {scale: owner for scale, owner in pairs.items() if owner in state}


def block_scale(name: str, shape: torch.Size) -> float:
    """Computes the scale of a quantized weight with stored values of spread one: a power of two."""
    return float(2.0 ** round(math.log2(_spread(name, shape))))


def _spread(name: str, shape: torch.Size) -> float:
    parts = name.split(".")
    if any(table in parts for table in TABLES):
        return 1.0
    return next((gain for part, gain in GAINS.items() if part in parts), 1.0) / math.sqrt(shape[-1])


def _fill_one(name: str, tensor: torch.Tensor, quantized: bool) -> None:
    last = name.rsplit(".", 1)[-1]
    if tensor.dim() < 2 or last in PASSING:
        # Norms and mixing scales pass their input; biases, sinks and offsets are absent.
        passing = ("norm" in name and last == "weight") or last.endswith("scale") or last in PASSING
        tensor.fill_(1.0 if passing else 0.0)
        return
    generator = torch.Generator(device=tensor.device).manual_seed(SEED + zlib.crc32(name.encode()))
    spread = 1.0 if quantized else _spread(name, tensor.shape)
    for part in tensor.unbind() if tensor.dim() > 2 else (tensor,):  # expert by expert: fp32 copies stay small
        values = torch.randn(part.shape, dtype=torch.float32, device=part.device, generator=generator)
        part.copy_((values * spread).to(part.dtype))
