"""Checks the store of DSV4_STORE: what one process puts another reads, at which rate, and what is wrong is found."""

from __future__ import annotations

import importlib.metadata
import os
import stat
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from sglang_dsv4.cli.doctor_installation import ENGINE_SAID, FAIL, OK, REFUSES, WARN, Check, Checks
from sglang_dsv4.cli.doctor_store_node import IN_TAIL, PAGES, UNIT_BYTES, UNITS, Done
from sglang_dsv4.cli.tables import size
from sglang_dsv4.errors import HostCopyError, SettingError
from sglang_dsv4.settings import Settings, read_settings
from sglang_dsv4.store.backend import FOLDER
from sglang_dsv4.store.wire import Code

COMMAND = (sys.executable, "-c", "from sglang_dsv4.cli.doctor_store_node import main; main()")
START, CALL, END = 120.0, 60.0, 5.0  # seconds that a node may take
SESSION = 65536  # tokens of the session that rates are told for
BREAKS = "sessions in a store: the server starts, and goes on without it"
TRIED = Counter({Code.OK: UNITS})
OTHERS = stat.S_IRWXG | stat.S_IRWXO
EVERY_INTERFACE = "0.0.0.0"


class NodeFailed(HostCopyError):
    """Reports that a process of the store's check did not start, raised, or hangs."""


def store() -> Checks:
    """Checks the settings of the store, then the store itself."""
    try:
        settings = read_settings()
    except SettingError:  # which has its own finding
        return
    if not settings.store.backend:
        todo = "set DSV4_STORE to a folder, or to a storage backend's name with DSV4_STORE_CONFIG"
        yield Check("store", FAIL, "DSV4_STORE is not set, so there is no store to check", todo)
        return
    from sglang_dsv4.engine.store_start import config_of  # noqa: PLC0415 - it imports the engine

    try:
        config = config_of(settings)  # a server's own, which makes the folder
    except SettingError as error:
        found, _, todo = str(error).partition("; ")
        yield Check("store", FAIL, found, todo or "change DSV4_STORE or DSV4_STORE_CONFIG", REFUSES)
        return
    if not settings.sessions.kept:
        todo = "unset DSV4_SESSIONS: there a store keeps sessions"
        yield Check("store", WARN, "DSV4_SESSIONS=off: plain and prefill servers write and read nothing", todo, BREAKS)
    if settings.store.backend == "file":
        yield from _folder(config)
    yield from _secret(settings)
    yield from _examine(settings.store.backend, config, settings.store_secret or None)


# ------------------------------------------------------------------------------------------------------------ settings


def _folder(config: Mapping[str, Any]) -> Checks:
    """Checks the folder of a store of files."""
    from sglang_dsv4.engine.store_start import folder_of, least_free  # noqa: PLC0415 - it imports the engine

    name, given = "store folder", config.get("file_storage_path")
    path = Path(folder_of(config) or "")
    if given and path != Path(given):
        yield Check(name, WARN, f"{FOLDER}={path} comes before {given}", f"unset {FOLDER}")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = path.stat()
    if about.st_uid != os.geteuid():
        found = f"{path} belongs to user {about.st_uid}, and this is {os.geteuid()}"
        yield Check(name, WARN, found, f"chown {os.geteuid()} {path}")
    mode = stat.S_IMODE(about.st_mode)
    if mode & OTHERS:
        todo = f"chmod 700 {path}: who reads it has the cache of prompts, who writes it can spoil it"
        yield Check("store folder's mode", WARN, f"{path} has mode {mode:o}: others may use it", todo)
    yield _disk(path, f"{path}, owner {about.st_uid}, mode {mode:o}", config, least_free(str(path)))


def _disk(path: Path, found: str, config: Mapping[str, Any], least: int) -> Check:
    """Returns whether the disk has room. found: of the folder. least: bytes that a store leaves free."""
    disk, name = os.statvfs(path), "store disk"
    free = disk.f_bavail * disk.f_frsize
    found, floor = f"{found}, {size(free)} free", str(config.get("min_free_space", 0))
    evicts = floor != "0"
    if evicts:  # the engine does, below the server's own floor in bytes, or an operator's ("5G")
        least = int(floor) if floor.isdigit() else 0
    keeps = size(least) if least else floor
    if free < least and evicts:
        return Check(name, WARN, f"{found}; old sessions go until {keeps} are free", "free some of the disk")
    if free < least:
        todo = "free some, or name a folder of a larger disk"
        return Check(name, FAIL, f"{found}; {keeps} stay free, so nothing is written", todo, BREAKS)
    most = f"at most {config['max_size']} are used" if config.get("max_size") else "it grows (max_size)"
    then = "then old sessions go" if evicts else "then nothing is written"
    return Check(name, OK, f"{found}; {most} until {keeps} are free, {then}")


