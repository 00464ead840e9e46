"""Joins the points of a server to the store of DSV4_STORE, at its start.

Imported only where there is one: a server without a store has nothing of it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import os
import shutil
import socket
import stat
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any

from sglang_dsv4.engine.coverage import leave_store
from sglang_dsv4.engine.hooks.table import left_out
from sglang_dsv4.engine.memory import ranks_of
from sglang_dsv4.engine.ranks import will_be_first
from sglang_dsv4.engine.releases import engine_version
from sglang_dsv4.engine.state import server
from sglang_dsv4.errors import SettingError
from sglang_dsv4.hostmem.memory import HostMemory
from sglang_dsv4.pools.token_to_kv import TokenToKVPool
from sglang_dsv4.sessions.store import SessionStore
from sglang_dsv4.sessions.trie import Point
from sglang_dsv4.settings import Settings, read_settings
from sglang_dsv4.store import identity
from sglang_dsv4.store.backend import FOLDER, why_not
from sglang_dsv4.store.client import LEAST_FREE, WORKER, Arena, State, StoreClient
from sglang_dsv4.store.keys import Keys
from sglang_dsv4.store.process import Early, launch
from sglang_dsv4.store.tier import Tier
from sglang_dsv4.store.work import Patience

START = 60.0  # seconds that a server's start waits for the store's process, which imports the engine
BASE, PER_KI_TOKEN = 0.1, 0.03  # seconds: half of a prefill of Flash on an H100
OTHERS = stat.S_IRWXG | stat.S_IRWXO
MASTER, MASTERS_FILE = "MOONCAKE_MASTER", "SGLANG_HICACHE_MOONCAKE_CONFIG_PATH"  # as the engine's class reads them
COMMAND: tuple[str, ...] | None = None  # of the process; None: the worker's

logger = logging.getLogger(__name__)


def start_early() -> None:
    """Starts the store's process on a rank that may have the client: it imports the engine while weights are loaded."""
    settings = read_settings()
    joins = not left_out("DSV4_PLAIN", settings.plain, engine_version())  # ``join_store`` is behind these hooks
    if joins and server.early_store is None and will_be_first(settings.share):
        server.early_store = Early((*(COMMAND or WORKER), settings.store.backend))


def join_store(
    pool: TokenToKVPool, scheduler: Any, sessions: SessionStore, on_sent: Callable[[Point], None] = lambda point: None
) -> Tier | None:
    """Joins ``sessions``, of the copies of ``pool``, to the store; None where the weights are not those of the files.

    on_sent: see ``Tier``. Raises SettingError for settings that cannot be used.
    """
    settings, host = read_settings(), pool.host
    assert host is not None
    weights = host.context.weight_version
    if weights() != 0:  # before a switch of roles; the identity is of the files
        leave_store("the weights were updated since the start")
        return None
    config = config_of(settings)
    keys = Keys(sessions.trie, _identity(settings, pool, scheduler), settings.store_secret or None)
    client = None
    if host.memory.rank == 0:
        tell_of_others(settings, config)
        client = _client(settings, config, sessions, host.memory)
        _wait_until_up(client)
    together = host.true_on_every_rank
    tier = Tier(sessions, host.memory, client, keys, _patience(config), weights, together, on_sent)
    if host.counters.series:
        tier.counters.export(ranks_of(scheduler.metrics_collector))
    return tier


def tell_of_others(settings: Settings, config: Mapping[str, Any]) -> None:
    """Warns of a folder that others may enter, and of a master that more than a private network reaches."""
    path = folder_of(config)
    if settings.store.backend == "file" and path is not None and Path(path).stat().st_mode & OTHERS:
        logger.warning("store: others may read or write %s, and with it the cache of prompts: chmod 700", path)
    if settings.store.backend == "mooncake" and (master := _master(config)) and not _is_private(master):
        logger.warning("store: who reaches %s may read or write the cache of prompts: use a private network", master)


def _master(config: Mapping[str, Any]) -> str:
    """Returns the address of Mooncake's master: the configuration's, else the engine's file's, else its variable's."""
    named, file = config.get("master_server_address"), os.environ.get(MASTERS_FILE)
    if not named and file:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # of which the backend says more
            named = json.loads(Path(file).read_text()).get("master_server_address")
    elif not named:
        named = os.environ.get(MASTER)
    return str(named or "")


def _is_private(address: str) -> bool:
    """Returns whether all that ``address``, HOST:PORT, leads to is private; of a name that nobody knows, True."""
    host = address.rpartition(":")[0] or address
    with contextlib.suppress(OSError, ValueError):
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
        return all(ipaddress.ip_address(one[4][0]).is_private for one in found)
    return True


