"""Plays a decode server's retraction machinery on CPU, with the engine's own objects.

Real: Req, Scheduler, DecodeReqToTokenPool, SWATokenToKVPoolAllocator, the pools, the tree cache of a server without
radix cache, DecodePreallocQueue (its constructor runs, so the attach hook does too), ScheduleBatch.retract_decode.
Stand-ins: the KV manager and the receivers (they would open sockets), and what the scheduler would tell.
Every difference between the engine's lines is here and in no test.
"""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import oracle
import pytest
import torch
from sglang.srt.disaggregation import decode
from sglang.srt.disaggregation.decode import DecodeReqToTokenPool, _bootstrap_addr
from sglang.srt.disaggregation.utils import DisaggregationMode, TransferBackend
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components import weight_updater as engine
from sglang.srt.mem_cache import common
from sglang.srt.mem_cache.common import free_swa_out_of_window_slots, release_kv_cache
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dsv4.cache.families import Geometry
from sglang_dsv4.cache.units import Units
from sglang_dsv4.engine.decode import recompute
from sglang_dsv4.engine.hooks import PARTS
from sglang_dsv4.engine.hooks.table import hooks_of
from sglang_dsv4.engine.releases import engine_version, parse
from sglang_dsv4.hostmem.memory import HostCopy
from sglang_dsv4.testing.choices import Choices
from sglang_dsv4.testing.server import ServerSpec, build_scheduler
from sglang_dsv4.testing.standalone import (
    TINY41_RATIOS,
    TINY41_SOURCES,
    PoolSpec,
    make_allocator,
    make_draft_pool,
    make_pool,
    make_tree,
)

VERSION = engine_version()
HOOKS_HERE = hooks_of(VERSION, *PARTS)
ON_0522 = parse(VERSION) == (0, 5, 22)
since_0523 = pytest.mark.skipif(ON_0522, reason="0.5.22 has no interleaved rows, and no marks of a draft's rows")
WEIGHT_SOURCES = ("disk", "distributed", "tensor", "ipc", "rdma")
WINDOW, PAGE = 128, 256
DRAFT_TOKENS, DRAFT_LAYERS = {"EAGLE": 4, "DSPARK": 8}, {"EAGLE": 1, "DSPARK": 3}
SPEC = PoolSpec(pages=24, swa_pages=12, requests=8)
V41 = replace(SPEC, ratios=TINY41_RATIOS, sources=TINY41_SOURCES)
FAKE_HOST = "2.2.2.2"
UNITS = Units.of(Geometry(SPEC.ratios))
ONE_COPY = {"DSV4_HOST_GB": repr(UNITS.least * UNITS.nbytes / 2**30)}  # of at most one page


class Recorder:
    """Keeps its calls when called. error: the one it raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.error = error

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append((args, kwargs))
        if self.error is not None:
            raise self.error


def made_request(rid: str, tokens: int, max_new: int = 4096, fake: bool = False, input_embeds: Any = None) -> Any:
    """Returns the engine's request with a prompt of ``tokens`` tokens; fake: of a warm-up."""
    return Req(
        rid, "", array("q", range(tokens)), SamplingParams(max_new_tokens=max_new, temperature=0),
        bootstrap_host=FAKE_HOST if fake else "10.0.0.1", bootstrap_port=1, bootstrap_room=1,
        vocab_size=1 << 16, input_embeds=input_embeds,
    )  # fmt: skip


