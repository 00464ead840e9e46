"""README and docs/ say what the code and the results say: links, tables, commands, log lines, errors, metrics."""

from __future__ import annotations

import ast
import functools
import json
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import draw_docs
import draw_pictures
import pytest
import sections
import update_readme

from sglang_dsv4 import errors
from sglang_dsv4.cli import main as cli
from sglang_dsv4.cli.serve import split
from sglang_dsv4.settings import TABLE

ROOT, DOCS = sections.ROOT, sections.DOCS
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md")), DOCS / "results" / "live.md"]
ROOMS = [*sorted(ROOT.glob("benchmarks/*/README.md")), ROOT / "tools" / "README.md"]
SOURCES = sorted((ROOT / "sglang_dsv4").rglob("*.py"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ERRORS = (DOCS / "errors.md").read_text()
OPERATING = (DOCS / "operating.md").read_text()


def name_of(value: object) -> str:
    return value.name if isinstance(value, Path) else str(value)


def blocks(*languages: str) -> list[tuple[str, str]]:
    """(page, line) of every line in the fenced blocks of these languages."""
    return [
        (page.name, line)
        for page in PAGES
        for language, block in FENCE.findall(page.read_text())
        if language in languages
        for line in block.replace("\\\n", " ").splitlines()
        if line.strip() and not line.startswith("#")
    ]


# --------------------------------------------------------------------------------------- links, tables


def anchors(page: Path) -> set[str]:
    """What a link may follow a # with: headings, as they are turned into anchors."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *ROOMS], ids=name_of)
def test_every_link_leads_somewhere(page):
    for link in re.findall(r"\]\((?!https?://)([^)\s]+)\)", FENCE.sub("", page.read_text())):
        target, _, anchor = link.partition("#")
        found = (page.parent / target).resolve() if target else page
        assert found.exists(), link
        assert not anchor or anchor in anchors(found), link


def test_the_index_links_every_page():
    links = set(re.findall(r"\]\(([^)#]+)", (DOCS / "index.md").read_text()))
    assert {page.name for page in DOCS.glob("*.md")} - {"index.md"} <= links
    rooms = {folder.name for folder in (ROOT / "benchmarks").iterdir() if list(folder.glob("*.py"))}
    assert rooms == {page.parent.name for page in ROOMS} - {"tools"}
    assert {page.resolve() for page in ROOMS} <= {(DOCS / link).resolve() for link in links}


@pytest.mark.parametrize("made", (draw_docs, update_readme), ids=lambda made: made.__name__)
def test_tables_and_pictures_are_those_of_the_code_and_the_results(made):
    behind = [path.name for path, text in made.wanted().items() if path.read_text() != text]
    assert behind == [], "run make docs, make results"


def test_a_changed_figure_is_noticed():
    text = (ROOT / "README.md").read_text()
    row = update_readme.performance()[-1]
    assert text.count(row) == 1
    changed = text.replace(row, "| wrong |")
    assert sections.rebuilt(changed, update_readme.SECTIONS[ROOT / "README.md"]) == text


def test_a_family_that_has_no_colour_is_drawn(monkeypatch):
    monkeypatch.setattr(draw_pictures, "COLOURS", {})
    assert draw_pictures.UNNAMED in draw_pictures.blocks()


def test_every_step_of_a_requests_life_is_where_the_page_says():
    steps = (DOCS / "structure.md").read_text().split("## The way down")[0]
    named = re.findall(r"`([\w/]+\.py)`((?: `\w+`)*)", steps)
    assert len(named) > 10
    for path, names in named:
        file = next(f for f in (ROOT / path, ROOT / "sglang_dsv4" / path) if f.exists())
        defined = {getattr(node, "name", None) for node in ast.walk(ast.parse(file.read_text()))}
        assert set(re.findall(r"\w+", names)) <= defined, (path, names)


def test_a_recorded_command_can_be_repeated_elsewhere():
    commands = {path.stem: json.loads(path.read_text())["command"] for path in sections.RESULTS.glob("*.json")}
    assert {name: command for name, command in commands.items() if re.search(r"(^|[ =])/", command)} == {}


# -------------------------------------------------------------------------------------------- commands


@functools.cache
def help_of(*words: str) -> str:
    """What ``words --help`` prints."""
    command = [sys.executable, *words, "--help"]
    return subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout


def engine_options() -> str:
    """Where the engine says which options it has."""
    folder = Path(find_spec("sglang").submodule_search_locations[0]) / "srt"
    files = [folder / "server_args.py", *folder.glob("arg_groups/**/*.py")]
    return "\n".join(path.read_text() for path in files if path.exists())


def trouble(line: str) -> str | None:
    """Why a command could not be run; None when everything that it names exists."""
    words = shlex.split(line, comments=True)
    ours = words[: words.index("--")] if "--" in words else words
    used = {word.partition("=")[0] for word in ours if word.startswith("--")}
    match words:
        case ["make", target, *_]:
            known = re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
            return None if known else f"no target {target}"
        case ["python3", "-m", "sglang.launch_server", *rest]:
            return engine_trouble(rest)
        case ["sglang-dsv4", name, *_] if name not in cli.COMMANDS:
            return f"no command {name}"
        case ["sglang-dsv4", "serve", *rest]:
            return engine_trouble(split(rest)[1])
        case ["sglang-dsv4", name, *_]:
            text = help_of("-m", "sglang_dsv4.cli.main", name)
        case ["python3", script, *_] if (ROOT / script).exists():
            text = help_of(script)
        case ["python3", "-m", module, *_] if module.startswith(("benchmarks.", "tools.")):
            text = help_of("-m", module)
        case ["pip", "install", "--no-deps", "."]:
            return None
        case _:
            return "a command that this test does not know"
    unknown = sorted(option for option in used if not re.search(rf"{option}\b", text))
    return f"no option {', '.join(unknown)}" if unknown else None


def engine_trouble(words: list[str]) -> str | None:
    """As ``trouble``, of the engine's own options."""
    known = engine_options()
    fields = [word.partition("=")[0][2:].replace("-", "_") for word in words if word[:2] == "--"]
    unknown = [field for field in fields if not re.search(rf"\b{field}\b", known)]
    return f"the engine has no option {', '.join(unknown)}" if unknown else None


@pytest.mark.parametrize(("page", "line"), blocks("sh"), ids=name_of)
def test_every_command_names_what_exists(page, line):
    assert trouble(line) is None, f"{page}: {line}"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("make bread", "no target bread"),
        ("python3 scripts/nothing.py", "a command that this test does not know"),
        ("sglang-dsv4 fly", "no command fly"),
        ("sglang-dsv4 demo --bogus 3", "no option --bogus"),
        ("sglang-dsv4 serve --dsv4-verfy 1 --model-path M", "the engine has no option dsv4_verfy"),
    ],
)
def test_a_command_that_does_not_exist_is_noticed(line, text):
    assert trouble(line) == text


