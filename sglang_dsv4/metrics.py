"""Counts saves, loads, sessions and decode steps, and exports each count to the engine's Prometheus endpoint.

One way only: whoever counts calls its ``Counts``, and those write to their series, if they have any. A field names its
series; ``docs/operating.md`` has the table.
"""

# ruff: noqa: RUF009 - the fields' functions make fields
from __future__ import annotations

import dataclasses
import functools
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger(__name__)


# Reasons of ``fallbacks_total``; docs/operating.md has this table.
FALLBACKS = {
    "HostMemoryExhausted": "no room in host memory",
    "StaleWeights": "the weights were updated while it was away",
    "AnotherRank": "another rank could not save or load it; the ranks agree on each request",
    "InputEmbeds": "it came as embeddings: the engine drops its outputs at a retract, and it starts over",
    "ChoicesBySlot": "it returns expert or indexer choices, and a pipeline's copies do not have them",
    "StepInFlight": "online compression: it left the batch by a preemption, while a step still wrote its state row",
    "RowsNotKept": "HiSparse: its rows were being staged",
    "PrefillInFlight": "plain: it was retracted before its first decode step",
    "StreamingSession": "plain: its streaming session keeps the cache itself",
    "StorageAttached": "plain: a storage backend was attached to the hierarchical cache",
    "NoRoom": "plain: it does not fit the pool with the engine's reserve, or a session's pages do not",
    "FewTokens": "plain: the prefix tree holds nearly all of its tokens",
    "LengthChanged": "plain: its length changed while it was away",
    "PointNotMatched": "sessions: the prefix tree does not give what was loaded: a fault",
    "IndexMismatch": "its slots do not describe it: a fault",
    "WindowNotMapped": "a position of its window has no slot: a fault",
    "CopyEngineError": "the CUDA driver refused a copy: a fault",
}
EVICTIONS = ("retract", "room", "superseded", "fault", "flush", "weights", "role")
HINTS = (
    *(
        (f"kv.{kind}", outcome)
        for kind in ("retain", "pin", "demote", "prefetch", "share")
        for outcome in ("taken", "bad")
    ),
    *(("kv.retain", "full"), ("kv.pin", "full"), ("kv.share", "refused"), ("other", "unknown"), ("other", "refused")),
)
UNPREPARED = (
    "no out_cache_loc", "a graph is being captured", "the SWA window is being replayed", "ragged verification",
    "a step that the builder does not take",
)  # fmt: skip


def counter(series: str, text: str, *labels: str, known: Iterable[Any] = ()) -> Any:
    """Returns a field that grows; with ``labels`` it is a Counter by their values.

    known: values of the labels, a string each or a tuple of them. Their series are there from the start: a rate() of
    one that appears with its first event does not see that event.
    """
    made: Any = Counter if labels else int
    values = tuple(value if isinstance(value, tuple) else (value,) for value in known)
    told = {"kind": "Counter", "series": series, "text": text, "labels": labels, "known": values}
    return field(default_factory=made, metadata=told)


def gauge(series: str, text: str) -> Any:
    """Returns a field that is set."""
    return field(default=0, metadata={"kind": "Gauge", "series": series, "text": text, "labels": (), "known": ()})


@dataclass
class Counts:
    """Keeps counts, each a field, and writes them to their series from ``export`` on.

    series: by field; of one with labels of its own, the parent that has a child a value.
    """

    series: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def export(self, labels: Mapping[str, str], registry: Any = None) -> None:
        """Makes the series. See ``make_series``."""
        self.series = make_series(type(self), tuple(labels.items()), registry)

    def add(self, name: str, more: float = 1, *label: str) -> None:
        """Adds ``more`` to a count; label: the values of the labels that its series has beside the rank's."""
        if label:
            getattr(self, name)[label if len(label) > 1 else label[0]] += more
        else:
            setattr(self, name, getattr(self, name) + more)
        if self.series:
            child = self.series[name]
            (child(*label) if label else child).inc(more)

    def set(self, name: str, value: float) -> None:
        """Sets a gauge."""
        if getattr(self, name) != value:
            setattr(self, name, value)
            if self.series:
                self.series[name].set(value)


