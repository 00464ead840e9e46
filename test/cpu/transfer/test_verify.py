"""DSV4_VERIFY finds one flipped byte, in the arena or on the device, and names it."""

from __future__ import annotations

import oracle
import pytest
from builders import Served, served, wait
from pool_fixture import make_world, saved

from sglang_dsv4.cache.family import Group
from sglang_dsv4.errors import VerifyMismatch
from sglang_dsv4.hostmem.memory import HostMemory
from sglang_dsv4.transfer import verify
from sglang_dsv4.transfer.reference import ReferenceCopier

# 300 tokens: two pages; window 173..299, ratio-4 tail 296..299, pending 256..299
RATIOS = (0, 4, 128, 4, 128)
N, SLOT, NEW_SLOT = 300, 2, 1
BLOCKS = 8


@pytest.fixture
def loaded():
    """A request saved, then loaded elsewhere: (world, copy, request, plan)."""
    world = served(RATIOS, blocks=BLOCKS)
    oracle.fill(world.pool, seed=3)
    request = world.start(N, SLOT)
    copy = world.memory.allocate(N, world.side.geometry)
    copier = ReferenceCopier(world.side, lambda: ())
    copier.save(copy, world.request(request))
    wait()
    copy.checksums = verify.checksums(copy)
    again = world.resume(N, NEW_SLOT)
    copier.load(copy, world.request(again))
    wait()
    yield world, copy, again, world.plan(again)
    copy.release()


def in_arena(memory: HostMemory, family: str, index: int, block: int, byte: int) -> int:
    """Byte of the arena: layer number ``index`` of a family, in the copy's block number ``block``.

    Of c128_state ``byte`` counts over the rows of both layers, which take turns.
    """
    region, member = next((r, f) for r in memory.regions.values() for f in r.packed.families if f.name == family)
    return memory.offset(member.group, block) + region.packed.slot_offset(member, index) + byte


# family, its layer's number, block of the copy, byte of the slot, where
HOST_FLIPS = [
    ("c4_kv", 1, 1, 100, "tokens 256 to 300"),
    ("c4_indexer", 0, 0, 8_447, "tokens 0 to 256"),
    ("c128_kv", 1, 1, 1_727, "tokens 256 to 300"),  # padding
    ("swa_kv", 0, 0, 5, "the window block"),
    ("swa_kv", 2, 0, 127 * 576, "the window block"),  # a row that holds nothing
    ("c4_state", 0, 0, 4 * 8_192 - 1, "the window block"),
    ("c128_state", 1, 0, 7 * 8_192, "the request block"),
]


@pytest.mark.parametrize(("family", "index", "block", "byte", "where"), HOST_FLIPS)
def test_a_byte_changed_in_the_arena_is_found(loaded, family, index, block, byte, where):
    """Of any block of the copy, its bytes that are not live, too: nobody else writes there."""
    _, copy, _, _ = loaded
    at = in_arena(copy.memory, family, index, block, byte)
    copy.memory.arena.region[at] ^= 0x10
    with pytest.raises(VerifyMismatch, match=rf"changed since the save: {where} \(checksum of \d+ bytes\)"):
        verify.check_host(copy)
    copy.memory.arena.region[at] ^= 0x10
    verify.check_host(copy)


# family, layer, position, plane, byte of the row's piece, byte named: counted from the start of the page where whole
# pages move, else in the row's plane (the window is on two pages: runs 173..255 and 256..299)
DEVICE_FLIPS = [
    ("c4_kv", 1, 299, 0, 7, f"{10 * 576 + 7} of the page"),
    ("c4_kv", 3, 255, 1, 2, f"{64 * 576 + 63 * 8 + 2} of the page"),
    ("c4_indexer", 1, 259, 1, 3, f"{64 * 128 + 3} of the page"),
    ("c128_kv", 4, 255, 1, 0, f"{2 * 576 + 8} of the page"),
    ("swa_kv", 0, 173, 0, 0, "0 of the row in plane 0"),
    ("swa_kv", 4, 299, 0, 9, "9 of the row in plane 0"),
    ("swa_kv", 2, 256, 1, 7, "7 of the row in plane 1"),
    ("c4_state", 1, 298, 0, 8_191, "8191 of the row"),
    ("c4_indexer_state", 3, 296, 0, 1, "1 of the row"),
    ("c128_state", 4, 299, 0, 4_095, "4095 of the row"),
]


