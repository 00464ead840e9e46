"""Makes the figures of README and docs/ from the results: all that stands between markers, such as <!-- speed -->.

A figure whose result is not there is left out. check_results.py compares and writes.
"""

from collections.abc import Callable
from pathlib import Path

from figures import live, pages, readme, sessions, store
from figures.of_results import ROOT

BLOCKS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"headline": readme.headline, "speed": readme.speed, "exam": readme.exam},
    "docs/results/live.md": {
        "under retracts": live.under_retracts,
        "right answers": live.right_answers,
        "beside stock": live.beside_stock,
        "pressure": live.pressure,
        "ranks": live.ranks,
        "steps": live.steps,
    },
    "docs/sessions.md": {
        "agents": sessions.agents,
        "bounds": sessions.agent_bounds,
        "idle": sessions.idle,
        "scenes": sessions.scenes,
        "pair": sessions.pair,
        "million": sessions.million,
        "crowd": sessions.crowd,
        "gaps": sessions.gaps,
    },
    "docs/store.md": {
        "tiers": store.tiers,
        "lives": store.lives,
        "sizes": store.sizes,
        "writes": store.writes,
        "answers": store.answers,
        "damage": store.damage,
    },
    "docs/results/transfer.md": {"transfer": pages.transfer},
    "docs/peers.md": {"one run": pages.one_run},
    "docs/prep.md": {"graphs": pages.graphs},
}


def between(text: str, name: str, made: str) -> str:
    """Returns the text of a page with ``made`` between its markers ``name``. Raises ValueError without such a pair."""
    before, rest = text.split(f"<!-- {name} -->")
    _, after = rest.split(f"<!-- end {name} -->")
    inside = f"\n\n{made}\n\n" if made else "\n"
    return f"{before}<!-- {name} -->{inside}<!-- end {name} -->{after}"


def wanted() -> dict[Path, str]:
    """Returns the text of each page, with the figures of the results."""
    found = {}
    for page, blocks in BLOCKS.items():
        text = (ROOT / page).read_text()
        for name, make in blocks.items():
            text = between(text, name, make())
        found[ROOT / page] = text
    return found
