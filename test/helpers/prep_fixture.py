"""The engine's own attention backend over a real pool, without a model: enough to make metadata with."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from types import SimpleNamespace

import oracle
import torch

from sglang_dsv4.engine import prep_hooks
from sglang_dsv4.engine.prep_attach import NAME, attach
from sglang_dsv4.engine.releases import engine_version
from sglang_dsv4.engine.standalone import PoolSpec, make_allocator, make_pool

OLD = engine_version() == "0.5.17"
SPEC = PoolSpec(pages=20, swa_pages=20, requests=12)
CONTEXT = 1500
DRAFTS = 3
TOPK = 512
LENGTHS = (1, 4, 127, 128, 129, 256, 257, 511, 640)
GPU = torch.cuda.is_available()


class Algorithm:
    """A speculative algorithm by its two answers."""

    def __init__(self, none: bool) -> None:
        self._none = none

    def is_none(self) -> bool:
        return self._none

    def is_dspark(self) -> bool:
        return False


class PrepWorld:
    """Requests of ``lengths`` tokens in slots of their own, on pages that the engine's allocator gave them."""

    def __init__(self, lengths, device: str, drafts: int = 0) -> None:
        spec = PoolSpec(
            pages=SPEC.pages, swa_pages=SPEC.swa_pages, requests=SPEC.requests, draft_tokens=drafts, device=device
        )
        self.device, self.drafts, self.lengths = device, drafts, list(lengths)
        self.pool = make_pool(spec)
        self.allocator = make_allocator(spec, self.pool)
        table = torch.randint(0, spec.pages * 256, (spec.requests + 1, CONTEXT), dtype=torch.int32, device=device)
        self.slots = [1 + (5 * k) % spec.requests for k in range(len(self.lengths))]
        for slot, length in zip(self.slots, self.lengths, strict=True):
            tokens = length + drafts
            table[slot, :tokens] = oracle.new_request(self.allocator, slot, tokens).slots[:tokens].int()
        self.runner = SimpleNamespace(
            is_draft_worker=False, spec_algorithm=Algorithm(not drafts), war_fastpath_read_done_event=None,
            shared_read_done_event=None,
        )  # fmt: skip
        self.table = table
        self.backend = make_backend(self.pool, table, self.runner, drafts)
        self.runner.attn_backend = self.backend

    def reset(self) -> None:
        """No builder, no event, and no metadata."""
        vars(self.backend).pop(NAME, None)
        self.backend.forward_metadata = None
        self.runner.spec_algorithm = Algorithm(not self.drafts)
        self.runner.war_fastpath_read_done_event = self.runner.shared_read_done_event = None

    def attach(self, monkeypatch, way: str = "stream") -> None:
        monkeypatch.setenv("DSV4_PREP", way)
        monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: SimpleNamespace(attn_cp_size=1))
        attach(None, self.backend, self.runner)

    def batch(self, verify: bool = False, **changes):
        """A forward batch as the engine's runner gives it to the backend."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        lengths, device = torch.tensor(self.lengths), self.device
        drafts = self.drafts if verify else 1
        first = lengths if verify else lengths - 1
        locs = [
            self.table[slot, int(start) + d]
            for slot, start in zip(self.slots, first, strict=True)
            for d in range(drafts)
        ]
        values = {
            "forward_mode": ForwardMode.TARGET_VERIFY if verify else ForwardMode.DECODE,
            "batch_size": len(self.lengths),
            "req_pool_indices": torch.tensor(self.slots, device=device),
            "seq_lens": lengths.to(device),
            "seq_lens_cpu": None if verify else lengths,
            "out_cache_loc": torch.stack(locs).long().to(device),
            "spec_info": SimpleNamespace(draft_token_num=drafts, draft_token=None, ragged_verify_layout=None)
            if verify
            else None,
            "global_num_tokens_cpu": None,
            "max_seq_len_override": None,
            "encoder_swa_replay": False,
            "encoder_swa_row_floor": None,
        }
        return SimpleNamespace(**{**values, **changes})


def make_backend(pool, table, runner, drafts):
    """A DeepseekV4AttnBackend whose constructor did not run."""
    from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4AttnBackend

    backend = DeepseekV4AttnBackend.__new__(DeepseekV4AttnBackend)
    values = {
        "model_runner": runner, "token_to_kv_pool": pool, "req_to_token": table,
        "req_to_token_pool": SimpleNamespace(req_to_token=table), "MAX_SEQ_LEN_FOR_CAPTURE": table.shape[1],
        "device": table.device, "cuda_int32_kwargs": {"device": table.device, "dtype": torch.int32},
        "page_size": 256, "swa_page_size": 128, "c4_topk": TOPK, "index_topk": TOPK, "present_ratios": (4, 128),
        "low_ratios": (), "has_c4": True, "has_c128": True, "hisparse_coordinator": None, "topk": int(bool(drafts)),
        "mtp_enabled": bool(drafts), "speculative_num_steps": 0, "speculative_step_id": 0, "needs_cpu_seq_lens": False,
        "speculative_num_draft_tokens": drafts or None, "enable_deepseek_v4_fp4_indexer": False,
        "is_dspark_draft": False, "is_draft_runner": False, "enable_decoder_swa_bounded_replay": False,
        "dsa_topk_backend": SimpleNamespace(should_use_topk_v2=lambda: False), "trtllm_attn": False,
        "encoder_replay": False, "encoder_row_floor": None, "tail_forward_metadata": None, "forward_metadata": None,
        "extend_seq_lens_buffer": torch.zeros(64, dtype=torch.int32, device=table.device), "pre_kv_store_hook": None,
        "_early_verify_metadata_ids": set(),
        "online_c128_mtp": SimpleNamespace(
            enabled=lambda: False, prepare_forward=lambda *_, **__: 0, state_slot_offset=lambda: 0, clear=lambda: None
        ),
    }  # fmt: skip
    for name, value in values.items():
        setattr(backend, name, value)
    return backend


def flatten(value, name: str = "") -> dict[str, object]:
    """Tensors, numbers and Nones of a metadata object by path; objects of the kernels' own are left out."""
    if is_dataclass(value):
        parts = {f.name: getattr(value, f.name) for f in fields(value) if not f.name.endswith("flashmla_metadata")}
    elif hasattr(value, "_asdict"):
        parts = {k: v for k, v in value._asdict().items() if k != "pin_buffer"}
    elif isinstance(value, torch.Tensor):
        return {name: value.detach().clone()}
    else:
        return {name: value}
    found = {}
    for key, part in parts.items():
        found |= flatten(part, f"{name}.{key}" if name else key)
    return found


def compare(ours: dict[str, object], theirs: dict[str, object], ignore=lambda name: False) -> int:
    """Assert that every field is equal; the number of tensors compared."""
    assert ours.keys() == theirs.keys()
    compared = 0
    for name, want in theirs.items():
        if ignore(name):
            continue
        got = ours[name]
        if not isinstance(want, torch.Tensor):
            assert got == want, f"{name} is {got}, not {want}"
            continue
        assert isinstance(got, torch.Tensor), f"{name} is {got}"
        assert (got.dtype, got.shape) == (want.dtype, want.shape), (
            f"{name}: {got.dtype} {list(got.shape)}, not {want.dtype} {list(want.shape)}"
        )
        bad = (got.cpu() != want.cpu()).nonzero()
        assert not len(bad), f"{name}{bad[0].tolist()} is {got[tuple(bad[0])]}, not {want[tuple(bad[0])]}"
        compared += 1
    return compared


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
    """Rows of prefill plans come in any order."""
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
    prep_hooks.init_forward_metadata(never, backend, forward_batch)


def check(ours, theirs):
    assert compare(ours, theirs, ignore=lambda name: not GPU and ".plan_" in name) > 15


def never(*_):
    raise AssertionError("the engine's own builder ran")
