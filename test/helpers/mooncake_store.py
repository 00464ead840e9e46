"""Starts and ends a real Mooncake on loopback: its master, and a process that owns the memory of the store.

A process of it dies with the test, however the test ends: ``setpriv`` asks the kernel to kill it with its parent. The
folder has a log a process; a failed test shows its path, and pytest keeps the folder.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import pytest

HOST = "127.0.0.1"
STARTS = 3  # a free port may be another's before it is ours
PATIENCE = 20.0  # seconds for a start: it takes 0.2 on an idle machine

# A client gives up after seconds, not after the 30 and 60 that are Mooncake's own.
SHORT_TIMEOUTS = {
    "MC_RPC_TIMEOUT_MS": "1000", "MC_RPC_CONNECT_TIMEOUT_MS": "500", "MC_TCP_STATUS_TIMEOUT_SEC": "1",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "1",
}  # fmt: skip

# An owner writes to its disk every 10 s, and whole buckets only, of 500 objects or 256 MB, by Mooncake's own limits.
DISK = "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH"
SINGLE_BUCKETS = {
    "MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR": "bucket_storage_backend", "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": "1",
    "MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES": str(32 << 20),
    "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(64 << 20), "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
}  # fmt: skip
NO_ENV: Mapping[str, str] = {}


def why_missing() -> str | None:
    """Returns why Mooncake cannot run here, or None."""
    if importlib.util.find_spec("mooncake") is None:
        return "mooncake is not installed: .ci/install-mooncake"
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        return f"mooncake cannot be imported: {error}; .ci/install-mooncake"
    return None


class Service:
    """One process of Mooncake and its log."""

    def __init__(
        self, folder: Path, binary: str, flags: Callable[[], Mapping[str, object]], env: Mapping[str, str] = NO_ENV
    ) -> None:
        self.log = folder / f"{binary}.log"
        self._binary, self._flags, self._env = binary, flags, env
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, is_ready: Callable[[], bool]) -> None:
        """Starts the process and waits until it serves."""
        for _ in range(STARTS):
            self._spawn()
            end = time.monotonic() + PATIENCE
            while self.process.poll() is None and time.monotonic() < end:
                if is_ready():
                    return
                time.sleep(0.02)
            self.kill()
        pytest.fail(f"{self._binary} does not start:\n{self.log.read_text()[-3000:]}")

    def _spawn(self) -> None:
        spec = importlib.util.find_spec("mooncake")
        path = Path(spec.submodule_search_locations[0]) / self._binary
        flags = [f"--{name}={value}" for name, value in self._flags().items()]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", path, "--logtostderr", *flags], stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, env={**os.environ, **self._env},
            )  # fmt: skip

    def kill(self) -> None:
        """Kills the process, also one that is stopped."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def hang(self) -> None:
        """Stops the process as one that hangs: its connections stay, nothing is answered.

        Each thread stops when it is scheduled next, and answers until then.
        """
        self.process.send_signal(signal.SIGSTOP)
        states = Path(f"/proc/{self.process.pid}/task")
        while any((task / "stat").read_text().rpartition(")")[2].split()[0] != "T" for task in states.iterdir()):
            time.sleep(0.001)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)


class Mooncake:
    """A master and an owner of memory, and the config of a server that uses them. A context: both end with it."""

    def __init__(self, folder: Path, segment: str = "64MB", disk: Path | None = None, **flags: object) -> None:
        """segment: memory of the owner. disk: a folder that it writes to as well. flags: of the master."""
        folder.mkdir(parents=True, exist_ok=True)
        print(f"Mooncake's logs: {folder}")
        self.port, self._admin = 0, 0
        self._segment, self._more = segment, flags
        self._disk = {"enable_offload": "true"} if disk is not None else {}
        self.master = Service(folder, "mooncake_master", self._of_master)
        self.owner = Service(folder, "mooncake_client", self._of_owner, SINGLE_BUCKETS | {DISK: str(disk)})

    def _of_master(self) -> dict[str, object]:
        if not self.port or not (is_free(self.port) and is_free(self._admin)):  # a restart keeps its ports
            self.port, self._admin = free_port(), free_port()
        ports = {"rpc_port": self.port, "metrics_port": self._admin}
        return {"rpc_address": HOST, "metrics_host": HOST, **ports, **self._disk, **self._more}

    def _of_owner(self) -> dict[str, object]:
        return {
            "host": HOST, "port": free_port(), "metadata_server": "P2PHANDSHAKE",
            "master_server_address": f"{HOST}:{self.port}", "protocol": "tcp", "global_segment_size": self._segment,
            **self._disk,
        }  # fmt: skip

    @property
    def config(self) -> dict[str, object]:
        """Returns the config of a server that gives no memory of its own."""
        return {
            "master_server_address": f"{HOST}:{self.port}", "metadata_server": "P2PHANDSHAKE", "local_hostname": HOST,
            "protocol": "tcp", "global_segment_size": 0,
        }  # fmt: skip

    def start_master(self) -> None:
        self.master.start(lambda: self._segments() is not None)

    def start_owner(self) -> None:
        """Starts the owner and waits until the master knows of one segment more."""
        before = self._segments()
        self.owner.start(lambda: (self._segments() or before) != before)

    def wait_for_segment(self, there: bool = True) -> None:
        """Waits until an owner that lives has told a new master of its segment, or until a dead owner's is gone."""
        end = time.monotonic() + PATIENCE
        while bool(self._segments()) != there:
            assert time.monotonic() < end, f"the master's segments: {self._segments()}"
            time.sleep(0.05)

    def _segments(self) -> set[str] | None:
        """Returns the names of all segments that the master knows; None where there is no answer."""
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self._admin}/get_all_segments", timeout=2) as answer:
                return set(answer.read().decode().split())
        except (urllib.error.URLError, OSError):
            return None

    def __enter__(self) -> Mooncake:
        try:
            self.start_master()
            self.start_owner()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.owner.kill()
        self.master.kill()


def free_port() -> int:
    with socket.socket() as one:
        one.bind((HOST, 0))
        return one.getsockname()[1]


def is_free(port: int) -> bool:
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((HOST, port))
        except OSError:
            return False
        return True


def is_running(pid: int) -> bool:
    """Returns whether a process lives; one that nobody reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
