"""Holds the figures of README and docs/ against the results, writes them, or lists the bounds that a result misses.

python3 tools/docs/check_results.py             # lines that differ; exit status 1 when there are any
python3 tools/docs/check_results.py --write     # writes them
python3 tools/docs/check_results.py --missed    # bounds that are missed, to read; exit status 0
"""

import argparse
import difflib
import json

import figures
from figures import of_results, readme


def missed() -> list[str]:
    """Returns one line a result without bounds, and one a bound that is not met."""
    found = []
    for path in sorted(of_results.RESULTS.glob("*.json")):
        bounds = json.loads(path.read_text()).get("bounds", [])
        found += [] if bounds else [f"{path.stem}: no bounds"]
        found += [f"{path.stem}: {b['name']} {b['value']} ({b['bound']})" for b in bounds if b.get("ok") is not True]
    return found


def apart() -> list[str]:
    """Returns the lines in which a page differs from the results."""
    found = []
    for page, text in figures.wanted().items():
        name = str(page.relative_to(figures.ROOT))
        found += difflib.unified_diff(
            page.read_text().splitlines(), text.splitlines(), name, "the results", "", "", 0, ""
        )
    picture = (of_results.DOCS / "img" / "timeline.svg").read_text()
    return found + [f"timeline.svg does not say: {words}" for words in readme.drawn() if words not in picture]


def main() -> int:
    """Returns exit status 1 when a page differs from the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write", action="store_true", help="write the figures")
    what.add_argument("--missed", action="store_true", help="list the bounds that a result misses")
    given = parser.parse_args()
    if given.missed:
        print("\n".join(missed()) or "every bound is met")
        return 0
    if given.write:
        for page, text in figures.wanted().items():
            page.write_text(text)
    found = apart()
    print("\n".join(found) or "README and docs/ say what the results say")
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
