"""README.md states what the result files hold, and names files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import update_readme

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("page", update_readme.PAGES, ids=lambda page: page.name)
def test_the_tables_are_those_of_the_results(page):
    text = page.read_text()
    assert "<!-- end " in text
    assert update_readme.rebuilt(text) == text, "run scripts/update_readme.py"


def test_a_changed_figure_is_noticed():
    text = (ROOT / "README.md").read_text()
    start = text.index("<!-- transfer -->")
    where = next(match.start() for match in re.finditer(r"0\.\d\d", text) if match.start() > start)
    assert update_readme.rebuilt(text[:where] + "9.99" + text[where + 4 :]) == text


def test_a_recorded_command_can_be_repeated_elsewhere():
    commands = {path.stem: update_readme.read(path.stem)["command"] for path in update_readme.RESULTS.glob("*.json")}
    assert {name: command for name, command in commands.items() if re.search(r"(^|[ =])/", command)} == {}


def test_its_links_lead_somewhere():
    links = re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / "README.md").read_text())
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


def test_its_targets_are_in_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`?make ([a-z-]+)", (ROOT / "README.md").read_text())):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
