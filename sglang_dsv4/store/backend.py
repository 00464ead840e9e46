"""Puts, gets, finds and removes objects by name through the engine's storage backends.

Their common interface tells one boolean an object and no more. Which objects are there, and how a bad one is removed,
each backend has under names of its own, which change with releases: a class here for each says which it needs, and a
release without them is refused at start. A backend without such a class is asked by reading.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from sglang_dsv4.errors import HostCopyError
from sglang_dsv4.store.ring import Anchor, Ring
from sglang_dsv4.store.wire import Code

logger = logging.getLogger(__name__)

POOL = "deepseek_v4_c4"  # the name of a pool that all backends know; its objects are ours by their keys
REFUSED = {
    "aibrix": "it refuses models with one cache for all ranks, as DeepSeek-V4",
    "eic": "it has no batch_get_v2",
    "shm": "it keeps nothing",
    "sim": "it keeps no bytes",
    "simm": "it has no batch_get_v2",
    "tensorcast": "its batch_get_v2 takes the engine's own pools alone",
}
TAKEN = ("file", "mooncake", "nixl", "hf3fs", "mori", "npu_memcache", "seaweedfs", "dynamic")
FOLDER = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"  # the engine's; before the configuration's file_storage_path
# Mooncake waits 30 and 60 s for one that hangs; by then the whole process has been ended.
MOONCAKE_LIMITS = {
    "MC_RPC_TIMEOUT_MS": "5000", "MC_TCP_STATUS_TIMEOUT_SEC": "3", "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
}  # fmt: skip
READERS = 4  # files at a time: read one by one, a disk gives a half of its rate
OLD = 3600.0  # seconds; a temporary file of this age has lost its writer


class BackendUnfit(HostCopyError):
    """The store cannot be used as it is set up; the message says what to change."""


def why_not(name: str, config: Mapping[str, Any]) -> str | None:
    """Returns why a store cannot have this backend with this configuration; None: it may."""
    if name in REFUSED or name not in TAKEN:
        why = REFUSED.get(name, "there is no such backend")
        return f"DSV4_STORE={name}: {why}; choose one of {', '.join(TAKEN)}"
    if name == "file" and not (os.environ.get(FOLDER) or config.get("file_storage_path")):
        return 'DSV4_STORE=file needs a folder: DSV4_STORE_CONFIG=\'{"file_storage_path": "/nvme/store"}\''
    if name == "mooncake" and config.get("standalone_storage"):
        return "DSV4_STORE=mooncake cannot use standalone_storage, which allocates the memory itself: set it to false"
    fields = [field for field in ("backend_name", "module_path", "class_name") if field not in config]
    if name == "dynamic" and fields:
        return f"DSV4_STORE=dynamic: DSV4_STORE_CONFIG needs {', '.join(fields)}"
    return None


class Backend:
    """Wraps a backend of the engine. Puts come from one thread, the rest from another.

    Any method may raise what the backend raises.
    """

    needs: ClassVar[tuple[str, ...]] = ()  # names of the engine's class that this one uses
    can_remove = False
    advice = "what the backend itself needs"

    def __init__(self, name: str, engine: Any, ring: Ring, least_free: int) -> None:
        """Registers ``ring``. engine: the HiCacheStorage. least_free: bytes of a disk that puts must leave free."""
        from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer  # noqa: PLC0415

        self.name, self.engine, self.ring, self.least_free = name, engine, ring, least_free
        self.inner = getattr(engine, "_backend", engine)  # behind the engine's injector of faults
        self.pool, self._transfer = PoolName(POOL), PoolTransfer
        self._require()
        engine.register_mem_pool_host(Anchor())
        engine.register_mem_host_pool_v2(ring, self.pool)
        registered = getattr(engine, "on_host_pools_registered", None)  # not in every release
        if registered is not None:
            registered()

    def _require(self) -> None:
        """Raises BackendUnfit where this release's class lacks a method."""
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorage  # noqa: PLC0415

        found = type(self.inner)
        lacks = [name for name in self.needs if not hasattr(self.inner, name)]
        for name in ("batch_get_v2", "batch_set_v2"):
            if getattr(found, name, None) in (None, getattr(HiCacheStorage, name)):
                lacks.append(name)
        if lacks:
            raise BackendUnfit(
                f"DSV4_STORE={self.name}: {found.__name__} of this release of sglang has no {', '.join(lacks)}; "
                "use a release that docs/ names, or another backend"
            )

    def put(self, names: Sequence[str], slots: Sequence[int], group: str) -> list[bool]:
        """Stores the slots' bytes; False: surely not stored. group: what a store that can evicts together."""
        return self._batch(self.engine.batch_set_v2, names, slots)

    def get(self, names: Sequence[str], slots: Sequence[int]) -> list[Code]:
        """Reads into the slots. OK is what the backend says; MISSING, FAILED, or NO_SEAL where it is surely damaged."""
        return [Code.OK if ok else Code.MISSING for ok in self._batch(self.engine.batch_get_v2, names, slots)]

    def expect(self, names: Sequence[str]) -> None:
        """Takes a hint: these are read soon, in this order."""

    def exists(self, names: Sequence[str]) -> list[bool] | None:
        """Returns which objects the backend says are there; None: it cannot be asked."""
        return None

    def remove(self, name: str) -> bool:
        """Removes an object; True: a put stores new bytes now."""
        return False

    def room(self, nbytes: int) -> bool:
        """Returns whether ``nbytes`` may be put."""
        return True

    def is_full(self) -> bool:
        """Returns whether a put that was refused found no room."""
        return False

    def _batch(self, call: Callable[..., Any], names: Sequence[str], slots: Sequence[int]) -> list[bool]:
        indices = torch.tensor(slots, dtype=torch.int64)
        told = call([self._transfer(name=self.pool, keys=list(names), host_indices=indices)])[self.pool]
        done = [bool(one) for one in told]
        if len(done) != len(names):
            raise BackendUnfit(f"DSV4_STORE={self.name}: {len(done)} answers to {len(names)} keys")
        return done


