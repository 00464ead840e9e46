"""The hook table: every place where this package enters the engine, in the order of the request's life.

Read by the plugin (which registers it), by ``landed`` (which checks it) and by tools/compat.py (which looks for
the targets in every release). Importing this module imports nothing of the engine.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from typing import Any

BOTH = ("0.5.17", "0.5.23")
OLD = ("0.5.17",)
NEW = ("0.5.23",)
TESTED = BOTH  # releases that the suite runs against

_POOLS = "sglang.srt.mem_cache.deepseek_v4_memory_pool"
_QUEUE = "sglang.srt.disaggregation.decode.DecodePreallocQueue"
_WEIGHTS = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_COMMON = "sglang.srt.mem_cache.common"
_BATCH = "sglang.srt.managers.schedule_batch"
_ATTENTION = "sglang.srt.layers.attention.deepseek_v4_backend"
_EAGER = "sglang.srt.model_executor.runner.eager_runner.EagerRunner"


@dataclass(frozen=True)
class Hook:
    """One entry.

    target: dotted path in the engine. kind: replace, around, before or after. lines: adapters that use it.
    hook: ``module:name`` of ours. params: parameters of the target that the hook relies on. also: modules that
    bind the target's name by import; the hook must have reached them too. prep: used only where the metadata
    builder is wanted.
    """

    target: str
    kind: str
    lines: tuple[str, ...]
    hook: str
    why: str
    params: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    prep: bool = False

    def resolve(self) -> Any:
        """Our function or class."""
        module, name = self.hook.split(":")
        return getattr(importlib.import_module(module), name)


HOOKS: tuple[Hook, ...] = (
    Hook(f"{_POOLS}.DeepSeekV4SingleKVPool", "replace", BOTH, "sglang_dsv4.pools.single_kv:SingleKVPool",
         "host copies of kv rows"),
    Hook(f"{_POOLS}.HiSparseC4DevicePool", "replace", BOTH, "sglang_dsv4.pools.hisparse:HiSparseC4DevicePool",
         "host copies of rows behind the HiSparse mapping"),
    Hook(f"{_POOLS}.DeepSeekV4IndexerPool", "replace", BOTH, "sglang_dsv4.pools.indexer:IndexerPool",
         "host copies of indexer rows"),
    Hook("sglang.srt.mem_cache.deepseek_v4_compress_state.CompressStatePool", "replace", BOTH,
         "sglang_dsv4.pools.compress_state:CompressStatePool", "host copies of state rows", also=(_POOLS,)),
    Hook(f"{_POOLS}.DeepSeekV4TokenToKVPool", "replace", BOTH, "sglang_dsv4.pools.token_to_kv:TokenToKVPool",
         "host copies of whole requests",
         also=("sglang.srt.disaggregation.decode", "sglang.srt.mem_cache.kv_cache_configurator")),
    Hook(f"{_QUEUE}.__init__", "after", OLD, "sglang_dsv4.engine.server:attach",
         "decode servers reserve and pin the arena here: at start, on the target pool only, with the streams known"),
    Hook(f"{_QUEUE}.__init__", "after", NEW, "sglang_dsv4.engine.v0_5_23:attach", "the same"),
    Hook(f"{_BATCH}.Req.offload_kv_cache", "around", OLD, "sglang_dsv4.engine.v0_5_17:offload_kv_cache",
         "0.5.17 does not pass the request's slot", params=("req_to_token_pool", "token_to_kv_pool_allocator")),
    Hook(f"{_COMMON}.backup_kv_cache", "around", NEW, "sglang_dsv4.engine.v0_5_23:backup_kv_cache",
         "the engine saves nothing for DeepSeek-V4",
         params=("req", "tree_cache", "req_to_token_pool", "token_to_kv_pool_allocator", "backend"), also=(_BATCH,)),
    Hook(f"{_BATCH}.ScheduleBatch.retract_decode", "after", OLD, "sglang_dsv4.engine.v0_5_17:retract_decode",
         "a request without a copy that cannot be recomputed is aborted; copies of aborted requests are released"),
    Hook(f"{_BATCH}.ScheduleBatch.retract_decode", "before", NEW, "sglang_dsv4.engine.v0_5_23:retract_decode",
         "the last request is aborted without a save, which would have waited for its load"),
    Hook(f"{_QUEUE}.add", "around", OLD, "sglang_dsv4.engine.v0_5_17:add",
         "a request without a copy is recomputed by its prefill server",
         params=("req", "is_retracted", "is_rebootstrap")),
    Hook(f"{_QUEUE}.add", "around", NEW, "sglang_dsv4.engine.v0_5_23:add",
         "a request with a copy waits for memory instead of being recomputed",
         params=("req", "is_retracted", "is_rebootstrap")),
    Hook(f"{_BATCH}.Req.build_rebootstrap_payload", "after", BOTH, "sglang_dsv4.engine.recompute:rename",
         "the prefill server may still have a request of that id"),
    Hook("sglang.srt.disaggregation.decode.DecodeTransferQueue._commit_transfer_to_req", "before", BOTH,
         "sglang_dsv4.engine.recompute:remember_rank", "which rank of the prefill server is asked for a recompute",
         params=("decode_req",)),
    Hook("sglang.srt.disaggregation.decode.DecodeTransferQueue._commit_transfer_to_req", "after", OLD,
         "sglang_dsv4.engine.v0_5_17:trim_sampling_masks", "0.5.17 has two of the token that a recompute replays",
         params=("decode_req",)),
    Hook(f"{_COMMON}.dsv4_needs_rebootstrap", "around", NEW, "sglang_dsv4.engine.v0_5_23:dsv4_needs_rebootstrap",
         "it decides for the pool; a request with a copy decides otherwise", params=("token_to_kv_pool_allocator",),
         also=("sglang.srt.disaggregation.decode",)),
    Hook(f"{_QUEUE}.resume_retracted_reqs", "around", OLD, "sglang_dsv4.engine.v0_5_17:resume_retracted_reqs",
         "copies saved under other weights are dropped first; transfers that have arrived stay where they are while a "
         "copy waits, perhaps for their pages", params=("rids_to_check",)),
    Hook(f"{_QUEUE}.resume_retracted_reqs", "around", NEW, "sglang_dsv4.engine.v0_5_23:resume_retracted_reqs",
         "the same", params=("rids_to_check",)),
    Hook(f"{_QUEUE}._prealloc_required_tokens", "after", OLD, "sglang_dsv4.engine.v0_5_17:prealloc_required_tokens",
         "0.5.17 estimates in tokens what it allocates in pages, and dies where the second of two does not fit; and a "
         "copy of nearly all of the pool, with the engine's reserve, would wait for ever", params=("req",)),
    Hook(f"{_QUEUE}._prealloc_required_tokens", "after", NEW, "sglang_dsv4.engine.v0_5_23:prealloc_required_tokens",
         "a copy of nearly all of the pool, with the engine's reserve, would wait for ever", params=("req",)),
    Hook(f"{_BATCH}.Req.load_kv_cache", "around", OLD, "sglang_dsv4.engine.v0_5_17:load_kv_cache",
         "0.5.17 does not pass the request's new slot", params=("req_to_token_pool", "token_to_kv_pool_allocator")),
    Hook("sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
         ".process_batch_result_prebuilt", "before", BOTH, "sglang_dsv4.engine.server:settle_ending",
         "pages given away before a queued load has written them might be filled by a transfer first",
         params=("batch",)),
    Hook("sglang.srt.managers.scheduler.Scheduler.pause_generation", "before", BOTH,
         "sglang_dsv4.engine.server:settle_loads", "the same"),
    Hook("sglang.srt.managers.scheduler.Scheduler.abort_request", "before", BOTH,
         "sglang_dsv4.engine.recompute:before_abort",
         "the same; and a request that waits for its recompute is in no queue", params=("recv_req",)),
    Hook("sglang.srt.managers.scheduler.Scheduler.abort_request", "around", OLD,
         "sglang_dsv4.engine.v0_5_17:abort_request", "copies of aborted requests are released", params=("recv_req",)),
    Hook(f"{_QUEUE}.release_memory_occupation", "before", OLD,
         "sglang_dsv4.engine.v0_5_17:release_memory_occupation", "copies of dropped requests are released"),
    Hook("sglang.srt.managers.scheduler.Scheduler.flush_cache", "around", OLD,
         "sglang_dsv4.engine.v0_5_17:flush_cache",
         "0.5.17 dies where a weight update cannot flush; a copy that waits holds nothing that a flush clears"),
    Hook("sglang.srt.managers.scheduler.Scheduler.handle_pd_role_switch", "around", NEW,
         "sglang_dsv4.engine.v0_5_23:handle_pd_role_switch",
         "a request held for its recompute would be lost: the engine thinks itself idle", params=("recv_req",)),
    Hook(f"{_COMMON}.discard_kv_cache_backup", "around", NEW, "sglang_dsv4.engine.v0_5_23:discard_kv_cache_backup",
         "copies of aborted and dropped requests are released", params=("req", "tree_cache", "backend"),
         also=("sglang.srt.managers.scheduler", "sglang.srt.disaggregation.decode")),
    *(
        Hook(f"{_WEIGHTS}.update_weights_from_{source}", "around", BOTH, "sglang_dsv4.engine.server:weights_changed",
             "a copy saved under other weights must not be loaded")
        for source in ("disk", "distributed", "tensor", "ipc")
    ),
    *(
        Hook(f"{_WEIGHTS}.{step}_weight_update", "around", NEW, "sglang_dsv4.engine.server:weights_changed",
             "weights can also be written from outside, between these two calls")
        for step in ("begin", "end")
    ),
    Hook(f"{_ATTENTION}.DeepseekV4AttnBackend.__init__", "after", BOTH, "sglang_dsv4.engine.prep_attach:attach",
         "a metadata builder for each attention backend of the target model", params=("model_runner",), prep=True),
    Hook("sglang.srt.managers.scheduler.Scheduler.run_event_loop", "before", BOTH,
         "sglang_dsv4.engine.prep_hooks:run_event_loop",
         "whose streams are asked for: of the writes to the tables, and of the forwards", prep=True),
    Hook(f"{_QUEUE}._pre_alloc", "before", BOTH, "sglang_dsv4.engine.prep_hooks:before_pre_alloc",
         "a finished request's last forward may still write the pages and the slot given away here", prep=True),
    *(
        Hook(f"{_WEIGHTS}.update_weights_from_{source}", "before", BOTH, "sglang_dsv4.engine.prep_hooks:before_weights",
             "the last forward may still read the weights", prep=True)
        for source in ("disk", "distributed", "tensor", "ipc")
    ),
    Hook(f"{_WEIGHTS}.begin_weight_update", "before", NEW, "sglang_dsv4.engine.prep_hooks:before_weights", "the same",
         prep=True),
    Hook(f"{_EAGER}.load_batch", "around", BOTH, "sglang_dsv4.engine.prep_hooks:load_batch",
         "the last place where the scheduler's own tensors are seen: the step's preparation starts here",
         params=("forward_batch",), prep=True),
    Hook(f"{_ATTENTION}.DeepseekV4AttnBackend.init_forward_metadata", "around", BOTH,
         "sglang_dsv4.engine.prep_hooks:init_forward_metadata", "the metadata of eager decode steps",
         params=("forward_batch",), prep=True),
)  # fmt: skip

# Engine names that the hooks call or read without hooking them.
_SHARED_SYMBOLS = (
    f"{_POOLS}.DeepSeekV4TokenToKVPool._make_kv_pool",
    f"{_POOLS}.DeepSeekV4TokenToKVPool.full_to_swa_index_mapping",
    f"{_POOLS}.DeepSeekV4TokenToKVPool.compress_state_pools",
    f"{_POOLS}.DeepSeekV4TokenToKVPool.indexer_compress_state_pools",
    f"{_POOLS}.DeepSeekV4TokenToKVPool.compression_ratios",
    f"{_POOLS}.DeepSeekV4TokenToKVPool.online_mtp_max_draft_tokens",
    f"{_POOLS}.DeepSeekV4TokenToKVPool.sliding_window",
    f"{_POOLS}.DeepSeekV4TokenToKVPool.swa_kv_pool",
    f"{_POOLS}.DeepSeekV4TokenToKVPool.swa_page_size",
    f"{_POOLS}.DeepSeekV4TokenToKVPool.indexer_head_dim",
    f"{_POOLS}.DeepSeekV4TokenToKVPool.c4_kv_pool",
    f"{_POOLS}.DeepSeekV4TokenToKVPool.c128_kv_pool",
    f"{_POOLS}.DeepSeekV4TokenToKVPool.c4_indexer_kv_pool",
    f"{_POOLS}.DeepSeekV4TokenToKVPool._stage_start",
    f"{_POOLS}.DeepSeekV4SingleKVPool.get_bytes_per_token",
    f"{_POOLS}.DeepSeekV4IndexerPool.index_k_with_scale_buffer",
    "sglang.srt.mem_cache.deepseek_v4_compress_state.CompressStatePool.kv_score_buffer",
    "sglang.srt.mem_cache.deepseek_v4_compress_state.CompressStatePool.ring_size",
    f"{_QUEUE}.retracted_queue",
    f"{_QUEUE}.token_to_kv_pool_allocator",
    f"{_QUEUE}.scheduler",
    f"{_QUEUE}.held_rebootstrap_reqs",
    f"{_QUEUE}.hold_rebootstrap",
    f"{_QUEUE}.enqueue_held_rebootstrap",
    f"{_QUEUE}._prealloc_kv_lens",
    f"{_BATCH}.Req.to_finish",
    f"{_BATCH}.Req.bootstrap_room",
    f"{_BATCH}.Req.disagg_prefill_dp_rank",
    "sglang.srt.disaggregation.common.conn.CommonKVReceiver.prefill_dp_rank",
    "sglang.srt.mem_cache.allocator.swa.SWATokenToKVPoolAllocator.size_full",
    "sglang.srt.mem_cache.allocator.swa.SWATokenToKVPoolAllocator.size_swa",
    "sglang.srt.managers.scheduler.Scheduler._engine_paused",
    "sglang.srt.disaggregation.decode.DecodeTransferQueue.pop_transferred",
    "sglang.srt.managers.scheduler.Scheduler.waiting_queue",
    "sglang.srt.disaggregation.utils.prepare_abort",
    "sglang.srt.disaggregation.utils._is_fake_transfer",
    "sglang.srt.distributed.parallel_state.get_world_group",
    "sglang.srt.plugins.hook_registry.HookRegistry.register",
    f"{_BATCH}.FINISH_ABORT",
    f"{_BATCH}.Req.seqlen",
    f"{_BATCH}.Req.input_embeds",
    f"{_BATCH}.Req.multimodal_inputs",
    f"{_BATCH}.Req.return_logprob",
    "sglang.srt.managers.scheduler.Scheduler.forward_stream",
    "sglang.srt.managers.scheduler.Scheduler.schedule_stream",
    "sglang.srt.managers.scheduler.Scheduler.enable_overlap",
    "sglang.srt.managers.scheduler.Scheduler.metrics_collector",
    "sglang.srt.runtime_context.get_context",
    "sglang.srt.runtime_context.get_parallel",
    "sglang.srt.runtime_context.get_memory",
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch.seq_lens_cpu",
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch.global_num_tokens_cpu",
    f"{_POOLS}.DeepSeekV4TokenToKVPool.get_ring_size",
    f"{_ATTENTION}._create_flashmla_metadata",
    f"{_ATTENTION}._get_logical_forward_mode",
    f"{_ATTENTION}.DSV4AttnMetadata.swa_out_cache_loc",
    f"{_ATTENTION}.DSV4Metadata.c128_compress_metadata",
    f"{_ATTENTION}.DeepseekV4AttnBackend._resolve_verify_layout",
    f"{_ATTENTION}.DeepseekV4AttnBackend.init_forward_metadata_indexer",
    f"{_ATTENTION}.DeepseekV4AttnBackend.online_c128_mtp",
    "sglang.srt.layers.attention.dsv4.compressor_v2.CompressorDecodePlan",
    "sglang.srt.layers.attention.dsv4.compressor_v2.CompressorPrefillPlan",
)
USED_SYMBOLS: dict[str, tuple[str, ...]] = {
    "0.5.17": (
        *_SHARED_SYMBOLS,
        f"{_BATCH}.Req.req_pool_idx",
        f"{_BATCH}.Req.pd_rebootstrap_forced_output_id",
        f"{_BATCH}.Req.lora_id",
        f"{_BATCH}.Req.positional_embed_overrides",
        f"{_ATTENTION}.DeepseekV4AttnBackend.c4_topk",
        "sglang.srt.model_executor.model_runner.ModelRunner.war_fastpath_read_done_event",
    ),
    "0.5.23": (
        *_SHARED_SYMBOLS,
        f"{_BATCH}.ReqKvInfo.retraction_backup",
        f"{_COMMON}.RetractionBackup.cpu_tensors",
        "sglang.srt.runtime_context.get_disagg",
        f"{_POOLS}.DeepSeekV4TokenToKVPool.kv_layout",
        f"{_POOLS}.DeepSeekV4TokenToKVPool.uniform_fp8",
        f"{_POOLS}.DeepSeekV4TokenToKVPool.request_window",
        f"{_ATTENTION}.DeepseekV4AttnBackend.index_topk",
        f"{_ATTENTION}.DeepseekV4AttnBackend.present_ratios",
        f"{_ATTENTION}.DeepseekV4AttnBackend.low_ratios",
        f"{_ATTENTION}.DeepseekV4AttnBackend.has_c128",
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.encoder_swa_replay",
        "sglang.srt.model_executor.model_runner.ModelRunner.shared_read_done_event",
    ),
}


def install_layout_checks(line: str) -> None:
    """Give the pool the checks of its layout that only this line can make."""
    from sglang_dsv4.pools.token_to_kv import TokenToKVPool  # noqa: PLC0415

    if line == "0.5.23":
        from sglang_dsv4.engine.v0_5_23 import layout_refusal  # noqa: PLC0415

        TokenToKVPool.layout_checks = (layout_refusal,)


def hooks_of(line: str, prep: bool = False) -> tuple[Hook, ...]:
    """The entries that ``line`` uses; ``prep``: with those of the metadata builder."""
    return tuple(hook for hook in HOOKS if line in hook.lines and (prep or not hook.prep))


def prep_wanted(way: str, version: str) -> bool:
    """Whether DSV4_PREP=``way`` takes the metadata builder's hooks; auto does so on tested releases alone."""
    return way == "stream" or (way == "auto" and version in TESTED)


def line_of(version: str) -> str | None:
    """The adapter for an engine version; None where none fits (0.5.18 to 0.5.21 have other names)."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if not match:
        return None
    release = tuple(int(part) for part in match.groups())
    if release == (0, 5, 17):
        return "0.5.17"
    return "0.5.23" if release >= (0, 5, 22) else None
