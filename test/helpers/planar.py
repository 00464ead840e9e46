"""Checks ops on planar rows against their torch twins."""

from __future__ import annotations

import torch

from triton_ops.cases.planar_rows import Format, PlanarCase


def raw(tensors) -> list[bytes]:
    return [tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes() for tensor in tensors]


def expected(fmt: Format, buf: torch.Tensor, loc: torch.Tensor, page_size: int) -> list[bytes]:
    """Returns the bytes of each part of the rows at ``loc``; zeros out of range."""
    return raw(fmt.get_torch(buf, loc, page_size, *fmt.more))


def written(fmt: Format, buf: torch.Tensor, loc: torch.Tensor, parts, page_size: int) -> bytes:
    """Returns all bytes of the buffer after the parts were written to ``loc``."""
    again = buf.clone()
    fmt.put_torch(again, loc, *parts, page_size, *fmt.more)
    return raw([again])[0]


def check(case: PlanarCase, get, put, device: str) -> None:
    """Reads the rows of a case and writes others, by these ops."""
    fmt, page_size, n, _ = case
    buf, loc = fmt.pages(page_size, case.count, device), case.repeated(device)
    before = buf.clone()
    got = get(buf, loc, page_size, *fmt.more)
    assert [(part.dtype, part.view(torch.uint8).shape) for part in got] == [
        (dtype, (n, width)) for width, dtype in fmt.parts
    ]
    assert raw(got) == expected(fmt, buf, loc, page_size)
    assert torch.equal(buf, before)
    loc, parts = case.distinct(device), fmt.rows(n, device)
    wanted = written(fmt, buf, loc, parts, page_size)
    put(buf, loc, *parts, page_size, *fmt.more)
    assert raw([buf]) == [wanted]
