"""Parses arguments and runs commands: one line for a refusal or an interruption, before the work begins.

Each command reads its arguments by a ``Parser`` and runs in ``to_its_end``.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import re
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from sglang_dsv4.errors import SettingError

INTERRUPTED = 128  # plus the signal's number: the exit status after a signal
# Errors of standard output, and the exit status: a reader such as `head` left, a disk is full, or it was opened for
# reading.
UNWRITABLE = {errno.EPIPE: INTERRUPTED + signal.SIGPIPE, errno.ENOSPC: 1, errno.EBADF: 1}
# What the engine's modules say on a machine without a GPU when they are imported. It is true and of no use to commands.
NO_GPU_WARNINGS = (
    "Unable to find acceptable character detection dependency",
    "Only CUDA, HIP and XPU support AWQ",
    "Only CUDA, MUSA and NPU support GGUF",
    "Triton is not supported on current platform",
)
NO_GPU_LOGGER, NO_GPU_LINE = "sglang.kernels.jit.utils.arch", "Cannot detect CUDA architecture."
FILE_NAME = re.compile(r"\w[\w.+-]{0,99}")


class CommandError(RuntimeError):
    """Ends a command with a message and an exit status, without a traceback."""

    status = 2


class Parser(argparse.ArgumentParser):
    """Parses options by their whole names; a refusal is one line and exit status 2."""

    def __init__(self, prog: str | None = None, **given: Any) -> None:
        given = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False, **given}
        super().__init__(prog, **given)

    def error(self, message: str) -> NoReturn:
        """Exits with 2 and one line, without the usage, which may be a page long."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())} (see --help)\n")


def number(kind: type[int] | type[float], least: float, most: float = 1e6) -> Callable[[str], Any]:
    """Makes an argument type: a number from ``least`` to ``most``."""

    def parse(text: str) -> int | float:
        value = kind(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text[:40]}: needed: {least:.12g} to {most:.12g}")
        return value

    parse.__name__ = kind.__name__  # argparse quotes it for a value that is no number
    return parse


COUNT, COUNT_OR_ZERO = number(int, 1), number(int, 0)
SECONDS = number(float, 0.001)
CONCURRENCY = number(int, 1, 4096)  # a thread each
PORT = number(int, 1, 65535)


def file_name(text: str) -> str:
    """Parses an argument that is the name of a file, without its folder."""
    if not FILE_NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: needed: letters, digits and . _ + - (the folder is --out)")
    return text


def folder(text: str) -> Path:
    """Parses an argument that is a folder that can be written to, or be made. Nothing is made yet."""
    path = Path(text)
    try:
        at = path.absolute()
        while not at.exists():
            at = at.parent
        with tempfile.TemporaryFile(dir=at):
            return path
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text[:200]}: cannot be written to ({error.strerror})") from None


def readable_file(text: str) -> Path:
    """Parses an argument that is a readable file."""
    try:
        with Path(text).open("rb"):
            return Path(text)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text[:200]}: cannot be read ({error.strerror})") from None


def gpus() -> int:
    """GPUs that torch sees; 0 without torch."""
    try:
        import torch  # noqa: PLC0415 - takes seconds, and most commands need none of it
    except ImportError:
        return 0
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def end_when_told() -> None:
    """Makes SIGTERM, SIGHUP and SIGINT end this process and its children as Ctrl-C does.

    A shell's background job would ignore SIGINT. A process under nohup keeps ignoring SIGHUP.
    """
    for told in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if told != signal.SIGHUP or signal.getsignal(told) != signal.SIG_IGN:
            signal.signal(told, _interrupt)


def _interrupt(told: int, _: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt(told)


def silence_the_missing_gpu() -> None:
    """Drops what the engine says of a missing GPU, and nothing else."""
    for message in NO_GPU_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    logging.getLogger(NO_GPU_LOGGER).addFilter(_of_use)


def _of_use(record: logging.LogRecord) -> bool:
    return record.getMessage() != NO_GPU_LINE


def to_its_end(name: str, run: Callable[[], int | None]) -> int:
    """Runs command ``name`` and returns its exit status; interrupted, refused or without output it prints one line."""
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  (until the process ends)
    if sys.stdout is None:
        return _say(name, "standard output is closed", 1)
    silence_the_missing_gpu()
    try:
        status = run() or 0
        sys.stdout.flush()
    except KeyboardInterrupt as error:
        told = signal.Signals(error.args[0] if error.args else signal.SIGINT)
        return _say(name, f"interrupted ({told.name})", INTERRUPTED + told)
    except CommandError as error:
        return _say(name, str(error), error.status)
    except SettingError as error:
        return _say(name, str(error), 2)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "sglang_dsv4":
            raise
        return _say(name, missing_module(error.name), 1)
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
        if error.errno != errno.EPIPE:
            _say(name, f"standard output: {error.strerror}", 1)
        return UNWRITABLE[error.errno]
    return status


def missing_module(name: str) -> str:
    """Tells the user what to do without the module ``name``."""
    return (
        f"{name} is not installed for {sys.executable}: use the Python environment that your server runs in; "
        "`sglang-dsv4 doctor` checks it"
    )


def _say(name: str, message: str, status: int) -> int:
    print(f"{name}: {message}", file=sys.stderr)
    return status
