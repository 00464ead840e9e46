"""Runs the engine's own metadata builders outside a server, as the judge of ours.

A real attention backend works over real pools, and batches. The model runner and the forward batch are stand-ins:
plain objects with the fields that the backend reads from them. The backend, the pool, the request table, the SWA map
and every kernel are the installed engine's.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from sglang_dsv4.engine.metadata.attach import layout_of
from sglang_dsv4.engine.metadata.graphs import GraphPrep
from sglang_dsv4.engine.releases import engine_release
from sglang_dsv4.prep.metadata import StepMetadata
from sglang_dsv4.prep.step import Lengths, PrepLayout, Step, Tables
from sglang_dsv4.testing.standalone import PoolSpec, make_allocator, make_pool

PAGE, WINDOW = 256, 128
TOPK = 512


@dataclass(frozen=True)
class Sizes:
    """Sets the sizes.

    queries: query tokens a request; more than one: drafts are verified. context: columns of the request table.
    ratios: of the model's layers; one layer of each kind, because metadata does not depend on how many there are.
    """

    requests: int
    queries: int
    context: int
    pages: int
    device: str
    ratios: tuple[int, ...] = (0, 4, 128)


class _NoSpeculation:
    """Answers every question of the backend about the speculative algorithm."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("is_"):
            return lambda *_: False
        raise AttributeError(name)


@dataclass
class Batch:
    """Places requests in the pools. lengths: as the scheduler counts them, see Step. slots, out_locs: on the device."""

    lengths: Lengths
    slots: torch.Tensor
    out_locs: torch.Tensor
    device_lengths: torch.Tensor
    forward_batch: Any

    def step(self, queries: int, host_lengths: bool = True) -> Step:
        """Returns our builder's input.

        host_lengths: whether the host knows the lengths, as it does without speculation.
        """
        lengths = self.lengths if host_lengths else self.device_lengths
        return Step(self.slots, self.out_locs, lengths, queries, verify=queries > 1)


