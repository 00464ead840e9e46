"""Lanes over a backend of the test: what is copied, checked, deduplicated, replaced and found, and in which order."""

import hashlib
from types import SimpleNamespace

import numpy as np
import pytest

from sglang_dsv4.store import lanes as module
from sglang_dsv4.store.lanes import AHEAD, BATCH, SLOTS, Job, Lanes
from sglang_dsv4.store.ring import Ring
from sglang_dsv4.store.wire import GET, PUT, Code, Piece, Question

UNIT, UNITS, TAIL = 4096, 80, 3
POISON = 0xA5
GROUP = bytes(range(32))


class Store:
    """Keeps slots by name; counts its calls; does not say what it has where ``mute``."""

    can_remove = True

    def __init__(self, ring, mute=False):
        self.ring, self.mute = ring, mute
        self.objects, self.calls, self.groups = {}, [], []
        self.refused, self.free, self.expected = set(), True, []

    def put(self, names, slots, group):
        self.calls.append(("put", tuple(names)))
        self.groups.append(group)
        for name, slot in zip(names, slots, strict=True):
            if name not in self.refused:
                self.objects.setdefault(name, self.ring.slot(slot).tobytes())  # as real ones: what is there stays
        return [name not in self.refused for name in names]

    def get(self, names, slots):
        self.calls.append(("get", tuple(names)))
        for name, slot in zip(names, slots, strict=True):
            if name in self.objects:
                self.ring.slot(slot)[:] = np.frombuffer(self.objects[name], np.uint8)
        return [Code.OK if name in self.objects else Code.MISSING for name in names]

    def is_full(self):
        return False

    def expect(self, names):
        self.expected.append(tuple(names))

    def exists(self, names):
        self.calls.append(("exists", tuple(names)))
        return None if self.mute else [name in self.objects for name in names]

    def remove(self, name):
        self.calls.append(("remove", (name,)))
        return self.objects.pop(name, None) is not None

    def room(self, nbytes):
        return self.free

    def flip(self, name, byte):
        raw = bytearray(self.objects[name])
        raw[byte] ^= 1
        self.objects[name] = bytes(raw)


@pytest.fixture(params=[None, b"secret"], ids=["plain", "secret"])
def world(request):
    ring = Ring(UNIT, SLOTS)
    store, beats = Store(ring), []
    arena = np.random.default_rng(3).integers(0, 256, UNITS * UNIT, np.uint8)
    lanes = Lanes(arena, UNIT, TAIL, store, ring, request.param, beats.append)
    return SimpleNamespace(
        ring=ring, store=store, beats=beats, units=arena.reshape(UNITS, UNIT), lanes=lanes, secret=request.param
    )


def key(number):
    return hashlib.sha256(b"%d" % number).digest()


def name(number, part=0):
    return key(number).hex() + ("p" if part == 0 else f"w{part - 1}")


def write(world, pieces):
    """All codes of a put; the units are the caller's again as soon as that is said, and are poisoned then."""
    told = []

    def copied(count):
        for piece in pieces[told[-1] if told else 0 : count]:
            world.units[piece.unit] = POISON
        told.append(count)

    *_, codes = world.lanes.put(GROUP, pieces, copied)
    assert told == sorted(told) and told[-1] == len(pieces)
    return codes


def read(world, jobs):
    for job in jobs:
        world.units[job.unit] = POISON
    *_, codes = world.lanes.get(jobs)
    return codes


def store_pages(world, numbers):
    """Writes pages from the units of their numbers; returns what was in those."""
    wanted = {number: world.units[number].copy() for number in numbers}
    assert set(write(world, [Piece(number, 0, key(number)) for number in numbers])) == {Code.OK}
    return wanted


def test_what_was_put_comes_back_though_its_units_were_reused_at_once(world):
    numbers = range(2 * BATCH + 5)
    wanted = store_pages(world, numbers)
    assert [call for call, _ in world.store.calls] == ["exists", "put", "put", "put"]
    jobs = [Job(UNITS - 1 - number, name(number)) for number in numbers]
    assert read(world, jobs) == [Code.OK] * len(jobs)
    for number in numbers:
        assert (world.units[UNITS - 1 - number] == wanted[number]).all(), number


def test_a_unit_is_in_the_ring_when_it_is_said_to_be_copied(world):
    pieces = [Piece(unit, 0, key(unit)) for unit in range(5)]
    wanted = world.units[:5].copy()
    seen = []
    list(world.lanes.put(GROUP, pieces, lambda n: seen.append([world.ring.payload(slot).copy() for slot in range(n)])))
    assert (np.array(seen[0]) == wanted).all()


def test_units_are_released_before_the_backend_is_called(world):
    order = []
    world.store.put = lambda names, slots, group: order.append("put") or [True] * len(names)
    list(world.lanes.put(GROUP, [Piece(0, 0, key(0))], lambda n: order.append("copied")))
    assert order == ["copied", "put"]


