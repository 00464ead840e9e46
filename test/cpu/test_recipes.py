"""The table of public recipes says what a server with their settings does, and so does the doctor for any command."""

import re
from pathlib import Path

import pytest

from sglang_dsv4.errors import LayoutRefused
from sglang_dsv4.pools.describe import describe, environment_refusal
from sglang_dsv4.testing.standalone import TINY_RATIOS, PoolSpec, make_pool
from tools.recipes import GROUPS, RECIPES, SAID, Recipe, count, is_expected, parsers_refusal, table, verdict

SUPPORTED = Path(__file__).parents[2] / "docs" / "supported.md"
UNIFIED = ("SGLANG_HACK_FLASHMLA_BACKEND", "unified_kv_triton")
COMMANDS = [
    pytest.param(recipe, command, id=f"{group}: {recipe.name} {place}")
    for group, rows in GROUPS.items()
    for recipe in rows
    for place, command in enumerate(recipe.commands)
]


@pytest.mark.parametrize(("recipe", "command"), COMMANDS)
def test_each_recipe_gets_its_verdicts(recipe: Recipe, command: str) -> None:
    found, parsed = verdict(recipe, command), parsers_refusal(command)
    assert is_expected(recipe, found), found
    assert recipe.refused in parsed if recipe.refused else not parsed


def test_a_verdict_that_differs_is_noticed() -> None:
    recipe = next(recipe for recipe in RECIPES if recipe.settings in SAID)
    assert not is_expected(recipe, f"not {recipe.settings}")
    assert not is_expected(recipe._replace(settings="refused: why"), "why")
    assert is_expected(recipe._replace(settings="why"), "this is why")


def test_the_table_in_the_documentation_is_this_one() -> None:
    assert "\n".join(table()) in SUPPORTED.read_text()


def test_every_count_of_the_page_is_counted() -> None:
    """In the sentences above the table; the flag, the releases and the page's own figures are no counts."""
    text = SUPPORTED.read_text().partition("## Public recipes")[2].partition("\n| recipes |")[0]
    said = [int(number) for number in re.findall(r"(?<![\w.-])\d+(?![\w.-]*\d)", text)]
    counts = count(RECIPES)
    assert said == [counts.recipes, 2026, counts.covered, counts.as_written, sum(len(r.commands) for r in RECIPES)]


def test_a_row_among_others_stands_behind_one_with_a_number() -> None:
    for rows in GROUPS.values():
        assert not rows[0].among
        assert not [recipe for recipe in rows if recipe.among and recipe.number]


def test_the_environment_is_refused_with_the_words_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor knows before there is a pool, which the engine builds on ROCm alone."""
    assert environment_refusal(TINY_RATIOS) is None
    monkeypatch.setenv(*UNIFIED)
    pool = make_pool(PoolSpec())
    monkeypatch.setattr(pool, "swa_kv_pool", None)
    with pytest.raises(LayoutRefused) as refused:
        describe(pool)
    assert str(refused.value) == environment_refusal(TINY_RATIOS)
