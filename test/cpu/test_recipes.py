"""The table of public recipes says what a server with their settings does, and so does the doctor for any command."""

from pathlib import Path

import pytest

from sglang_dsv4.errors import LayoutRefused
from sglang_dsv4.pools.describe import describe, environment_refusal
from sglang_dsv4.testing.standalone import TINY_RATIOS, PoolSpec, make_pool
from tools.recipes import COVERED, RECIPES, UNIFIED, Recipe, table, verdict

SUPPORTED = Path(__file__).parents[2] / "docs" / "supported.md"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_each_group_gets_its_verdict(recipe: Recipe) -> None:
    found = verdict(recipe)
    assert found == COVERED if recipe.verdict == COVERED else recipe.verdict in found


def test_the_table_in_the_documentation_is_this_one() -> None:
    text = SUPPORTED.read_text()
    assert "\n".join(table()) in text
    covered = sum(recipe.number for recipe in RECIPES if recipe.verdict == COVERED)
    assert f"{covered} of {sum(recipe.number for recipe in RECIPES)}" in text


def test_the_environment_is_refused_with_the_words_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor knows before there is a pool, which the engine builds on ROCm alone."""
    assert environment_refusal(TINY_RATIOS) is None
    monkeypatch.setenv(*next(iter(UNIFIED.items())))
    pool = make_pool(PoolSpec())
    monkeypatch.setattr(pool, "swa_kv_pool", None)
    with pytest.raises(LayoutRefused) as refused:
        describe(pool)
    assert str(refused.value) == environment_refusal(TINY_RATIOS)
