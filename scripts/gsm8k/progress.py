"""Progress of a run on stderr: drawn on a terminal that has rich, else a line now and then."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

try:
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
except ImportError:  # a server's machine need not have it
    Progress = None

PLAIN_EVERY = 5.0  # seconds between progress lines without rich


@contextlib.contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[], None]]:
    """Progress on stderr; yields what to call after each question."""
    if Progress is not None and sys.stderr.isatty():
        columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(label, total=total)
            yield lambda: bar.advance(task)
        return
    done, said = 0, time.monotonic()

    def advance() -> None:
        nonlocal done, said
        done += 1
        if done == total or time.monotonic() - said >= PLAIN_EVERY:
            said = time.monotonic()
            print(f"{label}: {done}/{total}", file=sys.stderr, flush=True)

    yield advance
