"""Makes the figures of docs/results/transfer.md, docs/peers.md and docs/prep.md."""

from figures.of_results import LONG, Row, cards, read, table

ONE_RUN = {2047: "2K", 4095: "4K", 16383: "16K", 65535: "64K"}


def one_run() -> str:
    """Returns this package beside its peers, of the same run."""
    result = read("transfer")
    if result is None:
        return ""
    rows = [
        [ONE_RUN[row["tokens"]], *(pair(row, f"{prefix}{{}}_ms") for prefix in ("", "reference_", "engine_"))]
        for row in result["rows"]
        if row["tokens"] in ONE_RUN
    ]
    made = table(("tokens", "this package", "per-layer gathers", "the engine's page kernels"), rows)
    return f"Milliseconds, save / load, on {cards(result)} ([transfer](results/transfer.md)):\n\n{made}"


def transfer() -> str:
    """Returns a save and a load of each length beside the link and the peers, and every bound of that run."""
    result = read("transfer")
    if result is None:
        return ""
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    limits = [result["rows"][0][f"{way}_limit_gbps"] for way in ("save", "load")]
    own = [(f"{way}_ms", f"{way}_of_link") for way in ("save", "load")]
    rows = [
        [
            f"{row['tokens']:,}", f"{row['bytes'] / 1e6:.1f}", *(f"{row[key]:.2f}" for keys in own for key in keys),
            pair(row, "reference_{}_ms"), pair(row, "engine_{}_gbps"),
        ]
        for row in result["rows"]
    ]  # fmt: skip
    bounds = [[one["name"], one["bound"], one["value"], "yes" if one["ok"] else "no"] for one in result["bounds"]]
    return "\n\n".join((
        f"{result['machine']['gpu']}, {result['date']}, {versions}. `{result['command']}`",
        f"The link is the 1 GiB pinned copy of the same run: {limits[0]:.1f} GB/s to the host, {limits[1]:.1f} GB/s "
        "back. Pages are scattered at random.",
        table(
            ("tokens", "MB", "save ms", "of the link", "load ms", "of the link", "per-layer gathers, save / load ms",
             "engine's page kernels, save / load GB/s"), rows,
        ),
        table(("figure", "bound", "measured", "met"), bounds),
    ))  # fmt: skip


def pair(row: Row, name: str) -> str:
    """Returns the save and the load of one column, where it was measured."""
    keys = [name.format(way) for way in ("save", "load")]
    return " / ".join(f"{row[key]:.1f}" for key in keys) if keys[0] in row else ""


GRAPHS = {1: "a step without drafts", 4: "verification of 3 drafts"}  # by query tokens of a request


def graphs() -> str:
    """Returns the device time of decode metadata in graphs."""
    result = read("prep")
    if result is None:
        return ""
    rows = [row for row in result["rows"] if row["way"] == "graph"]

    def span(queries: int, key: str, context: int) -> str:
        found = [row[key] for row in rows if (row["queries"], row["context"]) == (queries, context)]
        return f"{min(found):.0f} to {max(found):.0f} us"

    columns = (("engine_us", 1 << 20), ("engine_us", LONG), ("ours_us", 1 << 20))
    cells = [[said, *(span(queries, *column) for column in columns)] for queries, said in GRAPHS.items()]
    batches = sorted({row["batch"] for row in rows})
    head = (f"a graph of {batches[0]} to {batches[-1]} requests", "engine, 1M", "engine, 64K", "this package, 1M")
    return f"Device time of one build, {cards(result)} ([prep](results/prep.json)):\n\n{table(head, cells)}"