def _on_threads() -> Callable[..., Iterator[Any]] | None:
    """Returns ``map`` on READERS threads, all of them running; None where a limit of processes forbids one."""
    pool, together = ThreadPoolExecutor(READERS, thread_name_prefix="dsv4-read"), threading.Barrier(READERS)
    try:
        for start in [pool.submit(together.wait) for _ in range(READERS)]:
            start.result()
    except RuntimeError as error:
        logger.warning("store: files are read one at a time: %s", error)
        together.abort()
        pool.shutdown(wait=False, cancel_futures=True)
        return None
    return pool.map


class FileBackend(Backend):
    """Objects are files of a folder, written under another name first; LRU by the engine, if max_size says so."""

    needs = ("file_path", "_get_component_key", "_evictor", "metadata_cache")
    can_remove = True

    def __init__(self, name: str, engine: Any, ring: Ring, least_free: int) -> None:
        super().__init__(name, engine, ring, least_free)
        self.folder = Path(self.inner.file_path)
        self._map = _on_threads() or map
        self.advice = f"owner, mode and free space of {self.folder}"
        self._sweep()

    def _sweep(self) -> None:
        """Removes what writers that were killed left half done."""
        with os.scandir(self.folder) as entries:
            left = [entry.path for entry in entries if entry.name.startswith(".") and entry.name.endswith(".tmp")]
        for path in map(Path, left):
            try:
                if time.time() - path.stat().st_mtime > OLD:
                    path.unlink()
            except OSError:  # another process was first, or it is another user's
                continue

    def get(self, names: Sequence[str], slots: Sequence[int]) -> list[Code]:
        """Reads one key a call: a file that is too short raises out of a batch."""
        return list(self._map(self._get, names, slots))

    def _get(self, name: str, slot: int) -> Code:
        self.ring.aim(slot)
        try:
            return super().get([name], [slot])[0]
        except OSError as error:  # short: without a number
            return Code.NO_SEAL if error.errno in (None, errno.EIO) else Code.FAILED

    def expect(self, names: Sequence[str]) -> None:
        """Lets the system read the files ahead."""
        for name in names:
            with contextlib.suppress(OSError):  # the read says why
                fd = os.open(self._file(name)[1], os.O_RDONLY)
                try:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
                finally:
                    os.close(fd)

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Returns which files are there; those are used now, for the engine's LRU."""
        return [self._touch(*self._file(name)) for name in names]

    def _touch(self, stem: str, path: Path) -> bool:
        there = path.exists()
        if there:
            self.inner._evictor.touch(stem, str(path))
        return there

    def remove(self, name: str) -> bool:
        """Removes the file and what the engine knows of it; False for another user's in a sticky folder."""
        stem, path = self._file(name)
        try:
            path.unlink(missing_ok=True)
        except OSError:
            return False
        self.inner._evictor.abort(stem)
        if self.inner.metadata_cache is not None:
            self.inner.metadata_cache.remove(stem)
        return True

    def room(self, nbytes: int) -> bool:
        """Returns whether the disk keeps its free bytes; where the engine evicts for them, it is the judge."""
        return not self.least_free or bool(self._evicts_below()) or self._free() - nbytes >= self.least_free

    def is_full(self) -> bool:
        """Returns whether one more object would take free bytes that stay, and nothing was left to evict for it."""
        return self._free() - self.ring.stride < (self._evicts_below() or self.least_free)

    def _free(self) -> int:
        disk = os.statvfs(self.folder)
        return disk.f_bavail * disk.f_frsize

    def _evicts_below(self) -> int:
        """Returns the free bytes below which the engine evicts; 0: it does not."""
        return int(getattr(self.inner._evictor, "min_free_bytes", 0) or 0)

    def _file(self, name: str) -> tuple[str, Path]:
        stem = self.inner._get_component_key(name, self.pool)
        return stem, self.folder / f"{stem}.bin"


