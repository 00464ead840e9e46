"""The arena has as many units as fit, never more bytes than the budget, and names the setting where too few fit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_families import geometries

from sglang_dsv4.cache.families import Geometry
from sglang_dsv4.cache.units import Units
from sglang_dsv4.errors import HostMemoryExhausted
from sglang_dsv4.hostmem import sizing
from sglang_dsv4.hostmem.sizing import ArenaSize, PoolSize, arena_size, free_ram
from sglang_dsv4.settings import OFF, Settings
from sglang_dsv4.testing.standalone import FLASH_RATIOS

GIB = 2**30
FLASH = Units.of(Geometry(FLASH_RATIOS))
UNIT = 999_424  # 21 * (37,440 + 8,448) + 20 * 1,728, padded
TAIL = 16  # units of 43 * 127 * 584 + 21 * 7 * (8,192 + 2,048) + 20 * 127 * 4,096 bytes
DEMAND = PoolSize(pages=1000, request_slots=48)
ALL = 1000 + 48 * TAIL
PLENTY = 10**13


@pytest.mark.parametrize(
    ("given", "ram", "ranks", "wanted"),
    [
        # explicit: what fits, whatever the device holds; sessions change nothing
        (Settings(host_gb=4.0), 4 * GIB, 1, 4 * GIB // UNIT),
        (Settings(host_gb=4.0, sessions=OFF), 4 * GIB, 1, 4 * GIB // UNIT),
        (Settings(host_gb=1.0), 8 * GIB, 8, GIB // UNIT),
        (Settings(host_gb=17 * UNIT / GIB), PLENTY, 1, 17),
        # auto: the whole device cache at most, out of half of the RAM, which the arenas share
        (Settings(), PLENTY, 1, ALL),
        (Settings(), 2 * ALL * UNIT, 1, ALL),
        (Settings(), 2 * ALL * UNIT - 2, 1, ALL - 1),
        (Settings(), 16 * GIB, 8, GIB // UNIT),
        (Settings(), 2 * 17 * UNIT, 1, 17),
    ],
)
def test_units_of_a_budget(given, ram, ranks, wanted):
    size = arena_size(FLASH, DEMAND, given, ram, ranks)
    assert (size.count, size.nbytes) == (wanted, wanted * UNIT)


@pytest.mark.parametrize(
    ("given", "ram", "ranks", "named"),
    [
        (Settings(), 0, 1, "0.000 GiB of host memory hold not one request"),
        (Settings(), 2 * 17 * UNIT - 2, 1, f"(17 units of {UNIT} bytes): raise DSV4_HOST_GB"),
        (Settings(host_gb=0.01), PLENTY, 1, "0.010 GiB of host memory hold not one request (17 units"),
        (Settings(host_gb=23), 22 * GIB, 1, "DSV4_HOST_GB=23: 22.00 GiB of RAM can be taken; lower it"),
        (Settings(host_gb=23), 180 * GIB, 8, "DSV4_HOST_GB=23 for each of 8 arenas is 184 GiB, and 180.00 GiB"),
        (Settings(host_gb=1), 8 * GIB - 1, 8, "for each of 8 arenas is 8 GiB"),
    ],
)
def test_what_cannot_be_had_is_refused_by_the_setting(given, ram, ranks, named):
    with pytest.raises(HostMemoryExhausted, match="DSV4_HOST_GB") as caught:
        arena_size(FLASH, DEMAND, given, ram, ranks)
    assert named in str(caught.value)


@settings(max_examples=50, deadline=None)
@given(
    g=geometries(),
    pages=st.integers(1, 100_000),
    slots=st.integers(1, 4096),
    host_gb=st.one_of(st.none(), st.floats(1e-6, 500)),
    ram=st.integers(0, 2**40),
    ranks=st.integers(1, 8),
)
def test_never_more_bytes_than_the_budget_nor_than_there_are(g, pages, slots, host_gb, ram, ranks):
    """And no more than the device can fill, where that is asked for."""
    units = Units.of(g)
    most = min(ram / ranks, ram / 2 / ranks if host_gb is None else host_gb * GIB)
    try:
        size = arena_size(units, PoolSize(pages, slots), Settings(host_gb=host_gb), ram, ranks)
    except HostMemoryExhausted:
        too_much = host_gb is not None and host_gb * GIB * ranks > ram
        assert too_much or most < units.least * units.nbytes + 1
        return
    assert units.least <= size.count and size.nbytes <= most
    wanted = pages + slots * max(units.tails)
    assert size.count <= wanted or host_gb is not None
    assert size.count == wanted or (size.count + 1) * units.nbytes > most - 1 or host_gb is not None


@settings(max_examples=50, deadline=None)
@given(counts=st.lists(st.integers(1, 10_000), min_size=1, max_size=8), seed=st.randoms(use_true_random=False))
def test_stages_agree_on_the_fewest_units_and_the_longest_tails(counts, seed):
    """Of each length: which stage has the longest may differ. Each keeps the bytes of its own units."""
    sizes = [
        ArenaSize(Units(4096 * (1 + rank), 8, tuple(seed.randrange(20) for _ in range(16))), count)
        for rank, count in enumerate(counts)
    ]
    found = [size.agreed(sizes) for size in sizes]
    for size, own in zip(found, sizes, strict=True):
        assert (size.count, size.units.nbytes) == (min(counts), own.units.nbytes)
        assert list(size.units.tails) == [max(one.units.tails[n] for one in sizes) for n in range(16)]
    if min(counts) <= found[0].units.longest_tail:
        with pytest.raises(HostMemoryExhausted, match="raise DSV4_HOST_GB"):
            found[0].required()
    else:
        assert found[0].required() is found[0]


def on_a_machine(monkeypatch, tmp_path, files: dict[str, str]) -> None:
    """One with 800 bytes of free RAM, and these files below /."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(sizing, "Path", lambda path: tmp_path / str(path).lstrip("/"))
    monkeypatch.setattr(sizing, "psutil", SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=800)))


