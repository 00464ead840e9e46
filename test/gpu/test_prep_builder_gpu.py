"""The builder on a GPU: compiled kernel, real streams, launches counted."""

import pytest
import torch
from prep_oracle import build_metadata
from random_steps import DRAFTS, LAYOUT, compare, flatten, make_world, random_lengths

from sglang_dsv4.prep.builder import MetadataBuilder
from sglang_dsv4.prep.step import PrepLayout

CUDA = torch.device("cuda")


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(("requests", "queries"), [(1, 1), (7, 1), (128, 1), (128, 2), (33, 4)])
def test_equals_oracle(requests, queries, on_device, beside):
    layout = DRAFTS if queries > 1 else LAYOUT
    world = make_world(random_lengths(requests, requests, 1200), layout, seed=queries, device="cuda", room=queries)
    builder = MetadataBuilder(layout, CUDA)
    for width in (None, 1, 5):
        step = world.step("cuda", queries, queries > 1, on_device, width=width)
        made = builder.start(step, world.tables, after=torch.cuda.current_stream() if beside else None)
        builder.finish()
        compare(flatten(made), flatten(build_metadata(layout, step, world.tables)))


def test_one_copy_and_one_kernel_a_step():
    world = make_world(random_lengths(0, 128, 1200), DRAFTS, device="cuda", room=2)
    builder, step = MetadataBuilder(DRAFTS, CUDA), world.step("cuda", 2, True)
    for _ in range(3):
        builder.build(step, world.tables)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        builder.build(step, world.tables)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    copies = [name for name in names if "Memcpy" in name]
    assert len(copies) == 1
    assert "HtoD" in copies[0]
    assert [name for name in names if "Memcpy" not in name] == ["_prep_rows_kernel"]


def test_frames_and_slabs_under_a_slow_forward():
    """Host and prep stream run ahead of a forward stream that sleeps before it reads; each reader finds its step."""
    layout = PrepLayout(context=1300)
    builder = MetadataBuilder(layout, CUDA)
    worlds = [make_world([n, n + 100, 7 * n], layout, seed=n, device="cuda") for n in range(1, 9)]
    steps = [world.step("cuda") for world in worlds]
    builder.build(steps[0], worlds[0].tables)
    tables, forward = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    found = []
    with torch.cuda.stream(forward):
        for world, step in zip(worlds, steps, strict=True):
            made = builder.start(step, world.tables, after=tables)
            builder.finish()
            torch.cuda._sleep(10_000_000)
            fields = {name: getattr(made, name) for name in made.__dataclass_fields__}
            found.append({name: value.clone() for name, value in fields.items() if isinstance(value, torch.Tensor)})
    torch.cuda.synchronize()
    for world, step, fields in zip(worlds, steps, found, strict=True):
        wanted = flatten(build_metadata(layout, step, world.tables))
        compare({name: value.cpu() for name, value in fields.items()}, {name: wanted[name] for name in fields})
