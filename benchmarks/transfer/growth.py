#!/usr/bin/env python3
"""How the cost of a retract grows: with the layers, and with the requests retracted at once.

    python3 -m benchmarks.transfer.growth [--out FOLDER]

A table, a plot, one JSON line last. Requests are saved one after the other, as the scheduler does, then loaded.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from sglang_dsv4.bench import results
from sglang_dsv4.bench.subject import Subject, link_limit, sync
from sglang_dsv4.engine.standalone import FLASH_RATIOS, boot, install_hooks
from sglang_dsv4.settings import Settings

LAYERS = (6, 12, 24, 43, 61)
AT_ONCE = (1, 8, 64)
TOKENS = 16383
TOKENS_AT_ONCE = 4095


def ratios(layers: int) -> tuple[int, ...]:
    """Flash's pattern over ``layers`` layers."""
    return (0, 0, *((4, 128) * layers))[:layers]


def layer_row(layers: int, device: str, limits: tuple[float, float]) -> dict[str, Any]:
    """One request of TOKENS tokens."""
    subject = Subject(ratios(layers), 96, device, {}, "auto")
    save, load = subject.measure(TOKENS, 15)
    nbytes = subject.live_bytes(TOKENS)
    row: dict[str, Any] = {
        "layers": layers, "tokens": TOKENS, "bytes": nbytes, "save_ms": save * 1e3, "load_ms": load * 1e3,
        "save_of_link": nbytes / save / limits[0], "load_of_link": nbytes / load / limits[1],
    }  # fmt: skip
    if device == "cuda":
        row["launches"] = subject.launches(TOKENS)
    subject.host.close()
    return row


def many_row(count: int, subject: Subject, limits: tuple[float, float]) -> dict[str, Any]:
    """``count`` requests at once."""
    places = [subject.place(TOKENS_AT_ONCE, seed) for seed in range(4)]
    saves, loads = [], []
    for _ in range(5):
        sync()
        started = time.perf_counter()
        copies = [subject.pool.get_cpu_copy(places[i % 4], req_pool_index=1 + i % 4) for i in range(count)]
        saves.append(time.perf_counter() - started)
        started = time.perf_counter()
        for i, copy in enumerate(copies):
            subject.pool.load_cpu_copy(copy, places[(i + 1) % 4], req_pool_index=1 + (i + 1) % 4)
        sync()
        loads.append(time.perf_counter() - started)
    save, load = statistics.median(saves[1:]), statistics.median(loads[1:])
    nbytes = count * subject.live_bytes(TOKENS_AT_ONCE)
    return {
        "at_once": count, "tokens": TOKENS_AT_ONCE, "bytes": nbytes, "save_ms": save * 1e3, "load_ms": load * 1e3,
        "save_of_link": nbytes / save / limits[0], "load_of_link": nbytes / load / limits[1],
    }  # fmt: skip


def figures(row: dict[str, Any]) -> list[str]:
    """Megabytes, save and load of a row, as cells of its table."""
    times = (f"{row[f'{way}_ms']:.2f} ({row[f'{way}_of_link']:.2f})" for way in ("save", "load"))
    return [f"{row['bytes'] / 1e6:.0f}", *times]


def table_of(rows: list[dict[str, Any]]) -> list[str]:
    """Both tables as Markdown."""
    lines = ["| layers | MB | save ms (of the link) | load ms (of the link) | (kernels, copies) |"]
    lines += ["|---|---|---|---|---|"]
    for row in (row for row in rows if "layers" in row):
        launches = ", ".join(f"{way} {tuple(found)}" for way, found in row.get("launches", {}).items())
        lines.append(f"| {' | '.join([str(row['layers']), *figures(row), launches])} |")
    lines += ["", "| requests at once | MB | saves ms (of the link) | loads ms (of the link) |", "|---|---|---|---|"]
    lines += [f"| {' | '.join([str(row['at_once']), *figures(row)])} |" for row in rows if "at_once" in row]
    return lines


def judge(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Launches grow with the bytes, not with the layers."""
    deepest = next(row for row in rows if row.get("layers") == LAYERS[-1])
    most = max(sum(found) for found in deepest["launches"].values())
    return [results.bound(f"launches a layer, {LAYERS[-1]} layers", "<= 0.25", most / LAYERS[-1])]


def main() -> None:
    """Measure, print, write."""
    parser = results.parser(__doc__, "growth")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    results.add_out(parser)
    arguments = parser.parse_args()
    boot()
    install_hooks()
    limits = link_limit(arguments.device)
    rows = []
    for layers in LAYERS:
        rows.append(layer_row(layers, arguments.device, limits))
        results.show(rows[-1:])
    subject = Subject(FLASH_RATIOS, 32, arguments.device, {}, "auto")
    subject.host.close()
    subject.pool.host = None
    subject.pool.attach_host(Settings(host_gb=64 * (16 * 1.01e6 + 17e6) / 2**30 + 0.5, host_copies=64))
    subject.host = subject.pool.host
    for count in AT_ONCE:
        rows.append(many_row(count, subject, limits))
        results.show(rows[-1:])
    path = results.write(arguments.name, rows, judge(rows) if arguments.device == "cuda" else [], arguments.out)
    results.page(path, "How the cost of a retract grows", "", table_of(rows))
    # In a process of its own: the engine may have imported modules that change what matplotlib does.
    subprocess.run([sys.executable, Path(__file__).with_name("plot_growth.py"), path], check=True)


if __name__ == "__main__":
    main()
