"""Builds a scheduler without sockets, ranks and a model; it runs its own code.

The parts that it calls to schedule, allocate, cache, retract and finish are the engine's. Its receivers of messages
and of measurements are stand-ins that do nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor as Processor
from sglang.srt.managers.scheduler_components.logprob_result_processor import (
    SchedulerLogprobResultProcessor as Logprobs,
)
from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import NewTokenRatioTracker
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.runtime_context import get_context
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dsv4.testing.content import VOCABULARY
from sglang_dsv4.testing.ledger import DRAFT_ROWS, WINDOW_ROWS, Part
from sglang_dsv4.testing.standalone import TINY_RATIOS, PoolSpec, make_allocator, make_draft_pool, make_pool, make_tree

PAGE, WINDOW = 256, 128
EAGLE = {"speculative_eagle_topk": 1, "speculative_num_steps": 3}


@dataclass(frozen=True)
class ServerSpec:
    """Describes a plain server: sizes of its memory, and switches of ``launch_server`` that change its scheduling.

    pages, swa_pages: pages of 256 tokens. requests: slots. sources: kv source layers of V4.1. replay:
    --enable-decoder-swa-bounded-replay. chunk: --chunked-prefill-size. running: the most that run. radix: False for
    --disable-radix-cache. priority: --enable-priority-scheduling, which preempts at ``threshold``. drafts:
    --speculative-num-draft-tokens of EAGLE. tree: the tree's core; rust is the engine's own choice, python lets its
    nodes be seen.
    """

    pages: int = 24
    swa_pages: int = 12
    requests: int = 8
    ratios: tuple[int, ...] = TINY_RATIOS
    sources: tuple[int, ...] = ()
    replay: bool = False
    context: int = 6144
    chunk: int = 8192
    max_prefill: int = 16384
    mixed: bool = False
    overlap: bool = False
    radix: bool = True
    priority: bool = False
    threshold: int = 0
    queue_limit: int | None = None
    running: int | None = None
    tree: str = "python"
    drafts: int = 0
    server_args: dict[str, Any] = field(default_factory=dict)

    def pool(self) -> PoolSpec:
        """Returns the pool's part of it."""
        arguments = {
            "disable_radix_cache": not self.radix,
            "chunked_prefill_size": self.chunk,
            "page_size": PAGE,
            "pp_max_micro_batch_size": self.running or self.requests,
            "max_running_requests": self.running or self.requests,
            "disable_overlap_schedule": not self.overlap,
            "enable_mixed_chunk": self.mixed,
            "enable_decoder_swa_bounded_replay": self.replay,
        }
        return PoolSpec(
            ratios=self.ratios,
            sources=self.sources,
            pages=self.pages,
            swa_pages=self.swa_pages,
            requests=self.requests,
            draft_tokens=self.drafts,
            server_args=arguments | (EAGLE if self.drafts else {}) | self.server_args,
        )

    def is_late(self, part: Part) -> bool:
        """Returns whether an extend writes and reads window rows of ``part`` for its last 128 tokens alone.

        A draft is given those of the late layers.
        """
        if part.family == WINDOW_ROWS:
            return self.replay and part.layer >= max(self.sources)
        return self.replay and part.family == DRAFT_ROWS

    def allocator(self, pool: Any) -> Any:
        """Returns the pool's allocator."""
        return make_allocator(self.pool(), pool)

    def algorithm(self) -> SpeculativeAlgorithm:
        """Returns the algorithm that drafts."""
        return SpeculativeAlgorithm.EAGLE if self.drafts else SpeculativeAlgorithm.NONE


class Silence:
    """Takes every call and says nothing; what is given are its attributes."""

    def __init__(self, **given: Any) -> None:
        vars(self).update(given)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


class Outbox(Silence):
    """Keeps the messages to the tokenizer: (message, request)."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[tuple[Any, Any]] = []

    def send_output(self, message: Any, req: Any = None) -> None:
        """Takes the engine's call."""
        self.messages.append((message, req))


