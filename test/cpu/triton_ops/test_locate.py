"""locate equals its torch twin, wherever a request lies. transfer/test_locator.py says which faults it names."""

import pytest
import torch
from located import check

from triton_ops.cases import INT32_MAX, INT32_MIN
from triton_ops.cases.locate import FULL_PAGES, LOCATE_LENGTHS, located
from triton_ops.locate import NOTHING

DTYPES = pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])


@DTYPES
@pytest.mark.parametrize("tokens", LOCATE_LENGTHS)
def test_a_request_that_lies_page_by_page(tokens, dtype):
    for skip in (0, 1, 2, 3) if tokens <= 256 else (tokens % 3,):  # long ones differ in their tiles, not there
        assert set(check(located(tokens, seed=skip), dtype, skip)) <= {NOTHING}


TWO_TILES = 3_100  # the window is 2973..3099, on page 11 and, in the next tile, page 12
BAD_SLOTS = (-1, INT32_MIN, INT32_MAX, FULL_PAGES * 256, FULL_PAGES * 256 + 1)  # the fourth: the mapping's last entry


@pytest.mark.parametrize("seed", range(8))
def test_any_faults(seed):
    """Slots and mapping changed at random places, to values near and far."""
    generator = torch.Generator().manual_seed(seed)

    def draw(end: int) -> int:
        return int(torch.randint(end, (1,), generator=generator))

    c = located(TWO_TILES, seed)
    values = (*BAD_SLOTS, 0, 1, 255, 256, 512, FULL_PAGES * 256 - 1)
    near = c.slots
    window = {c.start + draw(127): (values[draw(len(values))], c.swa(3_000) + draw(9))[draw(2)] for _ in range(draw(5))}
    c = c.with_swa(window)
    slots = {draw(TWO_TILES): (values[draw(len(values))], near[draw(TWO_TILES)])[draw(2)] for _ in range(draw(6))}
    check(c.with_slots(slots), torch.int32)
