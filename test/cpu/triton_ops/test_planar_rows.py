"""The ops on planar rows equal their torch twins and the engine's own stores."""

import contextlib
import importlib

import planar
import pytest
import torch
from guarded import DEVICE, POISON, Guarded
from planar import expected, raw

from triton_ops.cases import bad_indices
from triton_ops.cases.planar_rows import FORMATS, KV, PlanarCase, planar_cases

FP8, FP4 = FORMATS[1:]
EACH = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
TWINS = pytest.mark.parametrize("torch_code", [False, True], ids=["kernel", "torch"])
DTYPES = pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])


@pytest.mark.parametrize("case", planar_cases(), ids=str)
def test_rows_are_read_and_written_byte_for_byte(case):
    planar.check(case, case.format.get, case.format.put, DEVICE)


@DTYPES
@pytest.mark.parametrize(
    ("fmt", "page_size"),
    [(KV, 64), (KV, 2), (FP8, 64), (FP4, 64)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_hostile_locations_are_read_as_zeros_and_not_written(fmt, page_size, dtype):
    """Each between two good ones; the buffer between two guards."""
    count = 2 if page_size == 64 else 16
    guarded = Guarded(count * fmt.page_bytes(page_size), DEVICE)
    guarded.noise(8)
    buf = guarded.inner.view(count, -1)
    bad = bad_indices(count * page_size, dtype)
    good = torch.randperm(count * page_size, generator=torch.Generator().manual_seed(3)).tolist()
    loc = torch.tensor([n for pair in zip(good, bad, strict=False) for n in pair] + good[-1:], dtype=dtype).to(DEVICE)

    poisoned = [torch.full_like(part.view(torch.uint8), POISON).view(part.dtype) for part in fmt.rows(len(loc), DEVICE)]
    got = fmt.get(buf, loc, page_size, *fmt.more, out=poisoned)
    assert all(a is b for a, b in zip(got, poisoned, strict=True))
    assert raw(got) == expected(fmt, buf, loc, page_size)
    assert not any(part.view(torch.uint8)[1:-1:2].any() for part in got)

    parts = fmt.rows(len(loc), DEVICE)
    before, wanted = guarded.read(), planar.written(fmt, buf, loc, parts, page_size)
    fmt.put(buf, loc, *parts, page_size, *fmt.more)
    after = guarded.read()
    start = len(before) // 2 - len(wanted) // 2
    assert after[start : start + len(wanted)] == wanted
    assert (after[:start], after[start + len(wanted) :]) == (before[:start], before[start + len(wanted) :])


@EACH
@TWINS
def test_check_names_the_first_bad_location(fmt, torch_code):
    get, put = (fmt.get_torch, fmt.put_torch) if torch_code else (fmt.get, fmt.put)
    buf, parts = fmt.pages(64, 2, DEVICE), fmt.rows(4, DEVICE)
    before = buf.clone()
    loc = torch.tensor([5, 127, 128, -7], device=DEVICE)
    for op, written in ((get, ()), (put, parts)):
        with pytest.raises(IndexError, match=r"loc\[2\] = 128 is outside \[0, 128\)"):
            op(buf, loc, *written, 64, *fmt.more, check=True)
    assert torch.equal(buf, before)


def test_offsets_beyond_two_to_the_31_words():
    """A buffer of more than 8 GiB, of which only the touched pages cost memory on the CPU."""
    page = KV.page_bytes(256)
    count = 2**33 // page + 2
    try:
        buf = torch.empty((count, page), dtype=torch.uint8, device=DEVICE)
    except RuntimeError as error:
        pytest.skip(f"no room to reserve {count * page} bytes: {error}")
    total = count * 256
    loc = torch.tensor([total - 1, 0, total - 256, total // 2, total // 4], device=DEVICE)
    buf[loc // 256] = 0x5A
    parts = KV.rows(len(loc), DEVICE)
    KV.put(buf, loc, *parts, 256)
    assert raw(KV.get(buf, loc, 256)) == raw(parts)
    for i, row in enumerate(loc.tolist()):
        one = buf[row // 256 : row // 256 + 1]
        assert expected(KV, one, torch.tensor([row % 256]), 256) == raw(part[i : i + 1] for part in parts)
        assert int((one == 0x5A).sum()) >= page - 2 * 584


def stock(name, *places):
    """``name`` of the first of these modules of the installed engine that has it."""
    for place in places:
        with contextlib.suppress(ImportError, AttributeError):
            return getattr(importlib.import_module(f"sglang.kernels.ops.{place}"), name)
    raise AssertionError(f"the engine has no {name}")


def store_kv(buf, loc, parts, page_size):
    places = ("kvcache.dsv4_main_kv_store", "attention.dsv4.index_buf_accessor")
    k_nope, k_rope, scale8 = parts
    pack = stock("NopeFp8RopeBf16Pack", *places)(k_nope, k_rope, scale8[:, :7].contiguous())
    stock("_set_k_and_s_triton", *places)(buf, loc, pack, page_size)
    scale8[:, 7] = 0xEE  # the stock store leaves the pad byte as it was


def store_fp8(buf, loc, parts, page_size):
    store = stock("_set_k_and_s_triton", "kvcache.dsa_index_k_cache", "attention.dsa.index_buf_accessor")
    store(buf, loc, parts[0].view(torch.float8_e4m3fn), parts[1].view(torch.float32), page_size)


def store_fp4(buf, loc, parts, page_size):
    kernel = stock("_store_fp4_index_k_cache_kernel", "kvcache.dsv4_fp4_index_k_cache", "attention.dsv4.fp4_indexer")
    k, scale = parts
    kernel[(len(loc),)](k, scale.view(torch.int32).squeeze(1), buf, loc, page_size, buf.stride(0), BLOCK=64)


@pytest.mark.parametrize(
    ("fmt", "store", "page_size", "dtype"),
    [(KV, store_kv, 256, torch.int64), (KV, store_kv, 64, torch.int32), (KV, store_kv, 2, torch.int32),
     (FP8, store_fp8, 64, torch.int64), (FP4, store_fp4, 64, torch.int32)],
)  # fmt: skip
def test_rows_stored_by_the_stock_kernel(fmt, store, page_size, dtype):
    case = PlanarCase(fmt, page_size, 37, dtype)
    buf = torch.full((case.count, fmt.page_bytes(page_size)), 0xEE, dtype=torch.uint8, device=DEVICE)
    loc, parts = case.distinct(DEVICE), fmt.rows(37, DEVICE)
    store(buf, loc, parts, page_size)
    assert raw(fmt.get(buf, loc, page_size, *fmt.more)) == raw(parts)
    assert raw(fmt.get_torch(buf, loc, page_size, *fmt.more)) == raw(parts)
    again = torch.full_like(buf, 0xEE)
    fmt.put(again, loc, *parts, page_size, *fmt.more)
    assert torch.equal(again, buf)
