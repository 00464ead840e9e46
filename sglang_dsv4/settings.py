"""Reads the ``DSV4_`` environment variables and refuses misspelt or unusable ones at start.

``TABLE`` lists all settings (the engine owns ``SGLANG_``). DSV4_ENABLED is read first: with 0 nothing else is read. A
Kubernetes Service called ``dsv4-decode`` puts ``DSV4_DECODE_SERVICE_HOST`` and its like into every pod: they are passed
over. Any other unknown variable stops no server.
"""

# ruff: noqa: RUF009 - the fields' functions make fields
from __future__ import annotations

import contextlib
import difflib
import functools
import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from sglang_dsv4.errors import SettingError

logger = logging.getLogger(__name__)

PREFIX = "DSV4_"
LIKENESS = 0.7  # of two names without the prefix, from which on one is taken for a misspelling
# Variables that Kubernetes makes of a Service whose name begins with dsv4, and the value of the one called _PORT.
SERVICE_LINK = re.compile(
    r"DSV4_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?)"
)
SERVICE_PORT = re.compile(r"DSV4_(\w+_)?PORT=(tcp|udp|sctp)://.*")
MOST_GIB = 1 << 20
LEAST_SECRET = 16  # bytes


def _gigabytes(text: str) -> float | None:
    if text == "auto":
        return None
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) < MOST_GIB:
            return value
    raise ValueError(f"must be a positive number of GiB below {MOST_GIB}, or auto")


class Sessions(NamedTuple):
    """Says which servers keep the cache of requests that end.

    asked: prefill servers keep it, too, and a server that cannot warns; else plain servers alone. most_gib: of the host
    memory; None: all that no copy holds.
    """

    kept: bool = True
    asked: bool = True
    most_gib: float | None = None

    @property
    def most_bytes(self) -> int | None:
        """Returns the same in bytes."""
        return None if self.most_gib is None else int(self.most_gib * 2**30)


OFF, PLAIN_SERVERS = Sessions(kept=False, asked=False), Sessions(asked=False)


def _sessions(text: str) -> Sessions:
    if (known := {"off": OFF, "plain": PLAIN_SERVERS}.get(text)) is not None:
        return known
    with contextlib.suppress(ValueError):
        return Sessions(most_gib=_gigabytes(text))
    raise ValueError("must be a positive number of GiB, plain, auto or off")


class Store(NamedTuple):
    """Names the store of sessions. backend: the engine's name of it; empty: none. folder: of a store of files."""

    backend: str = ""
    folder: str = ""


def _store(text: str) -> Store:
    if text == "off":
        return Store()
    if "/" in text:
        if not Path(text).is_absolute():
            raise ValueError("must be an absolute folder, the name of a storage backend, or off")
        return Store("file", text)
    if re.fullmatch(r"\w+", text):
        return Store(text)
    raise ValueError("must be an absolute folder, the name of a storage backend, or off")


def _text_or_file(text: str) -> str:
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot be read: {error}") from error


def _store_config(text: str) -> dict[str, Any]:
    try:
        found = json.loads(_text_or_file(text))
    except json.JSONDecodeError as error:
        raise ValueError(f"must be JSON, or @FILE with it: {error}") from error
    if not isinstance(found, dict):
        raise ValueError("must be a JSON object")  # noqa: TRY004 - as the other parsers
    return found


def _secret(text: str) -> bytes:
    if text and not text.startswith("@"):
        raise ValueError("must be @FILE: what is in the environment can be read by others")
    found = _text_or_file(text).strip().encode()
    if text and len(found) < LEAST_SECRET:
        raise ValueError(f"must be a file of at least {LEAST_SECRET} bytes")
    return found


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
    """Holds one row of the table: variable, parser, default as text, meaning."""

    variable: str
    parse: Callable[[str], Any]
    default: str
    meaning: str


def setting(parse: Callable[[str], Any], default: str, meaning: str, **options: Any) -> Any:
    """Returns a field of ``Settings``, and of the table: parser, default as text, meaning. options: of the field."""
    row = {"parse": parse, "default": default, "meaning": meaning}
    return field(default_factory=lambda: parse(default), metadata=row, **options)


