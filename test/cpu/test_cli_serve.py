"""``sglang-dsv4 serve``: what is started, with which environment, and what is refused before it."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest

from sglang_dsv4.cli import serve
from sglang_dsv4.cli.main import COMMANDS, main
from sglang_dsv4.settings import TABLE, read_settings

OPTIONS = {name: "--" + setting.variable.lower().replace("_", "-") for name, setting in TABLE.items()}
MODELS = "SGLANG_EXTERNAL_MODEL_PACKAGE"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("DSV4_")] + [MODELS, "SGLANG_PLUGINS"]:
        monkeypatch.delenv(name, raising=False)


class Started(Exception):
    """In place of the server."""


@pytest.fixture
def start(monkeypatch):
    """Runs ``serve``; returns (file, command, environment) of what it becomes."""

    def execvpe(file, command, environ):
        raise Started(file, command, environ)

    monkeypatch.setattr(os, "execvpe", execvpe)

    def run(*argv):
        with pytest.raises(Started) as caught:
            main(["serve", *argv])
        return caught.value.args

    return run


@pytest.fixture
def refusal(monkeypatch, capsys):
    """Runs ``serve``, which must exit with 2 and start nothing; returns what it says."""
    monkeypatch.setattr(os, "execvpe", lambda *_: pytest.fail("started"))

    def run(*argv):
        with pytest.raises(SystemExit) as caught:
            main(["serve", *argv])
        assert caught.value.code == 2
        streams = capsys.readouterr()
        assert streams.out == ""
        return streams.err

    return run


def test_it_becomes_the_server(start):
    file, command, environ = start(
        "--dsv4-host-gb", "12", "--model-path", "some model", "--dsv4-verify", "--tp", "8", "--dsv4-transfer=triton"
    )
    assert file == sys.executable
    assert command == [sys.executable, "-m", "sglang.launch_server", "--model-path", "some model", "--tp", "8"]
    ours = {MODELS: "sglang_dsv4.models", "DSV4_HOST_GB": "12", "DSV4_VERIFY": "1", "DSV4_TRANSFER": "triton"}
    assert environ == {**os.environ, **ours}


def test_without_options_only_the_model_package_is_set(start):
    _, _, environ = start("--model-path", "x")
    assert environ == {**os.environ, MODELS: "sglang_dsv4.models"}


def test_settings_of_the_environment_stay_and_options_win(start, monkeypatch):
    monkeypatch.setenv("DSV4_HOST_GB", "3")
    monkeypatch.setenv("DSV4_HOST_COPIES", "5")
    _, _, environ = start("--dsv4-host-gb", "4")
    assert (environ["DSV4_HOST_GB"], environ["DSV4_HOST_COPIES"]) == ("4", "5")


@pytest.mark.parametrize(
    ("argv", "engine"),
    [
        (["--", "--model-path", "x"], ["--model-path", "x"]),
        (["--model-path", "x", "--", "--dry-run", "--dsv4-verify", "--", "--help"],
         ["--model-path", "x", "--dry-run", "--dsv4-verify", "--", "--help"]),
        (["--dsv4-attn-backend", "auto", "--dsv4-host", "1", "--dsv4-host-gb-x=1"],
         ["--dsv4-attn-backend", "auto", "--dsv4-host", "1", "--dsv4-host-gb-x=1"]),
        (["--json-model-override-args", '{"a": "--dsv4-verify"}', "-x", "-1", "--y=", ""],
         ["--json-model-override-args", '{"a": "--dsv4-verify"}', "-x", "-1", "--y=", ""]),
        (["--dsv4-verify", "-tp", "2"], ["-tp", "2"]),
        (["--dsv4-verify", "0", "--tp", "2"], ["--tp", "2"]),
        (["--b", "--a", "--dsv4-host-gb", "1", "--b"], ["--b", "--a", "--b"]),
    ],
)  # fmt: skip
def test_all_other_arguments_are_passed_on_in_order(start, argv, engine):
    assert start(*argv)[1][3:] == engine


def _other_than_default(setting):
    """A text that the setting takes and that changes it."""
    for text in ("2", "0", "1", "torch", "stream"):
        with contextlib.suppress(ValueError):
            if setting.parse(text) != setting.parse(setting.default):
                return text
    raise AssertionError(f"add a value of {setting.variable} here")


@pytest.mark.parametrize("name", list(TABLE))
def test_every_setting_is_an_option(start, name):
    text = _other_than_default(TABLE[name])
    for argv in ([OPTIONS[name], text], [f"{OPTIONS[name]}={text}"]):
        _, command, environ = start(*argv)
        assert command[3:] == []
        assert getattr(read_settings(environ), name) == TABLE[name].parse(text)


def test_help_lists_every_setting_with_its_meaning(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, setting in TABLE.items():
        assert OPTIONS[name] in text
        assert setting.variable in text


def test_no_option_of_ours_is_one_of_the_engine():
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    theirs = {option for action in parser._actions for option in action.option_strings}
    assert "--model-path" in theirs
    assert not theirs & {*OPTIONS.values(), "--dry-run"}


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--dsv4-host-gb", "-1"], "DSV4_HOST_GB='-1'"),
        (["--dsv4-host-gb=12GB"], "DSV4_HOST_GB='12GB'"),
        (["--dsv4-host-gb=", "3"], "DSV4_HOST_GB=''"),
        (["--dsv4-host-copies", "1.5"], "DSV4_HOST_COPIES='1.5'"),
        (["--dsv4-transfer", "cuda"], "DSV4_TRANSFER='cuda'"),
        (["--dsv4-verify", "yes"], "DSV4_VERIFY='yes'"),
        (["--dsv4-enabled=true"], "DSV4_ENABLED='true'"),
        (["--dsv4-host-gb"], "--dsv4-host-gb"),
        (["--dsv4-host-gb", "--tp", "2"], "--dsv4-host-gb"),
        (["--dsv4-host-gb", "--", "2"], "--dsv4-host-gb"),
    ],
)
@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_a_bad_value_is_refused_by_name(refusal, argv, named, dry):
    assert named in refusal(*dry, *argv)


def test_a_bad_environment_is_refused_by_name(refusal, monkeypatch):
    monkeypatch.setenv("DSV4_HOST_GIB", "4")
    assert "unknown setting DSV4_HOST_GIB" in refusal()
    monkeypatch.delenv("DSV4_HOST_GIB")
    monkeypatch.setenv("DSV4_HOST_COPIES", "0")
    assert "DSV4_HOST_COPIES='0'" in refusal()


def test_another_model_package_is_refused(refusal, start, monkeypatch):
    monkeypatch.setenv(MODELS, "their.models")
    assert f"{MODELS}='their.models'" in refusal("--model-path", "x")
    for same in ("sglang_dsv4.models", ""):
        monkeypatch.setenv(MODELS, same)
        assert start()[2][MODELS] == "sglang_dsv4.models"


def test_the_model_package_exists():
    from sglang.srt.models.registry import import_model_classes

    assert "DeepseekV4ForCausalLM" in import_model_classes(serve.MODELS, strict=True)


@pytest.mark.parametrize("entries", [[], [SimpleNamespace(name="sglang_dsv4", value="other.package:install")]])
def test_a_package_that_the_engine_would_not_find_is_refused(refusal, monkeypatch, entries):
    monkeypatch.setattr(serve, "entry_points", lambda group: entries)
    said = refusal("--dry-run")
    assert "pip install --no-deps ." in said
    assert "sglang.srt.plugins" in said


@pytest.mark.parametrize(
    ("listed", "found"),
    [
        ("", True), ("sglang_dsv4", True), ("a, sglang_dsv4 ,b", True), ("a,b", False), (",", False), (" ", False),
        ("sglang-dsv4", False),
    ],
)  # fmt: skip
def test_the_allow_list_is_read_as_the_engine_reads_it(refusal, start, monkeypatch, listed, found):
    from sglang.srt.plugins import load_plugins_by_group

    monkeypatch.setenv("SGLANG_PLUGINS", listed)
    assert ("sglang_dsv4" in load_plugins_by_group("sglang.srt.plugins")) is found
    if found:
        assert start()[2]["SGLANG_PLUGINS"] == listed
    else:
        assert f"SGLANG_PLUGINS={listed!r}" in refusal()


def test_a_dry_run_prints_a_command_that_a_shell_takes(capsys, monkeypatch):
    monkeypatch.setattr(os, "execvpe", lambda *_: pytest.fail("started"))
    ours = ["--dry-run", "--dsv4-host-gb", "0.5", "--dsv4-verify"]
    assert main(["serve", *ours, "--model-path", "a b", "--x", "$y"]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines() == [
        "SGLANG_EXTERNAL_MODEL_PACKAGE=sglang_dsv4.models \\",
        "DSV4_HOST_GB=0.5 \\",
        "DSV4_VERIFY=1 \\",
        f"{shlex.quote(sys.executable)} -m sglang.launch_server --model-path 'a b' --x '$y'",
    ]


def _command(*argv, **environ):
    """The installed command in a process of its own."""
    clean = {name: text for name, text in os.environ.items() if not name.startswith("DSV4_")}
    return subprocess.run(
        [sys.executable, "-m", "sglang_dsv4.cli.main", *argv], env={**clean, **environ}, text=True,
        capture_output=True, timeout=120, check=False,
    )  # fmt: skip


def test_the_started_process_has_it_all(tmp_path):
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "launch_server.py").write_text(
        "import json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\nsys.exit(7)\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = _command("serve", "--dsv4-host-copies", "3", "--", "--port", "1", PYTHONPATH=path, OTHER="kept")
    assert done.returncode == 7, done.stderr
    argv, environ = json.loads(done.stdout)
    assert argv == ["--port", "1"]
    assert environ[MODELS] == "sglang_dsv4.models"
    assert (environ["DSV4_HOST_COPIES"], environ["OTHER"]) == ("3", "kept")


@pytest.mark.parametrize("argv", [["--help"], ["serve", "--help"], ["doctor", "--help"], ["serve", "--dry-run"]])
def test_neither_torch_nor_the_engine_is_imported_for_help(argv):
    code = (
        "import sys\nfrom sglang_dsv4.cli.main import main\n"
        f"try:\n    main({argv!r})\nexcept SystemExit as done:\n    assert not done.code\n"
        "sys.exit(str([name for name in ('torch', 'triton', 'sglang', 'rich') if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=120, check=False)
    assert done.stderr.strip() == "[]"
    assert "sglang" in done.stdout


def test_help_names_every_command_and_others_are_refused(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"{name} " in shown for name in COMMANDS)
    with pytest.raises(SystemExit) as caught:
        main(["server"])
    assert caught.value.code == 2
