"""Tries saves and loads that must be refused: each names its error and changes no memory."""

from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from sglang_dsv4.errors import (
    CopyConsumed,
    CopyMismatch,
    HostMemoryExhausted,
    IndexMismatch,
    StaleWeights,
    WindowNotMapped,
)
from sglang_dsv4.hostmem.memory import HostCopy
from stateful.model import WHICH, Requests, Running
from stateful.pool import PAGE, pages_of, tail_pages

REFUSED_LOADS = ("short", "long", "mixed", "no slot", "unmapped", "stale", "consumed")
REFUSED_SAVES = ("mixed", "no slot", "far slot", "unmapped", "take fails", "move fails")


class InterruptedCopyError(Exception):
    """Stands for any failure below the code under test."""


def interrupt(*_: Any, **__: Any) -> None:
    raise InterruptedCopyError


def interrupted_at_the_tail(take: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``take`` that fails at its second call, with the pages taken."""
    calls = iter((take, interrupt))

    def one_of_two(*arguments: Any) -> Any:
        return next(calls)(*arguments)

    return one_of_two


class Refusals(Requests):
    def _refuse_load(self, error: type[Exception], copy: HostCopy, slots: torch.Tensor, slot: int | None) -> None:
        held = self.memory.held_bytes
        self.device.remember()
        with pytest.raises(error):
            self.pool.load_cpu_copy(copy, slots, req_pool_index=slot)
        self.device.assert_unchanged()
        assert self.memory.held_bytes == held

    @precondition(lambda self: "load" in self.news and self._fitting())
    @rule(which=WHICH, slot=WHICH, how=st.sampled_from(REFUSED_LOADS))
    def refused_load(self, which: int, slot: int, how: str) -> None:
        """Refuses a load, which changes nothing; the copy can still be loaded afterwards."""
        saved = self._fitting()[which % len(self._fitting())]
        tokens = saved.tokens
        request = oracle.Request(oracle.resume(self.allocator, tokens), self._take_slot(slot), tokens)
        self.running.append(Running(request, pages_of(tokens) - tail_pages(tokens)))
        slots, target = request.slots, request.req_slot
        if how == "short":
            self._refuse_load(CopyMismatch, saved.copy, slots[:-1], target)
        elif how == "long":
            self._refuse_load(CopyMismatch, saved.copy, torch.cat([slots, slots[-1:] + 1]), target)
        elif how == "mixed":
            self._refuse_load(IndexMismatch, saved.copy, slots - 1, target)
        elif how == "no slot":
            self._refuse_load(IndexMismatch, saved.copy, slots, None)
        elif how == "unmapped":
            oracle.evict(self.allocator, slots, pages_of(tokens) * PAGE)
            self.running[-1].evicted = pages_of(tokens)
            self._refuse_load(WindowNotMapped, saved.copy, slots, target)
        elif how == "consumed" and self.consumed is not None:
            self._refuse_load(CopyConsumed, self.consumed, slots, target)
        else:
            how = "stale"
            self.weights += 1
            self._refuse_load(StaleWeights, saved.copy, slots, target)
            self.weights -= 1
        assert not saved.copy.released
        self._leave(self.running[-1])
        self._did(f"load {how}", quiet="load")

    @precondition(lambda self: "save" in self.news and self.running)
    @rule(which=WHICH, how=st.sampled_from(REFUSED_SAVES))
    def refused_save(self, which: int, how: str) -> None:
        """Fails a save at any place; it takes nothing."""
        running = self.running[which % len(self.running)]
        slots, slot = running.slots, running.request.req_slot
        error: type[Exception] = IndexMismatch
        self.device.remember()
        with pytest.MonkeyPatch.context() as patch:
            if how == "mixed":
                slots = slots.clone()
                slots[-1] += 1
                error = IndexMismatch if self._host_room(running.tokens) else HostMemoryExhausted
            elif how == "no slot":
                slot = None
            elif how == "far slot":
                slot = 1000
            elif how == "unmapped":
                error = WindowNotMapped if self._host_room(running.tokens) else HostMemoryExhausted
                oracle.evict(self.allocator, slots, pages_of(running.tokens) * PAGE)
                running.evicted = pages_of(running.tokens)
            elif self._host_room(running.tokens):
                error = InterruptedCopyError
                if how == "take fails":
                    patch.setattr(self.memory.pool, "take", interrupted_at_the_tail(self.memory.pool.take))
                else:
                    patch.setattr(self.pool.host._copier, "save", interrupt)
            else:
                error = HostMemoryExhausted
            with pytest.raises(error):
                self.pool.get_cpu_copy(slots, req_pool_index=slot)
        self.device.assert_unchanged()
        if how == "unmapped":
            self._leave(running)  # its window is gone
        self._did(f"save {how}", quiet="save" if how != "unmapped" else None)
