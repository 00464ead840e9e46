"""The exam's model: trained for a moment, written as a checkpoint that is whole, equal to transformers' modeling."""

import json
from dataclasses import replace

import pytest
import run_gsm8k
import torch
from safetensors.torch import save_file

from benchmarks.exam import export, problems, recipe, train
from benchmarks.exam.model import Config, Model
from benchmarks.exam.recipe import Stage
from benchmarks.exam.task import NUMBERS
from sglang_dsv4.command_line import to_its_end
from tools.tiny_checkpoint.tokenizer import ASSISTANT, THINK, THINK_END, USER, of_words, write_texts

SMALL = ("--prompt", "132", "260", "--long-prompt", "516", "600", "--chain", "4", "8", "--problems", "3", "--long", "2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(the trained toy's file, its loss at each progress line), in two calls, the second with --init."""
    out = tmp_path_factory.mktemp("exam") / "toy.pt"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "TOY_STAGES", (Stage(40, (68, 132), (3, 8), 448),))
        losses = []
        for steps, more in ((16, ("--toy",)), (24, ("--init", str(out)))):
            given = train.parse([str(out), "--steps", str(steps), "--every", "8", *more])
            training = train.begin(given)
            training.run(1000, steps, 8)
            losses += training.losses
    return out, losses


