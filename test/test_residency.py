"""Static tensors: what may stay on the card, that it goes up once, and that a retract sends none of it."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import oracle
import pytest
import segments
import torch
from builders import DEVICE, INTERPRETED, POISON, Served, needs_cuda, place, served, wait
from worlds import SPECS, make_world

from sglang_dsv4.cache.families import Group
from sglang_dsv4.hostmem.memory import HostCopy
from sglang_dsv4.residency import Kind, ResidencyError, Residents, Sent, TensorSpec
from sglang_dsv4.transfer import mover as mover_module
from sglang_dsv4.transfer import staged, streams
from sglang_dsv4.transfer.card_templates import CardTemplates
from sglang_dsv4.transfer.jobs import PlacedRows, RowTemplates
from sglang_dsv4.transfer.locate import Request
from sglang_dsv4.transfer.mover import Mover
from sglang_dsv4.transfer.paths import TorchPath, TritonPath
from sglang_dsv4.transfer.staged import StagedPath
from sglang_dsv4.transfer.staging import StagingRing
from triton_ops.copy_pages import copy_pages_torch
from triton_ops.copy_rows import TEMPLATE_FIELDS, copy_rows, copy_rows_torch

cpu, gpu = pytest.mark.cpu, pytest.mark.gpu

# ------------------------------------------------------------------------------------------------- specs


def spec(name: str = "some.table", **fields: Any) -> TensorSpec:
    return TensorSpec(**{"name": name, "shape": (2, 3), "dtype": torch.int32, "kind": Kind.CONSTANT, **fields})


WAYS: dict[str, Callable[..., TensorSpec]] = {
    "made": spec,
    "changed": lambda name, **fields: spec(name).changed(**fields),
    "replaced": lambda name, **fields: dataclasses.replace(spec(name), **fields),
    "field by field": lambda name, **fields: _one_by_one(spec(name), fields),
}


def _one_by_one(changing: TensorSpec, fields: dict[str, Any]) -> TensorSpec:
    for field, value in fields.items():
        changing = changing.changed(**{field: value})
    return changing


@cpu
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_only_a_constant_that_nobody_writes_stays(way):
    for kind, output, resident in itertools.product(Kind, (False, True), (None, "card", "stacked")):
        for fields in itertools.permutations({"kind": kind, "is_output": output, "resident": resident}.items()):
            if resident is None or (kind is Kind.CONSTANT and not output):
                assert way("some.table", **dict(fields)).resident == resident
                continue
            with pytest.raises(ResidencyError, match=r"^some\.table: .*must not be resident") as refused:
                way("some.table", **dict(fields))
            assert ("an output" in str(refused.value)) or (kind.value in str(refused.value))


@cpu
@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"resident": "cards"}, "resident must be"),
        ({"resident": True}, "resident must be"),
        ({"shape": [2, 3]}, "shape must be a tuple"),
        ({"shape": (2, -1)}, "shape must be a tuple"),
        ({"shape": (2, True)}, "shape must be a tuple"),
        ({"shape": (2.0,)}, "shape must be a tuple"),
        ({"dtype": "int32"}, "dtype must be"),
        ({"kind": "constant"}, "kind must be"),
        ({"resident": "stacked", "shape": ()}, "leading dimension"),
    ],
)
@pytest.mark.parametrize("way", [WAYS["made"], WAYS["changed"], WAYS["replaced"]], ids=["made", "changed", "replaced"])
def test_a_spec_that_says_nothing_clear_is_refused(way, fields, rule):
    with pytest.raises(ResidencyError, match=rf"^some\.table: .*{rule}"):
        way("some.table", **fields)


@cpu
def test_a_spec_has_a_name_and_does_not_change_in_place():
    with pytest.raises(ResidencyError, match="needs a name"):
        spec("")
    with pytest.raises(ResidencyError, match="needs a name"):
        spec().changed(name="")
    for field in dataclasses.fields(TensorSpec):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(spec(), field.name, getattr(spec(), field.name))


# ---------------------------------------------------------------------------------------------- registry


def residents(rank: int = 0, cards: int = 1, *specs: TensorSpec) -> Residents:
    return Residents(torch.device("cpu"), rank, cards, specs)


@cpu
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
    sent = dataclasses.replace(registry.sent)
    with twice:
        registry.upload("some.table", table)
    assert registry.sent == sent
    assert [s.name for s in registry.specs] == ["some.table", "other"]


@cpu
def test_an_entry_for_each_card():
    table = torch.zeros(3, 5, dtype=torch.int32)
    bad = spec("shards", shape=(3, 5), resident="stacked")
    rule = pytest.raises(ResidencyError, match=r"^(shards|moved): stacked .*leading dimension is 3, the cards are 2")
    with rule:
        residents(1, 2, bad)
    registry = residents(1, 2, spec("shards", shape=(3, 5)), spec("whole", shape=(3, 5), resident="card"))
    with rule:
        registry.change("shards", resident="stacked")
    with rule:
        registry.change("whole", name="moved", resident="stacked")
    registry.change("shards", name="was shards", resident="card")
    with rule:
        registry.declare(bad)
    with rule:
        registry.upload(bad, table)
    assert {s.name: s.resident for s in registry.specs} == {"was shards": "card", "whole": "card"}
    assert registry.sent == Sent()
    for rank, cards in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ResidencyError, match="cards"):
            residents(rank, cards)


@cpu
def test_a_change_is_checked_like_a_new_spec():
    registry = residents(0, 1, spec("table", resident="card"), spec("scores", kind=Kind.ACTIVATION))
    for name, changes, rule in (
        ("table", {"is_output": True}, "table: an output"),
        ("table", {"kind": Kind.CACHE_POOL}, "table: a cache pool"),
        ("table", {"kind": Kind.STEP_METADATA}, "table: per-step metadata"),
        ("scores", {"resident": "card"}, "scores: an activation"),
        ("scores", {"name": "logits", "resident": "stacked"}, "logits: an activation"),
        ("none", {"resident": "card"}, "none: no tensor of this name"),
    ):
        before = registry.specs
        with pytest.raises(ResidencyError, match=f"^{rule}"):
            registry.change(name, **changes)
        assert registry.specs == before
    registry.change("table", shape=(4,), name="longer")
    handle = registry.upload("longer", torch.arange(4, dtype=torch.int32))
    for changes in ({"resident": None}, {"name": "table"}, {"shape": (4,)}):
        with pytest.raises(ResidencyError, match=r"^longer: it is on the card already"):
            registry.change("longer", **changes)
    assert registry.handle("longer") is handle


@cpu
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
    assert [s.name for s in registry.specs] == ["kept", "not kept"]
    assert registry.sent == Sent()


@cpu
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


@cpu
def test_bytes_are_counted_by_dispatch():
    registry = residents()
    table = torch.arange(5, dtype=torch.int64)
    with registry.measured() as start:
        registry.constant("table", table)
        assert start == Sent(), "filled in at the end"
    registry.sent.step += 100
    with pytest.raises(KeyError), registry.measured() as step:
        registry.sent.step += 24
        raise KeyError
    with registry.measured() as idle:
        pass
    assert (start, step, idle) == (Sent(40, 0), Sent(0, 24), Sent(0, 0))
    assert registry.sent == Sent(40, 124)


# ---------------------------------------------------------------------------------------------- templates


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


@cpu
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


@cpu
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


@cpu
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


# ---------------------------------------------------------------------------------------------- transfers


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


@cpu
@pytest.mark.skipif(DEVICE == "cuda", reason="a real device is measured below")
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


@cpu
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


@cpu
def test_tables_are_shared_by_the_paths_of_a_pool():
    world = served()
    first, second = TritonPath(world.side, world.memory), TorchPath(world.side, world.memory)
    assert first._pages is second._pages
    with world.side.residents.measured() as sent:
        TritonPath(world.side, world.memory)
    assert sent == Sent()


# ------------------------------------------------------------------------------------------- on a real card


def to_device(run: Callable[[], Any], folder: Any) -> list[int]:
    """Bytes of each copy from the host to the device during ``run``, by the profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    copies = [e["args"] for e in events if e.get("cat") == "gpu_memcpy" and "HtoD" in e["name"]]
    return [int(arguments["bytes"]) for arguments in copies]


