"""Lets clients leave, abort, flush and pause while copies exist: nothing leaks, and the others finish.

One decode server with the fake transfer, a retract forced every fourth step, DSV4_VERIFY=1. Again and again retracted
requests are kept away for a while (hold_resumes), so that soon all but one wait with their copies; then they may come
back. Of every five requests one is cut off by its client after a few tokens, one is aborted by its name, and two
more are cut off or aborted when they fall silent, which is when they wait with a copy. Meanwhile generation is paused
and continued, and the cache is flushed, which the engine refuses while requests run. Then a calm round must finish
whole.
"""

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hold_resumes import GO, HOLD, new_switch

from sglang_dsv4.bench import results
from sglang_dsv4.livetest import servers
from sglang_dsv4.livetest.retract_stats import counted_at, read_log, together

REQUESTS = 80
INTERVAL = 4  # steps between forced retracts
CALM = 32  # requests of the last round
CUT_OFF = ("left", "aborted", "left when silent", "aborted when silent")
DISTURBED = 10  # pauses, and flushes, at least
GIVEN_UP = 12  # copies, at least, of requests that left or were aborted while they waited
ALIVE = 8  # copies, at least, alive at once
STAYS, LEAVES_SILENT, ABORTED_SILENT, LEAVES, ABORTED = range(5)  # request number % 5
PAUSE, SILENCE = 0.1, 0.4  # seconds; a pause is shorter, so that who falls silent waits with a copy
HELD, FREE = 1.2, 1.0  # seconds in which retracted requests stay away, and in which they may come back


class Clients:
    """Those of a running server; their requests come in rounds."""

    def __init__(self, url: str, seed: int) -> None:
        self.url, self.draw = url, random.Random(seed)
        self.outcomes: Counter[str] = Counter()

    def round(self, first: int, count: int, calm: bool) -> None:
        """``count`` requests, sixteen at a time."""
        lengths = [(self.draw.randint(200, 1500), self.draw.randint(300, 800)) for _ in range(count)]
        with ThreadPoolExecutor(16) as pool:
            futures = [pool.submit(self._one, first + i, *lengths[i], calm) for i in range(count)]
        for future in futures:
            self.outcomes[future.result()] += 1

    def _one(self, number: int, prompt: int, new_tokens: int, calm: bool) -> str:
        fate = STAYS if calm else number % 5
        rid = f"drill-{number:06d}"  # the engine aborts every rid that begins with the given one
        body = {
            "rid": rid,
            "input_ids": [(7 * i + number) % 1900 + 20 for i in range(prompt)],
            "sampling_params": {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True},
            "bootstrap_host": servers.FAKE_HOST, "bootstrap_port": servers.BOOTSTRAP_PORT, "bootstrap_room": number + 1,
        }  # fmt: skip
        stop = random.Random(number).randint(20, 250)
        tokens = 0
        finish: dict[str, Any] = {}
        with contextlib.ExitStack() as watch:
            heard = watch.enter_context(self._aborted_when_silent(rid)) if fate == ABORTED_SILENT else None
            try:
                for chunk in servers.stream(self.url, body, 120, SILENCE if fate == LEAVES_SILENT else None):
                    tokens = chunk["meta_info"]["completion_tokens"]
                    finish = chunk["meta_info"].get("finish_reason") or {}
                    if heard is not None:
                        heard.set()
                    if fate == LEAVES and tokens >= stop:
                        return "left"  # the connection closes here
                    if fate == ABORTED and tokens == stop:
                        servers.post(self.url, "/abort_request", {"rid": rid}, 30)
            except TimeoutError:
                return "left when silent" if fate == LEAVES_SILENT else "lost"
            except (OSError, ValueError) as error:
                print(f"  request {number}: {type(error).__name__}: {error}", flush=True)
                return "lost"
        if finish.get("type") == "abort":
            return {ABORTED: "aborted", ABORTED_SILENT: "aborted when silent"}.get(fate, "lost")
        return "finished" if tokens == new_tokens else "lost"

    @contextlib.contextmanager
    def _aborted_when_silent(self, rid: str) -> Iterator[threading.Event]:
        """Abort ``rid`` once nothing was heard of it for a while after its first token."""
        heard, over = threading.Event(), threading.Event()

        def watch() -> None:
            heard.wait()
            while not over.is_set():
                heard.clear()
                if not heard.wait(SILENCE) and not over.is_set():
                    servers.post(self.url, "/abort_request", {"rid": rid}, 30)
                    return

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield heard
        finally:
            over.set()
            heard.set()
            watcher.join()

    def hold(self, stop: threading.Event, switch: Path) -> None:
        """Keeps retracted requests away for a while, again and again; in the end they may come back."""
        try:
            while not stop.is_set():
                for word, seconds in ((HOLD, HELD), (GO, FREE)):
                    switch.write_text(word)
                    stop.wait(seconds)
        finally:
            switch.write_text(GO)

    def disturb(self, stop: threading.Event) -> None:
        """Flush, pause and continue, again and again."""
        while not stop.wait(0.2):
            servers.post(self.url, "/pause_generation", {"mode": "in_place"}, 30)
            time.sleep(PAUSE)
            servers.post(self.url, "/continue_generation", {}, 30)
            self.outcomes["pauses"] += 1
            try:
                servers.post(self.url, "/flush_cache", {}, 30)
            except OSError as error:  # a flush is refused while requests run
                self.outcomes[f"flush answered {getattr(error, 'code', error)}"] += 1
            else:
                self.outcomes["flushes"] += 1


