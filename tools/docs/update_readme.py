#!/usr/bin/env python3
"""Write the figures of docs/results into the pages, between markers.

    python3 tools/docs/update_readme.py [--check]

Every number in these tables comes from a result file. Prints every bound that a result missed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import recorded
from recorded import read, resumed, there
from sections import DOCS, RESULTS, ROOT, Sections, bring_up_to_date, rebuilt, table

BATCHES = (1, 4, 16)


def headline() -> list[str]:
    """The two figures that matter to a user, with their conditions."""
    stock, ours = (read(f"retract-{how}-0523")["rows"][0] for how in ("recomputed", "copied"))
    asked = sum(ours[end] for end in ("finished", "refused", "lost"))
    long = resumed(65536)
    return [
        f"- **{stock['finished']} of {asked} right answers become {ours['finished']} of {asked}.** "
        f"sglang 0.5.23, the same {asked} requests over NIXL, one prefill and one decode server on one H200, a retract "
        f"forced every 60 steps. Stock refuses {stock['refused']} and loses or spoils {stock['lost']}.",
        f"- **{long['recompute_ms'] / 1e3:.1f} s become {long['to_token_ms']:.0f} ms** "
        "from the moment that a retracted request of 64K tokens gets memory again to its next token. Stock computes "
        "the cache again; this package loads it. One H200, sglang 0.5.17, 43 layers of Flash's shape, 96 experts, "
        "random weights.",
    ]


def performance() -> list[str]:
    """One line a length: what a save and a resume cost, beside a recompute."""
    saves = {row["tokens"] + 1: row for row in read("transfer")["rows"]}
    rows = (
        (f"{row['tokens'] // 1024}K", f"{row['bytes'] / 1e6:.0f} MB",
         f"{saves[row['tokens']]['save_ms']:.1f} ms" if row["tokens"] in saves else "not measured",
         f"{row['load_ms']:.1f} ms", f"{row['to_token_ms']:.0f} ms", f"{row['recompute_ms']:,.0f} ms",
         f"{row['to_token_faster']:.0f}x")
        for row in read("resume")["rows"]
    )  # fmt: skip
    head = ("tokens", "copy", "save", "load", "to the next token", "stock: compute again", "faster")
    return table(head, rows)


def stress() -> list[str]:
    """One line a stress run."""
    head = ("retracts", "finished / refused / lost", "saved / loaded, all compared", "without a copy", "server",
            "answers, beside a control run")  # fmt: skip
    lines = []
    for name, what in there(recorded.STRESS):
        rows = {row["run"]: row for row in read(name)["rows"]}
        run = next(iter(rows.values()))
        without = sum(run.get("fallbacks", {}).values())  # older runs did not count them
        alive = "dies" if "Scheduler hit an exception" in run["trouble"] else "alive"
        ends = f"{run['finished']} / {run['refused']} / {run['lost']}"
        lines.append((what, ends, f"{run['saves']} / {run['loads']}", without or "", alive, beside_control(rows)))
    return table(head, lines)


def beside_control(rows: dict[str, Any]) -> str:
    """The teacher-forced scores of a stress run; of an older run the answers that were the same, token by token."""
    if tokens := rows.get("tokens"):
        same, control = tokens["with_retracts"], tokens["control"]
        return f"the same tokens: {same['same']} of {same['of']} (control with itself: {control['same']})"
    scores = {name.removeprefix("score of "): row for name, row in rows.items() if name.startswith("score of ")}
    return ", ".join(f"{row['mean']:.3f} ({name})" for name, row in scores.items())


def scores_of(name: str) -> list[dict[str, Any]]:
    """The rows of the score, their runs by their bare names."""
    rows = read(name)["rows"] if there(((name, ""),)) else []
    return [row | {"run": row["run"].removeprefix("score of ")} for row in rows if row["run"].startswith("score of ")]


def families() -> list[str]:
    """One line a run of the same requests: undamaged, or with a family zeroed in each load."""
    lines = []
    for row in scores_of(recorded.FAMILIES):
        fall = f"{row['fall']:.3f} (± {row['fall_error']:.3f})" if "fall" in row else ""
        lines.append((row["run"], f"{row['mean']:.3f}", f"{row['unlikely']:.1%}", fall))
    return table(("answers", "mean log probability", "below -4", "fall, request by request"), lines)


def recomputed_v41() -> list[str]:
    """One line a run of the same requests, after retracts and by stock, which computes them again."""
    lines = []
    for row in scores_of(recorded.RECOMPUTED_V41):
        others = (
            f"{row['answers_unlike_control']} of {row['answers']}",
            f"{row['tokens_unlike_control']:,} of {row['tokens']:,}",
        )
        lines.append((row["run"], f"{row['mean']:.3f}", *others))
    return table(("answers", "mean log probability", "unlike the control's", "tokens unlike the control's"), lines)


def steps() -> list[str]:
    """Time of a step without the hooks, and that by its time with them."""
    lines = []
    for name, what in there(recorded.STEPS):
        cells = {
            row["batch"]: f"{row['without_ms']:.2f} ms, {row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
            for row in read(name)["rows"]
            if "batch" in row
        }
        lines.append((f"[{what}]({name}.md)", *(cells.get(batch, "") for batch in BATCHES)))
    return table(("server", *(f"batch {batch}" for batch in BATCHES)), lines)


def recomputed() -> list[str]:
    """One line a server: what became of the requests, and what a retract cost its request."""
    runs = [(name, what, read(name)["rows"][0]) for name, what in there(recorded.RECOMPUTED)]
    lines = (
        (f"[{what}]({name}.json)", run["engine_retracts"], f"{run['finished']} / {run['refused']} / {run['lost']}",
         f"{run['stall_p50_ms']:.0f} ms")
        for name, what, run in runs
    )  # fmt: skip
    return table(("sglang 0.5.23", "retracts", "finished / refused / lost", "median stall of a retract"), lines)


def pressure() -> list[str]:
    """One line a server: the cache that is too small, with this package and without."""
    lines = []
    for name, line in there(recorded.PRESSURE):
        rows = read(name)["rows"]
        for run in ("with this package", "stock"):
            rounds = [row for row in rows if row["run"] == run]
            gaps = next(row for row in rows if row["run"] == f"all of {run}")
            rates = sorted(row["busy_tokens_a_second"] for row in rounds)
            called = {"stock": "control"}.get(run, run)
            mean = next(row["mean"] for row in rows if row["run"] == f"score of {called}")
            lines.append((
                f"[{line}, {run}]({name}.md)", f"{rates[0]:,.0f} to {rates[-1]:,.0f}",
                sum(row["engine_retracts"] for row in rounds), f"{sum(row['prefill_tokens'] for row in rounds):,}",
                " / ".join(f"{gaps[f'gap_{which}_ms']:.0f}" for which in ("p50", "p99", "max")), f"{mean:.3f}",
            ))  # fmt: skip
    head = (
        "server",
        "tokens a second, by round",
        "retracts",
        "tokens prefilled",
        "gaps, ms: p50 / p99 / longest",
        "score",
    )
    return table(head, lines)


def drafts() -> list[str]:
    """One line a server and what came back: tokens a step after a resume, and the time to the 128th token."""
    lines = []
    for name, what in there(recorded.DRAFTS):
        rows = read(name)["rows"]
        steps = {(row["arm"], row["first"], row["last"]): row["mean"] for row in rows if "mean" in row and "arm" in row}
        times = {row["arm"]: row["p50_ms"] for row in rows if row.get("to_token") == 128}
        for arm in dict.fromkeys(arm for arm, *_ in steps):
            shown = (steps.get((arm, *bucket)) for bucket in ((1, 8), (1, 127), (128, 256)))
            means = ("" if mean is None else f"{mean:.2f}" for mean in shown)
            lines.append((f"[{what}]({name}.md)", arm, *means, f"{times[arm]:,.0f}" if arm in times else ""))
    head = ("server", "the draft of a resumed request", "tokens a step, 1 to 8 tokens later", "1 to 127", "128 to 256",
            "median ms to the 128th token")  # fmt: skip
    return table(head, lines)


def plain_resumes() -> list[str]:
    """One line a length: a restore and the recompute of the same request of a plain server."""
    lines = [
        (f"[{line}]({name}.json)", f"{row['tokens']:,}", f"{row['restore_ms']:.0f} ms",
         f"{row['recompute_ms']:,.0f} ms", f"{row['faster']:.1f}x")
        for name, line in there(recorded.PLAIN_RESUME) for row in read(name)["rows"] if "faster" in row
    ]  # fmt: skip
    head = ("sglang", "tokens", "restored: to the next token", "computed again", "faster")
    return table(head, lines)


def second_turns() -> list[str]:
    """One line a run: how far a second turn from the prefix tree falls below the same one on a flushed cache."""
    lines = [
        (f"[{line}]({name}.json)", row["run"], f"{row['cached']:.0%}", f"{row['fall']:.3f} (± {row['fall_error']:.3f})")
        for name, line in there(recorded.SECOND_TURN) for row in read(name)["rows"] if "fall" in row
    ]  # fmt: skip
    head = ("sglang", "first turns", "of a second turn, found in the tree", "its log probabilities fall by")
    return table(head, lines)


def node() -> list[str]:
    """One line a run: two ranks that share an arena, by one alone."""
    lines = []
    for name, line in there(recorded.NODE):
        alone, both = read(name)["rows"]
        times = (
            f"{alone[what]:.2f}, {both[what]:.2f} ms: {both[what] / alone[what]:.2f}" for what in ("save_ms", "load_ms")
        )
        lines.append((f"[{line}]({name}.json)", *times, f"{both['host_bytes'] / alone['host_bytes']:.1f}"))
    head = ("sglang", "save by one rank, by two", "load by one, by both", "host bytes of two by those of one")
    return table(head, lines)


def one_token_extends() -> list[str]:
    """One line a run: how likely answers are that were made in another way than by decode steps."""
    lines = [
        (f"[{line}]({name}.json)", row["run"].removeprefix("score of "), f"{row['mean']:.3f}", f"{row['unlikely']:.1%}")
        for name, line in there(recorded.ONE_TOKEN) for row in read(name)["rows"] if row["run"].startswith("score of ")
    ]  # fmt: skip
    head = ("sglang", "answers", "mean log probability of a token", "below -4")
    return table(head, lines)


def peers() -> list[str]:
    """One line a length at which a peer ran."""
    lines = []
    for row in read("transfer")["rows"]:
        if "reference_save_ms" not in row and "engine_save_ms" not in row:
            continue
        cells = [
            f"{row[f'{who}save_ms']:.1f} / {row[f'{who}load_ms']:.1f}" if f"{who}save_ms" in row else ""
            for who in ("", "reference_", "engine_")
        ]
        lines.append((f"{(row['tokens'] + 1) // 1024}K", *cells))
    return table(("tokens", "ours", "per-layer gathers, pageable", "the engine's page kernels"), lines)


def before_after() -> list[str]:
    """One line a length: the copier of 0.1.0 and the one of 0.2.0 in one run."""
    lines = []
    for row in read("transfer-before-after")["rows"]:
        cells = (
            f"{row[f'{what}_before_ms']:.2f}, {row[f'{what}_after_ms']:.2f} ms: {row[f'{what}_faster']:.3f} "
            "({:.3f} to {:.3f})".format(*row[f"{what}_interval"])
            for what in ("save", "load")
        )
        lines.append((f"{row['tokens'] // 1024}K", *cells))
    return table(("tokens", "save", "load"), lines)


def plugins() -> list[str]:
    """One line a process: what the engine's call of its plugins takes in it."""
    rows = {(row["process"], row["plugin"]): row for row in read("load-plugins")["rows"]}
    lines = []
    for process in dict.fromkeys(process for process, _ in rows):
        costs = (rows[process, plugin] for plugin in ("none", "this", "before"))
        lines.append((process, *(f"{row['seconds']:.2f} s, {row['engine_modules']}" for row in costs)))
    return table(("process", "no plugin", "this package", "version 0.1.0"), lines)


