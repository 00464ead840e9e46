"""Random steps over tables that look like the engine's: whole pages, mapped near the end of a request only, the rest
left over from other requests."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from sglang_dsv4.prep.metadata import CompressPlan, StepMetadata
from sglang_dsv4.prep.step import PrepLayout, Step, Tables
from triton_ops.cases.prep_rows import PREP_LENGTHS, prep_tables

HOSTILE = PREP_LENGTHS
LAYOUT = PrepLayout(context=1300, topk=64)
DRAFTS = PrepLayout(context=1300, topk=64, c4_ring=16, c128_ring=256, c4_keep=10, c128_keep=130)

# Rings that keep fewer tokens than a step has drafts: then it depends on the position whether a row is written.
SHORT_KEEP = replace(DRAFTS, c4_keep=6, c128_keep=4)
KEEP_LENGTHS = (1, 118, 121, 247, 250, 251, 252, 253)


@dataclass
class World:
    """Tables with a request of each length, in slots other than its number; slot 0 is the engine's padding."""

    layout: PrepLayout
    lengths: list[int]
    tables: Tables
    slots: list[int]
    table: torch.Tensor

    def step(
        self, device: str = "cpu", queries: int = 1, verify: bool = False, on_device: bool = False, **more
    ) -> Step:
        """A step in which every request's last token, or its ``queries`` drafts, are computed."""
        first = [length if verify else length - queries for length in self.lengths]
        locs = [
            int(self.table[slot, max(0, f) + q])
            for slot, f in zip(self.slots, first, strict=True)
            for q in range(queries)
        ]
        lengths = np.array(self.lengths, np.int64)
        known = torch.from_numpy(lengths.copy()).to(device) if on_device else lengths
        return Step(
            torch.tensor(self.slots, device=device), torch.tensor(locs, device=device), known, queries, verify, **more
        )


def make_world(lengths, layout: PrepLayout = LAYOUT, seed: int = 0, device: str = "cpu", room: int = 0) -> World:
    """room: tokens of each request behind its length that have slots too (drafts)."""
    table, mapping, slots = prep_tables(list(lengths), layout.context, seed, room)
    tables = Tables(torch.from_numpy(table).to(device), torch.from_numpy(mapping).to(device))
    return World(layout, list(lengths), tables, slots, torch.from_numpy(table))


def random_lengths(seed: int, requests: int, most: int) -> list[int]:
    rng = np.random.default_rng(seed)
    return [
        int(n)
        for n in np.where(rng.random(requests) < 0.5, rng.choice(HOSTILE, requests), rng.integers(1, most, requests))
    ]


def snapshot(metadata: StepMetadata) -> dict[str, torch.Tensor]:
    """Every field by name, copied to the CPU."""
    found = {}
    for name in metadata.__dataclass_fields__:
        value = getattr(metadata, name)
        if isinstance(value, CompressPlan):
            found[f"{name}.plan"] = value.plan.cpu().clone()
            if value.write is not None:
                found[f"{name}.write"] = value.write.cpu().clone()
        else:
            found[name] = value.cpu().clone()
    return found


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Names the first entry that differs."""
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        got = found[name]
        assert (got.dtype, got.shape) == (want.dtype, want.shape), f"{name}: {got.dtype} {list(got.shape)}"
        bad = (got != want).nonzero()
        if len(bad):
            at = tuple(bad[0].tolist())
            raise AssertionError(f"{name}{list(at)} is {int(got[at])}, not {int(want[at])} ({len(bad)} differ)")
