"""get_index_k_and_s and put_index_k_and_s: torch twins, a byte-by-byte oracle, the stock stores."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported

from hypothesis import given, settings
from hypothesis import strategies as st
from row_locations import INT64_MAX, INT64_MIN, distinct, hostile, locations, mixed

from triton_ops.get_index_k_and_s import (
    get_index_k_and_s,
    get_index_k_and_s_torch,
    put_index_k_and_s,
    put_index_k_and_s_torch,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
GETS = pytest.mark.parametrize("get", [get_index_k_and_s, get_index_k_and_s_torch])
PUTS = pytest.mark.parametrize("put", [put_index_k_and_s, put_index_k_and_s_torch])
GETS_AND_PUTS = pytest.mark.parametrize(
    ("get", "put"),
    [(get_index_k_and_s, put_index_k_and_s), (get_index_k_and_s_torch, put_index_k_and_s_torch)],
)
WIDTHS = pytest.mark.parametrize("width", [128, 64])
DTYPES = pytest.mark.parametrize("dtype", [torch.int32, torch.int64])

GUARD = 4096  # a multiple of 16: the buffer between two guards keeps the alignment of an allocation


def random_bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(DEVICE)


def pages(page_size: int, width: int, num_pages: int, seed: int = 0) -> torch.Tensor:
    return random_bytes(num_pages, page_size * (width + 4), seed=seed)


def rows(n: int, width: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    return random_bytes(n, width, seed=seed), random_bytes(n, 4, seed=seed + 1)


def raw(tensors) -> list[bytes]:
    return [tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes() for tensor in tensors]


def row_spans(loc: int, page_size: int, width: int, num_pages: int) -> list[tuple[int, int]]:
    """[start, end) in the buffer of a row's key and scale bytes; none out of range."""
    if not 0 <= loc < num_pages * page_size:
        return []
    page, slot = divmod(loc, page_size)
    base = page * page_size * (width + 4)
    key, scale = base + slot * width, base + page_size * width + slot * 4
    return [(key, key + width), (scale, scale + 4)]


def oracle_get(buf: torch.Tensor, loc: torch.Tensor, page_size: int, width: int) -> list[bytes]:
    data = buf.cpu().numpy().tobytes()
    found = ([], [])
    for row in loc.tolist():
        spans = row_spans(row, page_size, width, buf.shape[0])
        for part, piece in zip(found, [data[a:b] for a, b in spans] or (bytes(width), bytes(4)), strict=True):
            part.append(piece)
    return [b"".join(part) for part in found]


def oracle_put(buf: torch.Tensor, loc: torch.Tensor, parts, page_size: int, width: int) -> bytes:
    data = bytearray(buf.cpu().numpy().tobytes())
    pieces = raw(parts)
    for i, row in enumerate(loc.tolist()):
        spans = row_spans(row, page_size, width, buf.shape[0])
        for (start, end), piece in zip(spans, pieces if spans else [], strict=True):
            data[start:end] = piece[i * (end - start) : (i + 1) * (end - start)]
    return bytes(data)


LONG = 1001 if INTERPRETED else 4001  # several programs, the last of them partly filled
# Page size 1 is the smallest; its page bytes are no multiple of 16, so it takes narrow accesses.
CASES = [
    pytest.param(page_size, width, n, dtype, id=f"page{page_size}-width{width}-n{n}-{str(dtype)[6:]}")
    for row, page_size in enumerate((256, 64, 2))
    for width in (128, 64)
    for column, n in enumerate((0, 1, 63, 64, 65))
    for dtype in ((torch.int32, torch.int64)[(row + column + (width == 64)) % 2],)
] + [
    pytest.param(1, 128, 130, torch.int64, id="page1-width128-n130-int64"),
    pytest.param(64, 36, 130, torch.int64, id="page64-width36-n130-int64"),
    pytest.param(64, 128, LONG, torch.int64, id="page64-width128-long-int64"),
    pytest.param(2, 64, LONG, torch.int32, id="page2-width64-long-int32"),
]


def page_count(page_size: int, n: int) -> int:
    return 3 + n // page_size


