"""The locator finds requests of the real allocator, and names the position of a bad slot."""

from __future__ import annotations

import oracle
import pytest
import torch
from builders import DEVICE, Served, served
from pretended_device import INTERPRETED, Device

from sglang_dsv4.errors import IndexMismatch, WindowNotMapped
from sglang_dsv4.transfer.locate import Locator, Request, locate_on_host

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="a real device is tested in test/gpu")

LENGTHS = (0, 1, 3, 127, 128, 129, 255, 256, 257, 382, 383, 384, 385, 511, 512, 1000, 1025, 2047)
SPECS = {
    "plain": {},
    "without c4": {"ratios": (0, 128), "units": 200},
    "stage without c4 and c128": {"ratios": (0, 4, 128, 0), "stage": (3, 4)},
    "window only": {"ratios": (0, 0)},
}


@pytest.fixture(params=SPECS.values(), ids=SPECS.keys())
def world(request) -> Served:
    return served(**request.param)


@pytest.fixture
def plain() -> Served:
    return served()


def find(monkeypatch, world: Served, request: Request) -> list[int]:
    """Page numbers that the interpreted kernel finds; both ways of looking must agree, or fail alike."""
    device = Device(monkeypatch, kernels=INTERPRETED)
    locator = Locator(world.side, device)
    search = locator.start(request, device.main)
    errors: list[Exception] = []
    for look in (search.check, lambda: locate_on_host(world.side, request)):
        try:
            look()
        except (IndexMismatch, WindowNotMapped) as error:
            errors.append(error)
    if errors:
        assert len(errors) == 2 and str(errors[0]) == str(errors[1]) and type(errors[0]) is type(errors[1])
        raise errors[0]
    return search.page_numbers.tolist()


