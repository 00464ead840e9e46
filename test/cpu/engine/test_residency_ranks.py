"""Every rank of a multi-card server holds its own shard of a stacked tensor, and the tables of its own pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pool_fixture import make_world
from shards import CARDS, check_shards, shard
from test_ranks import on_ranks

from sglang_dsv4.cache.families import Group
from sglang_dsv4.residency import Sent


def test_each_rank_holds_its_own_shard(tmp_path: Path) -> None:
    check_shards(on_ranks(tmp_path, lambda rank: shard(rank, "cpu"), CARDS))


def test_each_rank_has_the_tables_of_its_own_pool(tmp_path: Path) -> None:
    """Two pipeline stages: other layers, other addresses. Uploaded at start, none by a retract."""

    def work(rank: int) -> Any:
        world = make_world(stage=((0, 3), (3, 6))[rank], host_gb=0.05)
        side = world.pool.host.side
        residents = side.residents
        table = side.row_table
        side.page_table(world.pool.host.memory.regions[Group.PAGED].packed)
        addresses = [buffer.data_ptr() for buffer in table.buffers]
        assert residents.handle("transfer.rows.offsets").tolist() == [a - addresses[0] for a in addresses]
        assert residents.handle("transfer.rows.sizes").tolist() == [b.numel() for b in table.buffers]
        pages = residents.handle("transfer.pages.page_bytes").tolist()
        assert pages == [b.shape[1] for f in side.families if f.whole_pages for b in side.buffers[f.name]]
        with residents.measured() as sent:
            request = world.start(1, 20)
            copy = world.save(request)
            world.leave(request)
            world.resume(copy, 2)
        return len(addresses), residents.sent.static, sent

    first, second = on_ranks(tmp_path, work, CARDS)
    assert first[2] == second[2] == Sent()
    assert first[0] != second[0], "the stages differ"
    assert min(first[1], second[1]) > 0
