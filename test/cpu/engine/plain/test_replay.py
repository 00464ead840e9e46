"""V4.1 as it starts by default: with decoder SWA bounded replay the late layers of an extend run over 128 tokens.

The world writes and reads those layers' windows as the engine does, and poison lies where nothing is written.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain_world import (
    SMALL41,
    came_back,
    finish,
    forget,
    live,
    nothing_is_held,
    over,
    retracted,
    run_to,
    serving,
    small_world,
)
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dsv4.engine import coverage
from sglang_dsv4.engine.releases import engine_release
from sglang_dsv4.testing.content import PrefixLedger
from sglang_dsv4.testing.forward import Forward, WrongRows
from sglang_dsv4.testing.ledger import Ledger
from sglang_dsv4.testing.server import ServerSpec
from sglang_dsv4.testing.standalone import boot

WINDOW = 128
REPLAY: dict[str, Any] = {**SMALL41, "replay": True}
LENGTHS = (126, 127, 128, 129, 255, 256, 257, 383, 384, 385, 511, 512, 513, 600, 601, 638, 639, 640)
needs_replay = pytest.mark.skipif(
    engine_release().replay_cuts_windows, reason="this release is left to the engine with it"
)


def windows(lengths: list[int], ends: list[int]) -> list[set[int]]:
    """Returns the positions that each last token of extends of ``lengths`` tokens up to ``ends`` sees in late layers.

    By the engine's own functions, of the installed release.
    """
    from sglang.srt.layers.attention import deepseek_v4_backend as backend

    _, tails, floors = backend.late_layer_tail_layout(
        extend_lens_cpu=lengths, seq_lens_cpu=ends, tail_len=WINDOW, device=torch.device("cpu")
    )
    lasts = torch.tensor(tails).cumsum(0) - 1
    row = torch.arange(1, max(ends) + 1)  # slot 1 + position, in full and in window memory
    places = torch.cat([torch.arange(len(row) + 1), torch.tensor([-1])])  # -1, nothing, is the last
    indices = backend.BuildCausalSwaPageIndices.torch(
        req_to_token=row[None], full_to_swa_mapping=places,
        req_pool_indices_repeated=torch.zeros(len(ends), dtype=torch.int64), seq_lens_casual=torch.tensor(ends),
        swa_window=WINDOW, page_index_aligned_size=64, swa_replay_start=floors[lasts],
    )  # fmt: skip
    return [set((slots[slots > 0] - 1).tolist()) for slots in indices]


def refusal(**features: bool) -> str:
    """Returns why a plain server with those switches is left to the engine; empty where it is not."""
    boot(**features)
    try:
        return coverage.refusal(coverage.launch(), coverage.Part.PLAIN) or ""
    finally:
        boot()


@pytest.mark.parametrize("beside", [(), (4096,), (1, 300, 1)])
def test_an_extend_of_one_token_sees_its_whole_window_or_the_server_is_the_engines(beside: tuple[int, ...]) -> None:
    """Alone, and beside prefills: where the release floors the window at the extend, restores are refused."""
    for tokens in range(1, 2 * 256 + WINDOW):
        found = windows([1, *beside], [tokens + 1, *beside])[0]
        whole = set(range(max(0, tokens + 1 - WINDOW), tokens + 1))
        assert (found == whole) != engine_release().replay_cuts_windows, tokens
    assert bool(refusal(enable_decoder_swa_bounded_replay=True)) == engine_release().replay_cuts_windows
    assert "encoder" in refusal(enable_encoder_swa_bounded_replay=True)


@needs_replay
@pytest.mark.parametrize("tokens", LENGTHS)
def test_it_comes_back_with_every_byte(tokens: int) -> None:
    """Odd lengths leave half a pair of ratio 2."""
    world, req = retracted(tokens, 14, 6, **REPLAY, overlap=bool(tokens % 3))
    came_back(world, req)
    world.run()
    counters = serving(world).host.counters
    assert (counters.saves, counters.loads, counters.spared_tokens) == (1, 1, tokens) and not counters.fallbacks
    nothing_is_held(world)


@needs_replay
@pytest.mark.parametrize("tokens", [127, 128, 129, 256, 257, 513, 601, 638, 639])
def test_beside_a_prefill_its_extend_reads_the_window_that_came_back(tokens: int) -> None:
    world, req = retracted(tokens, 14, 6, **REPLAY, overlap=bool(tokens % 3))
    other = world.submit(range(9000, 9300), max_new=4)
    batch = world.step()
    world.check_integrity()
    assert (batch.reqs, batch.prefix_lens, batch.extend_lens) == ([req, other], [tokens, 0], [1, 300])
    over(world)
    assert serving(world).host.counters.loads == 1


@needs_replay
def test_without_the_late_windows_that_extend_would_read_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above sees it, in the late layer alone."""
    world, _ = retracted(600, 14, 6, **REPLAY)
    world.submit(range(9000, 9300), max_new=4)
    load, late = world.pool.host.load, world.pool.swa_kv_pool.kv_buffer[max(SMALL41["sources"])]

    def garbled(*given: Any, **named: Any) -> None:
        load(*given, **named)
        late.zero_()

    monkeypatch.setattr(world.pool.host, "load", garbled)
    with pytest.raises(WrongRows, match="swa_kv, buffer 2"):
        world.step()


