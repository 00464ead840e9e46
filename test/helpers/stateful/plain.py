"""Runs a plain server at random: requests come, decode, are retracted, come back, finish, take a second turn.

The engine schedules; hypothesis chooses the server, the clients' actions, and the retracts. Each forward checks every
byte that it reads; after every rule, and every third step within one, each byte that the next step reads, each byte
that the prefix tree would hand out, and each page is checked.
"""

from collections import Counter
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from plain_world import small_world

from sglang_dsv4.engine.plain.serving import plain_of
from sglang_dsv4.engine.retract.stale import changing_weights

MOST = 1400  # tokens that a request may come to: more would not fit the smaller servers
MOST_REQUESTS = 5  # at a time
WHICH = st.integers(0, 11)  # an entry of a list, modulo its length
LENGTHS = (
    st.integers(1, 300) | st.integers(250, 800) | st.sampled_from((4, 127, 128, 129, 255, 256, 257, 512, 640, 768))
)
BOUNDARIES = st.sampled_from((4, 128, 256))

done: Counter[str] = Counter()  # what the machine did; "steps" counts those, and rules


class PlainLives(RuleBasedStateMachine):
    steps = 0  # of this life

    @initialize(
        pages=st.integers(9, 24), windows=st.integers(6, 12), chunk=st.sampled_from((256, 512, 8192)),
        mixed=st.booleans(), overlap=st.booleans(), radix=st.sampled_from((True, True, False)),
        priority=st.booleans(), rust=st.booleans(), drafts=st.sampled_from((0, 0, 4)),
    )  # fmt: skip
    def start(self, windows: int, rust: bool, drafts: int, **server: Any) -> None:
        tree = "rust" if rust else "python"
        self.world = small_world(swa_pages=windows, tree=tree, drafts=drafts, **server)
        done["drafts"] += bool(drafts)
        self.plain = plain_of(self.world.allocator)

    # ------------------------------------------------------------------------------------- what is there

    @property
    def alive(self) -> list[Any]:
        return [req for req in self.world.requests if req.kv.holds_kv or req in self.world.scheduler.waiting_queue]

    @property
    def over(self) -> list[Any]:
        return [req for req in self.world.requests if req.finished() and len(req.output_ids)]

    def _step(self) -> None:
        loads, batch = self._loads(), self.world.step()
        done["loads"] += self._loads() - loads
        if batch is not None:
            mode = batch.forward_mode.name.lower()
            done[mode] += 1
            done[f"{mode} with drafts"] += bool(self.world.spec.drafts)
        self.steps += 1
        if self.steps % 3:
            done["steps"] += 1
        else:
            self.everything_is_right()

    def _loads(self) -> int:
        return 0 if self.plain is None else self.plain.host.counters.loads

    # ------------------------------------------------------------------------------------- what clients do

    @precondition(lambda self: len(self.alive) < MOST_REQUESTS)
    @rule(family=st.integers(0, 2), length=LENGTHS, answer=st.integers(1, 500), priority=st.integers(0, 2))
    def submit(self, family: int, length: int, answer: int, priority: int) -> None:
        self._submit(family, length, answer, priority)

    def _submit(self, family: int, length: int, answer: int, priority: int) -> Any:
        """Submits a prompt; prompts of a family begin alike."""
        prompt = range(1000 * family, 1000 * family + length)
        done["submit"] += 1
        return self.world.submit(prompt, max_new=answer, priority=priority if self.world.spec.priority else None)

    @precondition(lambda self: self.over and len(self.alive) < MOST_REQUESTS)
    @rule(which=WHICH, more=st.integers(1, 200), answer=st.integers(1, 300))
    def second_turn(self, which: int, more: int, answer: int) -> None:
        first = self.over[which % len(self.over)]
        have = len(first.origin_input_ids) + len(first.output_ids)
        if have + more + answer <= MOST:
            priority = 1 if self.world.spec.priority else None
            self.world.second_turn(first, range(more), max_new=answer, priority=priority)
            done["second turn"] += 1

    # ------------------------------------------------------------------------------------- what the server does

    @precondition(lambda self: self.alive)
    @rule(steps=st.integers(1, 12))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            if self.alive:
                self._step()

    @precondition(lambda self: self.world.retractable)
    @rule(which=WHICH, boundary=BOUNDARIES, offset=st.integers(-2, 3))
    def run_to_a_boundary(self, which: int, boundary: int, offset: int) -> None:
        """Runs until one request's length is just before, on or behind a page, block or ring boundary."""
        req = self.world.retractable[which % len(self.world.retractable)]
        for _ in range(boundary + 8):
            if not req.kv.holds_kv or req.finished() or (req.seqlen - 1 - offset) % boundary == 0:
                break
            self._step()

    @precondition(lambda self: self.world.retractable)
    @rule(which=WHICH)
    def retract(self, which: int) -> None:
        self._retract(self.world.retractable[which % len(self.world.retractable)])

    @precondition(lambda self: self.world.retractable)
    @rule(which=WHICH, others=st.integers(0, 12))
    def retract_and_forget(self, which: int, others: int) -> None:
        """Retracts a request whose prefix the tree then loses: it comes back whole."""
        self._retract(self.world.retractable[which % len(self.world.retractable)])
        self.world.evict(256 * others, 128 * others)

    @precondition(lambda self: len(self.alive) < MOST_REQUESTS)
    @rule(family=st.integers(0, 2), length=st.integers(258, 800), steps=st.integers(0, 2))
    def retract_right_after_its_prefill(self, family: int, length: int, steps: int) -> None:
        """Retracts in the overlap of the prefill's forward; the state at the last token but one was never written."""
        req = self._submit(family, length, 100, 2)
        for _ in range(30):
            if self.world.computed.get(req.rid, 0) >= length or not self.alive:
                break
            self._step()
        for _ in range(steps):
            self._step()
        if req in self.world.retractable:
            self._retract(req)
            self.world.evict(256 * 12, 128 * 12)
            done["retract after prefill"] += 1

    def _retract(self, req: Any) -> None:
        self.world.retract(req)
        done["retract"] += 1

    # Rules are drawn evenly: what matters most has several names, and what empties the server shares one.

    @precondition(lambda self: self.alive)
    @rule(steps=st.integers(1, 30))
    def run_more(self, steps: int) -> None:
        self.run(steps)

    @precondition(lambda self: self.world.retractable)
    @rule(which=WHICH, steps=st.integers(1, 5))
    def retract_and_run(self, which: int, steps: int) -> None:
        self.retract_and_forget(which, 12)
        self.run(steps)

    @precondition(lambda self: self.world.requests)
    @rule(what=st.sampled_from(("evict", "match", "abort", "flush", "pause", "weights")), which=WHICH)
    def disturb(self, what: str, which: int) -> None:
        getattr(self, f"_{what}")(which)

    def _evict(self, which: int) -> None:
        self.world.evict(256 * which, 256 * (which // 2))
        done["evict"] += 1

    def _match(self, which: int) -> None:
        """Matches a prefix, which is split off and becomes the last to be evicted."""
        req = self.world.requests[which % len(self.world.requests)]
        self.world.match([*req.origin_input_ids, *req.output_ids, 1])
        done["match"] += 1

    def _abort(self, which: int) -> None:
        if self.alive:
            self.world.abort(self.alive[which % len(self.alive)])
            done["abort"] += 1

    def _flush(self, _: int) -> None:
        done["flush" if self.world.flush() else "refused flush"] += 1

    def _pause(self, _: int) -> None:
        self.world.pause()
        done["pause"] += 1

    def _weights(self, _: int) -> None:
        """Changes the weights and destroys the bytes of waiting copies, to see a use of them."""
        with changing_weights():
            pass
        done["weight update"] += 1
        if self.plain is None:
            return
        memory = self.plain.host.memory
        for saved in self.plain.all():
            for unit in saved.copy.units:
                memory.bytes_of(unit).fill_(0xEE)
            done["stale copy"] += 1

    # ------------------------------------------------------------------------------------- what must hold

    @invariant()
    def everything_is_right(self) -> None:
        if not hasattr(self, "world"):
            return
        done["steps"] += 1
        self.world.check_integrity()
        if self.plain is None:
            return
        memory = self.plain.host.memory
        memory.check_integrity()
        assert memory.leaks == 0
        assert memory.copies == self.plain.count <= len(self.world.requests)
        running = {id(req) for req in self.world.running}
        assert not [saved.req.rid for saved in self.plain.all() if id(saved.req) in running], "held, and running"

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for req in self.alive:
            self.world.abort(req)
        self.world.run(check=False)
        self._step()
        self.world.evict(1 << 20, 1 << 20)
        spec = self.world.spec
        assert self.world.totals() == (spec.pages, spec.swa_pages, spec.requests)
        if self.plain is not None:
            assert self.plain.host.memory.copies == self.plain.host.memory.held_bytes == 0
        assert self.world.flush(), "an idle server flushes"
        done["flush"] += 1
