"""Runs plain servers in miniature, as the tests drive them.

``small_world`` is a ``sglang_dsv4.testing`` server of three layers, one a compression ratio: every family of rows, at
a third of the bytes. ``live`` is a random life of requests on it, with a check of every byte and page after every step.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import oracle
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.mem_cache.allocator import paged

from sglang_dsv4.engine.plain.serving import PlainServing, plain_of
from sglang_dsv4.errors import HostMemoryExhausted
from sglang_dsv4.sessions.store import SessionStore
from sglang_dsv4.testing.world import PlainWorld

SMALL = (0, 4, 128)
SMALL41: dict[str, Any] = {"ratios": (0, 2, 1), "sources": (1, 2)}
FORGETS = 0.7  # of all retracts in a life: the tree loses what nobody holds, so more than a page's worth comes back


class NaiveKernel:
    """Runs the engine's own torch version of its page kernel, launched the same way; the interpreter is slow."""

    def __getitem__(self, grid: tuple[int]) -> NaiveKernel:
        return self

    def __call__(self, prefix: Any, total: Any, last: Any, free: Any, out: Any, batch: int, page_size: int) -> None:
        paged.alloc_extend_naive(prefix, total, last, free, out, page_size, out.device)


def naive_pages() -> Any:
    """Returns a context in which the allocator hands out pages in plain torch; 0.5.23 does so itself on the CPU."""
    return mock.patch.object(paged, "alloc_extend_kernel", NaiveKernel())


def small_world(**changes: Any) -> PlainWorld:
    """Returns a server of three layers; ``changes`` are fields of ServerSpec."""
    return PlainWorld(**({"ratios": SMALL} | changes))


def read(world: PlainWorld, req: Any, tokens: int) -> dict[oracle.RowKey, bytes]:
    """Returns every byte of the first ``tokens`` tokens of ``req`` that must survive a retract."""
    return oracle.read(world.pool, world.slots(req, tokens), tokens, int(req.kv.req_pool_idx))


def serving(world: PlainWorld) -> PlainServing:
    """Returns this package's view of the world's server."""
    plain = plain_of(world.allocator)
    assert plain is not None, "the hooks did not attach"
    return plain


def forget(world: PlainWorld) -> None:
    """Lets the tree lose everything that is not held."""
    world.evict(1 << 20, 1 << 20)
    world.check_integrity()


def world_with_sessions(**changes: Any) -> tuple[PlainWorld, SessionStore]:
    """Returns a server that keeps sessions, as DSV4_SESSIONS must say, and their store."""
    world = small_world(**({"pages": 60, "swa_pages": 16, "context": 12000} | changes))
    store = serving(world).sessions
    assert store is not None
    return world, store


def lose(world: PlainWorld, what: str, prompt: list[int]) -> None:
    """Lets the tree lose everything, or the windows alone."""
    if what == "all":
        forget(world)
        return
    while world.match(prompt).numel():
        world.evict(0, 256)
    world.check_integrity()


def nothing_is_held(world: PlainWorld) -> None:
    """Asserts that no copy, and no block of one, is left."""
    plain = serving(world)
    assert (plain.count, plain.host.memory.copies, plain.host.memory.leaks) == (0, 0, 0)
    plain.host.memory.check_integrity()


def finish(world: PlainWorld) -> None:
    """Runs the world to its end: each forward checks what it reads, and the end is checked as a whole."""
    world.run(check=False)
    world.check_integrity()


def over(world: PlainWorld) -> None:
    """Runs the world to its end; nothing is held then."""
    world.run()
    nothing_is_held(world)


def full(*_: Any, **__: Any) -> None:
    """Stands for a host without room for a copy."""
    raise HostMemoryExhausted("full")


def retracted(
    tokens: int = 600, max_new: int = 30, back: int = 5, others: int = 0, **way: Any
) -> tuple[PlainWorld, Any]:
    """Returns a world and its one request, which waits with ``tokens`` tokens; the tree has forgotten it.

    back: tokens that it had made. others: requests that came before its retract.
    """
    world = small_world(**way)
    req = world.submit(range(tokens - back), max_new=max_new, priority=1 if way.get("priority") else None)
    run_to(world, req, tokens)
    for number in range(others):
        world.submit(range(9000 + 1000 * number, 9100 + 1000 * number), max_new=2)
    world.retract(req)
    if way.get("radix", True):
        forget(world)
    return world, req


def run_until(world: PlainWorld, reached: Callable[[], bool]) -> None:
    """Steps until ``reached``; each forward checks what it reads, and every fourth step every byte and page."""
    for number in range(400):
        is_reached = reached()
        if is_reached or number % 4 == 0:
            world.check_integrity()
        if is_reached:
            return
        world.step()
    raise AssertionError("not reached after 400 steps")


def run_to(world: PlainWorld, req: Any, saved: int) -> None:
    """Steps until a retract of ``req`` would save ``saved`` tokens: all but the last one that it has."""
    run_until(world, lambda: req.seqlen - 1 >= saved and req.kv.holds_kv)
    assert req.seqlen - 1 == saved, f"{req.rid} has {req.seqlen - 1} tokens to save, not {saved}"


def ask(
    world: PlainWorld, req: Any, running: Any = None, chunk: int | None = 8192, **arguments: Any
) -> tuple[Any, Any]:
    """Returns (adder, result) of the engine's admission of ``req`` in a pass."""
    req.init_next_round_input(world.tree)
    adder = PrefillAdder(256, world.tree, world.allocator, running, 0.3, 16384, chunk, **arguments)
    return adder, adder.add_one_req(req, has_chunked_req=False, truncation_align_size=None)


def came_back(world: PlainWorld, *reqs: Any) -> None:
    """Asserts that the next pass, a decode step, takes those requests back without a prefill."""
    batch = world.step()
    world.check_integrity()
    assert batch.forward_mode.is_decode()
    assert {req.rid for req in reqs} <= {req.rid for req in batch.reqs}


def live(world: PlainWorld, seed: int, requests: int = 4, retract_every: int = 7) -> int:
    """Runs a random life: all lengths, forced retracts, lost prefixes, second turns; returns the retracts.

    Each forward checks what it reads; every byte and page is checked after each retract, and after every fourth step.
    """
    rng = random.Random(seed)
    first = [
        world.submit(range(1000 * i, 1000 * i + rng.randint(1, 700)), max_new=rng.randint(2, 120))
        for i in range(requests)
    ]
    turned: set[str] = set()
    for number in range(2000):
        batch = world.step()
        if number % 4 == 0:
            world.check_integrity()
        running = [req for req in world.scheduler.running_batch.reqs if not req.finished()]
        if number % retract_every == 0 and len(running) > 1:
            world.retract(rng.choice(running))
            if rng.random() < FORGETS:
                world.evict(1 << 20, 1 << 20)
            world.check_integrity()
        for req in first:
            if req.finished() and req.rid not in turned:
                turned.add(req.rid)
                world.second_turn(req, range(rng.randint(1, 300)), max_new=10)
        if batch is None and not world.running and not world.waiting:
            break
    unfinished = [req.rid for req in world.requests if not req.finished()]
    assert not unfinished, f"{unfinished} never finished"
    return sum(req.retraction_count for req in world.requests)
