"""Is a transfer fast? It is compared with the reference design, the engine's page kernels and a torch gather."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from sglang_dsv4.bench.subject import SETS, Subject, wall


def reference(subject: Subject, tokens: int, count: int) -> tuple[float, float]:
    """Returns the reference design: per-layer gathers to pageable tensors and scatters back (block families only)."""
    buffers = subject.host.buffers
    members = [f for f in buffers.families if f.whole_pages]

    def rows(slots: torch.Tensor, family: Any) -> tuple[torch.Tensor, torch.Tensor]:
        full = slots.long()
        where = full[(full + 1) % family.ratio == 0] // family.ratio
        return where // family.rows, where % family.rows

    def columns(family: Any, inner: torch.Tensor) -> list[torch.Tensor]:
        return [
            family.row_offset(number, inner)[:, None] + torch.arange(plane.row_bytes, device=inner.device)
            for number, plane in enumerate(family.planes)
        ]

    def save(slots: torch.Tensor) -> list[list[list[torch.Tensor]]]:
        kept = []
        for family in members:
            page, inner = rows(slots, family)
            cells = columns(family, inner)
            kept.append([[b[page[:, None], c].cpu() for c in cells] for b in buffers.buffers[family.name]])
        return kept

    def load(kept: list[list[list[torch.Tensor]]], slots: torch.Tensor) -> None:
        for family, layers in zip(members, kept, strict=True):
            page, inner = rows(slots, family)
            cells = columns(family, inner)
            for buffer, planes in zip(buffers.buffers[family.name], layers, strict=True):
                for cell, values in zip(cells, planes, strict=True):
                    buffer[page[:, None], cell] = values.to(buffer.device)

    places = [subject.place(tokens, seed) for seed in range(SETS)]
    kept = save(places[0])
    return wall(lambda i: save(places[i % SETS]), count), wall(lambda i: load(kept, places[i % SETS]), count)


def engine_kernels(subject: Subject, tokens: int, count: int) -> tuple[float, float] | None:
    """Returns the engine's page-transfer kernels for its hierarchical cache over the same pages; None without them."""
    kernel = page_kernel()
    if kernel is None:
        return None
    buffers, device = subject.host.buffers, subject.device
    pages = -(-tokens // 256)
    families = [f for f in buffers.families if f.whole_pages and f.layers]
    host = {
        f.name: [torch.empty(pages, f.page_bytes, dtype=torch.uint8, pin_memory=True) for _ in f.layers]
        for f in families
    }

    def table(tensors: Any) -> torch.Tensor:
        return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.uint64, device=device)

    there = {f.name: table(buffers.buffers[f.name]) for f in families}
    here = {f.name: table(host[f.name]) for f in families}
    local = torch.arange(pages, device=device)
    places = [(subject.place(tokens, seed)[::256] // 256).long() for seed in range(SETS)]

    def move(i: int, save: bool) -> None:
        for f in families:
            sides = (there, here, places[i % SETS], local) if save else (here, there, local, places[i % SETS])
            kernel(sides[0][f.name], sides[1][f.name], sides[2], sides[3], f.page_bytes, len(f.layers))

    return wall(lambda i: move(i, True), count), wall(lambda i: move(i, False), count)


def page_kernel() -> Callable[..., Any] | None:
    """Returns the engine's page kernel; None where it is not built.

    Its arguments: ``(source table, target table, source pages, target pages, page bytes, layers)``.
    """
    try:
        from sgl_kernel.kvcacheio import transfer_kv_all_layer_mla as kernel  # noqa: PLC0415
    except ImportError:
        return None
    found: Callable[..., Any] = kernel
    return found


def gather(device: str, rows: int = 65536, pages: int = 1024, size: int = 2**30) -> dict[str, float]:
    """Returns get_k_and_s of ``rows`` against a torch gather of them, and against a device copy of ``size`` bytes."""
    from triton_ops.planar_rows import get_k_and_s, get_k_and_s_torch  # noqa: PLC0415

    page_size = 256
    buffer = torch.empty(pages, 149760, dtype=torch.uint8, device=device).random_(0, 256)
    places = [torch.randperm(pages * page_size, device=device)[:rows] for _ in range(SETS)]
    out = get_k_and_s(buffer, places[0], page_size)
    ours = events(lambda i: get_k_and_s(buffer, places[i % SETS], page_size, out=out))
    plain = events(lambda i: get_k_and_s_torch(buffer, places[i % SETS], page_size))
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    copy = events(lambda _: target.copy_(source))
    moved = 2 * rows * 584 / ours
    return {
        "ours_ms": ours * 1e3,
        "torch_ms": plain * 1e3,
        "x_torch": plain / ours,
        "of_copy": moved / (2 * size / copy),
    }


def events(run: Callable[[int], Any]) -> float:
    """Returns the median device seconds of ``run``."""
    times = []
    for i in range(34):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(1_000_000)  # the device is busy while the launch is prepared
        start.record()
        run(i)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[3:])
