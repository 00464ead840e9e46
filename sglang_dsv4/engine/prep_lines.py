"""StepMetadata -> the metadata objects of the installed engine, and the little else in which its lines differ here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sglang_dsv4.engine.releases import line_of
from sglang_dsv4.prep.metadata import CompressPlan, StepMetadata
from sglang_dsv4.prep.step import Tables


@dataclass(frozen=True)
class PrepLine:
    """One engine line, as the metadata builder sees it.

    read_done: attribute of the model runner that the scheduler's barrier takes the event from. topk: attribute of the
    backend, columns of the C4 sparse indices.
    keep: (ratio, ring rows) -> trailing tokens that a verified step writes to the ring in any case.
    pages: (backend, batch) -> width of a decode step's page table; None: that of the longest request.
    own_reason: (backend, batch, verify) -> why the engine's own builder must make this step, or None.
    compose: (backend, metadata, out_locs) -> the engine's metadata object, with the engine's own planners.
    compose_window: the same for a step whose layers have the SWA window alone.
    install: (backend, metadata, out_locs, batch) makes ``metadata`` that of the backend's next forward.
    no_graphs: why no graph of a step makes its own metadata in this process, or None.
    """

    read_done: str
    topk: str
    keep: Callable[[int, int], int]
    pages: Callable[[Any, Any], int | None]
    own_reason: Callable[[Any, Any, bool], str | None]
    compose: Callable[[Any, StepMetadata, torch.Tensor], Any]
    compose_window: Callable[[Any, StepMetadata, torch.Tensor], Any]
    install: Callable[[Any, StepMetadata, torch.Tensor, Any], None]
    no_graphs: Callable[[], str | None]


def prep_line(version: str) -> PrepLine:
    """What an engine version needs. Raises KeyError for a version without a line."""
    line = line_of(version)
    return _LINES[line.first if line else ""]


def tables_of(backend: Any) -> Tables:
    """The engine's tables as they are now; the map is held by a proxy."""
    return Tables(backend.req_to_token, backend.token_to_kv_pool.full_to_swa_index_mapping.detach())


def _core_fields(backend: Any, made: StepMetadata, out_locs: torch.Tensor) -> dict[str, Any]:
    """Constructor arguments that both lines have."""
    return {
        "page_size": backend.page_size,
        "page_table": made.page_table,
        "raw_out_loc": out_locs,
        "cuda_int32_kwargs": backend.cuda_int32_kwargs,
        "seq_lens_casual": made.lengths,
        "positions_casual": made.positions,
        "swa_page_indices": made.swa_indices,
        "swa_topk_lengths": made.swa_lengths,
        "swa_out_cache_loc": made.swa_out_locs,
    }


def _c4_fields(made: StepMetadata) -> dict[str, Any]:
    return {
        "c4_out_loc": made.c4_out_locs,
        "c4_topk_lengths_raw": made.c4_lengths,
        "c4_topk_lengths_clamp1": made.c4_clamped,
    }


def _c128_fields(made: StepMetadata) -> dict[str, Any]:
    return {
        "c128_out_loc": made.c128_out_locs,
        "c128_page_indices": made.c128_indices,
        "c128_topk_lengths_clamp1": made.c128_clamped,
    }


def _compress(ratio: int, plan: CompressPlan) -> Any:
    from sglang.srt.layers.attention.dsv4 import compressor_v2 as engine  # noqa: PLC0415

    if plan.write is None:
        return engine.CompressorDecodePlan(ratio, plan.plan)
    return engine.CompressorPrefillPlan(ratio, plan.plan, plan.write)


def _compose_0_5_17(backend: Any, made: StepMetadata, out_locs: torch.Tensor) -> Any:
    from sglang.srt.layers.attention import deepseek_v4_backend as engine  # noqa: PLC0415

    core = engine.DSV4AttnMetadata(
        **_core_fields(backend, made, out_locs),
        **_c4_fields(made),
        **_c128_fields(made),
        c4_sparse_topk=backend.c4_topk,
    )
    core.c4_sparse_topk_lengths = made.c4_sparse_lengths
    core.c4_sparse_page_indices = made.c4_sparse_indices
    for name in ("c1", "c4", "c128"):
        setattr(core, f"{name}_flashmla_metadata", engine._create_flashmla_metadata())
    return engine.DSV4Metadata(
        core,
        backend.init_forward_metadata_indexer(core),
        c4_compress_metadata=_compress(4, made.c4),
        c128_compress_metadata=_compress(128, made.c128),
    )


def _install_0_5_17(backend: Any, made: StepMetadata, out_locs: torch.Tensor, forward_batch: Any) -> None:
    backend.online_c128_mtp.clear()
    backend.forward_metadata = _compose_0_5_17(backend, made, out_locs)


def _compose_window_0_5_17(backend: Any, made: StepMetadata, out_locs: torch.Tensor) -> Any:
    from sglang.srt.layers.attention import deepseek_v4_backend as engine  # noqa: PLC0415

    fields = _core_fields(backend, made, out_locs) | {"swa_out_cache_loc": None}
    core = engine.DSV4AttnMetadata(**fields, c4_sparse_topk=backend.c4_topk)
    core.c4_sparse_topk_lengths = core.c4_sparse_page_indices = core.c4_sparse_raw_indices = None
    core.c1_flashmla_metadata = engine._create_flashmla_metadata()
    core.c4_flashmla_metadata = core.c128_flashmla_metadata = None
    return engine.DSV4Metadata(core, None)


