"""Builds a pool, its allocator and requests, as the round-trip and trap tests use them."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import oracle
import torch
from server_fixture import ON_0522

from sglang_dsv4.pools.copy_service import ServerContext
from sglang_dsv4.settings import Settings
from sglang_dsv4.testing.standalone import TINY41_RATIOS, TINY41_SOURCES, PoolSpec, make_allocator, make_pool

LENGTHS = (
    1, 3, 4, 5, 127, 128, 129, 130, 255, 256, 257, 383, 384, 385, 511, 512, 513, 1000, 4095, 4096, 4097,
)  # fmt: skip

HIP, SM100, SM120, ONLINE = "hip", "sm_100", "sm_120", "online"
SPECS = {
    "plain": {},
    "drafts": {"draft_tokens": 4},
    "bf16_states": {"state_dtype": torch.bfloat16},
    "fp4_indexer": {"fp4_indexer": True},
    "stage": {"stage": (1, 5)},
    "stage_without_c128": {"stage": (2, 3)},
    "online": {"engine": ONLINE},
    "online_bf16_stage": {"engine": ONLINE, "state_dtype": torch.bfloat16, "stage": (2, 6)},
    "all_at_once": {"draft_tokens": 2, "state_dtype": torch.bfloat16, "fp4_indexer": True, "stage": (2, 6)},
}


V41 = {"ratios": TINY41_RATIOS, "sources": TINY41_SOURCES}
NEWER_SPECS = {  # of V4.1
    "v41": V41,
    "v41_drafts": {**V41, "draft_tokens": 6},
    "v41_other_order": {**V41, "sources": (4, 2, 6)},  # that of the engine's buffers
    "v41_bf16_states": {**V41, "state_dtype": torch.bfloat16},  # those of ratio 2 stay fp32
    "v41_stage": {**V41, "stage": (2, 5)},
    "v41_stage_without_ratio_2": {**V41, "stage": (6, 8)},
    "v41_rows": {**V41, "kv_layout": "v41"},
    "v41_rows_fp8": {**V41, "kv_layout": "v41", "compressed_kv_layout": "fp8"},
    "v41_rows_new": {**V41, "kv_layout": "v41_new", "draft_tokens": 1},
    "v41_split_index": {**V41, "engine": HIP},
    "v41_long_index_pages": {**V41, "engine": SM100},
    "v4_on_v41_rows": {"kv_layout": "v41"},
    "v4_on_v41_fp4_rows": {"kv_layout": "v41_new", "compressed_kv_layout": "fp4", "draft_tokens": 4},
    "v4_split_index": {"fp4_indexer": True, "engine": HIP},
    "short_swa_pages": {"engine": SM120},
    "v41_short_swa_pages": {**V41, "engine": SM120, "kv_layout": "v41"},
}
if ON_0522:  # it has no interleaved rows
    NEWER_SPECS = {name: spec for name, spec in NEWER_SPECS.items() if spec.get("kv_layout") != "v41_new"}


@contextlib.contextmanager
def engine_on(platform: str | None) -> Iterator[None]:
    """Lets the engine build a pool as it would on another GPU, or with online compression."""
    if platform is None:
        yield
        return
    from sglang.srt.environ import envs
    from sglang.srt.mem_cache import deepseek_v4_memory_pool as engine

    with contextlib.ExitStack() as stack:
        if platform == ONLINE:
            stack.enter_context(mock.patch.object(engine, "ONLINE_C128", True))
        elif platform == HIP:
            stack.enter_context(mock.patch.object(engine, "_is_hip", True))
        elif platform == SM100:
            stack.enter_context(mock.patch.object(engine, "DSV41_INDEX_PAGE_SIZE", 128))
        else:
            stack.enter_context(mock.patch.object(engine, "get_platform", lambda: SimpleNamespace(is_sm120=True)))
            stack.enter_context(envs.SGLANG_OPT_SM120_DIRECT_SWA_KV.override(True))
        yield


@dataclass
class World:
    """Holds a pool with attached host memory and its allocator."""

    pool: object
    allocator: object

    def start(self, req_slot, tokens):
        """Starts a request of ``tokens`` saved tokens; its next token is in flight, as at a retract."""
        request = oracle.new_request(self.allocator, req_slot, tokens)
        request.n = tokens
        return request

    def read(self, request):
        """Returns every byte of the request that must survive."""
        return oracle.read(self.pool, request.slots, request.n, request.req_slot)

    def save(self, request):
        """Saves the copy as the engine takes it: int32 slots out of req_to_token."""
        slots = request.slots[: request.n].to(torch.int32)
        return self.pool.get_cpu_copy(slots, req_pool_index=request.req_slot)

    def leave(self, request):
        """Gives the request's pages back to the allocator."""
        oracle.release(self.allocator, request.slots)

    def resume(self, copy, req_slot):
        """Returns the request again, in new pages with only the SWA tail mapped."""
        request = oracle.Request(oracle.resume(self.allocator, copy.tokens), req_slot, copy.tokens)
        self.load(copy, request)
        return request

    def load(self, copy, request):
        slots = request.slots[: request.n].to(torch.int32)
        self.pool.load_cpu_copy(copy, slots, req_pool_index=request.req_slot)

    def check_empty(self):
        """Asserts that no unit is held and none is lost."""
        memory = self.pool.host.memory
        memory.check_integrity()
        assert memory.copies == 0
        assert memory.held_bytes == 0


