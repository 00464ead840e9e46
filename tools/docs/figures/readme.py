"""Makes the figures of README."""

from figures.of_results import LONG, Result, asked, cards, option, others, read, table, there, whole


def headline() -> str:
    """Returns README's first figures."""
    return "\n".join(filter(None, (answers(), resume())))


def answers() -> str:
    """Returns how many answers are whole on stock and with this package, and what became of the others."""
    runs = there(("retract-recomputed", "retract-copied"))
    if len(runs) < 2:
        return ""
    result = runs["retract-copied"]
    stock, ours = (run["rows"][0] for run in runs.values())
    what = (
        f"**{whole(stock)} of {asked(stock)} whole answers become {whole(ours)} of {asked(ours)}.** "
        f"The same requests over NIXL on {cards(result)}, a retract every {option(result, '--interval')} steps, "
        f"{option(result, '--timeout')} s a request, sglang {result['versions']['sglang']}."
    )
    stocks, own = (others(row) or "all have the tokens asked for" for row in (stock, ours))
    return (
        f"- {what} With [stock](docs/results/retract-recomputed.json) {stocks}. "
        f"With [this package](docs/results/retract-copied.json) {own}, {ours['verified']} loads compared."
    )


def resume() -> str:
    """Returns what a resume takes, and a recompute."""
    result = read("resume")
    if result is None:
        return ""
    row = next(row for row in result["rows"] if row["tokens"] == LONG)
    card = cards(result)
    return (
        f"- **{row['recompute_ms'] / 1e3:.1f} s become {row['to_token_ms']:.0f} ms** from the moment that a retracted "
        f"request of 64K tokens gets memory again to its next token. {card[0].upper()}{card[1:]}, sglang "
        f"{result['versions']['sglang']}, 43 layers of Flash's shape, {option(result, '--experts')} experts, "
        "random weights."
    )


def drawn() -> list[str]:
    """Returns the words of the picture of a retract that are of a result."""
    result = read("resume")
    rows = [] if result is None else [row for row in result["rows"] if row["tokens"] == LONG]
    return [
        f"{one:.{digits}f} {unit} to the next token"
        for row in rows
        for one, digits, unit in ((row["recompute_ms"] / 1e3, 1, "s"), (row["to_token_ms"], 0, "ms"))
    ]


def speed() -> str:
    """Returns README's table of performance, and what a save and a load cost the scheduler and other requests."""
    runs = there(("transfer", "resume"))
    parts = [speed_table(**runs)] if len(runs) == 2 else []
    return "\n\n".join([*parts, *filter(None, (stall(),))])


def speed_table(transfer: Result, resume: Result) -> str:
    saves = {row["tokens"] + 1: row["save_ms"] for row in transfer["rows"]}
    link = transfer["rows"][0]["save_limit_gbps"]
    says = (
        "Flash's cache of 43 layers. `save` is from [the transfer benchmark](docs/results/transfer.md), "
        f"{cards(transfer)} ({link:.0f} GB/s to the host); the columns behind it are from "
        f"[live servers](docs/results/resume.json), {cards(resume)}."
    )
    rows = [
        (
            f"{row['tokens'] // 1024}K", f"{row['bytes'] / 1e6:.0f} MB", f"{saves[row['tokens']]:.1f} ms",
            f"{row['load_ms']:.1f} ms", f"{row['to_token_ms']:.0f} ms", f"{row['recompute_ms']:,.0f} ms",
            f"{row['to_token_faster']:.0f}x",
        )
        for row in resume["rows"]
    ]  # fmt: skip
    head = ("tokens", "copy", "save", "load", "to the next token", "stock: compute again", "faster")
    return f"{says}\n\n{table(head, rows)}"


def stall() -> str:
    """Returns what a save and a load of 64K tokens cost the scheduler and a request that runs on."""
    result = read("stall")
    if result is None:
        return ""
    (row,) = result["rows"]
    save, load = (
        f"{row[f'{what}_ms_p50']:.2f} ms ({row[f'{what}_ms_p99']:.2f} at the 99th percentile)"
        for what in ("save", "load")
    )
    return (
        f"Of the scheduler's time, a save of 64K tokens takes {save} and a load {load}, medians of {row['saves']}. "
        f"Another running request waits {row['gap_at_save_ms_p50']:.1f} ms for a token at a save and "
        f"{row['gap_at_load_ms_p50']:.1f} ms at a load, {row['gap_ms_p50']:.1f} ms without. The start pinned "
        f"{row['pinned_gib']:.0f} GiB in {row['pinned_s']:.1f} s ([stall](docs/results/stall.json), {cards(result)})."
    )


def exam() -> str:
    """Returns what a trained model answers."""
    runs = there(("exam", "exam-plain"))
    if len(runs) < 2:
        return ""
    pair, plain = ({row["run"]: row for row in run["rows"]} for run in runs.values())
    ours, stock = pair["finals of retracts"], pair["finals of a stock pair with retracts"]
    right = ours["short_right"] + ours["long_right"]
    return (
        f"- No real checkpoint was ever served. A small trained model gives [{right} of {ours['asked']} right answers]"
        f"(docs/results/exam.md) through {ours['retracts']:,} retracts (plain server: "
        f"{plain['finals of retracts']['retracts']:,}), as without; a stock pair completes {stock['answered']} of "
        f"{stock['asked']}."
    )
