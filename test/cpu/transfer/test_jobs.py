"""Jobs against word-by-word arithmetic over published sizes; row templates against rows planned one by one."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch
from builders import POISON, Served, place, served

from sglang_dsv4.cache.rows import Place, plan
from sglang_dsv4.transfer import jobs as jobs_module
from sglang_dsv4.transfer.jobs import Jobs, Rows, RowTemplates, image_bytes, plan_rows
from triton_ops.copy_rows import EMPTY, HOST_OFFSET

RATIOS = (0, 4, 128, 4, 128)
BLOCKS, COPIES = 12, 3
# family: (layers, first row buffer, device page bytes, first byte in the host block, bytes from layer to layer,
#          planes as (device offset, host offset, bytes a row, bytes from row to row on the host)); rings 8 and 128
FAMILIES = {
    "swa_kv": (5, 0, 149_760, 0, 74_752, [(0, 0, 576, 576), (147_456, 73_728, 8, 8)]),
    "c4_state": (2, 5, 65_536, 373_760, 65_536, [(0, 0, 8_192, 8_192)]),
    "c4_indexer_state": (2, 7, 16_384, 504_832, 16_384, [(0, 0, 2_048, 2_048)]),
    "c128_state": (2, 9, 524_288, 0, 4_096, [(0, 0, 4_096, 8_192)]),  # row by row, the two layers in turn
}
BLOCK, WINDOW, REQUEST = 98_304, 540_672, 1_048_576
REGION = {"window": BLOCKS * BLOCK, "request": BLOCKS * BLOCK + COPIES * WINDOW}
IMAGE = {"window": 0, "request": WINDOW}


@pytest.fixture(scope="module")
def world() -> Served:
    return served(RATIOS, blocks=BLOCKS, copies=COPIES, pages=12, swa_pages=9)


def words_of(segments: np.ndarray) -> np.ndarray:
    """Every 8-byte word that moves: (buffer, device word, host word), in order. What is reset does not move."""
    found = []
    for first, layers, device, host, layer_stride, rows, row_bytes, row_stride in segments.tolist():
        if host == EMPTY:
            continue
        assert min(layers, rows, row_bytes) > 0
        assert row_bytes % 8 == device % 8 == host % 8 == layer_stride % 8 == row_stride % 8 == 0
        k = np.arange(row_bytes // 8)
        for layer in range(layers):
            for row in range(rows):
                there = (device + row * row_bytes) // 8 + k
                here = (host + layer * layer_stride + row * row_stride) // 8 + k
                found.append(np.stack([np.full(len(k), first + layer), there, here], axis=1))
    return ordered(found)


def ordered(found: list[np.ndarray]) -> np.ndarray:
    table = np.concatenate(found) if found else np.empty((0, 3), np.int64)
    return table[np.lexsort(table.T)]


def first_live(name: str, n: int) -> int:
    return {"swa_kv": max(0, n - 127), "c128_state": n - n % 128}.get(name, max(0, n - n % 4 - 4))


def expected_words(world: Served, request, starts: dict[str, int]) -> np.ndarray:
    """One token and one layer at a time; ``starts``: where the window and the request block begin."""
    place = world.place(request)
    n, found = place.tokens, []
    for name, (layers, first, page_bytes, in_block, layer_stride, planes) in FAMILIES.items():
        start = first_live(name, n)
        for position in range(start, n):
            swa = int(place.swa[position - max(0, n - 127)])
            page, row, group = swa // 256, swa % (256 if name == "swa_kv" else 8), "window"
            if name == "c128_state":
                page, row, group = request.req_slot, position % 128, "request"
            for layer in range(layers):
                base = starts[group] + in_block + layer * layer_stride
                for device, host, width, pitch in planes:
                    k = np.arange(width // 8)
                    there = (page * page_bytes + device + row * width) // 8 + k
                    here = (base + host + (position - start) * pitch) // 8 + k
                    found.append(np.stack([np.full(len(k), first + layer), there, here], axis=1))
    return ordered(found)


def check_image(jobs: Jobs, n: int, starts: dict[str, int]) -> None:
    """The runs of ``jobs.image`` hold every word of the rows, and of the request block only pending rows."""
    groups = ["window", "request"] if n % 128 else ["window"]
    assert [(arena, image) for arena, image, _ in jobs.image] == [(starts[group], IMAGE[group]) for group in groups]
    live = {group: nbytes for group, (_, _, nbytes) in zip(groups, jobs.image, strict=True)}
    assert 0 < live["window"] <= WINDOW
    assert live.get("request", 0) == (n % 128) * 2 * 4_096
    for segments, column in ((jobs.rows_in_arena(), 0), (jobs.rows.table, 1)):
        touched = 8 * words_of(segments)[:, 2]
        held = np.zeros(len(touched), bool)
        for run in jobs.image:
            held |= (touched >= run[column]) & (touched + 8 <= run[column] + run[2])
        assert bool(held.all())


@pytest.mark.parametrize("n", [1, 4, 5, 127, 128, 129, 255, 256, 257, 385, 1000])
def test_words_and_pages(world, n):
    request = world.start(n, slot=3)
    before = world.memory.allocate(100, world.side.geometry)  # so that no block has number 0
    copy = world.memory.allocate(n, world.side.geometry)
    try:
        blocks = {group.value: numbers.tolist() for group, numbers in copy.blocks.items()}
        assert blocks["window"] == blocks["request"] == [1]
        starts = {"window": REGION["window"] + WINDOW, "request": REGION["request"] + REQUEST}
        wanted, wanted_in_image = (expected_words(world, request, first) for first in (starts, IMAGE))
        assert len(np.unique(wanted[:, 0] << 40 | wanted[:, 1])) == len(wanted), "a device word twice"
        assert len(np.unique(wanted[:, 2])) == len(wanted), "a host word twice"
        for save in (True, False):
            jobs = world.jobs(copy, request, save)
            assert jobs.pages.tolist() == [int(request.slots[p]) // 256 for p in range(0, n, 256)]
            assert jobs.blocks.tolist() == blocks["block"]
            table, in_arena = jobs.rows.table, jobs.rows_in_arena()
            assert np.array_equal(words_of(in_arena), wanted)
            assert np.array_equal(words_of(table), wanted_in_image)
            check_image(jobs, n, starts)
            assert table.shape == in_arena.shape
            assert table.shape[1] == 8
            assert table.flags["C_CONTIGUOUS"]
            assert in_arena.flags["C_CONTIGUOUS"]
            assert table.dtype == in_arena.dtype == jobs.blocks.dtype == np.int64
            assert jobs.pages.dtype == torch.int64
            assert jobs.rows.most_layers == int(table[:, 1].max()) == 5
            assert jobs.rows.most_bytes == int((table[:, 5] * table[:, 6]).max())
            assert bool((table[:, HOST_OFFSET] == EMPTY).any()) != save
            assert np.array_equal(table[:, HOST_OFFSET] == EMPTY, in_arena[:, HOST_OFFSET] == EMPTY)
    finally:
        copy.release()
        before.release()
        world.allocator.free(request.slots)


@pytest.mark.parametrize(("first", "second"), [(0, 0), (0, 2), (2, 0), (1, 1), (2, 2)])
def test_rows_follow_the_blocks_of_their_copy(world, first, second):
    """Window and request block of different numbers, the first and the last of their regions too."""
    request = world.start(200, slot=0)
    copy = world.memory.allocate(200, world.side.geometry)
    numbers = {group: blocks.copy() for group, blocks in copy.lease.blocks.items()}
    try:
        for group, number in zip(("window", "request"), (first, second), strict=True):
            copy.lease.blocks[group][:] = number
        starts = {"window": REGION["window"] + first * WINDOW, "request": REGION["request"] + second * REQUEST}
        jobs = world.jobs(copy, request, save=False)
        assert np.array_equal(words_of(jobs.rows_in_arena()), expected_words(world, request, starts))
        assert np.array_equal(words_of(jobs.rows.table), expected_words(world, request, IMAGE))
        check_image(jobs, 200, starts)
    finally:
        copy.lease.blocks.update(numbers)
        copy.release()
        world.allocator.free(request.slots)


def test_the_size_of_a_row_image(world):
    assert image_bytes(world.memory) == WINDOW + REQUEST


def test_no_rows(world):
    copy = world.memory.allocate(0, world.side.geometry)
    jobs = world.jobs(copy, None, save=True)
    assert jobs.rows.table.shape == jobs.rows_in_arena().shape == (0, 8)
    assert (len(jobs.pages), len(jobs.blocks), jobs.image) == (0, 0, ())
    assert (jobs.rows.most_layers, jobs.rows.most_bytes) == (0, 0)
    copy.release()


def test_the_number_of_segments_does_not_grow_with_the_tokens(world):
    """The window and the pending block are bounded, so a long request has no more segments than a short one."""
    sizes = []
    for n in (511, 2047):
        request = world.start(n, slot=1)
        copy = world.memory.allocate(n, world.side.geometry)
        sizes.append(len(world.jobs(copy, request, save=False).rows.table))
        copy.release()
        world.allocator.free(request.slots)
    assert sizes[0] == sizes[1]


def test_the_number_of_segments_does_not_grow_with_the_layers():
    sizes = []
    for repeat in (1, 4):
        world = served((0, 4, 128) * repeat, blocks=2, copies=1, pages=3, swa_pages=3, requests=1)
        request = world.start(300, slot=0)
        copy = world.memory.allocate(300, world.side.geometry)
        jobs = world.jobs(copy, request, save=False)
        assert jobs.rows.most_layers == 3 * repeat
        sizes.append(len(jobs.rows.table))
        copy.release()
    assert sizes[0] == sizes[1]


def test_a_stage_without_token_blocks():
    world = served((0, 0), blocks=0, copies=2)
    request = world.start(300, slot=1)
    copy = world.memory.allocate(300, world.side.geometry)
    jobs = world.jobs(copy, request, save=False)
    assert len(jobs.blocks) == 0
    assert not bool((jobs.rows.table[:, HOST_OFFSET] == EMPTY).any())
    words = words_of(jobs.rows_in_arena())
    assert set(words[:, 0].tolist()) == {0, 1}
    assert 8 * len(words) == 2 * 127 * 584
    assert [(arena, image) for arena, image, _ in jobs.image] == [(0, 0)]
    copy.release()


# ------------------------------------------------------------------------------- templates and resets

SPECS = {
    "plain": {},
    "drafts": {"draft_tokens": 4},
    "bf16 states": {"state_dtype": torch.bfloat16},
    "stage": {"ratios": RATIOS, "stage": (2, 5)},
    "without c4": {"ratios": (0, 128)},
    "without c128": {"ratios": (0, 4)},
    "window only": {"ratios": (0, 0), "blocks": 0},
}
GRID = (
    0, 1, 3, 4, 5, *range(126, 131), *range(254, 259), *range(383, 387), *range(511, 514), 640, *range(767, 771),
    1000, 2047,
)  # fmt: skip


@pytest.fixture(scope="module", params=SPECS.values(), ids=SPECS.keys())
def some_world(request) -> Served:
    return served(**request.param)


def planned(world: Served, where: Place, save: bool) -> Rows:
    """The rows of a request, every span planned."""
    side = world.side
    spans = plan(side.geometry, side.families, where)
    return plan_rows(side, world.memory, spans, None if save else where.request_slot)


def from_template(templates: RowTemplates, where: Place, save: bool) -> Rows:
    window_pages = tuple(dict.fromkeys((where.swa // 256).tolist()))
    return templates.rows(where.tokens, window_pages, where.request_slot, save)


def assert_same(found: Rows, wanted: Rows) -> None:
    assert found.table.dtype == np.int64
    assert found.table.flags["C_CONTIGUOUS"]
    assert found.table.tolist() == wanted.table.tolist()
    assert (found.most_layers, found.most_bytes) == (wanted.most_layers, wanted.most_bytes)


@pytest.mark.parametrize("save", [True, False], ids=["save", "load"])
def test_templates_give_what_planning_gives(some_world, save):
    templates = RowTemplates(some_world.side, some_world.memory)
    for tokens in GRID:
        for seed, slot in enumerate((2, 0, 3, 1)):  # the first of them plans the phase
            where = place(tokens, seed=1_000 * seed + tokens, slot=slot, pool_pages=40 if seed % 2 else 3_000)
            assert_same(from_template(templates, where, save), planned(some_world, where, save))


def test_templates_in_any_order(some_world):
    """A phase is planned at whichever request comes first, long or short, saved or loaded."""
    for order in (GRID, GRID[::-1]):
        templates = RowTemplates(some_world.side, some_world.memory)
        for number, tokens in enumerate(order):
            for save in (bool(number % 2), not number % 2):
                where = place(tokens, seed=number, slot=number % 4, pool_pages=50)
                assert_same(from_template(templates, where, save), planned(some_world, where, save))


@pytest.mark.parametrize("save", [True, False], ids=["save", "load"])
@pytest.mark.parametrize("tokens", [130, 300, 900])
def test_rows_of_a_template_are_nobody_elses(some_world, tokens, save):
    """A path or a ring of tables may write to what it is given."""
    templates = RowTemplates(some_world.side, some_world.memory)
    where = place(tokens, seed=5)
    first = from_template(templates, where, save)
    first.table[:] = POISON
    second = from_template(templates, where, save)
    assert_same(second, planned(some_world, where, save))
    assert not np.shares_memory(first.table, second.table)


def test_a_phase_is_planned_once(world, monkeypatch):
    """From the second page on only the remainder counts."""
    templates, seen = RowTemplates(world.side, world.memory), []

    def counting(geometry, families, where):
        seen.append(where.tokens)
        return plan(geometry, families, where)

    monkeypatch.setattr(jobs_module, "plan", counting)
    for tokens in (300, 556, 300 + 256 * 400, 300, 44, 44):
        for slot in (0, 3):
            where = place(tokens, seed=tokens, slot=slot)
            from_template(templates, where, save=False)
    assert seen == [300, 44]
    from_template(templates, place(300, seed=1), save=True)
    assert seen == [300, 44, 300]


def ring_of(world: Served) -> tuple[int, int, range]:
    """(rows, bytes a row, buffers) of the rings that belong to request slots, by the pool's own objects."""
    states = [s for s in world.pool.compress_state_pools if s is not None and s.ratio == 128]
    if not states:
        return 0, 0, range(0)
    layers = len([f for f in oracle.buffers(world.pool) if f[0] == "c128_state"])
    others = len([f for f in oracle.buffers(world.pool) if f[0] in {"swa_kv", "c4_state", "c4_indexer_state"}])
    buffer = states[0].kv_score_buffer.kv_score
    return states[0].ring_size, buffer.shape[1] * buffer.element_size(), range(others, others + layers)


