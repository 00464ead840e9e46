"""Starts an SGLang server with this package in it.

Options that are not listed here, and everything after ``--``, go to sglang.launch_server unchanged and in order.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

from sglang_dsv4.command_line import Parser
from sglang_dsv4.errors import SettingError
from sglang_dsv4.settings import TABLE, Setting, read_settings, unknown_names

PLUGIN_GROUP = "sglang.srt.plugins"
PLUGIN = "sglang_dsv4.plugin:install"
ALLOW_LIST = "SGLANG_PLUGINS"
MODELS_VARIABLE = "SGLANG_EXTERNAL_MODEL_PACKAGE"
MODELS = "sglang_dsv4.models"


def main(argv: Sequence[str]) -> int:
    """Becomes the server; returns only for ``--dry-run``. Exits with 2 for arguments that cannot be served."""
    own = parser()
    try:
        ours, engine = split(argv)
        arguments = own.parse_args(ours)
        changes = environment(arguments)
        enabled = read_settings({**os.environ, **changes}).enabled
    except SettingError as error:
        own.error(str(error))
    if enabled:  # switched off, nothing is asked of the environment and nothing of ours is put into it
        changes = {MODELS_VARIABLE: MODELS, **changes}
        trouble = models_trouble(os.environ) or plugin_trouble(os.environ)
        if trouble is not None:
            own.error(trouble)
    command = [sys.executable, "-m", "sglang.launch_server", *engine]
    if not arguments.dry_run and importlib.util.find_spec("sglang") is None:
        raise ModuleNotFoundError("No module named 'sglang'", name="sglang")
    if arguments.dry_run:
        for name, text in changes.items():
            print(f"{name}={shlex.quote(text)} \\")
        print(shlex.join(command))
        return 0
    sys.stdout.flush()
    os.execvpe(sys.executable, command, {**os.environ, **changes})


def environment(arguments: argparse.Namespace) -> dict[str, str]:
    """Returns the variables that the options of ``parser`` set."""
    return {s.variable: text for n, s in TABLE.items() if (text := getattr(arguments, n)) is not None}


def models_trouble(environ: Mapping[str, str]) -> str | None:
    """Returns why another model package has the engine's one place for it, with the remedy; None when it is free."""
    package = environ.get(MODELS_VARIABLE)
    if package and package != MODELS:
        return f"{MODELS_VARIABLE}={package!r}: this package needs it to be {MODELS}; unset it"
    return None


def plugin_trouble(environ: Mapping[str, str]) -> str | None:
    """Returns why the engine would not load this package's plugin, and the remedy; None when it would."""
    names = [entry.name for entry in entry_points(group=PLUGIN_GROUP) if entry.value == PLUGIN]
    if not names:
        return (
            f"the engine would not find this package: {sys.executable} has no entry point {PLUGIN} in the group "
            f"{PLUGIN_GROUP}; pip install --no-deps . (in the checkout of this package)"
        )
    listed = environ.get(ALLOW_LIST, "")
    if listed and not {name.strip() for name in listed.split(",")} & set(names):
        return f"{ALLOW_LIST}={listed!r} keeps the engine from loading this package; add {names[0]} to it or unset it"
    return None


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns (our arguments, the engine's). Ours are known by their whole names, since the engine has --dsv4- options
    too.

    Raises SettingError for an option in front of ``--`` that resembles one of ours.
    """
    ours: list[str] = []
    engine: list[str] = []
    settings = {_option(setting): setting for setting in TABLE.values()}
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--":
            return ours, engine + words
        name = word.partition("=")[0]
        if name in settings:
            ours.append(word)
            # A switch may stand alone; any other option takes what follows, so that argparse can refuse it by name.
            stop = "-" if _is_switch(settings[name]) else "--"
            if "=" not in word and words and not words[0].startswith(stop):
                ours.append(words.pop(0))
        else:
            _refuse_misspelt(name)
            (ours if word in ("-h", "--help", "--dry-run") else engine).append(word)
    return ours, engine


def _refuse_misspelt(option: str) -> None:
    variable = option.removeprefix("--").upper().replace("-", "_")
    nearest = unknown_names({variable: ""}).get(variable) if option.startswith("--") else None
    if nearest:
        raise SettingError(
            f"unknown option {option}: did you mean {_named(nearest)}? (behind -- it would go to the engine)"
        )


def parser() -> Parser:
    """Returns the options that are ours."""
    usage = "sglang-dsv4 serve [options] [--] [arguments of sglang.launch_server]"
    found = Parser("sglang-dsv4 serve", description=__doc__, usage=usage)
    found.add_argument("--dry-run", action="store_true", help="print the environment changes and the command")
    for name, setting in TABLE.items():
        value: dict[str, Any] = {"metavar": "VALUE"}
        if _is_switch(setting):
            value = {"metavar": "0|1", "nargs": "?", "const": "1"}
        text = f"{setting.variable} (default: {setting.default}): {setting.meaning}".replace("%", "%%")
        found.add_argument(_option(setting), dest=name, help=text, **value)
    return found


def _option(setting: Setting) -> str:
    return _named(setting.variable)


def _named(variable: str) -> str:
    return "--" + variable.lower().replace("_", "-")


def _is_switch(setting: Setting) -> bool:
    return isinstance(setting.parse(setting.default), bool)
