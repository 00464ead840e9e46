"""The one table of settings. Environment variables, prefix ``DSV4_`` (the engine owns ``SGLANG_``).

A bad value is refused by name when the settings are read, which is at start.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from sglang_dsv4.errors import SettingError

TRANSFER_PATHS = ("auto", "staged", "triton", "torch")
PREP_WAYS = ("auto", "engine", "stream")


def _gigabytes(text: str) -> float | None:
    if text == "auto":
        return None
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) < 1 << 20:
            return value
    raise ValueError("must be a positive number of GiB, or auto")


def _count(text: str) -> int | None:
    if text == "auto":
        return None
    with contextlib.suppress(ValueError):
        if (value := int(text)) >= 1:
            return value
    raise ValueError("must be a whole number from 1, or auto")


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("must be 0 or 1")
    return text == "1"


def _choice(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return text

    return parse


@dataclass(frozen=True)
class Setting:
    """One row of the table: variable, parser, default as it would be written, meaning."""

    variable: str
    parse: Callable[[str], Any]
    default: str
    meaning: str


TABLE: dict[str, Setting] = {
    "enabled": Setting("DSV4_ENABLED", _flag, "1", "0 leaves the engine's own retraction untouched"),
    "host_gb": Setting(
        "DSV4_HOST_GB",
        _gigabytes,
        "auto",
        "pinned host memory for copies, GiB a rank; auto: what the whole device cache could need, "
        "at most half of the free RAM shared by the ranks of the machine",
    ),
    "host_copies": Setting(
        "DSV4_HOST_COPIES",
        _count,
        "auto",
        "most copies alive at once (each holds one window block and one request block); "
        "auto: the pool's request slots, at most a quarter of the arena",
    ),
    "transfer": Setting(
        "DSV4_TRANSFER",
        _choice(*TRANSFER_PATHS),
        "auto",
        "how bytes move: staged (kernels and copy engine through a staging ring), triton (kernels straight to pinned "
        "memory), torch (any device); auto: staged on CUDA, else torch",
    ),
    "prep": Setting(
        "DSV4_PREP",
        _choice(*PREP_WAYS),
        "auto",
        "who makes the metadata of an eager decode step: engine, or stream (this package, beside the forward before "
        "where that can be); auto: whichever measured faster, which is stream for every step it takes (docs/prep.md)",
    ),
    "verify": Setting(
        "DSV4_VERIFY",
        _flag,
        "0",
        "1 re-reads every load and compares it with the saved copy, byte for byte (slow)",
    ),
}


@dataclass(frozen=True)
class Settings:
    """Parsed settings; see ``TABLE`` for what each means."""

    enabled: bool = True
    host_gb: float | None = None
    host_copies: int | None = None
    transfer: str = "auto"
    prep: str = "auto"
    verify: bool = False


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from ``environ`` (default: the process environment).

    Raises SettingError for a value that cannot be used and for an unknown ``DSV4_`` variable.
    """
    environ = os.environ if environ is None else environ
    known = {setting.variable for setting in TABLE.values()}
    unknown = sorted(name for name in environ if name.startswith("DSV4_") and name not in known)
    if unknown:
        raise SettingError(f"unknown setting {unknown[0]}; known: {', '.join(sorted(known))}")
    values = {}
    for field in fields(Settings):
        setting = TABLE[field.name]
        text = environ.get(setting.variable, setting.default)
        try:
            values[field.name] = setting.parse(text)
        except ValueError as error:
            raise SettingError(f"{setting.variable}={text!r}: {error}") from error
    return Settings(**values)
