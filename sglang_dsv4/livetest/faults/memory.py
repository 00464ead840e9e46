"""Too little host memory, at start and while serving; a driver that refuses to pin it."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from sglang_dsv4.hostmem import claims, memory
from sglang_dsv4.hostmem.arena import Arena
from sglang_dsv4.livetest.faults.engine import SPEC, Decoding, attach
from sglang_dsv4.livetest.faults.scene import Drill, Scene, raised, server_log
from sglang_dsv4.settings import Settings
from sglang_dsv4.testing.standalone import make_pool

REGISTER_REFUSED = 2  # cudaErrorMemoryAllocation, what the driver answers when it cannot lock the pages
STAYS = r"WARNING no host copies, the engine's own behaviour stays: "


def _play() -> Iterator[Scene]:
    yield Scene(
        "DSV4_HOST_GB=0.001, less than one request", "the scheduler's exception",
        raised(lambda: attach(Settings(host_gb=0.001))),
        (r"^HostMemoryExhausted: 0\.001 GiB of host memory hold not one request .*: raise DSV4_HOST_GB$",),
    )  # fmt: skip
    yield Scene(
        "DSV4_HOST_GB=1000000, more than the machine can give", "the scheduler's exception",
        raised(lambda: attach(Settings(host_gb=1_000_000))),
        (r"^HostMemoryExhausted: DSV4_HOST_GB=1000000: [\d.]+ GiB of RAM can be taken; lower it",),
    )  # fmt: skip
    with server_log() as lines, mock.patch.object(claims, "free_ram", lambda: 1 << 20):
        host = attach(Settings())
    yield Scene(
        "DSV4_HOST_GB=auto on a machine with 1 MiB free", "server log", "\n".join(lines),
        (STAYS + r".* hold not one request .*raise DSV4_HOST_GB",),
        {"the server goes on, without copies": host is None},
    )  # fmt: skip
    yield from _full_while_serving()


def _full_while_serving() -> Iterator[Scene]:
    with server_log() as lines:
        decoding = Decoding(Settings(host_gb=0.05, host_copies=1), 300, 500, 200)
        saved = [decoding.save(job) for job in decoding.jobs]
        held = decoding.host.memory.copies
        decoding.copy_of(0).release()
        again = decoding.save(decoding.jobs[1])
    counters = decoding.host.counters
    yield Scene(
        "three requests retract, there is room for one copy", "server log", "\n".join(lines),
        (
            r"INFO saved 300 tokens, .*; copies alive 1, ",
            r"WARNING no host copy, the engine's own behaviour follows \(HostMemoryExhausted\): 500 tokens need .*"
            r"raise DSV4_HOST_COPIES \(or DSV4_HOST_GB\)",
            r"INFO saved 500 tokens",
        ),
        {
            "one was saved, two were not": saved == [True, False, False] and held == 1,
            "both are counted": counters.fallbacks == {"HostMemoryExhausted": 2},
            "the warning is written once": sum("WARNING no host copy" in line for line in lines) == 1,
            "room that was given back is used": again,
        },
    )  # fmt: skip
    with server_log() as lines:
        answer = decoding.answer_without_copy()
    yield Scene(
        "one of them cannot be computed again (multimodal)", "server log, then the client's answer",
        "\n".join([*lines, json.dumps(answer)]),
        (r"WARNING request chat-7: Retracted under .*raise DSV4_HOST_GB", r'"status_code": 503'),
    )  # fmt: skip
    decoding.copy_of(1).release()
    decoding.host.memory.check_integrity()


class _Driver:
    """Stands for the CUDA runtime: it refuses to lock memory."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        return REGISTER_REFUSED


def _pin_anyway(nbytes: int, pin: bool, *_: Any) -> Arena:
    return Arena(nbytes, pin=True)


def _play_pinning() -> Iterator[Scene]:
    for settings, explicit in ((Settings(host_gb=0.05), True), (Settings(), False)):
        pool = make_pool(SPEC)
        # On a CPU nothing is pinned: the pool is made to try, and the driver's answer stands for a real one.
        with (
            server_log() as lines,
            mock.patch.object(memory, "Arena", _pin_anyway),
            mock.patch.object(torch.cuda, "cudart", _Driver),
        ):
            ended = raised(functools.partial(pool.attach_host, settings))
        reason = r"cannot pin [\d.]+ GiB of host memory \(CUDA error 2\); lower DSV4_HOST_GB or raise .*ulimit -l"
        yield Scene(
            "DSV4_HOST_GB=0.05" if explicit else "DSV4_HOST_GB=auto",
            "the scheduler's exception" if explicit else "server log",
            ended if explicit else "\n".join(lines),
            ((r"^HostMemoryExhausted: " if explicit else STAYS) + reason,),
            {"no arena is left behind": pool.host is None},
        )


DRILL = Drill(
    "memory",
    "Host memory is too small, at start or while serving",
    "Raise DSV4_HOST_GB (docs/operating.md says how much); until then requests without a copy are served as the engine "
    "serves them.",
    _play,
)
PINNING = Drill(
    "pinning",
    "The driver refuses to pin the arena",
    "Raise the locked-memory limit (ulimit -l unlimited; docker: --ulimit memlock=-1) or lower DSV4_HOST_GB.",
    _play_pinning,
)
