"""Makes the figures of docs/sessions.md."""

from figures.of_results import Result, cards, read, table_if, there, told

PACKAGE, STOCK = "with this package", "stock"
AGENTS = {
    "sessions-agents-flash": "Flash's 43 layers",
    "sessions-agents": "six layers",
    "sessions-agents-tp": "six layers, two ranks",
}
AGENT_BOUNDS = {  # and digits behind the point
    "first token, median, by stock's": 3, "first token, median, by that on the device": 2,
    "turns a second, by stock's": 1, "turns a second, by HiCache's": 1, "save of a turn, median, ms": 2,
}  # fmt: skip


def contexts(result: Result) -> list[int]:
    """Returns the contexts of a run of agents, the longest first."""
    return sorted({row["context"] for row in result["rows"]}, reverse=True)


def agents() -> str:
    """Returns two rows for the agents of each model and context."""
    rows = []
    for name, result in there(AGENTS).items():
        for context in contexts(result):
            of = [row for row in result["rows"] if row["context"] == context]  # one round, in the order of the head
            what = f"[{AGENTS[name]}, {context // 1024}K tokens](results/{name}.json), {cards(result)}"
            rows.append((what, "first token, median", *(f"{row['first_token_p50_ms']:,.0f} ms" for row in of)))
            rows.append(("", "turns a second", *(f"{row['turns_a_second']:.2f}" for row in of)))
    return table_if(("", "", "stock", "HiCache", "sessions", "stock, sessions on the device"), rows)


def agent_bounds() -> str:
    """Returns one row a bound, what misses it in bold."""
    runs = there(AGENTS)
    columns = [(name, context) for name, result in runs.items() for context in contexts(result)]
    rows = [
        (what, *(told(runs[name], f"{what}, at {context} tokens", digits) for name, context in columns))
        for what, digits in AGENT_BOUNDS.items()
    ]
    rows = [row for row in rows if any(row[1:])]
    head = ("bound", *(f"{AGENTS[name]}, {context // 1024}K" for name, context in columns))
    return table_if(head, rows if runs else [])


IDLE = {
    "turns a second, by stock's, median turn, at {} tokens": "median turn",
    "median turn, low end of the 99% interval, at {} tokens": "low end of its 99% interval",
    "turns a second, by stock's, all turns, at {} tokens": "all turns",
}


def idle() -> str:
    """Returns one row a context whose sessions the device holds."""
    result = read("sessions-idle")
    rows = [] if result is None else [
        (f"[six layers, {context // 1024}K](results/sessions-idle.json), {cards(result)}",
         *(told(result, name.format(context), 3) for name in IDLE))
        for context in contexts(result)
    ]  # fmt: skip
    return table_if(("turns a second, by stock's", *IDLE.values()), rows)


def scenes() -> str:
    """Returns one row a scene of real clients: this package's figures, then stock's."""
    result = read("sessions-scenes")
    of = {(row["scene"], row["run"]): row for row in result["rows"]} if result else {}
    rows = []
    for scene in dict.fromkeys(scene for scene, _ in of if (scene, STOCK) in of):
        ours, stock = of[scene, PACKAGE], of[scene, STOCK]
        cells = [f"{row['cached_p50']:,.0f}" for row in (ours, stock)]
        cells += [f"{row['first_token_ms_p50']:.0f} ms" for row in (ours, stock)]
        rows.append((scene, f"{ours['tokens_p50']:,.0f}", *cells))
    return table_if(("scene", "tokens", "cached", "stock", "first token", "stock"), rows)


def pair() -> str:
    """Returns how much of all prompts a pair had cached, with sessions on its prefill server and with stock."""
    ours, stock = read("sessions-pd"), read("sessions-pd-stock")
    if ours is None or stock is None:
        return ""
    row, beside = ours["rows"][0], stock["rows"][0]
    return (
        f"{row['whole']:,} turns of [a pair over NIXL](results/sessions-pd.json) through {row['engine_retracts']:,} "
        f"retracts on its decode server found {row['cached_share']:.0%} of their prompts, each load compared; "
        f"[with stock](results/sessions-pd-stock.json), nothing retracted, {beside['cached_share']:.0%}."
    )


CROWDS = {"sessions-crowd": "", "sessions-crowd-drafts": ", EAGLE", "sessions-crowd-flash": ", Flash's shape"}
CROWD = {
    "tokens a second, by those without, median round, {} running": "tokens a second, median round",
    "the same, low end of the 99% interval, {} running": "low end of its 99% interval",
    "latency of a request, p99, by that without, {} running": "latency, p99",
}


def crowd() -> str:
    """Returns one row a number of running requests that never come back."""
    rows = [
        (f"[{size} running{of}](results/{name}.json), {cards(result)}",
         *(told(result, bound.format(size), 2) for bound in CROWD), f"{in_saves(result, size):.1%}")
        for name, of in CROWDS.items() if (result := read(name)) is not None
        for size in sorted({row["size"] for row in result["rows"]})
    ]  # fmt: skip
    return table_if(("by the server with `off`", *CROWD.values(), "of its time in saves"), rows)


def in_saves(result: Result, size: int) -> float:
    """Returns the share of the time of all rounds with sessions that the scheduler spent in saves."""
    rows = [row for row in result["rows"] if row["size"] == size and row.get("save_seconds")]
    return float(sum(row["save_seconds"] for row in rows) / sum(row["seconds"] for row in rows))


def gaps() -> str:
    """Returns the gaps of others where many end together, and while a long prompt is kept, and waits."""
    together, long, waiting = read("sessions-together"), read("sessions-long"), read("sessions-waiting")
    if together is None or long is None or waiting is None:
        return ""
    p99 = [row["p99_ms"] for row in long["rows"][-2:]]
    return (
        f"Where [256 requests end together](results/sessions-together.json) the longest gap of another "
        f"one changes by {told(together, 'longest gap of another request', 0)} ms, median of all rounds. While [a "
        f"prompt of a million tokens is prefilled and kept](results/sessions-long.json) that of others changes by "
        f"{told(long, 'longest gap of another request', 0)} ms (p99 {p99[0]:.0f} ms, and {p99[1]:.0f} with `off`). "
        f"While [one waits](results/sessions-waiting.json) the median gap is {told(waiting, 'gap, median')} "
        f"of that with `off`, a pass {told(waiting, 'a pass, by one before')}: others end meanwhile, and are saved."
    )


def million() -> str:
    """Returns first and later turns of two conversations of a million tokens."""
    result = read("sessions-1m")
    if result is None:
        return ""
    rows = [
        (what, *(f"{row[key] / 1e3:,.1f} s" for row in result["rows"]))
        for what, key in (("first turn", "cold_first_token_p50_ms"), ("later turn", "first_token_p50_ms"))
    ]
    made = table_if(("first token, median", "stock", "sessions", "stock, session on the device"), rows)
    return (
        f"[Two conversations of a million tokens](results/sessions-1m.json) by turns, {cards(result)}, on a device "
        f"that holds one and a half:\n\n{made}\n\nA later turn by the first one: "
        f"{told(result, 'first token of a later turn')}, by one on the device: "
        f"{told(result, 'first token, median, by that on')}. Stock finds a part of each."
    )
