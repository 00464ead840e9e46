"""Writes a trained model as a folder for ``launch_server --load-format auto``, with problems and torch's figures.

    python3 -m benchmarks.exam.export EXAM.pt FOLDER

The folder holds config, fp8 weights as released, a word-level tokenizer, and

    problems.jsonl   200 held-out problems, prompts of 1,024 to 2,040 tokens; scripts/run_gsm8k.py --data takes the file
                     too, with --shots 0
    long.jsonl       50 of 2,300 to 3,600 tokens: the c4 indexer must choose
    parity.jsonl     16 of both, with torch's log probability of each token behind the first

What the served shapes have more than was trained is zero: heads, and columns of the stream and of low ranks. Torch's
figures come from the tensors as written: padded, quantized and read back.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks.exam import checkpoint, problems, recipe
from benchmarks.exam.layers import frequencies
from benchmarks.exam.model import Config, Model
from benchmarks.exam.problems import Problem
from benchmarks.exam.recipe import Recipe
from sglang_dsv4.command_line import COUNT, CommandError, Parser, readable_file, to_its_end
from tools.tiny_checkpoint.__main__ import CONFIGS
from tools.tiny_checkpoint.tokenizer import of_words, write_texts

SEED = 5_000_000  # of the problems; training and its examinations draw below it


def served_config(c: Config) -> dict[str, Any]:
    """Returns the config of a served model of these sizes: the small checkpoint's with other numbers."""
    base = json.loads(CONFIGS["v4"].read_text())
    return base | {
        "vocab_size": c.vocab, "hidden_size": c.dim, "num_attention_heads": c.heads, "head_dim": c.head_dim,
        "kv_lora_rank": c.head_dim, "v_head_dim": c.head_dim, "qk_nope_head_dim": c.head_dim - c.rope_dim,
        "qk_rope_head_dim": c.rope_dim, "q_lora_rank": c.q_rank, "o_lora_rank": c.o_rank, "o_groups": c.groups,
        "sliding_window": c.window, "num_hidden_layers": len(c.ratios), "compress_ratios": list(c.ratios),
        "index_n_heads": c.index_heads, "index_head_dim": c.index_dim, "index_topk": c.index_topk,
        "n_routed_experts": c.experts, "num_experts_per_tok": c.topk, "moe_intermediate_size": c.inner,
        "intermediate_size": c.inner, "num_hash_layers": c.hash_layers, "hc_mult": c.hc,
        "hc_sinkhorn_iters": c.sinkhorn, "hc_eps": c.eps, "rms_norm_eps": c.eps, "swiglu_limit": c.swiglu_limit,
        "routed_scaling_factor": c.routed_scale, "rope_theta": int(c.theta),
        "compress_rope_theta": int(c.compress_theta),
    }  # fmt: skip


def served_tensors(state: dict[str, Tensor], c: Config, wide: Config) -> dict[str, Tensor]:
    """Returns fp32 tensors of the sizes ``wide`` by released name: the same function, padded with zeros."""
    new: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if ".ffn.experts." in name:
            axis = 1 if name.endswith("w2.weight") else 0
            for i, part in enumerate(tensor.chunk(c.experts, axis)):
                one = name.replace(".experts.", f".experts.{i}.")
                new[one] = padded(one, part, c, wide)
        else:
            new[name] = padded(name, tensor, c, wide)
    return new


def padded(name: str, w: Tensor, c: Config, wide: Config) -> Tensor:
    """Returns one tensor in its wider shape; a norm over more zeros divides by less, which its weight takes back."""
    last = name.removesuffix(".weight").rsplit(".", 1)[-1]
    dim, rank, o_rank = wide.dim - c.dim, wide.q_rank - c.q_rank, wide.o_rank - c.o_rank
    per_group, heads = c.heads // c.groups, (wide.heads - c.heads) // c.groups
    index_heads = wide.index_heads - c.index_heads
    if last in ("attn_norm", "ffn_norm") or name == "norm.weight":
        return F.pad(w * (c.dim / wide.dim) ** 0.5, (0, dim))
    if last == "q_norm":
        return F.pad(w * (c.q_rank / wide.q_rank) ** 0.5, (0, rank))
    if last in ("hc_attn_fn", "hc_ffn_fn", "hc_head_fn"):
        return F.pad(w.unflatten(1, (c.hc, c.dim)) * (c.dim / wide.dim) ** 0.5, (0, dim)).flatten(1)
    if name.endswith("indexer.wq_b.weight"):
        return F.pad(w, (0, rank, 0, index_heads * c.index_dim))
    if last == "weights_proj":  # the engine divides by the root of the heads
        return F.pad(w * (wide.index_heads / c.index_heads) ** 0.5, (0, dim, 0, index_heads))
    if last == "wq_a":
        return F.pad(w, (0, dim, 0, rank))
    if last == "wq_b":
        w = F.pad(w, (0, rank)).unflatten(0, (c.groups, per_group, c.head_dim))
        return F.pad(w, (0, 0, 0, 0, 0, heads)).flatten(0, 2)
    if last == "wo_a":
        w = F.pad(w, (0, heads * c.head_dim)).unflatten(0, (c.groups, c.o_rank))
        return F.pad(w, (0, 0, 0, o_rank)).flatten(0, 1)
    if last == "wo_b":
        return F.pad(F.pad(w.unflatten(1, (c.groups, c.o_rank)), (0, o_rank)).flatten(1), (0, 0, 0, dim))
    if last == "attn_sink":
        return F.pad(w.unflatten(0, (c.groups, per_group)), (0, heads)).flatten()
    if last == "w2":
        return F.pad(w, (0, 0, 0, dim))
    if last in ("embed", "head", "wkv", "wgate", "gate", "w1", "w3"):
        return F.pad(w, (0, dim))
    return w


