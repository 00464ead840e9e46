"""The small model: each cache family has a layer, text goes in and out, and what could not be served is refused."""

from __future__ import annotations

import json

import pytest

from tools.tiny_checkpoint import __main__ as script
from tools.tiny_checkpoint.config import BASES, small_config

WORDS = 640


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


def test_text_goes_through_the_tokenizer_and_back_and_engram_is_sized_by_it(tmp_path):
    from transformers import AutoTokenizer, GenerationConfig

    assert script.main([str(tmp_path), "--vocab", str(WORDS), "--model", "v41", "--engram", "--layers", "5"]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for sample in ("", "a  b\n\n\tc ", "Größe", "你好。世界", "🙂👩\u200d👧", "\x00\x7f", "e\u0301 \ufeff", "<|x|>"):
        assert tokenizer.decode(tokenizer.encode(sample)) == sample
    assert sorted(tokenizer.get_vocab().values()) == list(range(WORDS))
    config = json.loads((tmp_path / "config.json").read_text())
    assert tokenizer.eos_token_id == config["eos_token_id"] == GenerationConfig.from_pretrained(tmp_path).eos_token_id
    assert config["engram_layer_ids"] == [1] and len(config["engram_num_embeddings"]) == 1
    assert 100 < config["engram_compressed_vocab_size"] <= WORDS == config["vocab_size"]


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
    base = tmp_path / "base.json"
    base.write_text(json.dumps({**json.loads(BASES["v4"].read_text()), **change}))
    with pytest.raises(SystemExit) as stopped:
        script.main([str(tmp_path / "out"), "--base", str(base), *options])
    assert stopped.value.code == 2 and named in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(SystemExit):
        script.main([str(tmp_path)])
    assert "is not empty" in capsys.readouterr().err and [path.name for path in tmp_path.iterdir()] == ["mine"]
