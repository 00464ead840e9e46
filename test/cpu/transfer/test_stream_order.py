"""Nothing that a transfer uses is used before it is made, and no memory goes back before its last use."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from types import SimpleNamespace

import oracle
import pytest
import torch
from builders import DEVICE, Served, served
from clocks import Race
from ordered_card import OrderedCard, ordered_card

from sglang_dsv4.engine.early_send import send_what_was_loaded
from sglang_dsv4.errors import IndexMismatch
from sglang_dsv4.transfer import copier as copier_module
from sglang_dsv4.transfer import locate as locate_module
from sglang_dsv4.transfer.pages_in_use import PagesInUse

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="the card is played")

LENGTHS = (1_900, 130, 1_000, 257, 2_047)


@pytest.fixture
def card(monkeypatch):
    with ordered_card(monkeypatch) as found:
        yield found


@pytest.fixture
def world(card: OrderedCard) -> Served:
    """Made on the card: its pages are followed, too."""
    return served((0, 4, 128, 4), units=160, pages=40, swa_pages=40, requests=8)


def ring_of_one_unit(monkeypatch, world: Served) -> None:
    """Lets even short requests go round the ring of slots."""
    for name in ("SLOT_BYTES", "SHORT_BYTES"):
        monkeypatch.setattr(copier_module, name, world.memory.units.nbytes + 5)


def test_a_tensor_that_another_stream_uses_too_early_is_found(card: OrderedCard):
    """The check itself."""
    made, other = torch.zeros(64), card.Stream()
    with card.stream(other), pytest.raises(Race, match=r"aten\.add.*on stream 2.*behind main, where it was written"):
        made.add(1)
    other.wait_stream(card.main)
    with card.stream(other):
        made.add(1)
    card.main.wait_stream(other)


@pytest.mark.parametrize("way", ["the stream waits", "recorded", "neither"])
def test_memory_that_goes_back_too_early_is_found(card: OrderedCard, way: str):
    """The check itself: the next tensor of its stream may get the memory."""
    made, other = torch.zeros(64), card.Stream()
    other.wait_stream(card.main)
    with card.stream(other):
        made.add(1)
    if way == "recorded":
        made.record_stream(other)
    del made
    if way == "the stream waits":
        card.main.wait_stream(other)
    if way != "neither":
        torch.zeros(64)
        return
    with pytest.raises(Race, match=r"the next tensor gets .* where it is read by aten\.add"):
        torch.zeros(64)


def test_the_warm_up(card: OrderedCard, world: Served):
    card.copier(world.side, world.memory).warm_up()


@pytest.mark.parametrize("searches", [2, 64])
@pytest.mark.parametrize("ring", ["one unit", "as it is"])
def test_saves_and_loads(monkeypatch, card: OrderedCard, world: Served, ring: str, searches: int):
    """Saves that nobody waits for, one of them at fault, then loads; the requests' indices are given up at once."""
    if ring == "one unit":
        ring_of_one_unit(monkeypatch, world)
    monkeypatch.setattr(locate_module, "SEARCHES", searches)
    copier = card.copier(world.side, world.memory)
    copier.warm_up()
    in_use = PagesInUse(world.side.device, lambda: (card.forward,), card)
    oracle.fill(world.pool, seed=3)
    requests = [world.start(tokens, slot=number) for number, tokens in enumerate(LENGTHS)]
    wanted = [oracle.read(world.pool, one.slots, one.n, one.req_slot) for one in requests]
    copies = [world.memory.allocate(tokens, world.side.geometry) for tokens in LENGTHS]
    for copy, request in zip(copies, requests, strict=True):
        copier.save(copy, world.request(request))
        in_use.transferred(copy.lease.used_by, copy.lease.gathered)
    wrong = world.request(requests[1])
    wrong.indices[-1] += 1
    spare = world.memory.allocate(LENGTHS[1], world.side.geometry)
    with pytest.raises(IndexMismatch):
        copier.save(spare, wrong).check()
    in_use.transferred(spare.lease.used_by, spare.lease.gathered)
    del wrong
    in_use.wait_on_the_stream()
    for number, request in enumerate(requests):
        oracle.release(world.allocator, request.slots)
        place = world.resume(LENGTHS[number], slot=number)
        taken = world.request(place)
        if number % 2:
            copier.place_taken()
        copier.load(copies[number], taken)
        del taken
        for buffer in oracle.buffers(world.pool).values():
            buffer[0, 0].clone()  # the next forward
        oracle.compare(wanted[number], oracle.read(world.pool, place.slots, place.n, number))
    torch.zeros(8)


@pytest.mark.parametrize("behind", ["the load", "the forwards alone"])
def test_a_prefix_that_was_loaded_is_sent_behind_its_load(card: OrderedCard, world: Served, behind: str):
    """A prefill server sends it before the next forward; the worker reads it on a stream of its own."""
    copier, request = card.copier(world.side, world.memory), world.start(1_024, slot=1)
    copy = world.memory.allocate(1_024, world.side.geometry)
    copier.save(copy, world.request(request)).check()
    written, worker = card.Event(), card.Stream()

    def early_send(scheduler, req):
        written.record(scheduler.forward_stream)

    scheduler = SimpleNamespace(
        transfer_backend=SimpleNamespace(value="mooncake"), enable_overlap=True,
        forward_stream=card.forward, schedule_stream=card.main,
    )  # fmt: skip
    copier.load(copy, world.request(request))
    if behind == "the load":
        send_what_was_loaded(early_send, scheduler, None)
    else:
        early_send(scheduler, None)
    worker.wait_event(written)
    rows = next(iter(oracle.buffers(world.pool).values()))
    with card.stream(worker), nullcontext() if behind == "the load" else pytest.raises(Race, match="written by copy_"):
        rows.clone()
    card.main.wait_stream(worker)


def test_a_copier_that_dies_while_its_copies_are_on_their_way(card: OrderedCard, world: Served):
    """A pool that is used on its own may be forgotten: its ring and row image go back to the allocator."""
    copier = card.copier(world.side, world.memory)
    copy = world.memory.allocate(1_000, world.side.geometry)
    copier.save(copy, world.request(world.start(1_000, slot=1))).check()
    del copier
    gc.collect()
    torch.zeros(8)
    copy.release()


def test_searches_whose_requests_are_forgotten(monkeypatch, card: OrderedCard, world: Served):
    """On a stream of its own, as a load's: a search keeps its request until it is over."""
    monkeypatch.setattr(locate_module, "SEARCHES", 3)
    locator, finder, request = locate_module.Locator(world.side, card), card.Stream(), world.start(300, slot=1)
    for _ in range(5):
        given = world.request(request)
        finder.wait_stream(card.main)
        locator.start(given, finder)
        del given
        torch.zeros(8)
