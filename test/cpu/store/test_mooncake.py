"""A real Mooncake over loopback: what the store does where its master, its owner of memory or a writer dies or hangs.

A client's limits are seconds here, so that a test takes seconds; each test says how long a call may take.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import mooncake_store
import pytest
from mooncake_store import SHORT_TIMEOUTS, Mooncake, is_running
from processes import FORK
from store_conformance import Conformance, check_replaced
from store_node import UNIT, Node, Thing, chain, pages

from sglang_dsv4.store.wire import Code

MISSING = mooncake_store.why_missing()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

CLIENT_TTL = 2  # seconds until the master takes one that is silent for dead
DISCARD = 2  # seconds until it forgets a put that was not ended
LIMIT = 20  # seconds that a call may take where something does not answer; 30 and 60 by Mooncake's own limits


@pytest.fixture(scope="module", autouse=True)
def _imported():
    """Nodes are forked, and find the engine's class imported."""
    import sglang.srt.mem_cache.storage.mooncake_store.mooncake_store  # noqa: F401


@pytest.fixture
def store(tmp_path):
    times = {"client_ttl": CLIENT_TTL, "put_start_discard_timeout_sec": DISCARD}
    with Mooncake(tmp_path, put_start_release_timeout_sec=2 * DISCARD, **times) as one:
        yield one


def node_of(store: Mooncake, **more) -> Node:
    return Node("mooncake", store.config, SHORT_TIMEOUTS, **more)


@pytest.fixture
def nodes(store):
    """Two servers."""
    with node_of(store) as one, node_of(store) as other:
        yield one, other


def good(codes: list[Code]) -> bool:
    return set(codes) <= {Code.OK, Code.KNOWN}


def is_refused(codes: list[Code]) -> bool:
    """Returns whether nothing was read or stored, and nothing was said of anybody's bytes."""
    return set(codes) <= {Code.MISSING, Code.FAILED}


def eventually(question: Callable[[], bool], why: str) -> None:
    end = time.monotonic() + LIMIT
    while not question():
        assert time.monotonic() < end, why
        time.sleep(0.2)


def wait_until_gone(node: Node, things: list[Thing]) -> None:
    eventually(lambda: not any(node.call("exists", things)), "a dead owner's objects are said to be there")


def stored_again(writer: Node, reader: Node, things: list[Thing]) -> bool:
    """Reads; where that fails, tells the writer so by a read, and writes."""
    if good(reader.call("get", things, seconds=LIMIT)):
        return True
    writer.call("get", things, seconds=LIMIT)
    writer.call("put", things, seconds=LIMIT)
    return False