def test_what_the_allocator_gives(monkeypatch, world):
    for number, tokens in enumerate(LENGTHS):
        request = world.start(tokens, slot=2)
        wanted = world.place(request)
        given = world.request(request)
        if number % 2:
            given = given._replace(indices=given.indices.long())
        swa_pages = list(dict.fromkeys((wanted.swa // 256).tolist()))
        assert find(monkeypatch, world, given) == [2, *swa_pages, -1, -1][:3]
        place = locate_on_host(world.side, given)
        assert (place.tokens, place.request_slot) == (tokens, 2)
        assert place.pages.tolist() == wanted.pages.tolist()
        assert place.swa.tolist() == wanted.swa.tolist()
        oracle.release(world.allocator, request.slots)


def test_one_locator_for_long_and_short_requests(monkeypatch):
    """What it found before does not show; a stage without pages bounds no request, its report grows."""
    world = served((0, 0), pages=40, swa_pages=9)
    device = Device(monkeypatch)
    locator = Locator(world.side, device)
    for tokens in (3, 700, 256 * 30 + 5, 300, 130):
        request = oracle.Request(oracle.resume(world.allocator, tokens), 1, tokens)
        swa = list(dict.fromkeys((world.place(request).swa // 256).tolist()))
        search = locator.start(world.request(request), device.main)
        search.check()
        assert search.page_numbers.tolist() == [1, *swa, -1][:3]
        oracle.release(world.allocator, request.slots)


@pytest.mark.parametrize(
    "shape, dtype", [((2, 3), torch.int64), ((), torch.int64), (3, torch.float32), (3, torch.int16)]
)
def test_indices_of_no_request_are_refused(plain, shape, dtype):
    with pytest.raises(IndexMismatch):
        Request.of(torch.zeros(shape, dtype=dtype), plain.pool.full_to_swa_index_mapping, 0)


def test_indices_that_lie_elsewhere_than_the_pool_are_refused(plain):
    with pytest.raises(IndexMismatch, match="indices on meta, the pool is on cpu"):
        Request.of(torch.zeros(3, dtype=torch.int64, device="meta"), plain.pool.full_to_swa_index_mapping, 0)


def test_more_tokens_than_the_smallest_family_has_pages_for(monkeypatch, plain):
    pages = min(len(buffer) for key, buffer in oracle.buffers(plain.pool).items() if oracle.grows(key[0]))
    given = Request(torch.arange(pages * 256 + 1), plain.pool.full_to_swa_index_mapping, 0)
    message = rf"{pages * 256 + 1} tokens are more than the pool's {pages} pages"
    device = Device(monkeypatch)
    with pytest.raises(IndexMismatch, match=message):
        Locator(plain.side, device).start(given, device.main)
    with pytest.raises(IndexMismatch, match=message):
        locate_on_host(plain.side, given)


BAD_SLOTS = (-1, -(2**31), 2**31 - 1, 10 * 256, 11 * 256 + 5)
FAULTS = [*((600, position, bad) for position in (0, 255, 256, 599) for bad in BAD_SLOTS)]
FAULTS += [(2_047, position, None) for position in (5, 1_500, 2_046)]  # off by one, each in a tile of its own


@pytest.mark.parametrize(("tokens", "position", "bad"), FAULTS)
def test_a_slot_out_of_range_or_off_its_page_is_named(monkeypatch, plain, tokens, position, bad):
    request = plain.start(tokens, slot=1)
    given = plain.request(request)
    given.indices[position] = bad = given.indices[position] + 1 if bad is None else bad
    with pytest.raises(IndexMismatch, match=f"position {position} of {tokens} has full slot {int(bad)}, off its page"):
        find(monkeypatch, plain, given)
    oracle.release(plain.allocator, request.slots)


def test_the_last_entry_of_the_mapping_is_no_slot(monkeypatch, plain):
    """A page that ends with it: its other slots are fine."""
    mapping = plain.pool.full_to_swa_index_mapping[: 2 * 256].clone()
    mapping[256:] = torch.arange(768, 1024)
    assert find(monkeypatch, plain, Request(torch.arange(256, 511), mapping, 0)) == [0, 3, -1]
    with pytest.raises(IndexMismatch, match="position 255 of 256 has full slot 511"):
        find(monkeypatch, plain, Request(torch.arange(256, 512), mapping, 0))


@pytest.mark.parametrize(
    ("swa", "error"),
    [
        (lambda old: 0, WindowNotMapped),
        (lambda old: -3, WindowNotMapped),
        (lambda old: old + 1, IndexMismatch),
        (lambda old: 5 * 256 + 7, IndexMismatch),
        (lambda old: 2**40 + old % 256, IndexMismatch),
    ],
)
@pytest.mark.parametrize("position", [473, 511, 512, 599])
def test_a_window_that_does_not_lie_page_by_page(monkeypatch, plain, position, swa, error):
    request = plain.start(600, slot=1)
    mapping = plain.pool.full_to_swa_index_mapping.clone()
    where = int(request.slots[position])
    mapping[where] = swa(int(mapping[where]))
    with pytest.raises(error) as caught:
        find(monkeypatch, plain, plain.request(request)._replace(swa_map=mapping))
    page_head = position in {473, 512} and error is IndexMismatch  # then the others on its page are at odds with it
    assert page_head or f"position {position} of 600" in str(caught.value)
    oracle.release(plain.allocator, request.slots)


@pytest.mark.parametrize(
    "family", [name for name, kind in oracle.FAMILIES.items() if kind.by != "slot" and kind.planes]
)
def test_pages_out_of_range_of_any_family(monkeypatch, plain, family):
    """One with fewer pages than the others bounds the request."""
    other, request = plain.start(700, slot=0), plain.start(600, slot=1)
    place = plain.place(request)
    used = place.pages if oracle.grows(family) else place.swa // 256
    plain.side.__dict__.pop("limits", None)
    monkeypatch.setitem(plain.side.pages, family, int(used.max()) + 1)
    find(monkeypatch, plain, plain.request(request))
    monkeypatch.setitem(plain.side.pages, family, int(used.max()))
    del plain.side.__dict__["limits"]
    with pytest.raises(IndexMismatch):
        find(monkeypatch, plain, plain.request(request))
    del plain.side.__dict__["limits"]
    for one in (other, request):
        oracle.release(plain.allocator, one.slots)
