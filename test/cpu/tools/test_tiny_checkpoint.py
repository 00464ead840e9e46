"""The small model: text goes in and out of its tokenizer, and a folder with something in it is left alone."""

import json

import pytest

from tools.tiny_checkpoint import __main__ as script


def test_text_goes_through_the_tokenizer_and_back_and_engram_is_sized_by_it(tmp_path):
    from transformers import AutoTokenizer, GenerationConfig

    assert script.main([str(tmp_path), "--model", "v41", "--engram"]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for sample in ("", "a  b\n\n\tc ", "Größe", "你好。世界", "🙂👩\u200d👧", "\x00\x7f", "e\u0301 \ufeff", "<|x|>"):
        assert tokenizer.decode(tokenizer.encode(sample)) == sample
    config = json.loads((tmp_path / "config.json").read_text())
    assert sorted(tokenizer.get_vocab().values()) == list(range(config["vocab_size"]))
    assert tokenizer.eos_token_id == config["eos_token_id"] == GenerationConfig.from_pretrained(tmp_path).eos_token_id
    assert len(config["engram_layer_ids"]) == len(config["engram_num_embeddings"]) == 2
    assert 100 < config["engram_compressed_vocab_size"] <= config["vocab_size"]


@pytest.mark.parametrize(("options", "named"), [([], "is not empty"), (["--engram"], "only a DeepSeek-V4.1 model")])
def test_what_could_not_be_served_is_refused(options, named, tmp_path, capsys):
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(SystemExit):
        script.main([str(tmp_path), *options])
    assert named in capsys.readouterr().err and [path.name for path in tmp_path.iterdir()] == ["mine"]
