"""The idle cost of the hooks: every hook is known to run in each step or not to, and the benchmark runs the hooks."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.steps import hooks
from sglang_dsv4.engine.hooks import BOTH, hooks_of, line_of
from sglang_dsv4.engine.standalone import engine_version

# Not called by a step whose metadata a graph makes, while no request waits. A new hook belongs here or in EACH_STEP.
ELSEWHERE = {
    "start": {
        "Scheduler.run_event_loop",
        "DeepSeekV4SingleKVPool", "HiSparseC4DevicePool", "DeepSeekV4IndexerPool", "CompressStatePool",
        "DeepSeekV4TokenToKVPool", "DecodePreallocQueue.__init__", "DeepseekV4AttnBackend.__init__",
    },
    "a request comes, goes or is retracted": {
        "Req.offload_kv_cache", "Req.load_kv_cache", "Req.build_rebootstrap_payload",
        "DecodeTransferQueue._commit_transfer_to_req",
        "common.backup_kv_cache", "common.dsv4_needs_rebootstrap",
        "common.discard_kv_cache_backup", "ScheduleBatch.retract_decode", "DecodePreallocQueue.add",
        "DecodePreallocQueue._pre_alloc", "DecodePreallocQueue._prealloc_required_tokens", "Scheduler.abort_request",
        "SchedulerBatchResultProcessor.process_batch_result_prebuilt",
    },
    "the operator asks": {
        "Scheduler.flush_cache", "Scheduler.pause_generation", "Scheduler.handle_pd_role_switch",
        "DecodePreallocQueue.release_memory_occupation",
        *(f"update_weights_from_{way}" for way in ("disk", "distributed", "tensor", "ipc")),
        *(f"{step}_weight_update" for step in ("begin", "end")),
    },
    "a step without a graph": {"EagerRunner.load_batch", "DeepseekV4AttnBackend.init_forward_metadata"},
}  # fmt: skip


@pytest.mark.parametrize("line", BOTH)
def test_every_hook_has_its_moment(line):
    known = {name for names in ELSEWHERE.values() for name in names} | set(hooks.EACH_STEP)
    for hook in hooks_of(line, prep=True):
        *_, owner, name = hook.target.split(".")
        assert {name, f"{owner}.{name}"} & known, f"does each step call {hook.target}?"


@pytest.mark.parametrize("line", BOTH)
def test_the_hooks_of_a_step_are_those_of_the_table(line):
    found = hooks.hooks_of_a_step(line)
    assert found.keys() == hooks.EACH_STEP.keys()
    assert all(hook.target.endswith(name) and hook in hooks_of(line, prep=True) for name, hook in found.items())


def test_time_is_counted():
    assert 0.9e6 < hooks.nanoseconds(time.sleep, (0.001,), 2) < 1e8


def test_it_measures_behind_the_engines_wrappers(tmp_path):
    words = [sys.executable, "-m", "benchmarks.steps.hooks", "--loops", "2000", "--out", str(tmp_path)]
    done = subprocess.run(words, cwd=Path(hooks.__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "hooks.json").read_text())
    assert line_of(engine_version()) and found["versions"]["sglang"] == engine_version()
    assert [row["hook"] for row in found["rows"]] == list(hooks.EACH_STEP)
    assert all(row["added_ns"] > 100 for row in found["rows"]), "a wrapper and a call of ours take longer than that"
