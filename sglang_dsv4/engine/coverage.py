"""Says which parts of this package a server gets by its launch arguments, and why not the others.

One table: the start of a server, its hooks, the doctor and docs/supported.md read it. What only the built pools or the
scheduler know is refused where they are: a layout in ``pools.describe``, the kinds of prefix cache and allocator in
``plain.start``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from sglang_dsv4.settings import read_settings

logger = logging.getLogger(__name__)

EARLY_SEND = "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"
BACKENDS = ("nixl", "mooncake", "fake")  # of transfers, whose way with pages was read; fake moves nothing
COMES_COMPUTED = "prompts come to a decode server computed"
IN_SLOTS = "a cache with states in a request's slot at page ends"
NO_PREFIX_CACHE = "there is no prefix cache (--disable-radix-cache, HiSparse)"
NOT_SHARED = "tensor-parallel ranks that do not share their host memory (DSV4_SHARE=off, or several machines)"


class Part(StrEnum):
    """Names a part of this package."""

    COPIES = "copies"
    DECODE = "copies of a decode server"
    PLAIN = "copies of a plain server"
    SESSIONS = "sessions"
    STORE = "the store of a server"
    ANSWERS = "answers of a decode server in the store"
    METADATA = "decode metadata"
    PAGE_MAJOR = "page-major pools"


@dataclass(frozen=True)
class Launch:
    """Holds what the published launch arguments and the environment say of one server."""

    mode: str  # null, decode or prefill
    args: Any  # the engine's ServerArgs
    memory: Any  # and parts of its runtime context
    parallel: Any
    disagg: Any
    exec: Any
    canary: str
    drafts: Any  # the engine's SpeculativeAlgorithm
    pdmux: bool
    several_drafts: bool  # models, each with a pool
    hisparse: bool
    release: Any  # ``releases.engine_release()``
    share: str  # DSV4_SHARE
    sessions_asked: bool  # by DSV4_SESSIONS
    envs: Any

    @property
    def transfers_by(self) -> str:
        """Returns the backend that moves pages between servers; empty where none does."""
        return "" if self.mode == "null" else str(self.disagg.disaggregation_transfer_backend)

    @property
    def watermark(self) -> bool:
        """Returns whether sampled tokens get a watermark, whose context is kept by row."""
        return bool(self.exec.features.enable_watermark)

    @property
    def choices(self) -> bool:
        """Returns whether expert or indexer choices are recorded, by cache slot."""
        from sglang_dsv4.engine.retract.choices import are_recorded  # noqa: PLC0415

        return are_recorded()

    @property
    def host_tier(self) -> bool:
        """Returns whether the engine moves cache between device and host, ordered behind the schedule stream alone."""
        memory = self.memory
        return bool(
            memory.enable_hierarchical_cache
            or memory.hicache_storage_backend
            or memory.enable_lmcache
            or memory.enable_flexkv
            or self.disagg.disaggregation_decode_enable_offload_kvcache
        )


def launch(**known: Any) -> Launch:
    """Reads the published launch arguments. known: fields that the scheduler, or a backend, knows better."""
    from sglang.srt import runtime_context as context  # noqa: PLC0415
    from sglang.srt.environ import envs  # noqa: PLC0415
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: PLC0415

    from sglang_dsv4.engine.releases import engine_release  # noqa: PLC0415

    spec = context.get_spec()
    said = {
        "mode": context.get_disagg().disaggregation_mode,
        "args": context.get_context().server_args,
        "memory": context.get_memory(),
        "parallel": context.get_parallel(),
        "disagg": context.get_disagg(),
        "exec": context.get_exec(),
        "canary": context.get_observability().kv_canary,
        "pdmux": context.get_disagg().enable_pdmux,
        "several_drafts": spec.enable_multi_layer_eagle,
        "hisparse": context.get_memory().enable_hisparse,
        "release": engine_release(),
        "share": read_settings().share,
        "sessions_asked": read_settings().sessions.asked,
        "envs": envs,
    }
    drafts = known.pop("drafts", None) or SpeculativeAlgorithm.from_string(spec.speculative_algorithm)
    return Launch(drafts=drafts, **(said | known))


def _drafts_are_covered(drafts: Any) -> bool:
    known = drafts.is_none() or drafts.is_eagle() or drafts.is_dspark()
    return bool(known and not drafts.is_frozen_kv_mtp())


def _ranks_are_apart(on: Launch) -> bool:
    """Returns whether an attention group's ranks have arenas of their own: whole groups share, or none."""
    from sglang_dsv4.engine.ranks import arenas_a_machine, ranks_a_machine  # noqa: PLC0415

    return arenas_a_machine(on.args, on.share) * int(on.parallel.attn_tp_size) > ranks_a_machine(on.args)