def touched(rows: Rows, ring: int, row_bytes: int, buffers: range) -> dict[tuple[int, int], list[str]]:
    """What happens to each row of the rings of ``buffers``: "reset" or "live"."""
    found: dict[tuple[int, int], list[str]] = {}
    for first, layers, device, host, _, count, width, _ in rows.table.tolist():
        if first not in buffers:
            assert host != EMPTY, "rows of another family are reset"
            continue
        assert (first, first + layers) == (buffers.start, buffers.stop)
        assert (width, device % row_bytes) == (row_bytes, 0)
        assert count > 0
        for row in range(device // row_bytes, device // row_bytes + count):
            for buffer in range(first, first + layers):
                found.setdefault((buffer, row), []).append("reset" if host == EMPTY else "live")
    return found


@pytest.mark.parametrize("slot", [0, 3])
def test_a_load_touches_each_row_of_the_ring_once(some_world, slot):
    """Live rows and rows that are reset are the whole ring of the slot; a save resets none."""
    ring, row_bytes, buffers = ring_of(some_world)
    templates = RowTemplates(some_world.side, some_world.memory)
    for tokens in GRID:
        where = place(tokens, seed=tokens, slot=slot)
        live = {(b, slot * ring + p % ring) for b in buffers for p in range(tokens // 128 * 128, tokens)}
        everything = {(b, slot * ring + row) for b in buffers for row in range(ring)}
        for rows in (planned(some_world, where, save=False), from_template(templates, where, save=False)):
            wanted = {row: ["live" if row in live else "reset"] for row in everything}
            assert touched(rows, ring, row_bytes, buffers) == wanted
        for rows in (planned(some_world, where, save=True), from_template(templates, where, save=True)):
            assert touched(rows, ring, row_bytes, buffers) == {row: ["live"] for row in live}