def on_device(world: Served, request, family: str, layer: int, position: int, plane: int, byte: int):
    """(flat buffer, offset) of a byte, by the oracle."""
    buffer = oracle.buffers(world.pool)[family, layer]
    live = oracle.live_rows(world.pool, (family, layer), request.slots, N, request.req_slot)
    page, start, _ = oracle._row_spans(world.pool, family, buffer.shape[1], dict(live)[position])[plane]
    return buffer.view(-1), page * buffer.shape[1] + start + byte


@pytest.mark.parametrize(("family", "layer", "position", "plane", "byte", "named"), DEVICE_FLIPS)
def test_a_byte_changed_on_the_device_is_named(loaded, family, layer, position, plane, byte, named):
    world, copy, request, spans = loaded
    flat, where = on_device(world, request, family, layer, position, plane, byte)
    saved = int(flat[where])
    flat[where] ^= 0x01
    with pytest.raises(VerifyMismatch) as caught:
        verify.check_device(world.side, copy, spans)
    assert str(caught.value) == (
        f"loaded bytes differ: family {family}, layer {layer}, position {position}, byte {named}: "
        f"saved {saved}, found {saved ^ 1}"
    )
    flat[where] ^= 0x01
    verify.check_device(world.side, copy, spans)


def test_a_load_refuses_a_copy_that_changed():
    """Nothing is written, and the copy stays."""
    world = make_world(pages=10, verify=True)
    _, expected, copy = saved(world, tokens=N)
    again = oracle.Request(oracle.resume(world.allocator, N), NEW_SLOT + 1, N)
    before, arena = oracle.snapshot(world.pool), copy.memory.arena.region
    where = in_arena(copy.memory, "swa_kv", 1, 0, 99)
    arena[where] ^= 1
    with pytest.raises(VerifyMismatch, match="changed since the save: the window block "):
        world.load(copy, again)
    oracle.assert_only_changed(before, world.pool)
    assert not copy.released
    arena[where] ^= 1
    world.load(copy, again)
    oracle.compare(expected, world.read(again))
    world.check_empty()


def test_a_load_that_misses_a_family_is_found(monkeypatch):
    """The whole way, by the setting; and only a load that was compared is counted as verified."""
    world = make_world(pages=10, verify=True)
    request, expected, copy = saved(world, tokens=700)
    world.leave(request)
    oracle.poison(world.pool)
    host = world.pool.host
    with monkeypatch.context() as patch:
        real = host._copier.load

        def forgetful(copy, request, first_page):
            real(copy, request, first_page)
            for buffer in host.buffers.buffers["c128_state"]:
                buffer[request.slot * 128 : (request.slot + 1) * 128] = 0

        patch.setattr(host._copier, "load", forgetful)
        with pytest.raises(VerifyMismatch, match=r"family c128_state, layer 3, position \d+, byte"):
            world.resume(copy, 2)
    assert host.counters.verified == 0
    oracle.compare(expected, world.read(world.resume(copy, 3)))
    assert host.counters.verified == 1


def test_pages_that_are_shared_are_neither_compared_nor_counted():
    """A plain server's prefix tree holds the first pages: computed again, their bytes need not be the copy's."""
    world = make_world(pages=10, verify=True)
    request, _, copy = saved(world, tokens=700)
    world.leave(request)
    oracle.poison(world.pool)
    again, host = world.start(3, 700), world.pool.host
    nbytes, stride = copy.nbytes, host.memory.regions[Group.PAGED].packed.block_stride
    host.load(copy, again.slots, world.pool.full_to_swa_index_mapping, 3, first_page=2)
    assert (host.counters.verified, host.counters.loaded_bytes) == (1, nbytes - 2 * stride)
