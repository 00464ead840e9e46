"""``sglang-dsv4 serve``: what is started, with which environment, and what is refused before it."""

import argparse
import os
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest

from sglang_dsv4.cli import serve
from sglang_dsv4.cli.main import main
from sglang_dsv4.settings import TABLE, read_settings

OPTIONS = {name: "--" + setting.variable.lower().replace("_", "-") for name, setting in TABLE.items()}
MODELS = "SGLANG_EXTERNAL_MODEL_PACKAGE"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in (MODELS, "SGLANG_PLUGINS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def start(monkeypatch):
    """Runs ``serve``; returns (file, command, environment) of what it becomes, or its exit status."""

    def execvpe(*becomes):
        raise SystemExit(becomes)

    monkeypatch.setattr(os, "execvpe", execvpe)

    def run(*argv):
        with pytest.raises(SystemExit) as ended:
            main(["serve", *argv])
        return ended.value.code

    return run


@pytest.fixture
def refusal(start, capsys):
    """Runs ``serve``, which must exit with 2 and start nothing; returns what it says."""

    def run(*argv):
        assert start(*argv) == 2
        streams = capsys.readouterr()
        assert streams.out == ""
        return streams.err

    return run


def test_it_becomes_the_server(start, monkeypatch):
    monkeypatch.setenv("DSV4_HOST_GB", "3")  # an option wins
    monkeypatch.setenv("DSV4_SESSIONS", "5")  # this one stays
    monkeypatch.setenv(MODELS, "sglang_dsv4.models")  # may be set already
    file, command, environ = start(
        "--dsv4-host-gb", "12", "--model-path", "some model", "--dsv4-verify", "-tp", "8", "--dsv4-transfer=torch",
        "--dsv4-attn", "auto", "--y=", "", "--", "--dry-run", "--dsv4-verify",
    )  # fmt: skip
    assert file == sys.executable
    assert command == [
        sys.executable, "-m", "sglang.launch_server", "--model-path", "some model", "-tp", "8", "--dsv4-attn", "auto",
        "--y=", "", "--dry-run", "--dsv4-verify",
    ]  # fmt: skip
    ours = {MODELS: "sglang_dsv4.models", "DSV4_HOST_GB": "12", "DSV4_VERIFY": "1", "DSV4_TRANSFER": "torch"}
    assert environ == {**os.environ, **ours}


def test_every_setting_is_an_option(start, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("sixteen or more bytes")
    other = {
        "enabled": "0", "host_gb": "2", "transfer": "torch", "prep": "off", "plain": "off",
        "share": "off", "sessions": "auto", "layout": "page-major", "verify": "1",
        "store": "/nvme/store", "store_config": '{"max_size": "2T"}', "store_model": "a", "store_secret": f"@{secret}",
    }  # fmt: skip
    for name, setting in TABLE.items():
        _, command, environ = start(OPTIONS[name], other[name])
        assert command[3:] == []
        assert getattr(read_settings(environ), name) == setting.parse(other[name]) != setting.parse(setting.default)


def test_no_option_of_ours_is_one_of_the_engine():
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    theirs = {option for action in parser._actions for option in action.option_strings}
    assert "--model-path" in theirs
    assert not theirs & {*OPTIONS.values(), "--dry-run"}
    for option in theirs - {"-h", "--help"}:  # none is taken for a misspelt one of ours
        assert serve.split([option]) == ([], [option])


@pytest.mark.parametrize(("argv", "environ", "named"), [
    (["--dsv4-host-gb", "-1"], {}, "DSV4_HOST_GB='-1'"), (["--dsv4-host-gb=", "3"], {}, "DSV4_HOST_GB=''"),
    (["--dsv4-host-gb", "--tp", "2"], {}, "--dsv4-host-gb"),
    ([], {"DSV4_HOST_GIB": "4"}, "unknown setting DSV4_HOST_GIB"),
    (["--dsv4-hostgb", "3"], {}, "unknown option --dsv4-hostgb: did you mean --dsv4-host-gb?"),
    (["--dsv4-session=auto"], {}, "did you mean --dsv4-sessions?"),
    ([], {MODELS: "their.models"}, f"{MODELS}='their.models'"),
])  # fmt: skip
def test_what_cannot_be_served_is_refused_by_name(refusal, monkeypatch, argv, environ, named):
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    assert named in refusal(*argv)
    assert named in refusal("--dry-run", *argv)


def test_switched_off_it_starts_the_engine_as_it_is(start, monkeypatch):
    monkeypatch.setattr(serve, "entry_points", lambda group: [])
    for name, text in {"DSV4_HOST_GB": "64GB", "DSV4_HOSTGB": "64", MODELS: "their.models"}.items():
        monkeypatch.setenv(name, text)
    _, command, environ = start("--dsv4-enabled", "0", "--tp", "2")
    assert command[3:] == ["--tp", "2"]
    assert environ == {**os.environ, "DSV4_ENABLED": "0"}


@pytest.mark.parametrize("entries", [[], [SimpleNamespace(name="sglang_dsv4", value="other.package:install")]])
def test_a_package_that_the_engine_would_not_find_is_refused(refusal, monkeypatch, entries):
    monkeypatch.setattr(serve, "entry_points", lambda group: entries)
    assert "pip install --no-deps ." in refusal("--dry-run")


@pytest.mark.parametrize(
    ("listed", "found"), [("", True), ("a, sglang_dsv4 ,b", True), ("a,b", False), (",", False), ("sglang-dsv4", False)]
)
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


@pytest.mark.parametrize("argv", [["--help"], ["serve", "--dry-run"]])
def test_neither_torch_nor_the_engine_is_imported_for_help(argv):
    code = (
        "import sys\nfrom sglang_dsv4.cli.main import main\n"
        f"try:\n    main({argv!r})\nexcept SystemExit as done:\n    assert not done.code\n"
        "sys.exit(str([name for name in ('torch', 'triton', 'sglang', 'rich') if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=120, check=False)
    assert done.stderr.strip() == "[]"
    assert "sglang" in done.stdout
