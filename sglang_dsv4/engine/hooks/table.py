"""Lists every place where this package enters the engine.

Each entry states its purpose and the upstream change that would end its need. ``install`` puts the entries in place,
``check`` looks at them in the server, ``make compat`` looks for their targets in each release. Classes that the engine
builds in one place are replaced by subclasses; the rest are functions around the engine's. Importing this module
imports nothing of the engine.
"""

from __future__ import annotations

from sglang_dsv4.engine.hooks import Hook
from sglang_dsv4.engine.releases import TESTED, is_supported
from sglang_dsv4.settings import Settings

POOLS = "sglang.srt.mem_cache.deepseek_v4_memory_pool"
_STATES = "sglang.srt.mem_cache.deepseek_v4_compress_state"
_DECODE = "sglang.srt.disaggregation.decode"
_PREFILL = "sglang.srt.disaggregation.prefill"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater"
_RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor"
_BATCH = "sglang.srt.managers.schedule_batch"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_HISPARSE = "sglang.srt.managers.hisparse_coordinator"
_POLICY = "sglang.srt.managers.schedule_policy"
_ATTENTION = "sglang.srt.layers.attention.deepseek_v4_backend.DeepseekV4AttnBackend"
_EAGER = "sglang.srt.model_executor.runner.eager_runner.EagerRunner"
_ALLOCATOR = "sglang.srt.mem_cache.allocator"
_NIXL = "sglang.srt.disaggregation.nixl.conn.NixlKVManager"
_PENALTIES = "sglang.srt.sampling.penaltylib.orchestrator"

