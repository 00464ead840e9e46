"""A hook that is missing, a plugin that was not loaded, a release that is not supported: the server does not start."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any
from unittest import mock

from sglang_dsv4.cli.main import main
from sglang_dsv4.engine.hooks import engines_class, install
from sglang_dsv4.engine.releases import engine_version
from sglang_dsv4.engine.state import server
from sglang_dsv4.livetest.faults.engine import a_new_process, start_pool
from sglang_dsv4.livetest.faults.scene import Drill, Scene, environment, raised, refused_by, server_log

UNSUPPORTED = "0.5.19"


def _play() -> Iterator[Scene]:
    from sglang.srt.disaggregation import decode  # noqa: PLC0415

    engines: Any = engines_class(decode.DecodePreallocQueue)
    with mock.patch.object(decode, "DecodePreallocQueue", engines):
        ended = raised(start_pool)
    yield Scene(
        "another plugin puts the engine's DecodePreallocQueue back", "the scheduler's exception", ended,
        (rf"^HooksNotLanded: hooks did not land in sglang {engine_version()}: \S*DecodePreallocQueue: "
         r"is still the engine's own[.;].*DSV4_ENABLED=0",),
    )  # fmt: skip

    def renamed(self: Any, request: Any) -> None:
        """What a release that renames the parameters would have."""

    with mock.patch.object(engines, "add", renamed):
        ended = raised(start_pool)
    yield Scene(
        "a release renames a parameter that the hook relies on", "the scheduler's exception", ended,
        (r"^HooksNotLanded: .*DecodePreallocQueue: its add has no parameter req, is_retracted, is_rebootstrap\.",),
    )  # fmt: skip
    unsupported = mock.patch.object(install, "engine_version", lambda: UNSUPPORTED)
    with unsupported, environment(), server_log() as lines, a_new_process():
        ended = raised(start_pool)
    yield Scene(
        f"sglang {UNSUPPORTED} is installed", "server log, then the scheduler's exception",
        "\n".join([*(line for line in lines if line.startswith(logging.getLevelName(logging.ERROR))), ended]),
        (rf"ERROR sglang {UNSUPPORTED} is not supported", rf"HooksNotLanded: sglang {UNSUPPORTED} is not supported"),
    )  # fmt: skip
    with environment(SGLANG_PLUGINS="other"):
        said = refused_by(lambda: main(["serve", "--model-path", "M"]))
    yield Scene(
        "SGLANG_PLUGINS=other sglang-dsv4 serve --model-path M", "terminal", said,
        (r"SGLANG_PLUGINS='other' keeps the engine from loading this package; add sglang_dsv4", r"exit status 2"),
    )  # fmt: skip
    with mock.patch.object(server, "watched", False):
        ended = raised(install.require_landed)
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
