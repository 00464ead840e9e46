"""Engram hashes a token with those before it, which the engine keeps by request slot: a resumed request has another.

No cache family holds them. The engine writes them anew from the request's tokens whenever one joins the batch, with all
of its own code here; so a copy must leave a request every token that it had.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from server_fixture import V41, World
from sglang.srt.layers.engram import EngramHasher, EngramLayout
from sglang.srt.managers.schedule_batch import MM_PAD_SHIFT_VALUE
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.model_runner_components.ngram_embedding_manager import NgramEmbeddingManager

WORDS, IMAGE = 1024, 500


class Tokenizer:
    def __init__(self) -> None:
        from tokenizers import Tokenizer as Backend
        from tokenizers import models

        self.backend_tokenizer = Backend(models.WordLevel({f"w{i}": i for i in range(WORDS)}, "w0"))

    def __len__(self) -> int:
        return WORDS


class Model:
    """The engine's hasher over a world's request slots, and what its scheduler does with it."""

    def __init__(self, world: World) -> None:
        sizes = {"engram_max_ngram_size": 4, "engram_n_heads": 2, "engram_vocab_size": 5000, "engram_head_dim": 32}
        config = SimpleNamespace(engram_layer_ids=(1, 4), engram_num_embeddings=(), **sizes)
        self.world = world
        self.hasher = EngramHasher(EngramLayout.from_config(config), Tokenizer(), 2, WORDS)
        self.hasher.image_token_id = IMAGE
        self.hasher.init_history(world.table.req_to_token.shape[0], "cpu")
        self.manager = NgramEmbeddingManager(enabled=False, table=None, n=0, engram_hasher=self.hasher)

    def join(self, *reqs: Any) -> None:
        """The requests join the batch, as they do after a transfer and after a resume."""
        batch = SimpleNamespace(reqs=reqs, forward_mode=ForwardMode.PREBUILT)
        self.manager.prepare_for_forward(batch, chunked_req=None)

    def step(self, req: Any, token: int) -> torch.Tensor:
        """Decodes one token, which samples ``token``; the hash ids of the decoded one."""
        have = req.seqlen - 1
        self.world._decode(req, have, 1)
        slots = torch.tensor([self.world.slot(req)])
        forward = SimpleNamespace(
            forward_mode=ForwardMode.DECODE, req_pool_indices=slots, positions=torch.tensor([have]),
            out_cache_loc=self.world.table.req_to_token[slots, have], engram_history=None,
        )  # fmt: skip
        found = self.hasher(torch.tensor([req.output_ids[-1]]), forward)
        req.output_ids.append(token)
        return found


@pytest.mark.parametrize("images", (False, True))
@pytest.mark.parametrize("steps", (0, 1, 2, 5))
def test_a_resumed_request_hashes_as_one_that_never_stopped(steps: int, images: bool) -> None:
    world = World(V41)
    model = Model(world)
    req, control = (world.admit(300, name, prompt=300, multimodal=images) for name in ("r", "control"))
    for one in (req, control) if images else ():
        one.origin_input_ids[-2] = MM_PAD_SHIFT_VALUE + 77  # an image's placeholder carries its hash
    model.join(req, control)
    for token in range(40, 40 + steps):
        assert torch.equal(model.step(req, token), model.step(control, token))
    old, kept = world.slot(req), model.hasher.history[world.slot(control)].clone()
    world.park(req)
    model.hasher.history.fill_(11)  # whoever had the slots before
    model.hasher.history[world.slot(control)] = kept
    assert world.resume() == [req] and world.slot(req) != old
    model.join(req)
    for token in range(60, 66):
        ours, theirs = model.step(req, token), model.step(control, token)
        assert ours.shape == (1, 2, 6) and torch.equal(ours, theirs)
    world.nothing_held()