def judge(wild: Counter[str], calm: Counter[str], log: dict[str, Any], alive: bool) -> list[dict[str, Any]]:
    """What became of the requests of both rounds; what log and metrics say."""
    return [
        results.bound("requests lost", "<= 0", wild["lost"] + calm["lost"]),
        *(results.bound(f"requests {fate}", ">= 5", wild[fate]) for fate in CUT_OFF),
        results.bound("pauses", f">= {DISTURBED}", wild["pauses"]),
        results.bound("flushes done or refused", f">= {DISTURBED}", wild["flushes"] + wild["flush answered 400"]),
        results.bound("copies released without a load", f">= {GIVEN_UP}", log["saves"] - log["loads"]),
        results.bound("copies alive at once", f">= {ALIVE}", log["copies_alive_peak"]),
        results.bound("copies alive after the calm round", "<= 0", log["copies_alive_at_end"]),
        results.bound("metrics of this package", ">= 1", int("held_bytes_at_end" in log)),
        results.bound("host memory held after the calm round, bytes", "<= 0", log.get("held_bytes_at_end", 0)),
        results.bound("loads not compared with their copy", "<= 0", log["loads"] - log.get("verified", 0)),
        results.bound("trouble in the log", "<= 0", len(log["trouble"])),
        results.bound("server alive at the end", ">= 1", int(alive)),
    ]


def play(url: str, switch: Path, requests: int, seed: int) -> tuple[Counter[str], Counter[str]]:
    """A disturbed round, then a calm one; what became of the requests of each."""
    wild, calm = Clients(url, seed), Clients(url, seed + 1)
    stop = threading.Event()
    others = [
        threading.Thread(target=wild.disturb, args=(stop,), daemon=True),
        threading.Thread(target=wild.hold, args=(stop, switch), daemon=True),
    ]
    for other in others:
        other.start()
    wild.round(0, requests, calm=False)
    stop.set()
    for other in others:
        other.join()
    calm.round(requests, CALM, calm=True)
    return wild.outcomes, calm.outcomes


def test_nothing_leaks_while_clients_leave_abort_flush_and_pause(start, arguments, require):
    switch, environment = new_switch(arguments.logs)
    environment |= servers.forced_retracts(INTERVAL) | {"DSV4_VERIFY": "1"}
    decode = start("decode", ["--enable-metrics"], environment)
    servers.wait_until_up([decode], servers.PATIENCE)
    wild, calm = play(decode.url, switch, REQUESTS, arguments.seed)
    time.sleep(2)
    log = together(counted_at(decode.url), read_log(decode.log))
    rows = [{"run": "disturbed", **wild}, {"run": "calm", **calm}, {"run": "log", **log}]
    require(rows, judge(wild, calm, log, decode.alive))
