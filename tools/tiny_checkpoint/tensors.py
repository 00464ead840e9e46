"""Draws the tensors of a DeepSeek-V4 or V4.1 checkpoint from a seed: names, shapes and types as released.

    <name>.weight  float8_e4m3fn [out, in]  with  <name>.scale  float8_e8m0fnu [out / 128, in / 128]
    engram.embed.weight  float8_e4m3fn [rows, width]  with  engram.embed.scale  float8_e8m0fnu [rows, width / 32]
    everything else bfloat16, but float32 for hyper-connections, sinks, position offsets and the gate's bias, and
    int32 for the hash layers' table: token id -> experts

A part goes into one file: the tensors shared by all layers, then one part a layer.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from sglang_dsv4.models.seeded import SCALE_SUFFIX, fill
from tools.tiny_checkpoint.config import is_v41

FP8, SCALE, BF16, FP32, INT32 = (
    torch.float8_e4m3fn,
    torch.float8_e8m0fnu,
    torch.bfloat16,
    torch.float32,
    torch.int32,
)
BLOCK, TABLE_BLOCK = 128, 32
Specs = dict[str, tuple[tuple[int, ...], torch.dtype]]


def parts(config: dict[str, Any]) -> Iterator[Specs]:
    """Yields shape and type of each tensor by name, part by part."""
    yield _shared(config)
    for layer in range(config["num_hidden_layers"]):
        specs = _attention(config, layer)
        specs |= _experts(config, hashed=layer < config["num_hash_layers"])
        specs |= _mixing(config)
        if layer in config.get("engram_layer_ids", ()):
            specs |= _engram(config, layer)
        yield {f"layers.{layer}.{name}": spec for name, spec in specs.items()}


def draw(specs: Specs, config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Values for ``specs``, on the CPU: the seeded weights of a dummy load, which depend on name, shape and seed."""
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in specs.items()}
    fill(_Named({f"seed{seed}.{_drawn_as(name)}": tensor for name, tensor in tensors.items()}))
    for name, tensor in tensors.items():
        if name.endswith("tid2eid"):
            tensor.copy_(_table(name, tensor.shape, config["n_routed_experts"], seed))
    return tensors


def cast(specs: Specs, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns ``values``, fp32 by name, in the types of ``specs``; the scale of a quantized one is made here.

    Raises ValueError where a value is absent or of another shape.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, (shape, dtype) in specs.items():
        if dtype == SCALE:
            continue
        if name not in values or values[name].shape != shape:
            raise ValueError(f"{name}: needed: {shape}, found: {values[name].shape if name in values else 'none'}")
        if dtype == FP8:
            tensors[name], tensors[name.removesuffix("weight") + "scale"] = quantize(values[name])
        else:
            tensors[name] = values[name].to(dtype).contiguous()
    return tensors


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns fp8 values, and a power of two for each block of 128 x 128; sides are multiples of it."""
    peak = _blocks(weight).abs().amax((1, 3)) / torch.finfo(FP8).max
    scale = torch.where(peak > 0, peak.log2().ceil().exp2(), 1.0)
    return (_blocks(weight) / scale[:, None, :, None]).view(weight.shape).to(FP8), scale.to(SCALE)


def dequantize(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Returns the fp32 values of a quantized weight."""
    return (_blocks(weight.float()) * scale.float()[:, None, :, None]).view(weight.shape)


def _blocks(weight: torch.Tensor) -> torch.Tensor:
    rows, columns = weight.shape
    return weight.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)


class _Named(nn.Module):
    """Tensors by any name, as ``fill`` reads them from a model."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        return self._tensors


def _drawn_as(name: str) -> str:
    """Returns the name in the engine's model, whose parts choose gain and kind."""
    renamed = {"embed.weight": "embed_tokens.weight", "head.weight": "lm_head.weight"}.get(name, name)
    owner = renamed.removesuffix(".scale")
    return renamed if owner == renamed else f"{owner}.weight{SCALE_SUFFIX}"


