"""The copier on a GPU: slots reused many times in one transfer, streams that run late, pages reused at once."""

import random

import oracle
import pytest
import torch
from pool_fixture import SPECS, make_world

from sglang_dsv4.transfer import copier as copier_module

CYCLES = 10_000


@pytest.mark.both_layouts
@pytest.mark.parametrize("spec", ["plain", "all_at_once", "stage_without_c128"])
def test_a_slot_of_one_block(monkeypatch, spec):
    """Sixteen chunks over a few slots, the copy engine or the kernels held up in between."""
    for name in ("SLOT_BYTES", "SHORT_BYTES"):
        monkeypatch.setattr(copier_module, name, 1)
    world = make_world(device="cuda", pages=40, **SPECS[spec])
    copier = world.pool.host._copier
    real = copier._copy_pages

    def slow(*arguments, save):
        torch.cuda._sleep(200_000)  # the copy engine gets far ahead
        real(*arguments, save)

    for delay in (real, slow):
        monkeypatch.setattr(copier, "_copy_pages", delay)
        oracle.fill(world.pool, 1)
        request = world.start(1, 4001)
        expected = world.read(request)
        copy = world.save(request)
        oracle.poison(world.pool)
        world.leave(request)
        resumed = world.resume(copy, 2)
        oracle.compare(expected, world.read(resumed))
        world.leave(resumed)


class Judge:
    """Every row that must survive, gathered on the device by the oracle's addresses: nothing waits for the host."""

    def __init__(self, pool):
        self.buffers = oracle.buffers(pool)
        self.pool = pool

    def rows(self, request):
        """(buffer, bytes) of the request's live rows, as index tensors built once per place."""
        found = []
        for key, buffer in self.buffers.items():
            rows = [row for _, row in oracle.live_rows(self.pool, key, request.slots, request.n, request.req_slot)]
            cells = []
            for row in rows:
                for page, start, end in oracle._row_spans(self.pool, key[0], buffer.shape[1], row):
                    base = page * buffer.shape[1]
                    cells.extend(range(base + start, base + end))
            found.append((buffer.view(-1), torch.tensor(cells, dtype=torch.int64, device=buffer.device)))
        return found


def gather(rows):
    return torch.cat([buffer[cells] for buffer, cells in rows])


def test_cycles_of_save_scribble_load():
    """Freed pages overwritten at once on another stream; a stale forward goes on writing its last slot."""
    forward, writer = torch.cuda.Stream(), torch.cuda.Stream()
    world = make_world(device="cuda", pages=24, ratios=(0, 4, 128), requests=6, writers=(forward,))
    judge, rng = Judge(world.pool), random.Random(1)
    places = []
    for slot, tokens in enumerate((5, 130, 513, 700, 257), start=1):
        request = world.start(slot, tokens)
        places.append((request, judge.rows(request)))
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    by_tokens = {}
    for request, rows in places:
        other = oracle.Request(oracle.resume(world.allocator, request.n), request.req_slot, request.n)
        by_tokens[request.n] = ((request, rows), (other, judge.rows(other)))
    noise = {key: torch.randint(0, 256, (1 << 16,), dtype=torch.uint8, device="cuda") for key in range(8)}
    for cycle in range(CYCLES):
        (one, one_rows), (other, other_rows) = rng.sample(by_tokens[rng.choice(list(by_tokens))], 2)
        for number, (buffer, cells) in enumerate(one_rows):
            if len(cells):
                fresh = noise[(number + cycle) % 8]
                buffer[cells] = fresh[: len(cells)] if len(cells) <= len(fresh) else buffer[cells].flip(0)
        expected = gather(one_rows)
        copy = world.save(one)
        with torch.cuda.stream(writer):  # a new owner, outside the scheduler's streams
            for buffer, cells in one_rows:
                buffer[cells] = 0xA5
        with torch.cuda.stream(forward):  # a finished request's last forward, still running in the new pages
            torch.cuda._sleep(rng.choice([0, 20_000, 200_000]))
            for buffer, cells in other_rows:
                buffer[cells[-8:]] = 0x5A
        world.load(copy, other)
        wrong += (gather(other_rows) != expected).sum()
        torch.cuda.current_stream().wait_stream(writer)
        if cycle % 1000 == 999:
            assert int(wrong) == 0, f"mismatch before cycle {cycle}"
            world.pool.host.memory.check_integrity()
    torch.cuda.synchronize()
    assert int(wrong) == 0
    world.check_empty()