def make_series(kind: type[Counts], labels: tuple[tuple[str, str], ...], registry: Any = None) -> dict[str, Any]:
    """Makes the series of ``kind``, which lie with the engine's in PROMETHEUS_MULTIPROC_DIR; all begin with 0.

    labels: this rank's, on every series. registry: an additional registry; the endpoint reads the files.
    Call it only once the engine has set that variable: prometheus_client reads it when it is imported.
    Empty, with one warning a process, where prometheus_client is missing.
    """
    try:
        import prometheus_client  # noqa: PLC0415
    except ImportError:
        _warn_without_client()
        return {}
    names, values, found = [name for name, _ in labels], [value for _, value in labels], {}
    for each in dataclasses.fields(kind):
        told = each.metadata
        if not told:
            continue
        mode = {"multiprocess_mode": "mostrecent"} if told["kind"] == "Gauge" else {}
        series = getattr(prometheus_client, told["kind"])(
            f"sglang_dsv4_{told['series']}", told["text"], [*names, *told["labels"]], registry=registry, **mode
        )
        child: Any = functools.partial(series.labels, *values) if told["labels"] else series.labels(*values)
        if mode:
            child.set(0)
        for value in told["known"]:
            child(*value)  # from 0 on
        found[each.name] = child
    return found


@functools.cache
def _warn_without_client() -> None:
    logger.warning("--enable-metrics, but prometheus_client is not installed: no sglang_dsv4_ series")


@dataclass
class Counters(Counts):
    """Counts the events of one pool. Bytes are payload bytes of the units; seconds are host seconds in the call."""

    saves: int = counter("saves_total", "Requests copied to host memory.")
    loads: int = counter("loads_total", "Copies written back to the device.")
    saved_bytes: int = counter("saved_bytes_total", "Bytes copied to host memory.")
    loaded_bytes: int = counter("loaded_bytes_total", "Bytes written back to the device.")
    save_seconds: float = counter("save_seconds_total", "Host seconds spent in saves.")
    load_seconds: float = counter("load_seconds_total", "Host seconds spent in loads.")
    verified: int = counter("verified_total", "Loads compared with their copy, byte for byte (DSV4_VERIFY).")
    fallbacks: Counter[str] = counter(
        "fallbacks_total", "Requests left to the engine's own behaviour, by reason.", "reason", known=FALLBACKS
    )
    spared_tokens: int = counter("prefill_tokens_saved_total", "Tokens that plain servers did not prefill again.")
    copies: int = gauge("copies", "Copies alive.")
    held_bytes: int = gauge("host_held_bytes", "Host memory held by live copies.")
    high_water_bytes: int = gauge("host_high_water_bytes", "Most host memory held by live copies at once.")
    kept_bytes: int = gauge("hisparse_kept_bytes", "HiSparse rows of retracted requests in the host pool.")
    arena_bytes: int = gauge("host_bytes", "Host memory reserved for copies.")
    sharers: int = gauge("host_sharers", "Ranks that share this arena; each reports the whole arena.")

    def saved(self, nbytes: int, seconds: float) -> None:
        """Counts a copy that was made."""
        self.add("saves")
        self.add("saved_bytes", nbytes)
        self.add("save_seconds", seconds)

    def loaded(self, nbytes: int, seconds: float, verified: bool) -> None:
        """Counts a copy that was loaded, and whether it was compared."""
        self.add("loads")
        self.add("loaded_bytes", nbytes)
        self.add("load_seconds", seconds)
        self.add("verified", int(verified))

    def fallback(self, reason: str, message: str) -> None:
        """Counts and logs a request left to the engine; the first of each reason is a warning."""
        self.add("fallbacks", 1, reason)
        if self.fallbacks[reason] == 1:
            logger.warning("no host copy, the engine's own behaviour follows (%s): %s", reason, message)
        else:
            logger.info("no host copy again (%s): %s", reason, message)

    def holds(self, copies: int, held_bytes: int) -> None:
        """Notes the number and bytes of live copies."""
        self.set("copies", copies)
        self.set("held_bytes", held_bytes)
        self.set("high_water_bytes", max(self.high_water_bytes, held_bytes))


