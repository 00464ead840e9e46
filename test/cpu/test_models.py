"""The model package seeds weights of a sane scale and refuses to serve without the hooks."""

import pytest
import torch
from sglang.srt.models.registry import import_model_classes
from torch import nn

from sglang_dsv4.engine import store_start
from sglang_dsv4.engine.hooks import check
from sglang_dsv4.engine.state import server
from sglang_dsv4.errors import HooksNotLanded
from sglang_dsv4.models import deepseek_v4
from sglang_dsv4.models.deepseek_v4 import DeepseekV4ForCausalLM, EntryClass
from sglang_dsv4.models.seeded import fill

FP8, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


class Layer(nn.Module):
    """A projection of each kind that the model has."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.Module()
        self.input_layernorm.weight = nn.Parameter(torch.full((256,), 9.0))
        self.wq_b = nn.Module()
        self.wq_b.weight = nn.Parameter(torch.zeros(512, 256).to(FP8), requires_grad=False)
        self.wq_b.weight_scale_inv = nn.Parameter(torch.zeros(4, 2))
        self.experts = nn.Module()
        self.experts.w13_weight = nn.Parameter(torch.zeros(3, 128, 256).to(FP8), requires_grad=False)
        self.experts.w13_weight_scale_inv = nn.Parameter(torch.zeros(3, 1, 2))
        self.gate = nn.Linear(256, 64, dtype=torch.bfloat16)
        self.attn_sink = nn.Parameter(torch.full((64,), 5.0))
        self.hc_attn_scale = nn.Parameter(torch.zeros(3))
        self.tid2eid = nn.Parameter(torch.arange(12).view(4, 3), requires_grad=False)
        self.engram = nn.Module()
        self.engram.q_weight = nn.Parameter(torch.zeros(4, 256))
        self.engram.embed = nn.Module()
        self.engram.embed.weight = nn.Parameter(torch.zeros(512, 64).to(FP8), requires_grad=False)
        self.engram.embed.scale = nn.Parameter(torch.zeros(512, 2).to(E8M0), requires_grad=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(128, 256)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.lm_head = nn.Linear(256, 128, bias=False)


def dense(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return weight.float() * scale.float().reshape(-1)[0]


def test_what_goes_in_comes_out_at_the_same_scale():
    model = Model()
    fill(model)
    x = torch.randn(64, 256)
    layer = model.layers[0]
    for out, gain in (
        (x @ dense(layer.wq_b.weight, layer.wq_b.weight_scale_inv).T, 3.0),
        (x @ dense(layer.experts.w13_weight[1], layer.experts.w13_weight_scale_inv).T, 1.0),
        (x @ layer.gate.weight.float().T, 1.0),
        (model.lm_head(x), 4.0),
        (model.embed_tokens.weight, 1.0),
        (dense(layer.engram.embed.weight, layer.engram.embed.scale), 1.0),
    ):
        assert 0.6 * gain < float(out.std()) < 1.6 * gain
    assert torch.equal(layer.input_layernorm.weight, torch.ones(256))
    assert torch.equal(layer.engram.q_weight, torch.ones(4, 256))
    assert not bool(layer.attn_sink.any()) and not bool(layer.gate.bias.any())
    assert torch.equal(layer.tid2eid, torch.arange(12).view(4, 3)), "an integer table is not a weight"


def test_layers_and_experts_differ_and_a_second_model_is_the_same():
    one, two = Model(), Model()
    assert fill(one) == fill(two) == len([t for t in one.state_dict().values() if t.is_floating_point()])
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor.float(), two.state_dict()[name].float()), name
    first, second = one.layers
    assert not torch.equal(first.gate.weight, second.gate.weight)
    experts = first.experts.w13_weight.float()
    assert not torch.equal(experts[0], experts[1])


def test_the_model_keeps_the_engines_name():
    assert [entry.__name__ for entry in EntryClass] == ["DeepseekV4ForCausalLM"]
    assert DeepseekV4ForCausalLM.__mro__[1].__module__ == "sglang.srt.models.deepseek_v4"
    assert "DeepseekV4ForCausalLM" in import_model_classes("sglang_dsv4.models", strict=True)


def test_without_the_plugin_or_one_of_its_hooks_it_refuses_before_anything_is_built(monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(HooksNotLanded, match="did not load the plugin"):
        patch.setattr(server, "watched", False)
        DeepseekV4ForCausalLM(None)
    broken = check.Installation("0.5.22")
    broken.failure = ValueError("no such name")
    monkeypatch.setattr(server, "installation", broken)
    with pytest.raises(HooksNotLanded, match="no such name"):
        DeepseekV4ForCausalLM(None)


@pytest.mark.parametrize(("store", "plain"), [(None, "auto"), ("/nvme/store", "auto"), ("/nvme/store", "off")])
def test_a_stores_process_starts_before_weights_are_loaded(monkeypatch, store, plain):
    begun = []
    monkeypatch.setattr(deepseek_v4, "require_landed", lambda: begun.append("hooks"))
    monkeypatch.setattr(store_start, "Early", lambda command: begun.append("process"))
    monkeypatch.setattr(server, "early_store", None)
    monkeypatch.setattr(deepseek_v4.StockDeepseekV4ForCausalLM, "__init__", lambda self: begun.append("model"))
    monkeypatch.delenv("DSV4_STORE", raising=False)
    if store is not None:
        monkeypatch.setenv("DSV4_STORE", store)
    monkeypatch.setattr(DeepseekV4ForCausalLM, "__setattr__", object.__setattr__)
    monkeypatch.setenv("DSV4_PLAIN", plain)
    DeepseekV4ForCausalLM()
    assert begun == ["hooks", *(["process"] if store and plain == "auto" else []), "model"]
