"""Seals the bytes of an object, and checks a seal where the bytes finally lie.

    payload | magic 8 | digest of the object's name 32 | bytes of the payload 8 | its hash 32 | hash of this seal 32

Nothing that a backend says of bytes is believed: torn, short, stale, swapped and changed ones fail here. Without a
secret the hashes are against faults: SHA-256 of the name, xxh3_128 of the rest. With one all are keyed BLAKE3, and
nobody without it can make a seal.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import xxhash

from sglang_dsv4.store.keys import digest, hasher
from sglang_dsv4.store.wire import Code

_BODY = struct.Struct("<8s32sQ32s")
SEAL_BYTES = _BODY.size + 32
MAGIC = b"DSV4unt1"


def _hash(data: Any, role: bytes, secret: bytes | None) -> bytes:
    """Returns 32 bytes. role: of the data, so that a hash of one kind is never taken for another's."""
    if secret is None:
        return xxhash.xxh3_128_digest(data).ljust(32, b"\0")
    return digest(hasher(secret), role, data)


def _body(payload: np.ndarray, name: str, secret: bytes | None) -> bytes:
    return _BODY.pack(MAGIC, _named(name, secret), payload.nbytes, _hash(payload, b"payload", secret))


def _named(name: str, secret: bytes | None) -> bytes:
    return digest(hasher(secret), b"name", name.encode())


def seal(slot: np.ndarray, nbytes: int, name: str, secret: bytes | None) -> None:
    """Writes the seal of object ``name`` behind the first ``nbytes`` of ``slot``, its payload."""
    body = _body(slot[:nbytes], name, secret)
    raw = body + _hash(body, b"seal", secret)
    slot[nbytes : nbytes + SEAL_BYTES] = np.frombuffer(raw, np.uint8)


def check(raw: bytes, payload: np.ndarray, name: str, secret: bytes | None) -> Code:
    """Returns OK where ``payload`` is what was sealed as ``name``; else NO_SEAL, ANOTHER or WRONG.

    raw: the seal, read once: the memory that it was read from may change at any time.
    """
    body, own = raw[: _BODY.size], raw[_BODY.size :]
    if len(raw) != SEAL_BYTES or own != _hash(body, b"seal", secret):
        return Code.NO_SEAL
    magic, named, nbytes, hashed = _BODY.unpack(body)
    if magic != MAGIC:
        return Code.NO_SEAL
    if named != _named(name, secret) or nbytes != payload.nbytes:
        return Code.ANOTHER
    return Code.OK if hashed == _hash(payload, b"payload", secret) else Code.WRONG
