"""What a request carries besides its cache is the engine's: after a restore it is what it is after the engine's own
prefill, field by field, and the client cannot tell them apart.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from plain_world import came_back, forget, full, over, run_to, serving, small_world
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_dsv4.testing.content import fingerprints

PROMPT, TOKENS = 500, 512


class Grammar:
    """A grammar that lets everything pass, and remembers what it was told."""

    finished = False

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def accept_token(self, token: int) -> None:
        self.accepted.append(token)

    def is_terminated(self) -> bool:
        return False


def logprobs_of(world: Any) -> None:
    """The world's forwards also give logprobs, which follow from the tokens before."""
    forward = world._forward

    def with_logprobs(batch: Any) -> Any:
        result, ends = forward(batch), batch.seq_lens_cpu.tolist()
        decode = batch.forward_mode.is_decode()
        counts = [1] * len(ends) if decode else batch.extend_lens
        starts = [0] * len(ends) if decode else batch.extend_logprob_start_lens
        given = list(zip(batch.reqs, ends, counts, starts, strict=True))

        def logprobs(req: Any, first: int, last: int) -> torch.Tensor:
            numbers = fingerprints(world.tokens(req, last))[first:] >> 40
            return -torch.from_numpy(numbers.astype("float32"))

        output = result.logits_output = LogitsProcessorOutput(next_token_logits=None)
        output.next_token_logprobs = torch.cat([logprobs(req, end - 1, end) for req, end, _, _ in given])
        if not decode:
            result.extend_input_len_per_req, result.extend_logprob_start_len_per_req = counts, starts
            output.input_token_logprobs = torch.cat(
                [logprobs(req, end - count + start, end) for req, end, count, start in given]
            )
        return result

    world._forward = with_logprobs


def dressed(world: Any, kind: str) -> Any:
    """A new request of that kind."""
    req = world.submit(range(PROMPT), max_new=60, **ARGUMENTS.get(kind, {}))
    if kind == "grammar":
        req.grammar = Grammar()
    elif kind == "logprobs":
        req.logprob_start_len = 0
        logprobs_of(world)
    return req


ARGUMENTS: dict[str, dict[str, Any]] = {"logprobs": {"return_logprob": True}, "lora": {"lora_id": "adapter"}}


def life(kind: str, restored: bool, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A request beside another, retracted once."""
    world = small_world()
    world.submit(range(9000, 9100), max_new=60)
    req = dressed(world, kind)
    run_to(world, req, TOKENS)
    if not restored:
        with monkeypatch.context() as patched:
            patched.setattr(serving(world).host.memory, "allocate", full)
            world.retract(req)
    else:
        world.retract(req)
    forget(world)
    if restored:
        came_back(world, req)
    else:
        assert world.step().extend_lens == [TOKENS + 1]
    over(world)
    shared = world.match([*req.origin_input_ids, *req.output_ids])
    assert len(shared) == (0 if kind == "lora" else 512)  # an adapter's cache is nobody else's
    return req


def told(req: Any) -> dict[str, Any]:
    """What the engine knows of a request that ended, beside its cache."""
    known = {
        name: getattr(req, name)
        for name in ("output_ids", "finished_reason", "lora_id", "extra_key", "cached_tokens", "send_token_offset")
    }
    known["finished_reason"] = known["finished_reason"].to_json()
    known["grammar"] = req.grammar and req.grammar.accepted
    known["logprobs"] = req.logprob and {one.name: getattr(req.logprob, one.name) for one in fields(req.logprob)}
    return known


@pytest.mark.parametrize("kind", ["grammar", "logprobs", "lora"])
def test_a_restore_is_to_the_client_what_a_prefill_is(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = (life(kind, way, monkeypatch) for way in (True, False))
    assert told(ours) == told(theirs)
    if kind == "grammar":
        assert ours.grammar.accepted == list(ours.output_ids)
    if kind == "logprobs":
        assert len(ours.logprob.input_token_logprobs_val) == PROMPT
        assert len(ours.logprob.output_token_logprobs_val) == len(ours.output_ids)
