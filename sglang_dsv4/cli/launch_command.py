"""Finds the engine's arguments, and the variables of the environment, in the command that starts a server.

In front of the launcher there may be anything: a shell's words, numactl, nohup, docker.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sglang_dsv4.cli import serve
from sglang_dsv4.errors import HostCopyError

ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
DOCKERS = re.compile(r"(-e|--env=)(?=[A-Za-z_]\w*=)")  # option, in one word with a variable
ENDS = re.compile(r"&&?|\|\|?|;|\d*[<>].*", re.DOTALL)  # a word behind which a shell passes no more arguments
MODULES = ("sglang.launch_server", "dynamo.sglang", "launch_server.py")
OURS = ("sglang-dsv4", "sglang_dsv4.cli.main")  # in front of "serve"
THEIRS = ("sglang", "sglang.cli.main")
_HAS_LAUNCHER = re.compile(
    rf"(^|[\s/])({'|'.join(map(re.escape, MODULES))}|({'|'.join(map(re.escape, OURS + THEIRS))})\s+serve)(\s|$)"
)
KNOWN = "python3 -m sglang.launch_server, python3 -m dynamo.sglang, sglang serve, sglang-dsv4 serve"


class LaunchError(HostCopyError, ValueError):
    """Reports that the engine refuses the launch arguments; the message is the engine's.

    todo: the remedy.
    """

    todo = "correct the arguments behind --"


class Command(NamedTuple):
    """Holds the variables that a command sets, and the engine's arguments."""

    variables: dict[str, str]
    arguments: list[str]


def read_command(words: Sequence[str]) -> Command:
    """Reads a command line, or the arguments alone. Raises LaunchError where neither is found, SettingError for
    a misspelt option of ``sglang-dsv4 serve``.
    """
    words = list(_split_again(words))
    end = _launcher_end(words)
    before, arguments = words[:end], words[end:]
    launcher = before[-1] if end else ""
    while not end and arguments and ASSIGNMENT.fullmatch(arguments[0]):
        before.append(arguments.pop(0))
    if arguments and not end and not arguments[0].startswith("-"):
        raise LaunchError(f"{arguments[0][:80]!r} is no argument, and no launcher is among the words: {KNOWN}")
    variables = dict(_variables(before))
    arguments = _until_the_end(arguments)
    if launcher == "dynamo.sglang":
        arguments = _without_dynamos(arguments)
    ours = launcher == "serve" and _name(before[-2]) in OURS
    if ours:
        variables[serve.MODELS_VARIABLE] = serve.MODELS
    if ours or not launcher:
        options, arguments = serve.split(arguments)
        variables |= serve.environment(serve.parser().parse_args(options))
    return Command(variables, arguments)


def _split_again(words: Sequence[str]) -> Iterator[str]:
    """Yields ``words``; one that holds a whole command, quoted or for ``bash -c``, is split as a shell would."""
    for word in words:
        if len(word.split()) == 1 or not _HAS_LAUNCHER.search(word):
            yield word
            continue
        split = shlex.shlex(word.replace("\\\n", " "), posix=True, punctuation_chars=";&|")
        split.whitespace_split, split.commenters = True, ""
        try:
            yield from _split_again(list(split))
        except ValueError as error:
            raise LaunchError(f"{word[:80]!r}: {error}") from error


def _launcher_end(words: Sequence[str]) -> int:
    """Returns the place behind the launcher; 0 where there is none."""
    for place, word in enumerate(words):
        if _name(word) in MODULES or (word == "serve" and place and _name(words[place - 1]) in OURS + THEIRS):
            return place + 1
    return 0


def _name(word: str) -> str:
    return word.rpartition("/")[2]


def _variables(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    for word in words:
        bare = DOCKERS.sub("", word, count=1)
        if ASSIGNMENT.fullmatch(bare):
            name, _, value = bare.partition("=")
            yield name, value


def _until_the_end(words: list[str]) -> list[str]:
    """Returns the words in front of the first that a shell would keep to itself."""
    return words[: next((place for place, word in enumerate(words) if ENDS.fullmatch(word)), len(words))]


def _without_dynamos(words: Sequence[str]) -> list[str]:
    """Drops Dynamo's own options, each with its value."""
    kept: list[str] = []
    own = False  # whether the last option was Dynamo's
    for word in words:
        if word.startswith("-"):
            own = word.startswith("--dyn-")
        if not own:
            kept.append(word)
    return kept
