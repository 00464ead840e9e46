"""A block of drafts cannot follow from the block's own tokens: DSpark drafts all but the first of them unseen.

So here the next token follows from what lies before any block. It is the token that stood ``DISTANCE`` before the last
one, in the target as in the draft:

    target, position p:     attends to the row of p - DISTANCE among its 128, and says that row's token
    draft, column k at n:   the query of position n + k, whose own token is a placeholder, attends to the row of
                            n + k - DISTANCE, which lies among the 128 rows before the block

A head whose query and key are the same for all tokens attends by distance alone: their turns agree where the rotations
differ by ``DISTANCE``. Each row of a request's window is needed once, ``DISTANCE`` tokens after its own: after a resume
without rows no draft is right until the window is written anew, and then all are.

A token is three digits, each with a code of its own, and the draft's stages say one digit each: a draft is right where
the rows of every stage are. Codes are plus or minus one, exact in fp8, and orthogonal. The answers repeat the last
DISTANCE + 1 tokens of their prompt, so that no two requests say the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from sglang_dsv4.models.seeded import fill

DISTANCE = 120
DIGITS, CODE = 3, 128
# Where a hidden state holds the token's own code, ones that are the same for all tokens, and the code that is said.
OWN, STEADY, SAID = 0, DIGITS * CODE, DIGITS * CODE + 128
NEEDED = SAID + DIGITS * CODE
TURNS = 4  # the fastest rotations: they tell neighbours apart, and no two distances in a window are alike to them
POINTED = 16.0  # a key's turns against its code: 0.96 of the attention lies on one row
SURE = 1 / 16  # of the head: the token that is said has nearly all of the probability
_SILENT = re.compile(r"(\.w2_weight|\.down_proj\.weight|\.wo_b\.weight|(^|\.)hc_\w*fn)$")


def codes(tokens: int) -> torch.Tensor:
    """The code of each token, ``[tokens, DIGITS * CODE]`` of plus and minus one."""
    base = next(base for base in range(1, CODE + 1) if base**DIGITS >= tokens)
    table, pair = torch.ones(1, 1, dtype=torch.float32), torch.tensor([[1, 1], [1, -1]], dtype=torch.float32)
    while len(table) < CODE:
        table = torch.kron(table, pair)
    number = torch.arange(tokens)
    return torch.cat([table[number // base**place % base] for place in range(DIGITS)], 1)


def fill_target(model: Any) -> int:
    """Weights of the target; how many tensors. Raises ValueError where they do not fit its config."""
    first, embedding = model.model.layers[0].self_attn, model.model.embed_tokens.weight.data
    if first.compress_ratio or embedding.shape[1] < NEEDED:
        raise ValueError(f"needs a first layer of ratio 0, and a hidden size of {NEEDED} or more")
    count = fill(model)
    _silence(model)
    _recall(first, range(DIGITS))
    head = model.lm_head.weight.data
    for table in (embedding, head):
        table.zero_()
    embedding[:, OWN:STEADY] = codes(len(embedding)).to(embedding)
    embedding[:, STEADY:SAID] = 1.0
    head[:, SAID:NEEDED] = SURE * codes(len(head)).to(head)
    return count


def fill_draft(model: Any) -> int:
    """Weights of the draft, whose embedding and head are the target's; how many tensors."""
    count = fill(model)
    _silence(model)
    for number, stage in enumerate(model.stages):
        _recall(stage.self_attn, range(number, DIGITS, len(model.stages)))
    projection = model.stages[0].main_proj
    hidden, width = projection.weight.shape  # of a context row, and of all layers that the target hands over
    weight = _nothing(hidden, width)
    for part in range(DIGITS + 1):  # each digit from another layer, then what is steady
        places = torch.arange(part * CODE, (part + 1) * CODE)
        weight[places, part * hidden % width + places] = 1.0
    _put(projection, weight)
    for table in (model.markov_head.markov_w1, model.markov_head.markov_w2):
        table.weight.data.zero_()  # what the last token alone would add
    return count


def _silence(model: nn.Module) -> None:
    """All that would add to the residual streams, or mix them."""
    for name, tensor in model.state_dict().items():
        if _SILENT.search(name):
            tensor.copy_(torch.zeros_like(tensor, dtype=torch.float32))


def _recall(attention: Any, digits: Iterable[int]) -> None:
    """One head that attends DISTANCE tokens back and says these digits of the token there; the others say nothing."""
    hidden, turning = attention.dim, attention.head_dim - attention.rope_head_dim
    turn = torch.tensor([2 * number for number in range(TURNS)])
    query = _nothing(attention.q_lora_rank, hidden)
    query[range(128), range(STEADY, SAID)] = 1.0
    key = _nothing(attention.head_dim, hidden)
    key[range(OWN, STEADY), range(OWN, STEADY)] = 1.0
    key[turning + turn, STEADY + turn] = POINTED
    if attention.fuse_wqa_wkv:
        _put(attention.wqkv_a, torch.cat([query, key]))
    else:
        _put(attention.wq_a, query)
        _put(attention.wkv, key)

    angles = DISTANCE * attention.freqs_cis[1].angle()[:TURNS].cpu()
    heads = _nothing(attention.n_local_heads, attention.head_dim, attention.q_lora_rank)
    heads[:, turning + turn, turn] = angles.cos()
    heads[:, turning + turn + 1, turn] = -angles.sin()
    _put(attention.wq_b, heads.flatten(0, 1))

    inner = _nothing(*attention.wo_a.weight.shape)
    inner[range(STEADY), range(STEADY)] = 1.0
    _put(attention.wo_a, inner)
    outer = _nothing(*attention.wo_b.weight.shape)
    for digit in digits:
        places = torch.arange(digit * CODE, (digit + 1) * CODE)
        outer[SAID + places, places] = 1.0
    _put(attention.wo_b, outer)


def _nothing(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float32)  # a loading engine's own default is the model's


def _put(layer: Any, weight: torch.Tensor) -> None:
    layer.weight.data.copy_(weight.to(layer.weight.device))
    scale = getattr(layer, "weight_scale_inv", None)
    if scale is not None:
        scale.data.fill_(1.0)
