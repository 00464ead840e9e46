"""Wears a server's arena down behind each flush: units of conversations that nobody asks for lie scattered in it.

A short run does not scatter units. Here conversations grow by turns and the oldest go, until as many turns are over as
a server has in days; no byte is copied. They stay in the store, and give way to the run's own.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_dsv4.sessions.store import SessionStore
    from sglang_dsv4.sessions.trie import Point

ALIVE = 400  # conversations that go on
FIRST_PAGES, TURN_PAGES, MOST_PAGES = (8, 80), (2, 18), 400


def install(file: Path) -> None:
    """Plays as many turns as ``file`` says then behind each flush."""
    from sglang_dsv4.livetest.in_server import around  # noqa: PLC0415 - the server's own import path
    from sglang_dsv4.sessions.store import SessionStore  # noqa: PLC0415

    def clear(original: Callable[..., None], store: SessionStore, reason: str) -> None:
        original(store, reason)
        wear(store, int(file.read_text()))

    around(SessionStore, "clear", clear)


def wear(store: SessionStore, turns: int, seed: int = 0) -> None:
    """Keeps points of conversations in ``store`` by turns, with eviction as a save has it."""
    from sglang_dsv4.sessions.order import PLAIN  # noqa: PLC0415 - as above

    draw, memory, trie = random.Random(seed), store._memory, store.trie
    geometry = store._host.buffers.geometry
    names = itertools.count()
    last: dict[int, Point] = {}
    for _ in range(turns):
        who = draw.randrange(ALIVE)
        behind = last.get(who)
        if behind is not None and not (store.stands(behind) and trie.depth(behind.page) < MOST_PAGES):
            behind = None
        count = draw.randint(*(FIRST_PAGES if behind is None else TURN_PAGES))
        page = trie.used = None if behind is None else behind.page
        if store.kept.find_room(count + store.kept.in_tail, "room", PLAIN):
            depth = trie.depth(page)
            copy = memory.allocate((depth + count) * geometry.page_size, geometry, begins=depth)
            added = store.kept.add(("worn", who), page, [next(names).to_bytes(8) for _ in range(count)], copy)
            last[who] = store.kept.put(("worn", who), added[-1], copy.tail_units, PLAIN)
            copy.hand_over()
            if behind is not None:
                store.supersede(behind)
        store.kept.done_with(page)
        store.kept.evict_ahead()
    store._export_gauges()
