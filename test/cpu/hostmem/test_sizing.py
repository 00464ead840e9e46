"""How many blocks: what fits, never more bytes than the budget, a named error where nothing fits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from builders import FLASH_RATIOS
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dsv4.cache.families import Geometry, Group
from sglang_dsv4.cache.groups import init_groups
from sglang_dsv4.errors import HostMemoryExhausted
from sglang_dsv4.hostmem import sizing
from sglang_dsv4.hostmem.sizing import PoolSize, block_counts, free_ram
from sglang_dsv4.settings import Settings

GIB = 2**30
FLASH = init_groups(Geometry(FLASH_RATIOS))
PER_PAGE = 999_424  # 21 * (37,440 + 8,448) + 20 * 1,728, padded
PER_COPY = 4_935_680 + 10_485_760  # window block + request block
DEMAND = PoolSize(pages=1000, request_slots=48)


def counts(block: int, copies: int) -> dict[Group, int]:
    return {Group.PAGED: block, Group.WINDOW: copies, Group.REQUEST: copies}


def test_an_explicit_size_gives_a_quarter_to_copies():
    """4 GiB: 1 GiB holds 69 copies, so all 48; the rest is blocks of tokens. Free RAM plays no part."""
    wanted = counts((4 * GIB - 48 * PER_COPY) // PER_PAGE, 48)
    for ram in (0, 10**12):
        assert block_counts(FLASH, DEMAND, Settings(host_gb=4.0), ram) == wanted
    assert wanted[Group.PAGED] == 3556


def test_a_small_explicit_size_cuts_the_copies():
    """1 GiB: a quarter holds 17 copies."""
    assert block_counts(FLASH, DEMAND, Settings(host_gb=1.0), 0) == counts((GIB - 17 * PER_COPY) // PER_PAGE, 17)


def test_ranks_do_not_divide_an_explicit_size():
    settings_ = Settings(host_gb=2.5)
    assert block_counts(FLASH, DEMAND, settings_, 0, ranks=8) == block_counts(FLASH, DEMAND, settings_, 0, ranks=1)


def test_explicit_copies_may_take_more_than_a_quarter():
    assert block_counts(FLASH, DEMAND, Settings(host_gb=1.0, host_copies=60), 0) == counts(
        (GIB - 60 * PER_COPY) // PER_PAGE, 60
    )


def test_plenty_of_ram_holds_the_whole_device_cache():
    assert block_counts(FLASH, DEMAND, Settings(), 2 * (1000 * PER_PAGE + 48 * PER_COPY)) == counts(1000, 48)
    assert block_counts(FLASH, DEMAND, Settings(), 10**13) == counts(1000, 48)


def test_little_ram_is_shared_out():
    """Half of 2 GiB is the budget: a quarter of it holds 17 copies."""
    assert block_counts(FLASH, DEMAND, Settings(), 2 * GIB) == counts((GIB - 17 * PER_COPY) // PER_PAGE, 17)


def test_one_byte_less_than_plenty():
    found = block_counts(FLASH, DEMAND, Settings(), 2 * (1000 * PER_PAGE + 48 * PER_COPY) - 2)
    assert found == counts(1000, 47)  # never more token blocks than the device has pages


def test_ranks_share_the_ram():
    assert block_counts(FLASH, DEMAND, Settings(), 16 * GIB, ranks=8) == counts((GIB - 17 * PER_COPY) // PER_PAGE, 17)


def test_explicit_copies_with_automatic_size():
    assert block_counts(FLASH, DEMAND, Settings(host_copies=5), 10**13) == counts(1000, 5)
    assert block_counts(FLASH, DEMAND, Settings(host_copies=5), 2 * GIB) == counts((GIB - 5 * PER_COPY) // PER_PAGE, 5)


def test_one_copy_is_always_allowed():
    """A quarter of the arena is less than one copy: it gets one all the same."""
    budget = PER_COPY + 3 * PER_PAGE
    assert block_counts(FLASH, DEMAND, Settings(), 2 * budget) == counts(3, 1)


@pytest.mark.parametrize(
    ("settings_", "ram"),
    [
        (Settings(), 0),
        (Settings(), 2 * (PER_COPY + PER_PAGE) - 2),
        (Settings(host_gb=0.01), 10**12),
        (Settings(host_gb=1.0, host_copies=70), 10**12),
        (Settings(host_copies=1000), 2 * GIB),
    ],
)
def test_too_little_names_the_setting(settings_, ram):
    with pytest.raises(HostMemoryExhausted, match="DSV4_HOST_GB"):
        block_counts(FLASH, DEMAND, settings_, ram)


def test_the_least_that_holds_one_request():
    assert block_counts(FLASH, DEMAND, Settings(), 2 * (PER_COPY + PER_PAGE)) == counts(1, 1)


def test_a_stage_without_c128_has_no_request_blocks():
    specs = init_groups(Geometry((0, 4)))
    found = block_counts(specs, DEMAND, Settings(), 10**13)
    assert found == {Group.PAGED: 1000, Group.WINDOW: 48, Group.REQUEST: 0}


def test_a_stage_without_compressed_layers_has_no_token_blocks():
    specs = init_groups(Geometry((0, 0)))
    assert block_counts(specs, DEMAND, Settings(), 10**13) == {Group.PAGED: 0, Group.WINDOW: 48, Group.REQUEST: 0}


def total_bytes(g: Geometry, found: dict[Group, int]) -> int:
    """Bytes of an arena of these counts, from the published sizes."""
    c4, c128 = g.ratios.count(4), g.ratios.count(128)

    def padded(*sizes: int) -> int:
        end = 0
        for size in sizes:
            end = -(-end // 256) * 256 + size
        return -(-end // 4096) * 4096

    block = padded(c4 * 37_440, c4 * 8_448, c128 * 1_728)
    window = padded(len(g.ratios) * 74_752, c4 * 65_536, c4 * 16_384)
    return found[Group.PAGED] * block + found[Group.WINDOW] * window + found[Group.REQUEST] * padded(c128 * 524_288)


RATIO_LISTS = st.lists(st.sampled_from((0, 4, 128)), min_size=1, max_size=10).map(tuple)


def check_budget(ratios, pages, slots, host_gb, host_copies, ram, ranks) -> None:
    g = Geometry(ratios)
    settings_ = Settings(host_gb=host_gb, host_copies=host_copies)
    budget = ram // 2 // ranks if host_gb is None else host_gb * GIB
    try:
        found = block_counts(init_groups(g), PoolSize(pages, slots), settings_, ram, ranks)
    except HostMemoryExhausted:
        return
    assert all(count >= 0 for count in found.values())
    assert total_bytes(g, found) <= budget
    assert found[Group.WINDOW] >= 1
    if host_copies is not None:
        assert found[Group.WINDOW] == host_copies


@settings(max_examples=300, deadline=None)
@given(
    ratios=RATIO_LISTS.filter(lambda ratios: set(ratios) != {0}),
    pages=st.integers(1, 100_000),
    slots=st.integers(1, 4096),
    host_gb=st.one_of(st.none(), st.floats(1e-6, 500)),
    host_copies=st.one_of(st.none(), st.integers(1, 1000)),
    ram=st.integers(0, 2**40),
    ranks=st.integers(1, 8),
)
def test_never_more_bytes_than_the_budget(ratios, pages, slots, host_gb, host_copies, ram, ranks):
    check_budget(ratios, pages, slots, host_gb, host_copies, ram, ranks)


@pytest.mark.parametrize(
    ("host_gb", "host_copies", "ram"), [(None, None, 100_000), (1e-4, None, 0), (0.001, 500, 0), (None, 500, 1_000_000)]
)
def test_never_more_than_the_budget_without_compressed_layers(host_gb, host_copies, ram):
    check_budget((0, 0), 100, 48, host_gb, host_copies, ram, 1)


def test_too_many_copies_are_named():
    with pytest.raises(HostMemoryExhausted, match="DSV4_HOST_COPIES"):
        block_counts(FLASH, DEMAND, Settings(host_gb=1.0, host_copies=70), 10**12)


def on_a_machine(monkeypatch, tmp_path, files: dict[str, str]) -> None:
    """One with 800 bytes of free RAM, and these files below /."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(sizing, "Path", lambda path: tmp_path / str(path).lstrip("/"))
    monkeypatch.setattr(sizing, "psutil", SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=800)))


