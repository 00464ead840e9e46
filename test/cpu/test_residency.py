"""Only constants stay on the card, and they go up once."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from sglang_dsv4.residency import Kind, ResidencyError, Residents, TensorSpec

TABLE = torch.zeros(2, 3, dtype=torch.int32)


def spec(name: str = "some.table", **fields: Any) -> TensorSpec:
    return TensorSpec(**{"name": name, "shape": (2, 3), "dtype": torch.int32, "kind": Kind.CONSTANT, **fields})


@pytest.mark.parametrize("made", [spec, lambda name, **fields: dataclasses.replace(spec(name), **fields)])
def test_only_a_constant_that_nobody_writes_stays(made):
    for kind, output, resident in itertools.product(Kind, (False, True), (None, "card", "cards")):
        fields = {"kind": kind, "is_output": output, "resident": resident}
        if resident is None or (resident == "card" and kind is Kind.CONSTANT and not output):
            assert made("some.table", **fields).resident == resident
            continue
        with pytest.raises(ResidencyError, match=r"^some\.table: "):
            made("some.table", **fields)


@pytest.mark.parametrize(("given", "tensor"), [
    (spec("kept", resident="card"), TABLE), (spec(resident="card"), torch.zeros(3, 2, dtype=torch.int32)),
    (spec(resident="card"), TABLE.long()), (spec(resident="card"), TABLE.to("meta")), (spec(), TABLE),
])  # fmt: skip
def test_what_does_not_fit_is_refused_and_nothing_is_sent(given, tensor):
    registry = Residents(torch.device("cpu"))
    registry.constant("kept", TABLE)
    with pytest.raises(ResidencyError):
        registry.upload(given, tensor)
    assert registry.sent_bytes == TABLE.nbytes


def test_a_handle_is_the_cards_own_tensor():
    """A copy, contiguous."""
    wide = torch.randint(0, 99, (6, 8, 3)).to(torch.bfloat16)
    for table in (wide, wide[1:5, ::2].transpose(0, 1), wide[0, 0, 0], wide[:, :0]):
        registry, kept = Residents(torch.device("cpu")), table.clone()
        handle = registry.constant("whole", table)
        assert handle.is_contiguous()
        assert registry.sent_bytes == kept.numel() * kept.element_size()
        table.fill_(7)
        assert torch.equal(handle, kept)
        table.copy_(kept)