def joined(tensors: dict[str, Tensor], wide: Config) -> dict[str, Tensor]:
    """Returns released tensors as a model's state: the experts of a layer lie side by side."""
    state = {name: tensor for name, tensor in tensors.items() if ".ffn.experts." not in name}
    for layer, part in itertools.product(range(len(wide.ratios)), ("w1", "w2", "w3")):
        each = [tensors[f"layers.{layer}.ffn.experts.{i}.{part}.weight"] for i in range(wide.experts)]
        state[f"layers.{layer}.ffn.experts.{part}.weight"] = torch.cat(each, 1 if part == "w2" else 0)
    return state


def read_back(folder: Path, wide: Config) -> Model:
    """Returns the written checkpoint as a model of the served sizes."""
    with torch.device("meta"):
        model = Model(wide)
    model.load_state_dict(joined(checkpoint.read(folder), wide), assign=True)
    for layer in model.layers:  # not in the state
        layer.attn.freqs = frequencies(wide, bool(layer.attn.ratio))
    return model


def draw(chosen: Recipe, count: int, prompts: Sequence[int], chains: Sequence[int], seed: int) -> list[Problem]:
    task, rng, drawn = chosen.task, torch.Generator().manual_seed(seed), []

    def between(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=rng))

    for _ in range(count):
        prompt = between(*prompts) // 4 * 4
        steps = min(between(*chains), task.longest(prompt))
        ids = task.batch(1, prompt, steps, rng)[0][0].tolist()
        # run_gsm8k.py writes "Question:" and "Answer:" around a question.
        texts = task.decode(ids[1 : prompt - 1]), task.decode(ids[prompt:])
        drawn.append(Problem(*texts, ids[:prompt], ids[prompt:], steps))
    return drawn


@torch.no_grad()
def log_probabilities(model: Model, problem: Problem) -> tuple[Tensor, bool]:
    """Returns those of each token behind the first, and whether the answer's are the likeliest."""
    ids = torch.tensor([problem.input_ids + problem.answer_ids], device=model.norm.weight.device)
    said = model(ids, slice(0, -1))[0].log_softmax(-1)
    right = said.argmax(-1) == ids[0, 1:]
    return said.gather(1, ids[0, 1:, None])[:, 0].cpu(), bool(right[len(problem.input_ids) - 1 :].all())


def compare(written: Model, trained: Model, asked: Sequence[Problem]) -> list[Problem]:
    """Returns ``asked`` with the written model's log probabilities; prints how far the trained model's are."""
    found, whole = [], 0
    for problem in asked:
        mine, right = log_probabilities(written, problem)
        apart = (mine - log_probabilities(trained, problem)[0]).abs()
        whole += right
        print(
            f"  prompt {len(problem.input_ids)}: mean log probability {mine.mean():.4f}; as trained differs by "
            f"{apart.mean():.4f}, at most {apart.max():.3f}",
            flush=True,
        )
        found.append(replace(problem, logprobs=mine.tolist()))
    print(f"torch, as written: {whole} of {len(found)} whole answers right", flush=True)
    return found


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("python3 -m benchmarks.exam.export", description=__doc__)
    parser.add_argument("model", type=readable_file, help="as benchmarks.exam.train saved it")
    parser.add_argument("folder", type=Path, help="where to write; empty or new")
    parser.add_argument("--problems", type=COUNT, default=200)
    parser.add_argument("--long", type=COUNT, default=50, help="problems with long prompts")
    parser.add_argument("--parity", type=COUNT, default=16, help="problems that torch reads too")
    parser.add_argument("--prompt", type=COUNT, nargs=2, default=(1024, 2040), help="shortest and longest")
    parser.add_argument("--long-prompt", type=COUNT, nargs=2, default=(2300, 3600))
    parser.add_argument("--chain", type=COUNT, nargs=2, default=(24, 29), help="steps: 204 to 244 tokens of answer")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns exit status 0. Raises CommandError where something is in the folder."""
    arguments = parse(argv)
    saved = recipe.read(arguments.model)
    chosen, folder = recipe.of(saved), arguments.folder
    wide = replace(chosen.config, **chosen.served)
    if folder.exists() and any(folder.iterdir()):
        raise CommandError(f"{folder} is not empty: name a new folder")
    write_texts(folder, served_config(wide), of_words(chosen.task.words))
    size = checkpoint.write(folder, served_tensors(saved["state"], chosen.config, wide))
    print(f"{folder}: {size / 1e6:.0f} MB, trained for {saved['step']} of {chosen.steps} steps", flush=True)
    some = draw(chosen, arguments.problems, arguments.prompt, arguments.chain, SEED)
    long = draw(chosen, arguments.long, arguments.long_prompt, arguments.chain, SEED + 1)
    problems.write(folder / problems.SHORT, some)
    problems.write(folder / problems.LONG, long)
    trained = Model(chosen.config)
    trained.load_state_dict(saved["state"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    models = read_back(folder, wide).to(device), trained.to(device)
    problems.write(folder / problems.PARITY, compare(*models, problems.by_turns(some, long)[: arguments.parity]))
    return 0


if __name__ == "__main__":
    sys.exit(to_its_end("benchmarks.exam.export", main))