# Of a get: no such object; one that nobody ended; one that is longer than a slot. What else is negative is a failure.
_MOONCAKE_CODES = {-704: Code.MISSING, -703: Code.MISSING, -600: Code.NO_SEAL}


class MooncakeBackend(Backend):
    """Objects lie in the memory and on the disks of a fleet; groups of them are evicted as one."""

    needs = (
        "_get_hybrid_page_component_keys",
        "_tag_keys",
        "_batch_exist",
        "_make_group_id",
        "_get_batch_zero_copy_impl",
        "store",
    )
    can_remove = True
    advice = "the master's address, and that a segment is mounted somewhere (a store process, global_segment_size)"

    def __init__(self, name: str, engine: Any, ring: Ring, least_free: int) -> None:
        super().__init__(name, engine, ring, least_free)
        self._group = ""
        self.inner._make_group_id = lambda _: self._group  # the engine's own is one a page, which keeps parts of chains

    def put(self, names: Sequence[str], slots: Sequence[int], group: str) -> list[bool]:
        """Stores the slots' bytes as members of ``group``."""
        self._group = f"dsv4-store:{group}"
        return super().put(names, slots, group)

    def get(self, names: Sequence[str], slots: Sequence[int]) -> list[Code]:
        """Reads past the engine's class, which tells a store that does not answer as one that has nothing."""
        addresses, sizes = self.ring.get_page_buffer_meta(torch.tensor(slots, dtype=torch.int64))
        told = self.inner._get_batch_zero_copy_impl(self._keys(names), addresses, sizes)
        return [self._judge(nbytes) for nbytes in told]

    def _judge(self, nbytes: int) -> Code:
        if nbytes > 0:
            return Code.OK if nbytes == self.ring.stride else Code.NO_SEAL
        return _MOONCAKE_CODES.get(nbytes, Code.FAILED)

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Returns which are there, and renews their leases. Raises ConnectionError where nobody answers."""
        told = self.inner._batch_exist(self._keys(names))
        if min(told, default=0) < 0:
            raise ConnectionError(f"Mooncake answers {min(told)}; check its master")
        return [found == 1 for found in told]

    def remove(self, name: str) -> bool:
        """Removes it whatever its lease; a put of a key that is there would say 0 and store nothing."""
        for key in self._keys([name]):
            self.inner.store.remove(key, True)
        return not self.exists([name])[0]

    def _keys(self, names: Sequence[str]) -> list[str]:
        keys, _ = self.inner._get_hybrid_page_component_keys(list(names), self._transfer(name=self.pool))
        tagged: list[str] = self.inner._tag_keys(keys)
        return tagged


class NixlBackend(Backend):
    """Objects are files or of an object store, written in place. One missing key fails the batch that it is in."""

    needs = ("_get_component_keys", "_query_keys_exist", "file_manager")
    can_remove = True
    advice = "the plugin, and SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR"

    def get(self, names: Sequence[str], slots: Sequence[int]) -> list[Code]:
        """Reads what is there; where that fails as a batch, one by one: an empty file is there, and cannot be read."""
        codes = [Code.OK if there else Code.MISSING for there in self.exists(names)]
        jobs = [(at, names[at], slots[at]) for at, code in enumerate(codes) if code is Code.OK]
        if not jobs or all(self._batch(self.engine.batch_get_v2, *zip(*((n, s) for _, n, s in jobs), strict=True))):
            return codes
        for at, name, slot in jobs:
            codes[at] = Code.OK if self._batch(self.engine.batch_get_v2, [name], [slot])[0] else Code.NO_SEAL
        return codes

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Returns which are there, whole or not."""
        return list(self.inner._query_keys_exist(self.inner._get_component_keys(list(names), self.pool)))

    def remove(self, name: str) -> bool:
        """Removes the file; an object is overwritten by the next put."""
        if self.inner.file_manager is not None:
            for key in self.inner._get_component_keys([name], self.pool):
                Path(self.inner.file_manager.get_file_path(key)).unlink(missing_ok=True)
        return True


