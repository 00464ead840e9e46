"""A server refuses DSV4_LAYOUT=page-major by name, at start, where it is not covered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pool_fixture import HIP, engine_on
from server_fixture import VERSION

from sglang_dsv4.engine import page_major
from sglang_dsv4.engine.coverage import EARLY_SEND, launch
from sglang_dsv4.engine.releases import base, v0_5_22
from sglang_dsv4.errors import SettingError
from sglang_dsv4.testing.standalone import (
    FLASH41_RATIOS,
    FLASH41_SOURCES,
    FLASH_RATIOS,
    PoolSpec,
    boot,
    make_allocator,
    make_pool,
)

UNEVEN = (0, 0, 4, 128, 4, 128, 4)
MOST_PAGES = 399_456  # of Flash: the slots of one more, with page 0 and the other layers' ids, pass 2^31
TRANSFERS = {"disaggregation_mode": "decode", "disaggregation_transfer_backend": "nixl"}


@pytest.fixture(autouse=True)
def _page_major(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_LAYOUT", "page-major")


@pytest.mark.parametrize(
    ("named", "arguments"),
    [
        ("pipelines", {"pp_size": 2}),
        ("context parallelism", {"attn_cp_size": 2}),
        ("context parallelism", {"dcp_size": 2}),
        ("HiSparse", {"enable_hisparse": True}),
        ("hierarchical cache", {"enable_hierarchical_cache": True}),
        ("hierarchical cache", {"enable_lmcache": True}),
        ("hierarchical cache", TRANSFERS | {"disaggregation_decode_enable_offload_kvcache": True}),
        ("routed experts", {"enable_return_routed_experts": True}),
        ("indexer choices", {"enable_return_indexer_topk": True}),
        ("kv-canary", {"kv_canary": "log"}),
        ("mori", TRANSFERS | {"disaggregation_transfer_backend": "mori"}),
        (None, {"disaggregation_transfer_backend": "mori"}),  # where there are no transfers it does not count
        (None, TRANSFERS),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(named: str | None, arguments: dict[str, Any]) -> None:
    made = PoolSpec(UNEVEN, pages=6, swa_pages=6, server_args=arguments)
    if named is None:
        assert make_allocator(made, make_pool(made)).full_attn_allocator.page_stride == 3
        return
    with pytest.raises(SettingError, match=rf"DSV4_LAYOUT=page-major.*{named}.*[Uu]nset DSV4_LAYOUT"):
        make_allocator(made, make_pool(made))


@pytest.fixture
def pool() -> Any:
    """Returns a pool of Flash."""
    return make_pool(PoolSpec(FLASH_RATIOS, pages=2, swa_pages=2))


def check(pool: Any, named: str | None) -> None:
    """The pool is refused by this name, or taken."""
    if named is None:
        page_major.refuse(pool)
        return
    with pytest.raises(SettingError, match=rf"DSV4_LAYOUT=page-major.*{named}"):
        page_major.refuse(pool)


@pytest.mark.parametrize(
    ("named", "changed"),
    [
        ("unified_kv", {"_unified_kv": True, "c4_kv_pool": None, "c128_kv_pool": None}),
        ("a window a request", {"swa_kv_pool": None}),
        (None, {"c4_kv_pool": SimpleNamespace(size=64 * MOST_PAGES, page_size=64)}),
        (f"{MOST_PAGES + 1} pages", {"c4_kv_pool": SimpleNamespace(size=64 * (MOST_PAGES + 1), page_size=64)}),
    ],
)
def test_other_pools_are_refused_by_name(pool: Any, named: str | None, changed: dict[str, Any]) -> None:
    """Slots are counted in 32 bits."""
    vars(pool).update(changed)
    check(pool, named)


@pytest.mark.parametrize(
    ("tested", "capability", "named"),
    [
        (VERSION, (9, 0), None), ("0.5.99", (9, 0), rf"sglang {VERSION} \(tested: 0.5.99\)"),
        (VERSION, (10, 0), "compute capability"), (VERSION, (12, 0), "compute capability"),
    ],
)  # fmt: skip
def test_other_releases_and_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch, pool: Any, tested: str, capability: tuple[int, int], named: str | None
) -> None:
    """Whose attention may count bytes in 32 bits."""
    monkeypatch.setattr(page_major, "TESTED", (tested,))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    pool.device = "cuda"
    check(pool, named)


@pytest.mark.parametrize(
    ("release", "mode", "switch", "refused"),
    [
        (v0_5_22, "prefill", "1", True), (v0_5_22, "prefill", "0", False), (v0_5_22, "decode", "1", False),
        (base, "prefill", "1", False),
    ],
)  # fmt: skip
def test_a_release_whose_nixl_sends_before_the_forward_has_written(
    release: Any, mode: str, switch: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_major, "launch", lambda: launch(release=release.Release()))
    monkeypatch.setenv(EARLY_SEND, switch)
    boot(**{**TRANSFERS, "disaggregation_mode": mode})
    assert any(EARLY_SEND in reason for reason in page_major.server_reasons(False)) is refused
    boot()


@pytest.mark.parametrize("layers", [1, 3, 4])
def test_a_draft_with_compressed_layers_is_refused(layers: int) -> None:
    """However many: the target's ids are multiples of its own 3."""
    made = PoolSpec(UNEVEN, pages=24, swa_pages=24)
    allocator = make_allocator(made, make_pool(made))
    draft = make_pool(PoolSpec((4,) * layers, pages=24, swa_pages=24))
    with pytest.raises(SettingError, match="DSV4_LAYOUT=page-major: a draft with compressed layers"):
        draft.register_mapping(allocator.full_to_swa_index_mapping)


@pytest.mark.parametrize(
    ("spec", "engine", "named"),
    [
        (PoolSpec(UNEVEN, hisparse=True), None, "a HiSparseC4DevicePool"),
        (PoolSpec(FLASH41_RATIOS, sources=FLASH41_SOURCES), None, r"compression ratios \[0, 1, 2\]"),
        (PoolSpec(UNEVEN, fp4_indexer=True), HIP, "an indexer that keeps its scales apart"),
    ],
    ids=["hisparse", "v41", "hip"],
)
def test_pools_of_another_kind_are_refused(spec: PoolSpec, engine: str | None, named: str) -> None:
    with engine_on(engine), pytest.raises(SettingError, match=f"DSV4_LAYOUT=page-major: {named}"):
        make_pool(spec)