def _compose_window_0_5_22(backend: Any, made: StepMetadata, out_locs: torch.Tensor) -> Any:
    from sglang.srt.layers.attention import deepseek_v4_backend as engine  # noqa: PLC0415

    kept = backend._fill_cuda_graph_swa_out_cache_loc(out_locs)  # a captured graph reads them there
    fields = _core_fields(backend, made, out_locs) | ({} if kept is None else {"swa_out_cache_loc": kept})
    core = engine.DSV4AttnMetadata(
        **fields, index_topk=backend.index_topk, present_ratios=backend.present_ratios, low_ratios=backend.low_ratios
    )
    core.c4_sparse_topk_lengths = core.c4_sparse_page_indices = core.c4_sparse_raw_indices = None
    core.c0_flashmla_metadata = engine._create_flashmla_metadata()
    core.c4_flashmla_metadata = core.c128_flashmla_metadata = None
    return engine.DSV4Metadata(core_attn_metadata=core, indexer_metadata=None)


def _compose_0_5_22(backend: Any, made: StepMetadata, out_locs: torch.Tensor) -> Any:
    from sglang.srt.layers.attention import deepseek_v4_backend as engine  # noqa: PLC0415

    c4, c128 = backend.has_c4, backend.has_c128
    core = engine.DSV4AttnMetadata(
        **_core_fields(backend, made, out_locs),
        **(_c4_fields(made) if c4 else {}),
        **(_c128_fields(made) if c128 else {}),
        index_topk=backend.index_topk,
        present_ratios=backend.present_ratios,
        low_ratios=backend.low_ratios,
    )
    core.c4_sparse_topk_lengths = made.c4_sparse_lengths if c4 else None
    core.c4_sparse_page_indices = made.c4_sparse_indices if c4 else None
    for name, present in (("c0", True), ("c4", c4), ("c128", c128)):
        setattr(core, f"{name}_flashmla_metadata", engine._create_flashmla_metadata() if present else None)
    return engine.DSV4Metadata(
        core,
        backend.init_forward_metadata_indexer(core) if c4 else None,
        c4_compress_metadata=_compress(4, made.c4) if c4 else None,
        c128_compress_metadata=_compress(128, made.c128) if c128 else None,
    )


def _install_0_5_22(backend: Any, made: StepMetadata, out_locs: torch.Tensor, forward_batch: Any) -> None:
    backend.online_c128_mtp.clear()
    backend.encoder_replay = forward_batch.encoder_swa_replay
    backend.encoder_row_floor = _row_floor(forward_batch)
    backend.forward_metadata = _compose_0_5_22(backend, made, out_locs)
    backend.tail_forward_metadata = None


def _own_reason_0_5_17(backend: Any, forward_batch: Any, verify: bool) -> str | None:
    prefill = verify and not _in_graph_prep()
    return "SGLANG_PREP_IN_CUDA_GRAPH=0 verifies drafts through the prefill builder" if prefill else None


def _no_graphs_0_5_17() -> str | None:
    return None if _in_graph_prep() else "SGLANG_PREP_IN_CUDA_GRAPH=0 has it made before them"


def _own_reason_0_5_22(backend: Any, forward_batch: Any, verify: bool) -> str | None:
    replays = forward_batch.encoder_swa_replay or _row_floor(forward_batch) is not None
    return "the SWA window is being replayed" if replays else None


def _row_floor(forward_batch: Any) -> Any:
    return getattr(forward_batch, "encoder_swa_row_floor", None)  # 0.5.22 has none


def _in_graph_prep() -> bool:
    from sglang.srt.environ import envs  # noqa: PLC0415

    return bool(envs.SGLANG_PREP_IN_CUDA_GRAPH.get())


def _pages_0_5_17(backend: Any, forward_batch: Any) -> int | None:
    if _in_graph_prep():
        return None
    most = getattr(forward_batch, "max_seq_len_override", None)
    if most is None and forward_batch.seq_lens_cpu is not None:
        most = int(forward_batch.seq_lens_cpu.max())
    return None if most is None else -(-most // backend.page_size)


def _keep_0_5_17(ratio: int, ring: int) -> int:
    return min(ring - ratio, 4)


def _keep_0_5_22(ratio: int, ring: int) -> int:
    window = 8 if ratio == 4 else 128
    return ring - window + 2 if ring > window else 0


_LINES = {
    "0.5.17": PrepLine(
        "war_fastpath_read_done_event", "c4_topk", _keep_0_5_17, _pages_0_5_17, _own_reason_0_5_17, _compose_0_5_17,
        _compose_window_0_5_17, _install_0_5_17, _no_graphs_0_5_17,
    ),
    "0.5.22": PrepLine(
        "shared_read_done_event", "index_topk", _keep_0_5_22, lambda *_: None, _own_reason_0_5_22, _compose_0_5_22,
        _compose_window_0_5_22, _install_0_5_22, lambda: None,
    ),
}  # fmt: skip