class World:
    """Plays one decode server. Requests come from ``admit``; ``retract`` and ``resume`` are the engine's own."""

    def __init__(
        self, spec: PoolSpec = SPEC, backup: str = "cpu_tensor", refuse: str | None = None, draft: str | None = None,
        break_draft: Callable[[Any], None] = lambda pool: None,
    ) -> None:  # fmt: skip
        """Builds it; draft: the speculative algorithm; None: no draft model. break_draft: changes its pool at once."""
        args: dict[str, Any] = {
            "disaggregation_mode": "decode",
            "disable_radix_cache": True,
            "chunked_prefill_size": 8192,
        }
        args |= {"disaggregation_transfer_backend": "mooncake", "disaggregation_decode_retraction_backup": backup}
        if draft is not None:
            args["speculative_algorithm"] = draft
            spec = replace(spec, draft_tokens=spec.draft_tokens or DRAFT_TOKENS[draft])
        spec = PoolSpec(**{**vars(spec), "server_args": {**spec.server_args, **args}})
        self.pool = make_pool(spec)
        self.allocator = make_allocator(spec, self.pool, need_sort=True)
        self.server_args = get_context().server_args
        self.choices = Choices((spec.pages + 1) * PAGE, spec.requests)
        self.backup, self.spec = backup, spec
        self.flushes: list[str] = []
        self.table = DecodeReqToTokenPool(
            size=spec.requests, max_context_len=4096, device=spec.device, enable_memory_saver=False, pre_alloc_size=0
        )
        with mock.patch("sglang.srt.mem_cache.registry.get_disagg", create=True):  # host_pool: without that pool
            self.tree = make_tree(spec, self.table, self.allocator, radix=False)
        self.scheduler = self._scheduler()
        self.draft_pool = None
        if draft is not None:
            self.draft_pool = self._draft_pool(spec, draft)
            break_draft(self.draft_pool)
        checks = ((lambda pool: refuse),) if refuse else type(self.pool).layout_checks
        with mock.patch.object(type(self.pool), "layout_checks", checks):
            self.queue = self._queue(spec)
        self.scheduler.disagg_decode_prealloc_queue = self.queue

    # ------------------------------------------------------------------------------------ the server

    def _draft_pool(self, spec: PoolSpec, algorithm: str) -> Any:
        """Returns the draft's pool, which the oracle reads too."""
        self.scheduler.spec_algorithm = SpeculativeAlgorithm.from_string(algorithm)
        pool = make_draft_pool(spec, self.allocator, DRAFT_LAYERS[algorithm])
        self.pool.draft_beside = oracle.DraftBeside(pool, WINDOW if algorithm == "DSPARK" else WINDOW - 1)
        return pool

    def _scheduler(self) -> Any:
        sizes = ServerSpec(pages=self.spec.pages, requests=self.spec.requests)
        memory = SimpleNamespace(pool=self.pool, allocator=self.allocator, table=self.table, tree=self.tree, draft=None)
        scheduler, nothing = build_scheduler(sizes, memory), lambda: None
        scheduler.disaggregation_mode = DisaggregationMode.DECODE
        scheduler.disagg_decode_transfer_queue = SimpleNamespace(
            queue=[], pop_transferred=list, has_pending_deferred_releases=lambda: False,
            release_memory_occupation=nothing, resume_memory_occupation=nothing,
        )  # fmt: skip
        scheduler.output_streamer = SimpleNamespace(stream_output=Recorder())
        scheduler.metrics_reporter.reset_metrics = lambda: self.flushes.append("flushed")
        scheduler.flush_cache = lambda **_: Scheduler.flush_cache(scheduler, empty_cache=False)
        return scheduler

    def _queue(self, spec: PoolSpec) -> Any:
        parallel = SimpleNamespace(
            attn_tp_group=SimpleNamespace(cpu_group=None), tp_rank=0, pp_rank=0, pp_size=1, attn_tp_rank=0
        )
        scope = mock.patch.object(decode, "get_parallel", lambda: parallel)
        manager = SimpleNamespace(prefill_info_table={})
        with scope, mock.patch.object(decode.DecodePreallocQueue, "_init_kv_manager", lambda self: manager):
            queue = decode.DecodePreallocQueue(
                req_to_token_pool=self.table, token_to_kv_pool_allocator=self.allocator, tree_cache=self.tree,
                draft_token_to_kv_pool=self.draft_pool, req_to_metadata_buffer_idx_allocator=None,
                metadata_buffers=None, scheduler=self.scheduler, gpu_id=0, bootstrap_port=0,
                transfer_queue=self.scheduler.disagg_decode_transfer_queue, num_reserved_decode_tokens=64,
                max_total_num_tokens=spec.pages * PAGE, transfer_backend=TransferBackend.MOONCAKE,
            )  # fmt: skip
        queue._create_receiver_and_enqueue = self._enqueue
        queue._cancel_prefill_dp_rank_queries = lambda: None
        return queue

    def _enqueue(self, req: Any, is_rebootstrap: bool = False) -> Any:
        entry = SimpleNamespace(req=req, is_rebootstrap=is_rebootstrap, kv_receiver=SimpleNamespace(init=Recorder()))
        self.queue.queue.append(entry)
        return entry

    @property
    def host(self) -> Any:
        return self.pool.host

    @property
    def streamed(self) -> list[Any]:
        """Returns requests answered through the output streamer, in order."""
        return [req for args, _ in self.scheduler.output_streamer.stream_output.calls for req in args[0]]

    @property
    def rebootstrapped(self) -> list[Any]:
        """Returns requests on their way back to the prefill server."""
        return [entry.req for entry in self.queue.queue if entry.is_rebootstrap]

    # -------------------------------------------------------------------------------------- requests

    def admit(
        self, n: int, rid: str = "r", prompt: int | None = None, overlap: bool = False, multimodal: bool = False,
        fake: bool = False, input_embeds: Any = None,
    ) -> Any:  # fmt: skip
        """Admits a running request with ``n`` tokens in the cache and one more, just sampled, without its KV.

        overlap: the forward in flight has its slot already, and ``kv_committed_len`` counts it.
        """
        prompt = max(1, n * 2 // 3) if prompt is None else prompt
        req = made_request(rid, prompt, fake=fake, input_embeds=input_embeds)
        if multimodal:
            req.multimodal_inputs = SimpleNamespace(mm_items=[])
        req.output_ids.append(7)
        self.queue._pre_alloc(req)
        more = n - prompt + int(overlap)
        if more:
            self._decode(req, prompt, more)
        req.output_ids.extend(range(100, 100 + n - prompt))
        assert req.seqlen - 1 == n
        self._evict_window(req, n)
        return req

    def _decode(self, req: Any, have: int, more: int) -> None:
        """Gives slots for ``more`` decoded tokens after ``have``."""

        def lengths(value: int) -> torch.Tensor:
            return torch.tensor([value], dtype=torch.int64)

        last = self.table.req_to_token[self.slot(req), have - 1 : have].to(torch.int64)
        total = have + more
        new = self.allocator.alloc_extend(lengths(have), lengths(have), lengths(total), lengths(total), last, more)
        assert new is not None
        self.table.write((self.slot(req), slice(have, total)), new.to(torch.int32))
        req.kv.kv_allocated_len = total
        req.kv.kv_committed_len = total

    def _evict_window(self, req: Any, n: int) -> None:
        free_swa_out_of_window_slots(
            req, n, sliding_window_size=WINDOW, page_size=PAGE, req_to_token_pool=self.table,
            token_to_kv_pool_allocator=self.allocator, supports_prefix_sharing=False,
        )  # fmt: skip

    def slot(self, req: Any) -> int:
        """Returns row of the request in the request table, its slot."""
        return int(req.kv.req_pool_idx)

    def slots(self, req: Any) -> torch.Tensor:
        """Returns full slots of the tokens in the cache, by position."""
        return self.table.req_to_token[self.slot(req), : req.seqlen - 1].to(torch.int64).clone()

    def read(self, req: Any) -> dict[oracle.RowKey, bytes]:
        """Returns the bytes that must survive, as the oracle reads them now."""
        return oracle.read(self.pool, self.slots(req), req.seqlen - 1, self.slot(req))

    def committed(self, req: Any) -> int:
        """Returns the length that must not be used."""
        return int(req.kv.kv_committed_len)

    # ------------------------------------------------------------------------------ the engine's path

    def finish(self, req: Any) -> None:
        """Gives back the pages of a request that has ended, as the engine does."""
        release_kv_cache(req, self.tree, checkpoint=False)

    def retract(self, req: Any, offload_kv: bool = True) -> Any:
        """Calls the engine's ``release_req``; on 0.5.23 False says that the request must be aborted."""
        return schedule_batch.release_req(
            req=req, remaing_req_count=0, req_to_token_pool=self.table,
            hisparse_coordinator=self.scheduler.hisparse_coordinator, token_to_kv_pool_allocator=self.allocator,
            tree_cache=self.tree, offload_kv=offload_kv,
        )  # fmt: skip

    def save(self, req: Any, tree: Any = None) -> Any:
        """Saves a copy as the engine does for a backup, without giving the request's pages away."""
        return common.backup_kv_cache(req, tree or self.tree, self.table, self.allocator, self.backup)

    def requeue(self, req: Any) -> None:
        """Requeues a retracted request as the scheduler does, up to the beginning of the queue's next pass."""
        self.queue.add(req, is_retracted=True)
        recompute.send_held(self.queue)

    def park(self, req: Any) -> HostCopy:
        """Retracts, requeues, and returns the copy."""
        self.retract(req)
        self.requeue(req)
        copy = self.copy_of(req)
        assert copy is not None, "no copy was made"
        return copy

    def resume(self) -> list[Any]:
        return self.queue.resume_retracted_reqs()

    def there_and_back(self, req: Any, seed: int = 1) -> None:
        """Retracts and resumes ``req``, whose every byte is compared in another place; no other byte changes."""
        n, old, slot = req.seqlen - 1, self.slots(req), self.slot(req)
        oracle.fill(self.pool, seed)
        expected, before = self.read(req), oracle.snapshot(self.pool)
        self.retract(req)
        oracle.assert_only_changed(before, self.pool)
        assert self.copy_of(req).tokens == n
        taker = self.admit(n + 1, f"taker{n}")
        oracle.fill(self.pool, seed + 7)
        self.requeue(req)
        before = oracle.snapshot(self.pool)
        assert self.resume() == [req] and self.rebootstrapped == []
        assert self.slot(req) != slot and self.committed(req) == n and not torch.equal(self.slots(req), old)
        assert set(self.slots(req).tolist()).isdisjoint(self.slots(taker).tolist())
        oracle.compare(expected, self.read(req))
        allowed = oracle.may_change(self.pool, self.slots(req), n, self.slot(req))
        oracle.assert_only_changed(before, self.pool, allowed)
        self.nothing_held()

    def _batch(self, reqs: list[Any]) -> Any:
        """Returns the engine's running batch, as far as a retract looks at it."""
        batch = object.__new__(ScheduleBatch)
        batch.reqs = list(reqs)
        batch.req_to_token_pool, batch.token_to_kv_pool_allocator = self.table, self.allocator
        batch.tree_cache, batch.hisparse_coordinator = self.tree, self.scheduler.hisparse_coordinator
        return batch

    def retract_decode(self, reqs: list[Any], fits: Iterator[bool]) -> tuple[list[Any], float, list[Any]]:
        """Returns the engine's ``ScheduleBatch.retract_decode`` over ``reqs``; ``fits`` answers its memory checks."""
        batch = self._batch(reqs)
        batch.check_decode_mem = lambda selected_indices: next(fits)
        batch.filter_batch = lambda keep_indices: setattr(batch, "reqs", [batch.reqs[i] for i in keep_indices])
        return batch.retract_decode()

    def abort(self, rid: str) -> None:
        """Calls the engine's ``Scheduler.abort_request`` for one request id."""
        Scheduler.abort_request(self.scheduler, AbortReq(rid=rid))

    @property
    def aborted(self) -> list[str]:
        """Returns ids that the tokenizer was told of."""
        return [message.rid for message, _ in self.scheduler.ipc_channels.send_to_tokenizer.messages]

    @staticmethod
    def copy_of(req: Any) -> HostCopy | None:
        """Returns the copy where the engine keeps it."""
        backup = req.kv.retraction_backup
        return None if backup is None else backup.cpu_tensors

    def nothing_held(self) -> None:
        """Asserts that every host block is back, none by garbage collection."""
        memory = self.host.memory
        memory.check_integrity()
        assert (memory.copies, memory.held_bytes, memory.leaks) == (0, 0, 0)
        assert memory.pool.held == 0


def world_with(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], kind: type[World] = World, **kwargs: Any
) -> Any:
    """Returns a server that starts with ``settings`` in its environment."""
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    return kind(**kwargs)


