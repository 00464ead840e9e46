"""DSV4_VERIFY finds one flipped byte, in the arena or on the device, and names it."""

from __future__ import annotations

import oracle
import pytest
from builders import Served, served, wait
from pool_fixture import make_world, saved

from sglang_dsv4.errors import VerifyMismatch
from sglang_dsv4.hostmem.memory import HostCopy
from sglang_dsv4.hostmem.split import split
from sglang_dsv4.transfer import verify
from sglang_dsv4.transfer.reference import ReferenceCopier

# 300 tokens: two pages; window 173..299, ratio-4 tail 296..299, pending 256..299
RATIOS = (0, 4, 128, 4, 128)
N, SLOT, NEW_SLOT = 300, 2, 1
UNIT = 98_304  # 2 * (37,440 + 8,448) + 2 * 1,728, padded
TAIL = 9  # units of 5 * 127 * 584 + 2 * 4 * (8,192 + 2,048) + 2 * 44 * 4,096 bytes, with 104 between: 8.3


@pytest.fixture
def loaded():
    """A request saved, then loaded elsewhere: (world, copy, request, plan)."""
    world = served(RATIOS)
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


def in_arena(copy: HostCopy, index: int, byte: int) -> int:
    """Byte of the arena: of unit number ``index`` of the copy."""
    assert copy.memory.units.nbytes == UNIT and copy.in_tail == TAIL
    return copy.units[index] * UNIT + byte


# unit of the copy, byte of it, where
HOST_FLIPS = [
    (0, 8_447, "tokens 0 to 256"),
    (1, 100, "tokens 256 to 300"),
    (1, UNIT - 1, "tokens 256 to 300"),  # padding
    (2, 5, "unit 0 of 9 of the tail"),
    (6, 98_000, "unit 4 of 9 of the tail"),
    (10, 3, "unit 8 of 9 of the tail"),
    (10, UNIT - 1, "unit 8 of 9 of the tail"),  # behind the live rows
]


@pytest.mark.parametrize(("index", "byte", "where"), HOST_FLIPS)
def test_a_byte_changed_in_the_arena_is_found(loaded, index, byte, where):
    """Of any unit of the copy, its bytes that are not live, too: nobody else writes there."""
    _, copy, _, _ = loaded
    at = in_arena(copy, index, byte)
    copy.memory.arena.region[at] ^= 0x10
    with pytest.raises(VerifyMismatch, match=rf"changed since the save: {where} \(checksum of {UNIT} bytes\)"):
        verify.check_host(copy)
    copy.memory.arena.region[at] ^= 0x10
    verify.check_host(copy)


# Of 11 units rank 0 saves pages and three of the tail. The fourth begins in layer 3 of the window, whose rows begin at
# byte 3 * 74,240 of the tail (127 * 584, padded to 128): in row 125, position 298, with byte 3 * UNIT - 222,720 -
# 125 * 576 = 192 of the row.
IN_TWO = "family swa_kv, layer 3, position 298, byte"


@pytest.mark.parametrize(
    ("rank", "flips", "said"),
    [
        (1, [(4, UNIT - 1)], f"rank 1 has other bytes than rank 0 saved: {IN_TWO} 191 of the row in plane 0"),
        (0, [(5, 0)], f"rank 0 has other bytes than rank 1 saved: {IN_TWO} 192 of the row in plane 0"),
        (1, [(4, UNIT - 1), (5, 0)], f"rank 1 has other bytes than rank 0 saved: {IN_TWO} 191 of the row in plane 0"),
        (1, [(0, 100)], "rank 1 has other bytes than rank 0 saved: family c4_kv, layer 1, position 3, byte 100 of the"),
        (0, [(0, 100)], None),  # its own to save
        (1, [(1, 60 * 576)], None),  # a dead row
        (0, [(10, UNIT - 1)], None),  # behind the live rows
    ],
)
def test_the_rank_that_saved_other_bytes_is_named(loaded, rank, flips, said):
    """Of a piece that lies in the units of two ranks, the one whose byte is the first that is wrong."""
    world, copy, _, spans = loaded
    copy.shares, copy.rank = split(2, len(copy.units)), rank
    assert copy.shares == (range(5), range(5, 11))
    verify.check_shares(world.side, copy, spans)
    for index, byte in flips:
        copy.memory.arena.region[in_arena(copy, index, byte)] ^= 0x10
    if said is None:
        verify.check_shares(world.side, copy, spans)
        return
    with pytest.raises(VerifyMismatch) as caught:
        verify.check_shares(world.side, copy, spans)
    assert str(caught.value).startswith(said)


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
    where = copy.memory.offset(copy.tail_units[1]) + 99
    arena[where] ^= 1
    with pytest.raises(VerifyMismatch, match=r"changed since the save: unit 1 of \d+ of the tail "):
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
    nbytes, unit = copy.nbytes, host.memory.units.nbytes
    host.load(copy, again.slots, world.pool.full_to_swa_index_mapping, 3, first_page=2)
    assert (host.counters.verified, host.counters.loaded_bytes) == (1, nbytes - 2 * unit)
