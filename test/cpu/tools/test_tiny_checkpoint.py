"""The small real checkpoint: the engine's loader takes every tensor and misses none; text goes in and out."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from cpu_model import is_poisoned, loaded_model

from tools.tiny_checkpoint import __main__ as script
from tools.tiny_checkpoint.config import BASES, small_config

LAYERS, EXPERTS, WORDS = 5, 7, 640
MODELS = ["v4", "v41"]
NARROW = {
    "hidden_size": 256, "num_attention_heads": 4, "q_lora_rank": 128, "o_lora_rank": 128, "o_groups": 2,
    "index_n_heads": 4, "moe_intermediate_size": 128, "max_position_embeddings": 4096,
}  # fmt: skip
SCALES = ("k_scale", "v_scale")  # of an fp8 cache with scales, which no DeepSeek-V4 checkpoint has


def base(folder: Path, model: str = "v4", **changes: object) -> Path:
    path = folder / "base.json"
    path.write_text(json.dumps({**json.loads(BASES[model].read_text()), **NARROW, **changes}))
    return path


def make(folder: Path, *options: str, model: str = "v4") -> Path:
    out = folder / "checkpoint"
    sizes = ["--layers", str(LAYERS), "--experts", str(EXPERTS), "--vocab", str(WORDS)]
    assert script.main([str(out), "--base", str(base(folder, model)), *sizes, *options]) == 0
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=MODELS)
def either(folder, request, tmp_path_factory):
    """V4's checkpoint, and V4.1's with Engram."""
    return folder if request.param == "v4" else make(tmp_path_factory.mktemp("v41"), "--engram", model="v41")


@pytest.fixture(scope="module", params=["fp8 wo_a", "bf16 wo_a"])
def loaded(either, request):
    """(the engine's parameters, what its loader complained of)."""
    from sglang.srt.models import deepseek_v4

    complaints: list[str] = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = lambda record: complaints.append(record.getMessage())
    deepseek_v4.logger.addHandler(listener)
    fp8 = request.param == "fp8 wo_a"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SGLANG_DSV4_FP4_EXPERTS", raising=False)  # the engine finds the experts' type by itself
        patch.setenv("SGLANG_OPT_FP8_WO_A_GEMM", str(int(fp8)))
        patch.setattr(deepseek_v4, "_FP8_WO_A_GEMM", fp8)
        with loaded_model(either, patch) as model:
            # On a CPU, layers hold the next ones: a parameter has several names.
            yield dict(model.named_parameters(remove_duplicate=False)), complaints
    deepseek_v4.logger.removeHandler(listener)


def test_the_loader_uses_every_tensor_and_misses_no_parameter(loaded):
    parameters, complaints = loaded
    assert complaints == []
    left = {name for name, parameter in parameters.items() if is_poisoned(parameter.data)}
    assert left == {name for name in parameters if name.endswith(SCALES)}


def test_every_cache_family_has_a_layer_whatever_the_depth():
    for layers in (3, 4, 6, 9):
        ratios = small_config(BASES["v4"], layers, 8, WORDS)["compress_ratios"]
        assert len(ratios) == layers and set(ratios) == {0, 4, 128}


@pytest.mark.parametrize("layers", (5, 6, 8, 9, 20))
def test_layers_of_v41_own_and_share_caches(layers):
    config = small_config(BASES["v41"], layers, 8, WORDS)
    ratios, sources = config["compress_ratios"], config["kv_source_layer_ids"]
    assert len(ratios) == layers and ratios == sorted(ratios, key=(0, 2, 1).index)
    for ratio in (2, 1):
        first = ratios.index(ratio)
        assert first in sources and ratios[first + 1] == ratio and first + 1 not in sources
    assert max(sources) == ratios.index(1) == config["candidate_source_layer_id"], "the engine's bounded replay"
    assert set(config["index_source_layer_ids"]) == {*sources, layers - 1}


def test_the_shipped_folder_is_what_the_tool_makes_of_it():
    shipped = json.loads(BASES["v41"].read_text())
    assert small_config(BASES["v41"], 8, shipped["n_routed_experts"], shipped["vocab_size"]) == shipped


def test_engram_is_what_the_engine_makes_of_the_tokenizer(tmp_path):
    if "v41" not in MODELS:
        pytest.skip("the installed engine has no Engram")
    config = json.loads((make(tmp_path, "--engram", "--no-weights", model="v41") / "config.json").read_text())
    assert config["engram_layer_ids"] == [1] and len(config["engram_num_embeddings"]) == 1
    assert 100 < config["engram_compressed_vocab_size"] <= WORDS
    assert not list((tmp_path / "checkpoint").glob("*.safetensors"))


def test_any_text_goes_through_the_tokenizer_and_back(folder):
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(folder)
    for sample in ("", "a  b\n\n\tc ", "Größe", "你好。世界", "🙂👩\u200d👧", "\x00\x7f", "e\u0301 \ufeff", "<|x|>"):
        assert tokenizer.decode(tokenizer.encode(sample)) == sample
    assert sorted(tokenizer.get_vocab().values()) == list(range(WORDS))
    config, generation = AutoConfig.from_pretrained(folder), GenerationConfig.from_pretrained(folder)
    assert config.vocab_size == WORDS
    assert tokenizer.eos_token_id == config.eos_token_id == generation.eos_token_id


@pytest.mark.parametrize(
    ("options", "change", "named"),
    [
        (["--layers", "2"], {}, "--layers 2"),
        (["--engram"], {}, "only a DeepSeek-V4.1 model"),
        (["--experts", "5"], {}, "--experts 5"),
        (["--vocab", "256"], {}, "--vocab 256"),
        ([], {"hidden_size": 300}, "hidden_size 300"),
    ],
)
def test_what_could_not_be_served_is_refused_by_name(options, change, named, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        script.main([str(tmp_path / "out"), "--base", str(base(tmp_path, **change)), *options])
    assert stopped.value.code == 2 and named in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(SystemExit):
        script.main([str(tmp_path)])
    assert "is not empty" in capsys.readouterr().err and [path.name for path in tmp_path.iterdir()] == ["mine"]