# ------------------------------------------------------------------ log lines, errors, settings, metrics


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


@pytest.mark.parametrize(("page", "line"), blocks("log"), ids=name_of)
def test_every_quoted_log_line_is_one_of_the_code(page, line):
    patterns = (".+".join(re.escape(part) for part in message.split("…")) for message in messages())
    assert any(re.fullmatch(pattern, line) for pattern in patterns), page


def error_classes() -> set[str]:
    """Names of all classes of the package that are errors of ours."""
    known = {name for name, value in vars(errors).items() if isinstance(value, type)}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and any(isinstance(b, ast.Name) and b.id in known for b in node.bases):
                known.add(node.name)
    return known - {"HostCopyError"}


def test_every_error_is_explained():
    explained = set(re.findall(r"^\| `(\w+)` \|", ERRORS.split("## Errors")[1].split("\n## ")[0], re.MULTILINE))
    assert explained == error_classes()


def test_every_reason_of_a_fallback_is_explained():
    counted = {"HostMemoryExhausted"}
    for path in SOURCES:
        counted |= set(re.findall(r"counters\.fallback\(\s*\"(\w+)\"", path.read_text()))
    section = OPERATING.split("## Requests without a copy")[1].split("\n## ")[0]
    assert counted <= set(re.findall(r"`(\w+)`", section))
    plain = set()
    for path in (ROOT / "sglang_dsv4" / "engine" / "plain").glob("*.py"):
        plain |= set(re.findall(r"(?:yield|return|=) \"([A-Z]\w+)\", f?\"", path.read_text()))
    rows = re.findall(r"^\| (`.*?) \|", (DOCS / "plain-serving.md").read_text(), re.MULTILINE)
    assert plain and plain <= set(re.findall(r"`(\w+)`", " ".join(rows)))


def test_every_setting_that_is_named_exists():
    named = {
        name for page in PAGES for name in re.findall(r"`(DSV4_(?!\w*_SERVICE_)[A-Z_]*[A-Z])[`=]", page.read_text())
    }
    assert named <= {setting.variable for setting in TABLE.values()}


SERIES = {name.partition("{")[0] for name, _, _ in draw_docs.series()}


def test_every_series_that_is_named_exists():
    for page in PAGES:
        named = {
            name
            for code in re.findall(r"`([^`\n]+)`", page.read_text())
            for name in re.findall(r"sglang_dsv4_\w+", code)
        }
        assert {name for name in named if name != "sglang_dsv4_"} <= SERIES, page


def test_the_dashboard_shows_every_series_and_no_other():
    board = json.loads((DOCS / "grafana" / "sglang-dsv4.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    variables = [variable["query"] for variable in board["templating"]["list"]]
    assert {name for query in queries + variables for name in re.findall(r"sglang_dsv4_\w+", query)} == SERIES
