"""The store holds exactly the points that its hints, its room and its clock leave, and gives back their very bytes.

STORE_EXAMPLES=N runs N lives: fixed ones up to the usual number, others at every run where N is more.
"""

from __future__ import annotations

import logging
from array import array

import oracle
import pytest
from builders import FakeEvent
from server_fixture import Recorder
from stateful import examples, store
from stateful.pool import PAGE, SPEC, Device

from sglang_dsv4.cache.units import Units
from sglang_dsv4.errors import CopyEngineError
from sglang_dsv4.hostmem.sizing import ArenaSize
from sglang_dsv4.pools.copy_service import CopyService, SaveRequest
from sglang_dsv4.pools.describe import describe
from sglang_dsv4.sessions.hints import Hints, Rank
from sglang_dsv4.sessions.store import SessionStore
from sglang_dsv4.settings import Settings

# In bytes, of the layers 0, 4 and 128. A page: 37,440 of c4, 8,448 of its indexer, 1,728 of c128; twelve system pages.
# Before a page end there live 127 rows of 584 in each layer, 4 states of 8,192, and 4 of 2,048: 263,464, so 5.4 units.
# Before the last token of a page there live 7 such states and 127 of 4,096 besides: 814,376, so 16.6 units.
UNIT, TAIL, LONGEST_TAIL = 49_152, 6, 17


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.CRITICAL)


@pytest.fixture(scope="module")
def device():
    return Device(SPEC)


def test_random_lives_of_sessions(device):
    store.StoreLives.device = device
    wanted = (
        "keep right", "keep wrong", "keep refused", "kept already", "kept again", "no room, and none evicted",
        "evicted ahead",
        "too many held", "load", "look up", "looked up behind a node", "evicted", "hints left", "superseded pages",
        "expired", "found wrong", "looked up again", "kept when not clean", "partial given up", "retract", "resume",
        "settle", "weights", "flush", "wait",
        "pages shared", "adopted", "superseded",
    )  # fmt: skip
    examples("STORE_EXAMPLES", 40, store.StoreLives, 50, store.done, *wanted)


class Sessions:
    """Keeps prompts of equal tokens, each of its own number, in a store with room for ``units``. most: of them."""

    def __init__(self, device, units=24, most=None, bigram=False):
        device.start()
        self.pool, self.allocator, self.now = device.pool, device.allocator, 0.0
        side, least = describe(self.pool), 1 + LONGEST_TAIL
        size = ArenaSize(Units.of(side.geometry), max(units, least))
        self.host = CopyService(side, size, Settings(transfer="torch"))
        if units < least:  # another copy has the rest
            self.other = self.host.memory.allocate((least - units) * PAGE, side.geometry, tail=False)
        nbytes = None if most is None else most * UNIT
        self.store = SessionStore(self.host, lambda: self.allocator.full_to_swa_index_mapping, bigram, nbytes)
        self.store.order.clock = lambda: self.now

    @property
    def free(self):
        return self.host.memory.pool.available

    def keep(
        self, number, pages, hints=Hints(), namespace="a", behind=None, tokens=None, window=True  # noqa: B008  # frozen
    ):  # fmt: skip
        slots = oracle.resume(self.allocator, pages * PAGE)
        tokens = tokens or array("q", [number] * (pages * PAGE + 1))
        point = self.store.keep(namespace, lambda first: tokens[first:], slots.int(), hints, behind, window)
        self.allocator.free(slots)
        self.store.check_integrity()
        self.host.memory.check_integrity()
        return point

    def save(self, slots, slot, saved=()):
        request = self.host.request(slots.int(), self.allocator.full_to_swa_index_mapping, slot)
        return self.host.save(SaveRequest(request, saved))

    def find(self, number, namespace="a", tokens=12 * PAGE, node=None):
        point = self.store.lookup.longest(namespace, array("q", [number] * tokens), tokens, node).point
        return 0 if point is None else point.tokens // PAGE


def test_tokens_that_differ_in_their_high_bits_share_nothing(device):
    sessions = Sessions(device)
    sessions.keep(2**32 + 7, 2)
    assert (sessions.find(7), sessions.find(2**32 + 7)) == (0, 2)


