"""docs/extending.md, followed to the letter: the two examples of the page, and a family of each other kind.

Where a toy's rows must be is worked out position by position here, sharing no code with the package.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import builders
import oracle
import pytest
import torch
from pretended_device import INTERPRETED, Device

from sglang_dsv4.cache import families as table
from sglang_dsv4.cache import groups
from sglang_dsv4.cache.families import Geometry
from sglang_dsv4.cache.family import Family, Group
from sglang_dsv4.errors import LayoutRefused, VerifyMismatch
from sglang_dsv4.miniature.ledger import parts, unjudged
from sglang_dsv4.pools import describe
from sglang_dsv4.transfer import verify
from sglang_dsv4.transfer.reference import ReferenceCopier

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/extending.md").read_text()
RATIO, ENTRY, LINE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
TOKENS = (1, 130, 257, 383, 515)


@dataclasses.dataclass(frozen=True)
class Toy:
    """entry: source of its Family. shape: pool -> shape of a buffer. rows, widths: rows of a buffer's entry, bytes of a
    row by plane. row: (pool, slots, slot, position) -> its row in the buffer, None where it has none. live: tokens ->
    first position that must survive.
    """

    entry: str
    shape: Callable[[Any], tuple[int, int]]
    rows: int
    widths: tuple[int, ...]
    row: Callable[[Any, list[int], int, int], int | None]
    live: Callable[[int], int]
    dtype: torch.dtype = torch.uint8


def swa(pool: Any, slots: list[int], position: int) -> int:
    return int(pool.full_to_swa_index_mapping[slots[position]])


def rows_of(pool: Any, key: tuple[str, int]) -> int:
    return oracle.buffers(pool)[key].shape[0]


TOYS = {
    "the page's": Toy(
        ENTRY, lambda pool: (rows_of(pool, ("swa_kv", 0)), 256 * 48), 256, (32, 16),
        lambda pool, slots, slot, p: swa(pool, slots, p), lambda n: max(0, n - 127),
    ),
    "paged": Toy(
        'Family("toy", Group.PAGED, g.layers_of(4), 4, 64, stacked(64, 8, 4, 20), 2064, 64, None, 0),',
        lambda pool: (rows_of(pool, ("c4_kv", 1)), 2_064), 64, (8, 4, 20),
        lambda pool, slots, slot, p: slots[p] // 4 if p % 4 == 3 else None, lambda n: 0,
    ),
    "window ring": Toy(
        'Family("toy", Group.WINDOW, g.layers_of(4), 1, 8, stacked(8, 24, 8), 256, 8, 4, 4, ring=True),',
        lambda pool: (rows_of(pool, ("swa_kv", 0)) * 8 + 1, 32), 8, (24, 8),
        lambda pool, slots, slot, p: swa(pool, slots, p) // 256 * 8 + swa(pool, slots, p) % 8,
        lambda n: max(0, n - n % 4 - 4),
    ),
    "request": Toy(
        'Family("toy", Group.REQUEST, g.layers_of(128), 1, 128, stacked(128, 32), 4096, 128, 128, 0, ring=True),',
        lambda pool: (rows_of(pool, ("c128_state", 2)), 8), 1, (32,),
        lambda pool, slots, slot, p: slot * 128 + p % 128, lambda n: n // 128 * 128, torch.float32,
    ),
}  # fmt: skip


def made(toy: Toy, g: Geometry) -> Family:
    """What the entry says, evaluated where the page says it belongs."""
    family: Family = eval(f"({toy.entry}\n)[0]", {**vars(table), "g": g})
    return family


@pytest.fixture(params=TOYS)
def toy(request) -> Toy:
    return TOYS[request.param]


@pytest.fixture
def extend(monkeypatch, toy) -> Callable[[], builders.Served]:
    """The two edits of the page, and an engine whose pools have the toy's buffers; makes such a pool."""
    original, make_pool = table.families, builders.make_pool
    for module in (groups, describe):
        monkeypatch.setattr(module, "families", lambda g: (*original(g), made(toy, g)))
    name = made(toy, Geometry((4, 128))).name
    line = LINE.replace("c4_sketch", name)
    for key, found in eval(f"{{{line}}}").items():
        monkeypatch.setitem(describe.BUFFERS, key, found)

    def make(spec: Any) -> Any:
        pool = make_pool(spec)
        layers = made(toy, Geometry(spec.ratios)).layers
        pool.toy = [torch.empty(toy.shape(pool), dtype=toy.dtype) for _ in layers]
        setattr(pool, f"{name}_buffers", pool.toy)
        return pool

    monkeypatch.setattr(builders, "make_pool", make)
    return lambda: builders.served((0, 4, 128))


