"""What a retract sends to the card: its copy, and no static byte."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from builders import DEVICE, POISON, Served, served, wait

from sglang_dsv4 import streams
from sglang_dsv4.hostmem.memory import HostCopy
from sglang_dsv4.residency import Residents, Sent
from sglang_dsv4.transfer import mover as mover_module
from sglang_dsv4.transfer import staged
from sglang_dsv4.transfer.card_templates import CardTemplates
from sglang_dsv4.transfer.locate import Request
from sglang_dsv4.transfer.mover import Mover
from sglang_dsv4.transfer.paths import TorchPath, TritonPath
from sglang_dsv4.transfer.staged import StagedPath
from sglang_dsv4.transfer.staging import StagingRing
from triton_ops.copy_pages import copy_pages_torch
from triton_ops.copy_rows import copy_rows_torch


class Steady:
    """Retracts and resumes of one pool by one path, compared byte by byte."""

    def __init__(self, world: Served, path: Any) -> None:
        self.world, self.round = world, 0
        self.mover = Mover(world.side, world.memory, path, lambda: ())

    def cycle(self, tokens: int) -> None:
        """A request leaves and comes back elsewhere."""
        world, self.round = self.world, self.round + 1
        slot, other = self.round % 4, (self.round + 1) % 4
        mapping = world.pool.full_to_swa_index_mapping
        oracle.fill(world.pool, seed=self.round)
        request = world.start(tokens, slot)
        wanted = oracle.read(world.pool, request.slots, tokens, slot)
        copy: HostCopy = world.memory.allocate(tokens, world.side.geometry)
        self.mover.save(copy, Request(request.slots, mapping, slot))
        oracle.release(world.allocator, request.slots)
        for buffer in oracle.buffers(world.pool).values():
            buffer.view(torch.uint8).fill_(POISON)
        again = world.resume(tokens, other)
        self.mover.load(copy, Request(again.slots, mapping, other))
        wait()
        oracle.compare(wanted, oracle.read(world.pool, again.slots, tokens, other))
        oracle.release(world.allocator, again.slots)
        copy.release()


def quick(monkeypatch) -> None:
    """The kernels' references in their place, with the same tables."""
    for module in ("paths", "staged"):
        monkeypatch.setattr(f"sglang_dsv4.transfer.{module}.copy_pages", lambda *a: copy_pages_torch(*a[:5]))
    for module in ("paths", "staged", "card_templates"):
        monkeypatch.setattr(f"sglang_dsv4.transfer.{module}.copy_rows", copy_rows_torch)


def immediate_cuda(monkeypatch) -> None:
    """Streams that are done at once, for StagedPath on a CPU."""
    stream = SimpleNamespace(wait_event=lambda _: None, cuda_stream=None)
    cuda = SimpleNamespace(
        Stream=lambda *_: stream,
        Event=lambda: SimpleNamespace(record=lambda _: None),
        current_stream=lambda _=None: stream,
        set_stream=lambda _: None,
    )
    named = {name: getattr(torch, name) for name in ("empty", "arange", "int64", "uint8", "Tensor")}
    monkeypatch.setattr(staged, "torch", SimpleNamespace(cuda=cuda, **named))
    monkeypatch.setattr(streams, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(staged, "StagingRing", lambda pin: StagingRing(pin=False))


def staged_on_cpu(world: Served, monkeypatch) -> StagedPath:
    immediate_cuda(monkeypatch)
    path = StagedPath(world.side, world.memory)
    path._templates = CardTemplates.of(world.side, world.memory)
    path._templates.warm_up(path._image)
    path._row_index.fill_(POISON)
    return path


TABLES = {f"transfer.{t}" for t in ("rows.offsets", "rows.sizes", "pages.offsets", "pages.sizes")}
TABLES |= {"transfer.pages.page_bytes", "transfer.pages.chunks"}


@pytest.mark.skipif(DEVICE == "cuda", reason="a real device is measured in test_memory_gpu")
@pytest.mark.parametrize("kind", ["torch", "triton", "staged"])
def test_a_retract_sends_no_static_byte(kind, monkeypatch):
    """Not the first, not one of another length; the tables are on the card before, and the kernels get the handles."""
    quick(monkeypatch)
    world = served(blocks=8)
    registry, tables = world.side.residents, TABLES
    with registry.measured() as start:
        if kind == "staged":
            path, tables = staged_on_cpu(world, monkeypatch), TABLES | {"transfer.row_templates"}
        else:
            path = {"torch": TorchPath, "triton": TritonPath}[kind](world.side, world.memory)
        steady = Steady(world, path)
        row_table = world.side.row_table
    assert {s.name for s in registry.specs} == tables
    assert start.static == registry.card_bytes == sum(h.numel() * h.itemsize for h in map(registry.handle, tables))
    uploads = count_uploads(monkeypatch)
    for tokens in (300, 1, 130, 556, 1_000, 300):
        with registry.measured() as sent:
            steady.cycle(tokens)
        assert sent == Sent(0, 0)
    assert uploads == []
    assert world.side.row_table is row_table
    for name, tensor in (
        ("transfer.rows.offsets", row_table.offsets),
        ("transfer.rows.sizes", row_table.sizes),
        ("transfer.pages.offsets", path._pages.table.offsets),
        ("transfer.pages.sizes", path._pages.table.sizes),
        ("transfer.pages.page_bytes", path._pages.page_bytes),
        ("transfer.pages.chunks", path._pages.chunks),
    ):
        assert tensor is registry.handle(name), name
    if kind == "staged":
        assert bool((path._row_index == POISON).all()), "segments went up"


def count_uploads(monkeypatch) -> list[str]:
    """What is made of Python numbers or uploaded by the registry from now on."""
    seen: list[str] = []
    monkeypatch.setattr(Residents, "upload", lambda *a: seen.append("upload"))
    monkeypatch.setattr("triton_ops.tables.straight_to", lambda _: seen.append("straight"))
    monkeypatch.setattr("triton_ops.copy_pages.straight_to", lambda _: seen.append("straight"))
    return seen


@pytest.mark.skipif(DEVICE == "cuda", reason="streams are pretended")
def test_rows_without_a_template_are_counted_as_the_steps_own(monkeypatch):
    """A window that lies askew on its pages is described anew; nothing static goes with it."""
    quick(monkeypatch)
    world = served(blocks=8)
    steady = Steady(world, staged_on_cpu(world, monkeypatch))
    monkeypatch.setattr(steady.mover.locator, "window_pages", lambda: None)
    planned: list[int] = []
    plan_rows = mover_module.plan_rows

    def noted(*arguments: Any) -> Any:
        rows = plan_rows(*arguments)
        planned.append(rows.table.nbytes)
        return rows

    monkeypatch.setattr(mover_module, "plan_rows", noted)
    with world.side.residents.measured() as sent:
        steady.cycle(300)
    assert len(planned) == 2
    assert sent == Sent(0, sum(planned))


def test_tables_are_shared_by_the_paths_of_a_pool():
    world = served()
    first, second = TritonPath(world.side, world.memory), TorchPath(world.side, world.memory)
    assert first._pages is second._pages
    with world.side.residents.measured() as sent:
        TritonPath(world.side, world.memory)
    assert sent == Sent()
