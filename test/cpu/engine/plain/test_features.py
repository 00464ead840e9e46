"""What a request carries besides its cache is the engine's: after a restore it is what it is after the engine's own
prefill, field by field, and the client cannot tell them apart.
"""

from __future__ import annotations

from typing import Any

import pytest
from plain_world import came_back, forget, full, over, run_to, serving, small_world

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


def life(kind: str, restored: bool, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A request beside another, retracted once."""
    world = small_world()
    world.submit(range(9000, 9100), max_new=24)
    req = world.submit(range(PROMPT), max_new=24, lora_id="adapter" if kind == "lora" else None)
    req.grammar = Grammar() if kind == "grammar" else None
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
    return known


@pytest.mark.parametrize("kind", ["grammar", "lora"])
def test_a_restore_is_to_the_client_what_a_prefill_is(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = (life(kind, way, monkeypatch) for way in (True, False))
    assert told(ours) == told(theirs)
    if kind == "grammar":
        assert ours.grammar.accepted == list(ours.output_ids)
