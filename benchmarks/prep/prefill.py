"""What a prefill's chunk gains on 0.5.17 when the host does not ask the device for the sum of its windows.

    python3 -m benchmarks.prep.prefill [--name prefill-sync] [--out docs/results]

The engine's own builder of what a chunk's layers share, over real tables, in chunks as an overlapping scheduler runs
them: one is launched, then the one before is waited for. The layers are a stand-in, matrix products by the hundred: as
long on the device as their launches are on the host (``even``), half as long and twice as long. Chunks with and without
the wait take turns, in fours. It needs one GPU and sglang 0.5.17, no model, and takes half a minute.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.transfer.before_after import interval
from sglang_dsv4.bench import results
from sglang_dsv4.engine import prefill_chunk
from sglang_dsv4.engine.releases import engine_version
from sglang_dsv4.engine.standalone import boot

RECORDED = Path(__file__).resolve().parents[2] / "docs" / "results"
WINDOW, PAGE, CONTEXT, ROWS, QUERIES = 128, 256, 65_536, 64, 4096
MIXES = {  # (tokens that the tree holds, new tokens) of a chunk's requests
    "one prompt": [(0, QUERIES)],
    "behind other chunks": [(8192, QUERIES)],
    "sixteen with prefix hits": [(64 * number, QUERIES // 16) for number in range(16)],
}
KERNELS, FOUR = 1500, 4
FORWARDS = {"half": 0.5, "even": 1.0, "twice": 2.0}  # device time of the stand-in / host time of its launches


class Chunks:
    """One mix of requests behind each other. wait: as the engine builds it; else as this package does."""

    def __init__(self, requests: list[tuple[int, int]], side: int, device: str) -> None:
        from sglang.srt.layers.attention.dsv4 import sparse_prefill_utils  # noqa: PLC0415

        self._utils, self._engines = sparse_prefill_utils, sparse_prefill_utils.build_swa_token_ids
        noise = torch.Generator().manual_seed(1)
        pool = 1 << 20
        lengths, new = (torch.tensor(column, dtype=torch.int32) for column in zip(
            *((prefix + new, new) for prefix, new in requests), strict=True
        ))  # fmt: skip
        self._given = {
            "seq_lens": lengths.to(device), "extend_seq_lens": new.to(device),
            "req_pool_indices": torch.randperm(ROWS, generator=noise)[: len(requests)].int().to(device),
            "req_to_token": torch.randint(pool, (ROWS, CONTEXT), generator=noise, dtype=torch.int32).to(device),
            "full_to_swa": torch.randint(1 << 19, (pool + 1,), generator=noise).to(device),
        }  # fmt: skip
        self._batch = SimpleNamespace(
            forward_mode=SimpleNamespace(name="EXTEND"), _original_forward_mode=None, seq_lens_cpu=lengths,
            extend_seq_lens_cpu=new.tolist(),
        )  # fmt: skip
        self._x = [torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2)]
        self.built_us: dict[bool, list[float]] = {True: [], False: []}

    def build(self, wait: bool) -> Any:
        """What the layers of a chunk share."""
        backend = SimpleNamespace(forward_metadata=SimpleNamespace(sparse_prefill_cache=None))
        queries = sum(self._batch.extend_seq_lens_cpu)

        def first_layer(*_: Any) -> Any:
            return self._utils.SparsePrefillChunkCache.build(
                **self._given, swa_window_size=WINDOW, swa_page_size=PAGE, num_qo_tokens=queries, max_seq_len=CONTEXT
            )

        if wait:
            return first_layer()
        self._utils.build_swa_token_ids = self._ours
        try:
            return prefill_chunk.forward_prefill_sparse(first_layer, backend, None, 0, 0, self._batch)
        finally:
            self._utils.build_swa_token_ids = self._engines

    def _ours(self, **given: Any) -> Any:
        return prefill_chunk.build_swa_token_ids(self._engines, **given)

    def layers(self) -> None:
        """The stand-in for them."""
        for number in range(KERNELS):
            torch.mm(self._x[number % 2], self._x[number % 2], out=self._x[1 - number % 2])

    def four(self, wait: bool) -> float:
        """Seconds of four chunks, each launched while the one before runs."""
        torch.cuda.synchronize()
        before, started = None, time.perf_counter()
        for _ in range(FOUR):
            began = time.perf_counter()
            self.build(wait)
            self.built_us[wait].append((time.perf_counter() - began) * 1e6)
            self.layers()
            end = torch.cuda.Event()
            end.record()
            if before is not None:
                before.synchronize()
            before = end
        torch.cuda.synchronize()
        return time.perf_counter() - started


def side_for(share: float) -> int:
    """Width of the stand-in's matrices: it takes the device ``share`` of what its launches take the host."""

    def seconds(side: int) -> tuple[float, float]:
        chunks = Chunks(MIXES["one prompt"], side, "cuda")
        chunks.layers()
        torch.cuda.synchronize()
        started = time.perf_counter()
        chunks.layers()
        host = time.perf_counter() - started
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(100_000_000)
        start.record()
        chunks.layers()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3, host

    sides = range(256, 2305, 256)
    host = seconds(sides[0])[1]
    return min(sides, key=lambda side: abs(seconds(side)[0] / host - share))