class Engine:
    """Holds the backend with its pools.

    ``build`` runs its eager builder on the current stream, ``from_raw`` the one that it captures into graphs. One at
    a time: the newest.
    """

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        drafts = sizes.queries if sizes.queries > 1 else 0
        speculation = {"speculative_eagle_topk": 1, "speculative_num_steps": drafts - 1} if drafts else {}
        spec = PoolSpec(
            ratios=sizes.ratios, pages=sizes.pages, swa_pages=2 * sizes.requests + 8, requests=sizes.requests,
            draft_tokens=drafts, device=sizes.device, server_args=speculation,
        )  # fmt: skip
        self.spec, self.pool = spec, make_pool(spec)
        self.allocator = make_allocator(spec, self.pool)
        # Imported behind make_pool, which boots the engine's global state.
        from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4AttnBackend  # noqa: PLC0415
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool  # noqa: PLC0415
        from sglang.srt.runtime_context import get_server_args  # noqa: PLC0415

        self.requests = ReqToTokenPool(sizes.requests, sizes.context, sizes.device, enable_memory_saver=False)
        config = SimpleNamespace(
            context_len=sizes.context, head_dim=512, v_head_dim=512, hf_text_config=SimpleNamespace(index_topk=TOPK)
        )
        runner = SimpleNamespace(
            device=sizes.device, model_config=config, page_size=PAGE, req_to_token_pool=self.requests,
            token_to_kv_pool=self.pool, hisparse_coordinator=None, server_args=get_server_args(),
            spec_algorithm=_NoSpeculation(), is_draft_worker=False,
        )  # fmt: skip
        self.backend = DeepseekV4AttnBackend.__new__(DeepseekV4AttnBackend)
        # The engine's own constructor: the hooked one gives the backend this package's builder.
        inspect.unwrap(DeepseekV4AttnBackend.__init__)(self.backend, runner)
        self.release = engine_release()
        self._draw = np.random.default_rng(1)
        self.requests.req_to_token.random_(0, sizes.pages * PAGE)

    @property
    def tables(self) -> Tables:
        """Returns the tables that both builders read on the device."""
        return self.release.tables(self.backend)

    @property
    def layout(self) -> PrepLayout:
        """Returns the sizes for our builder."""
        return layout_of(self.backend, self.release)

    def place(self, lengths: Lengths) -> Batch:
        """Places requests of ``lengths`` tokens on random pages and slots; only their windows are mapped to SWA pages.

        The table's entries behind a request's tokens are left over: random slots, or an earlier placing's.
        """
        sizes, draw = self.sizes, self._draw
        queries = sizes.queries
        ahead = queries if queries > 1 else 0  # drafts have slots, and the lengths do not count them
        table = self.requests.req_to_token
        mapping = torch.zeros_like(self.pool.full_to_swa_index_mapping.detach(), device="cpu")
        mapping[-1] = -1
        pages = iter(draw.permutation(sizes.pages) + 1)
        swa_pages = iter(draw.permutation(self.spec.swa_pages) + 1)
        slots = draw.permutation(sizes.requests)[: len(lengths)] + 1
        out_locs = []
        for slot, length in zip(slots, lengths, strict=True):
            total = int(length) + ahead
            mine = np.fromiter((next(pages) for _ in range(-(-total // PAGE))), np.int64)
            full = (mine[:, None] * PAGE + np.arange(PAGE)).reshape(-1)
            table[slot, :total] = torch.from_numpy(full[:total].astype(np.int32)).to(table.device)
            for page in mine[max(0, int(length) - WINDOW) // PAGE :]:
                mapping[page * PAGE : (page + 1) * PAGE] = int(next(swa_pages)) * PAGE + torch.arange(PAGE)
            written = np.arange(total - queries, total)
            out_locs.append(np.where(written >= 0, full[written] if total else 0, 0))
        self.pool.full_to_swa_index_mapping.copy_(mapping)
        device = sizes.device
        return self._batch(
            lengths.astype(np.int64), torch.from_numpy(slots).to(device),
            torch.from_numpy(np.concatenate(out_locs)).to(device),
        )  # fmt: skip

    def _batch(self, lengths: Lengths, slots: torch.Tensor, out_locs: torch.Tensor) -> Batch:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: PLC0415

        queries = self.sizes.queries
        device_lengths = torch.from_numpy(lengths).to(self.sizes.device)
        drafts = SimpleNamespace(draft_token_num=queries, draft_token=None, ragged_verify_layout=None)
        forward_batch = SimpleNamespace(
            forward_mode=ForwardMode.TARGET_VERIFY if queries > 1 else ForwardMode.DECODE, batch_size=len(lengths),
            req_pool_indices=slots, seq_lens=device_lengths, seq_lens_sum=int(lengths.sum()),
            seq_lens_cpu=torch.from_numpy(lengths), out_cache_loc=out_locs, max_seq_len_override=None,
            spec_info=drafts if queries > 1 else None, encoder_swa_replay=False, encoder_swa_row_floor=None,
        )  # fmt: skip
        return Batch(lengths, slots, out_locs, device_lengths, forward_batch)

    def build(self, batch: Batch) -> Any:
        """Makes the engine's metadata, without the planners of DeepGEMM and top-k, which stay the engine's."""
        self.backend.init_forward_metadata_indexer = _without_planners
        self.backend.init_forward_metadata(batch.forward_batch)
        return self.backend.forward_metadata

    def raw(self, slots: torch.Tensor, lengths: torch.Tensor, out_locs: torch.Tensor) -> Any:
        """Returns the raw inputs of a graph's metadata; the tensors are read when it is made."""
        longest = self.requests.req_to_token.shape[1]
        given = {"max_seq_len": longest, "req_pool_indices": slots, "seq_lens": lengths, "out_cache_loc": out_locs}
        if self.sizes.queries == 1:
            return self.backend.init_forward_metadata_decode(**given)
        on_cpu = None if lengths.is_cuda else lengths  # the engine asks for them where there is no GPU
        return self.backend.init_forward_metadata_target_verify(
            **given, seq_lens_cpu=on_cpu, use_prefill_cuda_graph=True
        )

    def from_raw(self, raw: Any, ours: bool) -> Any:
        """Makes the engine's metadata of ``raw``, by its kernels or by ours."""
        self.backend.init_forward_metadata_indexer = _without_planners
        verify = self.sizes.queries > 1
        if ours:
            return GraphPrep(self.release, self.layout, self.backend.device).build(self.backend, raw, verify)
        name = f"make_forward_metadata_from_raw_{'verify' if verify else 'decode'}"
        return inspect.unwrap(getattr(type(self.backend), name))(self.backend, raw)

    def install(self, made: StepMetadata, batch: Batch) -> Any:
        """Makes our metadata the backend's, as on a server; returns it as the engine's layers see it."""
        self.backend.init_forward_metadata_indexer = _without_planners
        self.release.install(self.backend, made, batch.forward_batch)
        return self.backend.forward_metadata


def _without_planners(*_: Any, **__: Any) -> None:
    return None
