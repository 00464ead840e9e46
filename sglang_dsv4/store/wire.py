"""Packs the messages between a scheduler and its store process, one packet of a SOCK_SEQPACKET socket each.

    scheduler -> process   HELLO json | WRITE t key piece* | ASK t question | LOAD t spot* | DROP t | DRAIN milliseconds
    process -> scheduler   READY | COPIED t n | STORED t code* | FOUND t end | LOADED t code* | OOPS t text | BYE

So a message is whole or absent, however a process ends. Beside the socket both map one shared memory: words that either
side reads without a call, and a ring of token ids, which are too many for a packet.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import NamedTuple

HEAD = struct.Struct("<BxxxIQ")  # kind, count, ticket
MOST_BYTES = 1 << 17  # of a packet
KEY_BYTES = 32

# Words of the shared memory, int64 by offset in bytes, a cache line each; the token ids lie behind CONTROL.
MAIL, PUT, GET = 0, 64, 128  # packets that the process sent; steps of its writes, of its reads
# Behind those of PUT and of GET, nanoseconds: that their calls of the backend took; when the one that runs began, or 0.
SPENT, BEGUN = 8, 16
CONTROL = 4096

PAGE = 0  # the part of a piece that is a page; those of a window are 1, 2, 3 ...


class Kind(IntEnum):
    """Names the messages; those of the process are above 10."""

    HELLO = 1
    WRITE = 2
    ASK = 3
    LOAD = 4
    DROP = 5
    DRAIN = 6
    READY = 11
    COPIED = 12
    STORED = 13
    FOUND = 14
    LOADED = 15
    OOPS = 16
    BYE = 17


class Code(IntEnum):
    """Says what became of one unit."""

    OK = 0
    KNOWN = 1  # a write: the store has it
    MISSING = 2
    NO_SEAL = 3  # torn or short, or never sealed
    ANOTHER = 4  # another object's bytes
    WRONG = 5  # bytes that are not those that were sealed
    FAILED = 6  # the backend refused or raised
    FULL = 7  # a write: too little free disk


WRONG = frozenset({Code.NO_SEAL, Code.ANOTHER, Code.WRONG})  # of an object that failed its check


class Piece(NamedTuple):
    """Names a unit of the arena and the object that it is written to. key: of the chain at its page."""

    unit: int
    part: int
    key: bytes


class Spot(NamedTuple):
    """Names a unit of the arena and the object that is read into it. page: number of it, from 0, in the chain."""

    unit: int
    part: int
    page: int


class Question(NamedTuple):
    """Asks for the longest stored beginning of a prompt.

    root: the key before the first page. have: pages that end at a point which is here; only a later one is wanted.
    first: pages that are here, whose objects need not be there. count: pages of the prompt. page: tokens of one. ahead:
    tokens behind a page that its key has, too. at: offset of the prompt's count * page + ahead ids in the ring.
    """

    root: bytes
    have: int
    first: int
    count: int  # type: ignore[assignment]  # tuple has a method of that name
    page: int
    ahead: int
    at: int


_PIECE = struct.Struct("<IH32s")
_SPOT = struct.Struct("<IHI")
_QUESTION = struct.Struct("<32s6I")


def pack(kind: Kind, ticket: int = 0, count: int = 0, body: bytes = b"") -> bytes:
    """Packs one message."""
    return HEAD.pack(kind, count, ticket) + body


def unpack(raw: bytes) -> tuple[Kind, int, int, bytes]:
    """Returns kind, ticket, count and body of a message."""
    kind, count, ticket = HEAD.unpack_from(raw)
    return Kind(kind), ticket, count, raw[HEAD.size :]


def pack_write(group: bytes, pieces: Iterable[Piece]) -> bytes:
    """Packs the body of a WRITE. group: a key; a store that can evicts what has the same one together."""
    return group + b"".join([_PIECE.pack(*piece) for piece in pieces])


def unpack_write(body: bytes) -> tuple[bytes, list[Piece]]:
    """Returns group and pieces of a WRITE."""
    return body[:KEY_BYTES], [Piece._make(each) for each in _PIECE.iter_unpack(body[KEY_BYTES:])]


def pack_spots(spots: Iterable[Spot]) -> bytes:
    """Packs the body of a LOAD."""
    return b"".join([_SPOT.pack(*spot) for spot in spots])


def unpack_spots(body: bytes) -> Iterator[Spot]:
    """Yields the spots of a LOAD."""
    return map(Spot._make, _SPOT.iter_unpack(body))


def pack_question(question: Question) -> bytes:
    """Packs the body of an ASK."""
    return _QUESTION.pack(*question)


def unpack_question(body: bytes) -> Question:
    """Unpacks the body of an ASK."""
    return Question._make(_QUESTION.unpack(body))


MOST_PIECES = (MOST_BYTES - HEAD.size - KEY_BYTES) // _PIECE.size
MOST_SPOTS = (MOST_BYTES - HEAD.size) // _SPOT.size
