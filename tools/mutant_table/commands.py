"""Faults of what every command shares: its arguments, its end, and what it launched."""

from __future__ import annotations

from tools.mutant_table.entry import Mutant, nearest

MUTANTS = (
    Mutant("no-request-at-a-time", "sglang_dsv4/command_line.py",
           nearest("test_bad_arguments.py", "test_bad_arguments_end_in_one_line"),
           "CONCURRENCY = number(int, 1, 4096)", "CONCURRENCY = number(int, 0, 4096)",
           "A stress run with --concurrency 0 ends in a traceback."),
    Mutant("options-have-short-names", "sglang_dsv4/command_line.py",
           nearest("test_bad_arguments.py", "test_bad_arguments_end_in_one_line"),
           '"allow_abbrev": False', '"allow_abbrev": True',
           "A mistyped option is taken for another."),
    Mutant("result-folder-not-tried", "sglang_dsv4/command_line.py",
           nearest("test_bad_arguments.py", "test_bad_arguments_end_in_one_line"),
           "        with tempfile.TemporaryFile(dir=at):\n            return path", "        return path",
           "An hour's result is lost at the end, because its folder cannot be written to."),
    Mutant("interrupted-with-a-traceback", "sglang_dsv4/command_line.py",
           nearest("test_bad_arguments.py", "test_who_is_interrupted_says_so"),
           '        return _say(name, f"interrupted ({told.name})", INTERRUPTED + told)', "        raise",
           "Ctrl-C shows pages of Python."),
    Mutant("benchmark-outlives-its-command", "sglang_dsv4/cli/bench.py",
           nearest("test_bad_arguments.py", "test_a_benchmark_ends_with_the_command_that_began_it"),
           "        os.killpg(process.pid, signal.SIGKILL)\n", "        process.kill()\n",
           "A benchmark that was interrupted leaves processes that hold the GPU."),
    Mutant("control-outlives-its-run", "sglang_dsv4/livetest/score.py",
           nearest("livetest/test_live_servers.py", "test_a_control_ends_when_the_server_beside_it_cannot_begin"),
           "            self.__exit__()\n            raise", "            raise",
           "A server stays on the GPU after a stress run that could not start the next."),
    Mutant("end-not-marked", "sglang_dsv4/transfer/copier.py",
           nearest("test_gpu_commands.py", "test_bench_transfer"),
           '        self.mark("end", self._kernels, 0)\n', "",
           "bench transfer ends in a traceback on every GPU."),
)  # fmt: skip