@gpu
@needs_cuda
def test_the_link_carries_nothing_but_the_copy(tmp_path):
    """A save sends nothing to the card, a load the bytes of its blocks; the first one of its length like the others."""
    world = make_world(device="cuda", transfer="staged")
    memory = world.pool.host.memory
    world.leave(world.start(1, 700))  # the allocator's own first tables
    for tokens in (700, 300, 1_021, 700):
        request, copies = world.start(1, tokens), []
        torch.cuda.synchronize()
        slots = request.slots[:tokens].to(torch.int32)
        saved = to_device(lambda s=slots, c=copies: c.append(world.pool.get_cpu_copy(s, req_pool_index=1)), tmp_path)
        world.leave(request)
        (copy,) = copies
        blocks, stride = len(copy.blocks[Group.BLOCK]), memory.regions[Group.BLOCK].packed.block_stride
        rows = sum(nbytes for _, _, nbytes in mover_module.row_image(copy))
        again = oracle.Request(oracle.resume(world.allocator, tokens), 2, tokens)
        slots = again.slots.to(torch.int32)
        torch.cuda.synchronize()
        loaded = to_device(lambda s=slots, c=copy: world.pool.load_cpu_copy(c, s, req_pool_index=2), tmp_path)
        assert saved == []
        assert sum(loaded) == blocks * stride + rows
        world.leave(again)


@gpu
@needs_cuda
def test_an_upload_is_on_the_card_for_every_stream():
    """Read by a stream that waits for nothing, right after the call."""
    registry, side = Residents(torch.device("cuda")), torch.cuda.Stream()
    rng = np.random.default_rng(1)
    for number in range(20):
        table = torch.from_numpy(rng.integers(0, 1 << 40, 1 << 20))
        torch.cuda._sleep(20_000_000)  # the current stream is late
        handle = registry.constant(f"table {number}", table)
        with torch.cuda.stream(side):
            found = handle.clone()
        side.synchronize()
        assert torch.equal(found.cpu(), table)