def _table(name: str, shape: torch.Size, experts: int, seed: int) -> torch.Tensor:
    """Returns distinct experts for each token id."""
    generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
    return torch.rand(shape[0], experts, generator=generator).argsort(dim=1)[:, : shape[1]]


def _quantized(name: str, out: int, into: int) -> Specs:
    return {
        f"{name}.weight": ((out, into), FP8),
        f"{name}.scale": ((-(-out // BLOCK), -(-into // BLOCK)), SCALE),
    }


def _shared(config: dict[str, Any]) -> Specs:
    hidden, words, streams = config["hidden_size"], config["vocab_size"], config["hc_mult"]
    specs: Specs = {
        "embed.weight": ((words, hidden), BF16),
        "head.weight": ((words, hidden), BF16),
        "norm.weight": ((hidden,), BF16),
    }
    if is_v41(config):  # the last layer's own mixture collapses its streams
        return specs
    return specs | {
        "hc_head_fn": ((streams, streams * hidden), FP32),
        "hc_head_base": ((streams,), FP32),
        "hc_head_scale": ((1,), FP32),
    }


def _attention(config: dict[str, Any], layer: int) -> Specs:
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
    specs |= _shared_cache(config, layer) if is_v41(config) else _own_cache(config, config["compress_ratios"][layer])
    return {f"attn.{name}": spec for name, spec in specs.items()}


def _own_cache(config: dict[str, Any], ratio: int) -> Specs:
    """Gives each V4 layer that compresses a cache of its own, and with ratio 4 an index."""
    hidden = config["hidden_size"]
    specs: Specs = {}
    if ratio:
        specs |= _compressor("compressor", hidden, ratio, config["head_dim"])
    if ratio == 4:
        specs |= _index_queries(config)
        specs |= _compressor("indexer.compressor", hidden, ratio, config["index_head_dim"])
    return specs


def _shared_cache(config: dict[str, Any], layer: int) -> Specs:
    """Gives some V4.1 layers a cache with its index keys, and some a choice of positions; the others read those."""
    hidden, width, index_width = config["hidden_size"], config["head_dim"], config["index_head_dim"]
    owns = layer in config["kv_source_layer_ids"]
    specs: Specs = {}
    if owns:
        specs["compressor.norm.weight"] = ((width,), BF16)
        specs["compressor.wkv.weight"] = ((width, hidden), BF16)
        if config["compress_ratios"][layer] > 1:
            specs["compressor.wgate.weight"] = ((width, hidden), BF16)
    if layer in config["index_source_layer_ids"]:
        specs |= _index_queries(config)
        if owns:
            specs["indexer.wk.weight"] = ((index_width, width), BF16)
            specs["indexer.k_norm.weight"] = ((index_width,), BF16)
    return specs


def _index_queries(config: dict[str, Any]) -> Specs:
    heads, width = config["index_n_heads"], config["index_head_dim"]
    return {
        **_quantized("indexer.wq_b", heads * width, config["q_lora_rank"]),
        "indexer.weights_proj.weight": ((heads, config["hidden_size"]), BF16),
    }


def _engram(config: dict[str, Any], layer: int) -> Specs:
    """Returns a table of hashed n-grams, and the projection of a token's entries in it."""
    hidden, streams, width = config["hidden_size"], config["hc_mult"], config["engram_head_dim"]
    rows = config["engram_num_embeddings"][config["engram_layer_ids"].index(layer)]
    found = (config["engram_max_ngram_size"] - 1) * config["engram_n_heads"] * width
    specs: Specs = {
        "embed.weight": ((rows, width), FP8),
        "embed.scale": ((rows, width // TABLE_BLOCK), SCALE),
        **_quantized("wkv", hidden * (streams + 1), found),
        "q_weight": ((streams, hidden), BF16),
        "k_weight": ((streams, hidden), BF16),
    }
    return {f"engram.{name}": spec for name, spec in specs.items()}


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
