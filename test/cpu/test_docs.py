"""docs/ says what the code does: links, commands, tables, pictures, log lines, errors, metrics."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree as ET

import draw_docs
import pytest

from sglang_dsv4 import errors
from sglang_dsv4.cache import families
from sglang_dsv4.cli import main as cli
from sglang_dsv4.cli.drill import LIVE
from sglang_dsv4.cli.serve import split
from sglang_dsv4.livetest.faults import DRILLS
from sglang_dsv4.settings import TABLE

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
ROOMS = sorted((ROOT / "benchmarks").glob("*/README.md"))
LINKED = [*PAGES, *ROOMS, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
OPERATING = (DOCS / "operating.md").read_text()
SOURCES = sorted((ROOT / "sglang_dsv4").rglob("*.py"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(value: object) -> str:
    return value.name if isinstance(value, Path) else str(value)


def prose(path: Path) -> str:
    """The page without its fenced blocks."""
    return FENCE.sub("", path.read_text())


# ----------------------------------------------------------------------------------------------- links


def anchors(path: Path) -> set[str]:
    """What a link may follow a # with: headings, as they are turned into anchors."""
    headings = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.replace("`", "")).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_every_link_leads_somewhere(page):
    links = re.findall(r"\]\((?!https?://)([^)\s]+)\)", prose(page))
    assert links or page.parent == ROOT
    for link in links:
        target, _, anchor = link.partition("#")
        found = (page.parent / target).resolve() if target else page
        assert found.exists(), link
        assert not anchor or anchor in anchors(found), link


def test_the_index_links_every_page():
    links = set(re.findall(r"\]\(([^)#]+)", (DOCS / "index.md").read_text()))
    assert {page.name for page in PAGES} - {"index.md"} <= links


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_every_file_that_is_named_exists(page):
    names = re.findall(r"`((?:engine|pools|cache|hostmem|transfer|test|scripts|sglang_dsv4)/[\w/.]+\.py)`", prose(page))
    for name in names:
        assert (ROOT / name).exists() or (ROOT / "sglang_dsv4" / name).exists(), name


# -------------------------------------------------------------------------------------------- commands


def commands() -> list[tuple[str, str]]:
    """(page, command line) of every line of every ```sh block."""
    found = []
    for page in [*PAGES, *ROOMS, ROOT / "README.md"]:
        for language, block in FENCE.findall(page.read_text()):
            if language in {"sh", "bash", "shell"}:
                lines = block.replace("\\\n", " ").splitlines()
                found += [(page.name, line) for line in lines if line.strip() and not line.startswith("#")]
    return found


def options_of_script(path: Path) -> set[str]:
    """Every option that a script adds to its parser."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    added = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"]
    return {a.value for call in added for a in call.args if isinstance(a, ast.Constant) and str(a.value)[:1] == "-"}


def options_of_command(name: str) -> set[str]:
    """Every option of ``sglang-dsv4 NAME``."""
    parser = argparse.ArgumentParser()
    importlib.import_module(f"sglang_dsv4.cli.{name}").add_arguments(parser)
    return {option for action in parser._actions for option in action.option_strings}


def engine_options() -> str:
    """Where the engine says which options it has."""
    folder = Path(find_spec("sglang").submodule_search_locations[0]) / "srt"
    files = [folder / "server_args.py", *folder.glob("arg_groups/**/*.py")]
    return "\n".join(path.read_text() for path in files if path.exists())


def program_of(words: list[str]) -> Path | None:
    """The file of this repository that a command runs."""
    match words:
        case ["python3", "-m", module, *_] if module.startswith(("benchmarks.", "tools.")):
            return ROOT.joinpath(*module.split(".")).with_suffix(".py")
        case ["python3", script, *_] if script.startswith(("scripts/", "tools/")):
            return ROOT / script
        case ["sglang-dsv4", "drill", name, *_] if name in LIVE:
            return ROOT / "sglang_dsv4" / "livetest" / f"{name}.py"
    return None


def trouble(line: str) -> str | None:
    """Why a command could not be run; None when everything that it names exists."""
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z]\w*=.*", words[0]):
        variable = words.pop(0).partition("=")[0]
        if variable.startswith("DSV4_") and variable not in {setting.variable for setting in TABLE.values()}:
            return f"no setting {variable}"
    ours = words[: words.index("--")] if "--" in words else words
    used = {word.partition("=")[0] for word in ours if word.startswith("--")}
    program = program_of(words)
    if program is not None:
        if not program.exists():
            return f"no {program.relative_to(ROOT)}"
        unknown = used - options_of_script(program)
        return f"no option {', '.join(sorted(unknown))}" if unknown else None
    match words:
        case ["make", target, *_]:
            makefile = (ROOT / "Makefile").read_text()
            return None if re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE) else f"no target {target}"
        case ["sglang-dsv4", name, *rest]:
            if name not in cli.COMMANDS:
                return f"no command {name}"
            if name == "serve":
                return engine_trouble(split(rest)[1])
            unknown = used - options_of_command(name)
        case ["python3", "-m", "sglang.launch_server", *rest]:
            return engine_trouble(rest)
        case ["pip", "install", "--no-deps", "."]:
            return None if (ROOT / "pyproject.toml").exists() else "nothing to install"
        case _:
            return "a command that this test does not know"
    return f"no option {', '.join(sorted(unknown))}" if unknown else None


def engine_trouble(words: list[str]) -> str | None:
    """As ``trouble``, of the engine's own options."""
    known = engine_options()
    fields = [word.partition("=")[0][2:].replace("-", "_") for word in words if word[:2] == "--"]
    unknown = [field for field in fields if not re.search(rf"\b{field}\b", known)]
    return f"the engine has no option {', '.join(unknown)}" if unknown else None


