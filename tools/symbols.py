"""Lists the names that hooks call or read of the engine without hooking them.

Only ``compat`` reads this: it looks for each name in the source of a release before it is used to serve.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_dsv4.engine.hooks.table import POOLS
from sglang_dsv4.engine.releases import Ranged

_SRT = "sglang.srt"
_COMPRESSOR = f"{_SRT}.layers.attention.dsv4.compressor_v2"
_ATTENTION = f"{_SRT}.layers.attention.deepseek_v4_backend"
_DECODE = f"{_SRT}.disaggregation.decode"
_BATCH = f"{_SRT}.managers.schedule_batch"
_PENALTIES = f"{_SRT}.sampling.penaltylib"
_POLICY = f"{_SRT}.managers.schedule_policy"
_SCHEDULER = f"{_SRT}.managers.scheduler.Scheduler"
_RUNNER = f"{_SRT}.model_executor.model_runner.ModelRunner"
_FORWARD = f"{_SRT}.model_executor.forward_batch_info.ForwardBatch"


@dataclass(frozen=True, kw_only=True)
class Names(Ranged):
    """Lists names, separated by spaces, of the module or class ``owner``."""

    owner: str
    names: str

    @property
    def dotted(self) -> tuple[str, ...]:
        return tuple(f"{self.owner}.{name}" for name in self.names.split())


SYMBOLS = (
    Names(owner=f"{POOLS}.DeepSeekV4TokenToKVPool",
          names="_make_kv_pool full_to_swa_index_mapping compress_state_pools indexer_compress_state_pools "
          "compression_ratios online_mtp_max_draft_tokens sliding_window swa_kv_pool swa_page_size swa_size "
          "indexer_head_dim c4_kv_pool c128_kv_pool c4_indexer_kv_pool _stage_start get_ring_size kv_layout "
          "uniform_fp8 request_window _make_indexer_pool"),
    Names(owner=f"{POOLS}.DeepSeekV4SingleKVPool", names="get_bytes_per_token _create_buffers set_key_buffer"),
    Names(owner=f"{POOLS}.DeepSeekV4IndexerPool",
          names="index_k_with_scale_buffer _create_buffer get_index_k_scale_buffer set_index_fp4"),
    Names(owner=f"{_SRT}.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator",
          names="alloc_extend merge_and_sort_free available_size free_pages need_sort"),
    Names(owner=f"{_SRT}.mem_cache.allocator.swa.SWATokenToKVPoolAllocator",
          names="full_attn_allocator size_full size_swa alloc_extend_swa_tail free_swa full_available_size "
          "swa_available_size free_swa_segment full_to_swa_index_mapping clear"),
    Names(owner=f"{_SRT}.utils", names="get_num_new_pages"),
    Names(owner=f"{_SRT}.mem_cache.deepseek_v4_compress_state.CompressStatePool",
          names="kv_score_buffer ring_size online"),
    Names(owner=_SCHEDULER, names="result_queue last_batch process_batch_result"),
    Names(owner=f"{_DECODE}.DecodePreallocQueue",
          names="retracted_queue token_to_kv_pool draft_token_to_kv_pool token_to_kv_pool_allocator scheduler "
          "held_rebootstrap_reqs hold_rebootstrap enqueue_held_rebootstrap _prealloc_kv_lens "
          "_check_if_req_exceed_kv_capacity"),
    Names(owner=f"{_SRT}.kv_canary.pool_patcher", names="api.register_pool_attacher adapters.dsv4.attach_dsv4"),
    Names(owner=f"{_DECODE}.DecodeTransferQueue", names="pop_transferred"),
    Names(owner=f"{_PENALTIES}.orchestrator._BatchedPenalizer", names="is_prepared"),
    Names(owner=f"{_PENALTIES}.orchestrator.BatchedPenalizerOrchestrator", names="is_required penalizers device"),
    Names(owner=f"{_PENALTIES}.frequency_penalty.BatchedFrequencyPenalizer",
          names="cumulated_frequency_penalties frequency_penalties"),
    Names(owner=f"{_PENALTIES}.presence_penalty.BatchedPresencePenalizer",
          names="cumulated_presence_penalties presence_penalties"),
    Names(owner=f"{_PENALTIES}.repetition_penalty.BatchedRepetitionPenalizer",
          names="cumulated_repetition_penalties repetition_penalties"),
    Names(owner=f"{_PENALTIES}.min_new_tokens.BatchedMinNewTokensPenalizer", names="len_output_tokens"),
    Names(owner=f"{_SRT}.disaggregation.common.conn.CommonKVReceiver", names="prefill_dp_rank"),
    Names(owner=f"{_SRT}.disaggregation.utils", names="prepare_abort _is_fake_transfer"),
    Names(owner=_BATCH, names="FINISH_ABORT"),
    Names(owner=f"{_BATCH}.Req",
          names="to_finish bootstrap_room disagg_prefill_dp_rank seqlen input_embeds multimodal_inputs "
          "return_logprob retraction_mb_id time_stats output_ids origin_input_ids full_untruncated_fill_ids "
          "sampling_params decode_batch_idx session return_routed_experts return_indexer_topk "
          "skip_radix_cache_insert last_node extend_end prefix_len owned_kv_len hisparse_staging "
          "swa_branching_seqlen output_topk_p output_topk_index hidden_states_tensor"),
    Names(owner=f"{_BATCH}.ReqKvInfo",
          names="retraction_backup req_pool_idx kv_allocated_len kv_committed_len set_evicted_seqlen "
          "get_evicted_seqlen mark_kv_released"),
    Names(owner=f"{_SRT}.mem_cache.common.RetractionBackup", names="cpu_tensors"),
    Names(owner=_SCHEDULER,
          names="_engine_paused waiting_queue forward_stream schedule_stream enable_overlap metrics_collector "
          "weight_updater spec_algorithm token_to_kv_pool_allocator disaggregation_mode is_mixed_chunk future_map "
          "ngram_embedding_manager"),
    Names(owner=f"{_SRT}.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager",
          names="offload_tags scheduler"),
    Names(owner=f"{_SRT}.constants", names="GPU_MEMORY_TYPE_WEIGHTS"),
    Names(owner=f"{_SRT}.distributed.parallel_state", names="get_world_group get_attn_tp_group"),
    Names(owner=f"{_SRT}.plugins.hook_registry", names="HookRegistry._apply_target HookSource HookType"),
    Names(owner=f"{_SRT}.runtime_context", names="get_context get_parallel get_memory get_disagg"),
    Names(owner=f"{_POLICY}.PrefillAdder",
          names="can_run_list rem_total_tokens cur_rem_tokens rem_chunk_tokens rem_input_tokens prefill_max_requests "
          "running_batch tree_cache token_to_kv_pool_allocator page_size _lock_node _swa_new_tokens memory_budget "
          "exact_chunk_fill"),
    Names(owner=_POLICY, names="AddReqResult CLIP_MAX_NEW_TOKENS"),
    Names(owner=f"{_SRT}.mem_cache.prefill_budget.SWAPrefillBudget", names="swa_tokens remaining_swa"),
    Names(owner=f"{_SRT}.mem_cache.base_prefix_cache", names="EvictParams"),
    Names(owner=f"{_SRT}.mem_cache.base_prefix_cache.BasePrefixCache", names="prefix_device_indices evict_for_alloc"),
    Names(owner=f"{_SRT}.mem_cache.memory_pool.ReqToTokenPool", names="alloc free write req_to_token"),
    Names(owner=f"{_SRT}.managers.hisparse_coordinator.HiSparseCoordinator",
          names="admit_request_direct wait_for_pending_backup req_to_host_pool req_to_host_pool_allocated_len "
          "req_to_device_buffer device_buffer_size padded_buffer_size decode_producer_stream mem_pool_host "
          "mem_pool_device compress_ratio page_size _skip_first_backup"),
    Names(owner=f"{_SRT}.mem_cache.allocator.hisparse.DeepSeekV4HiSparseTokenToKVPoolAllocator",
          names="hisparse_attn_allocator"),
    Names(owner=f"{_BATCH}.ScheduleBatch",
          names="prepare_for_prebuilt merge_batch is_empty req_pool_indices input_ids reqs seq_lens spec_info "
          "spec_algorithm enable_overlap"),
    Names(owner=f"{_BATCH}.NextBatchPlan", names="batch_to_run running_batch"),
    Names(owner=f"{_FORWARD.rsplit('.', 1)[0]}.ForwardMode", names="is_prebuilt"),
    Names(owner=f"{_SRT}.managers.overlap_utils", names="FutureMap.stash RelayPayload.bonus_tokens"),
    Names(owner=f"{_SRT}.speculative.eagle_info.EagleDraftInput",
          names="topk_p topk_index hidden_states future_indices"),
    Names(owner=f"{_SRT}.managers.overlap_utils.FutureMap",
          names="new_seq_lens_buf topk_p_buf topk_index_buf hidden_states_buf"),
    Names(owner=f"{_SRT}.speculative.spec_info.SpeculativeAlgorithm", names="is_dspark need_topk"),
    Names(owner=_FORWARD, names="seq_lens_cpu global_num_tokens_cpu encoder_swa_replay"),
    Names(owner=_RUNNER, names="shared_read_done_event"),
    Names(owner=_ATTENTION,
          names="_create_flashmla_metadata _get_logical_forward_mode DSV4AttnMetadata.swa_out_cache_loc "
          "DSV4Metadata.c128_compress_metadata DSV4RawDecodeMetadata.out_cache_loc DSV4RawVerifyMetadata.verify_lens "
          "DSV4RawVerifyMetadata.c128_compress_metadata DeepseekV4MultiStepBackend"),
    Names(owner=f"{_ATTENTION}.DeepseekV4AttnBackend",
          names="_resolve_verify_layout init_forward_metadata_indexer online_c128_mtp speculative_num_draft_tokens "
          "index_topk present_ratios low_ratios has_c128 _fill_cuda_graph_swa_out_cache_loc"),
    Names(owner=_COMPRESSOR, names="CompressorDecodePlan CompressorPrefillPlan"),
    Names(owner=f"{_SRT}.mem_cache.memory_pool.KVCache", names="memory_saver_adapter custom_mem_pool device"),
)  # fmt: skip


def symbols_of(version: str) -> tuple[str, ...]:
    """Returns the names that a release must have."""
    return tuple(name for group in SYMBOLS if group.covers(version) for name in group.dotted)
