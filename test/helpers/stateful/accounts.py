"""Checks after every step that no host unit, page or slot is lost or has two users."""

from hypothesis.stateful import invariant

from stateful.model import Requests
from stateful.pool import PAGE, SPEC


class Accounts(Requests):
    @invariant()
    def host_units_are_accounted(self) -> None:
        memory = self.memory
        memory.check_integrity()
        assert memory.copies == len(self.saved)
        assert memory.leaks == self.leaks
        assert memory.held_bytes == sum(saved.copy.nbytes for saved in self.saved)
        assert memory.pool.available == self.total - self._host_used()

    @invariant()
    def no_host_unit_has_two_users(self) -> None:
        """Asserts that no host unit belongs to two copies, or to a copy while a load still reads it."""
        self.reading = [(event, units) for event, units in self.reading if not event.query()]
        users = [saved.copy.units for saved in self.saved] + [units for _, units in self.reading]
        numbers = [unit for units in users for unit in units]
        assert len(set(numbers)) == len(numbers), numbers

    @invariant()
    def device_pages_are_accounted(self) -> None:
        assert self.allocator.full_available_size() == PAGE * self.free_pages
        assert self.allocator.swa_available_size() == PAGE * self.free_swa_pages
        pages, swa_pages = [], []
        for running in self.running:
            starts = running.slots[::PAGE]
            swa = self.allocator.full_to_swa_index_mapping[starts].tolist()
            assert [row > 0 for row in swa] == [page >= running.evicted for page in range(len(swa))]
            pages += starts.tolist()
            swa_pages += swa[running.evicted :]
        assert len(set(pages)) == len(pages) == SPEC.pages - self.free_pages
        assert len(set(swa_pages)) == len(swa_pages) == SPEC.swa_pages - self.free_swa_pages

    @invariant()
    def no_slot_has_two_users(self) -> None:
        slots = [running.request.req_slot for running in self.running]
        assert sorted(slots + self.free_slots) == list(range(SPEC.requests))

    def teardown(self) -> None:
        try:
            for running in list(self.running):
                self._leave(running)
            while self.saved:
                self.saved.pop().copy.release()
            assert sorted(self.free_slots) == list(range(SPEC.requests))
            assert self.device.clean()
            assert self.memory.copies == self.memory.held_bytes == 0
            assert self.memory.leaks == self.leaks
            pool = self.memory.pool
            assert pool.available == pool.total == self.total
            everything = pool.take(pool.total)
            assert everything == list(range(pool.total))
            pool.give_back(everything)
            self.memory.tickets.reach(self.memory.tickets.now)
            self.memory.check_integrity()
            assert all(event.passed for event, _ in self.reading)
        finally:
            self.allocator.clear()
            self.pool.host = None