class TestConformance(Conformance):
    @pytest.fixture(scope="class")
    def nodes(self, tmp_path_factory):
        with ExitStack() as stack:
            store = stack.enter_context(Mooncake(tmp_path_factory.mktemp("mooncake"), segment="128MB"))
            yield lambda **more: stack.enter_context(node_of(store, **more))

    @pytest.mark.parametrize("nbytes", [1, UNIT // 2, UNIT])
    def test_a_short_value_counts_for_the_engine_as_read_and_is_replaced(self, writer, reader, nbytes):
        things = pages(f"short {nbytes}", 3)
        assert writer.call("raw_put", things[1], nbytes) == 0
        writer.call("put", [things[0], things[2]])
        check_replaced(reader, writer, things, Code.NO_SEAL)

    def test_a_value_too_long_for_a_slot_is_not_read(self, writer, reader):
        things = pages("long", 3)
        assert writer.call("raw_put", things[1], 2 * UNIT) == 0
        assert reader.call("get", things)[1] not in (Code.OK, Code.KNOWN)

    def test_another_size_under_a_key_leaves_the_first(self, writer, nodes):
        """Units of another layout have other keys; where they had not, nobody would get wrong bytes."""
        small, large = pages("small", 2), pages("large", 2)
        with nodes(unit=UNIT // 2) as halves:
            halves.call("put", small)
            writer.call("put", large)
            assert writer.call("put", small) == halves.call("put", large) == [Code.KNOWN] * 2
            assert set(writer.call("get", small)) == {Code.NO_SEAL}
            assert Code.OK not in halves.call("get", large)
            assert set(halves.call("get", small)) == set(writer.call("get", large)) == {Code.OK}

    def test_a_chain_is_one_group(self, writer):
        one, other = (writer.call("groups", chain(word, 20)) for word in ("a", "b"))
        assert len(one) == len(other) == 1
        assert one != other

    def test_the_prefix_of_the_model_is_in_each_key(self, writer):
        """raw_put above would say nothing if it met other keys."""
        thing = Thing("raw", 0)
        writer.call("raw_put", thing, UNIT)
        assert writer.call("exists", [thing]) == [True]


def test_a_restarted_master_has_forgotten_all_and_takes_all_again(store, nodes):
    one, other = nodes
    things = chain("m", 20)
    assert good(one.call("put", things))
    store.master.kill()
    one.begin("put", chain("n", 2))
    assert is_refused(other.call("get", things, seconds=LIMIT))
    assert is_refused(one.end(LIMIT))
    store.start_master()
    store.wait_for_segment()
    for node in nodes:  # so none believes any more that they are there; the first call may meet an old connection
        eventually(lambda node=node: node.call("get", things) == [Code.MISSING] * 22, "what does it still have?")
    assert other.call("ask", "m", 20) == 0
    assert one.call("put", things) == [Code.OK] * 22
    assert other.call("get", things) == [Code.OK] * 22


def test_objects_die_with_their_owner_and_another_takes_them_again(store, nodes):
    one, other = nodes
    things = chain("o", 20)
    one.call("put", things)
    store.owner.kill()
    codes = other.call("get", things, seconds=LIMIT)  # while the master still says that they are there
    assert is_refused(codes) and Code.FAILED in codes, "an owner that died is told from objects that are gone"
    wait_until_gone(other, things)
    assert other.call("get", things, seconds=LIMIT) == [Code.MISSING] * 22
    assert other.call("put", things, seconds=LIMIT) == [Code.FAILED] * 22  # there is no memory at all
    store.start_owner()
    assert other.call("put", things) == [Code.OK] * 22
    assert one.call("get", things) == [Code.OK] * 22


def test_objects_outlive_their_writer(store, nodes):
    one, other = nodes
    things = chain("w", 20)
    one.call("put", things)
    one.kill()
    time.sleep(CLIENT_TTL + 1)
    assert good(other.call("get", things))


def test_a_writer_killed_in_the_midst_leaves_names_that_cannot_be_put_for_a_while(store, nodes):
    """A put of such a name says that it did, and stores nothing. A read says so, and then a put stores it."""
    one, other = nodes
    things = pages("k", 16)  # one call
    store.owner.hang()
    one.begin("put", things)
    time.sleep(0.5)
    one.kill()
    store.owner.go_on()
    assert other.call("exists", things) == [False] * 16
    assert other.call("put", things) == [Code.OK] * 16, "Mooncake has changed: it tells of the other's put"
    assert other.call("get", things) == [Code.MISSING] * 16
    eventually(partial(stored_again, other, other, things), "a put that nobody ended blocks its name for ever")


def test_a_master_that_hangs_costs_calls_and_no_objects(store, nodes):
    one, other = nodes
    things = chain("s", 8)
    one.call("put", things)
    store.master.hang()
    one.begin("put", chain("t", 2))
    assert is_refused(other.call("get", things, seconds=LIMIT))
    assert is_refused(one.end(LIMIT))
    store.master.go_on()
    store.wait_for_segment()
    eventually(lambda: good(other.call("get", things, seconds=LIMIT)), "the objects are lost")
    eventually(lambda: good(one.call("put", chain("u", 4), seconds=LIMIT)), "nothing can be put")


def test_an_owner_that_hangs_writes_nothing_late_into_the_arena(store, nodes):
    one, other = nodes
    things = chain("h", 8)
    one.call("put", things)
    assert good(other.call("get", things[:2]))  # connected
    store.owner.hang()
    one.begin("put", chain("i", 2))
    assert is_refused(other.call("get", things, seconds=LIMIT))
    other.call("poison")
    assert is_refused(one.end(LIMIT))
    store.owner.go_on()
    time.sleep(1)
    assert other.call("is_poison"), "a read that was given up wrote into units that have another owner"
    # The master took it for dead and forgot its objects; a client's next use of an old connection fails, too.
    eventually(partial(stored_again, one, other, things), "the owner does not come back")


@pytest.mark.parametrize("fault", ["kill", "hang"])
def test_a_store_that_does_not_answer_is_told_from_one_that_has_nothing(store, nodes, fault):
    """Else each question is a good answer, that nothing is stored, and the breaker never opens."""
    one, other = nodes
    getattr(store.master, fault)()
    one.begin("answers", pages("q", 2))
    assert Code.FAILED in other.call("get", pages("q", 2), seconds=LIMIT)
    assert not one.end(LIMIT)


def test_a_full_store_evicts_whole_chains(tmp_path):
    flags = {"default_kv_lease_ttl": 200, "eviction_ratio": 0.1}
    with Mooncake(tmp_path, segment="32MB", **flags) as store, node_of(store) as one, node_of(store) as other:
        chains = [chain(f"full {number}", 20) for number in range(8)]  # the store holds five of them
        stored = []
        for things in chains:
            stored.append(good(one.call("put", things)))
            time.sleep(0.3)  # longer than a lease
        there = [sum(other.call("exists", things)) for things in chains]
        read = [other.call("get", things) for things in chains]
    assert {0, 22} == {count for count, whole in zip(there, stored, strict=True) if whole}, (there, stored)
    assert all(good(codes) if count == 22 else Code.MISSING in codes for count, codes in zip(there, read, strict=True))


def test_what_the_owner_wrote_to_its_disk_outlives_owner_and_master(tmp_path):
    """The layout that docs/ recommends. The owner comes back after its time to live: see the next test."""
    disk = tmp_path / "disk"
    disk.mkdir()
    with Mooncake(tmp_path, disk=disk, client_ttl=CLIENT_TTL) as store, node_of(store) as one, node_of(store) as other:
        things = pages("disk", 14)
        one.call("put", things)
        eventually(lambda: len(list(disk.glob("*.meta"))) == 16, "not all is on the disk")  # an object of each server's
        store.owner.kill()
        wait_until_gone(other, things)
        store.wait_for_segment(there=False)
        store.start_owner()
        eventually(lambda: good(other.call("get", things)), "a new owner does not tell what is on its disk")
        store.master.kill()
        store.start_master()
        store.wait_for_segment()
        eventually(lambda: good(other.call("get", things, seconds=LIMIT)), "a new master does not learn it")


def test_a_server_starts_when_there_is_memory(store):
    store.owner.kill()
    store.wait_for_segment(there=False)
    with pytest.raises(pytest.fail.Exception, match="no answer within"):
        node_of(store, patience=1)
    store.start_owner()
    with node_of(store) as node:
        node.call("start_check")


def pids_of(store: Mooncake) -> list[int]:
    return [store.master.process.pid, store.owner.process.pid]


def test_nothing_of_a_store_outlives_its_context(tmp_path):
    with Mooncake(tmp_path) as store, node_of(store) as one:
        pids = [*pids_of(store), one.process.pid]
        assert all(map(is_running, pids))
    assert not any(map(is_running, pids))


def test_nothing_of_a_store_outlives_the_tests_that_started_it(tmp_path):
    here, there = FORK.Pipe()

    def started() -> None:
        with Mooncake(tmp_path) as store, node_of(store) as one:
            there.send([*pids_of(store), one.process.pid])
            time.sleep(LIMIT)

    tests = FORK.Process(target=started)
    tests.start()
    pids = here.recv()
    tests.kill()
    tests.join()
    eventually(lambda: not any(map(is_running, pids)), f"one of {pids} runs on")
