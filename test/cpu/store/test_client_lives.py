"""Random lives of a store's process lose no unit, give none back early and leave no ticket open.

STORE_CLIENT_EXAMPLES=N runs N lives: fixed ones up to the usual number, others at every run where N is more.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from played_store import KEY, PAGE, Played, ids, pieces, question
from stateful import examples

from sglang_dsv4.store.client import Limits, State
from sglang_dsv4.store.wire import Code, Kind, Spot

UNITS = 24
LIMITS = Limits(credits=14, tickets=6, hang=20.0, slow=6.0, start=30.0, back_off=(1.0, 4.0), ids=8 * PAGE)
WHICH = st.integers(0, 5)
CODES = st.sampled_from([Code.OK, Code.OK, Code.OK, Code.MISSING, Code.FAILED])
TROUBLES = st.sampled_from(
    [*[""] * 12, "dies", "dies", "breaks the protocol", "closes its socket", "cannot be started"]
)
done: Counter[str] = Counter()


@dataclass(eq=False)
class Mine:
    """A ticket as its caller sees it."""

    kind: str
    life: object
    units: list[int] = field(default_factory=list)  # that did not come back
    wanted: bool = True


@dataclass(eq=False)
class Theirs:
    """The same as its process sees it.

    released: its units that the process said it is done with. said: it answered, and nothing broken before.
    """

    kind: Kind
    count: int
    copied: int = 0
    released: int = 0
    answered: bool = False
    said: bool = False


class Lives(RuleBasedStateMachine):
    """Plays both: the scheduler, which owns the free units, and processes that answer, hang, lie and die."""

    def __init__(self):
        super().__init__()
        self.played = Played(LIMITS)
        self.client = self.played.client
        self.free = list(range(UNITS))
        self.mine: dict[int, Mine] = {}
        self.found: dict[int, int] = {}
        self.broken: set[object] = set()  # lives of which nothing more is read
        self.theirs: dict[object, dict[int, Theirs]] = {}

    def did(self, what):
        done["steps"] += 1
        done[what] += 1

    # ------------------------------------------------------------------------------------------- the scheduler

    @rule(seconds=st.sampled_from((0.0, 0.0, 0.0, 0.003, 0.06, 1.0, 7.0, 21.0)))
    def passes(self, seconds):
        self.did("pass")
        self.account(self.played.passes(seconds))
        silent = [t for t, mine in self.mine.items() if not mine.wanted and t not in self.client._tickets.open]
        for ticket in silent:
            assert self.mine.pop(ticket).kind == "ask"

    @precondition(lambda self: self.client.state is State.UP)
    @rule(count=st.integers(0, 9))
    def write(self, count):
        units = self.free[:count]
        ticket = self.client.write(pieces(*units), KEY)
        self.did("write" if ticket else "write refused")
        if ticket:
            self.given(ticket, "write", units)

    @precondition(lambda self: self.client.state is State.UP)
    @rule(pages=st.integers(1, 5))
    def ask(self, pages):
        ticket = self.client.ask(question(pages), ids(pages * PAGE))
        self.did("ask" if ticket else "ask refused")
        if ticket:
            self.given(ticket, "ask", [])

    @precondition(lambda self: self.found)
    @rule(which=WHICH, count=st.integers(0, 6))
    def load(self, which, count):
        ticket, units = self.pick(self.found, which), self.free[:count]
        loads = self.client.load(ticket, [Spot(unit, 0, 0) for unit in units])
        self.did("load" if loads else "load refused")
        if loads:
            del self.found[ticket]
            wanted = self.mine[ticket].wanted
            self.given(ticket, "load", units)
            self.mine[ticket].wanted = wanted

    @precondition(lambda self: self.mine)
    @rule(which=WHICH, sure=st.integers(0, 3))
    def drop(self, which, sure):
        if sure < 3:
            return
        ticket = self.pick(self.mine, which)
        self.client.drop(ticket)
        kind = "found" if ticket in self.found else self.mine[ticket].kind
        self.did(f"drop {kind}")
        if kind == "found":
            del self.found[ticket], self.mine[ticket]
        elif kind == "ask":
            self.mine[ticket].wanted = False

    @precondition(lambda self: self.client.state is not State.UP)
    @rule()
    def nothing_is_taken(self):
        self.did("not up")
        assert self.client.write(pieces(*self.free[:1]), KEY) is self.client.ask(question(), ids(PAGE)) is None
        assert not any(self.client.load(ticket, []) for ticket in self.found)

    def given(self, ticket, kind, units):
        assert kind == "load" or ticket not in self.mine
        self.mine[ticket] = Mine(kind, self.played.life, [*units])
        self.free = [unit for unit in self.free if unit not in units]

    def account(self, events):
        for name, ticket, value, units in events:
            mine = self.mine[ticket]
            assert units == mine.units[: len(units)], "another's units, or twice"
            del mine.units[: len(units)]
            self.free += units
            if name == "failed":
                self.did("failed " + ("found" if ticket in self.found else mine.kind))
                assert mine.life.child.status is not None, "it may still write"
                theirs = self.theirs[mine.life].get(ticket)
                said = theirs is not None and theirs.said and theirs.kind.name.lower() == mine.kind
                assert ticket in self.found or not said, "it answered before it died"
            else:
                self.did(name)
                theirs = self.theirs[mine.life].get(ticket)
                theirs.released -= len(units)
                assert theirs.released >= 0, "the process is not done with them"
                assert mine.wanted or mine.kind != "ask"
            if name == "found" and value:
                self.found[ticket] = value
            elif name != "copied":
                assert not mine.units, "the ticket is over"
                self.found.pop(ticket, None)
                del self.mine[ticket]

    # --------------------------------------------------------------------------------------------- the process

    @property
    def life(self):
        """The process, until it ended."""
        lives = self.played.lives
        return lives[-1] if lives and lives[-1].child.status is None else None

    def work(self):
        """Lists the tickets that it was sent and did not answer."""
        work = self.theirs.setdefault(self.life, {})
        for kind, ticket, count, _ in self.life.read():
            if kind in (Kind.WRITE, Kind.ASK, Kind.LOAD):
                work[ticket] = Theirs(kind, count)
        return {ticket: theirs for ticket, theirs in work.items() if not theirs.answered}

    @precondition(lambda self: self.client.state is not State.UP)
    @rule(late=st.booleans())
    def ready(self, late):
        self.played.unstartable = False
        if not late and self.life is None:
            self.account(self.played.passes(5.0))
        if self.life:
            self.did("ready")
            self.life.ready()
            self.account(self.played.passes())

    @precondition(lambda self: self.life)
    @rule(which=WHICH, oops=st.integers(0, 4), end=st.integers(0, 3), code=CODES, part=st.booleans())
    def answer(self, which, oops, end, code, part):
        work = self.work()
        if not work:
            return
        ticket = self.pick(work, which)
        theirs = work[ticket]
        dying = self.client.state is State.DYING
        if oops == 0:
            self.life.say(Kind.OOPS, ticket, body=b"trouble")
        if theirs.kind is Kind.WRITE and part and theirs.copied < theirs.count:
            self.did("answers late" if dying else "answers")
            theirs.copied += 1
            theirs.released += 1
            self.life.say(Kind.COPIED, ticket, theirs.copied)
            return
        self.did("answers late" if dying else "answers")
        theirs.released += theirs.count - theirs.copied
        theirs.answered = True
        if theirs.kind is Kind.ASK:
            theirs.said = self.life.say(Kind.FOUND, ticket, end)
        else:
            kind = Kind.STORED if theirs.kind is Kind.WRITE else Kind.LOADED
            theirs.said = self.life.codes(kind, ticket, [code] * theirs.count)
        theirs.said &= self.life not in self.broken

    @precondition(lambda self: self.life)
    @rule(lane=st.sampled_from(("reads", "writes")))
    def step(self, lane):
        self.life.step(lane)

    @precondition(lambda self: self.life)
    @rule(how=TROUBLES, reads=st.booleans())
    def trouble(self, how, reads):
        """It dies with packets that it did not read, or does not die but can say nothing more."""
        if reads:
            self.work()
        if how:
            self.did(how)
        if how == "breaks the protocol":
            self.life.say_raw(b"\xff" * 20)
            self.broken.add(self.life)
        elif how == "closes its socket":
            self.life.ours.close()
        elif how == "dies":
            self.theirs.setdefault(self.life, {})
            self.life.die()
        elif how == "cannot be started":
            self.played.unstartable = True

    @precondition(lambda self: self.life and self.life.child.killed)
    @rule()
    def dies_of_the_kill(self):
        self.did("is reaped")
        self.theirs.setdefault(self.life, {})
        self.life.die()

    # -------------------------------------------------------------------------------------------------- always

    @invariant()
    def every_unit_is_somewhere(self):
        held = [unit for mine in self.mine.values() for unit in mine.units]
        assert sorted(self.free + held) == list(range(UNITS))

    @invariant()
    def the_client_counts_the_same(self):
        tickets = self.client._tickets
        writes = [mine for mine in self.mine.values() if mine.kind == "write"]
        assert tickets._held == sum(len(mine.units) for mine in writes)
        assert tickets._puts.open == len(writes)
        asks = [ticket for ticket in tickets.open.values() if ticket.stage == "ask"]
        assert tickets._gets.open == len(asks) + sum(mine.kind == "load" for mine in self.mine.values())
        assert {*tickets.open} <= {*self.mine}
        assert len([span for span in tickets.ids._spans if not span.freed]) == len(asks)

    @invariant()
    def one_process_at_a_time(self):
        assert all(life.child.status is not None for life in self.played.lives[:-1])

    def teardown(self):
        """A silent process is killed, and all that it had comes back; the next one works."""
        for ticket in [*self.found]:
            self.client.drop(ticket)
            del self.found[ticket], self.mine[ticket]
        self.mine = {ticket: mine for ticket, mine in self.mine.items() if mine.wanted or mine.kind != "ask"}
        self.played.unstartable = False
        for _ in range(300):
            self.account(self.played.passes(0.5))
            for ticket in [*self.found]:
                self.client.drop(ticket)
                del self.found[ticket], self.mine[ticket]
            if not self.mine and not self.client._tickets.open:
                break
            if self.life and self.life.child.killed:
                self.theirs.setdefault(self.life, {})
                self.life.die()
        assert self.mine == self.client._tickets.open == {}
        assert sorted(self.free) == list(range(UNITS))
        assert self.client._tickets.ids._spans == type(self.client._tickets.ids._spans)()
        self.every_unit_is_somewhere()
        if self.life:
            self.life.die()
        self.account(self.client.close(0.0))
        self.client._shared = self.played = None

    def pick(self, table, which):
        return [*table][which % len(table)]


WANTED = (
    *("copied", "stored", "found", "loaded", "answers late", "breaks the protocol", "dies", "is reaped"),
    *("failed write", "failed ask", "failed load", "failed found", "closes its socket"),
    *("drop write", "drop ask", "drop found", "drop load", "write refused", "ask refused", "load refused"),
)


@pytest.mark.timeout(300)
def test_random_lives_of_the_process():
    count = examples("STORE_CLIENT_EXAMPLES", 70, Lives, 60, done, *WANTED)
    assert done["steps"] > 15 * count
