"""get_k_and_s and put_k_and_s against their torch twins, a byte-by-byte oracle and the stock store."""

from __future__ import annotations

import importlib.util
import os
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported

from hypothesis import given, settings
from hypothesis import strategies as st
from row_locations import INT64_MAX, INT64_MIN, distinct, hostile, locations, mixed

from triton_ops.get_k_and_s import get_k_and_s, get_k_and_s_torch, put_k_and_s, put_k_and_s_torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
GETS = pytest.mark.parametrize("get", [get_k_and_s, get_k_and_s_torch])
PUTS = pytest.mark.parametrize("put", [put_k_and_s, put_k_and_s_torch])
GETS_AND_PUTS = pytest.mark.parametrize(
    ("get", "put"), [(get_k_and_s, put_k_and_s), (get_k_and_s_torch, put_k_and_s_torch)]
)

VALUE, SCALE = 576, 8
PAGE_BYTES = {256: 149_760, 64: 37_440, 2: 1_728}
GUARD = 4096  # a multiple of 16: the buffer between two guards keeps the alignment of an allocation


def random_bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(DEVICE)


def pages(page_size: int, num_pages: int, seed: int = 0) -> torch.Tensor:
    return random_bytes(num_pages, PAGE_BYTES[page_size], seed=seed)


