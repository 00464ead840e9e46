"""The arena has as many blocks as fit, never more bytes than the budget, and names the setting where none fits."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dsv4.cache.families import Geometry
from sglang_dsv4.cache.family import Group
from sglang_dsv4.cache.groups import init_groups
from sglang_dsv4.errors import HostMemoryExhausted
from sglang_dsv4.hostmem import sizing
from sglang_dsv4.hostmem.sizing import PoolSize, arena_bytes, block_counts, free_ram
from sglang_dsv4.settings import Settings
from sglang_dsv4.testing.standalone import FLASH_RATIOS

GIB = 2**30
FLASH = init_groups(Geometry(FLASH_RATIOS))
PER_PAGE = 999_424  # 21 * (37,440 + 8,448) + 20 * 1,728, padded
WINDOW = 4_935_680
PER_COPY = WINDOW + 10_485_760  # window block + request block
DEMAND = PoolSize(pages=1000, request_slots=48)
ALL = 1000 * PER_PAGE + 48 * PER_COPY
PLENTY = 10**13


def counts(pages: int, copies: int) -> dict[Group, int]:
    return {Group.PAGED: pages, Group.WINDOW: copies, Group.REQUEST: copies}


def rest(budget: int, copies: int) -> dict[Group, int]:
    """So many copies, and pages in what they leave of the budget."""
    return counts((budget - copies * PER_COPY) // PER_PAGE, copies)


@pytest.mark.parametrize(
    ("given", "ram", "ranks", "wanted"),
    [
        # explicit: a quarter holds 69 copies, so all 48, or 17; copies that are asked for may take more
        (Settings(host_gb=4.0), 4 * GIB, 1, rest(4 * GIB, 48)),
        (Settings(host_gb=1.0), PLENTY, 1, rest(GIB, 17)),
        (Settings(host_gb=1.0), 8 * GIB, 8, rest(GIB, 17)),
        (Settings(host_gb=1.0, host_copies=60), PLENTY, 1, rest(GIB, 60)),
        # auto: the whole device cache at most, out of half of the RAM, which the ranks share
        (Settings(), 2 * ALL, 1, counts(1000, 48)),
        (Settings(), PLENTY, 1, counts(1000, 48)),
        (Settings(), 2 * ALL - 2, 1, counts(1000, 47)),
        (Settings(), 2 * GIB, 1, rest(GIB, 17)),
        (Settings(), 16 * GIB, 8, rest(GIB, 17)),
        (Settings(host_copies=5), PLENTY, 1, counts(1000, 5)),
        (Settings(host_copies=5), 2 * GIB, 1, rest(GIB, 5)),
        # a quarter is less than one copy: it gets one all the same, down to the least that holds a request
        (Settings(), 2 * (PER_COPY + 3 * PER_PAGE), 1, counts(3, 1)),
        (Settings(), 2 * (PER_COPY + PER_PAGE), 1, counts(1, 1)),
    ],
)
def test_blocks_of_a_budget(given, ram, ranks, wanted):
    assert block_counts(FLASH, DEMAND, replace(given, sessions=0.0), ram, ranks) == wanted


@pytest.mark.parametrize(
    ("given", "ram", "ranks", "named"),
    [
        (Settings(), 0, 1, "raise DSV4_HOST_GB"),
        (Settings(), 2 * (PER_COPY + PER_PAGE) - 2, 1, "raise DSV4_HOST_GB"),
        (Settings(host_gb=0.01), PLENTY, 1, "raise DSV4_HOST_GB"),
        (Settings(host_gb=1.0, host_copies=70), PLENTY, 1, "raise DSV4_HOST_GB or lower DSV4_HOST_COPIES"),
        (Settings(host_copies=1000), 2 * GIB, 1, "lower DSV4_HOST_COPIES"),
        (Settings(host_gb=23), 22 * GIB, 1, "DSV4_HOST_GB=23: 22.00 GiB of RAM can be taken; lower it"),
        (Settings(host_gb=23), 180 * GIB, 8, "DSV4_HOST_GB=23 for each of 8 arenas is 184 GiB, and 180.00 GiB"),
        (Settings(host_gb=1), 8 * GIB - 1, 8, "for each of 8 arenas is 8 GiB"),
    ],
)
def test_what_cannot_be_had_is_refused_by_the_setting(given, ram, ranks, named):
    with pytest.raises(HostMemoryExhausted, match="DSV4_HOST_GB") as caught:
        block_counts(FLASH, DEMAND, given, ram, ranks)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("sessions", "given", "ram", "pages", "windows"),
    [
        # an eighth of 3,556 pages is 444: 89 windows, which take 440; of 1,000 it is 125: 25 windows take 124
        (None, Settings(host_gb=4.0), PLENTY, 3556 - 440, 48 + 89),
        (None, Settings(), PLENTY, 1000 - 124, 48 + 25),
        (1.0, Settings(host_gb=4.0), PLENTY, 3556 - 134, 48 + 27),  # that GiB is 1,074 pages
        (9.0, Settings(host_gb=4.0), PLENTY, 3556 - 440, 48 + 89),
        # an eighth that holds no window changes nothing; the next page makes the first
        (None, Settings(host_copies=1), 2 * (PER_COPY + 39 * PER_PAGE), 39, 1),
        (None, Settings(host_copies=1), 2 * (PER_COPY + 40 * PER_PAGE), 35, 2),
        (None, Settings(host_copies=1), 2 * (PER_COPY + PER_PAGE), 1, 1),
    ],
)
def test_points_of_sessions_take_windows_from_an_eighth_of_the_pages(sessions, given, ram, pages, windows):
    off = block_counts(FLASH, DEMAND, replace(given, sessions=0.0), ram)
    found = block_counts(FLASH, DEMAND, replace(given, sessions=sessions), ram)
    assert found == {Group.PAGED: pages, Group.WINDOW: windows, Group.REQUEST: off[Group.REQUEST]}
    assert arena_bytes(FLASH, off) - PER_PAGE < arena_bytes(FLASH, found) <= arena_bytes(FLASH, off)


def check_points(groups, off, on, sessions):
    """With sessions the arena is as large, at most an eighth of what they may take went from pages to windows."""
    page, window = (arena_bytes(groups, {group: 1}) for group in (Group.PAGED, Group.WINDOW))
    more = on[Group.WINDOW] - off[Group.WINDOW]
    assert on[Group.REQUEST] == off[Group.REQUEST]
    assert arena_bytes(groups, off) - page < arena_bytes(groups, on) <= arena_bytes(groups, off) or on == off
    assert on[Group.PAGED] >= min(1, off[Group.PAGED])
    taken = off[Group.PAGED] * page if sessions is None else min(off[Group.PAGED] * page, sessions * GIB)
    assert 0 <= more * window <= taken / 8
    assert (more + 1) * window > taken / 8 - 2 * page or not page


@settings(max_examples=200, deadline=None)
@given(
    ratios=st.lists(st.sampled_from((0, 4, 128)), min_size=1, max_size=10).map(tuple),
    pages=st.integers(1, 100_000),
    slots=st.integers(1, 4096),
    host_gb=st.one_of(st.none(), st.floats(1e-6, 500)),
    host_copies=st.one_of(st.none(), st.integers(1, 1000)),
    ram=st.integers(0, 2**40),
    ranks=st.integers(1, 8),
    sessions=st.one_of(st.none(), st.floats(1e-6, 500)),
)
def test_never_more_bytes_than_the_budget_nor_than_there_are(
    ratios, pages, slots, host_gb, host_copies, ram, ranks, sessions
):
    groups = init_groups(Geometry(ratios))
    given_ = Settings(host_gb=host_gb, host_copies=host_copies, sessions=0.0)
    on = replace(given_, sessions=sessions)
    try:
        found = block_counts(groups, PoolSize(pages, slots), given_, ram, ranks)
    except HostMemoryExhausted:
        with pytest.raises(HostMemoryExhausted):  # sessions ask for nothing
            block_counts(groups, PoolSize(pages, slots), on, ram, ranks)
        return
    check_points(groups, found, block_counts(groups, PoolSize(pages, slots), on, ram, ranks), sessions)
    assert all(count >= 0 for count in found.values())
    assert arena_bytes(groups, found) <= min(ram / ranks, ram / 2 / ranks if host_gb is None else host_gb * GIB)
    assert found[Group.WINDOW] >= 1
    if host_copies is not None:
        assert found[Group.WINDOW] == host_copies


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