@pytest.mark.parametrize(("page", "line"), commands(), ids=name_of)
def test_every_command_names_what_exists(page, line):
    assert trouble(line) is None, f"{page}: {line}"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("make bread", "no target bread"),
        ("python3 scripts/nothing.py", "no scripts/nothing.py"),
        ("python3 -m benchmarks.nothing", "no benchmarks/nothing.py"),
        ("python3 -m benchmarks.steps.hooks --colour", "no option --colour"),
        ("python3 scripts/draw_docs.py --colour", "no option --colour"),
        ("sglang-dsv4 fly", "no command fly"),
        ("sglang-dsv4 demo --bogus 3", "no option --bogus"),
        ("sglang-dsv4 bench --turbo", "no option --turbo"),
        ("sglang-dsv4 serve --dsv4-verfy 1 --model-path M", "the engine has no option dsv4_verfy"),
        ("sglang-dsv4 serve --dsv4-verify 1 --modle-path M", "the engine has no option modle_path"),
        ("DSV4_NOTHING=1 make test", "no setting DSV4_NOTHING"),
        ("rm -r /", "a command that this test does not know"),
    ],
)
def test_a_command_that_does_not_exist_is_noticed(line, text):
    assert trouble(line) == text


def test_the_serve_commands_are_accepted(capsys, monkeypatch):
    for name in ("SGLANG_PLUGINS", "SGLANG_EXTERNAL_MODEL_PACKAGE"):
        monkeypatch.delenv(name, raising=False)
    lines = [line for _, line in commands() if line.startswith("sglang-dsv4 serve") and "--dry-run" in line]
    assert lines
    for line in lines:
        assert cli.main(shlex.split(line, comments=True)[1:]) == 0
        assert "-m sglang.launch_server" in capsys.readouterr().out


def test_the_plan_commands_run(capsys):
    lines = [line for _, line in commands() if line.startswith("sglang-dsv4 plan")]
    assert lines
    for line in lines:
        assert cli.main(shlex.split(line, comments=True)[1:]) == 0
        assert capsys.readouterr().out


# ------------------------------------------------------------------------------------ tables, pictures


