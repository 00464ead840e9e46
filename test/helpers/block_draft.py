"""The engine's DSpark draft on the CPU, its own forward over rows that a test can look at; its target in plain torch.

Of the draft, only what needs a GPU is left to torch: products of fp8 weights, the rows' store, the attention over
them, and the mixing of residual streams, which seeded weights keep equal. Experts add nothing there and are left out.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

WINDOW = 128
EPS = 1e-6


def product(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """What a layer makes of ``x``; of fp8 where its weights are: in groups of 128, as the engine's kernels take it."""
    weight, scale = layer.weight.float(), getattr(layer, "weight_scale_inv", None)
    if scale is None:
        return x.float() @ weight.T
    groups = x.float().unflatten(-1, (-1, 128))
    step = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    rounded = ((groups / step).to(torch.float8_e4m3fn).float() * step).flatten(-2)
    return rounded @ (weight * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)).T


def normed(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def turned(x: torch.Tensor, freqs: torch.Tensor, back: bool = False) -> torch.Tensor:
    """``x`` with its last 64 numbers rotated by position: ``[tokens, ..., numbers]``."""
    still, pairs = x[..., :-64], torch.view_as_complex(x[..., -64:].unflatten(-1, (-1, 2)).contiguous())
    freqs = (freqs.conj() if back else freqs).view(len(x), *[1] * (x.dim() - 2), -1)
    return torch.cat([still, torch.view_as_real(pairs * freqs).flatten(-2)], -1)


def attended(q: torch.Tensor, rows: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """q ``[queries, heads, numbers]`` over rows ``[rows, numbers]``; a sink of zero beside those that are seen."""
    scores = torch.einsum("qhd,pd->qhp", q, rows) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    weights = torch.cat([scores, torch.zeros_like(scores[..., :1])], -1).softmax(-1)[..., :-1]
    return torch.einsum("qhp,pd->qhd", weights, rows)


class Target:
    """The target, of which the first layer's attention alone adds anything."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def read(self, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
        """The hidden state behind its first layer at each position, and the token that it says there."""
        model, attention = self.model.model, self.model.model.layers[0].self_attn
        place = torch.arange(len(tokens))
        freqs = attention.freqs_cis[place]
        x = model.embed_tokens.weight[torch.tensor(tokens)].float()
        q, kv = product(attention.wqkv_a, normed(x)).split([attention.q_lora_rank, attention.head_dim], -1)
        q = product(attention.wq_b, normed(q)).unflatten(-1, (attention.n_heads, attention.head_dim))
        back = place[:, None] - place[None]
        said = attended(turned(normed(q), freqs), turned(normed(kv), freqs), (back >= 0) & (back < WINDOW))
        groups = turned(said, freqs, back=True).flatten(1).unflatten(-1, (attention.n_groups, -1))
        inner = attention.wo_a.weight.float().unflatten(0, (attention.n_groups, -1))
        inner = torch.einsum("tgd,grd->tgr", groups, inner).flatten(1)
        hidden = x + product(attention.wo_b, inner)
        return hidden, (normed(hidden) @ self.model.lm_head.weight.float().T).argmax(-1).tolist()

    def go_on(self, tokens: list[int], count: int) -> list[int]:
        """The tokens that it says next, greedily."""
        tokens = list(tokens)
        for _ in range(count):
            tokens.append(self.read(tokens[-2 * WINDOW :])[1][-1])
        return tokens[-count:]


class Draft:
    """The engine's draft: ``write`` context rows, change ``rows`` (by layer, position by position), and ``propose``."""

    def __init__(self, model: Any, target: Any, patch: Any) -> None:
        from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod
        from sglang.srt.model_executor import forward_context
        from sglang.srt.models import deepseek_v4_dspark as engine

        self.model, self.rows = model, {}
        patch.setattr(Fp8LinearMethod, "apply", lambda _, layer, x, bias=None: product(layer, x).to(x.dtype))
        patch.setattr(engine, "_resolve_dspark_pool", lambda: self)
        patch.setattr(forward_context, "get_attn_backend", lambda: self)
        for stage in model.stages:
            stage.self_attn._use_fast_kernel = False
            stage.hc_pre, stage.hc_post = self._collapse, self._add
            stage._hc_post_block = self._add
            patch.setattr(type(stage), "_run_ffn", lambda _, x, *__: torch.zeros_like(x), raising=False)
            stage.mlp = nn.Identity()
        model.attach_shared_modules(embed_tokens=target.model.embed_tokens, lm_head=target.lm_head)

    # the engine's pool and attention backend, as its draft sees them
    uniform_fp8, swa_req_ring_size = False, None

    def set_swa_key_buffer_radix_fused_norm_rope(
        self, *, layer_id: int, kv: torch.Tensor, positions: torch.Tensor, freqs_cis: torch.Tensor, **_: Any
    ) -> None:
        row = turned(normed(kv.float()), freqs_cis[positions])
        self.rows.setdefault(layer_id, {}).update(zip(positions.tolist(), row, strict=True))

    def get_swa_out_cache_loc(self, _: Any) -> None:
        return None

    def forward(self, *, q: torch.Tensor, layer: Any, **_: Any) -> torch.Tensor:
        rows = torch.stack([self.rows[layer.layer_id][place] for place in self.places])
        return attended(q.float(), rows, torch.ones(len(q), len(rows), dtype=torch.bool)).to(q.dtype)

    def write(self, hidden: torch.Tensor, first: int) -> None:
        """Rows of positions from ``first`` on, of the target's hidden states there ``[positions, layers * size]``."""
        places = torch.arange(first, first + len(hidden))
        with torch.no_grad():
            self.model.write_target_hidden_kv(
                main_hidden=hidden.bfloat16(), swa_loc=torch.zeros(len(hidden)), positions=places, pool=self
            )

    def propose(self, anchor: int, position: int) -> list[int]:
        """The block behind ``anchor``, the token at ``position``: each query sees the window and the block."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        size = self.model.gamma
        self.places = range(position - WINDOW, position + size)
        tokens = torch.tensor([anchor] + [self.model.config.dspark_noise_token_id] * (size - 1))
        forward = getattr(self.model, "_forward_impl", self.model.forward)
        mode = SimpleNamespace(forward_mode=ForwardMode.TARGET_VERIFY)
        with torch.no_grad():
            hidden = forward(tokens, torch.arange(position, position + size), mode, None).hidden_states
            logits = self.model.compute_base_logits(hidden)[0].float()
            found = [anchor]
            for column in logits:
                found.append(int((column + self.model.markov_head(torch.tensor(found[-1:]))[0][0].float()).argmax()))
        return found[1:]

    @staticmethod
    def _collapse(x: torch.Tensor, mixing: torch.Tensor, _: Any, base: torch.Tensor, **__: Any) -> tuple[Any, ...]:
        assert not mixing.any() and not base.any() and torch.equal(x, x[:, :1].expand_as(x)), "streams differ"
        return x.sum(1) / 2, None, None, False

    @staticmethod
    def _add(x: torch.Tensor, residual: torch.Tensor, *_: Any) -> torch.Tensor:
        return x.unsqueeze(1) + residual
