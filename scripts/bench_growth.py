#!/usr/bin/env python3
"""How the cost of a retract grows: with the layers, and with the requests retracted at once.

    python3 scripts/bench_growth.py [--out FOLDER]

A table, a plot, one JSON line last. Requests are saved one after the other, as the scheduler does, then loaded.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import results
import torch

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
    """One request of TOKENS tokens, on both paths."""
    row: dict[str, Any] = {"layers": layers, "tokens": TOKENS}
    for path in ("auto", "triton"):
        subject = Subject(ratios(layers), 96, device, {}, path)
        save, load = subject.measure(TOKENS, 15)
        nbytes = subject.live_bytes(TOKENS)
        row |= {"bytes": nbytes, f"{path}_save_ms": save * 1e3, f"{path}_load_ms": load * 1e3}
        row |= {f"{path}_save_of_link": nbytes / save / limits[0], f"{path}_load_of_link": nbytes / load / limits[1]}
        if device == "cuda":
            row[f"{path}_launches"] = subject.launches(TOKENS)
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


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=results.FOLDER)
    arguments = parser.parse_args()
    boot()
    install_hooks()
    limits = link_limit(arguments.device)
    rows, lines = (
        [],
        ["| layers | MB | save ms (of the link) | load ms (of the link) | direct: save, load | launches |"],
    )
    lines += ["|---|---|---|---|---|---|"]
    for layers in LAYERS:
        row = layer_row(layers, arguments.device, limits)
        rows.append(row)
        cells = [
            f"{row[f'{p}_{w}_ms']:.2f} ({row[f'{p}_{w}_of_link']:.2f})"
            for p in ("auto", "triton")
            for w in ("save", "load")
        ]
        launches = [row.get(f"{p}_launches") for p in ("auto", "triton")]
        lines.append(
            f"| {layers} | {row['bytes'] / 1e6:.0f} | {cells[0]} | {cells[1]} | {cells[2]}, {cells[3]} | {launches} |"
        )
        print(lines[-1], flush=True)
    subject = Subject(FLASH_RATIOS, 32, arguments.device, {}, "auto")
    subject.host.close()
    subject.pool.host = None
    subject.pool.attach_host(Settings(host_gb=64 * (16 * 1.01e6 + 17e6) / 2**30 + 0.5, host_copies=64))
    subject.host = subject.pool.host
    lines += ["", "| requests at once | MB | saves ms (of the link) | loads ms (of the link) |", "|---|---|---|---|"]
    for count in AT_ONCE:
        row = many_row(count, subject, limits)
        rows.append(row)
        save, load = (f"{row[f'{way}_ms']:.2f} ({row[f'{way}_of_link']:.2f})" for way in ("save", "load"))
        lines.append(f"| {count} | {row['bytes'] / 1e6:.0f} | {save} | {load} |")
        print(lines[-1], flush=True)
    bounds = []
    if arguments.device == "cuda":
        direct = [max(kernels for kernels, _ in row["triton_launches"].values()) for row in rows if "layers" in row]
        bounds.append(results.bound(f"launches, kernel path, {LAYERS[0]} to {LAYERS[-1]} layers", "<= 3", max(direct)))
    path = results.write("growth", rows, bounds, arguments.out)
    results.page(path, "How the cost of a retract grows", "", lines)
    # In a process of its own: the engine may have imported modules that change what matplotlib does.
    subprocess.run([sys.executable, Path(__file__).with_name("report_growth.py"), path], check=True)


if __name__ == "__main__":
    main()
