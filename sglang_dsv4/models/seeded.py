"""Seeded random weights at a sane scale, for servers without a checkpoint.

The engine's dummy weights are so small that every token is equally likely, whatever the cache holds. These keep
activations near one, separate the next-token logits and let attention choose among positions, so that a wrong byte
in any cache family shows in the output.

A tensor's values follow from its name and shape alone, so that ranks agree on what they share.
"""

from __future__ import annotations

import math
import zlib

import torch
from torch import nn

SEED = 7
SCALE_SUFFIX = "_scale_inv"
# Gain by the last part of a projection's name; 1 elsewhere. Scores of a spread of about 3 make attention choose.
GAINS = {"wq_b": 3.0, "wo_b": 2.0, "lm_head": 4.0, "embed_tokens": 1.0}


def fill(model: nn.Module) -> int:
    """Overwrite every floating-point tensor of ``model``; returns how many. Integer tables stay as they are."""
    state = model.state_dict()
    filled = 0
    for name, tensor in state.items():
        if not torch.is_floating_point(tensor):
            continue
        filled += 1
        owner = name.removesuffix(SCALE_SUFFIX)
        if owner != name and owner in state:
            tensor.data.fill_(block_scale(owner, state[owner].shape))
        else:
            _fill_one(name, tensor.data, quantized=name + SCALE_SUFFIX in state)
    return filled


def block_scale(name: str, shape: torch.Size) -> float:
    """Scale of a quantized weight whose stored values have a spread of one: a power of two, as its format holds."""
    return float(2.0 ** round(math.log2(_gain(name) / math.sqrt(shape[-1]))))


def _gain(name: str) -> float:
    return next((gain for part, gain in GAINS.items() if part in name.split(".")), 1.0)


def _fill_one(name: str, tensor: torch.Tensor, quantized: bool) -> None:
    last = name.rsplit(".", 1)[-1]
    if tensor.dim() < 2:
        # Norms and mixing scales pass what they get; biases, sinks and offsets are absent.
        tensor.fill_(1.0 if ("norm" in name and last == "weight") or last.endswith("scale") else 0.0)
        return
    generator = torch.Generator(device=tensor.device).manual_seed(SEED + zlib.crc32(name.encode()))
    spread = 1.0 if quantized or "embed_tokens" in name else _gain(name) / math.sqrt(tensor.shape[-1])
    for part in tensor.unbind() if tensor.dim() > 2 else (tensor,):  # expert by expert: fp32 copies stay small
        values = torch.randn(part.shape, dtype=torch.float32, device=part.device, generator=generator)
        part.copy_((values * spread).to(part.dtype))