def crowded(monkeypatch: pytest.MonkeyPatch, **kwargs: Any) -> tuple[World, Any]:
    """Returns a server whose only copy is taken, and a running request that will find no room."""
    world = world_with(monkeypatch, ONE_COPY)
    world.park(world.admit(100, "first"))
    return world, world.admit(300, "second", **kwargs)


def prefill_of(world: World, req: Any, rank: int = 0, **info: Any) -> None:
    """Marks ``req`` as from rank ``rank`` of a prefill server, which is known."""
    found = SimpleNamespace(dp_size=1, follow_bootstrap_room=True)
    vars(found).update(info)
    world.queue.kv_manager.prefill_info_table[_bootstrap_addr(req)] = found
    recompute.remember_rank(None, SimpleNamespace(req=req, kv_receiver=SimpleNamespace(prefill_dp_rank=rank)))


def outputs(world: World, lengths: tuple[int, ...], **kwargs: dict[str, Any]) -> list[Any]:
    """Makes running requests in the order in which the engine retracts them: fewest output tokens first."""
    return [world.admit(n, f"r{i}", prompt=n - 2 - i, **kwargs.get(f"r{i}", {})) for i, n in enumerate(lengths)]


def is_503(reason: Any) -> bool:
    """Whether a request that finishes for ``reason`` is answered with 503."""
    return isinstance(reason, FINISH_ABORT) and reason.status_code == 503