@dataclass(frozen=True)
class Settings:
    """Holds the parsed settings; a field names its variable, ``host_gb`` DSV4_HOST_GB."""

    enabled: bool = setting(_flag, "1", "0 leaves the engine's own retraction untouched")
    host_gb: float | None = setting(
        _gigabytes,
        "auto",
        "pinned host memory for copies, GiB an arena: one for the ranks of a machine with the same cache, else one a "
        "rank; auto: room for the whole device cache, at most half of the free RAM shared by the machine's arenas",
    )
    share: str = setting(
        _choice("auto", "off"),
        "auto",
        "sharing of one arena by the tensor-parallel ranks of a machine, each saving its part of a request; auto: if "
        "they hold the same cache and can open each other's memory; off: an arena a rank",
    )
    transfer: str = setting(
        _choice("auto", "torch"),
        "auto",
        "copier; auto: kernels and the copy engine on CUDA, the torch reference elsewhere; torch: the reference on any "
        "device",
    )
    prep: str = setting(
        _choice("auto", "off"),
        "auto",
        "builder of decode metadata; auto: this package, on tested releases, in graphs with one kernel and in eager "
        "steps on a stream of its own beside the forward before (docs/prep.md); off: the engine",
    )
    plain: str = setting(
        _choice("auto", "off"),
        "auto",
        "retracted requests of a server without disaggregation; auto: restored from the host copy, on tested releases; "
        "off: prefilled again by the engine, and no host memory is reserved; sessions and stores of all servers end",
    )
    sessions: Sessions = setting(
        _sessions,
        "plain",
        "finished requests whose cache stays in the host memory of DSV4_HOST_GB, for the next turn; plain: of plain "
        "servers, in all of it that no retracted request holds; auto: of prefill servers, too; a number: as auto, in "
        "at most so many GiB; off: of none",
    )
    store: Store = setting(
        _store,
        "off",
        "store that outlives the server, to which sessions are written and from which they come back (docs/store.md); "
        "a folder: files in it; a name: that storage backend of the engine, with DSV4_STORE_CONFIG; off: none",
    )
    store_config: dict[str, Any] = setting(
        _store_config,
        "{}",
        "configuration of the store's backend, JSON as for --hicache-storage-backend-extra-config, or @FILE with it",
    )
    store_model: str = setting(
        str,
        "auto",
        "name of the model in the store's keys; auto: a digest of its configuration and weights, so that no other "
        "model's cache is taken for its own",
    )
    store_secret: bytes = setting(
        _secret,
        "",
        "@FILE with a secret that the servers of a store share: keys and seals are made with it, and who does not have "
        "it can cause misses alone",
        repr=False,
    )
    layout: str = setting(
        _choice("stock", "page-major"),
        "stock",
        "page order of the compressed KV pools on a server that sends or receives them; page-major: the layers of a "
        "page together, which move in few pieces, on both ends (docs/page-major.md); stock: the engine's",
    )
    verify: bool = setting(
        _flag, "0", "1 re-reads every load and compares it with the saved copy, byte for byte (slow)"
    )


TABLE = {each.name: Setting(PREFIX + each.name.upper(), **each.metadata) for each in fields(Settings)}


def enabled_settings() -> Settings:
    """Reads settings for a command that shows this package at work. Raises SettingError with DSV4_ENABLED=0, too."""
    settings = read_settings()
    if not settings.enabled:
        raise SettingError("DSV4_ENABLED=0: the engine stays as it is, and there is nothing to show; unset it")
    return settings


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Reads settings from ``environ`` (default: the process environment). With DSV4_ENABLED=0 nothing else is read.

    Raises SettingError for an unusable value and for a misspelt name. Any other unknown ``DSV4_`` variable is logged
    once a process.
    """
    environ = os.environ if environ is None else environ
    if not _read(TABLE["enabled"], environ):
        return Settings(enabled=False)
    for name, nearest in unknown_names(environ).items():
        if nearest:
            raise SettingError(f"unknown setting {name}: did you mean {nearest}? Rename it or unset it")
        _warn_unknown(name)
    return Settings(**{name: _read(row, environ) for name, row in TABLE.items()})


def unknown_names(environ: Mapping[str, str]) -> dict[str, str | None]:
    """Finds ``DSV4_`` variables that are neither settings nor service links, each with the setting it resembles."""
    known = {setting.variable for setting in TABLE.values()}
    found = {name for name, text in environ.items() if name.startswith(PREFIX) and not _is_service_link(name, text)}
    return {name: _nearest(name) for name in sorted(found - known)}


def _read(setting: Setting, environ: Mapping[str, str]) -> Any:
    text = environ.get(setting.variable, setting.default)
    try:
        return setting.parse(text)
    except ValueError as error:
        raise SettingError(f"{setting.variable}={text!r}: {error}") from error


def _is_service_link(name: str, text: str) -> bool:
    return bool(SERVICE_LINK.fullmatch(name) or SERVICE_PORT.fullmatch(f"{name}={text}"))


def _nearest(name: str) -> str | None:
    """Returns the setting that ``name`` begins with or resembles; None: there is none."""
    given = name.removeprefix(PREFIX).upper()
    known = [setting.variable.removeprefix(PREFIX) for setting in TABLE.values()]
    longer = [word for word in known if given.startswith(f"{word}_")]
    found = longer or difflib.get_close_matches(given, known, n=1, cutoff=LIKENESS)
    return PREFIX + found[0] if found else None


@functools.cache
def _warn_unknown(name: str) -> None:
    known = ", ".join(setting.variable for setting in TABLE.values())
    logger.warning("%s is no setting of sglang_dsv4 and is left alone (settings: %s)", name, known)
