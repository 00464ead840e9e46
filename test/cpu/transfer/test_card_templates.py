"""Row templates on the card: they say what planned rows say, and lie where they are told."""

from __future__ import annotations

from typing import Any

import pytest
import segments
import torch
from builders import DEVICE, Served, place, served
from guarded import INTERPRETED
from pool_fixture import SPECS

from sglang_dsv4.transfer.card_templates import CardTemplates
from sglang_dsv4.transfer.jobs import PlacedRows, RowTemplates
from sglang_dsv4.transfer.mover import Mover
from sglang_dsv4.transfer.paths import TorchPath
from triton_ops.copy_rows import TEMPLATE_FIELDS, copy_rows, copy_rows_torch


@pytest.fixture(scope="module", params=["plain", "all_at_once"])
def some(request) -> tuple[Served, CardTemplates]:
    world = served(**SPECS[request.param])
    return world, CardTemplates.of(world.side, world.memory)


def placed(world: Served, tokens: int, seed: int, save: bool) -> PlacedRows:
    where = place(tokens, seed=seed, slot=seed % 4, pool_pages=400)
    pages = tuple(dict.fromkeys((where.swa // 256).tolist()))
    rows = RowTemplates(world.side, world.memory).rows(tokens, pages, where.request_slot, save)
    assert isinstance(rows, PlacedRows)
    return rows


@pytest.mark.skipif(not INTERPRETED, reason="reads host memory by the kernel's reference")
def test_a_template_on_the_card_says_what_its_table_says(some, monkeypatch):
    """Whichever phase: its segments, read from the card and moved, are those that planning gives."""
    world, templates = some
    seen: list[Any] = []
    monkeypatch.setattr("sglang_dsv4.transfer.card_templates.copy_rows", lambda *a, **k: seen.append((a, k)))
    for tokens in (*range(1, 512, 7), 0, 127, 128, 129, 255, 256, 257, 511, 512, 513, 4_097, 65_536 + 130):
        for save in (True, False):
            rows = placed(world, tokens, tokens, save)
            templates.copy(rows, torch.empty(0), save)
            (_, _, table, layers, nbytes, direction, dtype), options = seen.pop()
            moved = []
            for *segment, follows, page_bytes in table.tolist():
                moved.append([*segment[:2], segment[2] + options["where"][follows] * page_bytes, *segment[3:]])
            assert moved == rows.table.tolist()
            assert (layers, nbytes, direction) == (rows.most_layers, rows.most_bytes, save)
            assert dtype == world.side.c128_state_dtype


@pytest.mark.parametrize("op", [copy_rows, copy_rows_torch], ids=["kernel", "torch"])
@pytest.mark.parametrize("save", [True, False], ids=["save", "load"])
@pytest.mark.parametrize("where", [(0, 1, 2), (2, 0, 1), (3, -1, 0), (-1, 3, -1), (-1, -1, -1)])
def test_rows_of_a_template_lie_where_they_are_told(op, save, where):
    """Against one byte at a time; what follows a page that is not there is left alone, and so is what follows one
    behind the last page."""
    world = segments.build(save, ((64, 4), (64, 4), (96, 3)), 2_048)
    template = [
        (segments.Seg(0, 2, 16, 0, 256, 2, 16, 32), 0, 64),
        (segments.Seg(1, 1, 0, 512, 0, 1, 16, 16), 1, 64),
        (segments.Seg(2, 1, 48, 1_024, 0, 3, 16, 16), 2, 96),
        (segments.Seg(2, 1, 0, 1_536, 0, 2, 8, 8), 1, 96),
        (segments.Seg(2, 1, 16, segments.NO_HOST_SIDE, 0, 1, 16, 0), 0, 96),
        (segments.Seg(2, 1, 112, 1_792, 0, 1, 16, 16), 1, 96),  # reaches the next page: -1 of it is a page
    ]
    moved = [
        segment._replace(device_offset=segment.device_offset + where[follows] * page_bytes)
        for segment, follows, page_bytes in template
        if where[follows] >= 0
    ]
    table = torch.tensor([(*segment, follows, nbytes) for segment, follows, nbytes in template])

    def run(buffers, host, _, *arguments) -> None:
        op(buffers, host, table.pin_memory() if DEVICE == "cuda" else table, *arguments, where=where)

    segments.check(world, run, moved, save, most_layers=2, moves=where != (-1, -1, -1), dtype=torch.float32)


@pytest.mark.skipif(not INTERPRETED, reason="the reference needs host memory")
def test_a_template_and_where_go_together(some):
    world, templates = some
    template, image = templates._handle, torch.zeros(64, dtype=torch.uint8)
    assert template.shape[1] == len(TEMPLATE_FIELDS)
    for op in (copy_rows, copy_rows_torch):
        with pytest.raises(TypeError, match=r"\[n, 8\]"):
            op(world.side.row_table, image, template, 1, 8, True)
        with pytest.raises(TypeError, match=r"\[n, 10\]"):
            op(world.side.row_table, image, template[:, :8].contiguous(), 1, 8, True, where=(0, 1, 2))


def test_what_was_planned_at_start_is_not_planned_again(some, monkeypatch):
    """The card's templates and the rows of a transfer come from the same plans."""
    world, _ = some
    monkeypatch.setattr("sglang_dsv4.transfer.jobs.plan_rows", lambda *_: pytest.fail("planned on the way"))
    mover = Mover(world.side, world.memory, TorchPath(world.side, world.memory), lambda: ())
    for tokens in (1, 300, 513, 70_000):
        for save in (True, False):
            assert len(mover._templates.rows(tokens, (1, 2), 0, save).table)