def cells(toy: Toy, world: builders.Served, request: oracle.Request) -> Iterator[tuple[int, int, int]]:
    """(position, first byte, past last byte in a layer's buffer) of every live piece of a row."""
    slots, width = request.slots.tolist(), toy.rows * sum(toy.widths)
    page_bytes = max(width, world.pool.toy[0].view(torch.uint8).shape[1])  # with padding; a ring's entry is one row
    for position in range(toy.live(request.n), request.n):
        row = toy.row(world.pool, slots, request.req_slot, position)
        if row is not None:
            start = row // toy.rows * page_bytes
            for number, piece in enumerate(toy.widths):
                at = start + toy.rows * sum(toy.widths[:number]) + row % toy.rows * piece
                yield position, at, at + piece


def read(toy: Toy, world: builders.Served, request: oracle.Request) -> list[tuple[int, int, bytes]]:
    """(layer, position, bytes) of every live piece."""
    flat = [buffer.view(torch.uint8).view(-1) for buffer in world.pool.toy]
    return [
        (layer, position, bytes(bytes_of[first:last].tolist()))
        for layer, bytes_of in enumerate(flat)
        for position, first, last in cells(toy, world, request)
    ]


def fill(world: builders.Served, seed: int) -> None:
    oracle.fill(world.pool, seed)
    noise = torch.Generator().manual_seed(seed)
    for buffer in world.pool.toy:
        buffer.view(torch.uint8).random_(0, 256, generator=noise)


