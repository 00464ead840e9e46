"""The small real checkpoint: every cache family, one seed one model, text goes in and out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tools.tiny_checkpoint import __main__ as script
from tools.tiny_checkpoint.config import BASE, small_config

LAYERS, EXPERTS, WORDS = 5, 7, 640
NARROW = {
    "hidden_size": 256, "num_attention_heads": 4, "q_lora_rank": 128, "o_lora_rank": 128, "o_groups": 2,
    "index_n_heads": 4, "moe_intermediate_size": 128, "max_position_embeddings": 4096,
}  # fmt: skip


def base(folder: Path, **changes: object) -> Path:
    path = folder / "base.json"
    path.write_text(json.dumps({**json.loads(BASE.read_text()), **NARROW, **changes}))
    return path


def make(folder: Path, *options: str) -> Path:
    out = folder / "checkpoint"
    sizes = ["--layers", str(LAYERS), "--experts", str(EXPERTS), "--vocab", str(WORDS)]
    assert script.main([str(out), "--base", str(base(folder)), *sizes, *options]) == 0
    return out


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Read through the index, each tensor from the file that it names."""
    found = {}
    for name, file in json.loads((folder / script.INDEX).read_text())["weight_map"].items():
        with safe_open(folder / file, "pt") as tensors:
            found[name] = tensors.get_tensor(name)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make(tmp_path_factory.mktemp("tiny"))


def test_every_cache_family_has_a_layer_whatever_the_depth():
    for layers in (3, 4, 6, 9):
        ratios = small_config(BASE, layers, 8, WORDS)["compress_ratios"]
        assert len(ratios) == layers and set(ratios) == {0, 4, 128}


def test_a_seed_is_a_model(folder, tmp_path):
    first = tensors_of(folder)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    again, other = tensors_of(make(tmp_path / "a")), tensors_of(make(tmp_path / "b", "--seed", "8"))
    for name, tensor in first.items():
        assert torch.equal(tensor.view(torch.uint8), again[name].view(torch.uint8)), name
    name = "layers.2.attn.wq_b.weight"
    assert not torch.equal(first[name].float(), other[name].float())


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
