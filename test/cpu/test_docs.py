"""README and docs/ say what the code says: links, settings, metrics, errors, log lines, commands."""

import ast
import functools
import json
import os
import re
import shlex

import pytest
import tables
import yaml
from fresh_process import run_fresh

from sglang_dsv4 import errors
from sglang_dsv4.cli import main as cli
from sglang_dsv4.metrics import FALLBACKS
from sglang_dsv4.sessions.hints import hints_of
from sglang_dsv4.settings import TABLE
from tools.mutant_table import MUTANTS

ROOT, DOCS = tables.ROOT, tables.DOCS
BOOK = sorted({*DOCS.glob("*.md"), *DOCS.glob("results/live.md")})
OUTSIDE = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md", "tools/README.md")
PAGES = [*(ROOT / name for name in OUTSIDE), *BOOK]
SOURCES = sorted((ROOT / "sglang_dsv4").rglob("*.py"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ERRORS = (DOCS / "errors.md").read_text()
SERIES = {name.partition("{")[0] for name, _, _ in tables.series()}


def blocks(language: str) -> list[tuple[str, str]]:
    """(page, line) of every line in the fenced blocks of a language, and of the commands in a table of a README."""
    found = []
    for page in PAGES:
        text = page.read_text()
        fenced = "\n".join(block for kind, block in FENCE.findall(text) if kind == language)
        lines = fenced.replace("\\\n", " ").splitlines()
        if language == "sh":
            lines += re.findall(r"^\|.*\| `((?:\w+=\S+ )*(?:python3|sglang-dsv4) [^`]+)` \|", text, re.MULTILINE)
        found += [(page.name, line) for line in lines if line.strip() and not line.startswith("#")]
    return found


def anchors(text: str) -> set[str]:
    """Headings, as they are turned into anchors."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    for link in re.findall(r"\]\((?!https?://)([^)\s]+)\)", FENCE.sub("", page.read_text())):
        target, _, anchor = link.partition("#")
        found = (page.parent / target).resolve() if target else page
        assert found.exists(), link
        assert not anchor or anchor in anchors(found.read_text()), link
        assert found != ROOT / "dev" / "LOG.md", "the log is unpolished: say what a reader needs of it on the page"


@pytest.mark.parametrize("page", [DOCS / "structure.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_paths_in_code_quotes_exist(page):
    """They are below the package, or begin with another folder of the repository."""
    quoted = re.findall(r"`([\w./-]+/[\w.-]*)`", page.read_text())
    assert {path for path in quoted if not ((ROOT / path).exists() or (ROOT / "sglang_dsv4" / path).exists())} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_and_seeded_fault_that_is_named_exists(page):
    text = page.read_text()
    for path, name in re.findall(r"`(test/[\w/]+\.py)::(\w+)`", text):
        assert f"\ndef {name}(" in (ROOT / path).read_text(), f"{path}::{name}"
    if page.name == "store-traps.md":
        last = "".join(re.findall(r"^\| \d.*(\|.*)\|$", text, re.MULTILINE))
        faults = set(re.findall(r"`([\w-]+)`", last))
        assert len(faults) > 30 and faults <= {mutant.id for mutant in MUTANTS}


def test_the_tables_of_settings_and_metrics_are_those_of_the_code():
    behind = [page.name for page, text in tables.wanted().items() if page.read_text() != text]
    assert behind == [], "run make docs"


@functools.cache
def help_of(*words: str) -> str:
    done = run_fresh([*words, "--help"])
    assert done.returncode == 0, done.stderr
    return done.stdout


def trouble(line: str) -> str | None:
    """Why a command could not be run; None when what it names exists, or is not this project's."""
    words = [word for word in shlex.split(line, comments=True) if not re.match(r"[A-Z0-9_]+=", word)]
    ours = words[: words.index("--")] if "--" in words else words
    match words:
        case ["make", target, *_]:
            known = re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
            return None if known else f"no target {target}"
        case ["sglang-dsv4", name, *_] if name not in cli.COMMANDS:
            return f"no command {name}"
        case ["sglang-dsv4", name, *_] if name not in {"serve", "bench"}:
            text = help_of("-m", "sglang_dsv4.cli.main", name)
        case ["python3", "-m", module, *_] if module.startswith(("benchmarks.", "tools.")):
            text = help_of("-m", module)
        case ["python3", script, *_] if script != "-m":
            return None if (ROOT / script).exists() else f"no file {script}"
        case _:
            return None
    used = {word.partition("=")[0] for word in ours if word.startswith("--")}
    unknown = sorted(option for option in used if not re.search(rf"{option}\b", text))
    return f"no option {', '.join(unknown)}" if unknown else None


def test_every_command_names_what_exists():
    assert {line: found for _, line in blocks("sh") if (found := trouble(line))} == {}
    assert [trouble(line) for line in ("make bread", "sglang-dsv4 fly", "sglang-dsv4 demo --bogus 3")] == [
        "no target bread", "no command fly", "no option --bogus"
    ]  # fmt: skip


@functools.cache
def messages() -> set[str]:
    """The format of every log call of the package that has a text of its own, placeholders as …."""
    found = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "logger"):
                continue
            if node.func.attr in {"info", "warning", "error", "exception", "critical"}:
                assert isinstance(node.args[0], ast.Constant), f"{path.name}:{node.lineno}: a format that is no literal"
                found.add(re.sub(r"%[-+.\d]*[sdfrx]", "…", node.args[0].value))
    return found


def test_every_log_line_is_explained():
    explained = set(re.findall(r"^\| `([^`]+)` \| (?:info|warning|error) \| \S", ERRORS, re.MULTILINE))
    assert messages() - explained == set(), "not in docs/errors.md"
    assert explained - messages() == set(), "in docs/errors.md, but no longer in the code"


def test_every_quoted_log_line_is_one_of_the_code():
    patterns = [".*".join(re.escape(part) for part in message.split("…")) for message in messages()]
    assert [line for _, line in blocks("log") if not any(re.fullmatch(p, line) for p in patterns)] == []


def test_every_hint_that_is_shown_is_taken():
    from sglang.srt.managers.kv_hints import decode_kv_hints_envelope

    shown = [
        json.loads(shlex.split(line)[-1]) for page, line in blocks("sh") if page == "sessions.md" and "curl" in line
    ]
    assert shown
    for body in shown:
        envelope = decode_kv_hints_envelope(body["kv_hints"]) if "kv_hints" in body else None
        outcomes = hints_of(envelope, body.get("custom_params")).outcomes
        assert outcomes and {outcome for _, outcome in outcomes} == {"taken"}


def test_every_error_is_explained():
    known = {name for name, value in vars(errors).items() if isinstance(value, type)}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and any(isinstance(b, ast.Name) and b.id in known for b in node.bases):
                known.add(node.name)
    explained = set(re.findall(r"^\| `(\w+)` \|", ERRORS.split("## Errors")[1].split("\n## ")[0], re.MULTILINE))
    assert explained == known - {"HostCopyError"}


def test_every_reason_of_a_fallback_is_explained():
    """The table is made of FALLBACKS, whose series are there from the start."""
    counted = set()
    for path in SOURCES:
        counted |= set(re.findall(r"(?:counters\.fallback|_give_up)\(\s*\"(\w+)\"", path.read_text()))
        if "engine" in path.parts:
            counted |= set(re.findall(r"(?:yield|return|reason =) \(?\s*\"([A-Z]\w+)\",\s*f?\"", path.read_text()))
            counted |= set(re.findall(r"\.drop\(saved, \"(\w+)\"", path.read_text()))
    assert len(counted) > 8 and counted <= FALLBACKS.keys()
    assert FALLBACKS.keys() - counted <= vars(errors).keys(), "neither a reason nor an error"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_setting_and_series_that_is_named_exists(page):
    text = page.read_text()
    settings = set(re.findall(r"`(DSV4_(?!\w*_SERVICE_)[A-Z_]*[A-Z])[`=]", text))
    assert settings <= {setting.variable for setting in TABLE.values()}
    named = {name for code in re.findall(r"`([^`\n]+)`", text) for name in re.findall(r"sglang_dsv4_\w+", code)}
    assert named - {"sglang_dsv4_"} <= SERIES


def test_the_dashboard_shows_every_series_and_no_other():
    board = json.loads((DOCS / "grafana" / "sglang-dsv4.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    variables = [variable["query"] for variable in board["templating"]["list"]]
    divided = re.compile(r"_bytes_total.*/.*_seconds_total")
    assert not [query for query in queries if divided.search(query)], "seconds are the scheduler's, not the link's"
    assert {name for query in queries + variables for name in re.findall(r"sglang_dsv4_\w+", query)} == SERIES


def test_the_workflow_runs_ci_and_a_report_of_a_bug_has_the_doctors_output():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    runs, nightly = [step for step in workflow["jobs"]["ci"]["steps"] if "run" in step]
    assert runs == {"run": ".ci/run"} and os.access(ROOT / runs["run"], os.X_OK)
    files = [ROOT / name for name in re.findall(r"test/\S+\.py", nightly["run"])]
    read = "".join(file.read_text() for file in files)
    assert "github.event_name == 'schedule'" in nightly["if"] and all(f'"{name}"' in read for name in nightly["env"])
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text())
    (asked,) = (item for item in form["body"] if item.get("id") == "doctor")
    assert "`sglang-dsv4 doctor -- ARGUMENTS`" in asked["attributes"]["description"]
    assert asked["validations"]["required"]