@pytest.mark.parametrize(("page_size", "width", "n", "dtype"), CASES)
def test_get_equals_twin_and_oracle(page_size, width, n, dtype):
    buf = pages(page_size, width, page_count(page_size, n))
    loc = locations(n, buf.shape[0] * page_size, dtype)
    before = buf.clone()
    got = get_index_k_and_s(buf, loc, page_size, width)
    assert [(t.dtype, tuple(t.shape)) for t in got] == [(torch.uint8, (n, width)), (torch.uint8, (n, 4))]
    assert raw(got) == raw(get_index_k_and_s_torch(buf, loc, page_size, width))
    assert raw(got) == oracle_get(buf, loc, page_size, width)
    assert torch.equal(buf, before)


@pytest.mark.parametrize(("page_size", "width", "n", "dtype"), CASES)
def test_put_equals_twin_and_oracle(page_size, width, n, dtype):
    buf = pages(page_size, width, page_count(page_size, n))
    loc = distinct(n, buf.shape[0] * page_size, dtype)
    parts = rows(n, width)
    wanted = oracle_put(buf, loc, parts, page_size, width)
    twin = buf.clone()
    put_index_k_and_s(buf, loc, *parts, page_size, width)
    put_index_k_and_s_torch(twin, loc, *parts, page_size, width)
    assert raw([buf])[0] == wanted
    assert raw([twin])[0] == wanted


@PUTS
def test_put_of_a_repeated_row(put):
    buf = pages(64, 128, 2)
    loc = torch.tensor([3, 0, 3, 3, 0], device=DEVICE)
    parts = tuple(part[loc] for part in rows(4, 128))
    wanted = oracle_put(buf, loc, parts, 64, 128)
    put(buf, loc, *parts, 64, 128)
    assert raw([buf])[0] == wanted