def missed_bounds() -> list[str]:
    """One line a bound that a result missed."""
    lines = (line.partition(": ") for line in missed())
    return table(("result", "bound"), ((f"`{name}.json`", bound) for name, _, bound in lines))


SECTIONS: dict[Path, Sections] = {
    ROOT / "README.md": {"headline": headline, "performance": performance},
    RESULTS / "live.md": {
        "stress": stress,
        "pressure": pressure,
        "drafts": drafts,
        "plain-resumes": plain_resumes,
        "second-turns": second_turns,
        "node": node,
        "one-token": one_token_extends,
        "families": families,
        "v41-recompute": recomputed_v41,
        "recomputed": recomputed,
        "steps": steps,
        "plugins": plugins,
    },
    DOCS / "log.md": {"before-after": before_after, "missed": missed_bounds},
    DOCS / "peers.md": {"peers": peers},
}


def missed() -> list[str]:
    """Bounds that were not met, by result."""
    found = []
    for path in sorted(RESULTS.glob("*.json")):
        found += [
            f"{path.stem}: {bound['name']} {bound['value']} (bound {bound['bound']})"
            for bound in json.loads(path.read_text())["bounds"]
            if not bound["ok"]
        ]
    return found


def wanted() -> dict[Path, str]:
    """What every page that states figures must hold."""
    return {page: rebuilt(page.read_text(), sections) for page, sections in SECTIONS.items()}


if __name__ == "__main__":
    for line in missed():
        print(f"missed  {line}")
    sys.exit(bring_up_to_date(wanted(), __doc__))
