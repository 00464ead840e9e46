"""Builds the engine's DeepSeek-V4 model on the CPU, filled by the engine's own loader."""

from __future__ import annotations

import contextlib
import inspect
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sglang_dsv4.testing.standalone import boot


@contextlib.contextmanager
def loaded_model(folder: Path, patch: Any) -> Iterator[nn.Module]:
    """Yields the model with the weights of ``folder``, as ``--load-format auto`` reads them.

    ``patch`` is pytest's monkeypatch. Only what needs a GPU or another package is left out: rotary tables and kernel
    warm-up, which hold no weights. Every parameter is poisoned before the load.
    """
    boot(device="cpu", tokenizer_path=str(folder))
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from sglang.srt.models import deepseek_v4

    patch.setattr(deepseek_v4.DeepseekV4ForCausalLM, "_prewarm_mhc_kernels", lambda _: None)
    patch.setattr(deepseek_v4, "get_rope_wrapper", lambda *_, **__: nn.Module())
    config = ModelConfig(str(folder))
    quantization = Fp8Config.from_config(config.hf_config.quantization_config)
    quantization.is_fp4_experts = config.is_fp4_experts
    before = torch.get_default_dtype()
    with _one_rank():
        try:
            torch.set_default_dtype(torch.bfloat16)
            model = deepseek_v4.DeepseekV4ForCausalLM(config.hf_config, quant_config=quantization)
        finally:
            torch.set_default_dtype(before)
        for parameter in model.parameters():
            poison(parameter.data)
        model.load_weights(DefaultModelLoader(LoadConfig())._get_all_weights(config, model))
        yield model


def poison(tensor: torch.Tensor) -> None:
    """Fills with NaN, or -1 where there is none."""
    if tensor.dtype == torch.float8_e4m3fn:
        tensor.view(torch.uint8).fill_(0x7F)
    else:
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)


def is_poisoned(tensor: torch.Tensor) -> bool:
    """Whether any value is still the poison."""
    return bool((tensor == -1).any() if not tensor.is_floating_point() else tensor.float().isnan().any())


@contextlib.contextmanager
def _one_rank() -> Iterator[None]:
    """Yields the process groups of a server with one rank; gone afterwards."""
    from sglang.srt import runtime_context
    from sglang.srt.distributed import parallel_state as groups

    groups.init_distributed_environment(
        world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{tempfile.mkdtemp()}/store", backend="gloo"
    )
    with contextlib.ExitStack() as stack:
        stack.callback(groups.destroy_distributed_environment)
        stack.callback(groups.destroy_model_parallel)
        by_arguments = "tensor_model_parallel_size" in inspect.signature(groups.initialize_model_parallel).parameters
        groups.initialize_model_parallel(**({"tensor_model_parallel_size": 1} if by_arguments else {}))
        if not by_arguments:  # 0.5.23 publishes a process's ranks at launch
            ranks = {name: 0 for name in runtime_context._derived_widths() if name.endswith("_rank")}
            stack.enter_context(runtime_context.get_parallel().override(**ranks))
        yield
