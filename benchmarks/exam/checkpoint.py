"""Writes tensors as a released DeepSeek-V4 checkpoint holds them: fp8 matrices with a scale a block, names and types.

<name>.weight  float8_e4m3fn [out, in]  with  <name>.scale  float8_e8m0fnu [out / 128, in / 128]
everything else bfloat16, but float32 for hyper-connections, sinks, position offsets and the gate's bias, and
int32 for the hash layers' table: token id -> experts
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FILE = "model.safetensors"
FP8, SCALE = torch.float8_e4m3fn, torch.float8_e8m0fnu
BLOCK = 128
MATRICES = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3")  # in fp8, but for a compressor's
EXACT = ("hc_", "attn_sink", "ape", "gate.bias")


def write(folder: Path, values: Mapping[str, Tensor]) -> int:
    """Writes fp32 ``values`` by released name; returns the bytes of the file's tensors."""
    tensors: dict[str, Tensor] = {}
    for name, value in values.items():
        if name.endswith(".weight") and "compressor" not in name and name.split(".")[-2] in MATRICES:
            tensors[name], tensors[name.removesuffix("weight") + "scale"] = quantize(value)
        elif name.endswith("tid2eid"):
            tensors[name] = value.to(torch.int32).contiguous()
        else:
            kept = any(part in name for part in EXACT)
            tensors[name] = value.to(torch.float32 if kept else torch.bfloat16).contiguous()
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    return sum(tensor.nbytes for tensor in tensors.values())


def read(folder: Path) -> dict[str, Tensor]:
    """Returns the values that ``write`` wrote, fp32 or int32 by name."""
    raw, values = load_file(folder / FILE), {}
    for name, tensor in raw.items():
        if tensor.dtype == FP8:
            values[name] = dequantize(tensor, raw[name.removesuffix("weight") + "scale"])
        elif tensor.dtype != SCALE:
            values[name] = tensor if tensor.dtype == torch.int32 else tensor.float()
    return values


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns fp8 values, and a power of two for each block of 128 x 128; sides are multiples of it."""
    peak = _blocks(weight).abs().amax((1, 3)) / torch.finfo(FP8).max
    scale = torch.where(peak > 0, peak.log2().ceil().exp2(), 1.0)
    return (_blocks(weight) / scale[:, None, :, None]).view(weight.shape).to(FP8), scale.to(SCALE)


def dequantize(weight: Tensor, scale: Tensor) -> Tensor:
    return (_blocks(weight.float()) * scale.float()[:, None, :, None]).view(weight.shape)


def _blocks(weight: Tensor) -> Tensor:
    rows, columns = weight.shape
    return weight.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
