"""A seal holds for these bytes under this name; each other case has its code."""

import hashlib

import numpy as np
import pytest
import xxhash

from sglang_dsv4.store.seal import SEAL_BYTES, check, seal
from sglang_dsv4.store.wire import Code

NBYTES = 4096
NAME = "ab" * 32 + "p"
SECRETS = pytest.mark.parametrize("secret", [None, b"correct horse"], ids=["plain", "secret"])


@pytest.fixture
def sealed(secret):
    """A slot of random bytes and its seal; the rest of it is poison."""
    slot = np.full(NBYTES + 512, 0xA5, np.uint8)
    slot[:NBYTES] = np.random.default_rng(1).integers(0, 256, NBYTES, np.uint8)
    seal(slot, NBYTES, NAME, secret)
    return slot


def parts(slot):
    return slot[NBYTES : NBYTES + SEAL_BYTES].tobytes(), slot[:NBYTES]


@SECRETS
def test_what_was_sealed_is_ok_and_nothing_else_of_the_slot_was_written(sealed, secret):
    assert check(*parts(sealed), NAME, secret) is Code.OK
    assert (sealed[NBYTES + SEAL_BYTES :] == 0xA5).all()
    assert (sealed[:NBYTES] == np.random.default_rng(1).integers(0, 256, NBYTES, np.uint8)).all()


def test_the_bytes_of_a_seal_are_those_of_the_docstring():
    """Objects outlive releases: whoever changes this changes the magic."""
    slot = np.arange(NBYTES + 512, dtype=np.uint8)
    seal(slot, NBYTES, NAME, None)
    payload = bytes(range(256)) * (NBYTES // 256)
    named = hashlib.sha256(b"name" + NAME.encode()).digest()
    body = b"DSV4unt1" + named + NBYTES.to_bytes(8, "little") + xxhash.xxh3_128(payload).digest() + bytes(16)
    assert slot[NBYTES : NBYTES + SEAL_BYTES].tobytes() == body + xxhash.xxh3_128(body).digest() + bytes(16)


@SECRETS
@pytest.mark.parametrize("bit", [0, 8 * NBYTES // 2 + 3, 8 * NBYTES - 1])
def test_each_bit_of_the_payload_counts(sealed, secret, bit):
    sealed[bit // 8] ^= 1 << bit % 8
    assert check(*parts(sealed), NAME, secret) is Code.WRONG


@SECRETS
@pytest.mark.parametrize("byte", range(SEAL_BYTES))
def test_each_byte_of_the_seal_counts(sealed, secret, byte):
    sealed[NBYTES + byte] ^= 0x10
    assert check(*parts(sealed), NAME, secret) is Code.NO_SEAL


@SECRETS
def test_another_name_or_length_is_another_object(sealed, secret):
    raw, payload = parts(sealed)
    assert check(raw, payload, NAME[:-1] + "w0", secret) is Code.ANOTHER
    assert check(raw, payload[:-1], NAME, secret) is Code.ANOTHER


@SECRETS
def test_no_seal(sealed, secret):
    raw, payload = parts(sealed)
    for none in (bytes(SEAL_BYTES), raw[:-1], b""):
        assert check(none, payload, NAME, secret) is Code.NO_SEAL


@pytest.mark.parametrize("secret", [b"correct horse"])
@pytest.mark.parametrize("other", [None, b"correct horsf"])
def test_without_the_secret_nobody_reads_or_makes_a_seal(sealed, secret, other):
    assert check(*parts(sealed), NAME, other) is Code.NO_SEAL
    seal(sealed, NBYTES, NAME, other)
    assert check(*parts(sealed), NAME, secret) is Code.NO_SEAL


def test_a_magic_of_another_version_is_no_seal(monkeypatch):
    slot = np.zeros(NBYTES + 512, np.uint8)
    monkeypatch.setattr("sglang_dsv4.store.seal.MAGIC", b"DSV4unt0")
    seal(slot, NBYTES, NAME, None)
    monkeypatch.undo()
    assert check(*parts(slot), NAME, None) is Code.NO_SEAL