def guarded(page_size: int, width: int, num_pages: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(a buffer, the allocation that holds it between two guards)."""
    size = num_pages * page_size * (width + 4)
    whole = random_bytes(GUARD + size + GUARD, seed=8)
    return whole[GUARD : GUARD + size].view(num_pages, -1), whole


@DTYPES
@WIDTHS
@GETS
def test_get_of_hostile_locations_gives_zero_rows(get, width, dtype):
    buf, _ = guarded(64, width, 2)
    loc = mixed(128, dtype)
    poisoned = [torch.full_like(part, 0xA5) for part in rows(len(loc), width)]
    got = get(buf, loc, 64, width, out=poisoned)
    assert all(a is b for a, b in zip(got, poisoned, strict=True))
    assert raw(got) == oracle_get(buf, loc, 64, width)
    outside = (loc < 0) | (loc >= 128)
    assert outside.sum() == len(hostile(1, dtype))
    assert all(not part[outside].any() for part in got)


@DTYPES
@WIDTHS
@PUTS
def test_put_skips_hostile_locations(put, width, dtype):
    buf, whole = guarded(64, width, 2)
    loc = mixed(128, dtype)
    parts = rows(len(loc), width)
    guards = raw([whole[:GUARD], whole[-GUARD:]])
    wanted = oracle_put(buf, loc, parts, 64, width)
    put(buf, loc, *parts, 64, width)
    assert raw([buf])[0] == wanted
    assert raw([whole[:GUARD], whole[-GUARD:]]) == guards


@GETS_AND_PUTS
def test_check_names_the_first_bad_location(get, put):
    buf = pages(64, 128, 2)
    parts = rows(4, 128)
    before = buf.clone()
    for bad in hostile(128, torch.int64):
        loc = torch.tensor([5, 127, bad, -7], device=DEVICE)
        message = rf"loc\[2\] = {bad} is outside \[0, 128\)"
        with pytest.raises(IndexError, match=message):
            get(buf, loc, 64, 128, check=True)
        with pytest.raises(IndexError, match=message):
            put(buf, loc, *parts, 64, 128, check=True)
    assert torch.equal(buf, before)
    good = torch.tensor([5, 127, 0, 64], device=DEVICE)
    put(buf, good, *parts, 64, 128, check=True)
    assert raw(get(buf, good, 64, 128, check=True)) == raw(parts) == oracle_get(buf, good, 64, 128)


@GETS_AND_PUTS
def test_empty_buffer_has_no_row_in_range(get, put):
    buf = pages(64, 64, 0)
    loc = torch.tensor([0, 1, -1], device=DEVICE)
    poisoned = [torch.full_like(part, 0xA5) for part in rows(3, 64)]
    assert not any(any(part) for part in raw(get(buf, loc, 64, 64, out=poisoned)))
    put(buf, loc, *rows(3, 64), 64, 64)


def test_out_is_filled_and_nothing_beyond_it():
    """`out` may be a slice of larger tensors, at any 4-byte alignment."""
    buf = pages(64, 64, 2)
    loc = locations(21, 128, torch.int32)
    larger = rows(30, 64)
    before = raw(larger)
    get_index_k_and_s(buf, loc, 64, 64, out=[part[3:24] for part in larger])
    for old, new, part, width in zip(before, raw(larger), oracle_get(buf, loc, 64, 64), (64, 4), strict=True):
        assert new == old[: 3 * width] + part + old[24 * width :]


@settings(max_examples=25, deadline=None)
@given(
    page_size=st.integers(1, 70),
    width=st.sampled_from([4, 36, 64, 128]),
    num_pages=st.integers(1, 4),
    loc=st.lists(st.one_of(st.integers(-3, 290), st.integers(INT64_MIN, INT64_MAX)), max_size=40),
)
def test_any_locations(page_size, width, num_pages, loc):
    buf = pages(page_size, width, num_pages)
    loc = torch.tensor(loc, dtype=torch.int64, device=DEVICE)
    got = get_index_k_and_s(buf, loc, page_size, width)
    assert raw(got) == oracle_get(buf, loc, page_size, width)
    assert raw(got) == raw(get_index_k_and_s_torch(buf, loc, page_size, width))
    blank = torch.zeros_like(buf)
    wanted = oracle_put(blank, loc, got, page_size, width)
    put_index_k_and_s(blank, loc, *got, page_size, width)
    assert raw([blank])[0] == wanted


# the stock stores


def load_stock(monkeypatch: pytest.MonkeyPatch, *places: str, **stand_ins: dict[str, object]) -> ModuleType:
    """The first of these files of the installed sglang, without importing sglang.

    The package is slow to import and needs torchvision. `stand_ins` holds, by module path with
    double underscores for dots, all that the file takes from it.
    """
    spec = importlib.util.find_spec("sglang")
    roots = [Path(root) for root in (spec.submodule_search_locations or [])] if spec else []
    files = [root / "kernels" / "ops" / place for root in roots for place in places]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        pytest.skip(f"sglang with {' or '.join(places)} is not installed")
    for path, names in stand_ins.items():
        module = ModuleType("sglang." + path.replace("__", "."))
        module.__dict__.update(names)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    spec = importlib.util.spec_from_file_location(f"stock_{file.stem}", file)
    stock = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, stock)
    spec.loader.exec_module(stock)
    return stock


def assert_reads_what_was_stored(buf: torch.Tensor, loc: torch.Tensor, k, scale, width: int) -> None:
    wanted = raw((k, scale))
    assert raw(get_index_k_and_s(buf, loc, 64, width)) == wanted
    assert raw(get_index_k_and_s_torch(buf, loc, 64, width)) == wanted
    again = torch.full_like(buf, 0xEE)
    put_index_k_and_s(again, loc, k, scale, 64, width)
    assert torch.equal(again, buf)


def test_rows_stored_by_the_stock_fp8_kernel(monkeypatch):
    def no() -> bool:
        return False

    stock = load_stock(
        monkeypatch,
        "kvcache/dsa_index_k_cache.py",
        "attention/dsa/index_buf_accessor.py",
        kernels__ops__quantization__fp8_kernel={"is_fp8_fnuz": no},
        srt__layers__attention__dsa__utils={
            "INDEXER_K_CACHE_PRESHUFFLE_TILE": 16,
            "aiter_can_use_preshuffle_paged_mqa": no,
        },
        srt__utils={"is_hip": no, "is_xpu": no, "get_bool_env_var": lambda *_: False},
    )
    buf = torch.full((3, 64 * 132), 0xEE, dtype=torch.uint8, device=DEVICE)
    loc = distinct(37, 192, torch.int64)
    k, scale = rows(37, 128)
    stock._set_k_and_s_triton(buf, loc, k.view(torch.float8_e4m3fn), scale.view(torch.float32), 64)
    assert_reads_what_was_stored(buf, loc, k, scale, 128)


def test_rows_stored_by_the_stock_fp4_kernel(monkeypatch):
    stock = load_stock(
        monkeypatch,
        "kvcache/dsv4_fp4_index_k_cache.py",
        "attention/dsv4/fp4_indexer.py",
        kernels__ops__attention__dsv4__fp4_indexer={"INDEX_K_SLOT_BYTES": 68},
        kernels__ops__quantization__fp4_indexer_quant={"quantize_fp4_indexer_tensor": None},
    )
    buf = torch.full((3, 64 * 68), 0xEE, dtype=torch.uint8, device=DEVICE)
    loc = distinct(37, 192, torch.int32)
    k, scale = rows(37, 64)
    words = scale.view(torch.int32).squeeze(1)
    stock._store_fp4_index_k_cache_kernel[(37,)](k, words, buf, loc, 64, buf.stride(0), BLOCK=64)
    assert_reads_what_was_stored(buf, loc, k, scale, 64)


# refusals


def test_refusals_name_the_argument():
    buf, loc = pages(64, 128, 2), torch.tensor([1, 2], device=DEVICE)
    k, scale = rows(2, 128)
    get, put = get_index_k_and_s, put_index_k_and_s
    cases = [
        (ValueError, r"buf must have shape \[\*, 4352\]", lambda: get(buf, loc, 64, 64)),
        (ValueError, r"buf must have shape \[\*, 264\]", lambda: get(buf, loc, 2, 128)),
        (TypeError, "loc must be torch.int32 or torch.int64", lambda: get(buf, loc.short(), 64, 128)),
        (ValueError, "head_dim_bytes must be a multiple of 4", lambda: get(buf, loc, 64, 66)),
        (ValueError, "head_dim_bytes must be positive", lambda: get(buf, loc, 64, 0)),
        (TypeError, "head_dim_bytes must be an int", lambda: get(buf, loc, 64, 128.5)),
        (ValueError, "out must hold 2 tensors", lambda: get(buf, loc, 64, 128, out=(k, scale, k))),
        (ValueError, r"out.scale must have shape \[2, 4\]", lambda: get(buf, loc, 64, 128, out=(k, k))),
        (ValueError, r"k must have shape \[2, 128\]", lambda: put(buf, loc, k[:1], scale, 64, 128)),
        (
            TypeError,
            "scale must be torch.uint8",
            lambda: put(buf, loc, k, scale.view(torch.float32), 64, 128),
        ),
    ]
    before = buf.clone()
    for error, message, call in cases:
        with pytest.raises(error, match=message):
            call()
    assert torch.equal(buf, before)


# the compiled kernel


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or INTERPRETED,
    reason="no CUDA device, or TRITON_INTERPRET=1: the compiled get_index_k_and_s and put_index_k_and_s are not tested",
)
@pytest.mark.parametrize("page_size", [256, 64, 2, 1])
@WIDTHS
@DTYPES
def test_compiled_kernels(page_size, width, dtype):
    n = 65_536
    buf = pages(page_size, width, page_count(page_size, n))
    total = buf.shape[0] * page_size
    loc = torch.cat([locations(n, total, dtype), mixed(total, dtype)])
    got = get_index_k_and_s(buf, loc, page_size, width)
    assert raw(got) == raw(get_index_k_and_s_torch(buf, loc, page_size, width))
    assert raw(got) == oracle_get(buf, loc, page_size, width)
    moved_to = torch.cat([distinct(n, total, dtype), torch.tensor(hostile(total, dtype)).to(loc)])
    parts = rows(len(moved_to), width)
    wanted = oracle_put(buf, moved_to, parts, page_size, width)
    put_index_k_and_s(buf, moved_to, *parts, page_size, width)
    assert raw([buf])[0] == wanted
