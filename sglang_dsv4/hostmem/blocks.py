"""Hands out the equal blocks of one group; ranks that share an arena get the same numbers without communication.

Every block is in exactly one of two places:

    | free | held: by a live copy, by a page of a session, or by several of them |
    total = free + held

A free block may still be read by the transfer of its last owner: it remembers its last turn, and its next owner waits
for that turn (see ``turns``). The blocks of a ``take`` depend on earlier takes and releases alone, never on the
progress of a stream.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from sglang_dsv4.cache.family import Group

Blocks = list[int]  # a save of few blocks costs more in numpy, whose code is out of the processor's cache by then
RESTING = 8  # turns after which, in practice, no transfer reads a block; until then other blocks are preferred


class BlockPool:
    """Manages blocks 0..total-1 of one group. Not thread-safe: the scheduler thread owns it."""

    def __init__(self, group: Group, total: int) -> None:
        self.group = group
        self.total = total
        self._holders = [0] * total
        self._last = [0] * total  # turn that touched it
        self._rested = bytearray(b"\1") * total  # whether it is free, and RESTING turns have ended since its last
        self._ready = total  # how many are rested
        self._until = 0  # the last turn of rested blocks; 0: of one that was never touched
        self._tired: deque[tuple[int, Blocks]] = deque()  # other blocks freed together, and the last turn of them all
        self._tenants = bytearray(total)  # whether the tenant holds it
        self.held = 0
        self.idle = 0  # that the tenant alone holds

    @property
    def available(self) -> int:
        """Blocks that are free."""
        return self.total - self.held

    def take(self, count: int, now: int = 0) -> Blocks:
        """Takes ``count`` blocks, neighbours where possible (one run is one large copy), and returns their numbers.

        now: the last turn that ended. The caller has checked ``available``, and waits for their ``last_turn``.
        """
        taken = self._choose(count, now) if count else []
        for block in taken:
            self._ready -= self._rested[block]
            self._holders[block], self._rested[block] = 1, False
        self.held += count
        return taken

    def hold(self, blocks: Blocks) -> None:
        """Adds a holder to each of ``blocks``, which have one already and hold bytes that are wanted twice."""
        for block in blocks:
            holders = self._holders[block]
            assert holders, f"{self.group.value} block {block} that nobody holds"
            self.idle -= self._tenants[block] and holders == 1
            self._holders[block] = holders + 1

    def keep(self, blocks: Blocks) -> None:
        """Makes the tenant a holder of ``blocks``, which a copy holds."""
        self.hold(blocks)
        self._mark(blocks)

    def hand_over(self, blocks: Blocks) -> None:
        """Makes the tenant the holder of ``blocks``, in place of a copy that alone holds them."""
        self._mark(blocks)
        self.idle += len(blocks)

    def _mark(self, blocks: Blocks) -> None:
        for block in blocks:
            self._tenants[block] = True

    def forget(self, blocks: Blocks) -> None:
        """Gives ``blocks`` back, which the tenant holds."""
        for block in blocks:
            self._tenants[block] = False
            self.idle -= self._holders[block] == 1
        self.give_back(blocks)

    def is_shared(self, block: int) -> bool:
        """Returns whether ``block`` has more than one holder: it is not free when one of them gives it back."""
        return self._holders[block] > 1

    def last_turn(self, blocks: Blocks) -> int:
        """Returns the last turn that touched one of ``blocks``; 0 where none did."""
        return max(map(self._last.__getitem__, blocks), default=0)

    def _choose(self, count: int, now: int) -> Blocks:
        """Chooses the first run of ``count`` neighbours, else the first ``count``, of the rested blocks.

        Of all free ones, where too few are rested: then the last turn of those chosen is as early as can be. An arena
        may have half a million blocks: to list them takes longer than all the rest of a save.
        """
        self._rest(now - RESTING)
        run, free = b"\1" * count, self._rested
        first = free.find(run)
        if first < 0 and (missing := count - self._ready) > 0:
            free = self._with_tired(missing)
            first = free.find(run)
        if first >= 0:
            return list(range(first, first + count))
        found, at = [], -1
        for _ in range(count):
            at = free.find(1, at + 1)
            found.append(at)
        return found

    def _rest(self, turn: int) -> None:
        """Marks the free blocks whose last turn is not after ``turn``; one that was taken since is listed again."""
        self._until = max(self._until, turn)
        while self._tired and self._tired[0][0] <= self._until:
            for block in self._tired.popleft()[1]:
                now = not self._holders[block] and self._last[block] <= self._until
                self._ready += now - self._rested[block]
                self._rested[block] = now

    def _with_tired(self, missing: int) -> bytearray:
        """Returns the rested blocks and those of the others that are tired least: ``missing``, and all as these."""
        free, last = bytearray(self._rested), self._last
        listed = {block for _, blocks in self._tired for block in blocks}
        tired = [block for block in listed if not (free[block] or self._holders[block])]
        until = sorted(map(last.__getitem__, tired))[missing - 1]
        for block in tired:
            free[block] = last[block] <= until
        return free

    def touch(self, blocks: Blocks, turn: int) -> None:
        """Notes that the transfer of ``turn`` may touch ``blocks``, all of them held."""
        for block in blocks:
            assert self._holders[block], f"{self.group.value} block {block} is touched, and nobody holds it"
            self._last[block] = turn

    def give_back(self, blocks: Blocks) -> None:
        """Takes one holder from each of ``blocks``; those without another are free."""
        tired = []
        for block in blocks:
            self._holders[block] -= 1
            left = self._holders[block]
            self.idle += self._tenants[block] and left == 1
            if not left:
                self.held -= 1
                if self._last[block] <= self._until:  # at once: one that is tired hides those behind it
                    self._rested[block] = True
                    self._ready += 1
                else:
                    tired.append(block)
        if tired:
            self._tired.append((self.last_turn(tired), tired))

    def check_integrity(self, held: Sequence[int], tenants: Sequence[int]) -> None:
        """Raises AssertionError unless each block has as many holders as copies' ``held`` and ``tenants`` name it."""
        named = Counter(held) + Counter(tenants)
        alone = len(set(tenants) - set(held))
        if self.idle != alone:
            raise AssertionError(f"{self.group.value} blocks: {self.idle} of the tenant alone are counted, not {alone}")
        if self._ready != self._rested.count(1):
            raise AssertionError(f"{self.group.value} blocks: {self._ready} are counted as rested")
        listed = {block for _, blocks in self._tired for block in blocks}
        free = (block for block, holders in enumerate(self._holders) if not holders)
        if lost := [block for block in free if not self._rested[block] and block not in listed]:
            raise AssertionError(f"{self.group.value} blocks {lost[:4]} are free, and no take would find them")
        counted = sum(holders > 0 for holders in self._holders)
        wrong = [block for block, holders in enumerate(self._holders) if holders != named[block]]
        if counted != self.held or wrong or any(block >= self.total for block in named):
            raise AssertionError(
                f"{self.group.value} blocks: {counted} have holders, {self.held} are counted, of {self.total}; blocks "
                f"{wrong[:4]} have others than are known"
            )
