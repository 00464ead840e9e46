"""Makes small tokenizers with DeepSeek-V4's special tokens, trained byte-level BPE or one id a word, and writes them
into the folder of a model without weights.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

BAR = "\uff5c"  # the full-width bar of DeepSeek's special tokens


def special(name: str) -> str:
    return f"<{BAR}{name}{BAR}>"


BOS, EOS, PAD = special("begin▁of▁sentence"), special("end▁of▁sentence"), special("▁pad▁")
USER, ASSISTANT, THINK, THINK_END = special("User"), special("Assistant"), "<think>", "</think>"
TASKS = ("action", "query", "authority", "domain", "title", "read_url")
# What the engine's chat encoders write into a prompt, each one token. The first ones have the ids from 0 and do not
# show in an answer's text, the others do.
HIDDEN = (BOS, EOS, PAD, USER, ASSISTANT, *map(special, ("latest_reminder", "deepseek_image", "image")))
SHOWN = (THINK, THINK_END, f"{BAR}DSML{BAR}", *map(special, TASKS))

# A system text, then turns; the answer begins outside of thinking.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}" + USER + "{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}" + ASSISTANT + THINK_END + "{{ message['content'] }}{{ eos_token }}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT + THINK_END + "{% endif %}"
)


def of_words(words: Sequence[str]) -> Tokenizer:
    """Returns a tokenizer of texts whose words are divided by spaces; a word's place is its id, PAD is any other.

    Special tokens are those of HIDDEN and SHOWN that are among ``words``.
    """
    ids = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in HIDDEN if t in ids])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in SHOWN if t in ids])
    return tokenizer


def train(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Returns a byte-level tokenizer of exactly ``vocabulary`` ids for any UTF-8 text; placeholders fill the rest."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(SHOWN),
        min_frequency=2,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in HIDDEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in SHOWN])
    missing = vocabulary - tokenizer.get_vocab_size()
    tokenizer.add_tokens([AddedToken(special(f"place▁holder▁no▁{i}"), normalized=False) for i in range(missing)])
    return tokenizer


def write_texts(folder: Path, config: dict[str, Any], words: Tokenizer) -> dict[str, Any]:
    """Writes a folder with ``config`` and ``words``, which add no BOS; returns the config with the ids of its ends."""
    folder.mkdir(parents=True, exist_ok=True)
    words.save(str(folder / "tokenizer.json"))
    tokens = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", **tokens, "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE,
    })  # fmt: skip
    ends = {"bos_token_id": words.token_to_id(BOS), "eos_token_id": words.token_to_id(EOS)}
    write_json(folder / "config.json", config | ends)
    write_json(folder / "generation_config.json", ends | {"do_sample": False})
    return config | ends


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes one field a line."""
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
