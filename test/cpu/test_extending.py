"""An eighth cache family, the way docs/extending.md says: cache/ and pools/ change, transfer/ and hostmem/ do not.

The two edits of that page are made here by a patch: an entry of ``families`` and a branch of ``_buffers``. There is
one toy a group; where its rows must be is worked out position by position, sharing no code with the package.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from pool_fixture import World, make_world
from pretended_device import INTERPRETED, Device

from sglang_dsv4.cache import families as written
from sglang_dsv4.cache import groups
from sglang_dsv4.cache.families import Address, Family, Geometry, Group, Plane
from sglang_dsv4.errors import LayoutRefused, VerifyMismatch
from sglang_dsv4.pools import describe
from sglang_dsv4.transfer.templates import RowImage, plan_template

PACKAGE = Path(written.__file__).resolve().parent.parent
PAGE, C4_RING, C128_RING = 256, 8, 128
WIDTH, SCALES = 32, 16  # bytes of a toy's row, by plane


@dataclass(frozen=True)
class Toy:
    """An eighth family: its entry, the shape of its buffers, and where its rows are.

    row: (pool, slots, slot, position) -> row of position in the buffer, None where it has none. live: tokens -> the
    first position that must survive.
    """

    entry: Callable[[Geometry], Family]
    ratio: int
    width: int
    buffer: Callable[[Any], tuple[int, int]]
    row: Callable[[Any, torch.Tensor, int, int], int | None]
    live: Callable[[int], int]

    @property
    def name(self) -> str:
        """The family's name."""
        return self.entry(Geometry((0, 4, 128))).name


def swa(pool: Any, slots: torch.Tensor, position: int) -> int:
    return int(pool.full_to_swa_index_mapping[int(slots[position])])


TOYS = {
    # Two planes a page, one row a block of four tokens, found through the full page.
    "block": Toy(
        lambda g: Family(
            "c4_sketch", "toy", Group.PAGED, Address.FULL_PAGE, g.layers_of(4), 4, 64,
            (Plane(0, WIDTH), Plane(64 * WIDTH, SCALES)), 64 * (WIDTH + SCALES), 64,
        ),
        4, WIDTH + SCALES,
        lambda pool: (pool.c4_kv_pool.kv_buffer[0].shape[0], 64 * (WIDTH + SCALES)),
        lambda pool, slots, slot, p: int(slots[p]) // 4 if p % 4 == 3 else None,
        lambda n: 0,
    ),
    # A ring of eight rows a SWA page, of which the open block of four and the one before live.
    "window": Toy(
        lambda g: Family(
            "c4_trace_state", "toy", Group.WINDOW, Address.SWA_PAGE, g.layers_of(4), 1, g.c4_ring,
            (Plane(0, WIDTH),), g.c4_ring * WIDTH, 8,
        ),
        4, WIDTH,
        lambda pool: (pool.swa_kv_pool.kv_buffer[0].shape[0] * C4_RING + 1, WIDTH),
        lambda pool, slots, slot, p: swa(pool, slots, p) // PAGE * C4_RING + swa(pool, slots, p) % C4_RING,
        lambda n: max(0, n - n % 4 - 4),
    ),
    # A ring of 128 rows a request slot, of which the open block lives.
    "request": Toy(
        lambda g: Family(
            "c128_tally_state", "toy", Group.REQUEST, Address.REQUEST_SLOT, g.layers_of(128), 1, g.c128_ring,
            (Plane(0, WIDTH),), g.c128_ring * WIDTH, 128,
        ),
        128, WIDTH,
        lambda pool: (oracle.buffers(pool)[("c128_state", 3)].shape[0], WIDTH),
        lambda pool, slots, slot, p: slot * C128_RING + p % C128_RING,
        lambda n: n // 128 * 128,
    ),
}  # fmt: skip