def _sends_early(on: Launch) -> bool:
    """Returns whether a prefill server sends pages over NIXL without the event behind which they are written."""
    sends = on.mode == "prefill" and on.transfers_by == "nixl" and not on.release.nixl_gets_the_event
    return bool(sends and getattr(on.envs, EARLY_SEND).get())


class Reason(NamedTuple):
    """Refuses one part. sentence: with fields of the launch in braces."""

    part: Part
    holds: Callable[[Launch], Any]
    sentence: str


_P, _S, _A, _M, _L = Part.PLAIN, Part.SESSIONS, Part.ANSWERS, Part.METADATA, Part.PAGE_MAJOR
REASONS = (
    Reason(Part.COPIES, lambda on: on.canary != "none",
           "--kv-canary keeps checksums by cache slot, which a copy does not have"),
    # None: not chosen yet; the engine comes to cpu_tensor for DeepSeek-V4.
    Reason(Part.DECODE, lambda on: on.disagg.disaggregation_decode_retraction_backup not in (None, "cpu_tensor"),
           "retraction backup is {on.disagg.disaggregation_decode_retraction_backup}"),

    Reason(_P, lambda on: on.memory.enable_lmcache, "LMCache, whose hits are not the prefix cache's"),
    Reason(_P, lambda on: on.memory.enable_flexkv, "FlexKV, whose hits are not the prefix cache's"),
    Reason(_P, lambda on: on.memory.hicache_storage_backend,
           "a hierarchical cache with a storage backend, whose pages arrive while a request waits"),
    Reason(_P, lambda on: on.memory.enable_hierarchical_cache and on.memory.hicache_host_memory_mode != "cache",
           "a hierarchical cache whose host memory is a buffer alone"),
    Reason(_P, lambda on: on.memory.enable_hierarchical_cache and on.hisparse, "HiSparse beside a hierarchical cache"),
    Reason(_P, lambda on: on.args.pp_size > 1, "pipeline parallelism: its stages would have to agree on each copy"),
    Reason(_P, lambda on: on.parallel.attn_cp_size > 1, "context parallel attention"),
    Reason(_P, lambda on: on.parallel.dcp_enabled, "decode context parallelism"),
    Reason(_P, lambda on: on.hisparse and on.watermark, "HiSparse beside a watermark, which begins with an extend"),
    Reason(_P, lambda on: on.exec.features.enable_encoder_swa_bounded_replay,
           "encoder SWA bounded replay, which computes a retracted request's window again"),
    Reason(_P, lambda on: on.exec.features.enable_decoder_swa_bounded_replay and on.release.replay_cuts_windows,
           "decoder SWA bounded replay, whose extends do not see the window before them in this release"),
    Reason(_P, lambda on: on.memory.enable_unified_cache_external_linker, "an external cache linker"),
    Reason(_P, lambda on: on.pdmux, "PD multiplexing, which runs two forwards at a time"),
    Reason(_P, lambda on: not _drafts_are_covered(on.drafts),
           "speculative decoding by {on.drafts.name}, covered: EAGLE and DSPARK"),
    Reason(_P, lambda on: on.several_drafts, "several draft models, each with a pool of its own"),

    Reason(_S, lambda on: on.mode == "decode", COMES_COMPUTED),
    Reason(_S, lambda on: on.memory.disable_radix_cache, NO_PREFIX_CACHE),
    Reason(_S, lambda on: on.memory.enable_hierarchical_cache,
           "beside a hierarchical cache, which keeps pages on the host itself"),
    Reason(_S, lambda on: on.choices and not on.sessions_asked,
           "expert or indexer choices are returned, and the scheduler would copy those of every request that ends "
           "(DSV4_SESSIONS=auto keeps sessions all the same)"),
    Reason(_S, lambda on: on.envs.SGLANG_RADIX_FORCE_MISS.get(),
           "SGLANG_RADIX_FORCE_MISS, with which no request finds its prefix"),
    Reason(_S, _ranks_are_apart, NOT_SHARED),

    Reason(Part.STORE, lambda on: on.choices, "expert or indexer choices are returned, which its objects do not have"),

    Reason(_A, lambda on: on.hisparse, "HiSparse, whose c4 rows lie in a host pool of its own"),
    Reason(_A, lambda on: on.transfers_by == "fake", "transfers by fake, which move nothing"),
    Reason(_A, lambda on: not on.memory.disable_radix_cache, "--disaggregation-decode-enable-radix-cache"),
    Reason(_A, lambda on: on.host_tier, "a cache of the engine on the host or in a storage"),
    Reason(_A, lambda on: on.args.pp_size > 1, "pipeline parallelism: its stages would have to agree on each point"),
    Reason(_A, lambda on: on.parallel.attn_cp_size > 1 or on.parallel.dcp_enabled, "context parallelism"),
    Reason(_A, lambda on: not _drafts_are_covered(on.drafts),
           "speculative decoding by {on.drafts.name}, covered: EAGLE and DSPARK"),
    Reason(_A, lambda on: on.several_drafts, "several draft models, each with a pool of its own"),
    Reason(_A, _ranks_are_apart, NOT_SHARED),

    Reason(_M, lambda on: on.mode == "prefill", "a prefill server decodes nothing"),
    Reason(_M, lambda on: on.envs.SGLANG_OPT_USE_ONLINE_COMPRESS.get(), "online c128 compression"),
    Reason(_M, lambda on: on.hisparse, "HiSparse reads its own mapping in every layer"),
    Reason(_M, lambda on: on.drafts.is_dspark(), "DSpark drafts"),
    Reason(_M, lambda on: on.parallel.attn_cp_size > 1, "context parallel attention"),

    Reason(_L, lambda on: on.parallel.pp_size > 1, "pipelines, whose stages send each other's layers apart"),
    Reason(_L, lambda on: on.parallel.attn_cp_size > 1 or on.parallel.dcp_size > 1,
           "context parallelism, which cuts pages between ranks"),
    Reason(_L, lambda on: on.hisparse, "HiSparse, which has slots of its own for the history"),
    Reason(_L, lambda on: on.host_tier,
           "a hierarchical cache, which copies pages layer by layer by the engine's ids"),
    Reason(_L, lambda on: on.choices,
           "the capture of routed experts or of indexer choices, whose buffers are as long as the engine's slots"),
    Reason(_L, lambda on: on.canary != "none", "--kv-canary, which counts on the engine's slots"),
    Reason(_L, lambda on: on.transfers_by and on.transfers_by not in BACKENDS,
           f"transfers by {{on.transfers_by}} (covered: {', '.join(BACKENDS[:2])})"),
    Reason(_L, _sends_early,
           f"{EARLY_SEND}=1 over NIXL on this release, which sends pages before they are written; set it to 0"),
)  # fmt: skip


def reasons(on: Launch, *parts: Part) -> Iterator[str]:
    """Yields why a server with these arguments does not get ``parts``."""
    for reason in REASONS:
        if reason.part in parts and reason.holds(on):
            yield reason.sentence.format(on=on)


def refusal(on: Launch, *parts: Part) -> str | None:
    """Returns the first of these reasons, if any."""
    return next(reasons(on, *parts), None)


def leave_sessions(reason: str, and_store: bool = True) -> None:
    """Says why no session is kept, where the user asked for them; and_store: nor is anything in the store."""
    if read_settings().sessions.asked:
        logger.warning("sessions: the cache of requests that end is not kept: %s", reason)
    if and_store:
        leave_store(reason)


def leave_store(reason: str) -> None:
    """Says why a server has nothing of its store, if it has one."""
    if read_settings().store.backend:
        logger.warning("store: nothing is written or read: %s", reason)
