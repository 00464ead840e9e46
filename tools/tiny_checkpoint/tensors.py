"""The tensors of a DeepSeek-V4 checkpoint: names, shapes and types as released, values drawn from a seed.

    <name>.weight  float8_e4m3fn [out, in]  with  <name>.scale  float8_e8m0fnu [out / 128, in / 128]
    everything else bfloat16, but float32 for hyper-connections, sinks, position offsets and the gate's bias, and
    int32 for the hash layers' table: token id -> experts

A part is what goes into one file: the tensors shared by all layers, then one part a layer.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from sglang_dsv4.models.seeded import SCALE_SUFFIX, fill

FP8, SCALE, BF16, FP32, INT32 = (
    torch.float8_e4m3fn,
    torch.float8_e8m0fnu,
    torch.bfloat16,
    torch.float32,
    torch.int32,
)
BLOCK = 128
Specs = dict[str, tuple[tuple[int, ...], torch.dtype]]


def parts(config: dict[str, Any]) -> Iterator[Specs]:
    """Shape and type of each tensor by name, part by part."""
    yield _shared(config)
    for layer in range(config["num_hidden_layers"]):
        specs = _attention(config, config["compress_ratios"][layer])
        specs |= _experts(config, hashed=layer < config["num_hash_layers"])
        specs |= _mixing(config)
        yield {f"layers.{layer}.{name}": spec for name, spec in specs.items()}


def draw(specs: Specs, config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Values for ``specs``, on the CPU: the seeded weights of a dummy load, which depend on name, shape and seed."""
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in specs.items()}
    fill(_Named({f"seed{seed}.{_drawn_as(name)}": tensor for name, tensor in tensors.items()}))
    for name, tensor in tensors.items():
        if name.endswith("tid2eid"):
            tensor.copy_(_table(name, tensor.shape, config["n_routed_experts"], seed))
    return tensors


class _Named(nn.Module):
    """Tensors by any name, as ``fill`` reads them from a model."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        return self._tensors


def _drawn_as(name: str) -> str:
    """The name in the engine's model, whose parts choose gain and kind."""
    renamed = {"embed.weight": "embed_tokens.weight", "head.weight": "lm_head.weight"}.get(name, name)
    owner = renamed.removesuffix(".scale")
    return renamed if owner == renamed else f"{owner}.weight{SCALE_SUFFIX}"


def _table(name: str, shape: torch.Size, experts: int, seed: int) -> torch.Tensor:
    """Distinct experts for each token id."""
    generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
    return torch.rand(shape[0], experts, generator=generator).argsort(dim=1)[:, : shape[1]]


def _quantized(name: str, out: int, into: int) -> Specs:
    return {
        f"{name}.weight": ((out, into), FP8),
        f"{name}.scale": ((-(-out // BLOCK), -(-into // BLOCK)), SCALE),
    }


def _shared(config: dict[str, Any]) -> Specs:
    hidden, words, streams = config["hidden_size"], config["vocab_size"], config["hc_mult"]
    return {
        "embed.weight": ((words, hidden), BF16),
        "head.weight": ((words, hidden), BF16),
        "norm.weight": ((hidden,), BF16),
        "hc_head_fn": ((streams, streams * hidden), FP32),
        "hc_head_base": ((streams,), FP32),
        "hc_head_scale": ((1,), FP32),
    }


def _attention(config: dict[str, Any], ratio: int) -> Specs:
    hidden, heads, width = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    rank, groups, out_rank = config["q_lora_rank"], config["o_groups"], config["o_lora_rank"]
    specs: Specs = {
        **_quantized("wq_a", rank, hidden),
        "q_norm.weight": ((rank,), BF16),
        **_quantized("wq_b", heads * width, rank),
        **_quantized("wkv", width, hidden),
        "kv_norm.weight": ((width,), BF16),
        **_quantized("wo_a", groups * out_rank, heads * width // groups),
        **_quantized("wo_b", hidden, groups * out_rank),
        "attn_sink": ((heads,), FP32),
    }
    if ratio:
        specs |= _compressor("compressor", hidden, ratio, width)
    if ratio == 4:
        index_heads, index_width = config["index_n_heads"], config["index_head_dim"]
        specs |= _quantized("indexer.wq_b", index_heads * index_width, rank)
        specs["indexer.weights_proj.weight"] = ((index_heads, hidden), BF16)
        specs |= _compressor("indexer.compressor", hidden, ratio, index_width)
    return {f"attn.{name}": spec for name, spec in specs.items()}


def _compressor(name: str, hidden: int, ratio: int, width: int) -> Specs:
    rows = width * (2 if ratio == 4 else 1)  # ratio 4 reads the block before as well
    return {
        f"{name}.ape": ((ratio, rows), FP32),
        f"{name}.wkv.weight": ((rows, hidden), BF16),
        f"{name}.wgate.weight": ((rows, hidden), BF16),
        f"{name}.norm.weight": ((width,), BF16),
    }


def _experts(config: dict[str, Any], hashed: bool) -> Specs:
    hidden, inner, experts = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]
    specs: Specs = {"gate.weight": ((experts, hidden), BF16)}
    if hashed:
        specs["gate.tid2eid"] = ((config["vocab_size"], config["num_experts_per_tok"]), INT32)
    else:
        specs["gate.bias"] = ((experts,), FP32)
    mlps = {f"experts.{i}": inner for i in range(experts)}
    mlps["shared_experts"] = inner * config["n_shared_experts"]
    for name, width in mlps.items():
        specs |= _quantized(f"{name}.w1", width, hidden)
        specs |= _quantized(f"{name}.w2", hidden, width)
        specs |= _quantized(f"{name}.w3", width, hidden)
    return {f"ffn.{name}": spec for name, spec in specs.items()}


def _mixing(config: dict[str, Any]) -> Specs:
    """Norms and hyper-connections."""
    hidden, streams = config["hidden_size"], config["hc_mult"]
    mixes = (2 + streams) * streams
    specs: Specs = {"attn_norm.weight": ((hidden,), BF16), "ffn_norm.weight": ((hidden,), BF16)}
    for part in ("attn", "ffn"):
        specs[f"hc_{part}_fn"] = ((mixes, streams * hidden), FP32)
        specs[f"hc_{part}_base"] = ((mixes,), FP32)
        specs[f"hc_{part}_scale"] = ((3,), FP32)
    return specs
