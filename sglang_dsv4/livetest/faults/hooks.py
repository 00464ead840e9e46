"""A hook that is missing, a plugin that was not loaded, a release without an adapter: the server does not start."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Iterator
from typing import Any
from unittest import mock

from sglang_dsv4 import plugin
from sglang_dsv4.cli.main import main
from sglang_dsv4.engine import landed
from sglang_dsv4.engine.standalone import engine_version
from sglang_dsv4.livetest.faults.engine import a_new_process, start_pool
from sglang_dsv4.livetest.faults.scene import Drill, Scene, environment, raised, refused_by, server_log

UNSUPPORTED = "0.5.19"


def _play() -> Iterator[Scene]:
    from sglang.srt.disaggregation.decode import DecodePreallocQueue  # noqa: PLC0415

    engines_own: Any = DecodePreallocQueue.add.__wrapped__
    with mock.patch.object(DecodePreallocQueue, "add", engines_own):
        ended = raised(start_pool)
    yield Scene(
        "another plugin puts the engine's DecodePreallocQueue.add back", "the scheduler's exception", ended,
        (rf"^HooksNotLanded: hooks did not land in sglang {engine_version()}: \S*DecodePreallocQueue\.add: "
         r"is still the engine's own\..*DSV4_ENABLED=0",),
    )  # fmt: skip

    def renamed(self: Any, request: Any) -> None:
        """What a release that renames the parameters would have."""

    signature = inspect.signature(renamed)
    ours: Any = functools.wraps(DecodePreallocQueue.add)(renamed)
    ours.__signature__ = signature
    with mock.patch.object(DecodePreallocQueue, "add", ours):
        ended = raised(start_pool)
    yield Scene(
        "a release renames a parameter that the hook relies on", "the scheduler's exception", ended,
        (r"^HooksNotLanded: .*DecodePreallocQueue\.add: has no parameter is_rebootstrap, is_retracted, req\.",),
    )  # fmt: skip
    unsupported = mock.patch.object(plugin, "engine_version", lambda: UNSUPPORTED)
    with unsupported, environment(), server_log() as lines, a_new_process():
        ended = raised(start_pool)
    yield Scene(
        f"sglang {UNSUPPORTED} is installed", "server log, then the scheduler's exception",
        "\n".join([*(line for line in lines if line.startswith(logging.getLevelName(logging.ERROR))), ended]),
        (rf"ERROR sglang {UNSUPPORTED} has no adapter", rf"HooksNotLanded: sglang {UNSUPPORTED} has no adapter"),
    )  # fmt: skip
    with environment(SGLANG_PLUGINS="other"):
        said = refused_by(lambda: main(["serve", "--model-path", "M"]))
    yield Scene(
        "SGLANG_PLUGINS=other sglang-dsv4 serve --model-path M", "terminal", said,
        (r"SGLANG_PLUGINS='other' keeps the engine from loading this package; add sglang_dsv4", r"exit status 2"),
    )  # fmt: skip
    with mock.patch.object(landed, "_landings", []):
        ended = raised(landed.require_landed)
    yield Scene(
        "the model package is set, and the engine loaded no plugin", "the scheduler's exception", ended,
        (r"^HooksNotLanded: the engine did not load the plugin .*pip install",),
    )  # fmt: skip


DRILL = Drill(
    "hooks",
    "A hook is missing, or the plugin was not loaded",
    "sglang-dsv4 doctor names what is missing; install a supported release, or serve without this package "
    "(DSV4_ENABLED=0).",
    _play,
)
