"""Counts saves, loads and fallbacks, and exports them to the engine's Prometheus endpoint.

One way only: the pool calls its Counters, and those call their Exporter, if any. The metadata builder does likewise.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger(__name__)


@dataclass
class Counters:
    """Counts the events of one pool. Bytes are payload bytes of the blocks; seconds are host seconds in the call."""

    saves: int = 0
    loads: int = 0
    saved_bytes: int = 0
    loaded_bytes: int = 0
    save_seconds: float = 0.0
    load_seconds: float = 0.0
    verified: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    high_water_bytes: int = 0  # most bytes held by live copies at once
    kept_bytes: int = 0  # of HiSparse rows, in the coordinator's host pool
    spared_tokens: int = 0  # of plain servers: loaded where the engine would have prefilled
    listener: Exporter | None = field(default=None, repr=False, compare=False)

    def saved(self, nbytes: int, seconds: float) -> None:
        """Counts a copy that was made."""
        self.saves += 1
        self.saved_bytes += nbytes
        self.save_seconds += seconds
        if self.listener is not None:
            self.listener.saved(nbytes, seconds)

    def loaded(self, nbytes: int, seconds: float, verified: bool) -> None:
        """Counts a copy that was loaded, and whether it was compared."""
        self.loads += 1
        self.loaded_bytes += nbytes
        self.load_seconds += seconds
        self.verified += verified
        if self.listener is not None:
            self.listener.loaded(nbytes, seconds)
            if verified:
                self.listener.verified()

    def fallback(self, reason: str, message: str) -> None:
        """Counts and logs a request left to the engine; the first of each reason is a warning."""
        self.fallbacks[reason] += 1
        if self.fallbacks[reason] == 1:
            logger.warning("no host copy, the engine's own behaviour follows (%s): %s", reason, message)
        else:
            logger.info("no host copy again (%s): %s", reason, message)
        if self.listener is not None:
            self.listener.fell_back(reason)

    def spared(self, tokens: int) -> None:
        """Counts tokens that a plain server did not prefill again."""
        self.spared_tokens += tokens
        if self.listener is not None:
            self.listener.spared(tokens)

    def keeps(self, kept_bytes: int) -> None:
        """Notes the bytes that copies hold in a HiSparse coordinator's host pool now."""
        self.kept_bytes = kept_bytes
        if self.listener is not None:
            self.listener.keeps(kept_bytes)

    def holds(self, copies: int, held_bytes: int) -> None:
        """Notes the number and bytes of live copies."""
        self.high_water_bytes = max(self.high_water_bytes, held_bytes)
        if self.listener is not None:
            self.listener.holds(copies, held_bytes, self.high_water_bytes)


