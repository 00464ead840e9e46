"""Faults of the commands: arguments, ends, launched servers."""

from __future__ import annotations

from tools.mutant_table.entry import Mutant, nearest

MUTANTS = (
    Mutant("doctor-promises-copies-of-online-c128", "sglang_dsv4/cli/doctor_server.py",
           nearest("test_recipes.py", "test_the_doctor_says_the_same_of_ones_own_command"),
           "environment_refusal(model.geometry.ratios) or drafts_refusal(drafts)", "drafts_refusal(drafts)"),
    Mutant("unified-kv-not-foreseen", "sglang_dsv4/pools/describe.py",
           nearest("test_recipes.py", "test_the_environment_is_refused_with_the_words_of_the_pool"),
           'envs.SGLANG_HACK_FLASHMLA_BACKEND.get() == "unified_kv_triton"', "False"),
    Mutant("no-request-at-a-time", "sglang_dsv4/command_line.py",
           nearest("test_bad_arguments.py", "test_bad_arguments_end_in_one_line"), "CONCURRENCY = number(int, 1, 4096)",
           "CONCURRENCY = number(int, 0, 4096)"),
    Mutant("options-have-short-names", "sglang_dsv4/command_line.py",
           nearest("test_bad_arguments.py", "test_bad_arguments_end_in_one_line"), '"allow_abbrev": False',
           '"allow_abbrev": True'),
    Mutant("result-folder-not-tried", "sglang_dsv4/command_line.py",
           nearest("test_bad_arguments.py", "test_bad_arguments_end_in_one_line"),
           "        with tempfile.TemporaryFile(dir=at):\n            return path", "        return path"),
    Mutant("interrupted-with-a-traceback", "sglang_dsv4/command_line.py",
           nearest("test_bad_arguments.py", "test_who_is_interrupted_says_so"),
           '        return _say(name, f"interrupted ({told.name})", INTERRUPTED + told)', "        raise"),
    Mutant("benchmark-outlives-its-command", "sglang_dsv4/cli/bench.py",
           nearest("test_bad_arguments.py", "test_a_benchmark_ends_with_the_command_that_began_it"),
           "        os.killpg(process.pid, signal.SIGKILL)\n", "        process.kill()\n"),
    Mutant("control-outlives-its-run", "sglang_dsv4/livetest/score.py",
           nearest("livetest/test_live_servers.py", "test_a_control_ends_when_the_server_beside_it_cannot_begin"),
           "            self.__exit__()\n            raise", "            raise"),
    Mutant("end-not-marked", "sglang_dsv4/transfer/copier.py", nearest("test_gpu_commands.py", "test_bench_transfer"),
           '        self.mark("end", self._kernels, 0)\n', ""),
)  # fmt: skip
