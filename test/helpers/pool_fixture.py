"""A pool, its allocator and requests, as the round-trip and trap tests use them."""

from dataclasses import dataclass

import oracle
import torch

from sglang_dsv4.engine.standalone import PoolSpec, make_allocator, make_pool
from sglang_dsv4.settings import Settings

LENGTHS = (
    1, 3, 4, 5, 127, 128, 129, 130, 255, 256, 257, 383, 384, 385, 511, 512, 513, 1000, 4095, 4096, 4097,
)  # fmt: skip

SPECS = {
    "plain": {},
    "drafts": {"draft_tokens": 4},
    "bf16_states": {"state_dtype": torch.bfloat16},
    "fp4_indexer": {"fp4_indexer": True},
    "stage": {"stage": (1, 5)},
    "stage_without_c128": {"stage": (2, 3)},
    "all_at_once": {"draft_tokens": 2, "state_dtype": torch.bfloat16, "fp4_indexer": True, "stage": (2, 6)},
}


@dataclass
class World:
    """A pool with attached host memory and its allocator."""

    pool: object
    allocator: object

    def start(self, req_slot, tokens):
        """A request of ``tokens`` saved tokens; its next token is in flight, as at a retract."""
        request = oracle.new_request(self.allocator, req_slot, tokens)
        request.n = tokens
        return request

    def read(self, request):
        """Every byte of the request that must survive."""
        return oracle.read(self.pool, request.slots, request.n, request.req_slot)

    def save(self, request):
        """The copy, taken the way the engine takes it: int32 slots out of req_to_token."""
        slots = request.slots[: request.n].to(torch.int32)
        return self.pool.get_cpu_copy(slots, req_pool_index=request.req_slot)

    def leave(self, request):
        """The request's pages go back to the allocator."""
        oracle.release(self.allocator, request.slots)

    def resume(self, copy, req_slot):
        """The request again, in new pages with only the SWA tail mapped."""
        request = oracle.Request(oracle.resume(self.allocator, copy.tokens), req_slot, copy.tokens)
        self.load(copy, request)
        return request

    def load(self, copy, request):
        """Load into ``request``."""
        slots = request.slots[: request.n].to(torch.int32)
        self.pool.load_cpu_copy(copy, slots, req_pool_index=request.req_slot)

    def check_empty(self):
        """No block is held and none is lost."""
        memory = self.pool.host.memory
        memory.check_integrity()
        assert memory.copies == 0
        assert memory.held_bytes == 0


def make_world(device="cpu", transfer="auto", verify=False, host_gb=0.25, host_copies=8, pages=40, **spec):
    """A World of the tiny model unless ``spec`` says otherwise."""
    spec = PoolSpec(pages=pages, swa_pages=spec.pop("swa_pages", pages), device=device, **spec)
    pool = make_pool(spec)
    allocator = make_allocator(spec, pool)
    pool.attach_host(Settings(host_gb=host_gb, host_copies=host_copies, transfer=transfer, verify=verify))
    assert pool.host is not None, pool.refusal
    return World(pool, allocator)


def assert_unchanged(before, pool):
    """No byte of any buffer differs from ``before``."""
    for key, buffer in oracle.buffers(pool).items():
        assert torch.equal(before[key], buffer.cpu()), key


def round_trip(world, tokens, first_slot=1, second_slot=3, evict=False, seed=0):
    """One retract and resume of a request, checked byte for byte."""
    pool = world.pool
    oracle.fill(pool, seed)
    request = world.start(first_slot, tokens)
    if evict:
        oracle.evict_out_of_window(world.allocator, request)
    expected = world.read(request)
    before = oracle.snapshot(pool)
    copy = world.save(request)
    oracle.compare(expected, world.read(request))
    assert_unchanged(before, pool)
    world.leave(request)
    oracle.poison(pool)
    neighbour = world.start(2, 300)  # takes the freed pages, so that the resumed request gets others
    before = oracle.snapshot(pool)
    resumed = world.resume(copy, second_slot)
    oracle.compare(expected, world.read(resumed))
    allowed = oracle.may_change(pool, resumed.slots, resumed.n, second_slot)
    oracle.assert_only_changed(before, pool, allowed)
    oracle.cleared_ring_ok(pool, second_slot, tokens)
    world.leave(neighbour)
    world.leave(resumed)
    world.check_empty()
