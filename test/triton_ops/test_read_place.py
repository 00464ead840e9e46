"""The place gather: kernel, torch reference and a plain loop agree; a slot out of range reads nothing."""

import pytest
import torch

from triton_ops.read_place import place_size, read_place, read_place_torch

pytestmark = pytest.mark.cpu
POISON = -77


def slow(indices, swa_map, page, start):
    """One position at a time."""
    full = indices.tolist()
    mapped = [int(swa_map[f]) if 0 <= f < len(swa_map) else int(swa_map[-1]) for f in full[start:]]
    return full[::page] + full[start:] + mapped


def case(tokens, dtype, seed=0):
    """Slots over scattered pages and a random mapping that ends in -1."""
    generator = torch.Generator().manual_seed(seed)
    pages = torch.randperm(40, generator=generator)[: -(-tokens // 256)] + 1
    slots = (pages[:, None] * 256 + torch.arange(256)).reshape(-1)[:tokens].to(dtype)
    swa_map = torch.randint(1, 9999, (41 * 256 + 1,), generator=generator)
    swa_map[-1] = -1
    return slots, swa_map


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", [0, 1, 127, 128, 255, 256, 257, 1000, 4097])
@pytest.mark.parametrize("op", [read_place, read_place_torch])
def test_against_a_loop(op, tokens, dtype):
    slots, swa_map = case(tokens, dtype)
    start = max(0, tokens - 127)
    size = place_size(tokens, 256, start)
    out = torch.full((size + 3,), POISON)
    op(slots, swa_map, 256, start, out)
    assert out[:size].tolist() == slow(slots, swa_map, 256, start)
    assert out[size:].tolist() == [POISON] * 3


@pytest.mark.parametrize("bad", [-1, -(2**31), 2**31 - 1, 41 * 256 + 1, 41 * 256])
@pytest.mark.parametrize("op", [read_place, read_place_torch])
def test_hostile_slots(op, bad):
    slots, swa_map = case(300, torch.int32)
    slots[[0, 200, 299]] = bad
    start = 173
    out = torch.full((place_size(300, 256, start),), POISON)
    op(slots, swa_map, 256, start, out)
    assert out.tolist() == slow(slots, swa_map, 256, start)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: compiled kernels cannot run")
@pytest.mark.parametrize("tokens", [1, 257, 65535])
def test_on_a_gpu(tokens):
    slots = torch.arange(256, 256 + tokens, dtype=torch.int32)
    swa_map = torch.randint(1, 9999, (tokens + 513,))
    start = max(0, tokens - 127)
    out = torch.full((place_size(tokens, 256, start),), POISON).pin_memory()
    read_place(slots.cuda(), swa_map.cuda(), 256, start, out)
    torch.cuda.synchronize()
    assert out.tolist() == slow(slots, swa_map, 256, start)


def test_arguments_are_checked():
    slots, swa_map = case(300, torch.int32)
    out = torch.empty(1000, dtype=torch.int64)
    with pytest.raises(TypeError, match="indices"):
        read_place(slots[::2], swa_map, 256, 0, out)
    with pytest.raises(TypeError, match="int64"):
        read_place(slots, swa_map.int(), 256, 0, out)
    with pytest.raises(ValueError, match="entries"):
        read_place(slots, swa_map, 256, 0, out[:10])
    with pytest.raises(ValueError, match="start 301"):
        read_place(slots, swa_map, 256, 301, out)
