"""The command of a server, as operators paste it: its variables, and the engine's arguments."""

import json
import os
import shlex

import pytest

from sglang_dsv4.cli import launch_command, serve
from sglang_dsv4.cli.launch_command import LaunchError, read_command
from sglang_dsv4.cli.main import main
from sglang_dsv4.errors import SettingError
from sglang_dsv4.hostmem import sizing

ARGUMENTS = ["--model-path", "M", "--tp", "8"]
A = shlex.join(ARGUMENTS)
OURS = {serve.MODELS_VARIABLE: serve.MODELS}


@pytest.mark.parametrize(("command", "variables"), [
    (A, {}),
    (f"X=1 {A}", {"X": "1"}),
    (f"python3 -m sglang.launch_server {A}", {}),
    (f"/usr/bin/env X=1 Y='a b' python3 -m sglang.launch_server {A}", {"X": "1", "Y": "a b"}),
    (f"numactl --cpunodebind=0 --membind=0 python3 -m sglang.launch_server {A}", {}),
    (f"X=1 nohup env Y=2 python3 -m sglang.launch_server {A}", {"X": "1", "Y": "2"}),
    (f"docker run --gpus all -e X=1 --env Y=2 --env=Z=3 -eW=4 -p 1:1 image python3 -m sglang.launch_server {A}",
     {"X": "1", "Y": "2", "Z": "3", "W": "4"}),
    (f"docker run image sglang serve {A}", {}),
    (f"export X=1 '&&' export Y=2 ';' python3 -m sglang.launch_server {A}", {"X": "1", "Y": "2"}),
    (f'"export X=1; Y=2 python3 -m sglang.launch_server {A} 2>&1 | tee log"', {"X": "1", "Y": "2"}),
    (f'bash -lc "export X=1 && python3 -m sglang.launch_server \\\n {A}"', {"X": "1"}),
    (f"'docker run image bash -c \"X=1 python3 -m sglang.launch_server {A}\"'", {"X": "1"}),
    (f"python3 -m sglang.launch_server {A} '>' log '2>&1' '&'", {}),
    (f"python3 -m sglang.launch_server {A} '||' exit 1", {}),
    (f"python3 /sgl/python/sglang/launch_server.py {A}", {}),
    (f"srun --ntasks=1 /opt/bin/sglang serve {A}", {}),
    (f"sglang-dsv4 serve --dsv4-host-gb 7 {A}", {"DSV4_HOST_GB": "7", **OURS}),
    (f"X=1 python3 -m sglang_dsv4.cli.main serve {A}", {"X": "1", **OURS}),
    (f"--dsv4-verify {A}", {"DSV4_VERIFY": "1"}),
    (f"python3 -m dynamo.sglang --dyn-tool-call-parser deepseek_v4 {A} --dyn-x=1", {}),
])  # fmt: skip
def test_the_launcher_is_found_anywhere_among_the_words(command, variables):
    assert read_command(shlex.split(command)) == (variables, ARGUMENTS)


def test_a_value_that_looks_like_a_command_stays_one_word():
    words = ["--served-model-name", "my sglang model", "--model-path", "M"]
    assert read_command(words).arguments == words


def test_another_launcher_keeps_what_only_serve_takes():
    """The engine will refuse it, and so must the doctor."""
    words = ["--dsv4-host-gb", "7"]
    assert read_command(["python3", "-m", "sglang.launch_server", *words]) == ({}, words)


@pytest.mark.parametrize(("words", "error", "text"), [
    (["./start.sh", "--tp", "8"], LaunchError, "'./start.sh' is no argument, and no launcher is among the words"),
    (["python3", "-m", "sglang_router", "--tp", "8"], LaunchError, launch_command.KNOWN),
    (['python3 -m sglang.launch_server --model-path "M'], LaunchError, "No closing quotation"),
    (["--dsv4-hostgb", "3", *ARGUMENTS], SettingError, "did you mean --dsv4-host-gb?"),
    (["sglang-dsv4", "serve", "--dsv4-verfy"], SettingError, "did you mean --dsv4-verify?"),
])  # fmt: skip
def test_what_is_no_command_is_refused_in_a_line(capsys, words, error, text):
    with pytest.raises(error) as refused:
        read_command(words)
    assert text in str(refused.value)
    try:
        status = main(["doctor", "--", *words])
    except SystemExit as end:
        status = end.code
    said = capsys.readouterr().err
    assert status == 2 and text in said and said.count("\n") == 1


@pytest.mark.parametrize("begin", [
    "sglang-dsv4 serve --dsv4-host-gb 7", "/usr/bin/env DSV4_HOST_GB=7 X=1 python3 -m sglang.launch_server",
    "SGLANG_EXTERNAL_MODEL_PACKAGE=sglang_dsv4.models DSV4_HOST_GB=7 sglang serve",
])  # fmt: skip
def test_the_whole_command_is_read_with_our_options_and_ends_the_output(capsys, monkeypatch, begin):
    monkeypatch.setattr(sizing, "free_ram", lambda: 80 << 30)
    command = f"{begin} --model-path /no/such/model --tp 4 --disaggregation-mode decode"
    assert main(["doctor", "--", *command.split()]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(
        "/no/such/model is not on this machine: judged as DeepSeek-V4-Flash, though its name does not say so. "
        "This server (decode, 4 ranks on this machine) will keep retracted requests in host memory: 7 GiB, "
        "reserved once and shared by its 4 ranks."
    )
    assert "DSV4_HOST_GB" not in os.environ
    assert main(["doctor", "--tp", "4", "--json", "--", "--dsv4-host-gb", "81", "--model-path", "M"]) == 1
    verdict = json.loads(capsys.readouterr().out)["server"]
    assert verdict.partition("say so. ")[2].startswith(
        "This server (plain, 4 ranks on this machine) will refuse to start: DSV4_HOST_GB=81: 80.00"
    )