def weight_updater(fail: bool = False, world: World | None = None) -> Any:
    """Returns the engine's weight updater over a model that takes every update, or none. ``world``: of that server."""
    names = ("load_weights_from_distributed", *(f"update_weights_from_{source}" for source in WEIGHT_SOURCES))
    updates = {f"{name}.return_value": (not fail, "message") for name in names}
    updates["receive_weights_from_distributed.return_value"] = []
    runner = SimpleNamespace(
        weight_updater=mock.Mock(**updates), model=torch.nn.Module(),
        server_args=SimpleNamespace(weight_cache_mode="off"),
    )  # fmt: skip
    worker = mock.Mock(**updates, model_runner=runner)
    worker.weight_update_runners.return_value = [("target", runner)]
    manager = object.__new__(engine.SchedulerWeightUpdaterManager)
    manager.tp_worker, manager.draft_worker = worker, None
    manager.metrics_collector = manager.tp_cpu_group = manager.stashed_model_static_state = None
    manager.offload_tags = set()
    manager.memory_saver_adapter = SimpleNamespace(pause=lambda tag: None, resume=lambda tag: None)
    manager._session = None
    if world is None:
        manager.scheduler, manager.flush_cache = SimpleNamespace(), lambda empty_cache: True
    else:
        manager.scheduler, manager.flush_cache = world.scheduler, world.scheduler.flush_cache
        manager.is_fully_idle = world.scheduler.is_fully_idle
        world.scheduler.weight_updater = manager
    manager.scheduler.record_weight_version_change = lambda new_version: None
    return manager


def update_weights(source: str, fail: bool = False, world: World | None = None) -> Any:
    """Returns one update of ``weight_updater``, by that way; a flush goes with it."""
    manager = weight_updater(fail, world)
    request = mock.MagicMock(flush_cache=True, selector="all", disable_draft_model=False)
    with mock.patch.object(torch.distributed, "barrier", lambda group=None: None):
        if source in ("rdma", "tensor", "distributed"):
            manager.begin_weight_update(request)
        if source == "rdma":
            return manager.end_weight_update(request)
        return getattr(manager, f"update_weights_from_{source}")(request)


def device_memory(world: World, call: str, *tags: str) -> Any:
    """Returns the engine's release_memory_occupation or resume_memory_occupation."""
    manager = getattr(world.scheduler, "weight_updater", None)
    if not hasattr(manager, call):
        manager = weight_updater(world=world)
    modules = SimpleNamespace(synchronize=lambda: None)
    with (
        mock.patch.object(torch.distributed, "barrier", lambda group=None: None),
        mock.patch.object(torch, "get_device_module", lambda *_: modules),
    ):
        return getattr(manager, call)(SimpleNamespace(tags=list(tags)))