def test_what_is_drawn_from_the_code_is_as_the_code_is(capsys):
    assert draw_docs.main(["--check"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("page", draw_docs.SECTIONS)
def test_a_changed_table_is_noticed(page):
    text = (DOCS / page).read_text()
    for name, make in draw_docs.SECTIONS[page].items():
        rows = make()[2:]
        assert rows
        assert all(text.count(f"\n{row}\n") == 1 for row in rows), name
        assert draw_docs.rebuilt(text.replace(rows[-1], "| wrong |"), draw_docs.SECTIONS[page]) == text
        with pytest.raises(ValueError, match="unpack"):
            draw_docs.rebuilt(text.replace(f"<!-- {name} -->", ""), draw_docs.SECTIONS[page])


def test_the_rows_that_live_are_as_the_code_says():
    text = (DOCS / "layout.md").read_text()
    formulas = dict(re.findall(r"^\| `(swa_kv|c4_state|c128_state)`.*?\| positions (\S+) to n-1", text, re.MULTILINE))
    starts = {
        "swa_kv": lambda n: families.window_start(families.Geometry((0,)), n),
        "c4_state": families.c4_tail_start,
        "c128_state": families.c128_pending_start,
    }
    assert set(formulas) == set(starts)
    for name, formula in formulas.items():
        assert re.fullmatch(r"[n\d()+*/%-]+", formula), formula
        for n in range(1, 600):
            assert max(0, eval(formula, {"n": n})) == starts[name](n), (name, n)


def test_every_setting_is_explained():
    text = (DOCS / "settings.md").read_text()
    for setting in TABLE.values():
        assert f"| `{setting.variable}` | {setting.default} | {setting.meaning} |" in text
    named = {name for page in PAGES for name in re.findall(r"DSV4_[A-Z_]*[A-Z]", page.read_text())}
    assert named <= {setting.variable for setting in TABLE.values()}


@pytest.mark.parametrize("picture", sorted((DOCS / "img").glob("*.svg")), ids=name_of)
def test_a_picture_is_shown_and_its_words_are_inside(picture):
    assert any(f"](img/{picture.name})" in page.read_text() for page in PAGES)
    svg = ET.parse(picture).getroot()
    width = float(svg.get("width"))
    words = [node for node in svg.iter() if node.tag.endswith("text")]
    assert len(words) > 5
    for node in words:  # letters are about 0.55 of their size wide
        wide = 0.55 * float(node.get("font-size")) * len(node.text)
        left = float(node.get("x")) - wide * {"start": 0.0, "middle": 0.5, "end": 1.0}[node.get("text-anchor")]
        assert left >= 0, node.text
        assert left + wide <= width, node.text


# ------------------------------------------------------------------------- log lines, errors, metrics


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
    explained = set(re.findall(r"^\| `([^`]+)` \| (?:info|warning|error) \| \S", OPERATING, re.MULTILINE))
    assert messages() - explained == set(), "not in docs/operating.md"
    assert explained - messages() == set(), "in docs/operating.md, but no longer in the code"


def error_classes() -> set[str]:
    """Names of all classes of the package that are errors of ours."""
    known = {name for name, value in vars(errors).items() if isinstance(value, type)}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and any(isinstance(b, ast.Name) and b.id in known for b in node.bases):
                known.add(node.name)
    return known - {"HostCopyError"}


def test_every_error_is_explained():
    explained = set(re.findall(r"^\| `(\w+)` \| [^|]+ \| [^|]+ \|$", OPERATING.split("## Errors")[1], re.MULTILINE))
    assert error_classes() - explained == set(), "not in docs/operating.md"
    assert explained - error_classes() - {drill.name for drill in DRILLS} == set()


def test_every_reason_of_a_fallback_is_explained():
    counted = {"HostMemoryExhausted"}
    for path in SOURCES:
        counted |= set(re.findall(r"counters\.fallback\(\s*\"(\w+)\"", path.read_text()))
    section = OPERATING.split("## Requests without a copy")[1].split("\n## ")[0]
    assert counted
    assert counted <= set(re.findall(r"`(\w+)`", section))


SERIES = {name.partition("{")[0] for name, _, _ in draw_docs.series()}
EXPRESSIONS = [code for code in re.findall(r"`([^`\n]+)`", OPERATING) if "sglang_dsv4_" in code and "(" in code]


def test_the_queries_of_the_guide_name_series_that_exist():
    assert len(EXPRESSIONS) > 8
    for expression in EXPRESSIONS:
        assert set(re.findall(r"sglang_dsv4_\w+", expression)) <= SERIES, expression
        assert expression.count("(") == expression.count(")"), expression


def test_the_dashboard_shows_every_series_and_no_other():
    board = json.loads((DOCS / "grafana" / "sglang-dsv4.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    variables = [variable["query"] for variable in board["templating"]["list"]]
    named = {name for query in queries + variables for name in re.findall(r"sglang_dsv4_\w+", query)}
    assert named == SERIES
    assert all(query.count("(") == query.count(")") for query in queries)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]]
    assert len(set(places)) == len(places)


def test_the_drills_are_listed_and_point_into_the_docs(capsys):
    assert cli.main(["drill", "--list"]) == 0
    listed = capsys.readouterr().out
    for drill in DRILLS:
        assert drill.name in listed
        assert f"| `{drill.name}` |" in OPERATING
        for page in re.findall(r"docs/[\w-]+\.md", drill.todo):
            assert (ROOT / page).exists()