def rows(n: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of random bytes, NaN patterns included, and every pad byte free."""
    return (
        random_bytes(n, 448, seed=seed).view(torch.float8_e4m3fn),
        random_bytes(n, 128, seed=seed + 1).view(torch.bfloat16),
        random_bytes(n, 8, seed=seed + 2),
    )


def raw(tensors) -> list[bytes]:
    return [tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes() for tensor in tensors]


def row_spans(loc: int, page_size: int, num_pages: int) -> list[tuple[int, int]]:
    """[start, end) in the buffer of a row's NoPE, RoPE and scale bytes; none out of range."""
    if not 0 <= loc < num_pages * page_size:
        return []
    page, slot = divmod(loc, page_size)
    value = page * PAGE_BYTES[page_size] + slot * VALUE
    scale = page * PAGE_BYTES[page_size] + page_size * VALUE + slot * SCALE
    return [(value, value + 448), (value + 448, value + VALUE), (scale, scale + SCALE)]


def oracle_get(buf: torch.Tensor, loc: torch.Tensor, page_size: int) -> list[bytes]:
    data = buf.cpu().numpy().tobytes()
    found = ([], [], [])
    for row in loc.tolist():
        spans = row_spans(row, page_size, buf.shape[0])
        blank = (bytes(448), bytes(128), bytes(8))
        for part, piece in zip(found, [data[a:b] for a, b in spans] or blank, strict=True):
            part.append(piece)
    return [b"".join(part) for part in found]


def oracle_put(buf: torch.Tensor, loc: torch.Tensor, parts, page_size: int) -> bytes:
    data = bytearray(buf.cpu().numpy().tobytes())
    pieces = raw(parts)
    for i, row in enumerate(loc.tolist()):
        spans = row_spans(row, page_size, buf.shape[0])
        for (start, end), piece in zip(spans, pieces if spans else [], strict=True):
            data[start:end] = piece[i * (end - start) : (i + 1) * (end - start)]
    return bytes(data)


CASES = [
    pytest.param(page_size, n, dtype, id=f"page{page_size}-n{n}-{str(dtype)[6:]}")
    for row, page_size in enumerate(PAGE_BYTES)
    for column, n in enumerate((0, 1, 63, 64, 65))
    for dtype in ((torch.int32, torch.int64)[(row + column) % 2],)
]
LONG = 1001 if INTERPRETED else 4001  # several programs, the last of them partly filled
LONG_GET = pytest.param(256, LONG, torch.int64, id="page256-long-int64")
LONG_PUT = pytest.param(2, LONG, torch.int32, id="page2-long-int32")


def page_count(page_size: int, n: int) -> int:
    return 3 + n // page_size


@pytest.mark.parametrize(("page_size", "n", "dtype"), [*CASES, LONG_GET])
def test_get_equals_twin_and_oracle(page_size, n, dtype):
    buf = pages(page_size, page_count(page_size, n))
    loc = locations(n, buf.shape[0] * page_size, dtype)
    before = buf.clone()
    got = get_k_and_s(buf, loc, page_size)
    assert [(t.dtype, tuple(t.shape)) for t in got] == [
        (torch.float8_e4m3fn, (n, 448)),
        (torch.bfloat16, (n, 64)),
        (torch.uint8, (n, 8)),
    ]
    assert raw(got) == raw(get_k_and_s_torch(buf, loc, page_size))
    assert raw(got) == oracle_get(buf, loc, page_size)
    assert torch.equal(buf, before)


@pytest.mark.parametrize(("page_size", "n", "dtype"), [*CASES, LONG_PUT])
def test_put_equals_twin_and_oracle(page_size, n, dtype):
    buf = pages(page_size, page_count(page_size, n))
    loc = distinct(n, buf.shape[0] * page_size, dtype)
    parts = rows(n)
    wanted = oracle_put(buf, loc, parts, page_size)
    twin = buf.clone()
    put_k_and_s(buf, loc, *parts, page_size)
    put_k_and_s_torch(twin, loc, *parts, page_size)
    assert raw([buf])[0] == wanted
    assert raw([twin])[0] == wanted


@pytest.mark.parametrize("page_size", [64, 2])
@PUTS
def test_put_of_a_repeated_row(put, page_size):
    buf = pages(page_size, 2)
    loc = torch.tensor([3, 0, 3, 3, 0], device=DEVICE)
    parts = tuple(part[loc] for part in rows(4))
    wanted = oracle_put(buf, loc, parts, page_size)
    put(buf, loc, *parts, page_size)
    assert raw([buf])[0] == wanted


@GETS_AND_PUTS
def test_round_trip_into_another_pool(get, put):
    """Rows moved to other locations of other pages keep all 584 bytes."""
    source, target = pages(256, 2, seed=5), pages(256, 3, seed=6)
    loc = distinct(130, 512, torch.int64)
    moved_to = distinct(130, 768, torch.int32, seed=7)
    parts = get(source, loc, 256)
    put(target, moved_to, *parts, 256)
    assert oracle_get(target, moved_to, 256) == oracle_get(source, loc, 256)


def guarded(page_size: int, num_pages: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(a buffer, the allocation that holds it between two guards)."""
    size = num_pages * PAGE_BYTES[page_size]
    whole = random_bytes(GUARD + size + GUARD, seed=8)
    return whole[GUARD : GUARD + size].view(num_pages, PAGE_BYTES[page_size]), whole


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("page_size", [64, 2])
@GETS
def test_get_of_hostile_locations_gives_zero_rows(get, page_size, dtype):
    buf, _ = guarded(page_size, 12 if page_size == 2 else 2)
    loc = mixed(buf.shape[0] * page_size, dtype)
    poisoned = [torch.full_like(part.view(torch.uint8), 0xA5).view(part.dtype) for part in rows(len(loc))]
    got = get(buf, loc, page_size, out=poisoned)
    assert all(a is b for a, b in zip(got, poisoned, strict=True))
    assert raw(got) == oracle_get(buf, loc, page_size)
    outside = (loc < 0) | (loc.to(torch.int64) >= buf.shape[0] * page_size)
    assert outside.sum() == len(hostile(1, dtype))
    assert all(not part.view(torch.uint8)[outside].any() for part in got)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("page_size", [64, 2])
@PUTS
def test_put_skips_hostile_locations(put, page_size, dtype):
    buf, whole = guarded(page_size, 12 if page_size == 2 else 2)
    loc = mixed(buf.shape[0] * page_size, dtype)
    parts = rows(len(loc))
    guards = raw([whole[:GUARD], whole[-GUARD:]])
    wanted = oracle_put(buf, loc, parts, page_size)
    put(buf, loc, *parts, page_size)
    assert raw([buf])[0] == wanted
    assert raw([whole[:GUARD], whole[-GUARD:]]) == guards


@GETS_AND_PUTS
def test_check_names_the_first_bad_location(get, put):
    buf = pages(64, 2)
    parts = rows(4)
    before = buf.clone()
    for bad in hostile(128, torch.int64):
        loc = torch.tensor([5, 127, bad, -7], device=DEVICE)
        message = rf"loc\[2\] = {bad} is outside \[0, 128\)"
        with pytest.raises(IndexError, match=message):
            get(buf, loc, 64, check=True)
        with pytest.raises(IndexError, match=message):
            put(buf, loc, *parts, 64, check=True)
    assert torch.equal(buf, before)
    good = torch.tensor([5, 127, 0, 64], device=DEVICE)
    assert raw(get(buf, good, 64, check=True)) == oracle_get(buf, good, 64)
    put(buf, good, *parts, 64, check=True)
    assert oracle_get(buf, good, 64) == raw(parts)


@GETS_AND_PUTS
def test_empty_buffer_has_no_row_in_range(get, put):
    buf = pages(64, 0)
    loc = torch.tensor([0, 1, -1], device=DEVICE)
    poisoned = [torch.full_like(part.view(torch.uint8), 0xA5).view(part.dtype) for part in rows(3)]
    assert not any(any(part) for part in raw(get(buf, loc, 64, out=poisoned)))
    put(buf, loc, *rows(3), 64)


def test_out_is_filled_and_nothing_beyond_it():
    """`out` may be a slice of larger tensors, at any 4-byte alignment."""
    buf = pages(64, 2)
    loc = locations(21, 128, torch.int32)
    larger = rows(30)
    before = raw(larger)
    get_k_and_s(buf, loc, 64, out=[part[3:24] for part in larger])
    after = raw(larger)
    for old, new, part, width in zip(before, after, oracle_get(buf, loc, 64), (448, 128, 8), strict=True):
        assert new == old[: 3 * width] + part + old[24 * width :]


@settings(max_examples=25, deadline=None)
@given(
    page_size=st.sampled_from([2, 64]),
    num_pages=st.integers(1, 4),
    loc=st.lists(st.one_of(st.integers(-3, 260), st.integers(INT64_MIN, INT64_MAX)), max_size=40),
)
def test_any_locations(page_size, num_pages, loc):
    buf = pages(page_size, num_pages)
    loc = torch.tensor(loc, dtype=torch.int64, device=DEVICE)
    got = get_k_and_s(buf, loc, page_size)
    assert raw(got) == oracle_get(buf, loc, page_size) == raw(get_k_and_s_torch(buf, loc, page_size))
    blank = torch.zeros_like(buf)
    wanted = oracle_put(blank, loc, got, page_size)
    put_k_and_s(blank, loc, *got, page_size)
    assert raw([blank])[0] == wanted


def test_offsets_beyond_two_to_the_31_words():
    """A buffer of more than 8 GiB, of which only the touched pages cost memory on the CPU."""
    num_pages = 2**33 // PAGE_BYTES[256] + 2
    try:
        buf = torch.empty((num_pages, PAGE_BYTES[256]), dtype=torch.uint8, device=DEVICE)
    except RuntimeError as error:
        pytest.skip(f"no room to reserve {num_pages * PAGE_BYTES[256]} bytes: {error}")
    total = num_pages * 256
    loc = torch.tensor([total - 1, 0, total - 256, total // 2, total // 4], device=DEVICE)
    buf[loc // 256] = 0x5A
    parts = rows(len(loc))
    put_k_and_s(buf, loc, *parts, 256)
    assert raw(get_k_and_s(buf, loc, 256)) == raw(parts)
    for i, row in enumerate(loc.tolist()):
        page = buf[row // 256 : row // 256 + 1]
        assert oracle_get(page, torch.tensor([row % 256]), 256) == raw(part[i : i + 1] for part in parts)
        assert int((page == 0x5A).sum()) >= PAGE_BYTES[256] - 2 * 584


# the stock store


def stock_store() -> Path | None:
    """File of the installed sglang's KV store kernel, found without importing sglang."""
    spec = importlib.util.find_spec("sglang")
    roots = [Path(root) for root in (spec.submodule_search_locations or [])] if spec else []
    places = ("kvcache/dsv4_main_kv_store.py", "attention/dsv4/index_buf_accessor.py")
    files = [root / "kernels" / "ops" / place for root in roots for place in places]
    return next((file for file in files if file.is_file()), None)


@pytest.mark.parametrize("page_size", [256, 64, 2])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_stored_by_the_stock_kernel(monkeypatch, page_size, dtype):
    file = stock_store()
    if file is None:
        pytest.skip("sglang with a DeepSeek-V4 KV store kernel is not installed")
    # All that the file takes from sglang; the package itself is slow to import and needs torchvision.
    fp8 = ModuleType("sglang.kernels.ops.quantization.fp8_kernel")
    fp8.is_fp8_fnuz = lambda: False
    monkeypatch.setitem(sys.modules, fp8.__name__, fp8)
    spec = importlib.util.spec_from_file_location("stock_kv_store", file)
    stock = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, stock)  # dataclasses look their module up
    spec.loader.exec_module(stock)

    buf = torch.full((3 + 40 // page_size, PAGE_BYTES[page_size]), 0xEE, dtype=torch.uint8, device=DEVICE)
    loc = distinct(37, buf.shape[0] * page_size, dtype)
    k_nope, k_rope, scale8 = rows(37)
    pack = stock.NopeFp8RopeBf16Pack(k_nope, k_rope, scale8[:, :7].contiguous())
    stock._set_k_and_s_triton(buf, loc, pack, page_size)
    scale8[:, 7] = 0xEE  # the stock store leaves the pad byte as it was
    wanted = raw((k_nope, k_rope, scale8))
    assert raw(get_k_and_s(buf, loc, page_size)) == wanted
    assert raw(get_k_and_s_torch(buf, loc, page_size)) == wanted
    again = torch.full_like(buf, 0xEE)
    put_k_and_s(again, loc, k_nope, k_rope, scale8, page_size)
    assert torch.equal(again, buf)


# refusals


def test_refusals_name_the_argument():
    buf, loc = pages(64, 2), torch.tensor([1, 2], device=DEVICE)
    k_nope, k_rope, scale8 = rows(2)
    shifted = random_bytes(2 * PAGE_BYTES[64] + 1)[1:].view(2, -1)
    cases = [
        (TypeError, "buf must be torch.uint8", lambda: get_k_and_s(buf.view(torch.int8), loc, 64)),
        (TypeError, "buf must be a tensor", lambda: get_k_and_s(None, loc, 64)),
        (ValueError, r"buf must have shape \[\*, 149760\]", lambda: get_k_and_s(buf, loc, 256)),
        (ValueError, "buf must be contiguous", lambda: get_k_and_s(pages(64, 4)[::2], loc, 64)),
        (ValueError, "buf must start at a multiple", lambda: get_k_and_s(shifted, loc, 64)),
        (TypeError, "loc must be torch.int32 or torch.int64", lambda: get_k_and_s(buf, loc.float(), 64)),
        (ValueError, r"loc must have shape \[\*\]", lambda: get_k_and_s(buf, loc[None], 64)),
        (ValueError, "loc must be contiguous", lambda: get_k_and_s(buf, loc.repeat(2)[::2], 64)),
        (ValueError, "loc must be on", lambda: get_k_and_s(buf, loc.to("meta"), 64)),
        (ValueError, "page_size must be positive", lambda: get_k_and_s(buf, loc, 0)),
        (TypeError, "page_size must be an int", lambda: get_k_and_s(buf, loc, 64.0)),
        (ValueError, "out must hold 3 tensors", lambda: get_k_and_s(buf, loc, 64, out=(k_nope, k_rope))),
        (
            ValueError,
            r"out.k_nope must have shape \[2, 448\]",
            lambda: get_k_and_s(buf, loc, 64, out=rows(3)),
        ),
        (
            TypeError,
            "out.k_nope must be torch.float8_e4m3fn",
            lambda: get_k_and_s(buf, loc, 64, out=(k_nope.view(torch.uint8), k_rope, scale8)),
        ),
        (
            ValueError,
            r"scale8 must have shape \[2, 8\]",
            lambda: put_k_and_s(buf, loc, k_nope, k_rope, scale8[:, :7].contiguous(), 64),
        ),
        (
            TypeError,
            "k_rope must be torch.bfloat16",
            lambda: put_k_and_s(buf, loc, k_nope, k_rope.half(), scale8, 64),
        ),
        (
            ValueError,
            "k_nope must be contiguous",
            lambda: put_k_and_s(buf, loc, rows(4)[0][::2], k_rope, scale8, 64),
        ),
    ]
    before = buf.clone()
    for error, message, call in cases:
        with pytest.raises(error, match=message):
            call()
    assert torch.equal(buf, before)


def test_row_spans_of_the_oracle_tile_a_page():
    """The oracle's own spans: disjoint, and together the page less its padding."""
    for page_size, page_bytes in PAGE_BYTES.items():
        spans = sorted(span for row in range(page_size) for span in row_spans(row, page_size, 1))
        assert spans[0][0] == 0
        assert all(a[1] == b[0] for a, b in pairwise(spans))
        assert page_bytes - 576 < spans[-1][1] == page_size * 584 <= page_bytes


# the compiled kernel


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or INTERPRETED,
    reason="no CUDA device, or TRITON_INTERPRET=1: the compiled get_k_and_s and put_k_and_s are not tested",
)
@pytest.mark.parametrize("page_size", [256, 64, 2])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_compiled_kernels(page_size, dtype):
    n = 65_536
    buf = pages(page_size, page_count(page_size, n))
    total = buf.shape[0] * page_size
    loc = torch.cat([locations(n, total, dtype), mixed(total, dtype)])
    got = get_k_and_s(buf, loc, page_size)
    assert raw(got) == raw(get_k_and_s_torch(buf, loc, page_size)) == oracle_get(buf, loc, page_size)
    moved_to = torch.cat([distinct(n, total, dtype), torch.tensor(hostile(total, dtype)).to(loc)])
    parts = rows(len(moved_to))
    wanted = oracle_put(buf, moved_to, parts, page_size)
    put_k_and_s(buf, moved_to, *parts, page_size)
    assert raw([buf])[0] == wanted
