"""The idle cost of the hooks: every hook is known to run in each step or not to, and the benchmark runs the hooks."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.steps import hooks
from sglang_dsv4.engine.hooks import HOOKS
from sglang_dsv4.engine.releases import engine_version
from sglang_dsv4.engine.signatures import overrides

# Not called by a step whose metadata a graph makes, while no request waits. A new hook belongs here or in EACH_STEP.
ELSEWHERE = {
    "start": {
        "Scheduler.run_event_loop", "Scheduler.init_disaggregation",
        "DeepSeekV4SingleKVPool", "HiSparseC4DevicePool", "DeepSeekV4IndexerPool", "CompressStatePool",
        "DeepSeekV4TokenToKVPool", "DeepseekV4AttnBackend.__init__",
    },
    "a request comes, goes or is retracted": {
        "Req.offload_kv_cache", "Req.load_kv_cache", "Req.build_rebootstrap_payload",
        "DecodeTransferQueue._commit_transfer_to_req",
        "common.backup_kv_cache", "ScheduleBatch.retract_decode", "Scheduler.abort_request",
        "SchedulerBatchResultProcessor.process_batch_result_prebuilt",
        "ScheduleBatch.release_req", "PrefillAdder.add_one_req", "ScheduleBatch.prepare_for_extend",
        "common.release_kv_cache",
    },
    "the operator asks": {
        "Scheduler.flush_cache", "Scheduler.pause_generation", "Scheduler.handle_pd_role_switch",
        "SchedulerWeightUpdaterManager",
    },
    "see OVERRIDES": {"DecodePreallocQueue"},
    "a step of a plain server, see run.py": {"Scheduler.get_new_batch_prefill"},
    "a step without a graph": {"EagerRunner.load_batch", "DeepseekV4AttnBackend.init_forward_metadata"},
}  # fmt: skip


# Methods of the engine's queue that ours overrides; all but those of EACH_STEP run where a request comes or goes.
OVERRIDES = {"__init__", "add", "resume_retracted_reqs", "_pre_alloc", "_prealloc_required_tokens"}


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.target)
def test_every_hook_has_its_moment(hook):
    known = {name for names in ELSEWHERE.values() for name in names}
    *_, owner, name = hook.target.split(".")
    assert {name, f"{owner}.{name}"} & known, f"does each step call {hook.target}?"


def test_every_override_of_the_queue_has_its_moment():
    from sglang.srt.disaggregation.decode import DecodePreallocQueue

    assert {name for name, _ in overrides(DecodePreallocQueue)} == OVERRIDES
    assert {name.split(".")[1] for name in hooks.EACH_STEP} < OVERRIDES


def test_time_is_counted():
    assert 0.9e6 < hooks.nanoseconds(lambda: time.sleep(0.001), 2) < 1e8


def test_it_measures_our_override(tmp_path):
    words = [sys.executable, "-m", "benchmarks.steps.hooks", "--loops", "2000", "--out", str(tmp_path)]
    done = subprocess.run(words, cwd=Path(hooks.__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "hooks.json").read_text())
    assert found["versions"]["sglang"] == engine_version()
    assert [row["hook"] for row in found["rows"]] == list(hooks.EACH_STEP)
    assert all(row["added_ns"] > 20 for row in found["rows"]), "a call of ours takes longer than that"
