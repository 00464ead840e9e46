"""Runs the scheduler's own loop of a decode server on CPU; its prompts arrive whole, as a transfer leaves them.

Real: what ``PlainWorld`` has, the engine's queue of arrivals and retracts, and the loop's choice of batches. The
transfer is a stand-in: it writes the rows that a prefill server sends, and another prompt's where no step reads them.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from sglang.srt.disaggregation import decode
from sglang.srt.disaggregation.utils import DisaggregationMode, TransferBackend
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dsv4.engine.plain.start import start_plain_serving
from sglang_dsv4.testing.content import VOCABULARY, PrefixLedger, next_token
from sglang_dsv4.testing.integrity import poison
from sglang_dsv4.testing.ledger import live_from, locations
from sglang_dsv4.testing.server import PAGE, Silence
from sglang_dsv4.testing.world import NO_STREAMS, PlainWorld

ARGS = {
    "disaggregation_mode": "decode", "disaggregation_transfer_backend": "nixl",
    "disaggregation_decode_retraction_backup": "cpu_tensor",
}  # fmt: skip


class DecodeWorld(PlainWorld):
    """Runs one decode server. ``submit`` lets a prompt arrive; its first token is the prefill server's."""

    def __init__(self, **changes: Any) -> None:
        changes["server_args"] = ARGS | changes.pop("server_args", {})
        super().__init__(radix=False, **changes)

    def start(self) -> None:
        scheduler = self.scheduler
        vars(scheduler).update(
            device_module=NO_STREAMS, schedule_stream=Silence(), forward_stream=Silence(),
            kv_checksum_computer=None, disaggregation_mode=DisaggregationMode.DECODE,
            disagg_decode_transfer_queue=SimpleNamespace(
                queue=[], pop_transferred=list, has_pending_deferred_releases=lambda: False
            ),
        )  # fmt: skip
        processor = scheduler.batch_result_processor
        scheduler.batch_result_processor = replace(processor, disaggregation_mode=DisaggregationMode.DECODE)
        scheduler.disagg_decode_prealloc_queue = self.queue = self._queue()
        start_plain_serving(None, scheduler)
        self._watch_saves(self.pool.host._copier)

    def _queue(self) -> Any:
        parallel = SimpleNamespace(
            attn_tp_group=SimpleNamespace(cpu_group=None), tp_rank=0, pp_rank=0, pp_size=1, attn_tp_rank=0
        )
        scope = mock.patch.object(decode, "get_parallel", lambda: parallel)
        manager = SimpleNamespace(prefill_info_table={})
        with scope, mock.patch.object(decode.DecodePreallocQueue, "_init_kv_manager", lambda self: manager):
            return decode.DecodePreallocQueue(
                req_to_token_pool=self.table, token_to_kv_pool_allocator=self.allocator, tree_cache=self.tree,
                draft_token_to_kv_pool=None if self.scheduler.draft_worker is None
                else self.scheduler.draft_worker.primary_draft_kv_pool,
                req_to_metadata_buffer_idx_allocator=None, metadata_buffers=None, scheduler=self.scheduler, gpu_id=0,
                bootstrap_port=0, transfer_queue=self.scheduler.disagg_decode_transfer_queue,
                num_reserved_decode_tokens=64, max_total_num_tokens=self.spec.pages * PAGE,
                transfer_backend=TransferBackend.NIXL,
            )  # fmt: skip

    def submit(self, tokens: Any, max_new: int = 64, host: str = "10.0.0.1", **arguments: Any) -> Any:
        sampling = SamplingParams(max_new_tokens=max_new, temperature=0)
        sampling.normalize(None)
        req = Req(
            f"r{len(self.requests)}", "", array("q", tokens), sampling, bootstrap_host=host, bootstrap_port=1,
            bootstrap_room=1, vocab_size=VOCABULARY, **arguments,
        )  # fmt: skip
        self.requests.append(req)
        self._tokens[req.rid] = list(tokens)
        req.output_ids.append(next_token(list(tokens)))
        if self.spec.drafts:
            req.output_topk_p, req.output_topk_index = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
            req.hidden_states_tensor = torch.zeros(1)
        self.queue._pre_alloc(req)
        self._arrive(req, len(tokens))
        self.scheduler.waiting_queue.append(req)
        return req

    def _arrive(self, req: Any, count: int) -> None:
        """Writes the rows of the prompt; those of its window's page that no step reads are another prompt's."""
        slots, row = self.slots(req, count), int(req.kv.req_pool_idx)
        self.write(PrefixLedger(range(7, count + 8)), slots, 0, row, decode=False)
        ledger = self.ledger(req, count)
        for part in self.parts():
            ledger.put(part, *locations(part, self.pool, slots, live_from(part.family, count), row))
        self.computed[req.rid] = count

    def plan(self) -> Any:
        self.scheduler.waiting_queue.extend(self.queue.resume_retracted_reqs())
        return self.scheduler.get_next_disagg_decode_batch_to_run(running_batch=self.scheduler.running_batch)

    def retract(self, req: Any) -> None:
        scheduler, batch = self.scheduler, self.scheduler.running_batch
        index = batch.reqs.index(req)
        batch.release_req(index, len(batch.reqs) - 1)
        batch.filter_batch(keep_indices=[i for i in range(len(batch.reqs)) if i != index])
        scheduler._add_request_to_queue(req, is_retracted=True)
        while scheduler.result_queue:
            scheduler.process_batch_result(*scheduler.result_queue.popleft())
        scheduler.last_batch = None
        poison(self)

    @property
    def waiting(self) -> list[Any]:
        return [*self.scheduler.waiting_queue, *self.queue.retracted_queue]
