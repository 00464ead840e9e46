"""A host block that changes while its request is away: verify mode names the byte, without it nothing does."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from sglang_dsv4.livetest.faults.engine import Decoding
from sglang_dsv4.livetest.faults.scene import NOTHING, Drill, Scene, raised, server_log
from sglang_dsv4.settings import Settings
from sglang_dsv4.testing.demo_scheduler import damage

TOKENS = 300


def _play() -> Iterator[Scene]:
    for verify in (True, False):
        decoding = Decoding(Settings(host_gb=0.05, verify=verify), TOKENS, 200)
        hurt, whole = decoding.jobs
        with server_log() as lines:
            for job in (hurt, whole):
                decoding.retract(job)
            damage(decoding.copy_of(0), page=-1)
            ended = raised(functools.partial(decoding.resume, hurt))
            if ended == NOTHING:
                decoding.resume(whole)
        if verify:
            yield Scene(
                "DSV4_VERIFY=1, one byte of a host block changes", "the scheduler's exception", ended,
                (r"^VerifyMismatch: host copy changed since the save: family c4_kv, layer 2, from position 259 ",),
                {"the load was not logged as done": not any("loaded" in line for line in lines)},
            )  # fmt: skip
        else:
            seen = [line for line in lines if "loaded" in line] + [f"really on the device: {w}" for w in decoding.wrong]
            yield Scene(
                "DSV4_VERIFY=0, the same", "server log, beside what only the drill can know", "\n".join(seen),
                (rf"INFO loaded {TOKENS} tokens", r"INFO loaded 200 tokens", r"0: c4_kv, buffer 0, position 259"),
                {"the other request is exact": len(decoding.wrong) == 1},
            )  # fmt: skip


DRILL = Drill(
    "damage",
    "A host block is overwritten while its request is away",
    "With DSV4_VERIFY=1 the server stops rather than answer wrongly: restart it, and look for what else writes to this "
    "process's memory (docs/operating.md). Without it no load is compared.",
    _play,
)
