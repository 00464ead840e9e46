#!/usr/bin/env python3
"""Every kernel once, small, for compute-sanitizer: compared with its torch twin, so that a wrong run fails too.

compute-sanitizer --tool memcheck  --error-exitcode 9 python3 tools/sanitize_kernels.py
compute-sanitizer --tool racecheck --error-exitcode 9 python3 tools/sanitize_kernels.py
"""

from __future__ import annotations

import torch

from triton_ops.copy_pages import PageTable, copy_pages, copy_pages_torch
from triton_ops.copy_rows import EMPTY, copy_rows, copy_rows_torch
from triton_ops.get_index_k_and_s import get_index_k_and_s, get_index_k_and_s_torch
from triton_ops.get_k_and_s import get_k_and_s, get_k_and_s_torch, put_k_and_s
from triton_ops.locate import locate, locate_torch, report_size
from triton_ops.tables import BufferTable


def main() -> None:
    """Run them all on the GPU."""
    device = "cuda"
    wide, narrow = (torch.randint(0, 256, (6, n), dtype=torch.uint8, device=device) for n in (37_440, 1_728))
    table = PageTable.of([wide, narrow], [0, 37_632], 40_960)
    pages, blocks = (torch.tensor(v, device=device) for v in ([5, 1, -1, 3], [0, 2, 1, 9]))
    for pinned in (False, True):
        host = torch.zeros(4 * 40_960, dtype=torch.uint8, device="cpu" if pinned else device, pin_memory=pinned)
        copy_pages(table, host, pages, blocks, save=True)
        torch.cuda.synchronize()
        wanted = torch.zeros(4 * 40_960, dtype=torch.uint8)
        copy_pages_torch(table, wanted, pages.cpu(), blocks.cpu(), save=True)
        assert torch.equal(host.cpu(), wanted), "copy_pages, save"
        copy_pages(table, host, pages, blocks, save=False)

    rows = BufferTable.of([torch.randint(0, 256, (9, 4096), dtype=torch.uint8, device=device) for _ in range(2)])
    segments = [[0, 2, 4096, 0, 8192, 2, 4096, 4096], [0, 2, 20_480, EMPTY, 0, 3, 4096, 0]]
    segments = torch.tensor(segments, device=device)
    image = torch.randint(0, 256, (32_768,), dtype=torch.uint8, device=device)
    twin = BufferTable.of([buffer.clone() for buffer in rows.buffers])
    for save in (False, True):
        copy_rows(rows, image, segments, 2, 12_288, save)
        copy_rows_torch(twin, image, segments.cpu(), 2, 12_288, save)
        assert all(torch.equal(a, b) for a, b in zip(rows.buffers, twin.buffers, strict=True)), "copy_rows"

    template = [[0, 2, 0, 0, 8192, 2, 4096, 4096, 1, 4096], [0, 2, 0, EMPTY, 0, 3, 4096, 0, 2, 4096]]
    template = torch.tensor(template, device=device)
    for save in (False, True):
        copy_rows(rows, image, template, 2, 12_288, save, where=(-1, 3, 6))
        copy_rows_torch(twin, image, template.cpu(), 2, 12_288, save, where=(-1, 3, 6))
        assert all(torch.equal(a, b) for a, b in zip(rows.buffers, twin.buffers, strict=True)), "copy_rows, template"

    slots = torch.arange(512, 512 + 700, dtype=torch.int32, device=device)
    swa_map = torch.arange(2048, device=device)
    swa_map[-1] = -1
    found = []
    for run in (locate, locate_torch):
        out = torch.zeros(3, dtype=torch.int64, device=device), torch.zeros(report_size(700), dtype=torch.int64)
        run(slots, swa_map, 256, 573, (8, 8), out[0], out[1].pin_memory() if run is locate else out[1])
        torch.cuda.synchronize()
        found.append(out[0])
    assert torch.equal(*found), "locate"

    where = torch.randperm(6 * 256, device=device)[:300]
    kv = torch.randint(0, 256, (6, 149_760), dtype=torch.uint8, device=device)
    got = get_k_and_s(kv, where, 256)
    for have, want in zip(got, get_k_and_s_torch(kv, where, 256), strict=True):
        assert torch.equal(have.view(torch.uint8), want.view(torch.uint8)), "get_k_and_s"
    put_k_and_s(kv, where, *got, 256)
    index = torch.randint(0, 256, (6, 64 * 132), dtype=torch.uint8, device=device)
    for have, want in zip(
        get_index_k_and_s(index, where % 384, 64, 128),
        get_index_k_and_s_torch(index, where % 384, 64, 128),
        strict=True,
    ):
        assert torch.equal(have.view(torch.uint8), want.view(torch.uint8)), "get_index_k_and_s"
    torch.cuda.synchronize()
    print("every kernel agrees with its torch twin")


if __name__ == "__main__":
    main()
