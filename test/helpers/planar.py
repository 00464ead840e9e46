"""What reading and writing rows of planar pages must give, one row after the other in plain Python."""

from __future__ import annotations

import torch

from triton_ops.cases.planar_rows import Format, PlanarCase


def raw(tensors) -> list[bytes]:
    """The bytes of each tensor."""
    return [tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes() for tensor in tensors]


def row_spans(fmt: Format, loc: int, page_size: int, pages: int) -> list[tuple[int, int]]:
    """[start, end) in the buffer of each part of a row; none out of range. The last part is the scale."""
    if not 0 <= loc < pages * page_size:
        return []
    *values, scale = [width for width, _ in fmt.parts]
    page, slot = divmod(loc, page_size)
    base = page * fmt.page_bytes(page_size)
    at, spans = base + slot * sum(values), []
    for width in values:
        spans.append((at, at + width))
        at += width
    at = base + page_size * sum(values) + slot * scale
    return [*spans, (at, at + scale)]


def expected(fmt: Format, buf: torch.Tensor, loc: torch.Tensor, page_size: int) -> list[bytes]:
    """The bytes of each part of the rows at ``loc``; zeros out of range."""
    data = buf.cpu().numpy().tobytes()
    found = [bytearray() for _ in fmt.parts]
    blank = [bytes(width) for width, _ in fmt.parts]
    for row in loc.tolist():
        spans = row_spans(fmt, row, page_size, buf.shape[0])
        for part, piece in zip(found, [data[a:b] for a, b in spans] or blank, strict=True):
            part.extend(piece)
    return [bytes(part) for part in found]


def written(fmt: Format, buf: torch.Tensor, loc: torch.Tensor, parts, page_size: int) -> bytes:
    """All bytes of the buffer after the parts were written to ``loc``."""
    data, pieces = bytearray(buf.cpu().numpy().tobytes()), raw(parts)
    for i, row in enumerate(loc.tolist()):
        spans = row_spans(fmt, row, page_size, buf.shape[0])
        for (start, end), piece in zip(spans, pieces if spans else [], strict=True):
            data[start:end] = piece[i * (end - start) : (i + 1) * (end - start)]
    return bytes(data)


def check(case: PlanarCase, get, put, device: str) -> None:
    """Read the rows of a case and write others, by these ops."""
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
