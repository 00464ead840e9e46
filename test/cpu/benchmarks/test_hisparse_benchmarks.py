"""Reads the command line of the HiSparse stress."""

import json

from benchmarks import hisparse_stress as stress
from sglang_dsv4.cli import stress as command


def test_the_stress_is_of_a_hisparse_server_with_prompts_beyond_the_hot_rows() -> None:
    for given in ([], ["--plain"]):
        arguments = command.parse(stress.words(["--model-path", "m", *given, "--requests", "9", "--", "--tp", "2"]))
        assert arguments.requests == 9 and arguments.plain == bool(given) and arguments.server[-2:] == ["--tp", "2"]
        config = json.loads(arguments.server[arguments.server.index("--hisparse-config") + 1])
        assert max(arguments.prompt) // 4 > config["device_buffer_size"]
