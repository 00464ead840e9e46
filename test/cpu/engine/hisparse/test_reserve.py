"""How many rows of retracted HiSparse requests a server keeps: of what its operator gives, or what the RAM allows."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hisparse_world import HISPARSE, HiSparseWorld
from sglang.srt.runtime_context import get_context, get_parallel

from sglang_dsv4.engine.hisparse import reserve
from sglang_dsv4.engine.hisparse.reserve import keeps_rows
from sglang_dsv4.errors import HostMemoryExhausted
from sglang_dsv4.hostmem import claims
from sglang_dsv4.hostmem.claims import Claim
from sglang_dsv4.settings import Settings


@pytest.mark.parametrize("together", [1, 4])
def test_ranks_that_share_an_arena_have_their_reserves_of_one_sum(
    together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of an arena's ranks keep the same rows, each in its own host pool."""
    monkeypatch.setenv("DSV4_HOST_GB", "0.012")
    monkeypatch.setattr("sglang_dsv4.engine.hisparse.reserve.ranks_an_arena", lambda args: together)
    world = HiSparseWorld(spec=replace(HISPARSE, pages=400), ranks=object())
    reserved = together * world.kept.reserve * world.kept.page_bytes
    assert 0 < world.kept.reserve < 400
    assert 0.9 * 2**30 * 0.012 <= reserved + world.host.memory.arena.nbytes <= 2**30 * 0.012


def test_all_ranks_have_the_reserve_of_the_poorest(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are asked before any of them builds its pool."""

    monkeypatch.setattr(reserve, "of_every_rank", lambda pages: [pages, 7, 1000])
    world = HiSparseWorld(ranks=object())
    assert world.kept.reserve == 7 and world.host_pool.num_host_pages == 31


def test_a_rank_that_cannot_reserve_tells_the_others_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    monkeypatch.setenv("DSV4_HOST_GB", "8")
    monkeypatch.setattr(claims, "free_ram", lambda _: 1 << 20)
    monkeypatch.setattr(reserve, "of_every_rank", lambda pages: said.append(pages) or [pages, 7])
    with pytest.raises(HostMemoryExhausted, match="lower it, or set auto"):
        HiSparseWorld(ranks=object())
    assert said == [0]


def pages_to_add(world: HiSparseWorld, claim: Claim) -> int:
    return reserve.reserve_pages(world.pool, world.allocator.size_full, Settings(), claim)


def test_what_may_be_kept_leaves_the_machine_its_ram(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a rank's part of it the coordinator's own pool and what the engine leaves free go first, and a half stays."""
    world, leaves, ranks, wanted = HiSparseWorld(), 7 << 20, 2, 5
    unit = world.host.memory.units.nbytes
    ram = ranks * (leaves + 24 * world.kept.page_bytes + 2 * wanted * (world.kept.page_bytes + unit))
    monkeypatch.setattr(reserve, "ENGINE_LEAVES", leaves)
    for found, there in ((wanted, ram), (wanted - 1, ram - ranks)):
        monkeypatch.setattr(claims, "free_ram", lambda _, there=there: there)
        claim = Claim(ranks, places=(str(tmp_path),))
        assert pages_to_add(world, claim) == found
        claim.close()


def test_servers_that_start_together_do_not_count_the_same_ram(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first has claimed its host pool, the engine's part too, and not pinned it yet."""
    with mock.patch.object(Claim, "_say_pinned", autospec=True, side_effect=Claim._say_pinned) as pinned:
        world = HiSparseWorld()
    assert pinned.call_count == 2, "the host pool's, and the arena's"
    page = world.kept.page_bytes
    monkeypatch.setattr(reserve, "ENGINE_LEAVES", 0)
    monkeypatch.setattr(claims, "free_ram", lambda _: 100 * page)
    first, second = (Claim(1, f"server {number}", places=(str(tmp_path),)) for number in range(2))
    kept = pages_to_add(world, first)
    assert kept > 0
    with second.measuring() as free:
        assert free == (100 - 24 - kept) * page
    with first.pinning():
        pass
    with second.measuring() as free:
        assert free == 100 * page, "pinned: what is free is free"


def test_auto_that_finds_no_ram_for_rows_says_so(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """The line behind it says what an uncovered HiSparse server's does, and nothing of RAM."""
    world = HiSparseWorld()
    assert "no RAM for rows" not in caplog.text
    monkeypatch.setattr(claims, "free_ram", lambda _: 0)
    assert pages_to_add(world, Claim(1)) == 0
    assert "HiSparse: a rank has no RAM for rows of retracted requests, so none are kept" in caplog.text


def test_too_little_for_a_page_of_rows_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server would start without host copies, as if nobody had asked for any."""
    monkeypatch.setenv("DSV4_HOST_GB", "0.0001")
    with pytest.raises(HostMemoryExhausted, match="holds not one page of HiSparse rows; raise it"):
        HiSparseWorld()


def test_by_default_all_that_the_cache_holds_may_be_kept() -> None:
    world = HiSparseWorld()
    assert world.kept.reserve == 24 and world.host_pool.num_host_pages == 48
    world.park(world.admit(700))
    assert world.host.counters.kept_bytes == 3 * world.kept.page_bytes


@pytest.mark.parametrize(
    "args",
    [
        {"disaggregation_mode": "prefill"},
        {"disaggregation_mode": "null", "enable_mixed_chunk": True},
        {"disaggregation_mode": "null", "enable_priority_scheduling": True},
        {"speculative_algorithm": "EAGLE"},
    ],
    ids=["prefill", "mixed", "priorities", "drafts"],
)
def test_other_servers_keep_nothing_and_reserve_nothing(args: dict[str, Any]) -> None:
    world = HiSparseWorld()
    assert keeps_rows(world.pool)
    with get_context().override_server_args(disaggregation_mode="null"), get_parallel().override(attn_cp_size=1):
        assert keeps_rows(world.pool), "a plain server without any of it does"
    with (
        get_context().override_server_args(**{"disaggregation_mode": "decode", **args}),
        get_parallel().override(attn_cp_size=1),
    ):
        assert not keeps_rows(world.pool)