class Exporter:
    """Exports the Counters of one pool. Its series lie with the engine's, in PROMETHEUS_MULTIPROC_DIR.

    labels: this rank's, on every series. sharers: ranks that share the arena. registry: an additional registry; the
    endpoint reads the files.
    Make it only once the engine has set that variable: prometheus_client reads it when it is imported.
    """

    def __init__(self, labels: Mapping[str, str], arena_bytes: int, registry: Any = None, sharers: int = 1) -> None:
        import prometheus_client  # noqa: PLC0415

        def counter(name: str, text: str) -> Any:
            series = prometheus_client.Counter(f"sglang_dsv4_{name}", text, list(labels), registry=registry)
            return series.labels(**labels)

        def gauge(name: str, text: str) -> Any:
            series = prometheus_client.Gauge(
                f"sglang_dsv4_{name}", text, list(labels), registry=registry, multiprocess_mode="mostrecent"
            )
            return series.labels(**labels)

        self._labels = dict(labels)
        self._saves = counter("saves_total", "Requests copied to host memory.")
        self._loads = counter("loads_total", "Copies written back to the device.")
        self._saved_bytes = counter("saved_bytes_total", "Bytes copied to host memory.")
        self._loaded_bytes = counter("loaded_bytes_total", "Bytes written back to the device.")
        self._save_seconds = counter("save_seconds_total", "Host seconds spent in saves.")
        self._load_seconds = counter("load_seconds_total", "Host seconds spent in loads.")
        self._verified = counter("verified_total", "Loads compared with their copy, byte for byte (DSV4_VERIFY).")
        self._fallbacks = prometheus_client.Counter(
            "sglang_dsv4_fallbacks_total", "Requests left to the engine's own behaviour, by reason.",
            [*labels, "reason"], registry=registry,
        )  # fmt: skip
        self._spared = counter("prefill_tokens_saved_total", "Tokens that plain servers did not prefill again.")
        self._copies = gauge("copies", "Copies alive.")
        self._held_bytes = gauge("host_held_bytes", "Host memory held by live copies.")
        self._high_water_bytes = gauge("host_high_water_bytes", "Most host memory held by live copies at once.")
        self._kept_bytes = gauge("hisparse_kept_bytes", "HiSparse rows of retracted requests in the host pool.")
        gauge("host_bytes", "Host memory reserved for copies.").set(arena_bytes)
        gauge("host_sharers", "Ranks that share this arena; each reports the whole arena.").set(sharers)
        self.holds(0, 0, 0)

    def saved(self, nbytes: int, seconds: float) -> None:
        """Exports a save."""
        self._saves.inc()
        self._saved_bytes.inc(nbytes)
        self._save_seconds.inc(seconds)

    def loaded(self, nbytes: int, seconds: float) -> None:
        """Exports a load."""
        self._loads.inc()
        self._loaded_bytes.inc(nbytes)
        self._load_seconds.inc(seconds)

    def verified(self) -> None:
        """Exports a verified load."""
        self._verified.inc()

    def fell_back(self, reason: str) -> None:
        """Exports a fallback."""
        self._fallbacks.labels(**self._labels, reason=reason).inc()

    def spared(self, tokens: int) -> None:
        """Exports the tokens of a plain server's request that were not prefilled again."""
        self._spared.inc(tokens)

    def holds(self, copies: int, held_bytes: int, high_water_bytes: int) -> None:
        """Exports the number and bytes of live copies, and the most bytes so far."""
        self._copies.set(copies)
        self._held_bytes.set(held_bytes)
        self._high_water_bytes.set(high_water_bytes)

    def keeps(self, kept_bytes: int) -> None:
        """Exports the bytes that copies hold in the host pool of HiSparse."""
        self._kept_bytes.set(kept_bytes)


@dataclass
class SessionCounters:
    """Counts what is kept of requests that ended, and what goes on from it. hits: pages, or the window alone."""

    points: int = 0
    held_bytes: int = 0
    saved_bytes: int = 0
    save_seconds: float = 0.0
    loaded_bytes: int = 0
    tokens: int = 0  # that were not prefilled again
    hits: Counter[str] = field(default_factory=Counter)
    evicted: Counter[str] = field(default_factory=Counter)
    hints: Counter[tuple[str, str]] = field(default_factory=Counter)  # by type and outcome
    verified: int = 0  # loads that were compared
    listener: SessionExporter | None = field(default=None, repr=False, compare=False)

    def kept(self, nbytes: int, seconds: float) -> None:
        """Counts a point that was saved."""
        self.saved_bytes += nbytes
        self.save_seconds += seconds
        if self.listener is not None:
            self.listener.kept(nbytes, seconds)

    def went_on(self, kind: str, tokens: int, nbytes: int) -> None:
        """Counts a request that got ``tokens`` tokens more of its prefix."""
        self.hits[kind] += 1
        self.tokens += tokens
        self.loaded_bytes += nbytes
        if self.listener is not None:
            self.listener.went_on(kind, tokens, nbytes)
            self.listener.compared(self.verified)

    def let_go(self, reason: str) -> None:
        """Counts a point that was evicted."""
        self.evicted[reason] += 1
        if self.listener is not None:
            self.listener.let_go(reason)

    def hinted(self, outcomes: Iterable[tuple[str, str]]) -> None:
        """Counts hints of requests, each with its type and outcome."""
        for kind, outcome in outcomes:
            self.hints[kind, outcome] += 1
            if self.listener is not None:
                self.listener.hinted(kind, outcome)

    def holds(self, points: int, held_bytes: int) -> None:
        """Notes the points and the bytes of their blocks."""
        self.points, self.held_bytes = points, held_bytes
        if self.listener is not None:
            self.listener.holds(points, held_bytes)