def differing(device: str) -> int:
    """Of the fields of all mixes, those that are not the engine's byte for byte."""
    found = 0
    for requests in MIXES.values():
        chunks = Chunks(requests, 16, device)
        with_wait, without = (vars(chunks.build(wait)) for wait in (True, False))
        for name, value in with_wait.items():
            same = torch.equal(value, without[name]) if isinstance(value, torch.Tensor) else value == without[name]
            found += not same
    return found


def measured(name: str, forward: str, side: int, turns: int) -> dict[str, Any]:
    """One row. faster: time with the wait / time without it."""
    chunks = Chunks(MIXES[name], side, "cuda")
    for wait in (True, False):
        chunks.four(wait)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(turns):
        for wait in (True, False) if turn % 2 else (False, True):
            seconds[wait].append(chunks.four(wait) / FOUR)
    faster, low, high = interval(seconds[True], seconds[False])
    return {
        "mix": name, "forward": forward, "side": side, "turns": turns,
        "engine_ms": statistics.median(seconds[True]) * 1e3, "ours_ms": statistics.median(seconds[False]) * 1e3,
        "faster": faster, "low": low, "high": high,
        "engine_host_us": statistics.median(chunks.built_us[True]),
        "ours_host_us": statistics.median(chunks.built_us[False]),
    }  # fmt: skip


def main() -> int:
    """Compare, measure, and write after each row: a run that is cut off has what it has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="prefill-sync", help="of the result")
    parser.add_argument("--out", type=Path, default=RECORDED, help="folder of the result")
    parser.add_argument("--turns", type=int, default=30, help="fours of chunks of each kind, a row")
    arguments = parser.parse_args()
    if engine_version() != "0.5.17" or not torch.cuda.is_available():
        print("it needs a GPU and sglang 0.5.17", file=sys.stderr)
        return 2
    boot()
    wrong = differing("cuda")
    bounds, rows = [results.bound("fields that differ", "<= 0", wrong)], []
    for forward, share in FORWARDS.items():
        side = side_for(share)
        for name in MIXES:
            rows.append(measured(name, forward, side, arguments.turns))
            results.show(rows[-1:])
            bounds.append(results.bound(f"{name}, {forward}: faster, low end", ">= 1.0", rows[-1]["low"]))
            left_out = len(FORWARDS) * len(MIXES) - len(rows)
            every = [*bounds, results.bound("rows left out", "<= 0", left_out)]
            results.write(arguments.name, rows, every, arguments.out)
    return results.status(every)


if __name__ == "__main__":
    sys.exit(main())