def make_world(device="cpu", transfer="auto", verify=False, host_gb=0.25, pages=40, engine=None, writers=(), **spec):
    """Returns a World of the tiny model unless ``spec`` says otherwise; its loads wait for the streams ``writers``."""
    spec = PoolSpec(pages=pages, swa_pages=spec.pop("swa_pages", pages), device=device, **spec)
    with engine_on(engine):
        pool = make_pool(spec)
    allocator = make_allocator(spec, pool)
    settings = Settings(host_gb=host_gb, transfer=transfer, verify=verify)
    pool.attach_host(settings, ServerContext(writer_streams=lambda: writers))
    assert pool.host is not None, pool.refusal
    return World(pool, allocator)


def saved(world, tokens=700, slot=1):
    """Returns (request, its bytes, its copy) of a filled pool."""
    oracle.fill(world.pool, tokens)
    request = world.start(slot, tokens)
    return request, world.read(request), world.save(request)


def round_trip(world, tokens, first_slot=1, second_slot=3, evict=False, seed=0):
    """Retracts and resumes a request, checked byte for byte."""
    pool = world.pool
    oracle.fill(pool, seed)
    request = world.start(first_slot, tokens)
    if evict:
        oracle.evict_out_of_window(world.allocator, request)
    expected = world.read(request)
    before = oracle.snapshot(pool)
    copy = world.save(request)
    oracle.compare(expected, world.read(request))
    oracle.assert_only_changed(before, pool)
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


def point_round_trip(world, pages, behind=100):
    """Saves a request's points at both of ``pages``, and loads the second into other pages, whole and its end alone.

    behind: tokens that the request has behind the second page end.
    """
    pool, page = world.pool, 256
    host, (first, last) = pool.host, (count * page for count in pages)
    oracle.fill(pool, 5)
    request = world.start(1, last + behind)
    here, before = request.slots.to(torch.int32), oracle.snapshot(pool)
    expected = oracle.read(pool, request.slots, last, 1)
    start = host.save_point(here[:first], pool.full_to_swa_index_mapping, 0)
    copy = host.save_point(here[:last], pool.full_to_swa_index_mapping, pages[0])
    for saved_point in (start, copy):
        host.check_search(saved_point)
        if saved_point.lease.used_by is not None:
            saved_point.lease.used_by.synchronize()
    oracle.assert_only_changed(before, pool)
    world.leave(request)
    paged, tail = start.pages(0) + copy.pages(pages[0]), copy.tail_units
    checksums = {}
    if copy.checksums:
        checksums = {page: start.checksums[page] for page in range(pages[0])}
        checksums |= {pages[0] + index: checksum for index, checksum in copy.checksums.items()}
    for begin in (0, pages[1] - 1):
        oracle.poison(pool)
        slots = oracle.resume(world.allocator, last)
        before = oracle.snapshot(pool)
        host.load_point(paged, tail, slots, pool.full_to_swa_index_mapping, begin, checksums or None)
        got = oracle.read(pool, slots, last, 1)
        below = {key for key in expected if begin and oracle.FAMILIES[key[0]].by == "page" and key[2] < begin * page}
        oracle.compare(*({key: rows[key] for key in rows if key not in below} for rows in (expected, got)))
        allowed = oracle.may_change(pool, slots[begin * page :], last - begin * page, 1)
        for (family, _), mask in allowed.items():
            if oracle.FAMILIES[family].by == "slot":
                mask[:] = False
        oracle.assert_only_changed(before, pool, allowed)
        oracle.release(world.allocator, slots)
    start.release()
    copy.release()
    world.check_empty()
