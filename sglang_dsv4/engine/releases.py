"""SGLang renames and moves what we hook: which names a release has, and whether anybody has tried it.

A line is a run of releases in which the engine works alike, so that one adapter module serves them all. A name that
merely moved within a line is no new line: the entry of the hook table gets a release range.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from types import ModuleType

TESTED = ("0.5.17", "0.5.23")  # releases that the suite runs against, each added by hand after such a run

Release = tuple[int, int, int]


@dataclass(frozen=True)
class Line:
    """first, last: its releases; without a last one, every later release is tried with its adapter.

    adapter: the module with what differs. It defines PreallocQueue, WeightUpdater, retract_decode,
    commit_transfer_to_req, place_of and layout_refusal. v41: whether it serves DeepSeek-V4.1. without_copy: what
    becomes of a retracted request that has none.
    """

    first: str
    last: str | None
    adapter: str
    v41: bool = True
    without_copy: str = "computed again"

    def covers(self, release: Release) -> bool:
        """Whether ``release`` is one of the line's."""
        return parse(self.first) <= release and (self.last is None or release <= parse(self.last))

    def module(self) -> ModuleType:
        """The adapter. It imports the engine's scheduler; call it where a DeepSeek-V4 pool is being built."""
        return importlib.import_module(self.adapter)


LINES = (
    Line(
        "0.5.17",
        "0.5.17",
        "sglang_dsv4.engine.v0_5_17",
        v41=False,
        without_copy="computed again, by its prefill server, or answered with 503",
    ),
    Line("0.5.22", None, "sglang_dsv4.engine.v0_5_22"),
)
SUPPORTED = "0.5.17, and 0.5.22 or later"


def engine_version() -> str:
    """Version of the installed sglang."""
    from importlib.metadata import version  # noqa: PLC0415

    return version("sglang")


def line_of(version: str) -> Line | None:
    """The line of an engine version. None where no adapter fits (0.5.18 to 0.5.21), or for what is no version."""
    release = release_of(version)
    return next((line for line in LINES if line.covers(release)), None) if release else None


def without_v41(version: str) -> str | None:
    """Why a model of V4.1 cannot be made here; None where the release has it."""
    line = line_of(version)
    return None if line is not None and line.v41 else f"sglang {version} has no DeepSeek-V4.1; use {TESTED[-1]}"


def release_of(version: str) -> Release | None:
    """Major, minor and patch; a suffix (rc, post, dev, +local) does not count. None: not a version."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return tuple(int(part) for part in match.groups()) if match else None  # type: ignore[return-value]


def parse(version: str) -> Release:
    """``release_of`` a version that must be one."""
    release = release_of(version)
    if release is None:
        raise ValueError(f"not a version: {version!r}")
    return release


@dataclass(frozen=True)
class Ranged:
    """What only some releases have. since: the first of them; before: the first without it. Empty: no such limit."""

    since: str = ""
    before: str = ""

    def covers(self, version: str) -> bool:
        """Whether ``version`` is in the range."""
        release = parse(version)
        return (not self.since or parse(self.since) <= release) and (not self.before or release < parse(self.before))