def test_codes_grow_a_batch_at_a_time(world):
    pieces = [Piece(unit, 0, key(unit)) for unit in range(BATCH + 1)]
    assert [len(codes) for codes in [list(c) for c in world.lanes.put(GROUP, pieces, lambda n: None)]] == [
        BATCH,
        BATCH + 1,
    ]
    jobs = [Job(unit, name(unit)) for unit in range(BATCH + 1)]
    assert [len(codes) for codes in [list(c) for c in world.lanes.get(jobs)]] == [BATCH, BATCH + 1]


@pytest.mark.parametrize(("damage", "code"), [
    (lambda store: store.flip(name(1), 77), Code.WRONG), (lambda store: store.flip(name(1), UNIT + 20), Code.NO_SEAL),
    (lambda store: store.objects.update({name(1): store.objects[name(0)]}), Code.ANOTHER),
    (lambda store: store.objects.update({name(1): bytes(len(store.objects[name(1)]))}), Code.NO_SEAL),
    (lambda store: store.objects.pop(name(1)), Code.MISSING),
], ids=["a flipped bit", "a flipped bit of the seal", "another's value", "zeros", "none"])  # fmt: skip
def test_damage_is_told_ends_the_load_and_is_replaced(world, damage, code):
    numbers = range(BATCH + 3)
    wanted = store_pages(world, numbers)
    damage(world.store)
    jobs = [Job(40 + number, name(number)) for number in numbers]
    codes = read(world, jobs)
    first = [Code.OK, code] + [Code.OK] * (BATCH - 2)
    assert codes == first + [Code.MISSING] * 3, "the second batch is not read"
    assert (world.units[40 + BATCH :] == POISON)[:3].all()
    world.store.calls.clear()
    for number, bytes_ in wanted.items():
        world.units[number] = bytes_
    codes = write(world, [Piece(number, 0, key(number)) for number in numbers])
    assert codes == [Code.KNOWN, Code.OK] + [Code.KNOWN] * (BATCH + 1)
    removed = [names for call, names in world.store.calls if call == "remove"]
    assert removed == ([] if code is Code.MISSING else [(name(1),)])
    assert world.lanes.in_doubt() == (code is not Code.MISSING)
    assert read(world, jobs) == [Code.OK] * len(jobs)
    assert all((world.units[40 + number] == wanted[number]).all() for number in numbers)
    assert read(world, [Job(40, name(70))]) == [Code.MISSING]  # what is known is forgotten
    assert set(write(world, [Piece(number, 0, key(number)) for number in numbers])) == {Code.KNOWN}, "once is enough"


