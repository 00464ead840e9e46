"""Faults of DeepSeek-V4.1."""

from __future__ import annotations

from tools.mutant_table.entry import Mutant, nearest

MUTANTS = (
    Mutant("v41-metadata-prepared", "sglang_dsv4/engine/metadata/attach.py",
           nearest("engine/test_prep_hooks.py", "test_layouts_that_are_not_covered_stay_the_engines"),
           "others = sorted(set(ratios) - set(PREPARED_RATIOS))", "others = []"),
    Mutant("v41-ring-of-the-window", "sglang_dsv4/testing/ledger.py",
           nearest("engine/plain/test_restore.py", "test_a_request_of_v41_comes_back[stock-513]"),
           'BY_REQUEST = ("c128_state", "c2_state", ONLINE)', 'BY_REQUEST = ("c128_state", ONLINE)'),
    Mutant("v41-pending-pair-not-judged", "sglang_dsv4/testing/ledger.py",
           nearest("testing/test_world.py", "test_a_wrong_byte_of_a_running_request_is_found[v41-c2_state]"),
           '"c2_state": tokens // 2 * 2,', '"c2_state": tokens,'),
    Mutant("v41-first-tile-for-all", "sglang_dsv4/testing/integrity.py",
           nearest("testing/test_world.py", "test_what_becomes_free_in_v41_holds_garbage"),
           "PAGE // (part.ratio or 1) // part.rows", "1"),
    Mutant("v41-plan-with-v4-rows", "sglang_dsv4/cli/plan_config.py",
           nearest("test_cli_plan.py", "test_v41_flash_costs_what_was_counted_by_hand"),
           'layout.replace("v41", "v41_fp4") if ratio in SHARING else layout', "layout"),
    Mutant("v41-plan-with-bf16-pairs", "sglang_dsv4/cli/plan_config.py",
           nearest("test_cli_plan.py",
                   "test_the_geometry_and_the_cost_of_a_page_and_a_slot_are_those_of_the_engines_pool[v41 drafts]"),
           "state_bytes=dict.fromkeys(own, 2)", "state_bytes=dict.fromkeys(ratios, 2)"),
)  # fmt: skip
