"""What the engine's swap-in kernel finds for a request that came back: each of the rows that it had, on the device."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.hisparse_transfer import HOT, SLOTS, Kept, one_process
from sglang_dsv4.testing.ledger import KV_ROW, PAGE, Part, planes
from sglang_dsv4.testing.standalone import TINY_RATIOS

ROWS = PAGE // 4  # of a page
STEPS = 6


@pytest.fixture(scope="module")
def subject() -> Iterator[Kept]:
    one_process()
    made = Kept(TINY_RATIOS, 64, "cuda", "auto")
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
