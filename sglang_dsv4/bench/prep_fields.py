"""Compares our metadata with the engine's, field by field, over random batches and hostile lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sglang_dsv4.prep.builder import MetadataBuilder
from sglang_dsv4.prep.metadata import CompressPlan, StepMetadata
from sglang_dsv4.prep.step import Lengths
from sglang_dsv4.testing.eager_builder import PAGE, Engine, Sizes

# Ours, and where the engine keeps the same.
CORE = {
    "lengths": "seq_lens_casual",
    "positions": "positions_casual",
    "page_table": "page_table",
    "swa_indices": "swa_page_indices",
    "swa_lengths": "swa_topk_lengths",
    "swa_out_locs": "swa_out_cache_loc",
    "c4_out_locs": "c4_out_loc",
    "c4_lengths": "c4_topk_lengths_raw",
    "c4_clamped": "c4_topk_lengths_clamp1",
    "c4_sparse_lengths": "c4_sparse_topk_lengths",
    "c4_sparse_indices": "c4_sparse_page_indices",
    "c128_out_locs": "c128_out_loc",
    "c128_clamped": "c128_topk_lengths_clamp1",
    "c128_indices": "c128_page_indices",
}
PLANS = {"c4": "c4_compress_metadata", "c128": "c128_compress_metadata"}
HOSTILE = (0, 1, 2, 3, 4, 5, 7, 8, 9, 127, 128, 129, 130, 255, 256, 257, 383, 384, 385, 511, 512, 513, 4095, 4096, 4097)
LONGEST = 8192  # of a random request


def random_lengths(count: int, seed: int) -> Lengths:
    """Lengths spread evenly on a log scale."""
    return np.exp(np.random.default_rng(seed).uniform(0, np.log(LONGEST), count)).astype(np.int64)


def cases(sizes: Sizes) -> list[Lengths]:
    """Returns each hostile length and the longest alone, all of them together, and random batches of several sizes."""
    longest = sizes.context - (sizes.queries if sizes.queries > 1 else 0)
    hostile = [*(length for length in HOSTILE if length < longest), longest]
    found = [[length] for length in hostile] + [hostile[-sizes.requests :]]
    counts = (1, 3, 17, sizes.requests, sizes.requests)
    return [np.array(case, np.int64) for case in found] + [
        random_lengths(min(count, sizes.requests), seed) for seed, count in enumerate(counts)
    ]


def compare(engine: Engine) -> tuple[list[str], int]:
    """Returns (one line a difference, cases): each prepared beside and in line, with lengths of the host and of the
    device.
    """
    device, queries = torch.device(engine.sizes.device), engine.sizes.queries
    builder = MetadataBuilder(engine.layout, device)
    ways = {"in line": None}
    if device.type == "cuda":
        ways["prep stream"] = torch.cuda.current_stream()
    found, every = [], cases(engine.sizes)
    for lengths in every:
        batch = engine.place(lengths)
        theirs = engine.build(batch)
        for where, after in ways.items():
            for holder in ("host", "device"):
                ours = builder.start(batch.step(queries, holder == "host"), engine.tables, after)
                builder.finish()
                label = f"{queries} a request, {where}, {holder} lengths {str(lengths.tolist())[:40]}"
                found += [f"{label}: {line}" for line in differences(theirs, ours, lengths)]
    return found, len(every)


def differences(engine: Any, ours: Any, lengths: Lengths) -> list[str]:
    """Returns one line for each field that differs, with the first place where it does.

    ours: our metadata, or an object of the engine's with it. lengths: the batch's. The plan rows of an empty request
    are left out: the engine reads before its table for them. Of page_table the engine's leftovers behind a row are:
    ours are 0.
    """
    theirs, mine = _fields(engine), _fields(ours)
    theirs["page_table"] = _without_leftovers(theirs["page_table"], theirs["lengths"])
    found = [line for name in CORE if (line := _compare(name, theirs[name], mine[name]))]
    wanted = _plans(engine)
    for name, plan in _plans(ours).items():
        found += _compare_plans(name, wanted[name], plan, lengths)
    return found


def _fields(metadata: Any) -> dict[str, Any]:
    """Returns the tensors by our names, of ours or of an object of the engine's."""
    if isinstance(metadata, StepMetadata):
        return {name: getattr(metadata, name) for name in CORE}
    return {name: getattr(metadata.core_attn_metadata, theirs) for name, theirs in CORE.items()}


def _plans(metadata: Any) -> dict[str, CompressPlan]:
    if isinstance(metadata, StepMetadata):
        return {name: getattr(metadata, name) for name in PLANS}
    found = {name: getattr(metadata, theirs) for name, theirs in PLANS.items()}
    return {
        name: CompressPlan(plan.plan_d, None) if hasattr(plan, "plan_d") else CompressPlan(plan.plan_c, plan.plan_w)
        for name, plan in found.items()
    }


def _without_leftovers(table: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    firsts = torch.arange(table.shape[1], device=table.device) * PAGE
    return torch.where(firsts < lengths[:, None], table, 0)


def _compare(name: str, theirs: torch.Tensor | None, mine: torch.Tensor | None) -> str | None:
    if theirs is None or mine is None:
        return None if theirs is mine else f"{name}: only one of the two has it"
    if theirs.dtype != mine.dtype or theirs.shape != mine.shape:
        return f"{name}: {mine.dtype} {list(mine.shape)}, the engine has {theirs.dtype} {list(theirs.shape)}"
    differ = (theirs != mine).nonzero()
    if not len(differ):
        return None
    place = tuple(differ[0].tolist())
    return f"{name}{list(place)}: {int(mine[place])}, the engine has {int(theirs[place])} ({len(differ)} differ)"


def _compare_plans(name: str, theirs: CompressPlan, mine: CompressPlan, lengths: Lengths) -> list[str]:
    if mine.write is None or theirs.write is None:
        live = torch.from_numpy(lengths > 0).to(mine.plan.device)
        line = _compare(f"{name}.plan", _words(theirs.plan)[live], _words(mine.plan)[live])
        return [line] if line else []
    pairs = {"plan": (theirs.plan, mine.plan), "write": (theirs.write, mine.write)}
    return [line for part, (a, b) in pairs.items() if (line := _compare(f"{name}.{part}", _sorted(a), _sorted(b)))]


def _words(plan: torch.Tensor) -> torch.Tensor:
    return plan.contiguous().view(torch.int32)


def _sorted(plan: torch.Tensor) -> torch.Tensor:
    """Sorts the rows: the engine numbers them by atomics on the device."""
    words = _words(plan).cpu().numpy()
    return torch.from_numpy(words[np.lexsort(words.T[::-1])])
