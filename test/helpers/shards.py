"""A stacked tensor of which every rank uploads its own shard; the ranks compare what they hold."""

from __future__ import annotations

from typing import Any

import torch

from sglang_dsv4.residency import Residents, TensorSpec

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
