"""Times a resume against the recompute of the same tokens, on live servers of one machine, in one run.

    python3 -m benchmarks.resume --config benchmarks/flash_config.json --experts 48 -- --mem-fraction-static 0.9

A decode server with this package (fake transfer) retracts the longer of two requests again and again. Each resume gives
the time of the load alone, from an idle device to its last byte, and the time from the begin of the pass that admits
it to its next token at the client. Then a plain stock server prefills as many tokens: the time to its first token.
Arguments after -- go to both servers. Exit status 1 when a bound is missed.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks import client
from sglang_dsv4.bench import results
from sglang_dsv4.livetest import servers
from sglang_dsv4.livetest.in_server import around, note, read

BOUNDS = {4096: 9, 16384: 30, 65536: 100}  # from the admission to the token: times faster than a recompute, by tokens
LEAST_LOAD, LOAD_AT = 300, 65536  # the load alone


def install(notes: Path) -> None:
    """Notes each load: when its pass began, its tokens, bytes and time. Synchronizing makes it later, never earlier."""
    import torch  # noqa: PLC0415 - in the server alone, as all below
    from sglang.srt.disaggregation.decode import DecodePreallocQueue  # noqa: PLC0415

    from sglang_dsv4.pools.copy_service import CopyService  # noqa: PLC0415

    began = 0.0

    def a_pass(original: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal began
        began = time.time()
        return original(*args, **kwargs)

    def load(original: Any, host: Any, copy: Any, *args: Any, **kwargs: Any) -> None:
        torch.cuda.synchronize()
        started = time.perf_counter()
        original(host, copy, *args, **kwargs)
        torch.cuda.synchronize()
        took = (time.perf_counter() - started) * 1e3
        note(notes, admitted=began, tokens=copy.tokens, bytes=copy.nbytes, load_ms=took)

    around(DecodePreallocQueue, "resume_retracted_reqs", a_pass)
    around(CopyService, "load", load)


def after_admission(resume: dict[str, Any], length: int, arrived: dict[int, float]) -> float:
    """Returns milliseconds from the admission to the first token that was not there before it.

    A copy of n tokens was made with n + 1 - length tokens generated (the last token's cache is made again).
    """
    had = resume["tokens"] + 1 - length
    later = [at for number, at in arrived.items() if number > had]
    return (min(later) - resume["admitted"]) * 1e3 if later else float("nan")


def resumes(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures the decode server's part: one row a length."""
    rows = []
    with client.retracting("benchmarks.resume", arguments) as (asked, notes):
        for length in arguments.tokens:
            found: list[dict[str, Any]] = []
            for number in range(arguments.repeats + 1):
                seen = len(read(notes))
                arrived = asked.generate(length, arguments.new_tokens)
                if number:  # the first one warms up
                    found += [one | {"wait": after_admission(one, length, arrived)} for one in read(notes)[seen:]]
            loads, waits = ([one[name] for one in found] for name in ("load_ms", "wait"))
            rows.append({
                "tokens": length, "resumes": len(found), "bytes": found[-1]["bytes"],
                "load_ms": statistics.median(loads), "load_ms_worst": max(loads),
                "to_token_ms": statistics.median(waits), "to_token_ms_worst": max(waits),
                "decode_step_ms": client.typical_gap(arrived),
            })  # fmt: skip
            results.show(rows[-1:])
    return rows


def recomputes(arguments: argparse.Namespace) -> dict[int, list[float]]:
    """Measures the plain stock server's part: milliseconds to the first token, by length."""
    environment = {"DSV4_ENABLED": "0", "SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_dsv4.models"}
    # A small SWA pool (the engine's default here) holds one chunk, and a long prompt then waits for ever.
    given = ["--disable-radix-cache", "--chunked-prefill-size", str(arguments.chunk), "--swa-full-tokens-ratio", "0.5"]
    model, facts = client.model_of(arguments)
    words = [*given, *client.room(arguments), *arguments.server]
    server = servers.launch("plain", str(model), words, environment, arguments.logs / f"{arguments.name}-stock")
    found: dict[int, list[float]] = {length: [] for length in arguments.tokens}
    try:
        servers.wait_until_up([server], arguments.patience)
        asked = client.Client("plain", server.url, facts["vocab_size"])
        for length in arguments.tokens:
            for number in range(arguments.repeats + 1):
                started = time.time()
                arrived = asked.generate(length, 1)
                if number:  # the first one compiles
                    found[length].append((min(arrived.values()) - started) * 1e3)
            print({"tokens": length, "recompute_ms": found[length]}, flush=True)
    finally:
        server.stop()
    return found


def join(rows: list[dict[str, Any]], recomputed: dict[int, list[float]]) -> list[dict[str, Any]]:
    """Returns the rows with the recompute beside them, and how many times faster a resume is."""
    joined = []
    for row in rows:
        recompute = statistics.median(recomputed[row["tokens"]])
        faster = {f"{name}_faster": recompute / row[f"{name}_ms"] for name in ("load", "to_token")}
        joined.append(row | {"recompute_ms": recompute} | faster)
    return joined


def judge(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the bounds: resumes seen at every length, and each that many times faster than a recompute."""
    bounds = [results.bound(f"resumes seen at {row['tokens']} tokens", ">= 3", row["resumes"]) for row in rows]
    for row in (row for row in rows if row["tokens"] in BOUNDS):
        name, least = f"admission to token, recompute by resume, at {row['tokens']} tokens", BOUNDS[row["tokens"]]
        bounds.append(results.bound(name, f">= {least}", row["to_token_faster"]))
        if row["tokens"] == LOAD_AT:
            bounds.append(results.bound("load against recompute at 64K", f">= {LEAST_LOAD}", row["load_faster"]))
    return bounds


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    return servers.parse(client.parser(__doc__, "resume", (4096, 16384, 65536), 40), argv)


def main() -> int:
    arguments = parse()
    servers.end_when_told()
    rows = join(resumes(arguments), recomputes(arguments))
    results.show(rows)
    return results.finish(arguments, rows, judge(rows))


if __name__ == "__main__":
    raise SystemExit(main())
