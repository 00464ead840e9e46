"""Puts and gets objects of a store for the doctor, over the lanes and the backend of a server's store process.

A node is a process that answers one call after the other. The bytes of an object follow from its
name, so that any node can judge them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sglang_dsv4.store.backend import Backend, FileBackend, import_engine, make_backend, start_check
from sglang_dsv4.store.keys import object_name
from sglang_dsv4.store.lanes import SLOTS, Job, Lanes
from sglang_dsv4.store.ring import Ring
from sglang_dsv4.store.seal import seal
from sglang_dsv4.store.wire import PAGE, Code, Piece
from sglang_dsv4.testing.standalone import _define_torchvision_ops

UNIT_BYTES = 999_424  # of Flash
PAGES, IN_TAIL = 43, 5
UNITS = PAGES + IN_TAIL
MODEL = "dsv4"  # as servers name it; keys of the doctor are no server's
POISON = 0xA5
DAMAGES = ("flipped", "torn", "short")


class Done(NamedTuple):
    """Tells what became of objects. wrong: of those that were said to be right. error: what the backend raised."""

    codes: list[Code]
    seconds: float
    wrong: int = 0
    error: str = ""


class Node:
    """Owns the backend, its ring, and units to put from and to get into."""

    def __init__(self, name: str, config: Mapping[str, Any], secret: bytes | None) -> None:
        """Starts the backend and checks one block. Raises BackendUnfit, or what the backend raises."""
        self._ring, self._secret = Ring(UNIT_BYTES, SLOTS), secret
        self._backend = make_backend(name, config, MODEL, self._ring)
        start_check(self._backend)
        self._units = np.zeros((UNITS, UNIT_BYTES), np.uint8)
        self._lanes = Lanes(self._units, UNIT_BYTES, IN_TAIL, self._backend, self._ring, secret, lambda lane: None)

    def about(self) -> dict[str, Any]:
        """Describes the backend. word: of the objects of this examination; where none can be removed, always one."""
        removes = self._backend.can_remove
        settings = getattr(self._backend.inner, "config", None)
        return {
            "name": type(self._backend.inner).__name__,
            "removes": removes,
            "asks": type(self._backend).exists is not Backend.exists,
            "word": f"doctor {secrets.token_hex(8) if removes else ''}",
            "segment": getattr(settings, "global_segment_size", 0),
            "addresses": {
                name: str(getattr(settings, name, "") or "")
                for name in ("master_server_address", "metadata_server", "local_hostname")
            },
        }

    def put(self, word: str) -> Done:
        """Puts pages and the window behind them; the time is without the making of their bytes."""
        things = _chain(word)
        for unit, (key, part) in enumerate(things):
            self._units[unit] = _content(object_name(key, part))
        pieces = [Piece(unit, part, key) for unit, (key, part) in enumerate(things)]
        return self._timed(self._lanes.put(things[0][0], pieces, lambda _: None), len(pieces))

    def get(self, word: str) -> Done:
        """Gets them, and compares every byte."""
        return self._get([object_name(key, part) for key, part in _chain(word)])

    def ask(self, word: str) -> int:
        """Returns how many pages are found; 0: not all of them and the window."""
        return self._lanes.ask([key for key, part in _chain(word) if part == PAGE], 0, 0)

    def which(self, word: str) -> list[bool] | None:
        """Asks for an object that is there, and for one that never was; None: the backend cannot be asked."""
        key, part = _chain(word)[0]
        return self._backend.exists([object_name(key, part), _absent(word)])

    def get_absent(self, word: str) -> Done:
        """Gets an object that never was."""
        return self._get([_absent(word)])

    def damage(self, word: str) -> list[str]:
        """Puts objects that are damaged; returns how each is."""
        hows = [how for how in DAMAGES if how != "short" or isinstance(self._backend, FileBackend)]
        return [how for how in hows if self._damage(object_name(_damaged(word, how), PAGE), how)]

    def _damage(self, name: str, how: str) -> bool:
        slot = self._ring.slot(0)
        slot[:UNIT_BYTES] = _content(name)
        seal(slot, UNIT_BYTES, name, self._secret)
        if how == "flipped":
            slot[12345] ^= 4
        if how == "torn":
            slot[UNIT_BYTES // 2 :] = 0
        done = self._backend.put([name], [0], name)[0]
        if how == "short" and isinstance(self._backend, FileBackend):
            (path,) = Path(self._backend.folder).glob(f"{name}.*")
            os.truncate(path, UNIT_BYTES // 2)
        return done

    def judge(self, word: str, how: str) -> tuple[Code, bool]:
        """Gets a damaged object; returns what is said of it, and whether it is right after it was put again."""
        key = _damaged(word, how)
        name = object_name(key, PAGE)
        code = self._get([name]).codes[0]
        self._units[0] = _content(name)
        again = self._timed(self._lanes.put(key, [Piece(0, PAGE, key)], lambda _: None), 1).codes == [Code.OK]
        return code, again and self._get([name])[0] == [Code.OK]

    def remove(self, word: str) -> None:
        """Removes all objects of this examination, as far as the backend can."""
        names = [object_name(*thing) for thing in _chain(word)]
        names += [object_name(_damaged(word, how), PAGE) for how in DAMAGES]
        with contextlib.suppress(Exception):  # a backend may raise anything; its findings are told already
            for name in names if self._backend.can_remove else ():
                self._backend.remove(name)

    def _get(self, names: Sequence[str]) -> Done:
        self._units[: len(names)] = POISON
        done = self._timed(self._lanes.get([Job(unit, name) for unit, name in enumerate(names)]), len(names))
        good = [unit for unit, code in enumerate(done.codes) if code is Code.OK]
        return done._replace(wrong=sum(not np.array_equal(self._units[one], _content(names[one])) for one in good))

    def _timed(self, steps: Iterator[list[Code]], count: int) -> Done:
        """Runs the steps of a lane for ``count`` objects; where one raises, the rest has failed, as in a server."""
        codes: list[Code] = []
        started, error = time.perf_counter(), ""
        try:
            for codes in steps:  # noqa: B007 - the last ones count
                pass
        except Exception as raised:  # noqa: BLE001 - a backend may raise anything; the doctor has to say what
            error = f"{type(raised).__name__}: {raised}"
        seconds = time.perf_counter() - started
        return Done([*codes, *[Code.FAILED] * (count - len(codes))], seconds, error=error)


def _chain(word: str) -> list[tuple[bytes, int]]:
    """Returns key and part of the pages and of the window, in the order in which they are put."""
    keys = [hashlib.sha256(f"{word} {page}".encode()).digest() for page in range(PAGES)]
    return [*((key, PAGE) for key in keys), *((keys[-1], part) for part in range(PAGE + 1, PAGE + 1 + IN_TAIL))]


def _absent(word: str) -> str:
    return object_name(hashlib.sha256(f"{word} absent".encode()).digest(), PAGE)


def _damaged(word: str, how: str) -> bytes:
    return hashlib.sha256(f"{word} {how}".encode()).digest()


def _content(name: str) -> np.ndarray:
    seed = hashlib.sha256(name.encode()).digest()
    return np.frombuffer(np.random.default_rng(list(seed)).bytes(UNIT_BYTES), np.uint8)


def _import_engine(name: str) -> None:
    """Imports what the backend ``name`` needs, also where torchvision has no operators, as on no server."""
    try:
        import torchvision  # noqa: F401, PLC0415
    except (ImportError, RuntimeError):
        _define_torchvision_ops()
    import_engine(name)


def serve(calls: Connection) -> None:
    """Makes the node of the first message, and answers (name, arguments) with (whether it went well, the answer)."""
    try:
        made_of = calls.recv()
        _import_engine(made_of[0])
        node = Node(*made_of)
        calls.send((True, node.about()))
        while True:
            name, arguments = calls.recv()
            calls.send((True, getattr(node, name)(*arguments)))
    except (EOFError, BrokenPipeError):  # the doctor went, or it is done
        return
    except Exception as error:  # noqa: BLE001 - a backend may raise anything; the doctor has to say what
        calls.send((False, f"{type(error).__name__}: {error}"))


def main() -> None:
    """Runs a node over the socket of the number that argv ends with."""
    serve(Connection(int(sys.argv[-1])))
    sys.stdout.flush()
    os._exit(0)  # a thread of the backend may hang
