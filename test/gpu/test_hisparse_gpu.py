"""What the engine's swap-in kernel finds for a request that came back: each of the rows that it had, on the device."""

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dsv4.bench.subject import Subject
from sglang_dsv4.settings import Settings
from sglang_dsv4.testing.ledger import KV_ROW, PAGE, Part, planes
from sglang_dsv4.testing.standalone import TINY_RATIOS, PoolSpec, make_allocator, make_pool

ROWS = PAGE // 4  # of a page
STEPS = 6
PAGES = 64
HOT = 512  # rows of a request on the device
SLOTS = (1, 2, 3, 4)
SERVER = {"disaggregation_mode": "decode", "disable_radix_cache": True, "enable_hisparse": True}  # its arguments


class Kept(Subject):
    """Builds a pool whose c4 history lies in the coordinator's host pool."""

    def __init__(self, device: str) -> None:
        from sglang.srt.managers.hisparse_coordinator import HiSparseCoordinator
        from sglang.srt.mem_cache.allocator.hisparse import (
            DeepSeekV4HiSparseTokenToKVPoolAllocator,
        )

        self.device = device
        self.spec = PoolSpec(
            TINY_RATIOS, PAGES, swa_pages=24, requests=8, hisparse=True, device=device, server_args=SERVER
        )
        self.pool: Any = make_pool(self.spec)
        allocator = DeepSeekV4HiSparseTokenToKVPoolAllocator(make_allocator(self.spec, self.pool))
        self.table = torch.zeros(len(SLOTS) + 1, PAGES * PAGE, dtype=torch.int32, device=device)
        self.coordinator = HiSparseCoordinator(
            req_to_token_pool=SimpleNamespace(req_to_token=self.table, max_context_len=PAGES * PAGE),
            token_to_kv_pool_allocator=allocator, top_k=HOT, device_buffer_size=HOT, device=device, tp_group=None,
        )  # fmt: skip
        self.kept = self.pool.kept_rows
        self.host = self.pool.attach_host(Settings(host_gb=0.5))
        for buffers in (*self.host.buffers.buffers.values(), self.coordinator.mem_pool_host.kv_buffer):
            for buffer in buffers:
                buffer.random_(0, 256)

    def request(self, slot: int, tokens: int) -> Any:
        kv = SimpleNamespace(kv_allocated_len=tokens, req_pool_idx=slot)
        end = SimpleNamespace(end=tokens)
        return SimpleNamespace(rid=f"{slot}", kv=kv, req_pool_idx=slot, extend_range=end, extend_end=tokens)

    def enter(self, slot: int, tokens: int) -> None:
        """Gives the request in ``slot`` host pages and hot rows; its pages are another set each time."""
        owner = self.coordinator
        owner.mem_pool_host.alloc_paged_token_slots(
            owner.req_to_host_pool, owner.req_to_host_pool_allocated_len, slot, 0, tokens // 4
        )

    def admit(self, slot: int, tokens: int) -> None:
        self.coordinator.admit_request_direct(self.request(slot, tokens))
        self.kept.load_newest(slot, tokens)


@pytest.fixture(scope="module")
def subject() -> Iterator[Kept]:
    if not torch.distributed.is_initialized():  # the coordinator asks how many ranks there are
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    made = Kept("cuda")
    yield made
    made.host.close()


def rows_of(buffer: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The bytes of ``places`` in a layer's pages, ``[n, row bytes]``, on the CPU."""
    at = places.long().to(buffer.device)
    part = Part("c4_kv", 0, buffer, ROWS, KV_ROW)
    return torch.cat([plane[at // ROWS, at % ROWS].view(torch.uint8) for plane, _, _ in planes(part)], 1).cpu()


def history(owner: Any, slot: int, rows: int) -> list[torch.Tensor]:
    """What the host pool holds of the request in ``slot``, by layer."""
    return [rows_of(layer, owner.req_to_host_pool[slot, :rows]) for layer in owner.mem_pool_host.kv_buffer]


def check_steps(owner: Any, slot: int, wanted: list[torch.Tensor], draw: random.Random) -> None:
    """Steps in which each layer reads rows of its own choice: all are on the device then, and are those wanted."""
    count = len(wanted[0])
    owner.num_real_reqs.fill_(1)
    for step in range(STEPS):
        for layer, rows in enumerate(wanted):
            asked = draw.sample(range(count), min(HOT, count))
            if step == 0 and count - 1 not in asked:
                asked[0] = count - 1  # the newest
            top = torch.tensor([asked + [-1] * (HOT - len(asked))], dtype=torch.int32, device="cuda")
            found = owner.swap_in_selected_pages(
                torch.tensor([slot], device="cuda"), torch.tensor([count], dtype=torch.int32, device="cuda"), top, layer
            )
            places = found[0, : len(asked)]
            assert bool((places >= 0).all())
            have = rows_of(owner.mem_pool_device.kv_buffer[layer], places)
            assert torch.equal(have, rows[asked]), f"step {step}, layer {layer}"


@pytest.mark.parametrize("tokens", [1000, 2047, 2048, 2052, 2055, 3001, 4096, 5003])
def test_each_row_of_who_came_back_is_found(subject: Kept, tokens: int) -> None:
    """Before its retract it had decoded, so that its hot rows were others than a new request's."""
    owner, draw, rows = subject.coordinator, random.Random(tokens), tokens // 4
    for slot in SLOTS[:2]:
        subject.table[slot, :tokens] = subject.place(tokens, slot)
    slot, other = SLOTS[:2]
    subject.enter(slot, tokens)
    subject.admit(slot, tokens)
    wanted = history(owner, slot, rows)
    check_steps(owner, slot, wanted, draw)
    if tokens % 4 == 0:  # the step before the retract has made the newest row, which the device alone has
        place = owner.req_to_device_buffer[slot, min(rows - 1, HOT)]
        for layer, buffer in enumerate(owner.mem_pool_device.kv_buffer):
            values, _, _ = next(planes(Part("c4_kv", layer, buffer, ROWS, KV_ROW)))
            values[place // ROWS, place % ROWS] += 1
            wanted[layer][-1] = rows_of(buffer, place.view(1))[0]
    with subject.kept.detaching(slot, tokens, computed=True):
        copy = subject.pool.get_cpu_copy(subject.table[slot, :tokens], req_pool_index=slot)
        owner.request_finished(subject.request(slot, tokens))
    subject.enter(slot, tokens)  # somebody else, who leaves other rows in the hot rows that were his
    subject.admit(slot, tokens)
    check_steps(owner, slot, history(owner, slot, rows), draw)
    owner.request_finished(subject.request(slot, tokens))
    with subject.kept.adopting(copy):
        subject.enter(other, tokens)
    subject.pool.load_cpu_copy(copy, subject.table[other, :tokens], req_pool_index=other)
    subject.admit(other, tokens)
    check_steps(owner, other, wanted, draw)
    owner.request_finished(subject.request(other, tokens))