class Relay:
    """Keeps each row's next token, by row, from one forward to the next."""

    def __init__(self) -> None:
        self.tokens: dict[int, int] = {}

    def stash(self, rows: Any, payload: Any) -> None:
        """Takes the engine's call."""
        self.stash_bonus_tokens(rows, payload.bonus_tokens)

    def stash_bonus_tokens(self, rows: Any, tokens: Any) -> None:
        """Takes the engine's call, of mixed chunks."""
        self.tokens.update(zip(rows.tolist(), tokens.tolist(), strict=True))


def build_memory(spec: ServerSpec) -> SimpleNamespace:
    """Builds pool, allocator, request table and tree, as the engine builds them for this model."""
    pool = make_pool(spec.pool())
    allocator = spec.allocator(pool)
    table = ReqToTokenPool(size=spec.requests, max_context_len=spec.context, device="cpu", enable_memory_saver=False)
    with envs.SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND.override(spec.tree):
        tree = make_tree(spec.pool(), table, allocator, spec.radix, spec.chunk, spec.algorithm().is_eagle())
    draft = make_draft_pool(spec.pool(), allocator) if spec.drafts else None
    return SimpleNamespace(pool=pool, allocator=allocator, table=table, tree=tree, draft=draft)


def build_scheduler(spec: ServerSpec, memory: SimpleNamespace) -> Any:
    """Builds a ``Scheduler`` of the installed engine over ``memory``, in plain mode."""
    args = get_context().server_args
    scheduler = object.__new__(Scheduler)
    runner = SimpleNamespace(prefill_aware_swa=False, attn_backend=None, max_token_pool_size=spec.pages * PAGE)
    worker = Silence(model_runner=runner, is_hybrid_swa=True)
    model = SimpleNamespace(
        vocab_size=VOCABULARY, is_encoder_decoder=False, is_multimodal=False, context_len=spec.context,
        hf_config=SimpleNamespace(), hf_eos_token_id=None, think_end_ids=None, think_end_id=None,
        self_opened_think_start_ids=None,
    )  # fmt: skip
    vars(scheduler).update(
        # start arguments
        server_args=args, model_config=model, page_size=PAGE, device="cpu", is_generation=True,
        is_hybrid_swa=True, sliding_window_size=WINDOW, disaggregation_mode=DisaggregationMode.NULL,
        spec_algorithm=spec.algorithm(), enable_overlap=spec.overlap, enable_overlap_mlx=False,
        is_mixed_chunk=spec.mixed, chunked_prefill_size=spec.chunk, max_prefill_tokens=spec.max_prefill,
        max_running_requests=spec.running or spec.requests, max_queued_requests=spec.queue_limit,
        max_req_len=spec.context - 1, max_total_num_tokens=spec.pages * PAGE, max_new_tokens_limit=None,
        enable_priority_scheduling=spec.priority, enable_priority_preemption=spec.priority,
        abort_on_priority_when_disabled=False, schedule_low_priority_values_first=False,
        priority_scheduling_preemption_threshold=spec.threshold, schedule_policy="fcfs",
        enable_hierarchical_cache=False, enable_hicache_storage=False, enable_unified_cache_external_linker=False,
        enable_lmcache=False, enable_hisparse=False, hisparse_coordinator=None, enable_lora=False,
        enable_lora_overlap_loading=False, lora_drainer=None, enable_dynamic_chunking=False, dynamic_chunk_sizer=None,
        dllm_config=None, enable_fpm=False, enable_pdmux=False, require_mlp_sync=False, enable_unified_memory=False,
        enable_skip_finishing_decode=spec.overlap, truncation_align_size=None, prefill_delayer=None,
        min_free_slots_delayer=None, max_prefill_bs=0, decode_offload_manager=None,
        draft_worker=_draft_worker(memory.draft),
        random_seed=0, mm_receiver=None, scheduler_stage_metrics=None, _prefill_decode_interval_remaining=0,
        prefill_decode_interval=0, enable_kv_cache_events=False,
        enable_continuous_input_polling=False,
        # parts that schedule
        tp_worker=worker, model_worker=worker, tree_cache=memory.tree, req_to_token_pool=memory.table,
        token_to_kv_pool_allocator=memory.allocator, policy=None,
        new_token_ratio_tracker=NewTokenRatioTracker.from_config(),
        ps=SimpleNamespace(pp_size=1, tp_size=1, dp_size=1, attn_tp_rank=0, attn_dp_rank=0),
        # state of the moment
        waiting_queue=[], running_batch=ScheduleBatch(reqs=[], batch_is_full=False), last_batch=None, chunked_req=None,
        _pending_chunked_abort_req=None, result_queue=deque(), forward_ct=0, processed_tokens_counter=0,
        _engine_paused=False, _pause_started_at=None, _pause_intervals=deque(), _sched_idled=False,
        cur_batch_for_debug=None,
        # whom it would tell
        grammar_manager=_no_grammars(), ipc_channels=SimpleNamespace(send_to_tokenizer=Outbox()),
        metrics_reporter=_no_metrics(), output_streamer=Silence(), load_inquirer=Silence(),
        load_publisher=Silence(), kv_events_publisher=Silence(),
        publish_load_snapshot=lambda **_: None, maybe_send_health_check_signal=lambda: None,
        _record_step_counters=lambda *_: None, _maybe_clear_mm_inputs=lambda *_: None,
        future_map=Relay(),
        dp_attn_adapter=_same_batch(), ngram_embedding_manager=_same_batch(), beam_coordinator=_no_beams(),
        weight_updater=SimpleNamespace(offload_tags=set()), metrics_collector=None,
        dllm_manager=SimpleNamespace(any_staging_reqs=lambda: False), _pp_microbatches_drained=lambda: True,
    )  # fmt: skip
    scheduler.send_abort_output = scheduler.ipc_channels.send_to_tokenizer.send_output
    scheduler.policy = SchedulePolicy("fcfs", memory.tree, False, spec.priority, False)
    scheduler.batch_result_processor = _results(scheduler)
    return scheduler


