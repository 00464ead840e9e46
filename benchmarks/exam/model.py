"""Defines a slim, trainable DeepSeek-V4: the served function with fewer live heads and a narrower stream.

Parameters carry the names of a released checkpoint, but for the experts of a layer, which lie side by side in one
matrix. export.py pads what is missing with zeros, which changes nothing in the function.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.exam import layers
from benchmarks.exam.layers import Attention, Norm, linear


@dataclass
class Config:
    """Holds the sizes of a model; heads and index_heads are those that are trained."""

    vocab: int = 1152
    dim: int = 1024
    heads: int = 16
    head_dim: int = 512
    rope_dim: int = 64
    q_rank: int = 256
    groups: int = 8
    o_rank: int = 128
    window: int = 128
    ratios: tuple[int, ...] = (0, 4, 128, 0)
    index_heads: int = 8
    index_dim: int = 128
    index_topk: int = 512
    experts: int = 8
    topk: int = 6
    inner: int = 256
    hash_layers: int = 1
    hc: int = 4
    sinkhorn: int = 20
    eps: float = 1e-6
    theta: float = 10000.0
    compress_theta: float = 160000.0
    yarn_factor: float = 16.0
    yarn_original: int = 65536
    routed_scale: float = 1.5
    swiglu_limit: float = 10.0


class Gate(nn.Module):
    """Holds the router's matrix, and the experts of each token id in a hash layer."""

    def __init__(self, c: Config, hashed: bool) -> None:
        super().__init__()
        self.weight = linear(c.dim, c.experts).weight
        if hashed:
            table = torch.rand(c.vocab, c.experts, generator=torch.Generator().manual_seed(7)).argsort(1)
            self.register_buffer("tid2eid", table[:, : c.topk].to(torch.int32))
        else:
            self.register_buffer("bias", torch.zeros(c.experts))


class Mlp(nn.Module):
    """Holds gate w1, up w3 and down w2 of one expert, or of ``count`` side by side."""

    def __init__(self, c: Config, count: int) -> None:
        super().__init__()
        self.w1, self.w3 = linear(c.dim, count * c.inner), linear(c.dim, count * c.inner)
        self.w2 = linear(count * c.inner, c.dim, 0.5 * count**0.5)

    def act(self, x: Tensor, limit: float) -> Tensor:
        return F.silu(self.w1(x).clamp(max=limit)) * self.w3(x).clamp(-limit, limit)


class Moe(nn.Module):
    """Computes all experts; the router's weights are zero but for the chosen ones."""

    def __init__(self, c: Config, hashed: bool) -> None:
        super().__init__()
        self.c, self.hashed = c, hashed
        self.gate, self.experts, self.shared_experts = Gate(c, hashed), Mlp(c, c.experts), Mlp(c, 1)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        c = self.c
        score = F.softplus(F.linear(x, self.gate.weight).float()).sqrt()
        if self.hashed:
            chosen = self.gate.tid2eid[ids].long()
        else:
            chosen = (score.detach() + self.gate.bias).topk(c.topk, -1).indices
        weight = torch.zeros_like(score).scatter(-1, chosen, score.gather(-1, chosen))
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) * c.routed_scale
        routed = self.experts.act(x, c.swiglu_limit).unflatten(-1, (c.experts, c.inner))
        routed = self.experts.w2((routed * weight.to(routed.dtype).unsqueeze(-1)).flatten(-2))
        return routed + self.shared_experts.w2(self.shared_experts.act(x, c.swiglu_limit))


