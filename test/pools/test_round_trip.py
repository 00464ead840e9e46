"""Save, lose everything, load elsewhere: every byte that later steps may read is equal, nothing else changed."""

import oracle
import pytest
import torch
from worlds import LENGTHS, SPECS, make_world

pytestmark = pytest.mark.cpu


def assert_unchanged(before, pool):
    """No byte of any buffer differs from ``before``."""
    for key, buffer in oracle.buffers(pool).items():
        assert torch.equal(before[key], buffer.cpu()), key


def round_trip(world, tokens, first_slot=1, second_slot=3, evict=False, seed=0):
    """One retract and resume of a request, checked byte for byte."""
    pool = world.pool
    oracle.fill(pool, seed)
    request = world.start(first_slot, tokens)
    if evict:
        oracle.evict_out_of_window(world.allocator, request)
    expected = world.read(request)
    before = oracle.snapshot(pool)
    copy = world.save(request)
    oracle.compare(expected, world.read(request))
    assert_unchanged(before, pool)
    world.leave(request)
    oracle.poison(pool)
    neighbour = world.start(2, 300)  # takes the freed pages, so that the resumed request gets others
    before = oracle.snapshot(pool)
    resumed = world.resume(copy, second_slot)
    oracle.compare(expected, world.read(resumed))
    allowed = oracle.may_change(pool, resumed.slots, resumed.n, second_slot)
    oracle.assert_only_changed(before, pool, allowed)
    oracle.cleared_ring_ok(pool, second_slot, tokens)
    world.leave(neighbour)
    world.leave(resumed)
    world.check_empty()


@pytest.mark.parametrize("spec", SPECS)
def test_every_length_of_the_grid(spec):
    small, large = make_world(pages=6, **SPECS[spec]), make_world(pages=20, **SPECS[spec])
    for tokens in LENGTHS:
        round_trip(small if tokens < 1000 else large, tokens, seed=tokens)


@pytest.mark.parametrize("tokens", [1, 5, 128, 130, 257, 511])
@pytest.mark.parametrize("spec", ["plain", "all_at_once"])
def test_through_the_kernels(spec, tokens):
    round_trip(make_world(transfer="triton", pages=6, **SPECS[spec]), tokens)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: the GPU round trip did not run")
@pytest.mark.parametrize("transfer", ["torch", "triton", "staged"])
@pytest.mark.parametrize("spec", SPECS)
def test_on_a_gpu(spec, transfer):
    world = make_world(device="cuda", transfer=transfer, verify=True, **SPECS[spec])
    for tokens in LENGTHS:
        round_trip(world, tokens, seed=tokens)


@pytest.mark.parametrize("tokens", [3, 127, 129, 1000])
def test_the_same_request_slot_again(tokens):
    round_trip(make_world(pages=10), tokens, first_slot=2, second_slot=2)


@pytest.mark.parametrize("tokens", [384, 513, 1000, 4097])
def test_pages_evicted_from_the_window_before_the_save(tokens):
    round_trip(make_world(pages=20), tokens, evict=True)


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


def test_many_copies_alive_loaded_in_another_order():
    world = make_world(pages=48, requests=8)
    oracle.fill(world.pool, 9)
    lengths = [130, 1, 511, 257, 1000, 4, 385]
    requests = [world.start(slot + 1, tokens) for slot, tokens in enumerate(lengths)]
    expected = [world.read(request) for request in requests]
    copies = [world.save(request) for request in requests]
    for request in requests:
        world.leave(request)
    oracle.poison(world.pool)
    for slot, number in enumerate([4, 0, 6, 2, 5, 1, 3]):
        resumed = world.resume(copies[number], slot + 1)
        oracle.compare(expected[number], world.read(resumed))
    world.check_empty()


def test_swa_rows_need_not_line_up():
    """Load where the SWA slots come in another order than at the save: rows are found one by one."""
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
