"""Layouts that are not covered are refused by name, with one log line, and the engine keeps its own behaviour."""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from server_fixture import since_0523
from sglang.srt.runtime_context import override_platform

from sglang_dsv4.engine.memory import host_of
from sglang_dsv4.errors import HostMemoryExhausted, LayoutRefused
from sglang_dsv4.pools.copy_service import ServerContext
from sglang_dsv4.pools.describe import INDEX_PAGE8, REORDERED_INDEX, environment_refusal
from sglang_dsv4.settings import Settings
from sglang_dsv4.testing.standalone import PoolSpec, make_pool


def assert_refused(pool: Any, reason: str, caplog: pytest.LogCaptureFixture, stages: int = 1) -> None:
    """The pool refuses with ``reason``, and says so once."""
    caplog.set_level(logging.INFO)
    assert pool.attach_host(Settings(), ServerContext(stages=stages)) is None
    indices = torch.arange(256, 300)
    for call in (
        lambda: pool.get_cpu_copy(indices, req_pool_index=1),
        lambda: pool.load_cpu_copy(object(), indices, req_pool_index=1),
        lambda: pool.get_cpu_copy(indices),
    ):
        with pytest.raises(NotImplementedError, match=reason) as caught:
            call()
        assert isinstance(caught.value, LayoutRefused)
    assert host_of(SimpleNamespace(get_kvcache=lambda: pool)) is None
    lines = [record for record in caplog.records if "the engine's own behaviour stays" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].levelno == logging.WARNING


@pytest.mark.parametrize(
    ("spec", "reason"), [(PoolSpec(hisparse=True), "HiSparse"), (PoolSpec(draft_tokens=9), "9 draft tokens")]
)
def test_a_real_pool_is_refused(caplog: pytest.LogCaptureFixture, spec: PoolSpec, reason: str) -> None:
    assert_refused(make_pool(spec), reason, caplog)


def set_part(**values: Any) -> Callable[[Any, pytest.MonkeyPatch], None]:
    """Sets attributes; ``part__name`` sets ``name`` of ``part``."""

    def change(pool: Any, patch: pytest.MonkeyPatch) -> None:
        for path, value in values.items():
            part, _, name = path.rpartition("__")
            patch.setattr(getattr(pool, part) if part else pool, name, value, raising=False)

    return change


def online_c128(width: int = 3 * 512, **pool_values: Any) -> Callable[[Any, pytest.MonkeyPatch], None]:
    def change(pool: Any, patch: pytest.MonkeyPatch) -> None:
        for state in pool.compress_state_pools:
            if state is not None and state.ratio == 128:
                rows = state.kv_score_buffer.kv_score
                patch.setattr(state, "ring_size", 1)
                patch.setattr(state, "online", True)
                patch.setattr(state.kv_score_buffer, "kv_score", rows.new_zeros(6, width))
        set_part(**pool_values)(pool, patch)

    return change


def wider_rows(pool: Any, patch: pytest.MonkeyPatch) -> None:
    wide = [buffer.new_zeros(len(buffer), buffer.shape[1] + 576) for buffer in pool.swa_kv_pool.kv_buffer]
    patch.setattr(pool.swa_kv_pool, "kv_buffer", wide)


def a_layer_less(pool: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pool.c4_kv_pool, "kv_buffer", pool.c4_kv_pool.kv_buffer[:-1])


def ratios(*values: int) -> Callable[[Any, pytest.MonkeyPatch], None]:
    return lambda pool, patch: patch.setattr(pool, "compression_ratios", list(values))


UNKNOWN: dict[str, tuple[Callable[[Any, pytest.MonkeyPatch], None], str]] = {
    "unified kv": (set_part(swa_kv_pool=None), "no paged SWA pool"),
    "ratio 8": (ratios(0, 0, 4, 128, 8, 128), "compression ratios \\[8\\] are not covered"),
    "ratio 2 without a source": (ratios(0, 0, 4, 128, 2, 128), "c4_kv: 2 buffers for 1 layers"),
    "sm120 swa pages": (set_part(swa_page_size=64, swa_kv_pool__page_size=64), "64"),
    "pages of 32 rows": (set_part(swa_kv_pool__page_size=32), "swa_kv_pool has pages of 32 rows, covered: 256 and 64"),
    "not those of 64 rows": (set_part(swa_kv_pool__page_size=64), "swa_kv, layer 0: buffer of shape"),
    "pages of 128 tokens": (set_part(page_size=128), "pages of 128 and 256 tokens"),
    "wide rows": (set_part(c4_kv_pool__get_bytes_per_token=lambda: 512), "c4_kv_pool has 512 bytes a row"),
    "split indexer": (set_part(c4_indexer_kv_pool__index_k_with_scale_buffer=None), "an indexer without buffers"),
    "index rows in another order": (set_part(c4_indexer_kv_pool__index_k_page8=True), "INDEX_K_PAGE8: index rows"),
    "online c128 with drafts": (online_c128(online_mtp_max_draft_tokens=4), "online c128 compression with drafts"),
    "online c128 with HiSparse": (online_c128(c4_kv_pool__data_ptrs=[]), "online c128 compression with HiSparse"),
    "online c128 over stages": (online_c128(), "online c128 compression with pipeline stages"),
    "online c128 in rows of two parts": (online_c128(2 * 512), "c128_online_state, layer 3: buffer of shape"),
    "padded rows": (wider_rows, "swa_kv, layer 0: buffer of shape"),
    "a layer less": (a_layer_less, "c4_kv: 1 buffers for 2 layers"),
    "uniform fp8": (set_part(uniform_fp8=True), "uniform fp8"),
    "rows of another kind": (
        set_part(c4_kv_pool__kv_layout=SimpleNamespace(value="v50")),
        "c4_kv_pool has v50 rows, covered: v4, v41",
    ),
    "rows that are not so wide": (
        set_part(swa_kv_pool__kv_layout=SimpleNamespace(value="v41"), swa_kv_pool__get_bytes_per_token=lambda: 584),
        "swa_kv_pool has 584 bytes a row, covered: 528",
    ),
    "request window": (set_part(request_window=object()), "request_window"),
    "swa ring": (set_part(swa_req_ring_size=128), "draft SWA ring"),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_an_unknown_layout_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    pool = make_pool(PoolSpec())
    change, reason = UNKNOWN[case]
    change(pool, monkeypatch)
    assert_refused(pool, reason, caplog, stages=2 if "stages" in case else 1)


def test_too_little_memory_refuses_only_when_nobody_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_dsv4.hostmem import claims

    monkeypatch.setattr(claims, "free_ram", lambda _: 1 << 20)
    pool = make_pool(PoolSpec())
    assert pool.attach_host(Settings()) is None
    assert "raise DSV4_HOST_GB" in pool.refusal
    with pytest.raises(HostMemoryExhausted, match="DSV4_HOST_GB"):
        make_pool(PoolSpec()).attach_host(Settings(host_gb=0.0001))


@since_0523
@pytest.mark.parametrize(("hip", "ratio", "refused"), [(True, 1, True), (False, 1, False), (True, 4, False)])
def test_index_rows_in_another_order_are_foreseen(
    monkeypatch: pytest.MonkeyPatch, hip: bool, ratio: int, refused: bool
) -> None:
    """The doctor has no pool: by the variable, which ROCm servers of V4.1 alone read."""
    monkeypatch.setenv(INDEX_PAGE8, "1")
    with override_platform(is_hip=hip, is_cuda=not hip):
        assert (environment_refusal((0, ratio)) == REORDERED_INDEX) is refused
