"""The weights of a DSpark draft: right in every column where its window's rows are, and in none where they are not."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from block_draft import WINDOW, Draft, Target
from cpu_model import small_models

from sglang_dsv4.livetest.drafting import recall
from sglang_dsv4.livetest.drafting.recall import DISTANCE, codes, fill_draft, fill_target

STAGES, BLOCK = 3, 7
SIZES = {
    "hidden_size": 1024, "num_attention_heads": 4, "q_lora_rank": 128, "o_lora_rank": 512, "o_groups": 2,
    "index_n_heads": 4, "moe_intermediate_size": 128, "n_routed_experts": 8, "num_hidden_layers": 4,
    "compress_ratios": [0, 0, 4, 128], "vocab_size": 2048, "max_position_embeddings": 2048,
    "dspark_block_size": BLOCK, "dspark_markov_rank": 64, "dspark_noise_token_id": 2,
    "dspark_target_layer_ids": [0, 1, 3],
}  # fmt: skip
N = 300  # tokens before the block


class Request:
    """Random tokens, what the target says behind them, and the draft's rows of its window."""

    def __init__(self, target: Target, draft: Draft, seed: int) -> None:
        draw = random.Random(seed)
        self.tokens = [draw.randrange(10, 2000) for _ in range(N)]
        self.next = target.go_on(self.tokens, BLOCK + 1)  # the anchor, then the block
        self.draft, hidden = draft, target.read(self.tokens)[0]
        draft.rows = {}
        draft.write(hidden.repeat(1, STAGES)[-WINDOW:], N - WINDOW)
        self.rows = {layer: dict(rows) for layer, rows in draft.rows.items()}

    def right(self, rows: dict[int, dict[int, torch.Tensor]]) -> list[bool]:
        """Which columns the draft has right over these rows."""
        self.draft.rows = {layer: dict(each) for layer, each in rows.items()}
        said = self.draft.propose(self.next[0], N)
        return [one == other for one, other in zip(said, self.next[1:], strict=True)]

    def only(self, since: int) -> dict[int, dict[int, torch.Tensor]]:
        """Its rows where those before the last ``since`` are lost."""
        return {
            layer: {place: row * (place >= N - since) for place, row in rows.items()}
            for layer, rows in self.rows.items()
        }


@pytest.fixture(scope="module")
def requests() -> Iterator[tuple[Request, Request]]:
    with pytest.MonkeyPatch.context() as patch, small_models(SIZES, patch, "DSpark") as (target, draft):
        torch.set_default_dtype(torch.bfloat16)  # as the engine's loader does
        try:
            fill_target(target)
            fill_draft(draft)
        finally:
            torch.set_default_dtype(torch.float32)
        models = Target(target), Draft(draft, target, patch)
        yield Request(*models, 1), Request(*models, 2)


def test_the_target_says_the_token_that_stood_a_distance_before(requests: tuple[Request, Request]) -> None:
    for request in requests:
        assert request.next == request.tokens[N - 1 - DISTANCE :][: BLOCK + 1]


def test_the_whole_block_is_right_over_the_requests_rows(requests: tuple[Request, Request]) -> None:
    for request in requests:
        assert all(request.right(request.rows))


def test_no_draft_is_right_without_them(requests: tuple[Request, Request]) -> None:
    mine, other = requests
    assert not any(mine.right(mine.only(0))), "zeroed"
    assert not any(mine.right(other.rows)), "another request's"


def test_every_stages_rows_are_needed(requests: tuple[Request, Request]) -> None:
    """A digit of two tokens may be the same by chance."""
    mine, other = requests
    for stage in range(STAGES):
        assert sum(mine.right({**mine.rows, stage: other.rows[stage]})) <= 3, stage


@pytest.mark.parametrize("since", (1, 60, DISTANCE - BLOCK, DISTANCE - 3, DISTANCE))
def test_each_column_needs_its_own_row(requests: tuple[Request, Request], since: int) -> None:
    """Where a resume lies ``since`` tokens back, and nothing came with it."""
    (mine, _) = requests
    assert mine.right(mine.only(since)) == [column >= DISTANCE - since for column in range(BLOCK)]


def test_tokens_have_codes_of_their_own() -> None:
    for tokens in (2048, 129280):
        found = codes(tokens)
        assert found.abs().eq(1).all() and len(found.unique(dim=0)) == tokens


@pytest.mark.parametrize(("ratio", "hidden"), ((4, 1024), (0, 512)))
def test_a_config_that_does_not_fit_is_refused(ratio: int, hidden: int) -> None:
    layer = SimpleNamespace(self_attn=SimpleNamespace(compress_ratio=ratio))
    embedding = SimpleNamespace(weight=torch.zeros(16, hidden))
    model = SimpleNamespace(layers=[layer], embed_tokens=embedding)
    with pytest.raises(ValueError, match=f"{recall.NEEDED} or more"):
        fill_target(SimpleNamespace(model=model))
