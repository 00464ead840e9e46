"""Static tensors: what may stay on the card, and that it goes up once."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from sglang_dsv4.residency import Kind, ResidencyError, Residents, TensorSpec


def spec(name: str = "some.table", **fields: Any) -> TensorSpec:
    return TensorSpec(**{"name": name, "shape": (2, 3), "dtype": torch.int32, "kind": Kind.CONSTANT, **fields})


def residents() -> Residents:
    return Residents(torch.device("cpu"))


@pytest.mark.parametrize("made", [spec, lambda name, **fields: dataclasses.replace(spec(name), **fields)])
def test_only_a_constant_that_nobody_writes_stays(made):
    for kind, output, resident in itertools.product(Kind, (False, True), (None, "card")):
        fields = {"kind": kind, "is_output": output, "resident": resident}
        if resident is None or (kind is Kind.CONSTANT and not output):
            assert made("some.table", **fields).resident == resident
            continue
        with pytest.raises(ResidencyError, match=r"^some\.table: .*must not be resident"):
            made("some.table", **fields)


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"resident": "cards"}, "resident must be"),
        ({"name": ""}, "needs a name"),
    ],
)
def test_a_spec_that_says_nothing_clear_is_refused(fields, rule):
    with pytest.raises(ResidencyError, match=rule):
        spec(**fields)


TABLE = torch.zeros(2, 3, dtype=torch.int32)


@pytest.mark.parametrize(
    ("given", "tensor", "rule"),
    [
        (spec("kept", resident="card"), TABLE, "kept: the name is given twice"),
        (spec(resident="card"), torch.zeros(3, 2, dtype=torch.int32), "declared torch.int32"),
        (spec(resident="card"), TABLE.long(), "declared torch.int32"),
        (spec(resident="card"), TABLE.to("meta"), "from the host"),
        (spec(), TABLE, "some.table: .*not resident"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_sent(given, tensor, rule):
    registry = residents()
    registry.constant("kept", TABLE)
    with pytest.raises(ResidencyError, match=rule):
        registry.upload(given, tensor)
    assert registry.sent_bytes == TABLE.nbytes


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bfloat16])
def test_a_handle_is_the_cards_own_tensor(dtype):
    """A copy, contiguous."""
    wide = torch.randint(0, 99, (6, 8, 3)).to(dtype)
    for table in (wide, wide[1:5, ::2].transpose(0, 1), wide[0, 0, 0], wide[:, :0]):
        registry, kept = residents(), table.clone()
        handle = registry.constant("whole", table)
        assert handle.is_contiguous()
        assert registry.sent_bytes == kept.numel() * kept.element_size()
        table.fill_(7)
        assert torch.equal(handle, kept)
        table.copy_(kept)
