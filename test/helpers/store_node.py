"""Runs the store's lanes over a real backend in a process of their own, as the product does, but one call at a time.

A call that hangs fails its test, and the process can be killed in the midst of one. The bytes of an object follow from
its name by a generator that nothing of the product uses.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import traceback
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import pytest
from processes import FORK

from sglang_dsv4.store.backend import make_backend, start_check
from sglang_dsv4.store.keys import object_name
from sglang_dsv4.store.lanes import SLOTS, Job, Lanes
from sglang_dsv4.store.ring import Ring
from sglang_dsv4.store.seal import seal
from sglang_dsv4.store.wire import PAGE, Code, Piece

UNIT = 1 << 18
UNITS = 64
IN_TAIL = 2
POISON = 0xA5
PR_SET_PDEATHSIG = 1


class Thing(NamedTuple):
    """Names an object of a test: part ``part`` of page ``page`` of the chain ``word``."""

    word: str
    page: int
    part: int = PAGE

    @property
    def key(self) -> bytes:
        return hashlib.sha256(f"{self.word} {self.page}".encode()).digest()

    @property
    def name(self) -> str:
        return object_name(self.key, self.part)

    def content(self, nbytes: int) -> np.ndarray:
        seed = hashlib.sha256(repr(tuple(self)).encode()).digest()
        return np.frombuffer(np.random.default_rng(list(seed)).bytes(nbytes), np.uint8)


def pages(word: str, count: int) -> list[Thing]:
    return [Thing(word, page) for page in range(count)]


def chain(word: str, count: int) -> list[Thing]:
    """Returns pages and the window behind the last of them."""
    return pages(word, count) + [Thing(word, count - 1, part) for part in range(1, IN_TAIL + 1)]


class Served:
    """Answers a node's calls. Units that are to be read are poisoned before, all of them."""

    def __init__(self, backend: str, config: dict[str, Any], secret: bytes | None, unit: int) -> None:
        ring = Ring(unit, SLOTS)
        self.backend = make_backend(backend, config, "model", ring)
        self.units = np.zeros((UNITS, unit), np.uint8)
        self._lanes = Lanes(self.units, unit, IN_TAIL, self.backend, ring, secret, lambda lane: None)
        self._secret = secret

    def start_check(self) -> None:
        start_check(self.backend)

    def put(self, things: Sequence[Thing]) -> list[Code]:
        for unit, thing in enumerate(things):
            self.units[unit] = thing.content(self.units.shape[1])
        pieces = [Piece(unit, thing.part, thing.key) for unit, thing in enumerate(things)]
        told = [0]
        codes = last_of(self._lanes.put(things[0].key, pieces, told.append), len(things))
        assert Code.FAILED in codes or told[-1] == len(things), "not all units are said to be copied"
        return codes

    def get(self, things: Sequence[Thing]) -> list[Code]:
        """Reads; raises where a unit is said to be good and is not, or where a missing object changed one."""
        self.units[:] = POISON
        jobs = [Job(unit, thing.name) for unit, thing in enumerate(things)]
        codes = last_of(self._lanes.get(jobs), len(things))
        for unit, (thing, code) in enumerate(zip(things, codes, strict=True)):
            if code is Code.OK:
                assert np.array_equal(self.units[unit], thing.content(self.units.shape[1])), f"wrong bytes of {thing}"
            elif code is Code.MISSING:
                assert self.is_poison(unit), f"{thing} is missing, and its unit was written"
        return codes

    def is_poison(self, unit: int = -1) -> bool:
        """Returns whether nothing was written into a unit, or into any."""
        return bool((self.units if unit < 0 else self.units[unit]).min() == POISON == self.units[unit].max())

    def poison(self) -> None:
        self.units[:] = POISON

    def exists(self, things: Sequence[Thing]) -> list[bool] | None:
        return self.backend.exists([thing.name for thing in things])

    def answers(self, things: Sequence[Thing]) -> bool:
        """Returns whether the backend can be asked at all; else it must say so, not that nothing is there."""
        try:
            self.exists(things)
        except Exception:  # noqa: BLE001 - a backend may raise anything
            return False
        return True

    def ask(self, word: str, count: int) -> int:
        return self._lanes.ask([thing.key for thing in pages(word, count)], 0, 0)

    def plant(self, thing: Thing, other: Thing | None = None, flip: bool = False) -> bool:
        """Puts wrong bytes under a name: those of another object, or its own with a bit flipped."""
        slot, source = self.backend.ring.slot(0), other or thing
        slot[:UNIT] = source.content(UNIT)
        seal(slot, UNIT, source.name, self._secret)
        slot[12345] ^= 4 if flip else 0
        return self.backend.put([thing.name], [0], "planted")[0]

    def remove(self, thing: Thing) -> bool:
        return self.backend.remove(thing.name)

    def raw_put(self, thing: Thing, nbytes: int) -> int:
        """Puts ``nbytes`` under a name, past the ring: Mooncake alone."""
        (key,) = self.backend._keys([thing.name])
        return self.backend.inner.store.put(key, thing.content(nbytes).tobytes())

    def groups(self, things: Sequence[Thing]) -> set[str]:
        """Puts, and returns the group ids that Mooncake's client was given."""
        store, seen = self.backend.inner.store, set()

        class Spy:
            def __getattr__(self, name: str) -> Any:
                return getattr(store, name)

            def batch_put_from(self, keys: Any, pointers: Any, sizes: Any, config: Any) -> Any:
                seen.update(config.group_ids)
                return store.batch_put_from(keys, pointers, sizes, config)

        self.backend.inner.store = Spy()
        try:
            assert set(self.put(things)) == {Code.OK}
        finally:
            self.backend.inner.store = store
        return seen


