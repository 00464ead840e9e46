"""Faults of sessions."""

from __future__ import annotations

from tools.mutant_table.entry import seeded

MUTANTS = (
    *seeded("sessions/hints.py", "sessions/test_hints.py",
        ("endless-time-to-live", "and 0 <= value <= LONGEST_TTL", "and 0 <= value"),
        ("negative-time-to-live", "and 0 <= value <= LONGEST_TTL", "and value <= LONGEST_TTL"),
        ("switch-taken-for-a-number", "if isinstance(value, bool):", "if False:"),
        ("clients-add-series", "OTHER if outcome == \"unknown\" else name", "name"),
        ("narrower-hint-taken-for-the-whole", "<= payload.keys() <= known.needed | known.optional",
         "<= payload.keys()"),
        ("pin-without-an-end", "_Type(Rank.PINNED, needed=", "_Type(Rank.PINNED, optional="),
        ("priority-of-a-hint-that-was-replaced", "payload.get(\"priority\", 0)",
         "payload.get(\"priority\", hints.priority)"),
        ("demoted-sessions-outlive-plain-ones", "DEMOTED = 1\n    PLAIN = 2", "PLAIN = 1\n    DEMOTED = 2"),
        ("parameters-of-others-counted", "isinstance(name, str) and name.startswith(PREFIX)",
         "isinstance(name, str)")),
    *seeded("settings.py", "test_settings.py::test_good_values",
        ("off-has-no-bound", "        return OFF\n", "        return None\n")),
    *seeded("cli/plan_figures.py",
            ("test_cli_plan.py::test_a_session_costs_its_pages_and_a_window_a_point",
             "::test_the_settings_reserve_room_for_the_sessions_and_the_copies_and_hardly_more"),
        ("windows-of-sessions-not-planned",
         "return max(for_pages, -(-windows * window // page) * SESSION_WINDOWS_SHARE)", "return for_pages"),
        ("sessions-planned-without-retracts", "_blocks_with_windows(sessions * pages + away, ",
         "_blocks_with_windows(sessions * pages, "),
        ("request-block-planned-for-a-session", "pages * page + window, window, TURN",
         "pages * page + window + request, window, TURN"),
        ("begun-page-planned-for-a-session", "pages = tokens // geometry.page_size",
         "pages = -(-tokens // geometry.page_size)")),
)  # fmt: skip
