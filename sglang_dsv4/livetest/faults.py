"""Provokes four faults in real pools and records the user's view of each.

Imported with the hooks installed, and with the pools on the CPU.
"""

from __future__ import annotations

import contextlib
import logging
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

from sglang.srt.disaggregation import decode

from sglang_dsv4.cache.families import Geometry
from sglang_dsv4.cache.units import Units
from sglang_dsv4.engine.hooks import engines_class
from sglang_dsv4.engine.retract import save
from sglang_dsv4.errors import HostCopyError, MustStop
from sglang_dsv4.settings import Settings
from sglang_dsv4.testing.demo_scheduler import Job, Scheduler, damage
from sglang_dsv4.testing.demo_sessions import ALL, parts_of, server
from sglang_dsv4.testing.forward import WrongRows
from sglang_dsv4.testing.standalone import PoolSpec, make_pool

SPEC = PoolSpec(pages=12, swa_pages=12, requests=4)
HOST_GB = "0.05"
NOTHING = "nothing was raised"


@dataclass(frozen=True)
class Scene:
    """Describes one fault. seen: the text that a user sees at ``where``; expects: regular expressions that it must
    match.

    facts: statements that must be true beside the text. todo: advice to the user.
    """

    title: str
    where: str
    seen: str
    todo: str
    expects: tuple[str, ...]
    facts: Mapping[str, bool] = field(default_factory=dict)

    @property
    def missed(self) -> list[str]:
        """Expectations that were not met; empty when the scene is as it must be."""
        texts = [f"no text like {pattern!r}" for pattern in self.expects if not re.search(pattern, self.seen)]
        return texts + [f"not true: {name}" for name, true in self.facts.items() if not true]


def memory() -> Scene:
    """Fills the host memory before a request is retracted."""
    units = Units.of(Geometry(SPEC.ratios))
    room = max(units.count(300), units.count(500), units.least) * units.nbytes / 2**30
    scheduler, (first, second) = _decoding(Settings(host_gb=room), 300, 500)
    with _server_log() as lines:
        kept, refused = (_save(scheduler, job) for job in (first, second))
        for copy in filter(None, (kept, refused)):
            copy.release()
        again = _save(scheduler, second)
    if again is not None:
        again.release()
    return Scene(
        "Two requests are retracted, and host memory has room for one copy", "server log", "\n".join(lines),
        "Raise DSV4_HOST_GB, as the warning says (docs/operating.md). Until then the engine serves such requests.",
        (
            r"INFO saved 300 tokens, .*; copies alive 1, ",
            r"WARNING no host copy, the engine's own behaviour follows \(HostMemoryExhausted\): 500 tokens need .*"
            r"raise DSV4_HOST_GB",
            r"INFO saved 500 tokens",
        ),
        {
            "the second request has no copy": refused is None,
            "it is counted": scheduler.pool.host.counters.fallbacks == {"HostMemoryExhausted": 1},
            "room that was given back is used": again is not None,
        },
    )  # fmt: skip


def hooks() -> Scene:
    """Removes a hook before the server builds its first pool."""
    engines: Any = engines_class(decode.DecodePreallocQueue)
    with mock.patch.object(decode, "DecodePreallocQueue", engines):
        ended = _raised(lambda: make_pool(SPEC))
    return Scene(
        "Another plugin puts the engine's DecodePreallocQueue back", "the scheduler's exception; no server", ended,
        "sglang-dsv4 doctor names each missing hook; install a supported release, or serve with DSV4_ENABLED=0.",
        (r"^HooksNotLanded: .*DecodePreallocQueue: is still the engine's own[.;].*DSV4_ENABLED=0",),
    )  # fmt: skip


def damaged_copy() -> Scene:
    """Changes a byte of a host copy while its request is retracted, with DSV4_VERIFY=1."""
    scheduler, (job,) = _decoding(Settings(host_gb=0.05, verify=True), 300)
    with _server_log() as lines:
        scheduler.retract(job)
        assert job.copy is not None
        damage(job.copy.memory, job.copy.units[1])
        ended = _raised(lambda: scheduler.resume(job))
    return Scene(
        "A byte of a host copy changes, DSV4_VERIFY=1", "the scheduler's exception",
        ended,
        "The server stops rather than answer wrongly: restart it, and find the other writer to this process's memory. "
        "With DSV4_VERIFY=0 no load is compared, and the request goes on with a wrong cache.",
        (r"^VerifyMismatch: host copy changed since the save: tokens 256 to 300 ",),
        {"the load was not logged as done": not any("loaded" in line for line in lines)},
    )  # fmt: skip


def sessions() -> Scene:
    """Asks for a session as another tenant and behind a flush; then changes a byte of it, with DSV4_VERIFY=1."""
    world = server(HOST_GB, verify=True, ratios=(0, 4, 128), pages=30, context=8192)
    store, plain = parts_of(world)
    prompt = range(1500)

    def asked(salt: str | None = None) -> int:
        """Returns the tokens of the prompt that were not computed, where the device has lost everything."""
        world.evict(ALL, ALL)
        req = world.submit(prompt, max_new=4, cache_salt=salt)
        world.run()
        return int(req.cached_tokens)

    asked()
    other, same = asked("another tenant"), asked()
    memory = plain.host.memory
    flushed = world.flush() and not store.points and not memory.pool.held
    behind = asked()
    with _server_log() as lines:
        damage(memory, store.kept.units()[1024 // 256])
        ended = _raised(asked)
    return Scene(
        "A byte of a session changes on the host, DSV4_VERIFY=1; before it, another tenant and a flush",
        "the scheduler's exception", ended,
        "As for a damaged copy. DSV4_SESSIONS=off keeps none; docs/sessions.md says who finds which.",
        (r"^VerifyMismatch: host copy changed since the save: tokens 1024 to 1280 ",),
        {
            "the same prompt goes on from the host": same == 1280,
            "another tenant's request finds nothing": other == 0,
            "a flush leaves no session": flushed and behind == 0,
            "no request went on with the wrong byte": not any("goes on" in line for line in lines),
        },
    )  # fmt: skip


SCENES: dict[str, Callable[[], Scene]] = {
    "memory": memory,
    "hooks": hooks,
    "damage": damaged_copy,
    "sessions": sessions,
}


def _decoding(settings: Settings, *lengths: int) -> tuple[Scheduler, list[Job]]:
    """Returns a decode scheduler with host memory, and running requests of ``lengths`` tokens."""
    scheduler = Scheduler(SPEC, random.Random(0), corrupt=False)
    scheduler.pool.attach_host(settings)
    jobs = [Job(number, tokens, 1) for number, tokens in enumerate(lengths)]
    for job in jobs:
        assert scheduler.admit(job), "the drill's pool is too small for its requests"
    return scheduler, jobs


def _save(scheduler: Scheduler, job: Job) -> Any:
    """Saves as the hooks do at a retract; None where the engine's own behaviour follows."""
    req = SimpleNamespace(rid=f"r{job.number}", input_embeds=None)
    return save.save(scheduler.pool, req, job.slots, job.slot)


def _raised(call: Callable[[], object]) -> str:
    """Returns the error that ``call`` raises, as a traceback ends; NOTHING when it returns.

    That is this package's, or WrongRows: a forward read a wrong byte.
    """
    try:
        call()
    except (HostCopyError, MustStop, WrongRows) as error:
        return f"{type(error).__name__}: {error}"
    return NOTHING


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


@contextlib.contextmanager
def _server_log() -> Iterator[list[str]]:
    """Yields the lines that this package writes to a server's log inside the block."""
    handler, logger = _Lines(), logging.getLogger("sglang_dsv4")
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
