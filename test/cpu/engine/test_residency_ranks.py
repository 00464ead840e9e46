"""Every rank of a multi-card server holds its own shard of a stacked tensor, and the tables of its own pool."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from pool_fixture import make_world
from test_ranks import on_ranks

from sglang_dsv4.residency import ResidencyError, Residents, Sent, TensorSpec

CARDS = 2
SHARDS = torch.arange(CARDS * 35, dtype=torch.int64).view(CARDS, 5, 7) * 1_000_003


def gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What each rank has."""
    found = [torch.empty_like(tensor, device="cpu") for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(found, tensor.cpu())
    return found


def shard(rank: int, device: str) -> Any:
    """Upload, and look at all ranks' cards: (bytes sent, bytes held, what each rank holds)."""
    residents = Residents(torch.device(device), rank, torch.distributed.get_world_size())
    handle = residents.upload(TensorSpec.constant("table", SHARDS, "stacked"), SHARDS)
    whole = residents.constant("whole", torch.arange(3))
    assert str(handle.device) == str(whole.device) == device
    assert [w.tolist() for w in gathered(whole)] == [[0, 1, 2]] * CARDS
    return residents.sent.static, handle.untyped_storage().nbytes(), [s.tolist() for s in gathered(handle)]


def check_shards(found: list[Any]) -> None:
    one = SHARDS[0].numel() * SHARDS.itemsize
    whole = 3 * 8
    assert found == [(one + whole, one, SHARDS.tolist())] * CARDS


@pytest.mark.cpu
def test_each_rank_holds_its_own_shard(tmp_path: Path) -> None:
    check_shards(on_ranks(tmp_path, lambda rank: shard(rank, "cpu"), CARDS))


@pytest.mark.cpu
def test_ranks_refuse_the_same_shards(tmp_path: Path) -> None:
    """Nobody goes on with a table that another has refused: the rule is about the table, not about the rank."""

    def work(rank: int) -> Any:
        residents = Residents(torch.device("cpu"), rank, torch.distributed.get_world_size())
        try:
            residents.upload(TensorSpec.constant("table", SHARDS, "stacked"), SHARDS)
        except ResidencyError as error:
            return str(error), residents.sent
        return None

    answers = on_ranks(tmp_path, work, CARDS + 1)
    rule = "table: stacked needs one entry a card, its leading dimension is 2, the cards are 3"
    assert answers == [(rule, Sent())] * 3


@pytest.mark.cpu
def test_each_rank_has_the_tables_of_its_own_pool(tmp_path: Path) -> None:
    """Two pipeline stages: other layers, other addresses. Uploaded at start, none by a retract."""

    def work(rank: int) -> Any:
        world = make_world(stage=((0, 3), (3, 6))[rank], host_gb=0.05)
        side = world.pool.host.side
        residents = side.residents
        table = side.row_table
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


def _on_card(rank: int, store: str, answers: Any) -> None:
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=CARDS)
    answers.put((rank, shard(rank, f"cuda:{rank}")))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < CARDS, reason="needs two GPUs")
def test_each_card_holds_its_own_shard(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    answers = context.Queue()
    ranks = [
        context.Process(target=_on_card, args=(rank, str(tmp_path / "store"), answers), daemon=True)
        for rank in range(CARDS)
    ]
    for process in ranks:
        process.start()
    found = dict(answers.get(timeout=180) for _ in ranks)
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    check_shards([found[rank] for rank in range(CARDS)])
