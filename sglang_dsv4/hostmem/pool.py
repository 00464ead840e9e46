"""Hands out the equal units of an arena; ranks that share an arena get the same numbers without communication.

Every unit is in exactly one of two places:

    | free | held: by a live copy, by a page or a point of a session, or by several of them |
    total = free + held

A free unit may still be read by the transfer of its last owner: it remembers its last ticket, and its next owner waits
for that ticket (see ``tickets``). The units of a ``take`` depend on earlier takes and releases alone, never on the
progress of a stream.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

UnitNumbers = list[int]  # a save of few units costs more in numpy, whose code is out of the processor's cache by then
COOLING = 8  # tickets after which, in practice, no transfer reads a unit; until then other units are preferred


class UnitPool:
    """Manages units 0..total-1. Not thread-safe: the scheduler thread owns it."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._holders = [0] * total
        self._last = [0] * total  # ticket that touched it
        self._written = [0] * total  # of those the last that wrote it
        self._quiet = bytearray(b"\1") * total  # whether it is free, and COOLING tickets have ended since its last
        self._quiet_count = total  # how many are quiet
        self._until = 0  # the last ticket of quiet units; 0: of one that was never touched
        self._cooling: deque[tuple[int, UnitNumbers]] = deque()  # others freed together, and their last ticket
        self._cached = bytearray(total)  # whether the cache holds it
        self.held = 0
        self.evictable = 0  # that the cache alone holds

    @property
    def available(self) -> int:
        """Units that are free."""
        return self.total - self.held

    def take(self, count: int, now: int = 0) -> UnitNumbers:
        """Takes ``count`` units, neighbours where possible (one run is one large copy), and returns their numbers.

        now: the last ticket that ended. The caller has checked ``available``, and waits for their ``last_ticket``.
        """
        taken = self._choose(count, now) if count else []
        for unit in taken:
            self._quiet_count -= self._quiet[unit]
            self._holders[unit], self._quiet[unit] = 1, False
        self.held += count
        return taken

    def hold(self, units: UnitNumbers) -> None:
        """Adds a holder to each of ``units``, which have one already and hold bytes that are wanted twice."""
        for unit in units:
            holders = self._holders[unit]
            assert holders, f"unit {unit} that nobody holds"
            self.evictable -= self._cached[unit] and holders == 1
            self._holders[unit] = holders + 1

    def keep(self, units: UnitNumbers) -> None:
        """Makes the cache a holder of ``units``, which a copy holds."""
        self.hold(units)
        self._mark(units)

    def hand_over(self, units: UnitNumbers) -> None:
        """Makes the cache the holder of ``units``, in place of a copy that alone holds them."""
        self._mark(units)
        self.evictable += len(units)

    def _mark(self, units: UnitNumbers) -> None:
        for unit in units:
            self._cached[unit] = True

    def forget(self, units: UnitNumbers) -> None:
        """Gives ``units`` back, which the cache holds."""
        for unit in units:
            self._cached[unit] = False
            self.evictable -= self._holders[unit] == 1
        self.give_back(units)

    def is_shared(self, unit: int) -> bool:
        """Returns whether ``unit`` has more than one holder: it is not free when one of them gives it back."""
        return self._holders[unit] > 1

    def last_ticket(self, units: UnitNumbers) -> int:
        """Returns the last ticket that touched one of ``units``; 0 where none did."""
        return max(map(self._last.__getitem__, units), default=0)

    def last_write(self, units: UnitNumbers) -> int:
        """Returns the last ticket that wrote one of ``units``; 0 where none did."""
        return max(map(self._written.__getitem__, units), default=0)

    def _choose(self, count: int, now: int) -> UnitNumbers:
        """Chooses the first run of ``count`` neighbours, else the first ``count``, of the quiet units.

        Of all free ones, where too few are quiet: then the last ticket of those chosen is as early as can be. An arena
        may have half a million units: to list them takes longer than all the rest of a save.
        """
        self._let_cool(now - COOLING)
        run, free = b"\1" * count, self._quiet
        first = free.find(run)
        if first < 0 and (missing := count - self._quiet_count) > 0:
            free = self._with_cooling(missing)
            first = free.find(run)
        if first >= 0:
            return list(range(first, first + count))
        found, at = [], -1
        for _ in range(count):
            at = free.find(1, at + 1)
            found.append(at)
        return found

    def _let_cool(self, ticket: int) -> None:
        """Marks the free units whose last ticket is not after ``ticket``; one that was taken since is listed again."""
        self._until = max(self._until, ticket)
        while self._cooling and self._cooling[0][0] <= self._until:
            for unit in self._cooling.popleft()[1]:
                now = not self._holders[unit] and self._last[unit] <= self._until
                self._quiet_count += now - self._quiet[unit]
                self._quiet[unit] = now

    def _with_cooling(self, missing: int) -> bytearray:
        """Returns the quiet units and those of the others that are cooling least: ``missing``, and all as these."""
        free, last = bytearray(self._quiet), self._last
        listed = {unit for _, units in self._cooling for unit in units}
        cooling = [unit for unit in listed if not (free[unit] or self._holders[unit])]
        until = sorted(map(last.__getitem__, cooling))[missing - 1]
        for unit in cooling:
            free[unit] = last[unit] <= until
        return free

    def touch(self, units: UnitNumbers, ticket: int, written: int = 0) -> None:
        """Notes that the transfer of ``ticket`` may touch ``units``, all held, and writes those from ``written`` on."""
        holders, last, writes = self._holders, self._last, self._written
        for unit in units:
            assert holders[unit], f"unit {unit} is touched, and nobody holds it"
            last[unit] = ticket
        for unit in units[written:]:
            writes[unit] = ticket

    def give_back(self, units: UnitNumbers) -> None:
        """Takes one holder from each of ``units``; those without another are free."""
        cooling = []
        for unit in units:
            self._holders[unit] -= 1
            left = self._holders[unit]
            self.evictable += self._cached[unit] and left == 1
            if not left:
                self.held -= 1
                if self._last[unit] <= self._until:  # at once: one that is cooling hides those behind it
                    self._quiet[unit] = True
                    self._quiet_count += 1
                else:
                    cooling.append(unit)
        if cooling:
            self._cooling.append((self.last_ticket(cooling), cooling))

    def check_integrity(self, held: Sequence[int], cached: Sequence[int]) -> None:
        """Raises AssertionError unless each unit has as many holders as copies' ``held`` and ``cached`` name it."""
        named = Counter(held) + Counter(cached)
        alone = len(set(cached) - set(held))
        if self.evictable != alone:
            raise AssertionError(f"units: {self.evictable} of the cache alone are counted, not {alone}")
        if self._quiet_count != self._quiet.count(1):
            raise AssertionError(f"units: {self._quiet_count} are counted as quiet")
        listed = {unit for _, units in self._cooling for unit in units}
        free = (unit for unit, holders in enumerate(self._holders) if not holders)
        if lost := [unit for unit in free if not self._quiet[unit] and unit not in listed]:
            raise AssertionError(f"units {lost[:4]} are free, and no take would find them")
        counted = sum(holders > 0 for holders in self._holders)
        wrong = [unit for unit, holders in enumerate(self._holders) if holders != named[unit]]
        if counted != self.held or wrong or any(unit >= self.total for unit in named):
            raise AssertionError(
                f"units: {counted} have holders, {self.held} are counted, of {self.total}; units "
                f"{wrong[:4]} have others than are known"
            )