def last_of(steps: Iterator[list[Code]], count: int) -> list[Code]:
    """Returns the codes of ``count`` objects; where a step raises, the rest has failed, as in the product."""
    codes: list[Code] = []
    try:
        for codes in steps:  # noqa: B007 - the last
            pass
    except Exception:  # noqa: BLE001 - a backend may raise anything
        traceback.print_exc()
    return [*codes, *[Code.FAILED] * (count - len(codes))]


def _serve(calls: Connection, env: Mapping[str, str], *made_of: Any) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.update(env)
    served = None
    while True:
        try:
            name, args = calls.recv()
            served = served or Served(*made_of)
            calls.send((True, getattr(served, name)(*args)))
        except EOFError:
            os._exit(0)
        except Exception:  # noqa: BLE001 - the test shows it
            calls.send((False, traceback.format_exc()))


class Node:
    """A store process of a test. A context: it is killed at the end."""

    def __init__(
        self,
        backend: str,
        config: dict[str, Any],
        env: Mapping[str, str],
        secret: bytes | None = None,
        unit: int = UNIT,
        patience: float = 40,
    ) -> None:
        """patience: seconds for the start of the backend."""
        self._calls, there = FORK.Pipe()
        made_of = (backend, config, secret, unit)
        self.process = FORK.Process(target=_serve, args=(there, env, *made_of), daemon=True)
        self.process.start()
        there.close()
        try:
            self.call("poison", seconds=patience)
        except BaseException:
            self.kill()
            raise

    def begin(self, name: str, *args: Any) -> None:
        """Sends a call and does not wait for its answer."""
        self._calls.send((name, args))

    def end(self, seconds: float = 20) -> Any:
        """Waits for the answer to ``begin``."""
        if not self._calls.poll(seconds):
            pytest.fail(f"no answer within {seconds} s")
        good, answer = self._calls.recv()
        assert good, answer
        return answer

    def call(self, name: str, *args: Any, seconds: float = 20) -> Any:
        self.begin(name, *args)
        return self.end(seconds)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