HOOKS: tuple[Hook, ...] = (
    Hook(target=f"{POOLS}.DeepSeekV4SingleKVPool", kind="replace", ours="pools.sub_pools:SingleKVPool",
         why="host copies of kv rows",
         gone_when="the engine's pool has get_cpu_copy and load_cpu_copy"),
    Hook(target=f"{POOLS}.HiSparseC4DevicePool", kind="replace", ours="pools.hisparse:HiSparseC4DevicePool",
         why="host copies of rows behind the HiSparse mapping",
         gone_when="the engine's pool has get_cpu_copy and load_cpu_copy"),
    Hook(target=f"{POOLS}.DeepSeekV4IndexerPool", kind="replace", ours="pools.sub_pools:IndexerPool",
         why="host copies of indexer rows",
         gone_when="the engine's pool has get_cpu_copy and load_cpu_copy"),
    Hook(target=f"{_STATES}.CompressStatePool", kind="replace", ours="pools.sub_pools:CompressStatePool",
         why="host copies of state rows", also=(POOLS,),
         gone_when="the engine's pool has get_cpu_copy and load_cpu_copy"),
    Hook(target=f"{POOLS}.DeepSeekV4TokenToKVPool", kind="replace", ours="pools.token_to_kv:TokenToKVPool",
         why="host copies of whole requests",
         also=(_DECODE, "sglang.srt.mem_cache.kv_cache_configurator"),
         gone_when="the engine's pool copies a request with its compression state, and takes an allocator of host "
         "memory"),
    Hook(target=f"{_DECODE}.DecodePreallocQueue", kind="replace", ours="engine.decode.queue:PreallocQueue",
         why="host memory is reserved at its start; requests wait in it with a copy, or for their recompute",
         also=("sglang.srt.managers.scheduler",),
         gone_when="the engine queues each retracted request by whether it has a backup, drops backups made under "
         "other weights, and recomputes the others after their last step was streamed"),
    Hook(target="sglang.srt.mem_cache.memory_pool_host.DeepSeekV4PagedHostPool", kind="replace",
         ours="pools.hisparse_host:PagedHostPool", also=(_HISPARSE,),
         why="HiSparse: pages for rows of who is away, which a resumed request gets again",
         gone_when="the engine keeps the host rows of a retracted HiSparse request"),
    Hook(target="sglang.srt.kv_canary.pool_patcher.api.attach_canary_buffers", kind="before",
         ours="engine.memory:before_attach_canary_buffers", also=("sglang.srt.kv_canary.api",),
         why="--kv-canary finds a pool's attacher by its exact class, and ends the server without one",
         gone_when="the engine looks for an attacher of a pool's base classes"),
    Hook(target=f"{_HISPARSE}.HiSparseCoordinator.__init__", kind="around", ours="engine.hisparse.reserve:init",
         why="HiSparse: the host pool is built with a reserve, and cannot grow later",
         gone_when="the engine keeps the host rows of a retracted HiSparse request"),
    Hook(target=f"{_HISPARSE}.HiSparseCoordinator._eager_backup_previous_token", kind="around",
         ours="engine.hisparse.reserve:eager_backup", before="0.5.23",
         why="HiSparse: rows of 64 requests are taken for one whole page",
         gone_when="0.5.22 leaves the window"),
    Hook(target="sglang.srt.mem_cache.allocator.hisparse.DeepSeekV4HiSparseTokenToKVPoolAllocator.load_cpu_copy",
         kind="around", ours="engine.hisparse.rows:load_cpu_copy",
         why="HiSparse: the allocator passes no copy on to its pool",
         gone_when="the engine's HiSparse allocator loads copies"),
    Hook(target="sglang.srt.mem_cache.common.backup_kv_cache", kind="around",
         ours="engine.retract.save:backup_kv_cache", also=(_BATCH,), why="the engine saves nothing for DeepSeek-V4",
         gone_when="dsv4_needs_rebootstrap asks the pool instead of its class"),
    Hook(target=f"{_BATCH}.ScheduleBatch.retract_decode", kind="around", ours="engine.retract.order:retract_decode",
         why="the stream waits for the saves when all are enqueued; with online compression the result of the step in "
         "flight is taken first",
         gone_when="the engine itself keeps writers from pages that a save still reads, and retracts no request whose "
         "step is in flight"),
    Hook(target="sglang.srt.managers.overlap_utils.FutureMap._resolve_spec_extras", kind="after",
         ours="engine.retract.drafts:after_resolve_spec_extras",
         why="keeps what a step's drafts began with: when it is thrown away, the relay has its outputs already",
         gone_when="the engine's backup of a retracted request holds the state of its drafts"),
    Hook(target=f"{_BATCH}.ScheduleBatch.release_req", kind="around", ours="engine.retract.order:release_req",
         why="a retract frees HiSparse rows, a plain server's cache and the state of drafts, and keeps nothing of them",
         gone_when="the engine's backup of a retracted request has all three, on plain servers, too"),
    Hook(target=f"{_PENALTIES}.BatchedPenalizerOrchestrator.__init__", kind="after",
         ours="engine.retract.penalties:after_init",
         why="penalties and min_new_tokens start from zero in each new batch, for a request that comes back, too",
         gone_when="the engine counts a request's outputs again when it comes back"),
    Hook(target=f"{_BATCH}.ScheduleBatch.cumulate_penalty_output_tokens", kind="around",
         ours="engine.retract.penalties:cumulate_penalty_output_tokens",
         why="what was counted for a request is known here; after a resume the engine counts its last token twice",
         gone_when="the engine counts a request's outputs again when it comes back"),
    Hook(target=f"{_BATCH}.Req.build_rebootstrap_payload", kind="after",
         ours="engine.decode.recompute:set_recompute_id",
         why="the prefill server may still have a request of that id",
         gone_when="the engine gives each rebootstrap an id and a room of its own"),
    Hook(target=f"{_DECODE}.DecodeTransferQueue._commit_transfer_to_req", kind="before",
         ours="engine.decode.recompute:remember_rank",
         why="remembers which rank of the prefill server to ask for a recompute",
         gone_when="the engine gives each rebootstrap an id and a room of its own"),
    Hook(target=f"{_SCHEDULER}.abort_request", kind="around", ours="engine.decode.recompute:abort_request",
         why="finds requests held for their recompute; releases copies at once",
         gone_when="the engine looks for requests in held_rebootstrap_reqs too, and backups have a release()"),
    Hook(target=f"{_SCHEDULER}.flush_cache", kind="around", ours="engine.retract.stale:flush_cache",
         why="the engine refuses while a copy waits, which holds nothing that a flush clears",
         gone_when="is_fully_idle ignores retracted requests whose backup lies in host memory"),
    Hook(target="sglang.srt.managers.scheduler_components.flush_wrapper.SchedulerFlushWrapper", kind="replace",
         ours="engine.retract.stale:FlushWrapper", also=("sglang.srt.managers.scheduler",),
         why="a flush with a time limit asks first whether the server is idle, and copies that wait hold it up",
         gone_when="is_fully_idle ignores retracted requests whose backup lies in host memory"),
    Hook(target=f"{_UPDATER}.SchedulerWeightUpdaterManager", kind="replace", ours="engine.retract.stale:WeightUpdater",
         why="a copy saved under other weights must not be loaded; copies outlive a release of the device's memory",
         also=("sglang.srt.managers.scheduler",),
         gone_when="the engine drops backups at a weight update and counts them as idle"),
    Hook(target=f"{_SCHEDULER}.handle_pd_role_switch", kind="around",
         ours="engine.decode.recompute:handle_pd_role_switch",
         why="a request held for its recompute would be lost: the engine thinks itself idle",
         gone_when="is_fully_idle looks at held_rebootstrap_reqs"),
    Hook(target=f"{_ATTENTION}.__init__", kind="after", ours="engine.metadata.attach:attach_builder", part="prep",
         why="a metadata builder for each attention backend of the target model",
         gone_when="the engine makes a step's metadata with one kernel"),
    Hook(target=f"{_ATTENTION}.init_forward_metadata", kind="around",
         ours="engine.metadata.eager:init_forward_metadata",
         part="prep", why="the metadata of eager decode steps",
         gone_when="the engine makes a step's metadata with one kernel"),
    Hook(target=f"{_SCHEDULER}.run_event_loop", kind="before", ours="engine.metadata.eager:run_event_loop", part="prep",
         why="gives the builder's counts their metrics, and tells it which stream writes the tables",
         gone_when="the engine makes a step's metadata with one kernel"),
    Hook(target=f"{_EAGER}.load_batch", kind="around", ours="engine.metadata.eager:load_batch", part="prep",
         why="the last place where the scheduler's own tensors are seen: the step's preparation starts here",
         gone_when="the engine's own builder runs beside the forward before"),
    Hook(target=f"{_ATTENTION}.make_forward_metadata_from_raw_decode", kind="around",
         ours="engine.metadata.graphs:from_raw_decode", part="prep",
         why="in every replay of a decode graph the engine's kernels loop over the whole request table",
         gone_when="the engine's kernels in a graph read no more of the request table than the requests have"),
    Hook(target=f"{_ATTENTION}.make_forward_metadata_from_raw_verify", kind="around",
         ours="engine.metadata.graphs:from_raw_verify", part="prep",
         why="the same, in the graphs that verify drafts",
         gone_when="the engine's kernels in a graph read no more of the request table than the requests have"),
    Hook(target=f"{_ATTENTION}.init_forward_metadata_draft_extend", kind="around",
         ours="engine.metadata.graphs:draft_extend", part="prep",
         why="once in every speculative iteration the engine makes a window's metadata with eight small kernels",
         gone_when="the engine makes it with one, or in the graph"),
    Hook(target=f"{_SCHEDULER}.init_disaggregation", kind="after",
         ours="engine.plain.start:start_plain_serving", part="plain",
         why="host memory for the retracts of a plain server, reserved at its start",
         gone_when="the engine saves what a plain server retracts"),
    Hook(target=f"{_POLICY}.PrefillAdder.add_one_req", kind="around", ours="engine.plain.admission:add_one_req",
         part="plain", why="a request with a copy gets its pages here, and one token is left to compute",
         gone_when="the engine takes a saved request back without a prefill"),
    Hook(target=f"{_BATCH}.ScheduleBatch.prepare_for_extend", kind="around",
         ours="engine.plain.resume:prepare_for_extend", part="plain",
         why="the row is known and nothing launched: the copy is loaded, and restored requests alone need no forward",
         gone_when="the engine takes a saved request back without a prefill"),
    Hook(target=f"{_SCHEDULER}.get_new_batch_prefill", kind="around",
         ours="engine.plain.resume:get_new_batch_prefill", part="plain",
         why="copies of requests that left the waiting queue are released before it; restored requests that were "
         "admitted alone join the decode batch after it, without an eager forward for one token each",
         gone_when="the engine tells of each request that it drops, and takes a saved one back without a prefill"),
    Hook(target=f"{_SCHEDULER}._add_request_to_queue", kind="after", ours="engine.plain.sessions:after_add_request",
         part="plain", why="a request may ask for its session at once; to search the queue in each pass is slow",
         gone_when="the engine keeps windows and states on the host, and reads kv_hints"),
    Hook(target="sglang.srt.mem_cache.common.release_kv_cache", kind="around",
         ours="engine.plain.publish:release_kv_cache", part="plain",
         also=(_BATCH, _RESULTS, _PREFILL, "sglang.srt.managers.scheduler"),
         why="a restored request must not publish the SWA page that was loaded in part; one that ends leaves its "
         "cache, by the node of the tree where it ended",
         gone_when="the engine takes a saved request back without a prefill, and keeps windows and states on the host"),
    Hook(target="sglang.srt.mem_cache.common.checkpoint_kv_cache", kind="around",
         ours="engine.plain.sessions:checkpoint_kv_cache", part="plain",
         also=(_RESULTS, _PREFILL, "sglang.srt.managers.scheduler"),
         why="another answer to a prompt, or a prompt with the same beginning, goes on from page ends",
         gone_when="the engine keeps windows and states on the host, for less than whole pages"),
    Hook(target=f"{_PREFILL}.SchedulerDisaggregationPrefillMixin.maybe_send_cached_prefix_chunk", kind="around",
         ours="engine.plain.sessions:maybe_send_cached_prefix_chunk", part="plain",
         why="a prefix that was loaded in this pass may not be written yet; the early send waits for forwards alone",
         gone_when="the engine's early send waits for the current stream, too"),
    Hook(target="sglang.srt.mem_cache.common.free_swa_out_of_window_slots", kind="around",
         ours="engine.decode.points:free_swa_out_of_window_slots", part="answers",
         also=("sglang.srt.mem_cache.unified_cache.components.swa",),
         why="half of a decode server's requests end without the window of their last page end",
         gone_when="the engine's decode server gives the answer's cache to the prefill server"),
    Hook(target="sglang.srt.mem_cache.common.release_kv_cache", kind="around",
         ours="engine.decode.points:release_kv_cache", part="answers",
         also=(_BATCH, _RESULTS, _PREFILL, _DECODE, "sglang.srt.managers.scheduler"),
         why="the answer of a request that ends is written, for the prefill server",
         gone_when="the engine's decode server gives the answer's cache to the prefill server"),
    Hook(target=f"{_ALLOCATOR}.paged.PagedTokenToKVPoolAllocator.clear", kind="after",
         ours="engine.page_major:after_clear", part="layout",
         why="page-major pools want page ids that are multiples of their layers",
         gone_when="the engine keeps the layers of a page together"),
    Hook(target=f"{_ALLOCATOR}.swa.SWATokenToKVPoolAllocator.__init__", kind="after",
         ours="engine.page_major:after_init", part="layout",
         why="the map to window slots must reach as far as the page ids; what does not go with them is refused",
         gone_when="the engine keeps the layers of a page together"),
    Hook(target=f"{_ALLOCATOR}.base.BaseTokenToKVPoolAllocator.translate_kv_indices_for_transfer", kind="after",
         ours="engine.page_major:slots_sent", part="layout",
         why="transfers number the pages of all layers 1, 2, 3",
         gone_when="the engine keeps the layers of a page together"),
    Hook(target="sglang.srt.disaggregation.common.conn.CommonKVManager.__init__", kind="before",
         ours="engine.page_major:before_manager", part="layout",
         why="a peer with another layout must be refused before anything is sent",
         gone_when="the engine's handshake compares how pages lie"),
    Hook(target=f"{_NIXL}.add_transfer_request", kind="around",
         ours="engine.early_send:add_transfer_request",
         since="0.5.23",
         why="NIXL's worker must learn of the event behind which the pages of an early send are written",
         gone_when="NIXL's worker waits for that event, as Mooncake's does"),
    Hook(target=f"{_NIXL}.transfer_worker", kind="around", ours="engine.early_send:transfer_worker",
         since="0.5.23",
         why="there NIXL's worker waits for it",
         gone_when="NIXL's worker waits for that event, as Mooncake's does"),
    Hook(target="sglang.srt.model_executor.pool_configurator.DSV4PoolConfigurator._get_bytes_per_full_token",
         kind="after", ours="engine.page_major:after_bytes_per_full_token", part="layout",
         why="the engine sizes its pools by the bytes of a token, which are more",
         gone_when="the engine keeps the layers of a page together"),
)  # fmt: skip


