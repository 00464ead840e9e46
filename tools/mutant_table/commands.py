"""Faults of the commands: arguments, ends, launched servers."""

from tools.mutant_table.entry import seeded

MUTANTS = (
    *seeded("cli/doctor_server.py", "test_recipes.py::test_the_doctor_says_the_same_of_ones_own_command",
        ("doctor-promises-copies-of-online-c128",
         "environment_refusal(model.geometry.ratios, *beside) or drafts_refusal(drafts)", "drafts_refusal(drafts)")),
    *seeded("pools/describe.py", "test_recipes.py::test_the_environment_is_refused_with_the_words_of_the_pool",
        ("unified-kv-not-foreseen", "envs.SGLANG_HACK_FLASHMLA_BACKEND.get() == \"unified_kv_triton\"", "False")),
    *seeded("command_line.py", "test_bad_arguments.py::test_bad_arguments_end_in_one_line",
        ("no-request-at-a-time", "CONCURRENCY = number(int, 1, 4096)", "CONCURRENCY = number(int, 0, 4096)"),
        ("options-have-short-names", "\"allow_abbrev\": False", "\"allow_abbrev\": True"),
        ("result-folder-not-tried", "        with tempfile.TemporaryFile(dir=at):\n            return path",
         "        return path")),
    *seeded("command_line.py", "test_bad_arguments.py::test_who_is_interrupted_says_so",
        ("interrupted-with-a-traceback",
         "        return _say(name, f\"interrupted ({told.name})\", INTERRUPTED + told)", "        raise")),
    *seeded("cli/bench.py", "test_bad_arguments.py::test_a_benchmark_ends_with_the_command_that_began_it",
        ("benchmark-outlives-its-command", "        os.killpg(process.pid, signal.SIGKILL)\n",
         "        process.kill()\n")),
    *seeded("livetest/score.py",
            "livetest/test_live_servers.py::test_a_control_ends_when_the_server_beside_it_cannot_begin",
        ("control-outlives-its-run", "            self.__exit__()\n            raise", "            raise")),
    *seeded("transfer/copier.py", "test_gpu_commands.py::test_bench_transfer",
        ("end-not-marked", "        self.mark(\"end\", self._kernels, 0)\n", "")),
)  # fmt: skip
