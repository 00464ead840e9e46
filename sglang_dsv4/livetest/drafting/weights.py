"""A draft with random weights is never right, whatever its cache holds; this one is right where its window is.

Only attention over a window may decide the next token, in the target as in the draft. So the target's first layer
lives; what later layers and all experts would add is zero, and the residual streams stay equal. The draft's layer has
the weights of the target's first, and its input is the embedding alone:

    target, position p + 1:  tokens p - 126 .. p + 1   at their positions
    draft, row p:            tokens p - 126 .. p + 1   one position earlier, in its own window rows

Rotations are relative, so both say the same. Embeddings are plus or minus one: of spread one as they are, and exact in
fp8, so that the draft's projection of them loses nothing. What the window adds weighs as much as the last token.
The draft ignores the hidden state that it is given: what becomes of its bytes is not seen here.
"""

from __future__ import annotations

import re

import torch
from torch import nn

from sglang_dsv4.models.seeded import SCALE_SUFFIX, fill

LOUDER = 2.0  # the window's part against the last token's: a power of two, exact in fp8
_LATER = re.compile(r"\.layers\.(?!0\.)\d+\.self_attn\.wo_b\.weight$")
_EXPERTS = re.compile(r"(\.w2_weight|\.down_proj\.weight)$")
_MIXING = re.compile(r"(^|\.)hc_\w*fn$")
_FIRST = re.compile(r"\.layers\.0\.self_attn\.wo_b\.weight$")


def as_of_the_target(name: str) -> str:
    """The target's name of a draft's tensor: those of one name have the same values."""
    return name.replace("model.decoder.", "model.layers.0.")


def fill_target(model: nn.Module) -> int:
    """Weights of the target; how many tensors."""
    count = fill(model)
    _window_alone(model)
    signs = model.state_dict()["model.embed_tokens.weight"]
    signs.copy_(torch.where(signs < 0, -1.0, 1.0))
    return count


def fill_draft(model: nn.Module) -> int:
    """Weights of the draft, whose embedding and head are the target's; how many tensors."""
    count = fill(model, as_of_the_target)
    _window_alone(model)
    state = model.state_dict()
    identity, nothing = state["model.e_proj.weight"], state["model.h_proj.weight"]
    identity.copy_(torch.eye(len(identity), device=identity.device))
    nothing.copy_(torch.zeros_like(nothing, dtype=torch.float32))
    for name in ("model.e_proj.weight", "model.h_proj.weight"):
        if name + SCALE_SUFFIX in state:
            state[name + SCALE_SUFFIX].fill_(1.0)
    return count


def _window_alone(model: nn.Module) -> None:
    """Raises ValueError where the engine calls these tensors otherwise: the draft would hardly ever be right."""
    seen = set()
    for name, tensor in model.state_dict().items():
        pattern = next((one for one in (_LATER, _EXPERTS, _MIXING, _FIRST) if one.search(as_of_the_target(name))), None)
        seen.add(pattern)
        if pattern is _FIRST:
            tensor.copy_(tensor.float() * LOUDER)
        elif pattern is not None:
            tensor.copy_(torch.zeros_like(tensor, dtype=torch.float32))
    if missing := {_EXPERTS, _MIXING, _FIRST} - seen:
        raise ValueError(f"no tensor is called {', '.join(pattern.pattern for pattern in missing)}")