def _results(scheduler: Any) -> Any:
    """Builds the engine's own processor of a forward's results."""
    values = {
        entry.name: getattr(scheduler, entry.name, None)
        for entry in fields(Processor)
        if entry.name != "logprob_result_processor"
    }
    return Processor(**values, logprob_result_processor=Logprobs(model_config=scheduler.model_config))


def _draft_worker(pool: Any) -> Any:
    """Stands in for the worker where the engine finds the draft's pool."""
    if pool is None:
        return None
    draft = SimpleNamespace(draft_runner=SimpleNamespace(token_to_kv_pool=pool))
    return Silence(primary_draft_kv_pool=pool, draft_worker=draft)


def _no_grammars() -> SimpleNamespace:
    return SimpleNamespace(
        has_waiting_grammars=lambda: False, abort_requests=lambda _: None, grammar_queue=[], clear=lambda: None
    )


def _no_metrics() -> Silence:
    return Silence(
        enable_metrics=False, num_retracted_reqs=0, num_generated_tokens=0, forward_ct_decode=0,
        is_stats_logging_rank=False, current_scheduler_metrics_enabled=False,
    )  # fmt: skip


def _no_beams() -> SimpleNamespace:
    return SimpleNamespace(
        pending_member_rows=lambda _: 0,
        commit_decode=lambda _: set(),
        retire_group=lambda _: None,
        has_live_groups=False,
    )


def _same_batch() -> SimpleNamespace:
    return SimpleNamespace(
        maybe_prepare_mlp_sync_batch=lambda batch, **_: batch,
        maybe_convert_decode_to_extend=lambda batch: batch,
        prepare_for_forward=lambda batch, **_: batch,
    )