def balanced(comb: Tensor, rounds: int, eps: float) -> Tensor:
    """Makes the last two dimensions doubly stochastic by Sinkhorn's rounds."""
    comb = comb.softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(rounds - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def mixed(streams: Tensor, fn: Tensor, eps: float) -> Tensor:
    """Applies ``fn`` to the normed streams [B, S, hc, dim], in fp32."""
    flat = streams.flatten(2).float()
    with torch.autocast(streams.device.type, enabled=False):
        return F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Sums the streams by their weights."""
    return (pre.unsqueeze(-1) * streams.float()).sum(2).to(streams.dtype)


def spread(streams: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Mixes the streams and adds a layer's output to each; stream k takes comb[j, k] of stream j."""
    new = post.unsqueeze(-1) * out.float().unsqueeze(2)
    for j in range(streams.shape[2]):
        new = new + comb[:, :, j, :, None] * streams[:, :, j, None].float()
    return new.to(streams.dtype)


def compile_parts() -> None:
    """Fuses the small functions, which would otherwise take most of a step."""
    torch._dynamo.config.recompile_limit = 64
    here = globals()
    for name in ("balanced", "spread", "collapse", "mixed"):
        here[name] = torch.compile(here[name], dynamic=True)
    for name in ("unit", "rotate", "shares"):
        setattr(layers, name, torch.compile(getattr(layers, name), dynamic=True))


class Layer(nn.Module):
    """Runs attention and experts, each between hyper-connections."""

    def __init__(self, c: Config, number: int) -> None:
        super().__init__()
        self.c = c
        self.attn, self.ffn = Attention(c, c.ratios[number]), Moe(c, number < c.hash_layers)
        self.attn_norm, self.ffn_norm = Norm(c.dim, c.eps), Norm(c.dim, c.eps)
        mixes = (2 + c.hc) * c.hc
        for part in ("attn", "ffn"):
            setattr(self, f"hc_{part}_fn", nn.Parameter(torch.randn(mixes, c.hc * c.dim) * (c.hc * c.dim) ** -0.5))
            setattr(self, f"hc_{part}_base", nn.Parameter(torch.zeros(mixes)))
            setattr(self, f"hc_{part}_scale", nn.Parameter(torch.full((3,), 0.1)))

    def _weights(self, part: str, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c, n = self.c, self.c.hc
        fn, base, scale = (getattr(self, f"hc_{part}_{name}") for name in ("fn", "base", "scale"))
        pre, post, comb = mixed(streams, fn, c.eps).split((n, n, n * n), -1)
        pre = torch.sigmoid(pre * scale[0] + base[:n]) + c.eps
        post = 2 * torch.sigmoid(post * scale[1] + base[n : 2 * n])
        comb = (comb * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
        return pre, post, balanced(comb, c.sinkhorn, c.eps)

    def forward(self, streams: Tensor, ids: Tensor, learn_index: bool = False) -> Tensor:
        pre, post, comb = self._weights("attn", streams)
        streams = spread(streams, self.attn(self.attn_norm(collapse(streams, pre)), learn_index), post, comb)
        pre, post, comb = self._weights("ffn", streams)
        return spread(streams, self.ffn(self.ffn_norm(collapse(streams, pre)), ids), post, comb)


class Model(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.embed, self.head = nn.Embedding(c.vocab, c.dim), nn.Linear(c.dim, c.vocab, bias=False)
        self.layers = nn.ModuleList(Layer(c, number) for number in range(len(c.ratios)))
        self.norm = Norm(c.dim, c.eps)
        self.hc_head_fn = nn.Parameter(torch.randn(c.hc, c.hc * c.dim) * (c.hc * c.dim) ** -0.5)
        self.hc_head_base, self.hc_head_scale = nn.Parameter(torch.zeros(c.hc)), nn.Parameter(torch.full((1,), 0.1))

    def forward(self, ids: Tensor, keep: slice = slice(None), learn_index: bool = False) -> Tensor:
        """Returns logits [B, kept positions, vocab] in fp32; ids [B, S]."""
        c, length = self.c, ids.shape[1]
        ids = F.pad(ids, (0, -length % c.window))
        with torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=ids.is_cuda):
            x = self.embed(ids)
            x = x.bfloat16() if ids.is_cuda else x
            streams = x.unsqueeze(2).expand(-1, -1, c.hc, -1).contiguous()
            for layer in self.layers:
                streams = layer(streams, ids, learn_index)
            streams = streams[:, :length][:, keep]
            pre = torch.sigmoid(mixed(streams, self.hc_head_fn, c.eps) * self.hc_head_scale + self.hc_head_base) + c.eps
            return self.head(self.norm(collapse(streams, pre))).float()

    def index_loss(self) -> Tensor:
        """Returns the indexers' loss of the newest forward with ``learn_index``."""
        return sum(layer.attn.index_loss for layer in self.layers if layer.attn.ratio == 4)
