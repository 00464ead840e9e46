"""Measures what sessions cost where nobody gains: a server that keeps them beside the same without, by turns.

    python3 -m benchmarks.session_costs --scene crowd --config CONFIG -- --mem-fraction-static 0.9

Two plain servers of this package stand on one card, with the same arguments, the same DSV4_HOST_GB and the same
requests. One has DSV4_SESSIONS=auto, the other one off. One is suspended while the other runs, and each round changes
who is first. A round before the first one is not counted.

crowd: so many requests at a time (--running), of unique prompts, and nobody comes back.
together: so many requests of one length end in one pass; beside them one more request is streamed.
queue: so many requests (--waiting) wait, for four others have all slots.
long: one prompt (--long) is prefilled, and so kept chunk by chunk, beside four that decode. One pass of theirs follows
each chunk.
waiting: such a prompt finds no room, while short requests come, are kept and go: first without it, then beside it.
Arguments after -- go to both servers. Exit status 1 when a bound is missed.
"""

import abc
import argparse
import bisect
import contextlib
import http.client
import itertools
import json
import math
import random
import re
import statistics
import sys
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.client import add_requests, model_of
from benchmarks.steps import CONFIDENCE, interval
from sglang_dsv4.bench import results
from sglang_dsv4.command_line import CONCURRENCY, COUNT, SECONDS, number, readable_file
from sglang_dsv4.livetest import score, servers
from sglang_dsv4.livetest.load import Load, Run, check_lengths, count_outcomes, warm_up
from sglang_dsv4.livetest.retract_stats import counted_at, percentile, read_log

SESSIONS, OFF = "with sessions", "without"
ALL = "all rounds "  # begins the name of the row of a server's rounds together
WARM_UP, FEW = -1, 1000  # the round that is not counted; at most so many wait in it
PAGE, CONTEXT, LONGEST = 256, 65536, 2**20 - 256  # the model's context, with room for an answer
BESIDE, LASTS, SETTLED = 4, 60_000, 20  # requests that decode; their new tokens, of which so many come first
SHORT, SHORT_NEW = 1100, 8  # tokens of a prompt of which a point is kept, and of its answer
GRAPHS = (1, 4, 16, 64, 128)  # batch sizes, and the largest that may run
NEW, AFTER, ONE_PASS = 200, 0.5, 0.05  # of requests that end together: tokens, seconds looked at, seconds between ends
QUEUED, QUEUE_FILLS = 40, 90  # tokens of a request that waits; seconds until all of them do
GREEDY = {"temperature": 0, "ignore_eos": True}
PACE = 0.1  # seconds from a short request to the next
WAITS = re.compile(r"^sglang:num_queue_reqs\{[^}]*\} ([\d.e+]+)$", re.M)

Row = dict[str, Any]
Measured = tuple[Row, list[float]]  # figures, and the milliseconds of each request or gap
Figure = Callable[[Row, Row], float]  # of the rows of both servers in a round

# ---------------------------------------------------------------------- requests


def prompt(seed: str, tokens: int, vocabulary: int) -> list[int]:
    """Returns the seeded prompt of so many tokens."""
    return random.Random(seed).choices(range(10, vocabulary), k=tokens)


def asked(prompts: Sequence[Any], new_tokens: int) -> Row:
    """Returns the body of a request for so many tokens behind a prompt, or behind each of several."""
    return {"input_ids": prompts, "sampling_params": {"max_new_tokens": new_tokens, **GREEDY}}