@dataclass
class SessionCounters(Counts):
    """Counts what is kept of requests that ended, and what goes on from it."""

    points: int = gauge("session_points", "Page ends from which a next turn can go on.")
    held_bytes: int = gauge("session_bytes", "Host memory held by sessions.")
    saved_bytes: int = counter("session_saved_bytes_total", "Bytes copied to host memory for sessions.")
    save_seconds: float = counter("session_save_seconds_total", "Host seconds spent in saves of sessions.")
    loaded_bytes: int = counter("session_loaded_bytes_total", "Bytes of sessions written back to the device.")
    hits: Counter[str] = counter(
        "session_hits_total", "Requests that went on: pages loaded, a window alone, or what came from a store.", "kind",
        known=("pages", "window", "store"),
    )  # fmt: skip
    tokens: int = counter("session_tokens_total", "Tokens of sessions that were not prefilled again.")
    verified: int = counter("session_verified_total", "Loads of sessions compared, byte for byte (DSV4_VERIFY).")
    evicted: Counter[str] = counter(
        "session_evicted_total", "Points that were evicted, by reason.", "reason", known=EVICTIONS
    )
    crowded: int = counter(
        "session_crowded_total",
        "Ends of requests, on decode servers of pages, of which nothing was kept: so many came in one pass.",
    )
    hints: Counter[tuple[str, str]] = counter(
        "session_hints_total", "Hints of requests, by what became of them.", "type", "outcome", known=HINTS
    )

    def kept(self, nbytes: int, seconds: float) -> None:
        """Counts a point that was saved."""
        self.add("saved_bytes", nbytes)
        self.add("save_seconds", seconds)

    def record_hit(self, kind: str, tokens: int, nbytes: int) -> None:
        """Counts a request that got ``tokens`` tokens more of its prefix. kind: pages, or the window alone."""
        self.add("hits", 1, kind)
        self.add("tokens", tokens)
        self.add("loaded_bytes", nbytes)

    def hinted(self, outcomes: Iterable[tuple[str, str]]) -> None:
        """Counts hints of requests, each with its type and outcome."""
        for kind, outcome in outcomes:
            self.add("hints", 1, kind, outcome)

    def holds(self, points: int, held_bytes: int) -> None:
        """Notes the points and the bytes of their units."""
        self.set("points", points)
        self.set("held_bytes", held_bytes)


PUTS = ("ok", "known", "failed", "full", "dropped")
GETS = ("ok", "missing", "no_seal", "another", "wrong", "failed")


@dataclass
class StoreCounters(Counts):
    """Counts what goes to a store and comes from it. Of the ranks that share an arena the first one counts units."""

    points: Counter[str] = counter(
        "store_points_total", "Points of finished requests: sent, gone before it, or dropped as too many waited.",
        "outcome", known=("sent", "gone", "dropped"),
    )  # fmt: skip
    units: Counter[tuple[str, str]] = counter(
        "store_units_total", "Units that were put or got, by outcome.", "op", "outcome",
        known=(*(("put", outcome) for outcome in PUTS), *(("get", outcome) for outcome in GETS)),
    )  # fmt: skip
    nbytes: Counter[str] = counter("store_bytes_total", "Bytes that were put and got.", "op", known=("put", "get"))
    seconds: Counter[str] = counter(
        "store_seconds_total", "Seconds of the calls that put, and of those that ask and get.", "op",
        known=("put", "get"),
    )  # fmt: skip
    asks: Counter[str] = counter(
        "store_asks_total", "Prompts asked for: found in time, too late, without room here, not there, or failed.",
        "outcome", known=("hit", "late", "room", "miss", "failed"),
    )  # fmt: skip
    tokens: int = counter("store_tokens_total", "Tokens whose cache was read from a store.")
    waiting: int = gauge("store_waiting_points", "Points that wait to be written.")
    is_open: int = gauge("store_open", "1 while nothing is sent to a store, because its answers failed.")
    is_up: int = gauge("store_up", "1 while the process of a store works.")


@dataclass
class PrepCounts(Counts):
    """Counts eager decode steps. where: overlapped with the forward before, or inline, on the forward's own stream."""

    steps: Counter[str] = counter(
        "prep_steps_total",
        "Eager decode steps prepared by this package: overlapped with the forward before, or inline.",
        "where",
        known=("overlapped", "inline"),
    )
    left: Counter[str] = counter(
        "prep_left_total", "Eager decode steps left to the engine's builder, by reason.", "reason", known=UNPREPARED
    )

    def leave(self, reason: str) -> None:
        """Counts a step whose metadata the engine makes; the first of each reason is logged."""
        self.add("left", 1, reason)
        if self.left[reason] == 1:
            logger.info("decode metadata of such steps is left to the engine: %s", reason)
