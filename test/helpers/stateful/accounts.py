"""Checks after every step that no host block, page or slot is lost or has two users."""

from collections import Counter

from hypothesis.stateful import invariant

from sglang_dsv4.cache.family import Group
from stateful.model import Requests
from stateful.pool import PAGE, SPEC, pages_of


class Accounts(Requests):
    @invariant()
    def host_blocks_are_accounted(self) -> None:
        memory = self.memory
        memory.check_integrity()
        assert memory.copies == len(self.saved)
        assert memory.leaks == self.leaks
        assert memory.held_bytes == sum(saved.copy.nbytes for saved in self.saved)
        used = Counter({Group.WINDOW: len(self.saved), Group.REQUEST: len(self.saved)})
        used[Group.PAGED] = sum(pages_of(saved.tokens) for saved in self.saved)
        for group, total in self.totals.items():
            assert memory.pools[group].available == total - used[group]

    @invariant()
    def no_host_block_has_two_users(self) -> None:
        """Asserts that no host block belongs to two copies, or to a copy while a load still reads it."""
        self.reading = [(event, blocks) for event, blocks in self.reading if not event.query()]
        for group in Group:
            users = [saved.copy.blocks[group] for saved in self.saved]
            users += [blocks[group] for _, blocks in self.reading]
            numbers = [block for blocks in users for block in blocks]
            assert len(set(numbers)) == len(numbers), f"{group.value}: {numbers}"

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
            for group, pool in self.memory.pools.items():
                assert pool.available == pool.total == self.totals[group]
                everything = pool.take(pool.total)
                assert everything == list(range(pool.total))
                pool.give_back(everything)
            self.memory.turns.reach(self.memory.turns.now)
            self.memory.check_integrity()
            assert all(event.passed for event, _ in self.reading)
        finally:
            self.allocator.clear()
            self.pool.host = None
