"""Finds the store processes of a server that was started here, and kills them again and again while it works."""

from __future__ import annotations

import contextlib
import threading

import psutil

from sglang_dsv4.livetest.servers import Server

WORKER = "sglang_dsv4.store.worker"


def store_processes(pid: int) -> list[psutil.Process]:
    """Returns the store processes below the process ``pid`` of a server: one for each of its arenas."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it ended meanwhile, and a zombie has no command line
                if WORKER in process.cmdline():
                    found.append(process)
    return found


class Killer:
    """Sends SIGKILL to the store processes of a server every ``seconds`` until it is left; None: to none."""

    def __init__(self, server: Server, seconds: float | None) -> None:
        self.kills = 0
        self._server, self._seconds, self._left = server, seconds, threading.Event()
        self._thread = threading.Thread(target=self._kill_them, daemon=True)

    def __enter__(self) -> Killer:
        if self._seconds is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        if self._seconds is not None:
            self._thread.join()

    def _kill_them(self) -> None:
        while not self._left.wait(self._seconds):
            for process in store_processes(self._server.process.pid):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
                    self.kills += 1
