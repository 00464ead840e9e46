"""Memory of a real card: pinned host memory, slabs that slow streams still read, tensors that are uploaded once."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import oracle
import torch
from pool_fixture import make_world

from sglang_dsv4.residency import Residents


def test_an_upload_is_on_the_card_for_every_stream():
    """Read by a stream that waits for nothing, right after the call."""
    registry, side = Residents(torch.device("cuda")), torch.cuda.Stream()
    rng = np.random.default_rng(1)
    for number in range(20):
        table = torch.from_numpy(rng.integers(0, 1 << 40, 1 << 20))
        torch.cuda._sleep(20_000_000)  # the current stream is late
        handle = registry.constant(f"table {number}", table)
        with torch.cuda.stream(side):
            found = handle.clone()
        side.synchronize()
        assert torch.equal(found.cpu(), table)


def to_device(run: Callable[[], Any], folder: Any) -> list[int]:
    """Bytes of each copy from the host to the device during ``run``, by the profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    copies = [e["args"] for e in events if e.get("cat") == "gpu_memcpy" and "HtoD" in e["name"]]
    return [int(arguments["bytes"]) for arguments in copies]


def test_the_link_carries_nothing_but_the_copy(tmp_path):
    """A save sends nothing to the card, a load the bytes of its units; the first one of its length like the others."""
    world = make_world(device="cuda")
    memory = world.pool.host.memory
    world.leave(world.start(1, 700))  # the allocator's own first tables
    for tokens in (700, 300, 1_021, 700):
        request, copies = world.start(1, tokens), []
        torch.cuda.synchronize()
        slots = request.slots[:tokens].to(torch.int32)
        saved = to_device(lambda s=slots, c=copies: c.append(world.pool.get_cpu_copy(s, req_pool_index=1)), tmp_path)
        world.leave(request)
        (copy,) = copies
        pages, tail = copy.in_pages * memory.units.nbytes, sum(run.nbytes for run in copy.tail_runs())
        again = oracle.Request(oracle.resume(world.allocator, tokens), 2, tokens)
        slots = again.slots.to(torch.int32)
        torch.cuda.synchronize()
        loaded = to_device(lambda s=slots, c=copy: world.pool.load_cpu_copy(c, s, req_pool_index=2), tmp_path)
        assert saved == []
        assert sum(loaded) == pages + tail
        world.leave(again)
