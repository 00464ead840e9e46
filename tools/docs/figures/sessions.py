"""Makes the figures of docs/sessions.md."""

from figures.of_results import Result, cards, read, table_if, there

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
        (what, *(agent_bound(runs[name], f"{what}, at {context} tokens", digits) for name, context in columns))
        for what, digits in AGENT_BOUNDS.items()
    ]
    head = ("bound", *(f"{AGENTS[name]}, {context // 1024}K" for name, context in columns))
    return table_if(head, rows if runs else [])


def agent_bound(result: Result, name: str, digits: int) -> str:
    """Returns the value and the limit of a bound; nothing where a run has none of that name."""
    for entry in result["bounds"]:
        if entry["name"] == name:
            value = f"{entry['value']:.{digits}f}"
            return f"{value if entry['ok'] else f'**{value}**'} ({entry['bound']})"
    return ""


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
         *(agent_bound(result, name.format(context), 3) for name in IDLE))
        for context in contexts(result)
    ]  # fmt: skip
    return table_if(("turns a second, by stock's", *IDLE.values()), rows)
