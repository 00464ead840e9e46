"""Tests of any backend between two store processes, for a subclass a backend.

The subclass has a fixture ``nodes``: a function that makes nodes over one store, which end with the test class. The
first writes, the second reads: what a server leaves and another finds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from store_node import IN_TAIL, Node, Thing, chain, pages

from sglang_dsv4.store.wire import Code

Nodes = Callable[..., Node]


class Conformance:
    @pytest.fixture(scope="class")
    def writer(self, nodes: Nodes) -> Node:
        return nodes()

    @pytest.fixture(scope="class")
    def reader(self, nodes: Nodes) -> Node:
        return nodes()

    def test_start_check_passes_again_and_again(self, writer: Node, reader: Node):
        for node in (writer, reader, writer):
            node.call("start_check")

    def test_what_one_writes_another_reads_and_does_not_write_again(self, writer: Node, reader: Node):
        things = chain("whole", 40)  # three batches
        assert writer.call("put", things) == [Code.OK] * 42
        assert reader.call("get", things) == [Code.OK] * 42
        assert writer.call("put", things) == reader.call("put", things) == [Code.KNOWN] * 42

    def test_exists_says_which(self, writer: Node, reader: Node):
        there = pages("which", 6)
        writer.call("put", there[1::2])
        for node in (writer, reader):
            assert node.call("exists", there) == [False, True] * 3

    def test_a_missing_object_ends_a_read_and_spares_its_unit(self, writer: Node, reader: Node):
        things = pages("gap", 20)
        writer.call("put", things[:3] + things[4:])
        codes = reader.call("get", things)  # in the first of two batches
        assert codes == [*[Code.OK] * 3, Code.MISSING, *[Code.OK] * 12, *[Code.MISSING] * 4]
        assert reader.call("get", pages("never", 3)) == [Code.MISSING] * 3

    def test_a_question_finds_the_last_end_that_is_whole(self, writer: Node, reader: Node):
        writer.call("put", chain("asked", 5))
        writer.call("put", pages("asked", 12))
        assert reader.call("ask", "asked", 20) == 5
        writer.call("put", [Thing("asked", 11, part) for part in range(1, IN_TAIL)])
        assert reader.call("ask", "asked", 20) == 5
        writer.call("put", [Thing("asked", 11, IN_TAIL)])
        assert reader.call("ask", "asked", 20) == 12
        assert reader.call("ask", "asked", 11) == 5
        for gone in (Thing("asked", 11, 1), Thing("asked", 7)):
            writer.call("remove", gone)
            assert reader.call("ask", "asked", 20) == 5, f"{gone} is not there"
            writer.call("get", [gone])  # so the writer does not believe that it is
            writer.call("put", [gone])
            assert reader.call("ask", "asked", 20) == 12
        assert reader.call("ask", "unheard", 20) == 0

    def test_a_removed_object_is_gone_and_can_be_put_again(self, writer: Node, reader: Node, nodes: Nodes):
        things = pages("removed", 2)
        writer.call("put", things)
        assert writer.call("remove", things[0])
        assert reader.call("exists", things) == [False, True]
        assert writer.call("remove", things[0]), "it is gone, so a put stores new bytes"
        with nodes() as late:  # the writer believes that it is there
            assert late.call("put", things) == [Code.OK, Code.KNOWN]
        assert reader.call("get", things) == [Code.OK] * 2

    @pytest.mark.parametrize(
        ("how", "code"),
        [({"other": Thing("donor", 0)}, Code.ANOTHER), ({"flip": True}, Code.WRONG)],
        ids=["swapped", "flipped"],
    )
    def test_wrong_bytes_are_found_and_replaced(self, writer: Node, reader: Node, how: dict[str, Any], code: Code):
        things = pages(f"planted {code}", 3)
        assert writer.call("plant", things[1], *[how.get("other"), how.get("flip", False)])
        writer.call("put", [things[0], things[2]])
        check_replaced(reader, writer, things, code)

    def test_a_secret_takes_no_object_of_one_without(self, writer: Node, nodes: Nodes):
        thing = pages("secret", 1)
        writer.call("put", thing)
        with nodes(secret=b"s" * 32) as wary:
            assert wary.call("get", thing) == [Code.NO_SEAL]
            assert wary.call("put", thing) == [Code.OK]
            assert wary.call("get", thing) == [Code.OK]
        assert writer.call("get", thing) == [Code.NO_SEAL]


def check_replaced(finder: Node, other: Node, things: list[Thing], code: Code) -> None:
    """Checks that the second of ``things`` is ``code`` for who reads it, and that its next write cures it for all."""
    assert finder.call("get", things)[1] is code
    assert finder.call("put", things)[1] is Code.OK, "an object that is known to be bad was taken for stored"
    assert other.call("get", things) == [Code.OK] * len(things)
    assert finder.call("put", things) == [Code.KNOWN] * len(things)
