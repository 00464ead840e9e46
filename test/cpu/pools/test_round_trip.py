"""A request comes back with every byte that later steps may read, and changes nothing else."""

import oracle
import pytest
import torch
from pool_fixture import LENGTHS, NEWER_SPECS, SPECS, make_world, round_trip
from pretended_device import INTERPRETED, TORCH, Device

from sglang_dsv4.errors import IndexMismatch

pytestmark = pytest.mark.both_layouts

INTERPRETED_SPECS = ("v41_drafts", "v41_short_swa_pages", "online")
CORNERS = (1, 4, 127, 129, 256, 385, 513, 1000)


ALL_SPECS = {**SPECS, **NEWER_SPECS}


@pytest.mark.parametrize("spec", [*SPECS, *NEWER_SPECS])
def test_every_length_of_the_grid(spec):
    """All of the grid where families meet, its corners elsewhere."""
    lengths = LENGTHS if spec in {"plain", "online", "all_at_once", "v41", "v41_drafts"} else CORNERS
    for pages, some in ((6, [n for n in lengths if n < 1000]), (20, [n for n in lengths if n >= 1000])):
        world = make_world(pages=pages, **ALL_SPECS[spec])
        for number, tokens in enumerate(some):
            round_trip(world, tokens, seed=tokens, evict=number % 2 == 1)


@pytest.mark.parametrize("spec", ["all_at_once", *INTERPRETED_SPECS])
def test_the_corners_of_the_grid_through_the_kernels(monkeypatch, spec):
    world = make_world(pages=7, **ALL_SPECS[spec])
    Device(monkeypatch, kernels=INTERPRETED).serve(world.pool.host)
    for number, tokens in enumerate(CORNERS):
        round_trip(world, tokens, seed=tokens, evict=number % 2 == 1)


def test_shared_prefix_pages():
    """Two requests share two complete pages; each copy holds them, each resumes into pages of its own."""
    world = make_world(pages=16)
    oracle.fill(world.pool, 5)
    one, other = world.start(1, 900), world.start(2, 777)
    other.slots[:512] = one.slots[:512]
    expected = [world.read(one), world.read(other)]
    copies = [world.save(one), world.save(other)]
    oracle.poison(world.pool)
    for copy, wanted, slot in zip(reversed(copies), reversed(expected), (3, 4), strict=True):
        oracle.compare(wanted, world.read(world.resume(copy, slot)))
    world.check_empty()


def test_swa_pages_need_not_come_in_order():
    """Load where the two SWA pages of the window come in another order than at the save."""
    world = make_world(pages=16)
    oracle.fill(world.pool, 3)
    request = world.start(1, 600)
    expected = world.read(request)
    copy = world.save(request)
    world.leave(request)
    oracle.poison(world.pool)
    slots = oracle.resume(world.allocator, 600)
    mapping = world.pool.full_to_swa_index_mapping
    tail = slots[600 - 127 :].long()
    # Swap the two SWA pages that the window touches, page offsets kept: state rings stay distinct.
    swapped = mapping[tail]
    pages = torch.unique(swapped // 256)
    assert len(pages) == 2
    mapping[tail] = torch.where(swapped // 256 == pages[0], pages[1], pages[0]) * 256 + swapped % 256
    resumed = oracle.Request(slots, 3, 600)
    world.load(copy, resumed)
    oracle.compare(expected, world.read(resumed))


def exchange_two(slots):
    return [len(slots) - 1, len(slots) - 3], [len(slots) - 3, len(slots) - 1]


def shuffle(slots):
    """The pages of the window."""
    first = max(0, len(slots) - 127) // 256 * 256
    order = torch.randperm(len(slots) - first, generator=torch.Generator().manual_seed(1))
    return torch.arange(first, len(slots)), first + order


@pytest.mark.parametrize("kernels", [None, TORCH], ids=["reference", "copier"])
@pytest.mark.parametrize("change", [exchange_two, shuffle])
@pytest.mark.parametrize("tokens", [5, 130, 389, 1000])
def test_a_window_whose_slots_are_in_no_order_is_refused(monkeypatch, tokens, change, kernels):
    """No allocator gives one. Neither a save nor a load of it changes a byte, and the copy can still be loaded."""
    world = make_world(pages=8)
    if kernels:
        device = Device(monkeypatch, kernels=kernels)
        device.serve(world.pool.host)
    oracle.fill(world.pool, 6)
    request, mapping = world.start(1, tokens), world.pool.full_to_swa_index_mapping
    expected, copy, memory = world.read(request), world.save(request), world.pool.host.memory
    kept, (there, here) = mapping.clone(), change(request.slots)
    mapping[request.slots[there]] = kept[request.slots[here]]
    before, held = oracle.snapshot(world.pool), memory.held_bytes
    for transfer in (lambda: world.save(request), lambda: world.load(copy, request)):
        with pytest.raises(IndexMismatch, match=rf"position \d+ of {tokens} has SWA slot"):
            transfer()
        if kernels:
            device.finish()
        oracle.assert_only_changed(before, world.pool)
        assert (memory.held_bytes, copy.released) == (held, False)
    mapping.copy_(kept)
    oracle.poison(world.pool)
    world.load(copy, request)
    oracle.compare(expected, world.read(request))
    world.check_empty()
