"""Runs a load over servers that are started for it, or that run already, and reads their counters and log."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_dsv4.livetest import score, servers
from sglang_dsv4.livetest.load import STALLED, Load, Run, warm_up
from sglang_dsv4.livetest.retract_stats import RetractStats, counted_at, read_log, together
from sglang_dsv4.livetest.store_process import Killer
from sglang_dsv4.livetest.zeroing import switched_by
from sglang_dsv4.settings import read_settings

SETTLES = 2  # seconds after the last answer in which the server's counters get there


@dataclass
class Found:
    """Holds the outcome of one run: answers, the server's counts, and its first conversations held again, undamaged
    or damaged.
    """

    run: Run
    log: dict[str, Any]
    alive: bool
    exit: dict[str, int | None] = field(default_factory=dict)
    again: dict[str, Run] = field(default_factory=dict)


def serve_and_run(arguments: Namespace, load: Load, beside: Sequence[servers.Server]) -> Found:
    """Starts the servers, runs the load, stops them. beside: servers that come up meanwhile, and stay.

    With ``--score``, the first conversations once more, then again with a cache family zeroed in each loaded copy, for
    each family of ``--zero``. Each goes on behind its own answers, so that later turns read what was published damaged.
    Before each of these the cache is flushed, where there are later turns or sessions: they would read the pages of the
    run before. A server that keeps sessions is flushed after the run, too, before its counts are read: nothing may be
    held then. With ``--kill-store``, the store process of the server that is tested is killed during the run.
    """
    folder = arguments.logs / arguments.name
    word = (folder / "zero_family.txt").resolve()
    damages = switched_by(word)
    common = {"SGLANG_HOST_IP": "127.0.0.1", **_package(arguments)}
    environment = dict(common)
    if arguments.score:
        environment |= damages
    environment |= servers.forced_retracts(arguments.interval)
    if arguments.plain:
        if "--enable-hisparse" not in arguments.server:  # the engine's check does not know who is being staged
            environment |= {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
        environment |= {} if arguments.keep_tree else {"SGLANG_RADIX_FORCE_MISS": "1"}
    role, first_room = ("plain", None) if arguments.plain else ("decode", 1)
    started: list[servers.Server] = []
    try:
        if arguments.transfer == "nixl":
            words = [*(["--enable-metrics"] if arguments.sessions else []), *arguments.server]
            started.append(servers.launch("prefill", arguments.model_path, words, common, folder, "nixl"))
        watched = arguments.server if arguments.stock else ["--enable-metrics", *arguments.server]
        tested = servers.launch(role, arguments.model_path, watched, environment, folder, arguments.transfer)
        started.append(tested)
        servers.wait_until_up([*started, *beside], arguments.patience)
        if arguments.plain:
            warm_up([tested.url, *(server.url for server in beside)], arguments.vocabulary, arguments.timeout)
        prefill = started[0].url if arguments.transfer == "nixl" else None
        every = getattr(arguments, "kill_store", None)
        with Killer(tested, every) as killer:
            run = Run(load, arguments, tested.url, prefill, first_room).execute(arguments.name, arguments.turns)
        time.sleep(SETTLES)
        keeper = started[0] if arguments.sessions else None  # the server that prefills
        counted = counted_at(tested.url)
        counted.pop("sessions", None)  # read below, where they are kept
        if keeper is not None and ((kept := sessions_of(keeper.url)) or read_settings().sessions.asked):
            counted["sessions"] = kept
        log = together(counted, read_log(tested.log)) | ({} if every is None else {"store_kills": killer.kills})
        again, room = {}, first_room and first_room + arguments.turns * len(load.prompts)
        for name, said in score.words(arguments).items():
            word.write_text(said)
            if arguments.sessions or arguments.turns > 1:
                servers.flush(started[0].url)
            some = Run(load.first(arguments.score), arguments, tested.url, prefill, room)
            again[name] = some.execute(f"{arguments.name}, {name}", arguments.turns)
            room = room and room + arguments.turns * arguments.score
        alive = all(server.alive for server in started)
    finally:
        statuses = servers.stop_all(started)
    return Found(run, log, alive, statuses, again)


def sessions_of(url: str) -> dict[str, Any]:
    """Returns the counts of the sessions at ``url`` after a flush, with the server's fallbacks; empty where it keeps
    none.

    points_before and bytes_before: held before it.
    """
    before = counted_at(url)
    if "sessions" not in before:
        return {}
    servers.flush(url)
    time.sleep(SETTLES)
    after = counted_at(url)
    held = {f"{name}_before": before["sessions"][name] for name in ("points", "bytes")}
    return after.get("sessions", {}) | held | {"fallbacks": after.get("fallbacks", {})}


def _package(arguments: Namespace) -> dict[str, str]:
    if arguments.stock:
        return {"DSV4_ENABLED": "0"}
    return {"SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_dsv4.models", "DSV4_VERIFY": str(arguments.verify)}


def attach_and_run(arguments: Namespace, load: Load) -> Found:
    """Runs the load over servers that run already. Raises SaysNothing as ``RetractStats`` does."""
    stats = RetractStats(arguments.attach, arguments.log)
    room = None if arguments.plain else time.time_ns() // 1000  # no run before has used these
    given = (arguments.attach, arguments.prefill_url, room, arguments.bootstrap_port or servers.BOOTSTRAP_PORT)
    run = Run(load, arguments, *given).execute(arguments.name)
    time.sleep(SETTLES)
    return Found(run, stats.read(), servers.answers(arguments.attach, STALLED))