def hooks_of(version: str, *parts: str) -> tuple[Hook, ...]:
    """Returns the entries that a release uses, with those of ``parts``. An unsupported one has none."""
    if not is_supported(version):
        return ()
    return tuple(hook for hook in HOOKS if hook.part in ("", *parts) and hook.covers(version))


def hooks_for(settings: Settings, version: str) -> tuple[Hook, ...]:
    """Returns the entries that a server of that release with ``settings`` installs."""
    prep = ("prep",) if is_wanted(settings.prep, version) else ()
    plain = ("plain",) if is_wanted(settings.plain, version) else ()
    layout = ("layout",) if settings.layout == "page-major" else ()
    answers = ("answers",) if settings.store.backend else ()
    return hooks_of(version, *prep, *plain, *layout, *answers)


def is_wanted(way: str, version: str) -> bool:
    """Returns whether DSV4_PREP or DSV4_PLAIN ``way`` (auto or off) takes its hooks, made for tested releases."""
    return not left_out("", way, version)


def left_out(variable: str, way: str, version: str) -> str:
    """Returns why a server leaves out the hooks of ``variable``, whose value is ``way``; empty where it takes them."""
    if way == "off":
        return f"{variable}=off"
    return "" if version in TESTED else f"sglang {version} is not a tested release ({', '.join(TESTED)})"
