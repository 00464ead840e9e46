"""Puts an experiment into a server's scheduler: a model package, never for real requests.

Its model calls a ``module:function`` with one file: of a word that the experiment reads, or of notes that it writes.
"""

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

FUNCTION, FILE = "LIVETEST_FUNCTION", "LIVETEST_FILE"  # environment variables


def environment(function: str, file: Path, text: str = "", folder: Path | None = None) -> dict[str, str]:
    """Returns the environment of a server that calls ``function`` with ``file``, which begins with ``text``.

    folder: where the function's module is found; None: it is installed with this package.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    found = {"SGLANG_EXTERNAL_MODEL_PACKAGE": __name__, FUNCTION: function, FILE: str(file.resolve())}
    if folder:
        found["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return found


def note(notes: Path, **facts: Any) -> None:
    """Writes one line of JSON, an event."""
    with notes.open("a") as out:
        out.write(json.dumps(facts) + "\n")


def read(notes: Path) -> list[dict[str, Any]]:
    """Returns what was noted."""
    return [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []


def around(owner: Any, name: str, hook: Callable[..., Any]) -> None:
    """Puts ``hook(original, ...)`` in the place of ``owner.name``."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    setattr(owner, name, called)