def test_a_point_that_never_fits_evicts_nothing(device):
    """Else one long prompt takes the caches of all agents, and is not kept itself."""
    sessions = Sessions(device, 16)
    sessions.keep(1, 2), sessions.keep(2, 2)
    assert sessions.keep(3, 11) is None
    assert (sessions.find(1), sessions.find(2)) == (2, 2) and not sessions.store.counters.evicted
    limited = Sessions(device, most=16)
    limited.keep(1, 2), limited.keep(2, 2)
    assert limited.keep(1, 11) is None
    assert (limited.find(1), limited.find(2)) == (2, 2)
    assert limited.keep(3, 1).tokens == PAGE, "the oldest goes, for all that fits"
    assert (limited.find(1), limited.find(2)) == (0, 2)


def test_priorities_of_clients_leave_nothing_behind(device):
    sessions = Sessions(device)
    for priority in range(50):
        sessions.keep(1, 1, Hints(Rank.RETAINED, priority))
    assert len(sessions.store.order._places) == len(sessions.store.order._sorted) == 1
    sessions.store.clear("flush")
    assert not sessions.store.order._places and not sessions.store.order._sorted


@pytest.mark.parametrize("gone", ["evicted", "weights"])
def test_a_point_that_is_gone_is_not_kept_again(device, monkeypatch, gone):
    sessions = Sessions(device, 2 + TAIL)
    point = sessions.keep(1, 2)
    assert sessions.store.keep_again(point)
    if gone == "evicted":
        sessions.keep(2, 2)
    else:
        monkeypatch.setattr(sessions.store, "_weights", "others")
    assert not sessions.store.keep_again(point)
    assert [one.tokens for one in sessions.store.order] == ([2 * PAGE] if gone == "evicted" else [])
    sessions.store.check_integrity()


def test_what_is_told_of_the_memory_is_right_after_a_save_that_failed(device, monkeypatch):
    sessions = Sessions(device, 2 + 2 * TAIL)
    sessions.keep(1, 2)
    sessions.store.end_pass()
    assert sessions.store.counters.held_bytes == sessions.store.kept.held_bytes == (2 + TAIL) * UNIT
    slots = oracle.resume(device.allocator, 3 * PAGE)
    oracle.evict(device.allocator, slots, len(slots))  # its window is gone: the save is refused
    sessions.store.keep("a", lambda first: array("q", [1] * 3 * PAGE)[first:], slots.int())
    device.allocator.free(slots)
    sessions.store.end_pass()
    assert sessions.host.counters.fallbacks["WindowNotMapped"] == 1
    told, held = sessions.store.counters.held_bytes, sessions.store.kept.held_bytes
    assert told == held == 0, "its window took the other point's"


def test_a_window_that_could_not_be_saved_takes_nothing_with_it(device, monkeypatch):
    """Three agents have one system prompt: of the point at its end the window alone is new."""
    sessions = Sessions(device, 4 + 4 * TAIL)
    agents = [array("q", [5] * PAGE + [agent] * (PAGE + 1)) for agent in range(3)]
    for tokens in agents:
        sessions.keep(0, 2, tokens=tokens)
    sessions.store.end_pass()
    with monkeypatch.context() as patch:
        patch.setattr(sessions.host._copier, "save", Recorder(error=CopyEngineError("played")))
        sessions.keep(5, 1)
    assert sessions.free == 0, "it took the last units"
    with sessions.store.pages_of("a", agents[0], 2 * PAGE) as shared:
        assert len(shared) == 2, "its page is as good as before"
    sessions.store.end_pass()
    assert sessions.free == TAIL and sessions.host.counters.fallbacks["CopyEngineError"] == 1
    assert [sessions.store.lookup.longest("a", tokens, 2 * PAGE).point.tokens for tokens in agents] == [2 * PAGE] * 3
    assert sessions.find(5) == 0 and dict(sessions.store.counters.evicted) == {"fault": 1}


def test_a_namespace_reads_its_own_cache_alone(device):
    """Trap 10: a tenant's salt, an adapter."""
    sessions = Sessions(device)
    sessions.keep(1, 1, namespace=("lora", "salt"))
    assert sessions.find(1, ("lora", "salt")) == 1
    assert not any(sessions.find(1, other) for other in (("lora", None), (None, "salt"), ("lora", "pepper")))


