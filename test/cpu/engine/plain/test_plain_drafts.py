"""A plain server with drafts: the extend of one token that a restore is makes the draft's state anew, and finds the
draft's window as it was. The tree keys a position by its token and the next, as the draft's rows depend on both."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from plain_world import finish, forget, nothing_is_held, run_until, serving, small_world
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dsv4.engine.plain.publish import half_loaded_page, is_bigram
from sglang_dsv4.engine.state import request_state
from sglang_dsv4.testing.integrity import branches
from sglang_dsv4.testing.ledger import parts
from sglang_dsv4.testing.server import ServerSpec

DRAFTS = 4


def retracted(prompt: int, new: int, **way: Any) -> tuple[Any, Any]:
    """A world, and its one request, retracted after a few steps with drafts; the tree has forgotten it."""
    world = small_world(drafts=DRAFTS, **way)
    req = world.submit(range(prompt), max_new=new)
    run_until(world, lambda: req.seqlen > prompt + 5 and req.kv.holds_kv)
    world.retract(req)
    forget(world)
    return world, req


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("prompt", [375, 376, 377, 378, 505, 506, 507, 508, 630])
def test_it_is_an_extend_of_one_token_with_the_drafts_window(prompt: int, overlap: bool) -> None:
    """Every byte of the next step's reads is checked, the draft's among them: lengths around 384, 512 and 640."""
    world, req = retracted(prompt, 40, overlap=overlap)
    tokens = req.seqlen - 1
    assert "draft_swa_kv" in {part.family for part in parts(world.pool)}
    batch = world.step()
    world.check_integrity()
    assert (batch.reqs, batch.prefix_lens, batch.extend_lens) == ([req], [tokens], [1])
    world.run()
    counters = serving(world).host.counters
    assert (counters.saves, counters.loads) == (1, 1)
    assert len(req.output_ids) >= 40  # the last step may accept more than is asked for
    assert not counters.fallbacks
    nothing_is_held(world)


@pytest.mark.parametrize("overlap", [False, True])
def test_beside_mixed_chunks(overlap: bool) -> None:
    """A decoding request in a prefill's batch has its length bound late: the step in flight may accept drafts yet."""
    world = small_world(drafts=DRAFTS, overlap=overlap, mixed=True, chunk=512, pages=32)
    modes = Counter[str]()
    for number in range(120):
        if number % 8 == 0:
            world.submit(range(1000 * number, 1000 * number + 500 + 7 * number), max_new=60)
        if (batch := world.step()) is not None:
            modes[batch.forward_mode.name] += 1
        if number % 4 == 0:
            world.check_integrity()
        decoding = [req for req in world.retractable if len(req.output_ids) > 4]
        if number % 5 == 0 and decoding:
            world.retract(decoding[0])
            forget(world)
    finish(world)
    assert modes["MIXED"] > 20 and serving(world).host.counters.loads > 8
    nothing_is_held(world)


@pytest.mark.parametrize("new", range(9, 18))
def test_a_finish_that_publishes_no_window_publishes_nothing(new: int) -> None:
    """The last token has no key yet: where it fills a page, what could be published has lost its window."""
    world, req = retracted(500, new)
    world.run()
    assert request_state(req).restored is None
    assert all(any(branch.live) for branch in branches(world))
    nothing_is_held(world)


def test_of_dspark_a_row_more_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its block attends to a whole window before it. (Its steps are not run here.)"""
    monkeypatch.setattr(ServerSpec, "algorithm", lambda _: SpeculativeAlgorithm.DSPARK)
    world = small_world(drafts=8)
    assert serving(world).pool.draft.reach == 128
    assert not is_bigram(world.tree)
    assert half_loaded_page(serving(world).host.buffers.geometry, 512 + 127) == 256, "the window begins a row earlier"
