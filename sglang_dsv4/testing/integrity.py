"""Accounts for every page after every step: a leak, or a second owner, shows at once.

```
full pages    1 .. N (*)  free  |  the tree's  |  one request's own (above the part that the tree protects for it)
window pages  1 .. M      free  |  mapped from one full page that is not free
```

(*) times the pool's page stride
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from sglang_dsv4.testing.content import PrefixLedger
from sglang_dsv4.testing.forward import WrongRows
from sglang_dsv4.testing.ledger import WINDOWED, Part, live_from, locations, selected_by
from sglang_dsv4.testing.server import PAGE

if TYPE_CHECKING:
    from sglang_dsv4.testing.world import PlainWorld

POISON = 0xA5


class LostPages(AssertionError):
    """Reports a page, a window page or a slot that has no owner, or two."""


class Free(NamedTuple):
    """Lists free pages and slots."""

    pages: frozenset[int]
    windows: frozenset[int]
    slots: frozenset[int]


class Branch(NamedTuple):
    """Describes a way from the tree's root to a node: tokens, full slots, and whether their window rows live.

    With drafts there is one token more, which the last row's key holds too.
    """

    tokens: list[int]
    slots: torch.Tensor
    live: list[bool]  # a page each


class Pages:
    """Maps each page to its owner."""

    def __init__(self, world: PlainWorld) -> None:
        self.world = world
        allocator = world.allocator
        self.free = Free(
            frozenset(allocator.full_attn_allocator.get_all_free_pages().tolist()),
            frozenset(allocator.swa_attn_allocator.get_all_free_pages().tolist()),
            frozenset(world.table.free_slots),
        )

    def check(self) -> None:
        """Checks that each has one owner. Raises LostPages."""
        world, spec = self.world, self.world.spec
        tree = tree_pages(world)
        own = {req.rid: self._own(req, set(tree)) for req in world.running}
        owned = [*tree, *(page for pages in own.values() for page in pages)]
        self._once("full page", [*owned, *self.free.pages], spec.pages, getattr(world.pool, "page_stride", 1))
        mapping = world.pool.full_to_swa_index_mapping
        windows = (mapping[torch.tensor(owned, dtype=torch.int64) * PAGE] // PAGE).tolist()
        self._once("window page", [*(page for page in windows if page), *self.free.windows], spec.swa_pages)
        stale = [page for page in self.free.pages if bool(mapping[page * PAGE : (page + 1) * PAGE].any())]
        if stale:
            raise LostPages(f"full pages {sorted(stale)} are free, and still mapped to window pages")
        rows = [int(req.kv.req_pool_idx) for req in world.running]
        taken = sorted([*rows, *self.free.slots])
        if taken != list(range(min(taken), min(taken) + spec.requests)):
            raise LostPages(f"slots {sorted(rows)} are taken, {sorted(self.free.slots)} free, of {spec.requests}")

    def _own(self, req: Any, tree: set[int]) -> list[int]:
        protected = req.kv.cache_protected_len
        slots = self.world.slots(req, req.kv.kv_allocated_len)
        strange = set(_pages(slots[:protected])) - tree
        if strange:
            raise LostPages(f"{req.rid}: pages {sorted(strange)} below {protected} are not the tree's")
        return _pages(slots[protected:])

    @staticmethod
    def _once(what: str, numbers: list[int], total: int, step: int = 1) -> None:
        known = {step * number for number in range(1, total + 1)}
        missing = sorted(known - set(numbers))
        twice = sorted({number for number in numbers if numbers.count(number) > 1})
        strange = sorted(set(numbers) - known)
        if missing or twice or strange:
            raise LostPages(f"{what}s of {total}: without an owner {missing}, with two {twice}, unknown {strange}")


def _pages(slots: torch.Tensor) -> list[int]:
    return [int(page) for page in torch.unique(slots // PAGE).tolist()] if len(slots) else []


# ------------------------------------------------------------------------------------------ the tree


def tree_pages(world: PlainWorld) -> list[int]:
    """Returns the full pages that the tree holds."""
    core = getattr(world.tree, "tree_core", None)
    return [] if core is None else [int(page) for page in (core.all_values_flatten()[::PAGE] // PAGE).tolist()]


def branches(world: PlainWorld) -> Iterator[Branch]:
    """Yields a branch for every leaf of the tree; of the Rust tree, which hides its nodes, for every request.

    Nodes that only the host still has (HiCache) are no part of it.
    """
    core = getattr(world.tree, "tree_core", None)
    if core is None:
        return
    if world.spec.tree == "rust":
        yield from _known_branches(world, core)
        return
    todo = _on_device(core.root_node)
    while todo:
        node = todo.pop()
        todo += (children := _on_device(node))
        if not children:
            yield _branch(node)


def _on_device(node: Any) -> list[Any]:
    """Returns the children whose pages are on the device."""
    return [child for child in node.children.values() if child.component_data[ComponentType.FULL].value is not None]


def _branch(leaf: Any) -> Branch:
    chain, node = [], leaf
    while node.parent is not None:
        chain.append(node)
        node = node.parent
    chain.reverse()
    live: list[bool] = []
    for step in chain:
        live += [step.component_data[ComponentType.SWA].value is not None] * (len(step.key) // PAGE)
    tokens = [token for step in chain for token in list(step.key.raw_token_ids())[: len(step.key)]]
    tokens += list(chain[-1].key.raw_token_ids())[len(chain[-1].key) :]
    slots = torch.cat([step.component_data[ComponentType.FULL].value for step in chain])
    return Branch(tokens, slots.to(torch.int64), live)


def _known_branches(world: PlainWorld, core: Any) -> Iterator[Branch]:
    for req in world.requests:
        tokens = [*req.origin_input_ids, *req.output_ids]
        key = RadixKey(array("q", tokens), req.extra_key, is_bigram=core.is_eagle).page_aligned(PAGE)
        matched, node, _ = core.match_full_device_prefix(key)
        if matched:
            dead = core.swa_tombstone_ranges(key, 0, matched)
            live = [not any(start <= page < end for start, end in dead) for page in range(0, matched, PAGE)]
            slots = core.collect_full_device_indices(node, core.root_node_handle())[:matched].to(torch.int64)
            yield Branch(tokens[: matched + core.is_eagle], slots, live)


def check_tree(world: PlainWorld) -> None:
    """Checks that a new request would read the right bytes from any match; raises WrongRows."""
    for branch in branches(world):
        ledger = PrefixLedger(branch.tokens)
        whom = f"the tree, {len(branch.slots)} tokens"
        wrong = []
        for part in world.parts():
            if part.ratio:
                wrong += ledger.differences(part, *locations(part, world.pool, branch.slots, 0, 0))
        if wrong:
            raise WrongRows(f"{whom}: {'; '.join(wrong[:4])}")
        for page, live in enumerate(branch.live):
            if live:  # a match may end here: its window lies in this page
                end = (page + 1) * PAGE
                _check_window(world, ledger, branch.slots[:end], f"{whom}, a match of {end}")


def _check_window(world: PlainWorld, ledger: PrefixLedger, slots: torch.Tensor, whom: str) -> None:
    for part in world.parts():
        if part.family not in WINDOWED or world.spec.is_late(part):  # a match ends a window earlier for the late ones
            continue
        first = live_from(part.family, len(slots))
        positions, rows = locations(part, world.pool, slots, first, 0)
        if len(positions) != len(slots) - first:
            raise WrongRows(f"{whom}: {part.family}: {len(slots) - first - len(positions)} rows unmapped")
        wrong = ledger.differences(part, positions, rows)
        if wrong:
            raise WrongRows(f"{whom}: {wrong[0]}")


# ---------------------------------------------------------------------------------- requests and the rest


def check_requests(world: PlainWorld) -> None:
    """Checks that every request that holds KV would read its own bytes in its next step; raises WrongRows."""
    for req in world.running:
        tokens = world.computed[req.rid]
        ledger = world.ledger(req, tokens)
        world.check_reads(ledger, world.slots(req, tokens), int(req.kv.req_pool_idx), req.rid)


def poison(world: PlainWorld, everything: bool = False) -> None:
    """Fills newly free memory with garbage: it must not be read before it is written again."""
    before, now = world.free, Pages(world).free
    world.free = now
    gone = now if everything else Free(*(new - old for new, old in zip(now, before, strict=True)))
    for part in world.parts():
        part.buffer[_entries(part, gone)] = POISON


def _entries(part: Part, of: Free) -> torch.Tensor:
    """Returns the places of the rows of these pages or slots in a buffer."""
    numbers = torch.tensor(sorted(getattr(of, selected_by(part))), dtype=torch.int64)
    each = part.ring or PAGE // (part.ratio or 1) // part.rows  # more than one where a page is cut into tiles
    return (numbers[:, None] * each + torch.arange(each)).flatten()