@needs_replay
@pytest.mark.parametrize("tokens", [767, 768, 896])
def test_a_match_ends_a_window_early_so_a_copy_is_loaded_whatever_the_tree_holds(tokens: int) -> None:
    """Else ``FewTokens`` would leave these lengths to the engine."""
    world = small_world(**REPLAY)
    req = world.submit(range(tokens - 3), max_new=14)
    run_to(world, req, tokens)
    world.retract(req)
    came_back(world, req)
    assert serving(world).host.counters.spared_tokens == tokens - (tokens + 1 - WINDOW) // 256 * 256
    over(world)


@needs_replay
@pytest.mark.parametrize("tokens", [513, 638, 639, 760])
def test_others_read_what_a_restored_request_publishes(tokens: int) -> None:
    """A new request matches its pages, and computes the last window again: the early layers read the tree's rows."""
    world, req = retracted(tokens, 900 - tokens + 6, 6, **REPLAY)
    came_back(world, req)
    finish(world)
    world.second_turn(req, [1, 2, 3], max_new=2)
    assert world.step().prefix_lens == [768]  # behind the page that was loaded in part
    over(world)
    forget(world)
    assert world.totals() == (world.spec.pages, world.spec.swa_pages, world.spec.requests)


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mixed": {"chunk": 512, "mixed": True, "overlap": True},
    "no_radix": {"radix": False, "overlap": True},
    "little_memory": {"pages": 12, "swa_pages": 8, "overlap": True},
}


@needs_replay
@pytest.mark.parametrize("way", WAYS)
def test_a_life_with_retracts(way: str) -> None:
    world = small_world(**REPLAY, **WAYS[way])
    assert live(world, seed=0) > 5
    assert serving(world).host.counters.loads > 3
    nothing_is_held(world)


def draft_input(_: Any, batch: Any) -> Any:
    """Makes the state that a step of DSpark hands to the next."""
    from sglang.srt.speculative.dspark_components.dspark_draft import make_next_draft_input

    made = make_next_draft_input(bonus_tokens=torch.zeros(len(batch.reqs), dtype=int), new_seq_lens=batch.seq_lens)
    made.future_indices = batch.req_pool_indices
    return made


@pytest.fixture
def dspark(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Makes the worlds draft by DSpark, the only algorithm of V4.1: its rows depend on no token behind their own."""
    monkeypatch.setattr(ServerSpec, "algorithm", lambda _: SpeculativeAlgorithm.DSPARK)
    monkeypatch.setattr(Forward, "_draft_input", draft_input)
    monkeypatch.setattr(PrefixLedger, "row", Ledger.row)
    return {**REPLAY, "drafts": 5, "overlap": True}


@needs_replay
@pytest.mark.parametrize("prompt", [120, 250, 378, 600, 601, 634])
def test_with_dspark_it_is_an_extend_of_one_token(prompt: int, dspark: dict[str, Any]) -> None:
    """Its draft gets rows of an extend's last 128 tokens alone; those before came back."""
    world = small_world(**dspark)
    req = world.submit(range(prompt), max_new=40)
    for _ in range(4):
        world.step()
        world.check_integrity()
    world.retract(req)
    forget(world)
    tokens, batch = req.seqlen - 1, world.step()
    world.check_integrity()
    assert (batch.prefix_lens, batch.extend_lens) == ([tokens], [1])
    over(world)
    counters = serving(world).host.counters
    assert counters.loads == 1 and not counters.fallbacks


@needs_replay
def test_a_life_with_dspark(dspark: dict[str, Any]) -> None:
    world = small_world(**dspark)
    assert live(world, seed=0) > 2
    assert serving(world).host.counters.loads > 1
    nothing_is_held(world)