def test_behind_a_node_of_the_tree_the_new_pages_alone_are_looked_up(device):
    """Its tokens were compared by the tree: others are given here, which a look-up of all would not find."""
    sessions = Sessions(device)
    points = [sessions.keep(1, pages) for pages in (1, 2, 3)]

    def find(node, limit=12 * PAGE, like=1):
        tokens = array("q", [9] * 2 * PAGE + [like] * 10 * PAGE)
        return sessions.store.lookup.longest("a", tokens, limit, node).point

    sessions.store.lookup.remember_node(points[1], "node", 2 * PAGE + 1)
    sessions.store.lookup.remember_node(points[1], None, 2 * PAGE)
    assert find("node") is find(None) is None, "the node does not end at the point, and None is no node"
    sessions.store.lookup.remember_node(points[1], "node", 2 * PAGE)
    assert find("node") is points[2]
    assert find("node", like=7) is find("node", 3 * PAGE - 1) is find("node", 2 * PAGE) is points[1]
    assert find("node", 2 * PAGE - 1) is find("another") is find(None) is None
    assert sessions.find(1, tokens=2 * PAGE - 1, node="node") == 1, "the tree may have more than is asked for"


def test_with_drafts_a_point_needs_the_token_behind_it(device):
    sessions = Sessions(device, bigram=True)
    sessions.store.lookup.remember_node(sessions.keep(1, 1), "node", PAGE)
    sessions.keep(1, 2)
    for node in (None, "node"):
        found = [sessions.find(1, tokens=tokens, node=node) for tokens in (PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1)]
        assert found == [0, 1, 1, 2], node


def test_a_node_is_forgotten_with_its_point(device):
    sessions = Sessions(device)
    points = [sessions.keep(1, pages) for pages in (1, 2)]
    for point, node in zip(points, ("first", "second"), strict=True):
        sessions.store.lookup.remember_node(point, node, point.tokens)
    sessions.store.lookup.remember_node(points[1], "a fork's", 2 * PAGE)
    assert sessions.store.lookup._at == {"first": points[0], "a fork's": points[1]}, (
        "a point has one node, the last one"
    )
    sessions.store.check_integrity()
    sessions.store.kept.make_room(16)
    assert (sessions.find(1, node="first"), sessions.find(1, node="a fork's")) == (2, 2)
    sessions.store.lookup.remember_node(points[0], "first", PAGE)
    sessions.store.check_integrity()
    sessions.store.clear("flush")
    assert not sessions.store.lookup._at and sessions.find(1, node="a fork's") == 0


def test_a_load_keeps_the_point(device):
    """Trap 5: the second fork loads it, too."""
    sessions = Sessions(device)
    point = sessions.keep(1, 2)
    for _ in range(2):
        slots = oracle.resume(device.allocator, 2 * PAGE)
        sessions.store.load(point, slots, 0)
        device.allocator.free(slots)
    assert sessions.find(1) == 2


def test_pages_go_from_the_end(device):
    """Trap 19: a page is kept while any page or point is behind it."""
    sessions = Sessions(device)
    sessions.keep(1, 1), sessions.keep(1, 3)
    assert sessions.free == 24 - 3 - 2 * TAIL
    sessions.store.kept.make_room(15)  # the first point goes with its tail; its page is in the way of the second
    assert (sessions.find(1), sessions.free) == (3, 24 - 3 - TAIL)
    sessions.store.kept.make_room(16)
    assert sessions.free == 24


def test_a_point_of_pages_alone_frees_no_tail(device):
    """Counted with one, the first point would seem to be enough."""
    sessions = Sessions(device)
    sessions.keep(1, 2, window=False), sessions.keep(2, 2)
    assert sessions.free == 24 - 2 - 2 - TAIL
    sessions.store.kept.make_room(sessions.free + TAIL)
    assert sessions.free == 24


