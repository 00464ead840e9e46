"""The first copy of a new pool attaches its host memory while the pool holds requests: no byte of them changes.

On a card that other processes keep busy, with the streams in the orders that a warm-up must withstand.
"""

import subprocess
import sys

import pytest
import torch
from pool_fixture import World, round_trip

from sglang_dsv4.testing.standalone import PoolSpec, make_allocator, make_pool
from sglang_dsv4.transfer.copier import Copier

POOLS, CYCLES = 50, 20_000_000  # about 10 ms of the card
NEIGHBOUR = """
import torch
a = torch.randn(4096, 4096, device="cuda")
print("busy", flush=True)
while True:
    for _ in range(50):
        b = a @ a
    torch.cuda.synchronize()
"""


@pytest.fixture(scope="module", autouse=True)
def _neighbours():
    """Two processes that keep the card busy."""
    children = [subprocess.Popen([sys.executable, "-c", NEIGHBOUR], stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for child in children:
            assert child.stdout.readline() == b"busy\n"
        yield
    finally:
        for child in children:
            child.kill()
            child.wait()


def stall(monkeypatch, who):
    """Holds up the caller's stream behind the wait for it, or the kernels' stream between two passes."""
    if who == "caller":
        real_wait = Copier._wait_for

        def wait_for(copier, stream):
            real_wait(copier, stream)
            torch.cuda._sleep(CYCLES)

        monkeypatch.setattr(Copier, "_wait_for", wait_for)
    elif who == "kernels":
        real_rows = Copier._copy_rows

        def copy_rows(copier, *arguments, **named):
            with torch.cuda.stream(copier._kernels):
                torch.cuda._sleep(CYCLES)
            real_rows(copier, *arguments, **named)

        monkeypatch.setattr(Copier, "_copy_rows", copy_rows)


@pytest.mark.parametrize("who", ["nobody", "caller", "kernels"])
def test_the_first_copy_changes_no_byte(monkeypatch, who):
    monkeypatch.setenv("DSV4_HOST_GB", "0.25")
    stall(monkeypatch, who)
    spec = PoolSpec(pages=40, swa_pages=40, device="cuda")
    for number in range(POOLS if who == "nobody" else 8):
        pool = make_pool(spec)
        round_trip(World(pool, make_allocator(spec, pool)), 300 + 37 * number, seed=number)
        pool.host.close()