class SessionExporter:
    """Exports the counts of kept sessions; labels and registry as for ``Exporter``."""

    def __init__(self, labels: Mapping[str, str], registry: Any = None) -> None:
        import prometheus_client  # noqa: PLC0415

        def counter(name: str, text: str, *more: str) -> Any:
            series = prometheus_client.Counter(f"sglang_dsv4_{name}", text, [*labels, *more], registry=registry)
            return series if more else series.labels(**labels)

        def gauge(name: str, text: str) -> Any:
            series = prometheus_client.Gauge(
                f"sglang_dsv4_{name}", text, list(labels), registry=registry, multiprocess_mode="mostrecent"
            )
            return series.labels(**labels)

        self._labels = dict(labels)
        self._points = gauge("session_points", "Page ends from which a next turn can go on.")
        self._bytes = gauge("session_bytes", "Host memory held by sessions.")
        self._saved = counter("session_saved_bytes_total", "Bytes copied to host memory for sessions.")
        self._seconds = counter("session_save_seconds_total", "Host seconds spent in saves of sessions.")
        self._loaded = counter("session_loaded_bytes_total", "Bytes of sessions written back to the device.")
        self._hits = counter("session_hits_total", "Requests that went on: pages loaded, or a window alone.", "kind")
        self._tokens = counter("session_tokens_total", "Tokens of sessions that were not prefilled again.")
        self._verified = counter("session_verified_total", "Loads of sessions compared, byte for byte (DSV4_VERIFY).")
        self._compared = 0
        self._evicted = counter("session_evicted_total", "Points that were evicted, by reason.", "reason")
        self._hints = counter("session_hints_total", "Hints of requests, by what became of them.", "type", "outcome")

    def kept(self, nbytes: int, seconds: float) -> None:
        """Exports a saved point."""
        self._saved.inc(nbytes)
        self._seconds.inc(seconds)

    def went_on(self, kind: str, tokens: int, nbytes: int) -> None:
        """Exports a request that went on."""
        self._hits.labels(**self._labels, kind=kind).inc()
        self._tokens.inc(tokens)
        self._loaded.inc(nbytes)

    def compared(self, loads: int) -> None:
        """Exports the loads that were compared so far."""
        self._verified.inc(loads - self._compared)
        self._compared = loads

    def let_go(self, reason: str) -> None:
        """Exports an evicted point."""
        self._evicted.labels(**self._labels, reason=reason).inc()

    def hinted(self, kind: str, outcome: str) -> None:
        """Exports a hint."""
        self._hints.labels(**self._labels, type=kind, outcome=outcome).inc()

    def holds(self, points: int, held_bytes: int) -> None:
        """Exports the points and their bytes."""
        self._points.set(points)
        self._bytes.set(held_bytes)


class PrepExporter:
    """Exports a count of eager decode steps; labels and registry as for ``Exporter``."""

    def __init__(self, labels: Mapping[str, str], registry: Any = None) -> None:
        import prometheus_client  # noqa: PLC0415

        steps = prometheus_client.Counter(
            "sglang_dsv4_prep_steps_total", "Eager decode steps prepared by this package: overlapped with "
            "the forward before, or inline.", [*labels, "where"], registry=registry,
        )  # fmt: skip
        self._steps = {where: steps.labels(**labels, where=where) for where in ("overlapped", "inline")}
        self._labels = dict(labels)
        self._left = prometheus_client.Counter(
            "sglang_dsv4_prep_left_total", "Eager decode steps left to the engine's builder, by reason.",
            [*labels, "reason"], registry=registry,
        )  # fmt: skip

    def prepared(self, where: str) -> None:
        """Exports a step prepared here: ``overlapped`` with the forward before it, or ``inline``."""
        self._steps[where].inc()

    def left(self, reason: str) -> None:
        """Exports a step left to the engine."""
        self._left.labels(**self._labels, reason=reason).inc()


def make_exporter(labels: Mapping[str, str], arena_bytes: int, sharers: int) -> Exporter | None:
    """Makes an Exporter; None, with one warning a process, where prometheus_client is missing."""
    try:
        return Exporter(labels, arena_bytes, sharers=sharers)
    except ImportError:
        _warn_without_client()
        return None


def make_prep_exporter(labels: Mapping[str, str]) -> PrepExporter | None:
    """Makes a PrepExporter; None as for ``make_exporter``."""
    try:
        return PrepExporter(labels)
    except ImportError:
        _warn_without_client()
        return None


def make_session_exporter(labels: Mapping[str, str]) -> SessionExporter | None:
    """Makes a SessionExporter; None as for ``make_exporter``."""
    try:
        return SessionExporter(labels)
    except ImportError:
        _warn_without_client()
        return None


@functools.cache
def _warn_without_client() -> None:
    logger.warning("--enable-metrics, but prometheus_client is not installed: no sglang_dsv4_ series")
