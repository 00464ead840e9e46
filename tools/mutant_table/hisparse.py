"""Faults of HiSparse servers."""

from tools.mutant_table.entry import OLDER, seeded

MUTANTS = (
    *seeded("engine/hisparse/reserve.py",
            "engine/hisparse/test_kept_rows.py::test_requests_that_run_never_lack_a_page_however_much_is_kept",
        ("no-pages-for-kept-rows", "larger_by(reserve):", "larger_by(0):")),
    *seeded("engine/hisparse/reserve.py",
            "engine/hisparse/test_kept_rows.py::test_as_many_requests_as_a_page_has_rows_are_backed_up_row_by_row",
        ("scattered-rows-copied-as-a-page", "    pool.by_rows = True", "    pool.by_rows = False"), release=OLDER),
    *seeded("engine/hisparse/reserve.py", "engine/hisparse/test_reserve.py",
        ("reserve-not-agreed", "if tp_group is None else least_of_all", "if True else least_of_all"),
        ("reserve-of-one-rank", "settings.verify, ranks)", "settings.verify)"),
        ("ram-of-all-ranks-taken", "free // claim.ranks", "free")),
    *seeded("engine/hisparse/rows.py", "engine/hisparse/test_kept_rows.py",
        ("resumed-without-hot-rows", "for req in wanted[count:]}", "for req in []}"),
        ("two-of-one-id-resume-for-one", "if id(req) not in hidden]\n    try",
         "if req.rid in {r.rid for r in wanted[:count]} or id(req) not in hidden]\n    try"),
        ("newest-row-backed-up-before-it-is-made", "computed=stepped and req", "computed=req"),
        ("stages-not-asked-who-resumes", " if rids is None or req.rid in rids]", "]")),
    *seeded("pools/kept_rows.py", "engine/hisparse/test_kept_rows.py",
        ("more-kept-than-the-reserve", "        if self.held + count > self.reserve:", "        if False:"),
        ("rows-without-a-copy-stay-kept", "                now.release()", "                pass"),
        ("backup-not-waited-for", "        coordinator.wait_for_pending_backup()\n", ""),
        ("forward-not-waited-for",
         "            module.current_stream().wait_stream(coordinator.decode_producer_stream)", "            pass"),
        ("newest-row-not-backed-up", "            self._back_up(slot, rows - 1)", "            pass"),
        ("newest-row-not-in-its-place", "        self.load_newest(slot, req.kv.kv_allocated_len)\n", ""),
        ("part-of-a-history-kept", "        if allocated != count * self.page_size:", "        if False:"),
        ("rows-left-for-whoever-comes", "            pool.adopts = None", "            pass")),
)  # fmt: skip