_CLASSES: dict[str, type[Backend]] = {"file": FileBackend, "mooncake": MooncakeBackend, "nixl": NixlBackend}


def import_engine(name: str) -> None:
    """Imports what the engine's backend ``name`` needs, which takes seconds.

    Files need nothing of models and tokenizers, which the engine's own ``__init__`` imports: it is left out, in this
    process for good.
    """
    if name == "file" and "sglang" not in sys.modules and (spec := find_spec("sglang")) is not None:
        sys.modules["sglang"] = module_from_spec(spec)
    from sglang.srt.mem_cache import hicache_storage  # noqa: F401, PLC0415
    from sglang.srt.mem_cache.storage import backend_factory  # noqa: F401, PLC0415


def make_backend(name: str, config: Mapping[str, Any], model: str, ring: Ring, least_free: int = 0) -> Backend:
    """Makes the backend ``name`` as the engine does, for one client whatever the ranks, and registers ``ring``.

    config: that of --hicache-storage-backend-extra-config. model: part of each key. Raises BackendUnfit, or what the
    backend raises.
    """
    reason = why_not(name, config)
    if reason is not None:
        raise BackendUnfit(reason)
    extra = dict(config)
    if name == "mooncake":
        extra.setdefault("enable_group_semantics", True)
        for variable, value in MOONCAKE_LIMITS.items():
            os.environ.setdefault(variable, value)
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig  # noqa: PLC0415
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory  # noqa: PLC0415

    # One cache for all ranks, so no rank in a key; one client, which has the whole of what Mooncake divides by ranks.
    settings = HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=True,
        enable_storage_metrics=False, is_page_first_layout=True, model_name=model, extra_config=extra,
    )  # fmt: skip
    engine = StorageBackendFactory.create_backend(name, settings, Anchor())
    return _CLASSES.get(name, Backend)(name, engine, ring, least_free)


def start_check(backend: Backend) -> None:
    """Puts, finds, reads, compares and removes one block. Raises BackendUnfit, which says what to change.

    Uses the first and the last slot. A backend that cannot remove keeps the block: the same one at each start.
    """
    name = f"start-check-{secrets.token_hex(8) if backend.can_remove else 'block'}"
    first, last = 0, backend.ring.slots - 1
    source, target = backend.ring.slot(first), backend.ring.slot(last)
    source[:] = np.random.default_rng(list(name.encode())).integers(0, 256, source.size, np.uint8)
    target[:] = ~source

    def require(fine: bool, what: str) -> None:
        if not fine:
            raise BackendUnfit(
                f"DSV4_STORE={backend.name}: at the start a block {what}; check {backend.advice}, or start without "
                "DSV4_STORE"
            )

    require(backend.put([name], [first], name)[0], "could not be put")
    require((backend.exists([name]) or [True])[0], "was put and is not there")
    require(backend.get([name], [last])[0] is Code.OK, "was put and could not be read")
    require(np.array_equal(source, target), "was put and came back changed")
    if backend.can_remove:
        require(backend.remove(name), "could not be removed")
        require(not (backend.exists([name]) or [False])[0], "was removed and is still there")
    source[:] = target[:] = 0