V1, V2 = ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")
IDLE = {V1: "total_inactive_file", V2: "inactive_file"}


@pytest.mark.parametrize(
    ("own", "place", "names", "limit", "used", "idle", "wanted"),
    [
        ("0::/", "", V2, "max", "5", None, 800),
        ("0::/", "", V2, "500", "200", None, 300),
        ("0::/", "", V2, "5", "9", None, 0),
        # in a group of its own, or in one below a limit; of either version of the interface
        ("0::/system.slice/job_7", "system.slice/job_7", V2, "500", "200", None, 300),
        ("0::/limited.slice/server.service", "limited.slice", V2, "500", "200", None, 300),
        ("9:cpu,memory:/slurm/job_7", "memory/slurm/job_7", V1, "500", "200", None, 300),
        ("1:name=systemd:/\n9:memory:/docker/1f", "memory", V1, "500", "200", None, 300),
        # somebody else's
        ("0::/mine\n4:cpu:/other", "other", V2, "500", "200", None, 800),
        # page cache that lies idle, of weights that were read, say, is free
        ("4:memory:/", "memory", V1, "500", "490", "300", 310),
        ("0::/", "", V2, "500", "490", "300", 310),
    ],
)
def test_free_ram_respects_each_control_group_of_the_process(
    monkeypatch, tmp_path, own, place, names, limit, used, idle, wanted
):
    given = dict(zip(names, (limit, used), strict=True))
    given["memory.stat"] = idle and f"cache 450\n{IDLE[names]} {idle}\nactive_file 150"
    files = {f"sys/fs/cgroup/{place}/{name}": text for name, text in given.items() if text is not None}
    on_a_machine(monkeypatch, tmp_path, files | {"proc/self/cgroup": own})
    assert free_ram() == wanted
    (tmp_path / "proc/self/cgroup").unlink()
    assert free_ram() == 800, "no Linux, or no control groups"