@pytest.fixture
def extend(monkeypatch):
    """``extend(toy)``: the edits of docs/extending.md; the next pools have the family."""

    def edit(toy: Toy) -> None:
        original = written.families
        for module in (groups, describe):
            monkeypatch.setattr(module, "families", lambda g: (*original(g), toy.entry(g)))
        found = describe._buffers

        def buffers(pool: Any, family: Family) -> tuple[torch.Tensor, ...]:
            return tuple(pool.toy) if family.name == toy.name else found(pool, family)

        monkeypatch.setattr(describe, "_buffers", buffers)

    return edit


@pytest.fixture
def world_of(extend, monkeypatch):
    """``world_of(toy, ...)``: a real pool with the toy's buffers beside its own, and host memory attached."""

    def make(toy: Toy, **options: Any) -> World:
        extend(toy)
        from sglang_dsv4.pools.token_to_kv import TokenToKVPool

        attach = TokenToKVPool.attach_host

        def give(pool: Any, *args: Any) -> Any:
            layers = [r for r in pool.compression_ratios if r == toy.ratio]
            pool.toy = [torch.empty(toy.buffer(pool), dtype=torch.uint8) for _ in layers]
            return attach(pool, *args)

        monkeypatch.setattr(TokenToKVPool, "attach_host", give)
        return make_world(pages=12, **options)

    return make


def cells(toy: Toy, pool: Any, slots: torch.Tensor, n: int, slot: int) -> list[tuple[int, slice]]:
    """(position, its bytes in a layer's flat buffer) of every live row of the toy, plane by plane."""
    found = []
    for position in range(toy.live(n), n):
        row = toy.row(pool, slots, slot, position)
        if row is None:
            continue
        if toy.width == WIDTH:
            found.append((position, slice(row * WIDTH, row * WIDTH + WIDTH)))
            continue
        start, inner = row // 64 * 64 * toy.width, row % 64
        scales = start + 64 * WIDTH + inner * SCALES
        found.append((position, slice(start + inner * WIDTH, start + (inner + 1) * WIDTH)))
        found.append((position, slice(scales, scales + SCALES)))
    return found


def values(toy: Toy, world: World, request: oracle.Request) -> dict[tuple[int, int, int], bytes]:
    """The toy's live bytes by (layer, position, number of the piece)."""
    places = cells(toy, world.pool, request.slots, request.n, request.req_slot)
    return {
        (layer, position, number): bytes(buffer.view(-1)[where].tolist())
        for layer, buffer in enumerate(world.pool.toy)
        for number, (position, where) in enumerate(places)
    }


def fill(world: World, seed: int) -> None:
    oracle.fill(world.pool, seed)
    noise = torch.Generator().manual_seed(seed)
    for buffer in world.pool.toy:
        buffer.copy_(torch.randint(0, 256, buffer.shape, dtype=torch.uint8, generator=noise))


def cycle(toy: Toy, world: World, tokens: int) -> None:
    """A retract and a resume: the eight families are exact, and no other byte of the toy changed."""
    fill(world, tokens)
    request = world.start(1, tokens)
    before, before_toy = world.read(request), values(toy, world, request)
    assert before_toy or tokens < 4 or toy.live(tokens) == tokens
    copy = world.save(request)
    world.leave(request)
    oracle.poison(world.pool)
    for buffer in world.pool.toy:
        buffer.fill_(0xA5)
    other = world.start(2, 300)  # takes the freed pages
    resumed = world.resume(copy, 3)
    oracle.compare(before, world.read(resumed))
    assert values(toy, world, resumed) == before_toy
    _only_its_own_changed(toy, world, resumed)
    world.leave(other)
    world.leave(resumed)
    world.check_empty()