def count_whole(url: str, body: bytes, new_tokens: int, timeout: float) -> tuple[int, list[Row]]:
    """Sends a request of several prompts; returns how many answers are whole, and all. body: encoded before, which
    would hold up the threads that read.
    """
    request = urllib.request.Request(f"{url}/generate", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            said = list(json.loads(answer.read()))
    except (OSError, ValueError, http.client.HTTPException) as error:
        print(f"  no answer: {type(error).__name__}: {error}", flush=True)
        return 0, []
    return sum(len(answer["output_ids"]) == new_tokens for answer in said), said


def queued(url: str, count: int) -> int:
    """Returns how many requests wait at the server, as soon as ``count`` do, or after QUEUE_FILLS seconds."""
    deadline, found = time.monotonic() + QUEUE_FILLS, 0
    while found < count and time.monotonic() < deadline:
        time.sleep(0.05)
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
            found = max((int(float(told)) for told in WAITS.findall(answer.read().decode())), default=0)
    return found


class Decodes:
    """Streams some long answers until it is left, and keeps when their tokens came. It aborts all requests then."""

    def __init__(self, url: str, count: int, seed: str, arguments: argparse.Namespace) -> None:
        self.url, self.timeout, self._left = url, arguments.timeout, False
        self.arrived: list[list[tuple[float, int]]] = [[] for _ in range(count)]  # a time, and the tokens until then
        self.ended: list[str] = []  # why, of those that ended before
        prompts = [prompt(f"{seed}, {at} beside", SHORT, arguments.vocabulary) for at in range(count)]
        pairs = zip(prompts, self.arrived, strict=True)
        self._threads = [threading.Thread(target=self._read, args=pair, daemon=True) for pair in pairs]

    def __enter__(self) -> "Decodes":
        for thread in self._threads:
            thread.start()
        while any(len(times) < SETTLED for times in self.arrived):
            if self.ended:
                raise servers.ServerDied(f"a request beside the others ended: {self.ended[0]}")
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._left = True
        servers.post(self.url, "/abort_request", {"abort_all": True}, self.timeout)
        for thread in self._threads:
            thread.join(self.timeout)

    def _read(self, tokens: list[int], arrived: list[tuple[float, int]]) -> None:
        why = "all its tokens came"
        try:
            for chunk in servers.stream(self.url, asked(tokens, LASTS), self.timeout):
                finish = chunk.get("meta_info", {}).get("finish_reason") or {}
                if "error" in chunk or finish.get("type") == "abort":
                    why = str(chunk)[:300]
                    break
                arrived.append((time.monotonic(), chunk["meta_info"]["completion_tokens"]))
        except (OSError, ValueError, http.client.HTTPException) as error:
            why = f"{type(error).__name__}: {error}"
        if not self._left:
            self.ended.append(why)

    def counted(self, others: int = 0, whole: int = 0) -> Row:
        """Returns how many requests there were, and how many of them went well: one here that goes on does."""
        here = len(self.arrived)
        return {"asked": others + here, "whole": whole + here - len(self.ended)}

    def gaps_ms(self, start: float, end: float = math.inf) -> list[float]:
        """Returns the gaps between chunks that reach into the time from ``start`` to ``end``."""
        pairs = itertools.chain.from_iterable(itertools.pairwise(list(times)) for times in self.arrived)
        return [(later - before) * 1e3 for (before, _), (later, _) in pairs if later >= start and before <= end]

    def pass_ms(self, start: float, end: float) -> float:
        """Returns the time a token from ``start`` to ``end``. Late chunks move gaps, and hardly this."""
        inside = [[at for at in list(times) if start <= at[0] <= end] for times in self.arrived]
        ends = [(times[0], times[-1]) for times in inside if len(times) > 1]
        if not ends:
            raise servers.ServerDied(f"no tokens came in {end - start:.1f} s: {self.ended}")
        return statistics.median((last - first) / (has - had) * 1e3 for (first, had), (last, has) in ends)


# ---------------------------------------------------------------------- scenes


class Scene(abc.ABC):
    """Measures one server's part of a round, and names the figures that are compared.

    compared: a name, its bound, and a figure of which the median round counts. needed: a name, its bound, and the
    field that must meet it in each row.
    """

    unit: str
    compared: tuple[tuple[str, str, Figure], ...] = ()
    needed: tuple[tuple[str, str, str], ...] = ()

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.sizes = arguments, arguments.sizes

    @abc.abstractmethod
    def words(self) -> list[str]:
        """Returns the server arguments that the scene needs."""

    @abc.abstractmethod
    def run(self, url: str, size: int, seed: str, counts: bool) -> Measured:
        """Measures. counts: whether the round does."""

    def prompts(self, seed: str, count: int, tokens: int, new_tokens: int) -> bytes:
        """Returns the encoded request of so many prompts."""
        drawn = [prompt(f"{seed}-{at}", tokens, self.arguments.vocabulary) for at in range(count)]
        return json.dumps(asked(drawn, new_tokens)).encode()

    def judge(self, of: dict[str, list[Row]], at: str) -> list[Row]:
        """Returns the bounds of one size."""
        rounds = list(zip(of[SESSIONS], of[OFF], strict=True))
        each = [(name, limit, min(row[key] for pair in rounds for row in pair)) for name, limit, key in self.needed]
        each += [(name, limit, statistics.median(itertools.starmap(f, rounds))) for name, limit, f in self.compared]
        return [results.bound(f"{name}, {at}", limit, value) for name, limit, value in each]


def longer(key: str) -> Figure:
    """Returns the figure that tells by how much sessions make ``key`` longer."""
    return lambda ours, off: float(ours[key] - off[key])


def ratio(key: str) -> Figure:
    """Returns the figure that tells ``key`` with sessions by that without."""
    return lambda ours, off: float(ours[key] / off[key])


class Crowd(Scene):
    """Runs requests that never come back; the milliseconds are those of each whole request."""

    unit = "running"
    compared = (("tokens a second, by those without, median round", ">= 0.99", ratio("tokens_a_second")),)

    def words(self) -> list[str]:
        """Makes room for as many; an answer comes in few chunks, so that the client keeps up."""
        most, longest = max(self.sizes), self.arguments.prompt[1] + self.arguments.new_tokens[1]
        return [*room(most, most * (longest + 2 * PAGE)), "--swa-full-tokens-ratio", "0.3", "--stream-interval", "64"]

    def run(self, url: str, size: int, seed: str, counts: bool) -> Measured:
        """Sends ``--requests`` times as many as run, of the same lengths in each round: other lengths would compile."""
        more = {"requests": size * self.arguments.requests, "concurrency": size}
        arguments = argparse.Namespace(**vars(self.arguments) | more)
        load, words = Load.of(arguments), self.arguments.vocabulary - 10
        turn = random.Random(seed).randrange(words)
        load.prompts = [[10 + (token + turn) % words for token in tokens] for tokens in load.prompts]
        run = Run(load, arguments, url, None, None).execute(f"{size} running")
        rate = sum(len(answer.tokens) for answer in run.answers) / run.seconds
        latencies = [(answer.arrived[-1][0] - answer.sent) * 1e3 for answer in run.answers if answer.arrived]
        return {**count_outcomes(run.answers), "seconds": run.seconds, "tokens_a_second": rate}, latencies

    def judge(self, of: dict[str, list[Row]], at: str) -> list[Row]:
        """Judges the interval of the rates, and latencies of all rounds, too."""
        rates = list(itertools.starmap(ratio("tokens_a_second"), zip(of[SESSIONS], of[OFF], strict=True)))
        latency = ratio("p99_ms")(of[ALL + SESSIONS][0], of[ALL + OFF][0])
        low = interval([rates], self.arguments.seed)[1]
        return [
            *super().judge(of, at),
            results.bound(f"the same, low end of the {CONFIDENCE:.0%} interval, {at}", ">= 0.99", low),
            results.bound(f"latency of a request, p99, by that without, {at}", "<= 1.02", latency),
        ]


class Together(Scene):
    """Ends many requests in one pass; the milliseconds are the gaps of one more request around it."""

    unit = "end together"
    needed = (("requests that ended with the last one, share", ">= 0.9", "ended_last"),)
    compared = (("longest gap of another request, ms longer", "<= 20", longer("max_ms")),)

    def words(self) -> list[str]:
        """Makes room for them, and for the one that goes on; with fewer windows some are retracted, and end later."""
        most = max(self.sizes) + 1
        return [*room(most, most * (SHORT + NEW + 2 * PAGE) + LASTS), "--swa-full-tokens-ratio", "0.5"]

    def run(self, url: str, size: int, seed: str, counts: bool) -> Measured:
        """Sends all in one request. Prefills come before decodes, so that they decode in step."""
        body = self.prompts(seed, size, SHORT, NEW)
        with Decodes(url, 1, seed, self.arguments) as beside:
            whole, said = count_whole(url, body, NEW, self.arguments.timeout)
            ended = time.monotonic()
            time.sleep(AFTER)
            times = [at for at, _ in list(beside.arrived[0])]
            start = times[max(0, bisect.bisect(times, ended) - NEW // 2)]  # no prefill behind it: theirs are over
            figures, gaps = beside.counted(size, whole), beside.gaps_ms(start)
        took = [answer["meta_info"]["e2e_latency"] for answer in said]
        return {**figures, "ended_last": sum(max(took) - seconds <= ONE_PASS for seconds in took) / size}, gaps


class Queue(Scene):
    """Lets many requests wait for a slot; the milliseconds are the gaps of those that run."""

    unit = "waiting"
    needed = (("requests that waited, share", ">= 1", "waited"),)
    compared = (("a pass, ms longer", "<= 0.1", longer("pass_ms")),)

    def words(self) -> list[str]:
        """Gives slots to those that decode, and to no other."""
        return room(BESIDE, BESIDE * (SHORT + LASTS + 2 * PAGE))

    def run(self, url: str, size: int, seed: str, counts: bool) -> Measured:
        """Sends all that wait in one request, and aborts it behind the measurement."""
        count, timeout = size if counts else min(size, FEW), self.arguments.timeout
        body = self.prompts(seed, count, QUEUED, SHORT_NEW)
        with ThreadPoolExecutor(1) as pool, Decodes(url, BESIDE, seed, self.arguments) as beside:
            pool.submit(count_whole, url, body, SHORT_NEW, timeout)
            waited, start = queued(url, count), time.monotonic()
            time.sleep(self.arguments.seconds)
            end = time.monotonic()
            figures = {"waited": waited / count, "pass_ms": beside.pass_ms(start, end)}
            return {**beside.counted(), **figures}, beside.gaps_ms(start, end)


class Long(Scene):
    """Prefills one long prompt beside requests that decode; the milliseconds are their gaps."""

    unit = "tokens in one prompt"
    compared = (("longest gap of another request, ms longer", "<= 5", longer("max_ms")),)

    def words(self) -> list[str]:
        """Makes room for all. Without the interval nothing would decode until the whole prompt is prefilled."""
        total, context = self.arguments.long + CONTEXT, self.arguments.long + PAGE
        return [*room(BESIDE + 1, total, context), "--prefill-decode-interval", "1"]

    def run(self, url: str, size: int, seed: str, counts: bool) -> Measured:
        """Measures from the request on, until two seconds behind its answer."""
        body = self.prompts(seed, 1, size, 1)  # kernels compile for the lengths of its chunks
        with Decodes(url, BESIDE, seed, self.arguments) as beside:
            start = time.monotonic()
            whole, _ = count_whole(url, body, 1, self.arguments.timeout)
            seconds = time.monotonic() - start
            time.sleep(4 * AFTER)
            return {**beside.counted(1, whole), "seconds": seconds}, beside.gaps_ms(start)


class Waiting(Scene):
    """Lets one long prompt wait while short requests come and go; the milliseconds are the gaps of those that run."""

    unit = "tokens waiting"
    needed = (("rounds in which the prompt waited to the end", ">= 1", "waited"),)
    compared = (
        ("gap, median, by that without", "<= 1.01", ratio("p50_ms")),
        ("a pass, by one before the prompt came, by those without", "<= 1.01", ratio("slower")),
    )

    def words(self) -> list[str]:
        """Leaves less room behind the prompt than what decodes holds: BESIDE * SHORT tokens and more.

        Requests of more new tokens pass it in the queue.
        """
        total, context = self.arguments.long + BESIDE * 1024, self.arguments.long + PAGE
        return [*room(BESIDE + 2, total, context), "--schedule-policy", "lof"]

    def run(self, url: str, size: int, seed: str, counts: bool) -> Measured:
        """Sends short requests without the prompt, then beside it. slower: a pass then, by one before."""
        body = self.prompts(seed, 1, size, 1)
        with ThreadPoolExecutor(1) as pool, Decodes(url, BESIDE, seed, self.arguments) as beside:
            start, end, sent, whole = self._shorts(url, f"{seed} alone")
            alone = beside.pass_ms(start, end)
            answer = pool.submit(count_whole, url, body, 1, self.arguments.timeout)
            waited = queued(url, 1)
            start, end, more, as_many = self._shorts(url, f"{seed} beside")
            passed, waits = beside.pass_ms(start, end), int(waited > 0 and not answer.done())
            figures = {"waited": waits, "alone_pass_ms": alone, "pass_ms": passed, "slower": passed / alone}
            return {**beside.counted(sent + more, whole + as_many), **figures}, beside.gaps_ms(start, end)

    def _shorts(self, url: str, seed: str) -> tuple[float, float, int, int]:
        """Sends short requests one after the other; returns start, end, how many, and how many were whole."""
        sent, whole, start = 0, 0, time.monotonic()
        while time.monotonic() < start + self.arguments.seconds:
            body = self.prompts(f"{seed} {sent}", 1, SHORT + 7 * sent % 200, SHORT_NEW)
            whole += count_whole(url, body, SHORT_NEW, self.arguments.timeout)[0]
            sent += 1
            time.sleep(max(0.0, start + sent * PACE - time.monotonic()))
        return start, time.monotonic(), sent, whole


SCENES = {"crowd": Crowd, "together": Together, "queue": Queue, "long": Long, "waiting": Waiting}


def room(slots: int, tokens: int, context: int = CONTEXT) -> list[str]:
    """Returns server arguments for so many running requests and tokens, with graphs of a few batch sizes."""
    graphs = " ".join(str(size) for size in (*(size for size in GRAPHS if size < slots), slots))
    return (
        f"--max-running-requests {slots} --cuda-graph-max-bs-decode {slots} --cuda-graph-bs-decode {graphs} "
        f"--max-total-tokens {-(-tokens // PAGE) * PAGE} --context-length {max(CONTEXT, context)}"
    ).split()


# ---------------------------------------------------------------------- the run


@contextlib.contextmanager
def started(scene: Scene, arguments: argparse.Namespace) -> Iterator[dict[str, servers.Server]]:
    """Starts both servers, warm and suspended. Raises ServerDied."""
    told = "--enable-metrics --incremental-streaming-output --chunked-prefill-size 8192"
    words = [*told.split(), *scene.words(), *arguments.server]
    common = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_dsv4.models", "DSV4_ENABLED": "1"}
    up = {}
    with contextlib.ExitStack() as stack:
        for name, said, apart in ((SESSIONS, "auto", 0), (OFF, "off", score.APART)):
            logs = arguments.logs / f"{arguments.name}-{said}"
            variables = common | {"DSV4_SESSIONS": said, "DSV4_HOST_GB": str(arguments.host_gb)}
            up[name] = servers.launch("plain", arguments.model_path, words, variables, logs, apart=apart)
            stack.callback(up[name].stop)
        servers.wait_until_up(list(up.values()), arguments.patience)
        warm_up([server.url for server in up.values()], arguments.vocabulary, arguments.timeout)
        for server in up.values():
            server.suspend()
        yield up


def part(server: servers.Server, scene: Scene, size: int, round_: int) -> Measured:
    """Runs one server's part of a round from an empty cache to an empty cache; returns the row."""
    with server.awake():
        servers.flush(server.url)
        before, start = counted_at(server.url), server.log.stat().st_size
        figures, times = scene.run(server.url, size, f"{scene.arguments.seed}-{size}-{round_}", round_ != WARM_UP)
        kept = counted_at(server.url).get("sessions", {})
        servers.flush(server.url)
        after, log = counted_at(server.url), read_log(server.log, start)
    earlier = {"saved_bytes": 0, "save_seconds": 0.0, **before.get("sessions", {})}
    row = {
        "size": size, "round": round_, **figures, **spread(times), "points": kept.get("points", 0),
        "kept_bytes": kept.get("saved_bytes", 0) - earlier["saved_bytes"],
        "save_seconds": kept.get("save_seconds", 0.0) - earlier["save_seconds"], "copies": after["copies_alive_at_end"],
        "retracts": after["engine_retracts"] - before["engine_retracts"], "trouble": log["trouble"],
    }  # fmt: skip
    return row, times


def spread(times: Sequence[float]) -> dict[str, float]:
    """Returns median, 99th percentile and the longest of ``times``."""
    if not times:
        return dict.fromkeys(("p50_ms", "p99_ms", "max_ms"), math.inf)
    return {"p50_ms": statistics.median(times), "p99_ms": percentile(times, 99), "max_ms": max(times)}


def measure(up: dict[str, servers.Server], scene: Scene, arguments: argparse.Namespace) -> list[Row]:
    """Returns a row for each size, round and server, and one for all rounds of a server."""
    rows: list[Row] = []
    for size in scene.sizes:
        pooled = defaultdict[str, list[float]](list)
        for round_ in range(WARM_UP, arguments.rounds):
            for name in list(up)[:: -1 if round_ % 2 else 1]:
                row, times = part(up[name], scene, size, round_)
                results.show([{"run": name, **row}])
                if round_ != WARM_UP:
                    rows.append({"run": name, **row})
                    pooled[name] += times
        rows += [{"run": ALL + name, "size": size, **spread(times)} for name, times in pooled.items()]
    return rows


def judge(rows: list[Row], scene: Scene) -> list[Row]:
    """Returns the bounds: both servers did the work, sessions were kept, and what they cost."""
    parts = [row for row in rows if not row["run"].startswith(ALL)]
    kept = min(row["kept_bytes"] for row in parts if row["run"] == SESSIONS)
    bounds = [
        results.bound("requests without a whole answer", "<= 0", sum(row["asked"] - row["whole"] for row in parts)),
        results.bound("trouble in a log", "<= 0", sum(len(row["trouble"]) for row in parts)),
        results.bound("copies held behind a round", "<= 0", sum(row["copies"] for row in parts)),
        results.bound("bytes of points kept, least round", ">= 1", kept),
    ]
    for size in scene.sizes:
        names = (SESSIONS, OFF, ALL + SESSIONS, ALL + OFF)
        of = {name: [row for row in rows if (row["run"], row["size"]) == (name, size)] for name in names}
        bounds += scene.judge(of, f"{size} {scene.unit}")
    return bounds


# ---------------------------------------------------------------------- the command


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line; the arguments behind ``--`` are for both servers."""
    parser = results.parser(__doc__, "sessions-SCENE")
    parser.add_argument("--scene", choices=SCENES, required=True)
    parser.add_argument("--config", type=readable_file, required=True, help="config.json of the model")
    parser.add_argument("--experts", type=COUNT, help="routed experts, so that two servers fit the card")
    parser.add_argument("--running", type=CONCURRENCY, nargs="+", help="requests (crowd: 64 256, together: 256)")
    parser.add_argument("--waiting", type=COUNT, nargs="+", default=(10_000, 30_000), help="requests in the queue")
    parser.add_argument("--long", type=number(int, 2048, LONGEST), default=1_000_000, help="tokens of the long prompt")
    parser.add_argument("--prompt", type=COUNT, nargs=2, default=(1024, 4096), help="shortest and longest of a crowd")
    parser.add_argument("--new-tokens", type=COUNT, nargs=2, default=(100, 200), help="of a crowd's answers")
    parser.add_argument("--requests", type=COUNT, default=2, help="of a crowd's round, times those running")
    parser.add_argument("--rounds", type=COUNT, default=4)
    parser.add_argument("--seconds", type=SECONDS, default=5, help="in which passes are measured beside what waits")
    parser.add_argument("--host-gb", type=number(float, 0.1), default=8, help="DSV4_HOST_GB of both servers")
    add_requests(parser)
    arguments = servers.parse(parser, argv)
    check_lengths(parser, arguments)
    usual = {"crowd": (64, 256), "together": (256,)}.get(arguments.scene)
    only = arguments.waiting if arguments.scene == "queue" else (arguments.long,)
    arguments.sizes = (arguments.running or usual) if usual else only
    arguments.name = arguments.name.replace("SCENE", arguments.scene)
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Returns exit status 1 when a bound is missed."""
    arguments = parse(argv)
    servers.end_when_told()
    arguments.model_path = str(model_of(arguments)[0])
    scene = SCENES[arguments.scene](arguments)
    with started(scene, arguments) as up:  # they take half a minute to end: the result is written before
        rows = measure(up, scene, arguments)
        return results.finish(arguments, rows, judge(rows, scene))


if __name__ == "__main__":
    sys.exit(main())
