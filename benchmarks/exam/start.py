"""Sets the matrices that a training starts from, so that the right row is found before the first step.

From random matrices, facts were never found by their key. So queries and rows read one subspace, as wide as q_rank:

- words: the part in that subspace is louder; words of one role, words of one meaning, and all words have a part in
  common; the head starts as the embedding;
- layers that compress: every other head, and the indexer, asks for the rows that hold the token it stands on;
- other layers: every other head looks 3, 2, 1 or 4 tokens back;
- what attention reads is written back much as it was.

Training is free to leave all of this.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.exam.layers import Attention, Indexer
from benchmarks.exam.model import Model
from benchmarks.exam.recipe import Start
from benchmarks.exam.task import Task

QUIET = 0.8  # of the part of a word outside of the subspace
SELF = 8  # logit by which the head repeats the word it sees
BACK_BY = (3, 2, 1, 4)  # tokens
FAST = 0.2  # least frequency of a pair that tells neighbouring tokens apart


@dataclass
class Words:
    """Holds the subspace [q_rank, dim], orthonormal, and in it the part of all words and that of each role."""

    space: Tensor
    common: Tensor
    roles: dict[int, Tensor]
    reads_one: Tensor  # [dim], 1 for every word


@torch.no_grad()
def begin(model: Model, task: Task, s: Start) -> None:
    """Overwrites the model's matrices."""
    words = _embed(model, task, s)
    for number, layer in enumerate(model.layers):
        a = layer.attn
        a.wq_a.weight.copy_(words.space + 0.2 * a.wq_a.weight)
        read = _orthonormal(max(a.c.head_dim, a.c.q_rank), min(a.c.head_dim, a.c.q_rank))
        read = read if a.c.head_dim >= a.c.q_rank else read.T  # [head_dim, q_rank]
        rows = a.compressor.wkv.weight[-a.c.head_dim :] if a.ratio else a.wkv.weight
        rows.copy_(read @ words.space + 0.2 * rows)
        if a.ratio:
            _ask_for_rows(a, read, words, task, s)
        else:
            _look_back(a, rows, words)
        if a.ratio == 4:
            _index(a.indexer, words)
        _write_back(a, rows, first=number == 0, share=s.back if a.ratio else 1.0)


def _orthonormal(*shape: int) -> Tensor:
    return torch.linalg.qr(torch.randn(*shape))[0]


def _embed(model: Model, task: Task, s: Start) -> Words:
    c = model.c
    own = torch.randn(c.vocab, c.dim)
    words = own.clone()
    for kin in task.kin():
        words[kin] = (own[kin] + torch.randn(c.dim)) * 0.5**0.5
    say = words.clone()
    nexts = slice(task.nexts, task.nexts + task.keys)
    say[nexts] = own[nexts]  # a key must not suggest the successor of the same name
    roles = {first: 0.6 * torch.randn(c.dim) for first, _ in task.roles}
    for first, count in task.roles:
        for table in (words, say):
            table[first : first + count] = QUIET * table[first : first + count] + roles[first]
    common = 0.4 * torch.randn(c.dim)
    space = _orthonormal(c.dim, c.q_rank).T

    def louder(table: Tensor) -> Tensor:
        return QUIET * table + (s.loud - QUIET) * (table @ space.T) @ space

    model.embed.weight.copy_(louder(words + common))
    model.head.weight.copy_(louder(say) * SELF / c.dim)
    inside = common @ space.T
    reads_one = inside @ space / inside.square().sum() / s.loud
    return Words(space, inside, {first: part @ space.T for first, part in roles.items()}, reads_one)


def _ask_for_rows(a: Attention, read: Tensor, words: Words, task: Task, s: Start) -> None:
    ask = read.clone()
    ask[-a.c.rope_dim :] = 0  # wherever the row stands
    a.wq_b.weight.view(a.c.heads, a.c.head_dim, -1)[::2] = ask
    a.compressor.norm.weight.fill_(s.sharp)
    a.compressor.wgate.weight.mul_(0.1)
    if a.ratio == 4:
        a.compressor.ape[:, : a.compressor.width] = -4  # a row is its own four tokens, evenly
    else:
        for role in (words.roles[task.heads], words.roles[task.ops]):
            a.compressor.wgate.weight.add_(s.gate / role.square().sum() / s.loud * (role @ words.space))


def _look_back(a: Attention, rows: Tensor, words: Words) -> None:
    c, fast = a.c, a.freqs[a.freqs > FAST]
    pairs = slice(c.head_dim - c.rope_dim, c.head_dim - c.rope_dim + 2 * len(fast))
    rows[pairs][::2] = words.reads_one * (c.dim / 3 / len(fast)) ** 0.5
    rows[pairs][1::2] = 0
    for head in range(0, c.heads, 2):
        angle = fast * BACK_BY[head // 2 % len(BACK_BY)]
        ask = torch.zeros(c.head_dim, c.q_rank)
        ask[pairs] = torch.stack((angle.cos(), -angle.sin()), 1).flatten()[:, None] * words.common
        a.wq_b.weight.view(c.heads, c.head_dim, -1)[head] = ask


def _index(i: Indexer, words: Words) -> None:
    c = i.compressor
    c.wgate.weight.mul_(0.1)
    c.ape[:, : c.width] = -4
    read = _orthonormal(len(words.space), c.width).T
    c.wkv.weight[-c.width :] = read @ words.space
    ask = read.clone()
    ask[-i.rope_dim :] = 0
    i.wq_b.weight.view(i.heads, c.width, -1)[:] = ask
    i.weights_proj.weight.copy_(words.reads_one.expand(i.heads, -1))


def _write_back(a: Attention, rows: Tensor, first: bool, share: float) -> None:
    c, per_group = a.c, a.c.heads // a.c.groups
    back = _orthonormal(c.groups, c.head_dim, c.o_rank).transpose(1, 2)
    a.wo_a.weight.copy_(back.repeat(1, 1, per_group).flatten(0, 1) / per_group)
    if first:  # the look-ups of the next layer need clean words, no means of windows
        a.wo_a.weight.unflatten(1, (per_group, c.head_dim))[:, 1::2] *= 0.1
    a.wo_b.weight.copy_(share * (back.flatten(0, 1) @ rows).T * c.head_dim / (c.groups * c.o_rank))
