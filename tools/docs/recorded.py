"""A page shows many runs, and a result file does not say in whose line it belongs: the runs of each table, by name."""

from __future__ import annotations

import json
from typing import Any

from sections import RESULTS

STRESS = (
    ("stress-stock", "stock, forced"),
    ("stress-fake", "forced, fake transfer"),
    ("stress-attach", "the same on a server that `sglang-dsv4 serve` started, attached to"),
    ("stress-pressure", "none forced: a cache that is too small"),
    ("stress-pressure-swa", "none forced: a window pool that is too small"),
    ("stress-nixl", "forced, prefill and decode server, cache over NIXL"),
    ("stress-pairs", "the same, two requests at a time"),
    ("stress-small-arena", "forced, cache over NIXL, host memory for less than one long request"),
    ("stress-tp2", "forced, two GPUs (--tp 2), whose ranks decided alike"),
    ("node-stress", "the same, and they share one copy"),
    ("graph-stress", "forced, cache over NIXL, metadata in graphs by this package's kernel"),
    ("graph-stress-0523", "the same on sglang 0.5.23"),
    ("hisparse-stress", "forced, HiSparse, fake transfer, kept rows compared"),
    ("stress-prep", "forced, without decode graphs, metadata from the prep stream"),
    ("stress-prep-tp2", "the same on two GPUs (--tp 2)"),
    ("stress-fake-0523", "sglang 0.5.23, forced, fake transfer"),
    ("stress-small-arena-0523", "sglang 0.5.23, forced, cache over NIXL, host memory for less than one long request"),
    ("stress-prep-0523", "sglang 0.5.23, forced, without decode graphs, metadata from the prep stream"),
    ("hisparse-stress-0523", "sglang 0.5.23, forced, HiSparse, fake transfer, kept rows compared"),
    ("hisparse-plain-stress", "a plain server, forced, HiSparse, kept rows compared"),
    ("hisparse-plain-stress-0523", "a plain server of sglang 0.5.23, forced, HiSparse, kept rows compared"),
    ("packed-stress", "sglang 0.5.23, forced, cache over NIXL, page-major pools on both servers"),
    ("plain-stress", "a plain server, forced"),
    ("plain-stress-0523", "a plain server of sglang 0.5.23, forced"),
    ("stress-flash", "Flash's shape: 43 layers, 96 experts, forced, fake transfer"),
    ("v41-stress", "DeepSeek-V4.1, sglang 0.5.23, 8 layers, forced, cache over NIXL"),
)
PRESSURE = (("plain-pressure", "0.5.17"), ("plain-pressure-0523", "0.5.23"))
PLAIN_RESUME = (("plain-resume", "0.5.17"), ("plain-resume-0523", "0.5.23"))
SECOND_TURN = (("plain-second-turn", "0.5.17"), ("plain-second-turn-0523", "0.5.23"))
ONE_TOKEN = (("plain-one-token-extend", "0.5.17"), ("plain-one-token-extend-0523", "0.5.23"))
DRAFTS = (
    ("drafts-acceptance", "0.5.17, decode server, cache over NIXL"),
    ("drafts-acceptance-0523", "0.5.23, the same"),
    ("drafts-plain", "0.5.17, plain server"),
    ("drafts-plain-0523", "0.5.23, plain server"),
    ("drafts-dspark-0523", "0.5.23, decode server, cache over NIXL, DSpark"),
    ("drafts-resume", "0.5.17, decode server, Flash's shape: 43 layers, 80 experts"),
)
NODE = (("node-transfer", "0.5.17"), ("node-transfer-0523", "0.5.23"))
FAMILIES, RECOMPUTED_V41 = "v41-families", "v41-recompute"
STEPS = (
    ("steps-idle", "0.5.17, decode graphs, package idle"),
    ("steps-idle-0523", "0.5.23, decode graphs, package idle"),
    ("plain-idle", "0.5.17, a plain server, decode graphs, package idle"),
    ("plain-idle-0523", "0.5.23, a plain server, decode graphs, package idle"),
    ("steps-prep", "0.5.17, no graphs, metadata from the prep stream"),
    ("steps-prep-again", "the same again, on a busier machine"),
    ("steps-prep-0523", "0.5.23, no graphs, metadata from the prep stream"),
    ("steps-inline", "0.5.17, no graphs, metadata in line"),
    ("steps-inline-0523", "0.5.23, no graphs, metadata in line"),
)
RECOMPUTED = (
    ("retract-recomputed-0523", "stock: computed again by the prefill server"),
    ("retract-copied-0523", "with this package: a copy"),
    ("stress-small-arena-0523", "with this package and too little host memory: both"),
)


def read(name: str) -> dict[str, Any]:
    """One result."""
    return dict(json.loads((RESULTS / f"{name}.json").read_text()))


def there(results: tuple[tuple[str, str], ...]) -> list[tuple[str, str]]:
    """Those of ``results`` that are recorded."""
    return [(name, what) for name, what in results if (RESULTS / f"{name}.json").exists()]


def resumed(tokens: int) -> dict[str, Any]:
    """The row of a resume of that length."""
    return next(row for row in read("resume")["rows"] if row["tokens"] == tokens)
