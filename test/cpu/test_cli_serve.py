"""``sglang-dsv4 serve``: what is started, with which environment, and what is refused before it."""

from __future__ import annotations

import argparse
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


def test_it_becomes_the_server(start, monkeypatch):
    monkeypatch.setenv("DSV4_HOST_GB", "3")  # an option wins
    monkeypatch.setenv("DSV4_HOST_COPIES", "5")  # this one stays
    file, command, environ = start(
        "--dsv4-host-gb", "12", "--model-path", "some model", "--dsv4-verify", "--tp", "8", "--dsv4-transfer=torch"
    )
    assert file == sys.executable
    assert command == [sys.executable, "-m", "sglang.launch_server", "--model-path", "some model", "--tp", "8"]
    ours = {MODELS: "sglang_dsv4.models", "DSV4_HOST_GB": "12", "DSV4_VERIFY": "1", "DSV4_TRANSFER": "torch"}
    assert environ == {**os.environ, **ours}


@pytest.mark.parametrize(
    ("argv", "engine"),
    [
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


def test_every_setting_is_an_option_with_its_meaning(start, capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = capsys.readouterr().out
    other = {"enabled": "0", "host_gb": "2", "host_copies": "2", "transfer": "torch", "prep": "stream", "verify": "1"}
    for name, setting in TABLE.items():
        assert OPTIONS[name] in shown
        assert setting.variable in shown
        for argv in ([OPTIONS[name], other[name]], [f"{OPTIONS[name]}={other[name]}"]):
            _, command, environ = start(*argv)
            assert command[3:] == []
            assert getattr(read_settings(environ), name) == setting.parse(other[name]) != setting.parse(setting.default)


def test_no_option_of_ours_is_one_of_the_engine():
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    theirs = {option for action in parser._actions for option in action.option_strings}
    assert "--model-path" in theirs
    assert not theirs & {*OPTIONS.values(), "--dry-run"}


@pytest.mark.parametrize(
    ("argv", "environ", "named"),
    [
        (["--dsv4-host-gb", "-1"], {}, "DSV4_HOST_GB='-1'"),
        (["--dsv4-host-gb=", "3"], {}, "DSV4_HOST_GB=''"),
        (["--dsv4-verify", "yes"], {}, "DSV4_VERIFY='yes'"),
        (["--dsv4-enabled=true"], {}, "DSV4_ENABLED='true'"),
        (["--dsv4-host-gb"], {}, "--dsv4-host-gb"),
        (["--dsv4-host-gb", "--tp", "2"], {}, "--dsv4-host-gb"),
        (["--dsv4-host-gb", "--", "2"], {}, "--dsv4-host-gb"),
        ([], {"DSV4_HOST_GIB": "4"}, "unknown setting DSV4_HOST_GIB"),
        ([], {"DSV4_HOST_COPIES": "0"}, "DSV4_HOST_COPIES='0'"),
        ([], {MODELS: "their.models"}, f"{MODELS}='their.models'"),
    ],
)
@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_what_cannot_be_served_is_refused_by_name(refusal, monkeypatch, argv, environ, named, dry):
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    assert named in refusal(*dry, *argv)


def test_switched_off_it_starts_the_engine_as_it_is(start, monkeypatch):
    monkeypatch.setattr(serve, "entry_points", lambda group: [])
    for name, text in {"DSV4_HOST_GB": "64GB", "DSV4_HOSTGB": "64", MODELS: "their.models"}.items():
        monkeypatch.setenv(name, text)
    _, command, environ = start("--dsv4-enabled", "0", "--tp", "2")
    assert command[3:] == ["--tp", "2"]
    assert environ == {**os.environ, "DSV4_ENABLED": "0"}


def test_the_model_package_exists_and_may_be_set_already(start, monkeypatch):
    from sglang.srt.models.registry import import_model_classes

    assert "DeepseekV4ForCausalLM" in import_model_classes(serve.MODELS, strict=True)
    for same in ("sglang_dsv4.models", ""):
        monkeypatch.setenv(MODELS, same)
        assert start()[2][MODELS] == "sglang_dsv4.models"


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
    assert capsys.readouterr().out.splitlines() == [
        "SGLANG_EXTERNAL_MODEL_PACKAGE=sglang_dsv4.models \\",
        "DSV4_HOST_GB=0.5 \\",
        "DSV4_VERIFY=1 \\",
        f"{shlex.quote(sys.executable)} -m sglang.launch_server --model-path 'a b' --x '$y'",
    ]


def test_the_started_process_has_it_all(tmp_path):
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "launch_server.py").write_text(
        "import json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\nsys.exit(7)\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "sglang_dsv4.cli.main", "serve", "--dsv4-host-copies", "3", "--", "--port", "1"],
        env={**os.environ, "PYTHONPATH": path, "OTHER": "kept"}, text=True, capture_output=True, timeout=120,
        check=False,
    )  # fmt: skip
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
    for argv, status in (["--help"], 0), (["server"], 2):
        with pytest.raises(SystemExit) as caught:
            main(argv)
        assert caught.value.code == status
        shown = capsys.readouterr()
        assert all(name in shown.out + shown.err for name in COMMANDS)
