"""A cache layout that is not covered: one warning, and the engine serves as it always did."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from sglang_dsv4.livetest.faults.engine import SPEC
from sglang_dsv4.livetest.faults.scene import Drill, Scene, raised, server_log
from sglang_dsv4.settings import Settings
from sglang_dsv4.testing.standalone import PoolSpec, make_pool


def _play() -> Iterator[Scene]:
    for spec, what, reason in (
        (PoolSpec(hisparse=True, draft_tokens=4), "--enable-hisparse with drafts", "HiSparse keeps the history"),
        (PoolSpec(draft_tokens=9), "nine draft tokens", "9 draft tokens: more than 8"),
    ):
        pool = make_pool(spec)
        with server_log() as lines:
            host = pool.attach_host(Settings(host_gb=0.05))
        yield Scene(
            what, "server log", "\n".join(lines),
            (rf"^WARNING no host copies, the engine's own behaviour stays: {reason}",),
            {"the server goes on, without copies": host is None, "one line": len(lines) == 1},
        )  # fmt: skip
        indices = torch.arange(256, 300)
        yield Scene(
            f"{what}, and a copy is asked for all the same",
            "the exception",
            raised(functools.partial(pool.get_cpu_copy, indices, req_pool_index=1)),
            (rf"^LayoutRefused: DeepSeek-V4 host copy refused: {reason}",),
        )
    covered = make_pool(SPEC)
    with server_log() as lines:
        host = covered.attach_host(Settings(host_gb=0.05))
    yield Scene(
        "for comparison: a layout that is covered", "server log", "\n".join(lines),
        (r"^INFO host copies: [\d.]+ GiB, paged \d+ blocks, window \d+ blocks, request \d+ blocks$",),
        {"the pool has host memory": host is not None},
    )  # fmt: skip


DRILL = Drill(
    "layout",
    "The pool has a layout that is not covered",
    "Nothing, if stock behaviour is fine; else drop the option that the line names (docs/supported.md).",
    _play,
)
