"""Makes random steps over tables that look like the engine's, with leftovers of other requests behind each row."""

from dataclasses import dataclass, fields, is_dataclass, replace

import numpy as np
import torch

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
        """Returns a step in which every request's last token, or its ``queries`` drafts, are computed."""
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
    """Makes a world; room: tokens of each request behind its length that have slots too (drafts)."""
    table, mapping, slots = prep_tables(list(lengths), layout.context, seed, room)
    tables = Tables(torch.from_numpy(table).to(device), torch.from_numpy(mapping).to(device))
    return World(layout, list(lengths), tables, slots, torch.from_numpy(table))


def random_lengths(seed: int, requests: int, most: int) -> list[int]:
    rng = np.random.default_rng(seed)
    return [
        int(n)
        for n in np.where(rng.random(requests) < 0.5, rng.choice(HOSTILE, requests), rng.integers(1, most, requests))
    ]


def flatten(value, name: str = "") -> dict[str, object]:
    """Returns tensors, numbers and Nones of a metadata object by path; the kernels' own objects are left out."""
    if is_dataclass(value):
        parts = {f.name: getattr(value, f.name) for f in fields(value) if not f.name.endswith("flashmla_metadata")}
    elif hasattr(value, "_asdict"):
        parts = {k: v for k, v in value._asdict().items() if k != "pin_buffer"}
    elif isinstance(value, torch.Tensor):
        return {name: value.detach().clone()}
    else:
        return {name: value}
    found = {}
    for key, part in parts.items():
        found |= flatten(part, f"{name}.{key}" if name else key)
    return found


def compare(ours: dict[str, object], theirs: dict[str, object], ignore=lambda name: False) -> int:
    """Asserts that every field is equal; returns the number of tensors compared."""
    assert ours.keys() == theirs.keys()
    compared = 0
    for name, want in theirs.items():
        if ignore(name):
            continue
        got = ours[name]
        if not isinstance(want, torch.Tensor):
            assert got == want, f"{name} is {got}, not {want}"
            continue
        assert isinstance(got, torch.Tensor), f"{name} is {got}"
        assert (got.dtype, got.shape) == (want.dtype, want.shape), (
            f"{name}: {got.dtype} {list(got.shape)}, not {want.dtype} {list(want.shape)}"
        )
        bad = (got.cpu() != want.cpu()).nonzero()
        assert not len(bad), f"{name}{bad[0].tolist()} is {got[tuple(bad[0])]}, not {want[tuple(bad[0])]}"
        compared += 1
    return compared