def test_a_store_that_is_damaged_all_over_is_mended_in_one_turn(world):
    numbers = range(3 * BATCH)
    wanted = store_pages(world, numbers)
    for number in numbers[::2]:
        world.store.flip(name(number), 77)
    jobs = [Job(UNITS - 1 - number % (UNITS // 2), name(number)) for number in numbers[: UNITS // 2]]
    assert Code.WRONG in read(world, jobs)
    before = world.units.copy()
    while world.lanes.in_doubt():
        world.lanes.survey()
    assert (world.units == before).all(), "no unit is written"
    for number, bytes_ in wanted.items():
        world.units[number] = bytes_
    world.store.calls.clear()
    write(world, [Piece(number, 0, key(number)) for number in numbers[: UNITS // 2]])
    removed = [one for call, (one, *_) in world.store.calls if call == "remove"]
    assert removed == [name(number) for number in numbers[: UNITS // 2 : 2]], "and nothing that is right"
    assert read(world, jobs) == [Code.OK] * len(jobs)


def test_what_turned_out_wrong_is_not_known_by_an_older_answer(world):
    """The thread that writes asks, the one that reads finds the damage, and then the answer comes."""
    store_pages(world, [1])
    world.lanes._seen.forget()
    world.store.flip(name(1), 5)
    exists = world.store.exists
    world.store.exists = lambda names: (exists(names), read(world, [Job(9, name(1))]))[0]
    assert write(world, [Piece(1, 0, key(1))]) == [Code.KNOWN], "as it was"
    world.store.exists = exists
    assert write(world, [Piece(1, 0, key(1))]) == [Code.OK]


def test_the_backend_expects_each_object_once_and_before_it_is_read(world):
    numbers = range(4 * BATCH + 3)
    store_pages(world, numbers)
    jobs = [Job(number, name(number)) for number in numbers]
    for codes in world.lanes.get(jobs):
        told = [each for call in world.store.expected for each in call]
        assert told == [job.name for job in jobs][: min(len(codes) + AHEAD, len(jobs))]
    assert len(codes) == len(jobs)


def test_what_cannot_be_removed_fails_and_is_tried_again(world):
    store_pages(world, [1])
    world.store.flip(name(1), 5)
    read(world, [Job(9, name(1))])
    remove, world.store.remove = world.store.remove, lambda name: False
    assert write(world, [Piece(1, 0, key(1))]) == [Code.FAILED]
    world.store.remove = remove
    assert write(world, [Piece(1, 0, key(1))]) == [Code.OK]
    assert read(world, [Job(9, name(1))]) == [Code.OK]


def test_a_backend_that_says_yes_and_reads_nothing_is_not_believed(world):
    store_pages(world, [1])
    assert read(world, [Job(9, name(1))]) == [Code.OK]
    world.store.get = lambda names, slots: [Code.OK] * len(names)  # the slot has the right bytes of the last read
    assert read(world, [Job(9, name(1))]) == [Code.NO_SEAL]


def test_a_write_into_the_slot_between_check_and_copy_reaches_nobody(world, monkeypatch):
    """A late read of the backend comes at the worst moment: after the copy, before the check; and after the check."""
    wanted = store_pages(world, [1])
    real = module.check

    def late(raw, payload, *rest):
        world.ring.slot(BATCH)[:] = 0xEE
        code = real(raw, payload, *rest)
        world.ring.slot(BATCH)[:] = 0xEE
        return code

    monkeypatch.setattr(module, "check", late)
    codes = read(world, [Job(9, name(1))])
    assert codes == [Code.OK], "the arena was not what was checked"
    assert (world.units[9] == wanted[1]).all()


def test_a_write_into_the_slot_during_the_copy_is_wrong(world, monkeypatch):
    store_pages(world, [1])
    real = np.copyto

    def torn(target, source):
        real(target[: UNIT // 2], source[: UNIT // 2])
        world.ring.slot(BATCH)[:] = 0xEE
        real(target[UNIT // 2 :], source[UNIT // 2 :])

    monkeypatch.setattr(module.np, "copyto", torn)
    assert read(world, [Job(9, name(1))]) == [Code.WRONG]


def test_what_is_known_is_not_put_nor_asked_for_again(world):
    store_pages(world, range(4))
    world.store.calls.clear()
    assert write(world, [Piece(unit, 0, key(unit)) for unit in range(4)]) == [Code.KNOWN] * 4
    assert world.store.calls == []


def test_what_another_put_is_found_and_not_put(world):
    other = Lanes(world.units.reshape(-1), UNIT, TAIL, world.store, world.ring, world.secret, lambda lane: None)
    list(other.put(GROUP, [Piece(0, 0, key(0))], lambda n: None))
    world.store.calls.clear()
    assert write(world, [Piece(0, 0, key(0)), Piece(1, 0, key(1))]) == [Code.KNOWN, Code.OK]
    assert [names for call, names in world.store.calls if call == "put"] == [(name(1),)]


def test_a_failure_forgets_what_is_known(world):
    store_pages(world, [0])
    world.store.refused.add(name(1))
    assert write(world, [Piece(1, 0, key(1))]) == [Code.FAILED]
    world.store.objects.clear()  # the store was restarted
    world.store.refused.clear()
    assert write(world, [Piece(0, 0, key(0)), Piece(1, 0, key(1))]) == [Code.OK, Code.OK]
    world.store.objects.clear()
    assert read(world, [Job(9, name(0))]) == [Code.MISSING]
    assert write(world, [Piece(0, 0, key(0))]) == [Code.OK]


def test_an_error_forgets_too_and_is_raised(world):
    store_pages(world, [0])

    def breaks(*_):
        raise OSError("gone")

    put, world.store.put = world.store.put, breaks
    with pytest.raises(OSError, match="gone"):
        write(world, [Piece(1, 0, key(1))])
    world.store.put = put
    world.store.objects.clear()
    assert write(world, [Piece(0, 0, key(0))]) == [Code.OK]


def test_no_more_names_are_remembered_than_allowed(world, monkeypatch):
    monkeypatch.setattr(module, "MOST_SEEN", 2)
    store_pages(world, range(3))
    world.store.calls.clear()
    write(world, [Piece(unit, 0, key(unit)) for unit in range(3)])
    assert world.store.calls == [("exists", (name(0),))], "the oldest is asked for, and it alone"
    write(world, [Piece(2, 0, key(2))])  # used now, so that the next to go is 0
    store_pages(world, [4])
    world.store.calls.clear()
    write(world, [Piece(2, 0, key(2))])
    assert world.store.calls == []


def test_a_full_disk_is_told_and_nothing_is_copied(world):
    world.store.free = False
    assert write(world, [Piece(0, 0, key(0)), Piece(1, 0, key(1))]) == [Code.FULL, Code.FULL]
    assert not world.store.objects
    world.store.free = True
    assert write(world, [Piece(0, 0, key(0))]) == [Code.OK]


def test_reads_and_writes_have_slots_of_their_own(world):
    used = {"put": set(), "get": set()}
    put, get = world.store.put, world.store.get
    world.store.put = lambda names, slots, group: used["put"].update(slots) or put(names, slots, group)
    world.store.get = lambda names, slots: used["get"].update(slots) or get(names, slots)
    store_pages(world, range(BATCH))
    read(world, [Job(40 + number, name(number)) for number in range(BATCH)])
    assert len(used["put"]) == len(used["get"]) == BATCH
    assert not used["put"] & used["get"] and max(used["put"] | used["get"]) < SLOTS


def test_each_call_is_between_two_beats_of_its_lane(world):
    seen = []
    put, get = world.store.put, world.store.get
    world.store.put = lambda *a: seen.append(list(world.beats)) or put(*a)
    world.store.get = lambda *a: seen.append(list(world.beats)) or get(*a)
    world.store.expect = lambda names: seen.append(list(world.beats))
    store_pages(world, [0])
    assert seen[-1][-1] == PUT and len(seen[-1]) % 2 == 1 and world.beats[-1] == PUT
    world.beats.clear()
    read(world, [Job(9, name(0))])
    assert seen[-2:] == [[GET], [GET] * 3] and world.beats == [GET] * 4


def test_all_batches_of_a_write_have_its_group(world):
    store_pages(world, range(BATCH + 1))
    assert world.store.groups == [GROUP.hex()] * 2


# Questions


def store_point(world, end, pages=None, parts=TAIL):
    """Writes the pages before ``end`` and its window, straight into the store."""
    for number in range(end) if pages is None else pages:
        list(world.lanes.put(GROUP, [Piece(0, 0, key(number))], lambda n: None))
    for part in range(TAIL - parts + 1, TAIL + 1):
        list(world.lanes.put(GROUP, [Piece(0, part, key(end - 1))], lambda n: None))


@pytest.fixture(params=[False, True], ids=["exists", "by reading"])
def asking(world, request):
    world.store.mute = request.param
    return world


def chain_of(count):
    return [key(number) for number in range(count)]


def test_the_longest_point_is_found(asking):
    store_point(asking, 3)
    store_point(asking, 6)
    ask = asking.lanes.ask
    assert ask(chain_of(9), 0, 0) == 6
    assert ask(chain_of(5), 0, 0) == 3
    assert ask(chain_of(2), 0, 0) == 0
    assert ask(chain_of(9), 3, 3) == 6
    assert ask(chain_of(9), 6, 6) == 0, "what is here is not wanted"
    assert ask([], 0, 0) == 0


def test_a_missing_page_shortens_it_unless_it_is_here(asking):
    store_point(asking, 3)
    store_point(asking, 6)
    asking.store.objects.pop(name(4))
    assert asking.lanes.ask(chain_of(9), 0, 0) == 3
    asking.store.objects.pop(name(1))
    assert asking.lanes.ask(chain_of(9), 0, 0) == 0
    assert asking.lanes.ask(chain_of(9), 0, 2) == 3
    assert asking.lanes.ask(chain_of(9), 0, 5) == 6


@pytest.mark.parametrize("part", range(1, TAIL + 1))
def test_a_window_is_all_of_its_units(asking, part):
    store_point(asking, 3)
    store_point(asking, 6)
    asking.store.objects.pop(name(5, part))
    assert asking.lanes.ask(chain_of(9), 0, 0) == 3


def test_pages_that_are_here_are_asked_for_all_the_same(world):
    """Stores take a question for use: without it they evict the head of a long session first."""
    store_point(world, 6)
    world.store.calls.clear()
    assert world.lanes.ask(chain_of(6), 0, 5) == 6
    asked = {one for call, names in world.store.calls for one in names}
    assert {name(number) for number in range(6)} <= asked


def test_wrong_bytes_are_not_found_by_reading(world):
    world.store.mute = True
    store_point(world, 3)
    world.store.flip(name(1), 3)
    assert world.lanes.ask(chain_of(3), 0, 0) == 0


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_chain_is_that_of_the_tokens(world, ahead):
    ids = np.random.default_rng(5).integers(0, 129280, 4 * 256 + ahead, np.int32)
    before, wanted = b"r" * 32, []
    for page in range(4):
        raw = ids[page * 256 : (page + 1) * 256 + ahead].astype("<i8").tobytes()
        if world.secret is None:
            before = hashlib.sha256(before + raw).digest()
        else:
            import blake3

            secret = blake3.blake3(world.secret, derive_key_context="sglang_dsv4 store 2026 key").digest()
            before = blake3.blake3(before + raw, key=secret).digest()
        wanted.append(before)
    assert world.lanes.chain(Question(b"r" * 32, 0, 0, 4, 256, ahead, 0), ids) == wanted
