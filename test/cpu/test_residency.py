"""Static tensors: what may stay on the card, and that it goes up once."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglang_dsv4.residency import Kind, ResidencyError, Residents, Sent, TensorSpec


def spec(name: str = "some.table", **fields: Any) -> TensorSpec:
    return TensorSpec(**{"name": name, "shape": (2, 3), "dtype": torch.int32, "kind": Kind.CONSTANT, **fields})


WAYS: dict[str, Callable[..., TensorSpec]] = {
    "made": spec,
    "changed": lambda name, **fields: spec(name).changed(**fields),
    "replaced": lambda name, **fields: dataclasses.replace(spec(name), **fields),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_only_a_constant_that_nobody_writes_stays(way):
    for kind, output, resident in itertools.product(Kind, (False, True), (None, "card", "stacked")):
        fields = {"kind": kind, "is_output": output, "resident": resident}
        if resident is None or (kind is Kind.CONSTANT and not output):
            assert way("some.table", **fields).resident == resident
            continue
        with pytest.raises(ResidencyError, match=r"^some\.table: .*must not be resident"):
            way("some.table", **fields)


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"resident": "cards"}, "resident must be"),
        ({"shape": [2, 3]}, "shape must be a tuple"),
        ({"shape": (2, -1)}, "shape must be a tuple"),
        ({"dtype": "int32"}, "dtype must be"),
        ({"kind": "constant"}, "kind must be"),
        ({"resident": "stacked", "shape": ()}, "leading dimension"),
        ({"name": ""}, "needs a name"),
    ],
)
def test_a_spec_that_says_nothing_clear_is_refused(fields, rule):
    with pytest.raises(ResidencyError, match=rule):
        spec(**fields)


def residents(rank: int = 0, cards: int = 1, *specs: TensorSpec) -> Residents:
    return Residents(torch.device("cpu"), rank, cards, specs)


def test_a_name_is_given_once():
    twice = pytest.raises(ResidencyError, match=r"^some\.table: the name is given twice")
    with twice:
        residents(0, 1, spec(), spec("other"), spec(shape=(9,)))
    table = torch.zeros(2, 3, dtype=torch.int32)
    registry = residents(0, 1, spec(resident="card"), spec("other"))
    for again in (
        lambda: registry.declare(spec()),
        lambda: registry.upload(spec(resident="card"), table),
        lambda: registry.constant("some.table", table),
        lambda: registry.change("other", name="some.table"),
    ):
        with twice:
            again()
    assert (registry.sent, registry.card_bytes) == (Sent(), 0)
    registry.upload("some.table", table)
    with twice:
        registry.upload("some.table", table)
    assert registry.sent == Sent(table.nbytes), "it went up once"


def test_an_entry_for_each_card():
    table = torch.zeros(3, 5, dtype=torch.int32)
    bad = spec("shards", shape=(3, 5), resident="stacked")
    registry = residents(1, 2, spec("whole", shape=(3, 5)))
    for wrong in (
        lambda: residents(1, 2, bad),
        lambda: registry.change("whole", name="shards", resident="stacked"),
        lambda: registry.declare(bad),
        lambda: registry.upload(bad, table),
    ):
        with pytest.raises(ResidencyError, match=r"^shards: stacked .*leading dimension is 3, the cards are 2"):
            wrong()
    assert [(s.name, s.resident) for s in registry.specs] == [("whole", None)]
    assert registry.sent == Sent()


def test_a_change_is_checked_like_a_new_spec():
    registry = residents(0, 1, spec("table", resident="card"), spec("scores", kind=Kind.ACTIVATION))
    for name, changes, rule in (
        ("table", {"is_output": True}, "table: an output"),
        ("scores", {"resident": "card"}, "scores: an activation"),
        ("none", {"resident": "card"}, "none: no tensor of this name"),
    ):
        before = registry.specs
        with pytest.raises(ResidencyError, match=f"^{rule}"):
            registry.change(name, **changes)
        assert registry.specs == before
    registry.change("table", shape=(4,), name="longer")
    registry.upload("longer", torch.arange(4, dtype=torch.int32))
    with pytest.raises(ResidencyError, match=r"^longer: it is on the card already"):
        registry.change("longer", resident=None)


@pytest.mark.parametrize(
    ("tensor", "rule"),
    [
        (torch.zeros(3, 2, dtype=torch.int32), "declared torch.int32"),
        (torch.zeros(2, 3, dtype=torch.int64), "declared torch.int32"),
        (torch.zeros(2, 3, dtype=torch.int32, device="meta"), "from the host"),
    ],
)
def test_what_is_uploaded_is_what_was_declared(tensor, rule):
    registry = residents(0, 1, spec("kept", resident="card"), spec("not kept"))
    for given in ("kept", spec("anew", resident="card")):
        with pytest.raises(ResidencyError, match=rule):
            registry.upload(given, tensor)
    with pytest.raises(ResidencyError, match=r"^not kept: .*not resident"):
        registry.upload("not kept", torch.zeros(2, 3, dtype=torch.int32))
    with pytest.raises(ResidencyError, match=r"^kept: it was not uploaded"):
        registry.handle("kept")
    assert registry.sent == Sent()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bfloat16])
def test_a_handle_is_the_cards_own_tensor(dtype):
    """A copy, contiguous; of a stacked tensor this rank's entry and not a byte more."""
    wide = torch.randint(0, 99, (6, 8, 3)).to(dtype)
    for table in (wide, wide[1:5, ::2].transpose(0, 1), wide[0, 0, 0], wide[:, :0]):
        registry, kept = residents(), table.clone()
        handle = registry.constant("whole", table)
        assert handle.is_contiguous()
        assert handle.data_ptr() != table.data_ptr() or not table.numel()
        assert registry.sent.static == registry.card_bytes == kept.numel() * kept.element_size()
        table.fill_(7)
        assert torch.equal(handle, kept)
        table.copy_(kept)
    for rank in range(6):
        registry = residents(rank, 6)
        handle = registry.upload(TensorSpec.constant("shards", wide, "stacked"), wide)
        assert torch.equal(handle, wide[rank])
        assert handle.untyped_storage().nbytes() == registry.sent.static == wide[rank].numel() * wide.itemsize


def test_bytes_are_counted_by_dispatch():
    registry = residents()
    table = torch.arange(5, dtype=torch.int64)
    with registry.measured() as start:
        registry.constant("table", table)
        assert start == Sent(), "filled in at the end"
    with pytest.raises(KeyError), registry.measured() as failed:
        registry.constant("more", table[:3])
        raise KeyError
    with registry.measured() as idle:
        pass
    assert (start, failed, idle) == (Sent(40), Sent(24), Sent(0))
    assert registry.sent == Sent(64)
