"""Faults of DeepSeek-V4.1."""

from tools.mutant_table.entry import seeded

MUTANTS = (
    *seeded("engine/metadata/attach.py",
            "engine/test_prep_hooks.py::test_layouts_that_are_not_covered_stay_the_engines",
        ("v41-metadata-prepared", "others = sorted(set(ratios) - set(PREPARED_RATIOS))", "others = []")),
    *seeded("testing/ledger.py", "engine/plain/test_restore.py::test_it_joins_the_decode_batch[stock-513-v41]",
        ("v41-ring-of-the-window", "BY_REQUEST = (\"c128_state\", \"c2_state\", ONLINE)",
         "BY_REQUEST = (\"c128_state\", ONLINE)")),
    *seeded("testing/ledger.py", "engine/test_world.py::test_a_wrong_byte_of_a_running_request_is_found[v41-c2_state]",
        ("v41-pending-pair-not-judged", "\"c2_state\": tokens // 2 * 2,", "\"c2_state\": tokens,")),
    *seeded("testing/integrity.py", "engine/test_world.py::test_what_becomes_free_in_v41_holds_garbage",
        ("v41-first-tile-for-all", "PAGE // (part.ratio or 1) // part.rows", "1")),
    *seeded("cli/plan_config.py", "test_cli_plan.py::test_v41_flash_costs_what_was_counted_by_hand",
        ("v41-plan-with-v4-rows", "layout.replace(\"v41\", \"v41_fp4\") if ratio in SHARING else layout", "layout")),
    *seeded("cli/plan_config.py",
            "test_cli_plan.py::"
            "test_the_geometry_and_the_cost_of_a_page_and_a_slot_are_those_of_the_engines_pool[v41 drafts]",
        ("v41-plan-with-bf16-pairs", "state_bytes=dict.fromkeys(own, 2)", "state_bytes=dict.fromkeys(ratios, 2)")),
)  # fmt: skip
