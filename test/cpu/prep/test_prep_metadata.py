"""The worked example of the docstring, and the refusals."""

from __future__ import annotations

import dataclasses
import struct

import numpy as np
import pytest
import torch

from sglang_dsv4.errors import GeometryError, IndexMismatch
from sglang_dsv4.prep.builder import MetadataBuilder
from sglang_dsv4.prep.metadata import CompressPlan
from sglang_dsv4.prep.step import MOST_ROWS, PrepLayout, Step, Tables, check_step

LAYOUT = PrepLayout(context=512)


def example(device):
    table = torch.zeros(6, 512, dtype=torch.int32, device=device)
    mapping = torch.zeros(8 * 256 + 1, dtype=torch.int64, device=device)
    mapping[-1] = -1
    inside = torch.arange(256, device=device)
    for slot, page, swa in ((5, 7, 2), (1, 4, 9)):
        table[slot, :256] = page * 256 + inside
        mapping[page * 256 + inside] = swa * 256 + inside
    step = Step(torch.tensor([5, 1], device=device), torch.tensor([1794, 1279], device=device), np.array([3, 256]))
    return step, Tables(table, mapping)


def test_worked_example(device):
    step, tables = example(device)
    built = MetadataBuilder(LAYOUT, torch.device(device)).build(step, tables)
    expected = {
        "lengths": [3, 256], "positions": [2, 255], "query_starts": [0, 1, 2], "swa_lengths": [3, 128],
        "swa_out_locs": [514, 2559], "c4_out_locs": [0, 319], "c4_lengths": [0, 64], "c4_clamped": [1, 64],
        "c4_sparse_lengths": [1, 64], "c128_out_locs": [0, 9], "c128_clamped": [1, 2],
    }  # fmt: skip
    assert {name: getattr(built, name).tolist() for name in expected} == expected
    assert built.page_table.tolist() == [[7, 0], [4, 0]]
    assert built.swa_indices.tolist() == [[514, 513, 512] + [-1] * 125, list(range(2559, 2431, -1))]
    assert built.c4_sparse_indices.tolist() == [[-1] * 512] * 2
    assert built.c128_indices.tolist() == [[-1] * 64, [8, 9] + [-1] * 62]
    plans = [struct.unpack("=Iiii", bytes(row)) for row in built.c4.plan.tolist() + built.c128.plan.tolist()]
    assert plans == [(3, 18, 4, 4), (256, 79, 18, 19), (3, 642, 5, 5), (256, 255, 1, 1)]
    assert built.c4.write is None


def test_check_names_the_field(device):
    step, tables = example(device)
    built = MetadataBuilder(LAYOUT, torch.device(device)).build(step, tables)
    assert built.check(LAYOUT) is built
    for name, wrong in (
        ("positions", built.positions.long()),
        ("c4_out_locs", built.c4_out_locs.int()),
        ("swa_indices", built.swa_indices[:, :64]),
        ("c128_indices", built.c128_indices.T.contiguous().T),
        ("c4", CompressPlan(built.c4.plan[:1], None)),
    ):
        with pytest.raises(IndexMismatch, match=name):
            dataclasses.replace(built, **{name: wrong}).check(LAYOUT)


@pytest.mark.parametrize(
    "change",
    [
        {"slots": torch.zeros(0, dtype=torch.int64)},
        {"out_locs": torch.zeros(3, dtype=torch.int64)},
        {"out_locs": torch.zeros(2, dtype=torch.int32)},
        {"lengths": np.zeros(3, np.int64)},
        {"queries": 2},
        {"queries": MOST_ROWS, "verify": True},
        {"queries": 0, "verify": True},
        {"width": 3},
        {"width": 0},
    ],
    ids=str,
)
def test_refuses_steps_that_do_not_fit(change):
    step = Step(torch.tensor([5, 1]), torch.zeros(2, dtype=torch.int64), np.array([3, 256]))
    assert check_step(LAYOUT, step) == 2
    with pytest.raises(IndexMismatch):
        check_step(LAYOUT, step._replace(**change))


@pytest.mark.parametrize(
    "change", [{"context": 0}, {"page": 64}, {"topk": 100}, {"c4_ring": 6}, {"c128_ring": 64}], ids=str
)
def test_refuses_layouts_that_do_not_fit(change):
    with pytest.raises(GeometryError):
        PrepLayout(**{"context": 512, **change})