@pytest.mark.parametrize(
    ("limit", "used", "wanted"),
    [
        (None, None, 800),
        ("max", "5", 800),
        ("500", "200", 300),
        ("5000", "100", 800),
        ("500", None, 800),
        ("5", "9", 0),
    ],
)
def test_free_ram_respects_the_control_group_of_a_container(monkeypatch, tmp_path, limit, used, wanted):
    given = {"memory.max": limit, "memory.current": used}
    files = {f"sys/fs/cgroup/{name}": text for name, text in given.items() if text is not None}
    on_a_machine(monkeypatch, tmp_path, files | {"proc/self/cgroup": "0::/"})
    assert free_ram() == wanted


V1, V2 = ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")


@pytest.mark.parametrize(
    ("own", "place", "names"),
    [
        ("0::/system.slice/job_7", "system.slice/job_7", V2),
        ("0::/limited.slice/server.service", "limited.slice", V2),
        ("9:cpu,memory:/slurm/job_7", "memory/slurm/job_7", V1),
        ("1:name=systemd:/\n9:memory:/docker/1f", "memory", V1),
        ("0::/../../elsewhere", "", V2),
    ],
)
def test_free_ram_respects_each_control_group_of_the_process(monkeypatch, tmp_path, own, place, names):
    limit, used = (f"sys/fs/cgroup/{place}/{name}" for name in names)
    on_a_machine(monkeypatch, tmp_path, {"proc/self/cgroup": own, limit: "500", used: "200"})
    assert free_ram() == 300


def test_a_control_group_of_somebody_else_does_not_count(monkeypatch, tmp_path):
    other = {"sys/fs/cgroup/other/memory.max": "500", "sys/fs/cgroup/other/memory.current": "200"}
    on_a_machine(monkeypatch, tmp_path, other | {"proc/self/cgroup": "0::/mine\n4:cpu:/other"})
    assert free_ram() == 800
    (tmp_path / "proc/self/cgroup").unlink()
    assert free_ram() == 800, "no Linux, or no control groups"


@pytest.mark.parametrize(("names", "idle"), [(V1, "total_inactive_file"), (V2, "inactive_file")])
def test_idle_page_cache_is_free(monkeypatch, tmp_path, names, idle):
    """Of weights that were read, say."""
    folder = "sys/fs/cgroup/memory" if names is V1 else "sys/fs/cgroup"
    files = {f"{folder}/{name}": text for name, text in zip(names, ("500", "490"), strict=True)}
    files |= {f"{folder}/memory.stat": f"cache 450\n{idle} 300\nactive_file 150"}
    on_a_machine(monkeypatch, tmp_path, files | {"proc/self/cgroup": "4:memory:/" if names is V1 else "0::/"})
    assert free_ram() == 310
