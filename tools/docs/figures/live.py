"""Makes the figures of docs/results/live.md."""

import statistics

from figures.of_results import Result, asked, bound, cards, others, read, table_if, there, whole


def right_answers() -> str:
    """Returns what a trained model answers, token by token, as text, and beside torch."""
    runs = there(("exam", "exam-plain", "gsm8k", "exam-parity"))
    if len(runs) < 4:
        return ""
    pair, plain = ({row["run"]: row for row in runs[name]["rows"]} for name in ("exam", "exam-plain"))
    equal = [
        f"{row['answered'] - row['answers_unlike_control']} of {row['asked']} through {row['retracts']:,} retracts"
        for row in (pair["finals of retracts"], plain["finals of retracts"])
    ]
    stock, (text,) = pair["finals of a stock pair with retracts"], runs["gsm8k"]["rows"]
    apart, sure, prompt_apart, prompt = (
        statistics.mean(row[key] for row in runs["exam-parity"]["rows"])
        for key in ("answer_apart", "answer_mean", "prompt_apart", "prompt_mean")
    )
    return (
        f"Every load was compared. Answers that are the control's, token by token: [of a pair](exam.json) {equal[0]}, "
        f"[of a plain server](exam-plain.json) {equal[1]}. "
        f"A stock pair under retracts completes {stock['answered']} of {stock['asked']}. "
        f"Asked as text by [scripts/run_gsm8k.py](gsm8k.json), {text['right']} of "
        f"{text['asked']} are right through {text['retracts']} retracts.\n\nServed log probabilities differ from "
        f"[torch's](exam-parity.json) by {apart:.0e} in the mean, of answers of which the model is sure ({sure:.0e}); "
        f"of prompts, of which it knows nothing ({prompt:.0f} a token), by {prompt_apart:.2f}: the server has fp8 "
        "weights and cache."
    )


SERVERS = {
    "stress-nixl": "prefill and decode, cache over NIXL",
    "graph-stress": "prefill and decode, metadata in graphs",
    "small-arena-stress": "prefill and decode, host memory for less than one long request",
    "packed-stress": "prefill and decode, page-major pools",
    "node-stress": "decode server, two tensor-parallel ranks that share one copy",
    "node-stress-4": "decode server, four ranks that share one copy, EAGLE 3/1/4",
    "pp-stress": "decode server, two pipeline stages",
    "pp-tp-stress": "decode server, two pipeline stages of two ranks",
    "tp-dp-stress": "plain server, two ranks with data-parallel attention",
    "dp-stress-4": "plain server, four ranks with data-parallel attention",
    "tp-drafts-stress": "plain server, two tensor-parallel ranks, EAGLE 3/1/4",
    "hisparse-stress": "HiSparse decode server, kept rows compared",
    "plain-stress": "plain server",
    "hisparse-plain-stress": "plain HiSparse server; control: stock HiSparse",
    "v41-stress": "DeepSeek-V4.1, 8 layers, NIXL",
    "v41-families": "DeepSeek-V4.1, each family zeroed",
    "v41-engram-stress": "DeepSeek-V4.1 with Engram",
    "v41-plain-stress": "plain V4.1 server with bounded replay",
    "v41-plain-dspark": "plain V4.1 server with DSpark, prompts found in the prefix cache",
    "sessions-stress": "plain server that keeps sessions, conversations of five turns",
    "sessions-tp-stress": "plain server that keeps sessions, two tensor-parallel ranks, conversations of three turns",
    "sessions-tp-stress-4": "plain server that keeps sessions, four tensor-parallel ranks, three turns",
    "sessions-drafts-stress": "plain server that keeps sessions, EAGLE 3/1/4, conversations of four turns",
    "sessions-dp-stress": "plain server that keeps sessions, two ranks with data-parallel attention, four turns",
    "sessions-v41-stress": "plain V4.1 server that keeps sessions, bounded replay and DSpark, four turns",
    "sessions-pd": "prefill server that keeps sessions, decode server, NIXL, conversations of five turns",
    "turns-stress": "plain server, second turns scored",
    "hicache-stress": "plain server with HiCache, second turns scored",
    "sessions-turns-stress": "plain server that keeps sessions, second turns scored",
    "v41-turns-stress": "plain V4.1 server with bounded replay, second turns scored",
    "store-stress": "plain server with a store whose process is killed, conversations of three turns",
    "pd-store-stress": "prefill and decode over one store, answers read back, NIXL, conversations of three turns",
    "pd-store-turns": "prefill and decode over one store, last turns behind answers scored, NIXL, three turns",
    "choices-stress": "prefill and decode, experts returned for each decoded token",
    "choices-plain-stress": "plain server, experts returned for each token",
}
UNDISTURBED = "score of a stock server with HiSparse, no retracts"


