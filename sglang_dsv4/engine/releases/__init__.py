"""Names the window of engine releases, and gives the answers of the installed one.

The window is the newest tested release and the one before it. An older one is refused. A later one is tried with the
newest one's answers where every hook fits it, without plain serving and without this package's metadata.
"""

from __future__ import annotations

import functools
import importlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_dsv4.engine.releases.base import Release

TESTED = ("0.5.22", "0.5.23")  # releases that the suite runs against, each added by hand after such a run
SUPPORTED = f"{TESTED[0]} or later"
OLDER = {"0.5.22": "v0_5_22"}  # the others of the window, each with the module of its answers

Version = tuple[int, int, int]


def engine_version() -> str:
    """Returns the version of the installed sglang."""
    from importlib.metadata import version  # noqa: PLC0415

    return version("sglang")


def is_supported(version: str) -> bool:
    """Returns whether ``version`` is in the window or later; False for text that is not a version."""
    release = version_of(version)
    return release is not None and release >= parse(TESTED[0])


@functools.cache
def engine_release() -> Release:
    """Returns the answers of the installed release. Raises ValueError for one before the window."""
    return release_for(engine_version())


def release_for(version: str) -> Release:
    """Returns the answers of the release ``version``. Raises ValueError for one before the window."""
    if not is_supported(version):
        raise ValueError(f"sglang {version} is not supported: {SUPPORTED}")
    module = next((name for older, name in OLDER.items() if parse(older) == parse(version)), "base")
    found: Release = importlib.import_module(f"{__name__}.{module}").Release()  # they import torch
    return found


def version_of(text: str) -> Version | None:
    """Returns major, minor and patch; a suffix (rc, post, dev, +local) does not count. None: not a version."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    return tuple(int(part) for part in match.groups()) if match else None  # type: ignore[return-value]


def parse(text: str) -> Version:
    """Returns ``version_of`` a text that must be one."""
    version = version_of(text)
    if version is None:
        raise ValueError(f"not a version: {text!r}")
    return version


@dataclass(frozen=True)
class Ranged:
    """Names the releases that have a part. since: the first of them; before: the first without it. Empty: no limit."""

    since: str = ""
    before: str = ""

    def covers(self, version: str) -> bool:
        """Returns whether ``version`` is in the range."""
        release = parse(version)
        return (not self.since or parse(self.since) <= release) and (not self.before or release < parse(self.before))
