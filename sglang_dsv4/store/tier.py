"""Writes the points of finished requests to a store, and reads those that a prompt can go on from.

Every rank of an arena has a tier. The first one alone has a client, and tells the others what it heard: so all of them
borrow, keep and give back the same units in the same pass, and admit the same requests.

    write   a final point -> slices of units, pages first, the window last -> copied: the units are back
    ask     a prompt -> found: units are borrowed for it -> loaded: they are a point of the sessions
            late: its request waits no longer; what comes then serves the next turn

Nothing here waits for the store, but for a glance beside a prefill in flight.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

from sglang_dsv4.hostmem.board import NAMED
from sglang_dsv4.hostmem.memory import HostCopy, HostMemory
from sglang_dsv4.metrics import StoreCounters
from sglang_dsv4.sessions.store import FEWEST_TOKENS, SessionStore
from sglang_dsv4.sessions.trie import Page, Point
from sglang_dsv4.store.client import State, StoreClient
from sglang_dsv4.store.keys import Keys
from sglang_dsv4.store.told import NUMBERS, Told, What
from sglang_dsv4.store.wire import GET, PAGE, PUT, WRONG, Code, Piece, Question, Spot
from sglang_dsv4.store.work import Ask, Patience, Write

logger = logging.getLogger(__name__)

SLICE = 64  # units of a write: what a long session needs at once
MOST_BORROWED = 192  # units that writes may hold
MOST_FINAL = 1024  # points that wait to be written; beyond, new ones are not
REFRESH = 512  # points after which all is offered anew: a store may have lost it, or thinks that nobody uses it
PAUSE = 5e-5  # seconds between two looks for an answer: other threads of this process go on
QUIET = 10.0  # seconds between two warnings of a store that fails
_KEPT: list[HostCopy] = []  # of processes that could not be reaped: they may write to them for ever
STORED = (Code.OK, Code.KNOWN)


class Tier:
    """Joins the sessions of one rank to a store. The scheduler thread owns it.

    client: of the first rank of an arena; None on the others.
    """

    def __init__(
        self, sessions: SessionStore, memory: HostMemory, client: StoreClient | None, keys: Keys, patience: Patience,
        weights: Callable[[], Any], together: Callable[[bool], bool] = bool,
        on_sent: Callable[[Point], None] = lambda point: None,
    ) -> None:  # fmt: skip
        """Starts with nothing written.

        weights: returns the version of the weights; with another one than now the tier is off. together: returns
        whether its argument is true on every rank. on_sent: called with a point that waited when its last units
        were lent to a write, when it went, or when there were too many.
        """
        self._sessions, self._memory, self._client, self.keys = sessions, memory, client, keys
        self._trie, self._page = sessions.trie, sessions.page_size
        self._patience, self._weights, self._first_weights = patience, weights, weights()
        self._together, self._on_sent = together, on_sent
        self.counters = StoreCounters()
        self._final: deque[Point] = deque()
        self._todo: list[Page] | None = None  # pages of the first of them that are not sent
        self._sent: set[Page] = set()
        self._epoch = 1  # since when those were sent; see ``Point``
        self._refresh = REFRESH
        self._borrowed = self._loading = 0  # units of writes, and of reads
        self._reads = 0  # begun until now
        self._open: dict[int, Write | Ask] = {}
        self._numbers = 0
        self._asked: dict[int, int] = {}  # tickets of the client -> numbers
        self._sent_at = 0.0  # when the last one was sent that a request waits for
        self._to_send: deque[int] = deque()  # writes whose units are not filled yet
        self._refused = b""  # the group of the last slice that the client did not take
        self._to_ask: deque[int] = deque()  # asks that the client did not take
        self._behind: dict[int, list[int]] = {}  # asks that wait for the read of another one, by its number
        self._to_tell: deque[Told] = deque()
        self._told_error, self._told_at = "" if client is None else client.last_error, 0.0
        self._looked = time.monotonic()
        sessions.kept.on_gone, sessions.has_store = self._forget, True

    @property
    def is_on(self) -> bool:
        """Returns whether the weights are those of the start: what is stored is of them."""
        return bool(self._weights() == self._first_weights)

    def units(self) -> list[int]:
        """Returns the units that the store's process may touch."""
        return [unit for copy in self._copies() for unit in copy.units]

    def _copies(self) -> Iterator[HostCopy]:
        copies = (one.copy for one in self._open.values())
        return (copy for copy in copies if copy is not None and not copy.released)

    # ------------------------------------------------------------------------------------------------------- a pass

    def end_pass(self, spare: float = 0.0) -> None:
        """Takes what happened, and sends what may be sent; once a pass, on every rank.

        spare: seconds in which answers may be waited for, and the reads that begin by them; none on all ranks, or some.
        """
        now, begun = time.monotonic(), self._reads
        self._listen(spare, now + spare)
        if spare and self._reads != begun:
            self._listen(spare, now + spare, now)
        if not self.is_on:
            self._stop()
        self._borrow_slices()
        if self._client is not None:
            self._send_writes(self._client)
            for op, lane in (("put", PUT), ("get", GET)):
                if (more := self._client.seconds(lane) - self.counters.seconds[op]) > 0:
                    self.counters.add("seconds", more, op)
        self.counters.set("waiting", len(self._final))

    def _listen(self, spare: float, until: float, since: float | None = None) -> None:
        """Takes what the client says, and may wait for answers; with ``since``, for reads that began then or later."""
        if self._client is not None:
            self._look(self._client)
            until = min(until, self._sent_at + spare)  # what is sent meanwhile makes it no longer
            while time.monotonic() < until and self._is_awaited(since):
                time.sleep(PAUSE)
                self._look(self._client)
        for told in self._hear():
            self._take(told)

    def _hear(self) -> list[Told]:
        if not self._open:
            return []
        board = self._memory.arena.board
        most = len(self._to_tell) if board is None else min(NAMED, len(self._to_tell))
        mine = [self._to_tell.popleft() for _ in range(most)]
        if board is None:
            return mine
        return [Told.unpacked(number) for number in board.tell([told.packed() for told in mine])]

    def _look(self, client: StoreClient) -> None:
        """Notes what the client says, and which requests have waited long enough.

        When a first answer came is not known, and a pass may be longer than a limit: such a pass is not the store's.
        """
        now = time.monotonic()
        for event in client.poll():
            number = self._asked.get(event.ticket)
            if number is None:
                continue
            one = self._open[number]
            if event.name == "copied":
                if isinstance(one, Write) and event.value == len(one.pieces):
                    self._to_tell.append(Told(number, What.COPIED))
                continue
            if isinstance(one, Ask):
                one.sent = 0.0
            self._to_tell.append(self._answer(number, one, event))
            if event.name != "found" or not event.value:
                del self._asked[event.ticket]
            elif isinstance(one, Ask):
                one.limit += now - max(self._looked, one.started)
        self._looked = now
        self._ask_again(client, now)
        for number, one in self._open.items():
            if isinstance(one, Ask) and not one.late and now > one.limit:
                one.late = True
                self._to_tell.append(Told(number, What.LATE))
        if client.last_error != self._told_error and now > self._told_at + QUIET:
            self._told_error, self._told_at = client.last_error, now
            logger.warning("store: %s", client.last_error)
        self.counters.set("is_open", int(client.breaker_open))
        self.counters.set("is_up", int(client.state is State.UP))

    def _is_awaited(self, since: float | None) -> bool:
        """Returns whether a request waits for an answer; with ``since``, for a read that began then or later."""
        asks = (one for one in self._open.values() if isinstance(one, Ask) and one.waits and one.sent)
        return any((one.copy is None) if since is None else (one.copy and one.sent >= since) for one in asks)

    def _answer(self, number: int, one: Write | Ask, event: Any) -> Told:
        """Counts an event by unit, and returns what the ranks hear of it."""
        op, size = ("put" if isinstance(one, Write) else "get"), self._memory.units.nbytes
        if event.name == "found":
            return Told(number, What.FOUND, event.value)
        if event.name == "failed":
            lost = len(one.pieces) if isinstance(one, Write) else len(event.units)  # copied, too: not stored
            self.counters.add("units", lost, op, "failed")
            return Told(number, What.FAILED)
        codes = [Code(code) for code in event.value]
        wrong = sorted({code.name.lower() for code in codes if code in WRONG})
        if wrong:
            logger.warning("store: units have not the bytes that were stored (%s), and are not used", ", ".join(wrong))
        for code in codes:
            self.counters.add("units", 1, op, code.name.lower())
        self.counters.add("nbytes", size * codes.count(Code.OK), op)
        if event.name == "stored":
            return Told(number, What.STORED, int(all(code in STORED for code in codes)))
        whole = one.copy is not None and len(codes) == len(one.copy.units)
        return Told(number, What.LOADED, int(whole and all(code is Code.OK for code in codes)))

    def _take(self, told: Told) -> None:
        one = self._open.get(told.number)
        if one is None:
            return
        if isinstance(one, Write):
            self._take_of_write(told, one)
        elif told.what is What.LATE:
            one.waits, one.late = False, True
        elif told.what is What.FOUND and told.value:
            self._found(told.number, one, told.value)
        else:
            self._end_ask(told, one)

    def _stop(self) -> None:
        """Leaves requests and points alone once the weights are others."""
        self._final.clear()
        self._todo = None
        for one in self._open.values():
            if isinstance(one, Ask):
                one.waits = False

    def _forget(self, pages: Iterable[Page]) -> None:
        """Forgets pages that went."""
        self.keys.forget(pages)
        self._sent.difference_update(pages)

    # ------------------------------------------------------------------------------------------------------- writes

    def write(self, point: Point) -> None:
        """Has ``point``, the last one of its request, written when its save was checked."""
        if not self.is_on or point.sent == self._epoch:
            return
        if len(self._final) < MOST_FINAL:
            point.sent = self._epoch
            self._final.append(point)
        else:
            self.counters.add("points", 1, "dropped")
            self._on_sent(point)

    def _borrow_slices(self) -> None:
        """Borrows units of the points that wait, as far as writes may hold them; the same on every rank."""
        most = SLICE + self._sessions.kept.in_tail
        while self._final and (not self._borrowed or self._borrowed + most <= MOST_BORROWED):
            point = self._final[0]
            if not self._sessions.stands(point):
                self.counters.add("points", 1, "gone")
                self._next_point()
                continue
            if self._todo is None:
                self._todo = [page for page in self._trie.path(point.page) if page not in self._sent]
            pages = self._todo[:SLICE]
            del self._todo[:SLICE]
            tail = [] if self._todo else point.tail or []
            self._borrow(point, pages, tail)
            if not self._todo:
                self._next_point()

    def _next_point(self) -> None:
        self._on_sent(self._final.popleft())
        self._todo = None
        self._refresh -= 1
        if not self._refresh:
            self._offer_anew()

    def _offer_anew(self) -> None:
        """Forgets what was sent: the store's process finds what is there still, and that it is used."""
        self._sent.clear()
        self._epoch += 1
        self._refresh = REFRESH

    def _borrow(self, point: Point, pages: list[Page], tail: list[int]) -> None:
        write = Write(self._sessions.lend(point, pages, tail), is_last=not self._todo)
        self._borrowed += len(pages) + len(tail)
        self._sent.update(pages)
        number = self._number(write)
        if self._client is not None:
            write.group = self.keys.of(point.page)
            write.pieces = [Piece(page, PAGE, self.keys.of(page)) for page in pages]
            write.pieces += [Piece(unit, part, write.group) for part, unit in enumerate(tail, PAGE + 1)]
            self._to_send.append(number)

    def _send_writes(self, client: StoreClient) -> None:
        """Sends the writes whose units are filled, in their order."""
        while self._to_send:
            number = self._to_send[0]
            write = self._open[number]
            assert isinstance(write, Write)
            if not self._memory.tickets.is_over(write.copy.lease.ticket):
                return
            self._to_send.popleft()
            ticket = client.write(write.pieces, write.group)
            if ticket is None:
                self.counters.add("units", len(write.pieces), "put", "dropped")
                self._to_tell.append(Told(number, What.FAILED))
                self._refused = write.group
            else:
                self._asked[ticket] = number
            if write.is_last:
                self.counters.add("points", 1, "dropped" if self._refused == write.group else "sent")
                self._refused = b""

    def _take_of_write(self, told: Told, write: Write) -> None:
        if not write.copy.released:
            self._borrowed -= len(write.copy.units)
            write.copy.release()
        if told.what is What.COPIED:
            return
        del self._open[told.number]
        if not told.value:
            self._offer_anew()

    # --------------------------------------------------------------------------------------------------------- asks

    def spared(self, limit: int, have: int) -> int:
        """Returns how many tokens behind the ``have`` that are here a point among the first ``limit`` could spare.

        0: too few for a question, or the tier is off.
        """
        tokens = (max(0, limit - self._trie.ahead) // self._page - have // self._page) * self._page
        return tokens if self.is_on and tokens >= FEWEST_TOKENS else 0

    def ask(self, namespace: Hashable, tokens: Any, limit: int, have: int) -> Ask | None:
        """Asks for a point among the first ``limit`` of ``tokens``; every rank asks alike.

        have: tokens that are here. None: it could spare too few, or the tier is off.
        """
        spared, have = self.spared(limit, have), have // self._page
        if not spared:
            return None
        count = have + spared // self._page
        now, own = time.monotonic(), array("q", tokens[: count * self._page + self._trie.ahead])
        ask = Ask(namespace, own, have, count, now, now + self._patience.seconds(spared))
        number = self._number(ask)
        if self._client is not None and not self._send_ask(self._client, number, ask):
            self._to_ask.append(number)
        return ask

    def _send_ask(self, client: StoreClient, number: int, ask: Ask) -> bool:
        first = len(self._trie.walk(ask.namespace, self._trie.keys(ask.tokens, ask.count * self._page)))
        root = self.keys.root(ask.namespace)
        question = Question(root, ask.have, first, ask.count, self._page, self._trie.ahead, 0)
        ask.ticket = client.ask(question, ask.tokens)
        if ask.ticket is not None:
            self._asked[ask.ticket] = number
            self._sends(ask)
        return ask.ticket is not None

    def _sends(self, ask: Ask) -> None:
        ask.sent = time.monotonic()
        if ask.waits:
            self._sent_at = ask.sent

    def _ask_again(self, client: StoreClient, now: float) -> None:
        """Sends the asks that the client did not take, in their order; none is kept for a store that is not there."""
        while self._to_ask:
            number = self._to_ask[0]
            ask = self._open[number]
            assert isinstance(ask, Ask)
            works = client.state is State.UP and not client.breaker_open and now <= ask.limit
            if works and not self._send_ask(client, number, ask):
                return
            self._to_ask.popleft()
            if not works:
                self._to_tell.append(Told(number, What.FAILED))

    def _found(self, number: int, ask: Ask, end: int) -> None:
        """Borrows units for a point that the store has, and has them filled."""
        ask.end = end
        for other, one in self._open.items():
            if isinstance(one, Ask) and one.covers(ask, self._page):
                self._behind.setdefault(other, []).append(number)
                return
        if self.is_on:
            ask.copy = self._sessions.place_for(ask.namespace, self._keys_of(ask), self._loading)
        if ask.copy is None:
            if self._client is not None and ask.ticket is not None:
                self._client.drop(ask.ticket)
                self._asked.pop(ask.ticket, None)
            here = self._sessions.lookup.longest(ask.namespace, ask.tokens, end * self._page + self._trie.ahead).point
            came = here is not None and here.tokens == end * self._page
            self._finish(number, ask, "late" if ask.late else "hit" if came else "room")
            return
        self._loading += len(ask.copy.units)
        self._reads += 1
        if self._client is None or ask.ticket is None:
            return
        spots = [Spot(unit, PAGE, page) for page, unit in enumerate(ask.copy.pages(ask.copy.begins), ask.copy.begins)]
        spots += [Spot(unit, part, end - 1) for part, unit in enumerate(ask.copy.tail_units, PAGE + 1)]
        if self._client.load(ask.ticket, spots):
            self._sends(ask)
        else:
            self._client.drop(ask.ticket)
            self._asked.pop(ask.ticket, None)  # its process may have died meanwhile
            self._to_tell.append(Told(number, What.FAILED))

    def _end_ask(self, told: Told, ask: Ask) -> None:
        if ask.copy is None:
            self._finish(told.number, ask, "failed" if told.what is What.FAILED else "miss")
            return
        units, begins = len(ask.copy.units), ask.copy.begins
        self._loading -= units
        if told.what is not What.LOADED or not told.value or not self.is_on:
            self._offer_anew()
            ask.copy.release()
            self._finish(told.number, ask, "failed")
            return
        point = self._sessions.adopt_read(ask.namespace, self._keys_of(ask), ask.copy)
        if point is None:
            self._finish(told.number, ask, "late" if ask.late else "room")
            return
        self._sent.update(self._trie.path(point.page)[begins:])
        point.sent = self._epoch
        self.counters.add("tokens", (ask.end - begins) * self._page)
        logger.info(
            "read %d tokens from the store, %.1f MB in %.1f ms", point.tokens,
            units * self._memory.units.nbytes / 1e6, (time.monotonic() - ask.started) * 1e3,
        )  # fmt: skip
        self._finish(told.number, ask, "late" if ask.late else "hit")

    def _keys_of(self, ask: Ask) -> list[Any]:
        return list(self._trie.keys(ask.tokens, ask.end * self._page))

    def _finish(self, number: int, ask: Ask, outcome: str) -> None:
        ask.waits = False
        del self._open[number]
        self.counters.add("asks", 1, outcome)
        for behind in self._behind.pop(number, ()):
            waiting = self._open.get(behind)
            if isinstance(waiting, Ask):
                self._found(behind, waiting, waiting.end)

    def _number(self, one: Write | Ask) -> int:
        self._numbers = self._numbers % NUMBERS + 1
        self._open[self._numbers] = one
        return self._numbers

    def close(self, seconds: float = 0.0) -> None:
        """Ends the store's process behind what it accepted, and gives its units back where it was reaped.

        seconds: that it may take for it.
        """
        reaped = True
        if self._client is not None:
            self._client.close(seconds)
            reaped = self._client.ended
        copies = list(self._copies())
        if self._together(reaped):
            for copy in copies:
                copy.release()
            self._open.clear()
        else:
            _KEPT.extend(copies)
