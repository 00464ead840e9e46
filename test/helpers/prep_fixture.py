"""Builds the engine's own attention backend over a real pool, without a model: enough to make metadata with."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
from random_steps import compare, flatten
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dsv4.engine.metadata import attach, eager, graphs
from sglang_dsv4.engine.metadata.attach import NAME
from sglang_dsv4.engine.state import server
from sglang_dsv4.testing.eager_builder import Engine, Sizes

GPU = torch.cuda.is_available()
SIZES = Sizes(requests=12, queries=1, context=1500, pages=20, device="cuda" if GPU else "cpu")
DRAFTS = 3
LENGTHS = (1, 4, 127, 128, 129, 256, 257, 511, 640)


class PrepWorld:
    """Makes requests of ``lengths`` tokens in their own slots and pages; with ``drafts`` their steps are verified."""

    def __init__(self, lengths, drafts: int = 0, **sizes) -> None:
        self.engine = Engine(replace(SIZES, queries=drafts or 1, **sizes))
        self.backend, self.pool, self.drafts = self.engine.backend, self.engine.pool, drafts
        self.table = self.engine.requests.req_to_token
        self.runner = self.backend.model_runner
        self.runner.attn_backend = self.backend
        self.place(lengths)
        self.reset()

    def place(self, lengths) -> None:
        self.placed = self.engine.place(np.array(lengths)).forward_batch

    def reset(self) -> None:
        for said in (attach._say_refused, graphs.say_left, graphs._say_made):
            said.cache_clear()
        server.target_refused = False
        for name in (NAME, graphs.NAME):
            vars(self.backend).pop(name, None)
        self.backend.forward_metadata = None
        self.runner.spec_algorithm = SpeculativeAlgorithm.EAGLE if self.drafts else SpeculativeAlgorithm.NONE
        self.runner.shared_read_done_event = None

    def attach(self, monkeypatch, way: str = "auto") -> None:
        monkeypatch.setenv("DSV4_PREP", way)
        monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: SimpleNamespace(attn_cp_size=1))
        attach.attach_builder(None, self.backend, self.runner)

    def batch(self, **changes):
        """Returns a forward batch as the engine's runner gives it to the backend."""
        return SimpleNamespace(**{**vars(self.placed), "global_num_tokens_cpu": None, **changes})


def leave_out_planners(patch):
    from sglang.srt.layers.attention import deepseek_v4_backend as engine

    patch.setenv("SGLANG_FP8_PAGED_MQA_LOGITS_TORCH", "1")
    patch.setenv("SGLANG_OPT_USE_TOPK_V2", "0")
    patch.setattr(engine, "_create_flashmla_metadata", lambda: None)
    if not GPU:
        patch.setattr(engine, "create_paged_compressor_data", no_plan)


def no_plan(compress_ratio, *, is_prefill, num_q_tokens=None, seq_lens, **_):
    """Stands for the CUDA planner; its results are compared on GPUs only."""
    from sglang.srt.layers.attention.dsv4 import compressor_v2 as engine

    rows = num_q_tokens if is_prefill else len(seq_lens)
    plan = torch.zeros(rows, 16, dtype=torch.uint8)
    if is_prefill:
        return engine.CompressorPrefillPlan(compress_ratio, plan, torch.zeros(rows, 8, dtype=torch.uint8))
    return engine.CompressorDecodePlan(compress_ratio, plan)


def ordered(found):
    """Sorts the rows of prefill plans, which come in any order."""
    for name, value in found.items():
        if name.endswith(("plan_c", "plan_w")):
            found[name] = value[torch.tensor(sorted(range(len(value)), key=lambda k: bytes(value[k].tolist())))]
    return found


def original(backend, forward_batch):
    from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4AttnBackend

    hooked = DeepseekV4AttnBackend.init_forward_metadata
    getattr(hooked, "__wrapped__", hooked)(backend, forward_batch)


def metadata_of(world, run, batch):
    run(world.backend, batch)
    return ordered(flatten(world.backend.forward_metadata))


def hooked(backend, forward_batch):
    eager.init_forward_metadata(never, backend, forward_batch)


def without_leftovers(theirs):
    """Zeroes the engine's page tables behind each row, where the request table's leftovers are."""
    lengths = theirs["core_attn_metadata.seq_lens_casual"][:, None]
    found = dict(theirs)
    for name in (name for name in theirs if name.endswith("page_table")):
        first = torch.arange(theirs[name].shape[1], device=lengths.device) * 256
        found[name] = torch.where(first < lengths, theirs[name], 0)
    return found


def check(ours, theirs, least=16):
    theirs = without_leftovers(theirs)
    assert compare(ours, theirs, ignore=lambda name: not GPU and ".plan_" in name) >= least


def never(*_):
    raise AssertionError("the engine's own builder ran")