def under_retracts() -> str:
    """Returns one row a stress."""
    head = ("servers", "cards", "whole answers", "saved", "loaded and compared", "not loaded", "mean log probability")
    return table_if(head, [stress_row(name, result) for name, result in there(SERVERS).items()])


def stress_row(name: str, result: Result) -> list[object]:
    row, *scores = result["rows"]
    loaded = str(row["loads"]) if row["verified"] == row["loads"] else f"{row['loads']}, {row['verified']} compared"
    if "sessions" in row:
        loaded += f"; of sessions {row['sessions']['verified']}"
    left = ", ".join(f"{count} `{reason}`" for reason, count in row["fallbacks"].items())
    means = {score["run"]: score["mean"] for score in scores if "mean" in score}
    said = [f"{means.get(UNDISTURBED, mean):.3f}" if run == "score of control" else f"{mean:.3f}"
            for run, mean in means.items() if run in {"score of control", "score of retracts"}]  # fmt: skip
    said += [f"{mean:.3f} `{run.split()[2]}`" for run, mean in means.items() if run.endswith(" zeroed")]
    return [
        f"[{SERVERS[name]}]({name}.json)", cards(result), f"{whole(row)} of {asked(row)}", row["saves"], loaded, left,
        ", ".join(said),
    ]  # fmt: skip


BESIDE_STOCK = {
    "retract-recomputed": "stock: computed again by the prefill server",
    "retract-copied": "with this package: a copy",
}


def beside_stock() -> str:
    """Returns one row for stock and one with this package."""
    rows = [
        (
            f"[{BESIDE_STOCK[name]}]({name}.json)", cards(result), row["engine_retracts"],
            f"{whole(row)} of {asked(row)}", others(row), f"{row['stall_p50_ms']:.0f} ms",
        )
        for name, result in there(BESIDE_STOCK).items()
        for row in result["rows"][:1]
    ]  # fmt: skip
    head = ("servers", "cards", "retracts", "whole answers", "the others", "median stall of a retract")
    made = table_if(head, rows)
    return made and f"The same requests over NIXL, with as many forced retracts:\n\n{made}"


PRESSURE = {
    "plain-pressure": "without HiCache",
    "hicache-pressure": "with HiCache",
    "sessions-pressure": "without HiCache; this package's keeps sessions",
}
RATES = {  # bounds, and digits behind the point
    "tokens a second, by stock's: median round": 2, "the same, low end of the 99% interval": 2,
    "retracts, with this package": 0, "retracts, stock": 0,
}  # fmt: skip


def pressure() -> str:
    """Returns one row without and one with HiCache, and one with sessions."""
    rows = [
        (
            f"[{PRESSURE[name]}]({name}.json)",
            cards(result),
            *(f"{bound(result, name):.{digits}f}" for name, digits in RATES.items()),
        )
        for name, result in there(PRESSURE).items()
    ]
    return table_if(("both servers", "cards", *RATES), rows)


def ranks() -> str:
    """Returns what a save and a load take two ranks, and four."""
    found = []
    for name, words in {"node-transfer": "Two ranks", "node-transfer-4": "Four ranks"}.items():
        result = read(name)
        if result is None:
            continue
        alone, all_of_them = result["rows"]
        found.append(
            f"[{words}]({name}.json), {cards(result)}: a save of {all_of_them['tokens']:,} tokens, each rank its part, "
            f"takes {all_of_them['save_ms']:.2f} ms for {alone['save_ms']:.2f} by one, a load "
            f"{all_of_them['load_ms']:.2f} for {alone['load_ms']:.2f}."
        )
        if "plain_save_ms" in all_of_them:
            found.append(
                f"Plain pinned copies of the same bytes by all cards at once, {all_of_them['plain_save_ms']:.2f} and "
                f"{all_of_them['plain_load_ms']:.2f} ms, are the limit."
            )
    return " ".join([*found, "Host bytes are those of one copy."]) if found else ""


def steps() -> str:
    """Returns one row a batch of eager steps."""
    result = read("steps-eager")
    rows = [] if result is None else [
        (row["batch"], f"{row['without_ms']:.1f} ms", f"{row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f})")
        for row in result["rows"]
    ]  # fmt: skip
    made = table_if(("batch", "a step without the hooks", "without / with, 99% interval"), rows)
    return made if result is None else f"[Steps without graphs](steps-eager.json), {cards(result)}:\n\n{made}"
