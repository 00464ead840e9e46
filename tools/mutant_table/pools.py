"""Faults of the pools."""

from __future__ import annotations

from tools.mutant_table.entry import seeded

MUTANTS = (
    *seeded("pools/copy_service.py", "test_metrics.py::test_a_pool_tells_of_every_save_load_and_release",
        ("stale-weights-check-inverted", "copy.weight_version != self.context", "copy.weight_version == self.context"),
        ("loaded-copy-not-released", "        copy.release()\n        seconds", "        seconds"),
        ("saves-not-counted", "self.counters.saved(nbytes, seconds)", "pass")),
    *seeded("pools/copy_service.py", "test_bad_input.py::test_a_transfer_that_fails_gives_the_blocks_back",
        ("failed-save-keeps-its-blocks", "            self.memory.touched(copy)\n            copy.release()\n",
         "            self.memory.touched(copy)\n")),
    *seeded("pools/copy_service.py", "test_bad_input.py::test_a_copy_that_does_not_fit",
        ("shorter-copy-accepted", "if copy.tokens != tokens:", "if copy.tokens > tokens:")),
    *seeded("pools/copy_service.py", "test_bad_input.py::test_a_request_slot_out_of_range",
        ("slot-past-the-last-accepted", "not 0 <= slot < slots", "not 0 <= slot <= slots")),
    *seeded("pools/copy_service.py", "transfer/test_verify.py::test_a_load_that_misses_a_family_is_found",
        ("verify-skips-the-device", "verify.check_device(self.buffers, copy, from_page(spans, first_page))", "pass")),
    *seeded("pools/sub_pools.py", "pools/test_sub_pools.py",
        ("sentinel-state-row-copied", "(rows >= last)", "(rows > last)"),
        ("indexer-key-takes-the-scale", "self.get_bytes_per_token() - INDEX_SCALE_BYTES",
         "self.get_bytes_per_token()")),
    *seeded("pools/hisparse.py", "pools/test_sub_pools.py",
        ("hisparse-dummy-row-copied", "torch.nonzero(rows <= 0)", "torch.nonzero(rows < 0)")),
    *seeded("pools/describe.py", "test_bad_input.py::test_a_request_slot_out_of_range",
        ("sentinel-counted-as-a-page", "return (shortest - 1 - family.folded) // family.rows",
         "return -(-shortest // family.rows)")),
    *seeded("cache/families.py", "engine/test_layouts.py::test_a_real_pool_is_refused",
        ("many-drafts-accepted", "MOST_DRAFT_TOKENS = 8", "MOST_DRAFT_TOKENS = 16")),
    *seeded("pools/token_to_kv.py",
            "engine/test_layouts.py::test_too_little_memory_refuses_only_when_nobody_asked_for_it",
        ("explicit-size-failure-swallowed", "if failure is not None and explicit:",
         "if failure is not None and not explicit:")),
    *seeded("pools/token_to_kv.py", "test_bad_input.py::test_a_second_attach_keeps_the_arena",
        ("second-attach-pins-again", "        if self.host is not None:\n            return self.host  #",
         "        #")),
    *seeded("hostmem/reserve.py",
            ("engine/test_ranks.py::test_ranks_with_different_memory_find_room_for_the_same_requests",
            "::test_a_rank_whose_pool_is_refused_stops_the_others"),
        ("other-ranks-not-asked-before-pinning", "agreed = agree(counts)", "agreed = counts")),
)  # fmt: skip
