"""Computes DeepSeek-V4's attention over a whole sequence: a window, compressed rows, and the indexer that chooses them.

Parameters carry the names of a released checkpoint; ``Config`` is in model.py.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

if TYPE_CHECKING:
    from benchmarks.exam.model import Config

NEVER = float("-inf")


def frequencies(c: Config, compressed: bool) -> Tensor:
    """Returns a frequency for each rotated pair: plain for window layers, YaRN without mscale for compressing ones."""
    base = c.compress_theta if compressed else c.theta
    plain = 1.0 / base ** (torch.arange(0, c.rope_dim, 2, dtype=torch.float64) / c.rope_dim)
    if not compressed:
        return plain.float()

    def pair_of(turns: int) -> float:
        return c.rope_dim * math.log(c.yarn_original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(pair_of(32)), 0), min(math.ceil(pair_of(1)), c.rope_dim - 1)
    ramp = ((torch.arange(c.rope_dim // 2) - low) / max(high - low, 1e-3)).clamp(0, 1).double()
    return (plain / c.yarn_factor * ramp + plain * (1 - ramp)).float()


def rotate(x: Tensor, freqs: Tensor, positions: Tensor, inverse: bool = False) -> Tensor:
    """Rotates neighbouring pairs of the last dimensions of x [B, S, ..., D] by ``positions`` [S]."""
    angle = positions.float()[:, None] * freqs
    angle = angle.view(1, len(positions), *[1] * (x.dim() - 3), -1)
    cos, sin = angle.cos(), -angle.sin() if inverse else angle.sin()
    width = 2 * freqs.numel()
    a, b = x[..., -width:].float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((x[..., :-width], turned.to(x.dtype)), -1)


def unit(x: Tensor, eps: float) -> Tensor:
    """Scales vectors to a root mean square of one."""
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


class Norm(nn.Module):
    """Scales each vector to a root mean square of one, then each element by its weight."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        return unit(x, self.eps) * self.weight.to(x.dtype)


def linear(into: int, out: int, gain: float = 1.0) -> nn.Linear:
    """Returns a matrix that keeps the size of its input, times ``gain``."""
    layer = nn.Linear(into, out, bias=False)
    nn.init.normal_(layer.weight, std=gain * into**-0.5)
    return layer


class Compressor(nn.Module):
    """Makes a row of ``ratio`` tokens: their softmax-gated mean (ratio 4: and the block before), normed and rotated."""

    def __init__(self, c: Config, ratio: int, width: int) -> None:
        super().__init__()
        self.ratio, self.width, self.overlaps = ratio, width, ratio == 4
        columns = width * (2 if self.overlaps else 1)
        self.ape = nn.Parameter(torch.zeros(ratio, columns))
        self.wkv, self.wgate = linear(c.dim, columns), linear(c.dim, columns)
        self.norm = Norm(width, c.eps)

    def forward(self, x: Tensor, freqs: Tensor) -> Tensor:
        """Returns the rows [B, S // ratio, width] of x [B, S, dim]."""
        count = x.shape[1] // self.ratio
        x = x[:, : count * self.ratio]
        kv = self.wkv(x).unflatten(1, (count, self.ratio))
        gate = self.wgate(x).unflatten(1, (count, self.ratio)).float() + self.ape
        if self.overlaps:
            kv, gate = self._with_block_before(kv, 0.0), self._with_block_before(gate, NEVER)
        row = self.norm((kv * gate.softmax(2).to(kv.dtype)).sum(2))
        return rotate(row, freqs, torch.arange(count, device=x.device) * self.ratio)

    def _with_block_before(self, x: Tensor, nothing: float) -> Tensor:
        before = F.pad(x[:, :-1, :, : self.width], (0, 0, 0, 0, 1, 0), value=nothing)
        return torch.cat((before, x[..., self.width :]), 2)