def _only_its_own_changed(toy: Toy, world: World, request: oracle.Request) -> None:
    entry = toy.entry(Geometry((4, 128)))
    for buffer in world.pool.toy:
        changed = torch.from_numpy(np.flatnonzero(buffer.view(-1).numpy() != 0xA5))
        allowed = torch.zeros(buffer.numel(), dtype=torch.bool)
        if entry.group is Group.PAGED:  # whole pages of the request's own
            for page in {int(slot) // PAGE for slot in request.slots[: request.n]}:
                allowed[page * entry.page_bytes : (page + 1) * entry.page_bytes] = True
        elif entry.group is Group.REQUEST:  # the rest of the slot's ring is reset
            allowed[request.req_slot * entry.page_bytes : (request.req_slot + 1) * entry.page_bytes] = True
        else:
            for _, where in cells(toy, world.pool, request.slots, request.n, request.req_slot):
                allowed[where] = True
        assert bool(allowed[changed].all())


@pytest.mark.parametrize("kind", TOYS)
def test_an_eighth_family_survives_a_retract(world_of, kind):
    toy = TOYS[kind]
    world = world_of(toy)
    assert [f.name for f in world.pool.host.side.families][7:] == [toy.name]
    for tokens in (1, 3, 130, 255, 257, 384, 515):
        cycle(toy, world, tokens)


@pytest.mark.parametrize("kind", TOYS)
def test_an_eighth_family_goes_through_the_kernels(monkeypatch, world_of, kind):
    world = world_of(TOYS[kind])
    Device(monkeypatch, kernels=INTERPRETED).serve(world.pool.host)
    for tokens in (6, 301):
        cycle(TOYS[kind], world, tokens)


@pytest.mark.parametrize("kind", TOYS)
def test_verify_mode_names_the_eighth_family(world_of, kind):
    toy = TOYS[kind]
    world = world_of(toy, verify=True)
    fill(world, 1)
    request = world.start(1, 301)
    copy = world.save(request)
    family = world.pool.host.side.families[-1]
    region = world.pool.host.memory.regions[family.group]
    block = int(copy.blocks[family.group][0])
    region.packed.view(world.pool.host.memory.region_tensor(family.group), block, family, 0, 0)[0, 0] ^= 1
    world.leave(request)
    with pytest.raises(VerifyMismatch, match=rf"family {toy.name}, layer {family.layers[0]}"):
        world.resume(copy, 2)


@pytest.mark.parametrize("kind", TOYS)
def test_its_bytes_are_counted_in_the_arena(world_of, kind):
    toy = TOYS[kind]
    host = world_of(toy).pool.host
    family = host.side.families[-1]
    packed = host.memory.regions[family.group].packed
    assert packed.payload_bytes >= len(family.layers) * family.host_bytes > 0
    assert packed.offsets[-1] % 256 == 0
    assert family in packed.families


@pytest.mark.parametrize("kind", TOYS)
def test_a_family_without_its_buffers_is_refused(extend, monkeypatch, kind):
    toy = TOYS[kind]
    extend(toy)
    monkeypatch.setattr("sglang_dsv4.pools.token_to_kv.TokenToKVPool.toy", [], raising=False)
    pool = make_pool_unattached()
    with pytest.raises(LayoutRefused, match=rf"{toy.name}: 0 buffers for \d layers"):
        describe.describe(pool)


def make_pool_unattached() -> Any:
    from sglang_dsv4.engine.standalone import PoolSpec, make_pool

    return make_pool(PoolSpec())


@pytest.mark.parametrize("kind", TOYS)
def test_the_row_image_holds_every_row_of_the_eighth_family(world_of, kind):
    """What the copier carries between the card and the arena."""
    world = world_of(TOYS[kind])
    host = world.pool.host
    for tokens in (3, 130, 257, 383):
        request = world.start(1, tokens)
        copy = world.save(request)
        rows = plan_template(host.side, host.memory, tokens, save=True)
        runs = [(start, start + nbytes) for _, start, nbytes in RowImage(host.memory).runs(copy)]
        for _, layers, _, offset, layer_stride, count, width, pitch, _, _ in rows.tolist():
            end = offset + (layers - 1) * layer_stride + (count - 1) * pitch + width
            assert any(first <= offset and end <= last for first, last in runs), (tokens, offset, end, runs)
        copy.release()
        world.leave(request)


@pytest.mark.parametrize("folder", ["transfer", "hostmem", "../triton_ops"])
def test_these_folders_know_no_family_by_name(folder):
    names = {family.name for family in written.families(Geometry((0, 4, 128)))}
    files = sorted((PACKAGE / folder).glob("*.py"))
    assert files
    for path in files:
        texts = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        assert not names & {text for text in texts if isinstance(text, str)}, path.name
