"""Results: read from an earlier run, told to the reader, written to a file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import results

from gsm8k.errors import Refused
from gsm8k.score import compare, summarise

SAME = (("prompts_sha256", "--data, --train, --shots, --questions"), ("max_new_tokens", "--max-new-tokens"))


def read_baseline(path: Path, settings: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Answers and summary of an earlier run, refused unless it asked the same."""
    try:
        result = json.loads(path.read_text())
        theirs, rows, seconds = result["settings"], result["rows"], result["summary"]["run"]["seconds"]
        answers = [{name: row[name] for name in row if name not in ("index", "gold", "compare")} for row in rows]
        summary = summarise(answers, seconds)
        compare(answers, answers)  # what fails here would fail after the run
        other = [flags for name, flags in SAME if theirs[name] != settings[name]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused(f"--baseline {path}: not a result of this script: {type(error).__name__}: {error}") from error
    if other:
        raise Refused(f"--baseline {path}: it asked something else; give this run the same {', '.join(other)}")
    if len(answers) != settings["questions"]:
        raise Refused(f"--baseline {path}: {len(answers)} rows of {settings['questions']} questions")
    return answers, summary


def describe(name: str, summary: dict[str, Any]) -> str:
    """One run in one line."""
    if summary["accuracy"] is None:
        return f"{name}: no answer, {summary['failed']} failed"
    low, high = summary["interval95"]
    return (
        f"{name}: accuracy {summary['accuracy']:.4f} ({summary['right']}/{summary['answered']}), "
        f"95% interval {low:.4f} to {high:.4f}; {summary['failed']} failed, {summary['unparsable']} without a number, "
        f"{summary['cut']} cut at --max-new-tokens; median {summary['latency_median_s']:.2f} s, "
        f"all {summary['seconds']:.1f} s"
    )


def report(summary: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Print what a reader wants first."""
    for side in ("run", "compare"):
        if side not in summary:
            continue
        print(describe(side, summary[side]))
        answers = [row if side == "run" else row["compare"] for row in rows]
        failed = [(row["index"], answer) for row, answer in zip(rows, answers, strict=True) if answer["ok"] is None]
        if failed:
            print(f"{side}: first failure, question {failed[0][0]}: {failed[0][1].get('error')}")
        if summary[side].get("prefill_errors"):
            print(f"{side}: {summary[side]['prefill_errors']} answered although the prefill server reported an error")
    if pair := summary.get("pair"):
        p = "none" if pair["p"] is None else f"{pair['p']:.4g}"
        print(
            f"pair: {pair['pairs']} answered by both, b {pair['b']} (only run right), "
            f"c {pair['c']} (only compare right), exact McNemar p {p}; "
            f"{pair['identical']} of {pair['pairs']} texts identical"
        )


def write(
    name: str, folder: Path, rows: list[dict[str, Any]], settings: dict[str, Any], summary: dict[str, Any]
) -> None:
    """Write the result with its settings and summary; print the summary as the last line."""
    sides = [side for side in ("run", "compare") if side in summary]
    bounds = [results.bound(f"{side}: failed requests", "<= 0", summary[side]["failed"]) for side in sides]
    with contextlib.redirect_stdout(None):  # its line has no summary
        path = results.write(name, rows, bounds, folder)
    result = json.loads(path.read_text()) | {"settings": settings, "summary": summary}
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"bench": name, **summary, "bounds": bounds}), flush=True)
