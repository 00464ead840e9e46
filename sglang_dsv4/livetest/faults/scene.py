"""A drill is a story in scenes; a scene holds what the user saw and what had to be seen."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from unittest import mock

from sglang_dsv4.errors import HostCopyError, MustStop

NOTHING = "nothing was raised"
LOGGERS = ("sglang_dsv4", "sglang.srt.plugins")


@dataclass(frozen=True)
class Scene:
    """One thing that was done. seen: the text a user sees, at ``where``. expects: regular expressions it must hold.

    facts: what must be true beside the text, each with its name.
    """

    what: str
    where: str
    seen: str
    expects: tuple[str, ...]
    facts: Mapping[str, bool] = field(default_factory=dict)

    @property
    def missed(self) -> list[str]:
        """Expectations that were not met; empty when the scene is as it must be."""
        texts = [f"no text like {pattern!r}" for pattern in self.expects if not re.search(pattern, self.seen)]
        return texts + [f"not true: {name}" for name, true in self.facts.items() if not true]


@dataclass(frozen=True)
class Drill:
    """One kind of failure. todo: what to do about it. play: provokes it, scene by scene."""

    name: str
    title: str
    todo: str
    play: Callable[[], Iterator[Scene]]


def raised(call: Callable[[], object]) -> str:
    """What ``call`` raises of this package's errors, as a traceback ends; the text NOTHING when it returns."""
    try:
        call()
    except (HostCopyError, MustStop) as error:
        return f"{type(error).__name__}: {error}"
    return NOTHING


def refused_by(command: Callable[[], int]) -> str:
    """What a command line prints to stderr when it exits, with its exit status as the last line."""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
        try:
            status: object = command()
        except SystemExit as error:
            status = error.code
    return f"{printed.getvalue().strip()}\nexit status {status}"


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        self.setFormatter(logging.Formatter("%(levelname)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(without_frames(self.format(record)))


@contextlib.contextmanager
def server_log() -> Iterator[list[str]]:
    """The lines that a server's log would get inside the block, from this package and from the engine's plugins."""
    handler = _Lines()
    with contextlib.ExitStack() as stack:
        for name in LOGGERS:
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            stack.callback(setattr, logger, "propagate", logger.propagate)
            logger.setLevel(logging.INFO)
            logger.propagate = False
            logger.addHandler(handler)
            stack.callback(logger.removeHandler, handler)
        yield handler.lines


def without_frames(text: str) -> str:
    """A log line without the frames of its traceback; what was raised stays."""
    kept, inside = [], False
    for line in text.splitlines():
        if "Traceback (most recent call last)" in line:
            inside = True
            kept.append(f"{line} ...")
        elif not inside or not line.startswith(" "):
            inside = False
            kept.append(line)
    return "\n".join(kept)


def environment(**changes: str) -> contextlib.AbstractContextManager[object]:
    """``os.environ`` without settings of this package, plus ``changes``."""
    settled = ("DSV4_", "SGLANG_PLUGINS", "SGLANG_EXTERNAL_MODEL_PACKAGE")
    kept = {name: text for name, text in os.environ.items() if not name.startswith(settled)}
    return mock.patch.dict(os.environ, {**kept, **changes}, clear=True)