@pytest.fixture(scope="module")
def folder(trained, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported") / "EXAM"
    assert export.main([str(trained[0]), str(out), *SMALL, "--parity", "3"]) == 0
    return out


def test_the_loss_falls_and_the_checkpoint_goes_on_where_it_ended(trained):
    out, losses = trained
    assert losses[0] > 5 and losses[-1] < losses[0] - 1, losses
    saved = recipe.read(out)
    assert saved["step"] == 24 and saved["toy"] and not list(out.parent.glob("*.part"))
    assert saved["state"].keys() == Model(recipe.toy().config).state_dict().keys()


def test_a_start_that_finds_nothing_is_left_early(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(recipe, "TOY_STAGES", (Stage(4, (68, 132), (3, 8), 256),))
    monkeypatch.setattr(recipe.Recipe, "by_step", 2)
    words = [str(tmp_path / "toy.pt"), "--toy", "--every", "2", "--back", "1"]
    assert to_its_end("train", lambda: train.main(words)) == 1
    said = capsys.readouterr()
    assert "at step 2" in said.err and "--gate" in said.err and "back=1.0" in said.out
    assert recipe.read(tmp_path / "toy.pt")["step"] == 2


def test_the_written_tensors_are_the_trained_model_within_fp8(trained, folder):
    chosen = recipe.toy()
    slim, state = Model(chosen.config), recipe.read(trained[0])["state"]
    slim.load_state_dict(state)
    wide = replace(chosen.config, **chosen.served)
    padded = Model(wide)
    padded.load_state_dict(export.joined(export.served_tensors(state, chosen.config, wide), wide))
    ids, _ = chosen.task.batch(2, 132, 6, torch.Generator().manual_seed(3))
    with torch.no_grad():
        exact, same, written = (model(ids) for model in (slim, padded, export.read_back(folder, wide)))
    assert (exact - same).abs().max() < 1e-3, "zeros change nothing"
    assert 0 < (exact.log_softmax(-1) - written.log_softmax(-1)).abs().mean() < 0.1
    for problem in problems.read(folder / problems.PARITY):
        assert len(problem.logprobs) == len(problem.input_ids + problem.answer_ids) - 1 and max(problem.logprobs) < 0


def test_transformers_computes_the_same(tmp_path):
    """In fp32, from the tensors as they are exported, padded; the indexer chooses 16 of up to 50 rows."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "DeepseekV4ForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no deepseek_v4: the model is compared with nothing")
    torch.manual_seed(0)
    c = Config(
        vocab=256, dim=96, heads=4, head_dim=64, rope_dim=16, q_rank=64, groups=2, o_rank=48, index_heads=16,
        index_dim=32, index_topk=16, experts=4, topk=3, inner=64,
    )  # fmt: skip
    slim = Model(c)
    for name, parameter in slim.named_parameters():
        if any(part in name for part in ("norm", "ape", "sink", "base", "scale")):
            parameter.data += 0.3 * torch.randn_like(parameter)
    wide = replace(c, dim=128, heads=8, index_heads=32, q_rank=96, o_rank=64)
    config = export.served_config(wide)
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(export.served_tensors(slim.state_dict(), c, wide), tmp_path / "model.safetensors", {"format": "pt"})
    theirs = transformers.DeepseekV4ForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    ids = torch.randint(256, (2, 203))
    with torch.no_grad():
        apart = (slim(ids) - theirs(ids).logits).abs().amax(-1)
    assert apart[:, :64].max() < 1e-4, "all rows are read"
    assert (apart < 1e-4).float().mean() > 0.9, "the others are ties of the indexer"


def test_a_problem_reads_the_same_as_text(tmp_path):
    """The text that run_gsm8k.py makes of a problem has the problem's ids, and its scorer finds the number."""
    from transformers import AutoTokenizer

    chosen, file = recipe.full(), tmp_path / problems.SHORT
    config = export.served_config(replace(chosen.config, **chosen.served))
    assert len(chosen.task.words) == chosen.config.vocab
    write_texts(tmp_path, config, of_words(chosen.task.words))
    problems.write(file, export.draw(chosen, 4, (1024, 2040), (24, 44), export.SEED))
    words = AutoTokenizer.from_pretrained(tmp_path)
    for question, problem in zip(run_gsm8k.build_questions(file, 0, None), problems.read(file), strict=True):
        assert words.encode(question.prompt) == problem.input_ids and 200 <= len(problem.answer_ids) <= 400
        assert words.encode(problem.answer) == problem.answer_ids[:-1]
        assert words.decode(problem.answer_ids, skip_special_tokens=True) == problem.answer
        assert run_gsm8k.last_number(problem.answer) == question.gold == int(problem.answer.split()[-1])
        assert problem.is_right(problem.answer_ids) and problem.first_wrong(problem.answer_ids) is None
        cut = problem.answer_ids[:-3]
        assert not problem.is_right(cut) and problem.first_wrong(cut) == "fin"


def test_a_server_with_the_tokenizer_starts():
    """At its start the engine's chat encoder writes a question with DeepSeek's marks."""
    renderer = pytest.importorskip("sglang.srt.parser.deepseek_recipe_renderer", reason="the release has none")
    task = recipe.full().task
    encoder = renderer.DeepSeekRecipe("dsv4", of_words(task.words))
    for thinking, mark in ((True, THINK), (False, THINK_END)):  # it thinks at its start, behind a text on effort
        question = {"messages": [{"role": "user", "content": "Question: oh Answer:"}], "thinking": thinking}
        said = task.decode(encoder.encode(question)).split()
        wanted = [USER, "Question:", "oh", "Answer:", ASSISTANT, mark]
        assert said[-len(wanted) :] == wanted, "all of them are words"


def test_every_token_of_an_answer_follows_from_the_prompt():
    """A solver that reads facts, chapters and operations writes the answer that the task drew."""
    task = recipe.full().task
    for prompt in (260, 1028, 2040):
        ids, labels = task.batch(2, prompt, 20, torch.Generator().manual_seed(prompt))
        assert (labels[:, prompt - 1 : -1] == ids[:, prompt:]).all() and (labels[:, : prompt - 1] == -100).all()
        for row in ids.tolist():
            assert solve(task.decode(row[:prompt])) == task.decode(row[prompt:]).split()


def test_an_open_block_is_asked_for_once_it_is_closed():
    """No answer needs a c128 row before decoding has made it."""
    task, prompt = recipe.full().task, 260 + 4 * 20
    ids, _ = task.batch(64, prompt, 20, torch.Generator().manual_seed(1))
    opened, ready = prompt // task.block * task.block, -prompt % task.block
    late = 0
    for row in ids.tolist():
        (mine,) = [task.chapters_at + word - task.heads for word in row[opened:prompt] if word in heads(task)]
        asked = [place for place in range(2, 8 * 20, 4) if row[prompt + place] == mine]
        assert all(place > ready for place in asked)
        late += len(asked)
    assert late, "it is asked for"


def heads(task):
    return range(task.heads, task.heads + task.chapters)


def solve(text: str) -> list[str]:
    words = text.split()
    records = [words[i : i + 4] for i in range(0, len(words), 4)]
    facts = {key: (then, chapter) for key, then, chapter, last in records if last == "."}
    blocks = [records[i : i + 32] for i in range(0, len(records), 32)]
    ops = {}
    for block in blocks:
        named = [record[1] for record in block if record[0] == "="]
        ops |= {f"in-{named[0][:-1]}": record[1] for record in block if record[0] == "*"} if named else {}
    key, _, value, _ = records[-1]
    first, second, value = [], [], int(value)
    begun = key
    while True:
        then, chapter = facts[key]
        op = ops.get(chapter, "-")
        if op != "-":
            kind, _, n = op.partition("-")
            n = NUMBERS.index(n)
            value = {"plus": value + n, "minus": value - n, "from": n - value}[kind] % 10
        first += [key, then, chapter, op]
        second += [key, then, "turn" if op == "-" else op, str(value)]
        key = then.removeprefix("to-")
        if key == begun:
            return [*first, *second, begun, "####", str(value)]


def test_a_folder_with_something_in_it_is_left_alone(trained, tmp_path, capsys):
    (tmp_path / "mine").write_text("precious")
    assert to_its_end("export", lambda: export.main([str(trained[0]), str(tmp_path)])) == 2
    assert "is not empty" in capsys.readouterr().err
