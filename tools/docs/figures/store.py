"""Makes the figures of docs/store.md."""

from figures.of_results import Result, cards, read, table, table_if, told

LIVES = {
    "store-restart": "killed and started again",
    "store-takeover": "another server goes on, in files",
    "store-takeover-mooncake": "another server goes on, Mooncake over TCP",
}
PAIRS = {
    "pd-store-agents": "64K tokens of Flash's shape, 500 new words a turn",
    "pd-store-busy": "2K, 16 at a time, 200 new words a turn",
}
PREFILLED = "tokens prefilled for a later turn, by its new words"
FIRST, GAP = "first token of a later turn, median, by that without", "gap between tokens, p99, by that without"
NAMES = {"with a store": "this package", "stock with HiCache's files": "stock, HiCache's files"}


def tiers() -> str:
    """Returns the first token of a turn by where its context is."""
    result = read("store-tiers")
    if result is None:
        return ""
    rows = [(row["run"], f"{row['first_token_p50_ms']:,.0f} ms") for row in result["rows"]]
    head = (f"[64K tokens of Flash's shape](results/store-tiers.json), {cards(result)}", "first token, median")
    return table(head, rows)


def lives() -> str:
    """Returns a row for each server whose conversations another life goes on with."""
    rows = []
    for name, said in LIVES.items():
        result = read(name)
        for row in result["rows"] if result else ():
            rows.append((
                f"[{said}](results/{name}.json), {NAMES[row['run']]}", f"{row['whole']} of {row['asked']}",
                f"{row['cached']:.0%}", f"{row['first_token_p50_ms']:,.0f} ms",
                f"{row['cold_first_token_p50_ms']:,.0f} ms",
            ))  # fmt: skip
    head = ("64K tokens, two agents at a time", "whole answers", "tokens cached, of those written",
            "first token of the next turn", "of a new prompt")  # fmt: skip
    return table_if(head, rows)


def sizes() -> str:
    """Returns what a session takes on disk, and how far scores behind it are from computed ones, beside HiCache's."""
    result = read("store-restart")
    if result is None:
        return ""
    nbytes = "; ".join(f"{NAMES[row['run']]}: {row['bytes_a_session'] / 1e6:.0f} MB" for row in result["rows"])
    scores = "; ".join(f"{NAMES[row['run']]}: {row['distance']:.2f} ({row['rounding']:.2f})" for row in result["rows"])
    return (
        f"[Files of a session](results/store-restart.json) of 64K tokens, after two turns: {nbytes}. Mean distance of "
        f"{result['rows'][0]['read']} prompts' log probabilities from computed ones, behind what the files hold (and "
        f"behind the device's cache): {scores}."
    )


def answers() -> str:
    """Returns how many later turns of a pair went on from answers, under retracts, and what they cost."""
    result = read("pd-store-stress")
    if result is None:
        return ""
    row = result["rows"][0]
    hits = row["sessions"]["hits"]
    return (
        f"A pair under {row['saves']} [forced retracts](results/live.md#under-retracts), {cards(result)}: "
        f"{hits['store']} of {sum(hits.values())} later turns with a session had it from the store, each load compared."
        f"\n\n{pairs()}"
    )


def pairs() -> str:
    """Returns a row for each pair that ran beside one without a store."""
    rows = []
    for name, said in PAIRS.items():
        result = read(name)
        if result is None:
            continue
        others = next(row for row in result["rows"] if row["run"] == "all rounds without")
        prefilled = f"{told(result, PREFILLED)}; {others['prefilled_by_new']:.2f} without"
        which = f"[{said}](results/{name}.json), {cards(result)}"
        rows.append((which, prefilled, f"{told(result, FIRST)}, by rounds {by_rounds(result)}", told(result, GAP)))
    head = ("a pair with a store", "tokens prefilled by new words", "first token of a later turn, by that without",
            "gap between tokens, p99, by that without")  # fmt: skip
    return table_if(head, rows)


def by_rounds(result: Result) -> str:
    """Returns the first token of each round's later turns, by that of the pair without a store."""
    waits = {(row["round"], row["run"]): row["first_token_p50_ms"] for row in result["rows"] if "round" in row}
    rounds = sorted({number for number, _ in waits})
    return ", ".join(f"{waits[number, 'with a store'] / waits[number, 'without']:.2f}" for number in rounds)


def damage() -> str:
    """Returns what a second life finds of a store that was damaged, and a turn later."""
    result = read("store-damage")
    if result is None:
        return ""
    now, later = result["rows"]
    return (
        f"After [{now['spoiled']} files were flipped, cut and swapped](results/store-damage.json), {cards(result)}: "
        f"{now['whole']} of {now['asked']} answers whole, {now['cached']:.0%} of the tokens written cached, scores as "
        f"computed. A turn later {later['cached']:.0%} are: bad objects are replaced."
    )


def writes() -> str:
    """Returns the cost of writes for those that decode, and of questions that find nothing."""
    result = read("store-busy")
    if result is None:
        return ""
    values = {bound["name"]: bound["value"] for bound in result["bounds"]}
    step, speed = (
        next(value for name, value in values.items() if name.startswith(word)) for word in ("step of", "written")
    )
    said = (
        f"Decode steps [beside writes](results/store-busy.json) of {speed:.1f} GB/s, {cards(result)}: "
        f"p99 is {step:.3f} of that without a store."
    )
    hangs, idle = read("store-hangs"), read("store-idle")
    if hangs is not None:
        said += (
            f" [Its process suspended](results/store-hangs.json) under load, {cards(hangs)}: {told(hangs, 'step of')}, "
            f"and the latest first token {told(hangs, 'latest first token')}: a request waits for its limit, later "
            "ones are not asked for."
        )
    if idle is not None:
        said += (
            "\n\nTurns a second of a small model [whose cache is all on the device](results/store-idle.json), by those "
            f"without a store: {told(idle, 'turns a second, by those without, median')} in the median, "
            f"{told(idle, 'turns a second, by those without, all')} of all, {told(idle, 'median turn, low end')} at "
            "the low end of the median's interval. Each asks the store for its new words, and finds nothing."
        )
    return said