def may_change(toy: Toy, world: builders.Served, request: oracle.Request) -> torch.Tensor:
    """Bytes of a layer's buffer that a load of ``request`` may write: its pages, its slot's ring, or its live rows."""
    family, buffer = world.side.families[-1], world.pool.toy[0].view(torch.uint8)
    mask = torch.zeros(buffer.numel(), dtype=torch.bool)
    if family.group is Group.PAGED:
        for page in {slot // 256 for slot in request.slots[: request.n].tolist()}:
            mask[page * buffer.shape[1] : (page + 1) * buffer.shape[1]] = True
    if family.group is Group.REQUEST:
        mask.view(buffer.shape)[request.req_slot * 128 : (request.req_slot + 1) * 128] = True
    for _, first, last in cells(toy, world, request):
        mask[first:last] = True
    return mask


@pytest.mark.parametrize("path", ["reference", "copier"])
def test_a_new_family_survives_a_retract(monkeypatch, toy, extend, path):
    """The page's own example goes through the interpreted kernels, at one length: they are slow."""
    world = extend()
    assert world.side.families[-1] == made(toy, world.side.geometry)
    interpreted = toy.entry == ENTRY and path == "copier"
    device = Device(monkeypatch, kernels=INTERPRETED if interpreted else None) if path == "copier" else None
    copier = device.copier(world.side, world.memory) if device else ReferenceCopier(world.side, lambda: ())
    for tokens in (257,) if interpreted else TOKENS:
        fill(world, tokens)
        request, copy = world.start(tokens, 1), world.memory.allocate(tokens, world.side.geometry)
        wanted, wanted_toy = oracle.read(world.pool, request.slots, tokens, 1), read(toy, world, request)
        assert wanted_toy or toy.live(tokens) == tokens or tokens < 4
        copier.save(copy, world.request(request))
        if device:
            device.finish()
        other = world.start(300, 2)  # so that the resumed request gets other pages
        oracle.release(world.allocator, request.slots)
        oracle.poison(world.pool)
        for buffer in world.pool.toy:
            buffer.view(torch.uint8).fill_(0xA5)
        again = world.resume(tokens, 3)
        copier.load(copy, world.request(again))
        if device:
            device.finish()
        oracle.compare(wanted, oracle.read(world.pool, again.slots, tokens, 3))
        assert read(toy, world, again) == wanted_toy
        for buffer in world.pool.toy:
            changed = buffer.view(torch.uint8).view(-1) != 0xA5
            assert not bool((changed & ~may_change(toy, world, again)).any())
        copy.release()
        for one in (other, again):
            oracle.release(world.allocator, one.slots)


@pytest.fixture
def ratio_16(monkeypatch) -> builders.Served:
    """The page's one line, and an engine whose last layer has that ratio."""
    for ratio, rule in eval(RATIO, vars(table)).items():
        monkeypatch.setitem(table.COMPRESSIONS, ratio, rule)
    monkeypatch.setattr(describe, "RATIOS", (*table.RATIOS, 16))
    monkeypatch.setattr(table, "RATIOS", (*table.RATIOS, 16))
    monkeypatch.setitem(describe.BUFFERS, "c16_kv", lambda pool: describe._kv(pool, 16))
    monkeypatch.setitem(describe.BUFFERS, "c16_state", lambda pool: describe._states("compress_state_pools", pool, 16))
    make_pool = builders.make_pool

    def make(spec: Any) -> Any:
        pool = make_pool(spec)
        pool.compression_ratios = [*spec.ratios[:-1], 16]
        page = torch.zeros(rows_of(pool, ("c4_kv", 1)), -(-16 * 584 // 576) * 576, dtype=torch.uint8)
        part = SimpleNamespace(kv_buffer=[page], page_size=16, get_bytes_per_token=lambda: 584)
        pool.kv_pools = {4: pool.c4_kv_pool, 128: pool.c128_kv_pool, 16: part}
        ring = torch.zeros((spec.requests + 2) * 16 + 1, 1024)
        state = SimpleNamespace(ratio=16, ring_size=16, kv_score_buffer=SimpleNamespace(kv_score=ring))
        pool.compress_state_pools[-1] = state
        pool.sixteen = page, ring.view(torch.uint8)
        return pool

    monkeypatch.setattr(builders, "make_pool", make)
    return builders.served((0, 4, 128, 0))


@pytest.mark.parametrize("tokens", TOKENS)
def test_a_new_ratio_is_one_line(ratio_16, tokens):
    """Its compressed rows and its pending states survive, wherever the request comes back."""
    world = ratio_16
    kv, ring = world.pool.sixteen

    def rows(request: oracle.Request) -> list[bytes]:
        slots, found = request.slots.tolist(), []
        for position in range(15, tokens, 16):
            page, row = divmod(slots[position] // 16, 16)
            values, scales = kv[page, row * 576 : row * 576 + 576], kv[page, 9_216 + row * 8 : 9_216 + row * 8 + 8]
            found += [bytes(values.tolist()), bytes(scales.tolist())]
        pending = range(tokens // 16 * 16, tokens)
        return found + [bytes(ring[request.req_slot * 16 + position % 16].tolist()) for position in pending]

    copier = ReferenceCopier(world.side, lambda: ())
    for buffer in (kv, ring):
        buffer.random_(0, 256, generator=torch.Generator().manual_seed(tokens))
    request, copy = world.start(tokens, 1), world.memory.allocate(tokens, world.side.geometry)
    wanted = rows(request)
    assert len(wanted) == tokens // 16 * 2 + tokens % 16
    copier.save(copy, world.request(request))
    world.start(300, 2)
    oracle.release(world.allocator, request.slots)
    for buffer in (kv, ring):
        buffer.fill_(0xA5)
    again = world.resume(tokens, 3)
    copier.load(copy, world.request(again))
    assert rows(again) == wanted
    copy.release()


def test_verify_mode_and_the_demos_judge_name_it(toy, extend):
    world = extend()
    family = world.side.families[-1]
    request, copy = world.start(301, 1), world.memory.allocate(301, world.side.geometry)
    ReferenceCopier(world.side, lambda: ()).save(copy, world.request(request))
    spans = world.plan(request)
    copy.checksums = verify.checksums(world.side, copy, spans)
    block = int(copy.blocks[family.group][0])
    packed = world.memory.regions[family.group].packed
    packed.view(world.memory.region_tensor(family.group), block, family, 0, 0)[0, 0] ^= 1
    with pytest.raises(VerifyMismatch, match=f"family {family.name}, layer {family.layers[0]}"):
        verify.check_host(world.side, copy, spans)
    world.pool.host = SimpleNamespace(side=world.side)
    assert unjudged(world.pool, parts(world.pool)) == [family.name]
    copy.release()


def test_a_pool_without_its_buffers_is_refused_by_name(monkeypatch, extend):
    world = extend()
    family = world.side.families[-1]
    world.pool.toy.pop()
    with pytest.raises(LayoutRefused, match=rf"{family.name}: \d buffers for {len(family.layers)} layers"):
        describe.describe(world.pool)
    monkeypatch.delitem(describe.BUFFERS, family.name)
    with pytest.raises(LayoutRefused, match=rf"{family.name}: pools/describe.py does not say where"):
        describe.describe(world.pool)


def test_the_page_explains_every_field_and_what_can_be_written_in_it():
    explained = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert explained == [*table.Compression._fields, *(field.name for field in dataclasses.fields(Family))]
    assert all(f"`Group.{group.name}`" in PAGE for group in Group)


def test_every_family_has_a_line_of_buffers():
    for index in ("fp8", "fp4_split"):
        g = Geometry(
            (0, 1, 2, 4, 128), sources=(1, 2), index_rows=dict.fromkeys((1, 2, 4), index), draft=table.Draft(1, 127)
        )
        assert {family.name for family in table.families(g)} <= {*describe.BUFFERS, *describe.DRAFT_BUFFERS}


def test_no_other_module_knows_a_family_by_name():
    """The two files of the page, the demo's judge, the colours of a picture, and a default of the stress tool."""
    package, names = ROOT / "sglang_dsv4", {*describe.BUFFERS, *describe.DRAFT_BUFFERS}
    knowing = {
        str(path.relative_to(ROOT))
        for folder in (package, ROOT / "triton_ops")
        for path in folder.rglob("*.py")
        if names & {n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)}
    }
    allowed = ("cache/families", "pools/describe", "miniature/ledger", "cli/plan_drawing", "cli/stress")
    assert knowing == {f"sglang_dsv4/{name}.py" for name in allowed}