def test_chats_fill_the_memory_to_its_last_units(device):
    """Windows have no room of their own that could be full while pages are free."""
    chats = 5
    sessions = Sessions(device, chats * (2048 // PAGE + TAIL))
    for number in range(chats):
        sessions.keep(number, 2048 // PAGE)
        sessions.store.end_pass()
    assert (sessions.store.points, sessions.free, dict(sessions.store.counters.evicted)) == (chats, 0, {})
    sessions.keep(chats, 2048 // PAGE)
    assert [sessions.find(number) for number in range(chats + 1)] == [0, *[2048 // PAGE] * chats]


@pytest.mark.parametrize(
    ("tokens", "needs", "left"), [(2 * PAGE, 2 + TAIL, [2, 0, 2]), (2 * PAGE - 1, 2 + LONGEST_TAIL, [0, 0, 0])]
)
def test_a_memory_full_of_sessions_has_room_for_a_retract(device, tokens, needs, left):
    """As many go as its own tail needs, the first to go first; the pin of the first one goes last."""
    sessions = Sessions(device, 3 * (2 + TAIL))
    for number in range(3):
        sessions.keep(number, 2, Hints() if number else Hints(Rank.PINNED, ttl_seconds=60.0))
    assert sessions.free == 0
    slots = oracle.resume(sessions.allocator, tokens)
    copy = sessions.save(slots, 0)
    sessions.allocator.free(slots)
    assert len(copy.units) == needs and [sessions.find(number) for number in range(3)] == left
    copy.release()


def test_a_retract_that_evicts_the_point_of_its_own_pages_keeps_them(device):
    sessions = Sessions(device)
    saved = sessions.store.trie.path(sessions.keep(1, 2).page)
    sessions.keep(2, 8)
    slots = oracle.resume(sessions.allocator, 2 * PAGE)
    copy = sessions.save(slots, 0, saved)
    sessions.allocator.free(slots)
    assert (sessions.find(1), sessions.find(2)) == (0, 8) and copy.pages(0) == saved
    sessions.host.memory.check_integrity()
    copy.release()


@pytest.mark.parametrize("by", ["save", "load"])
def test_a_window_is_not_written_while_a_transfer_may_read_or_write_it(device, monkeypatch, by):
    """Its point goes for a longer one, and that one's save takes its units at once."""
    sessions, event = Sessions(device, 3 + TAIL), FakeEvent()
    real = getattr(sessions.host._copier, by)

    def transfer(copy, *given):
        copy.lease.used_by = event
        return real(copy, *given)

    monkeypatch.setattr(sessions.host.pages_in_use, "wait_on_the_stream", lambda: None)
    with monkeypatch.context() as patch:
        if by == "save":
            patch.setattr(sessions.host._copier, by, transfer)
        point = sessions.keep(1, 2)
        if by == "load":
            patch.setattr(sessions.host._copier, by, transfer)
            slots = oracle.resume(device.allocator, 2 * PAGE)
            sessions.store.load(point, slots, 0)
            device.allocator.free(slots)
    tail = list(point.tail)
    longer = sessions.keep(1, 3, behind=point)
    assert set(tail) <= {longer.page, *longer.tail} and event.waits == 1


def test_the_units_of_a_point_that_went_rest_before_they_are_taken_again(device):
    sessions = Sessions(device)
    point = sessions.keep(1, 2)
    young = {*point.tail, *sessions.store.trie.path(point.page)}
    sessions.store.clear("flush")
    other = sessions.keep(2, 2)
    assert young.isdisjoint({*other.tail, *sessions.store.trie.path(other.page)})


def test_behind_a_point_that_went_meanwhile_all_pages_are_kept_anew(device):
    sessions = Sessions(device)
    point = sessions.keep(1, 2)
    sessions.store.clear("flush")
    sessions.keep(2, 2)
    sessions.keep(1, 3, behind=point)
    assert (sessions.find(1), sessions.find(2)) == (3, 2)


def test_a_look_up_does_not_go_on_from_a_page_that_went_meanwhile(device):
    sessions = Sessions(device)
    sessions.keep(1, 2)
    tokens = array("q", [1] * (12 * PAGE))
    found = sessions.store.lookup.longest("a", tokens, len(tokens))
    sessions.store.clear("flush")
    sessions.keep(1, 3)
    assert sessions.store.lookup.longest("a", tokens, len(tokens), None, found).point.tokens == 3 * PAGE


def test_pages_of_a_long_prompt_are_held_by_its_last_point_alone(device):
    """No prompt can go on where only pages are kept."""
    sessions = Sessions(device)
    first = sessions.keep(1, 2, window=False)
    second = sessions.keep(1, 4, behind=first, window=False)
    assert list(sessions.store.order) == [second] and sessions.find(1) == 0
    assert sessions.store.kept.held_bytes == 4 * UNIT
    sessions.keep(1, 5, behind=second)
    assert sessions.store.points == len(sessions.store.order) == 1 and sessions.find(1) == 5


def test_room_is_made_ahead_of_the_saves_that_need_it(device):
    """A save then evicts nothing, and finds the neighbouring units of whole sessions."""
    sessions = Sessions(device, 160)
    for number in range(10):
        sessions.keep(number, 9, Hints(Rank.PINNED, ttl_seconds=60) if number == 0 else Hints())
        sessions.store.end_pass()
    assert sessions.store.counters.evicted == {} and sessions.free == 160 - 10 * (9 + TAIL), "ten units, so enough"
    sessions.keep(10, 3)
    sessions.store.end_pass()
    assert sessions.store.counters.evicted == {"room": 1} and sessions.free == 1 + 9 + TAIL
    assert (sessions.find(0), sessions.find(1), sessions.find(2)) == (9, 0, 9)
    sessions.store.kept.few, sessions.store.kept.enough = sessions.free + 1, sessions.free + 9 + TAIL + 1
    sessions.store.end_pass()
    assert [sessions.find(number) for number in range(5)] == [9, 0, 0, 0, 9], "several at once"
    sessions.store.kept.few = sessions.store.kept.enough = 160
    sessions.store.end_pass()
    assert (sessions.find(0), sessions.find(4)) == (9, 9), "a pin goes for none who may never come"


def test_the_way_to_a_point_stays_though_the_point_before_it_goes(device):
    """Its save has no units of these pages: others' must make room, and these stay where they are."""
    sessions = Sessions(device, 18)
    point = sessions.keep(1, 2)
    sessions.keep(2, 2)
    units = sessions.store.trie.path(point.page)
    longer = sessions.keep(1, 6, behind=point)
    assert sessions.store.trie.path(longer.page)[:2] == units
    assert dict(sessions.store.counters.evicted) == {"room": 2}
    assert (sessions.find(1), sessions.find(2)) == (6, 0)


def test_a_retract_that_fits_in_no_case_evicts_nothing(device):
    sessions = Sessions(device)
    sessions.keep(1, 2)
    sessions.store.kept.make_room(25)
    assert sessions.find(1) == 2


def test_what_better_points_hold_is_no_room(device):
    """A prompt that fits only without a pin takes no plain session with it, and is not kept itself."""
    sessions = Sessions(device)
    sessions.keep(1, 3, Hints(Rank.PINNED, ttl_seconds=60.0)), sessions.keep(2, 1), sessions.keep(3, 1)
    assert sessions.keep(4, 10) is None
    assert [sessions.find(number) for number in (1, 2, 3)] == [3, 1, 1] and not sessions.store.counters.evicted


def test_pages_that_a_waiting_copy_holds_are_no_room(device):
    """Its pages are here, too; to evict them frees nothing, and a retract that needs them takes no pin instead."""
    sessions = Sessions(device)
    sessions.keep(1, 2, Hints(Rank.PINNED, ttl_seconds=60.0))
    slots = oracle.resume(sessions.allocator, 3 * PAGE)
    copy = sessions.save(slots, 0)
    sessions.store.adopt("a", array("q", [7] * (3 * PAGE + 1)), copy)
    sessions.allocator.free(slots)
    held = sessions.host.memory.held_bytes
    assert held == copy.nbytes == (3 + TAIL) * UNIT == sessions.host.counters.held_bytes, "its alerts see all of it"
    sessions.store.kept.make_room(24 - 3 - TAIL + 1)
    assert sessions.find(1) == 2 and not sessions.store.counters.evicted
    sessions.store.kept.make_room(24 - 3 - TAIL)
    assert sessions.find(1) == 0 and sessions.host.memory.held_bytes == held
    point = sessions.keep(5, 2)
    units = sessions.store.trie.path(point.page)
    slots = oracle.resume(sessions.allocator, 2 * PAGE)
    beside = sessions.save(slots, 1, units)
    sessions.allocator.free(slots)
    sessions.store.kept.make_room(sessions.free + TAIL + 1)
    assert sessions.find(5) == 2, "its pages are that copy's"
    sessions.store.kept.make_room(sessions.free + TAIL)
    assert sessions.find(5) == 0
    copy.release(), beside.release()
    sessions.store.kept.make_room(24)
    assert sessions.host.memory.pool.held == sessions.host.memory.held_bytes == 0
    sessions.host.memory.check_integrity()


def test_pages_that_a_save_goes_on_from_are_not_let_go_for_its_room(device):
    """They stay, so that it would gain nothing, and the next retract of their request would save them again."""
    sessions = Sessions(device)
    slots = oracle.resume(sessions.allocator, 2 * PAGE)
    copy = sessions.save(slots, 0)
    sessions.store.adopt("a", array("q", [1] * (2 * PAGE + 1)), copy)
    sessions.allocator.free(slots)
    copy.release()
    sessions.keep(2, 2)
    sessions.keep(3, 2)
    assert sessions.keep(1, 3) and sessions.find(1) == 3 and sessions.find(2) == 0
    assert [point.tokens // PAGE for point in sessions.store.order] == [2, 2, 3], "and 1's pages alone are there"


def test_a_request_without_hints_leaves_those_of_others(device):
    sessions = Sessions(device)
    sessions.keep(1, 2, Hints(Rank.PINNED, ttl_seconds=60.0))
    prefetched, bad = Hints(prefetch=True), Hints(outcomes=(("kv.pin", "bad"),))
    for hints in (prefetched, bad):
        assert sessions.keep(1, 2, hints).order[0] is Rank.PINNED, "they have no rank"
    for hints, rank in ((Hints(), Rank.PINNED), (Hints(Rank.DEMOTED), Rank.DEMOTED), (Hints(), Rank.PLAIN)):
        assert sessions.keep(1, 2, hints).order[0] is rank


@pytest.mark.parametrize(("units", "most"), [(24, 2 * (2 + TAIL)), (24, 2 * (2 + TAIL) + 1), (18, None)])
def test_pins_hold_half_of_what_sessions_may_hold(device, units, most):
    sessions = Sessions(device, units, most=most)
    assert sessions.keep(1, 2, Hints(Rank.PINNED, ttl_seconds=60.0)).order[0] is Rank.PINNED
    assert sessions.keep(2, 1, Hints(Rank.PINNED, ttl_seconds=60.0)).order[0] is Rank.PLAIN
    assert sessions.keep(3, 1, Hints(Rank.RETAINED, priority=9, ttl_seconds=60.0)).order == (Rank.PLAIN, 0)
    hints = sessions.store.counters.hints
    assert (hints["kv.pin", "full"], hints["kv.retain", "full"]) == (1, 1)
    less = Sessions(device, 24, most=2 * (2 + TAIL) - 1)
    assert less.keep(1, 2, Hints(Rank.PINNED, ttl_seconds=60.0)).order[0] is Rank.PLAIN


def test_turns_of_one_conversation_count_as_the_pages_that_they_hold(device):
    """Each turn leaves a pinned point; counted with all pages before it, the newest would soon be refused."""
    sessions = Sessions(device, 2 * (5 + 3 * TAIL))
    for pages, rank in ((3, Rank.PINNED), (4, Rank.PINNED), (5, Rank.PINNED), (6, Rank.PLAIN), (5, Rank.PINNED)):
        assert sessions.keep(1, pages, Hints(Rank.PINNED, ttl_seconds=60.0)).order[0] is rank
    assert (sessions.store.order.held_points, len(sessions.store.order.held_pages)) == (3, 5)
    sessions.store.clear("flush")
    assert (sessions.store.order.held_points, len(sessions.store.order.held_pages)) == (0, 0)


def test_a_retract_evicts_no_point_for_pages_that_it_shares(device):
    """Its own beginning is kept: to evict that point frees no page for the rest."""
    sessions = Sessions(device)
    sessions.keep(1, 1)
    sessions.store.end_pass()
    tokens = array("q", [1] * 5 * PAGE)
    with sessions.store.pages_of("a", tokens, 4 * PAGE) as shared:
        assert len(shared) == 1
        sessions.store.kept.make_room(24)
    assert sessions.find(1) == 1


def test_a_pin_whose_time_is_over_goes_before_others_for_a_retract(device):
    sessions = Sessions(device)
    sessions.keep(1, 2, Hints(Rank.PINNED, ttl_seconds=60.0))
    sessions.keep(2, 2)
    sessions.now = 61.0
    sessions.store.kept.make_room(12)
    assert (sessions.find(1), sessions.find(2)) == (0, 2)


def test_a_pin_that_is_not_allowed_takes_no_room_of_a_pin(device):
    """Pins hold half of the units at most: one client with too many would evict those of all others."""
    sessions = Sessions(device)
    sessions.keep(1, 3, Hints(Rank.PINNED, ttl_seconds=60.0))
    assert sessions.keep(2, 10, Hints(Rank.PINNED, ttl_seconds=60.0)) is None
    assert sessions.find(1) == 3
    assert sessions.store.counters.hints["kv.pin", "full"] == 1
