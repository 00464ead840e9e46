"""Puts the engine's configuration of launch arguments into effect, as on the machine that they are for.

The engine parses and resolves them itself. This machine may lack the GPU, the model and the network devices.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import logging
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sglang_dsv4.cli.launch_command import LaunchError
from sglang_dsv4.cli.launch_gpu import gpu_facts
from sglang_dsv4.cli.launch_model import find_config
from sglang_dsv4.cli.plan_config import MODELS, ConfigError, Model, Variant, read_model

INFINIBAND = Path("/sys/class/infiniband")
IB_DEVICES = ("disaggregation_ib_device", "mooncake_ib_device")
UNKNOWN_TYPE = re.compile(r"model type [`'\"]?(\w+)[`'\"]? but Transformers does not recognize")
UNRECOGNIZED = re.compile(r"unrecognized arguments: (--[^\s=]+)")
LIKENESS = 0.8  # of two options, from which on one is taken for a misspelling
REFUSALS = (ValueError, AssertionError, RuntimeError, OSError, NotImplementedError)  # of the engine


class UnknownModel(LaunchError):
    """Reports a model type that the installed transformers does not have."""

    todo = f"serve it with a release of SGLang that knows it; this package covers {' and '.join(MODELS)}"


class Launch(NamedTuple):
    """Holds a server's configuration, in effect."""

    args: Any  # the engine's, raw
    model: Model | str  # or why it is none of this package's
    stand_in: str  # a sentence on the example that was taken for the model; empty where the model is on this machine
    notes: tuple[str, ...]  # sentences on what is not checked


@contextlib.contextmanager
def _undone() -> Iterator[None]:
    """Restores the environment and the handlers of the log on exit: reading launch arguments changes both."""
    environ, root = dict(os.environ), logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environ)
        root.handlers[:] = handlers
        root.setLevel(level)


@_undone()
def parse(words: list[str]) -> Any:
    """Returns what the engine's parser makes of ``words``. Raises LaunchError."""
    from sglang.srt.server_args import prepare_server_args  # noqa: PLC0415

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            return prepare_server_args(words)
    except SystemExit as error:
        text = _line(said.getvalue()).rpartition("error: ")[2]
        raise LaunchError(f"the engine's parser says: {text}{_nearest(text)}") from error


def _nearest(text: str) -> str:
    """Returns the engine's option that the first unrecognized one resembles, as a question; or nothing."""
    from sglang.srt.server_args import ServerArgs  # noqa: PLC0415

    unknown = UNRECOGNIZED.match(text)
    if unknown is None:
        return ""
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    names = [name for action in parser._actions for name in action.option_strings]
    near = difflib.get_close_matches(unknown[1], names, n=1, cutoff=LIKENESS)
    return f" (did you mean {near[0]}?)" if near else ""


@contextlib.contextmanager
def published(words: Sequence[str], gpu: str | None = None) -> Iterator[Launch]:
    """Yields the configuration of the engine's arguments ``words``, as in a scheduler; undone behind it.

    gpu: of ``launch_gpu.GPUS``; None: this machine's. Raises LaunchError.
    """
    from sglang.srt.runtime_context import create_context, use_context  # noqa: PLC0415

    with _undone(), tempfile.TemporaryDirectory() as scratch, gpu_facts(gpu):
        args = parse(list(words))
        found = find_config(args.model_path, Path(scratch, "model"))
        args.model_path = found.folder
        notes = [*_without_devices(args, elsewhere=gpu is not None)]
        if args.speculative_draft_model_path:
            draft = find_config(args.speculative_draft_model_path, Path(scratch, "draft"), is_draft=True)
            args.speculative_draft_model_path = draft.folder
            notes += [draft.note] if draft.note else []
        model: Model | str
        try:
            model = read_model(str(Path(found.folder) / "config.json"), Variant())
        except ConfigError as error:
            model = str(error)
        if args.device is None:
            args.device = "cuda"
        try:
            context = create_context(args, role="scheduler")
        except REFUSALS as error:
            raise _refusal(str(error), found.note) from error
        with use_context(context):
            yield Launch(args, model, found.note, tuple(notes))


def _without_devices(args: Any, elsewhere: bool) -> Iterator[str]:
    """Takes InfiniBand devices out of ``args`` that this machine cannot be asked for; yields a note."""
    if INFINIBAND.is_dir() and not elsewhere:
        return
    for field in IB_DEVICES:
        if getattr(args, field):
            setattr(args, field, None)
            yield f"--{field.replace('_', '-')} is not checked."


def _refusal(text: str, note: str) -> LaunchError:
    if unknown := UNKNOWN_TYPE.search(text):
        return UnknownModel(f"the installed transformers has no model type {unknown[1]!r}")
    return LaunchError(f"the engine refuses these arguments: {_line(text)}" + (f" ({note})" if note else ""))


def _line(text: str) -> str:
    """Returns the last line, where argparse and the engine put the reason."""
    return (text.strip().splitlines() or ["nothing"])[-1]