def _patience(config: dict[str, Any]) -> Patience:
    named = {"prefetch_timeout_base": BASE, "prefetch_timeout_per_ki_token": PER_KI_TOKEN}
    try:
        patience = Patience(*(float(config.get(name, usual)) for name, usual in named.items()))
    except (TypeError, ValueError) as error:
        raise SettingError(f"DSV4_STORE_CONFIG: {' and '.join(named)} must be seconds: {error}") from error
    if not all(0 <= seconds < inf for seconds in patience):  # NaN is neither
        raise SettingError(f"DSV4_STORE_CONFIG: {' and '.join(named)} must be seconds, and are {patience}")
    return patience


def config_of(settings: Settings) -> dict[str, Any]:
    """Returns the backend's configuration, with the folder of a store of files, which is made."""
    config, folder = dict(settings.store_config), settings.store.folder
    if folder:
        other = os.environ.get(FOLDER, folder)
        if other != folder:
            raise SettingError(f"DSV4_STORE={folder}: {FOLDER}={other} would come before it; unset one of them")
        config["file_storage_path"] = folder
    if (reason := why_not(settings.store.backend, config)) is not None:
        raise SettingError(reason)
    needed = ("xxhash", "blake3") if settings.store_secret else ("xxhash",)
    if missing := [name for name in needed if find_spec(name) is None]:
        raise SettingError(f"DSV4_STORE needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    path = folder_of(config)
    if settings.store.backend == "file" and path is not None:
        try:
            Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise SettingError(f"DSV4_STORE: the folder {path} cannot be made: {error}") from error
        if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
            raise SettingError(f"DSV4_STORE: the folder {path} cannot be written by this user")
        if folder:  # else a disk that is full keeps its oldest sessions, and takes no new one
            config.setdefault("min_free_space", str(least_free(path)))
    return config


def folder_of(config: Mapping[str, Any]) -> str | None:
    """Returns the folder of a store of files: the engine's variable comes first."""
    return os.environ.get(FOLDER) or config.get("file_storage_path")


def least_free(folder: str) -> int:
    """Returns the bytes that a store of files leaves free: a tenth of a small disk."""
    return min(LEAST_FREE, shutil.disk_usage(folder).total // 10)


def _identity(settings: Settings, pool: TokenToKVPool, scheduler: Any) -> bytes:
    from sglang.srt.runtime_context import get_lora, get_spec  # noqa: PLC0415

    assert pool.host is not None
    args, buffers, memory = scheduler.server_args, pool.host.buffers, pool.host.memory
    parts: dict[str, Any] = {
        "layout": identity.layout(memory.families, buffers.geometry.page_size, memory.units.nbytes),
        "kv": str(pool.dtype),
        "engine": ".".join(engine_version().split(".")[:2]),
        "model": _model(settings, args.model_path, args.revision),
        "override": args.json_model_override_args,
        "load": [args.load_format, args.quantization, args.dtype],
    }
    # The engine may find a draft that no argument names: in the model, whose digest has it, or in a folder below.
    draft = args.speculative_draft_model_path or get_spec().speculative_draft_model_path
    if draft and draft != args.model_path:
        parts["draft"] = _model(settings, draft, args.speculative_draft_model_revision)
    own = [args.speculative_draft_load_format, args.speculative_draft_model_quantization]
    if any(own):  # else the draft is loaded as the model is
        parts["load of the draft"] = own
    # The tree tells adapters that the server starts with by name and path, behind which there may be another one.
    # The record of arguments has them as words.
    parts["adapters"] = [
        [one.lora_name, identity.model_digest(identity.folder_of(one.lora_path, None), "adapter_config.json")]
        for one in get_lora().lora_paths or ()
    ]
    return identity.encoded(parts)


def _model(settings: Settings, model: str, revision: str | None) -> str:
    if settings.store_model != "auto":
        return settings.store_model
    return identity.model_digest(identity.folder_of(model, revision))


def _client(settings: Settings, config: dict[str, Any], sessions: SessionStore, memory: HostMemory) -> StoreClient:
    arena = Arena(
        memory.arena.file, memory.arena.start + memory.arena.nbytes, memory.arena.start, memory.pool.total,
        memory.units.nbytes,
    )  # fmt: skip
    folder = folder_of(config) if settings.store.backend == "file" else None
    least = LEAST_FREE if folder is None else least_free(folder)
    return StoreClient(
        arena, sessions.kept.in_tail, settings.store.backend, config, "dsv4", settings.store_secret or None,
        command=COMMAND, least_free=least, start=launch if server.early_store is None else server.early_store.launch,
    )  # fmt: skip


def _wait_until_up(client: StoreClient) -> None:
    """Waits for the store's process: the first requests of a server that comes back are to find it."""
    started = time.monotonic()
    client.poll()
    while client.state in (State.STARTING, State.DYING) and time.monotonic() < started + START:
        time.sleep(0.01)
        client.poll()
    if client.state is State.UP:
        logger.info("store: up after %.1f s; sessions outlive this server", time.monotonic() - started)
    else:
        logger.warning("store: it does not start, and is tried again while the server runs: %s", client.last_error)