class Indexer(nn.Module):
    """Scores c4 rows for each token, by keys of their own; its loss moves it alone."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads, self.rope_dim = c.index_heads, c.rope_dim
        self.scale = (c.index_dim * c.index_heads) ** -0.5
        self.wq_b = linear(c.q_rank, c.index_heads * c.index_dim)
        self.weights_proj = linear(c.dim, c.index_heads)
        self.compressor = Compressor(c, 4, c.index_dim)

    def forward(self, x: Tensor, low: Tensor, freqs: Tensor, positions: Tensor) -> Tensor:
        """Returns scores [B, S, rows]; low: the low-rank queries."""
        x, low = x.detach(), low.detach()
        keys = self.compressor(x, freqs)
        q = rotate(self.wq_b(low).unflatten(-1, (self.heads, -1)), freqs, positions)
        scores = torch.einsum("bshd,btd->bsht", q, keys).relu()
        return torch.einsum("bsht,bsh->bst", scores, self.weights_proj(x).to(scores.dtype)).float() * self.scale


class Attention(nn.Module):
    """Attends to a window of keys, to compressed rows and to a sink; keys are values, one head of them.

    index_loss: of the newest forward that was asked for it.
    """

    def __init__(self, c: Config, ratio: int) -> None:
        super().__init__()
        self.c, self.ratio = c, ratio
        self.wq_a, self.q_norm = linear(c.dim, c.q_rank), Norm(c.q_rank, c.eps)
        self.wq_b = linear(c.q_rank, c.heads * c.head_dim)
        self.wkv, self.kv_norm = linear(c.dim, c.head_dim), Norm(c.head_dim, c.eps)
        self.wo_a = linear(c.heads * c.head_dim // c.groups, c.groups * c.o_rank)
        self.wo_b = linear(c.groups * c.o_rank, c.dim)
        self.attn_sink = nn.Parameter(torch.zeros(c.heads))
        if ratio:
            self.compressor = Compressor(c, ratio, c.head_dim)
        if ratio == 4:
            self.indexer = Indexer(c)
        self.register_buffer("freqs", frequencies(c, bool(ratio)), persistent=False)
        self.index_loss: Tensor | None = None

    def forward(self, x: Tensor, learn_index: bool = False) -> Tensor:
        """x [B, S, dim], S a multiple of the window."""
        c, (batch, length, _) = self.c, x.shape
        where = torch.arange(length, device=x.device)
        low = self.q_norm(self.wq_a(x))
        kv = rotate(self.kv_norm(self.wkv(x)), self.freqs, where)
        q = rotate(unit(self.wq_b(low).unflatten(-1, (c.heads, c.head_dim)), c.eps), self.freqs, where)
        q = (q * c.head_dim**-0.5).to(kv.dtype)
        # The keys of a block of queries are its own and those of the block before: [B, blocks, 2 windows, head_dim].
        blocks = length // c.window
        near = kv.unflatten(1, (blocks, c.window))
        near = torch.cat((F.pad(near[:, :-1], (0, 0, 0, 0, 1, 0)), near), 2)
        logits = q.reshape(batch, blocks, c.window * c.heads, c.head_dim) @ near.transpose(-1, -2)
        logits = logits.view(batch, length, c.heads, 2 * c.window)
        rows = scores = far = mask = None
        if self.ratio:
            rows = self.compressor(x, self.freqs)
            scores, mask = self._visible(x, low, rows.shape[1], where, learn_index)
            far = (q.reshape(batch, -1, c.head_dim) @ rows.transpose(-1, -2)).view(batch, length, c.heads, -1)
        here, there = shares(logits, self._window(where), far, mask, self.attn_sink)
        o = (here.view(batch, blocks, c.window * c.heads, -1) @ near).view(batch, length, c.heads, c.head_dim)
        if self.ratio:
            o = o + (there.view(batch, length * c.heads, -1) @ rows).view_as(o)
            if learn_index and self.ratio == 4:
                self.index_loss = index_loss(scores, there.detach(), mask)
        o = rotate(o, self.freqs, where, inverse=True).reshape(batch * length, c.groups, -1)
        o = torch.einsum("tgd,grd->tgr", o, self.wo_a.weight.to(o.dtype).unflatten(0, (c.groups, c.o_rank)))
        return self.wo_b(o.flatten(1)).view(batch, length, -1)

    def _window(self, where: Tensor) -> Tensor:
        """Returns which of its block's two windows of keys each token sees: [S, 2 windows]."""
        window = self.c.window
        at, key = (where % window)[:, None], torch.arange(2 * window, device=where.device)
        exists = (where[:, None] // window - 1) * window + key >= 0
        return exists & (key > at) & (key <= at + window)

    def _visible(
        self, x: Tensor, low: Tensor, rows: int, where: Tensor, learn_index: bool
    ) -> tuple[Tensor | None, Tensor]:
        """Returns the indexer's scores, where they are needed, and which rows each token sees: [1 or B, S, rows]."""
        mask = (torch.arange(rows, device=x.device) < ((where + 1) // self.ratio)[:, None])[None]
        chooses = rows > self.c.index_topk
        if self.ratio != 4 or not (learn_index or chooses):
            return None, mask
        scores = self.indexer(x, low, self.freqs, where).masked_fill(~mask, NEVER)
        if chooses:
            best = scores.topk(self.c.index_topk, -1).indices
            mask = mask & torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)
        return scores, mask


def shares(
    near: Tensor, seen: Tensor, far: Tensor | None, mask: Tensor | None, sink: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Returns the attention [B, S, H, keys] to keys of the window and to compressed rows; the sink keeps the rest."""
    kind = torch.bfloat16 if near.is_cuda else torch.float32
    near = near.float().masked_fill(~seen[None, :, None], NEVER)
    top = torch.maximum(near.amax(-1, keepdim=True), sink.float().view(1, 1, -1, 1))
    if far is not None:
        far = far.float().masked_fill(~mask[:, :, None], NEVER)
        top = torch.maximum(top, far.amax(-1, keepdim=True))
    top = top.detach()
    near = (near - top).exp()
    total = near.sum(-1, keepdim=True) + (sink.float().view(1, 1, -1, 1) - top).exp()
    if far is None:
        return (near / total).to(kind), None
    far = (far - top).exp()
    total = total + far.sum(-1, keepdim=True)
    return (near / total).to(kind), (far / total).to(kind)


def index_loss(scores: Tensor, share: Tensor, mask: Tensor) -> Tensor:
    """Returns the KL divergence of the scores' softmax from the heads' attention to rows, weighed by its sum."""
    target = share.float().sum(2)
    weight = target.sum(-1, keepdim=True)
    target = target / weight.clamp_min(1e-6)
    guess = scores.masked_fill(~mask, NEVER).log_softmax(-1).masked_fill(~mask, 0)
    loss = -(target * guess).sum(-1)
    return (loss * weight[..., 0]).sum() / weight.sum().clamp_min(1)