def _secret(settings: Settings) -> Checks:
    name, file = "store secret", os.environ.get("DSV4_STORE_SECRET", "")[1:]
    if not settings.store_secret:
        if settings.store.backend == "file":
            yield Check(name, OK, "none: the folder's mode is the boundary")
        else:
            todo = "DSV4_STORE_SECRET=@FILE, the same on all servers, or a network that only they are in"
            yield Check(name, WARN, "none: who reaches the store can give requests a wrong cache", todo)
        return
    found = f"keys and seals by BLAKE3 {importlib.metadata.version('blake3')}"
    if Path(file).stat().st_mode & OTHERS:
        yield Check(name, WARN, f"{found}; others may read {file}", f"chmod 600 {file}")
    else:
        yield Check(name, OK, found)


# ----------------------------------------------------------------------------------------------------- the store itself


class _Node:
    """Runs a node in a process of its own, and calls it. What it prints is kept."""

    def __init__(self, backend: str, config: Mapping[str, Any], secret: bytes | None) -> None:
        self.works = True
        self._calls, there = Pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this object
        self._process = subprocess.Popen(
            [*COMMAND, str(there.fileno())], pass_fds=(there.fileno(),),
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        there.close()
        self._started = time.monotonic()
        self._calls.send((backend, config, secret))

    def up(self) -> tuple[dict[str, Any], float]:
        """Waits for its start; returns what it says of the backend, and the seconds."""
        return self._answer("start", START), time.monotonic() - self._started

    def call(self, name: str, *arguments: Any) -> Any:
        """Returns the answer. Raises NodeFailed."""
        return self._answer(name, CALL, (name, arguments))

    def _answer(self, name: str, seconds: float, message: Any = None) -> Any:
        try:
            if message is not None:
                self._calls.send(message)
            good, answer = False, f"the store does not answer within {seconds:.0f} s ({name})"
            if self._calls.poll(seconds):
                good, answer = self._calls.recv()
        except (EOFError, ConnectionError):
            good, answer = False, f"the process of the store ended ({name})"
        if not good:
            self.works = False
            self._log.seek(0)
            sys.stderr.write(self._log.read().decode(errors="replace"))
            raise NodeFailed(answer)
        return answer

    def close(self) -> None:
        """Ends it: orderly where it reads, else by a signal."""
        self._calls.close()
        try:
            self._process.wait(END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def _examine(backend: str, config: Mapping[str, Any], secret: bytes | None) -> Checks:
    """Puts in one process and reads in another; then ends the first one and reads again."""
    with closing(_Node(backend, config, secret)) as writer, closing(_Node(backend, config, secret)) as reader:
        try:
            yield from _examine_by(writer, reader)
        except NodeFailed as error:
            found, _, todo = str(error).partition("; ")
            said = f"{todo}; {ENGINE_SAID}" if todo else f"change DSV4_STORE_CONFIG; {ENGINE_SAID}"
            yield Check("store", FAIL, found, said, BREAKS)


def _examine_by(writer: _Node, reader: _Node) -> Checks:
    (about, first), (_, second) = writer.up(), reader.up()
    word = about["word"]
    yield Check("store start", OK, f"{about['name']}, up in two processes after {first:.1f} and {second:.1f} s")
    yield from _places(about)
    try:
        put, got = writer.call("put", word), reader.call("get", word)
        moved = _moved("store writes", put, "could not be put"), _moved("store reads", got, "are not read elsewhere")
        yield from moved
        if any(check.status == FAIL for check in moved):
            return  # the rest would say the same
        yield _rates(put, got)
        yield from _names(reader, about)
        yield from _damages(writer, reader, word)
        writer.close()
        yield _lifetime(reader.call("get", word))
    finally:
        if reader.works:
            reader.call("remove", word)


def _places(about: Mapping[str, Any]) -> Checks:
    """Warns of a segment in the server itself, and of addresses that everyone reaches."""
    if about["segment"]:
        found = f"global_segment_size is {size(about['segment'])}: what lies in a server's own segment dies with it"
        todo = 'DSV4_STORE_CONFIG: "global_segment_size": 0, and a store process with a segment on each machine'
        yield Check("store segment", WARN, found, todo)
    for name, address in about["addresses"].items():
        if EVERY_INTERFACE in address:
            todo = "a master takes anyone who reaches it: let it listen in a private network, and name its address"
            yield Check("store address", WARN, f"{name} is {address}", todo)


def _moved(name: str, done: Done, trouble: str) -> Check:
    """Returns a finding on objects that were all put, or got."""
    counts = Counter(done.codes)
    if done.wrong:
        return Check(name, FAIL, f"{done.wrong} of {UNITS} objects came back wrong, unnoticed", "report it", BREAKS)
    if counts == TRIED:
        return Check(name, OK, f"{UNITS} of {UNITS} objects of {size(UNIT_BYTES)}")
    told = ", ".join(f"{count} {code.name.lower()}" for code, count in counts.items())
    found = f"{UNITS - counts[Code.OK]} of {UNITS} objects {trouble} ({told})"
    return Check(name, FAIL, f"{found}: {done.error}" if done.error else found, "see the backend's log", BREAKS)


def _rates(put: Done, got: Done) -> Check:
    """Returns the rates, and the time of a session of Flash."""
    session = (SESSION // 256 + IN_TAIL) * UNIT_BYTES
    rates = [UNITS * UNIT_BYTES / done.seconds for done in (put, got)]
    write, read = (session / rate for rate in rates)
    told = f"put {rates[0] / 1e9:.2f}, get {rates[1] / 1e9:.2f} GB/s"
    found = f"{told}: a session of {SESSION:,} tokens of Flash is written in {write:.2f} s, read in {read:.2f} s"
    return Check("store rates", OK, f"{found} (of what was just written)")


def _names(reader: _Node, about: Mapping[str, Any]) -> Checks:
    """Checks that the store knows what it has, and what it has not."""
    word, todo = about["word"], "use another backend, or another release of it"
    which, pages, absent = reader.call("which", word), reader.call("ask", word), reader.call("get_absent", word)
    if which not in (None, [True, False]):
        found = f"of an object that is there and of one that is not it says {which[0]} and {which[1]}"
        yield Check("store questions", FAIL, found, todo, BREAKS)
    elif pages != PAGES:
        yield Check("store questions", FAIL, f"{pages} of {PAGES} pages that are there are found", todo, BREAKS)
    elif which is None:
        instead = "nothing, if reads are fast; file, mooncake and nixl can be asked"
        yield Check("store questions", WARN, "it cannot say what it has: each question is a read", instead)
    else:
        yield Check("store questions", OK, f"it says which are there; all {PAGES} pages of a session are found")
    if absent.codes == [Code.MISSING]:
        yield Check("store misses", OK, f"an object that never was is missing, after {absent.seconds * 1e3:.1f} ms")
    else:
        found = f"an object that never was is {absent.codes[0].name.lower()} {absent.error}".rstrip()
        yield Check("store misses", FAIL, found, todo, BREAKS)


def _damages(writer: _Node, reader: _Node, word: str) -> Checks:
    """Checks that damaged objects are found, and replaced."""
    told = {how: reader.call("judge", word, how) for how in writer.call("damage", word)}
    missed = [how for how, (code, _) in told.items() if code in (Code.OK, Code.FAILED, Code.MISSING)]
    stay = [how for how, (_, replaced) in told.items() if not replaced]
    hows = ", ".join(told)
    if missed or not told:
        found = f"an object that was damaged ({', '.join(missed)}) is not found to be" if told else "none could be put"
        yield Check("store damage", FAIL, found, "report it", BREAKS)
    elif stay:
        found = f"found, but not replaced ({', '.join(stay)})"
        yield Check("store damage", WARN, found, "such a prompt is prefilled until the store drops the object")
    else:
        yield Check("store damage", OK, f"damaged objects ({hows}) are found and replaced")


def _lifetime(again: Done) -> Check:
    """Returns whether the bytes outlive the process that put them."""
    if Counter(again.codes) == TRIED:
        return Check("store lifetime", OK, "what a process put is there after its end")
    found = f"{UNITS - Counter(again.codes)[Code.OK]} of {UNITS} objects went with the process that put them"
    return Check("store lifetime", WARN, found, "keep them in a store process, or on a disk: a restart loses them")
