"""Trains the exam's model from scratch on one GPU: prints loss and accuracy, saves every minute.

    python3 -m benchmarks.exam.train EXAM.pt --compile                       # stops after --seconds (900)
    python3 -m benchmarks.exam.train EXAM.pt --init EXAM.pt --compile        # goes on at the step where that one ended
    python3 -m benchmarks.exam.train TRY.pt --compile --seconds 60 --back 1 --gate 5       # another start, for a minute
    python3 -m benchmarks.exam.train TOY.pt --toy                          # a scaled-down copy on one core, 10 minutes

Every 100 steps it prints the accuracy of each kind of token (see task.py) on problems that were not trained on; "exact"
is the share of whole answers. Where "next" is below 0.5 at step 400 it stops with exit status 1: training longer does
not help, another start does. --init starts Adam anew and warms up again.
"""

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks.exam import recipe, start
from benchmarks.exam.model import Model, compile_parts
from benchmarks.exam.recipe import Recipe, Start
from benchmarks.exam.task import Task
from sglang_dsv4.command_line import COUNT, SECONDS, CommandError, Parser, number, readable_file, to_its_end

SAVE_EVERY = 60  # seconds
EXAMINED_TOKENS = 32768  # of a batch without gradients
HELD_OUT = 1_000_000  # first seed of problems that are not trained on
INDEX_SHARE = 0.1  # of the indexer's loss
STARTED = 3  # steps that compile: the clock runs from here on


class NotFound(CommandError):
    """Reports a start from which facts are not found by their key; names the constants to change."""

    status = 1


@torch.no_grad()
def examine(model: Model, task: Task, prompt: int, steps: int, count: int, seed: int) -> dict[str, float]:
    """Returns the share of right tokens by kind under teacher forcing, and of whole answers ("exact")."""
    device = model.norm.weight.device
    draw, kinds = torch.Generator(device).manual_seed(seed), task.kinds(steps)
    at_once = max(1, min(count, EXAMINED_TOKENS // (prompt + len(kinds))))
    right = []
    for _ in range(-(-count // at_once)):
        ids, _labels = task.batch(at_once, prompt, steps, draw)
        right.append(model(ids, slice(prompt - 1, -1)).argmax(-1) == ids[:, prompt:])
    each = torch.cat(right).float().cpu()
    by_kind: dict[str, list[Tensor]] = defaultdict(list)
    for place, kind in enumerate(kinds):
        by_kind[kind].append(each[:, place])
    shares = {kind: torch.stack(columns).mean().item() for kind, columns in by_kind.items() if kind != "turn"}
    return {"exact": each.min(1).values.mean().item(), **shares}


def parameter_groups(model: Model) -> list[dict[str, Any]]:
    """Returns Adam's groups; the offsets of gates take larger steps, for they move a gate by the rate itself."""
    groups: dict[tuple[float, float], list[Tensor]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        decays = parameter.dim() > 1 and not any(part in name for part in ("hc_", "embed", "ape"))
        groups[0.05 if decays else 0.0, 10.0 if name.endswith(".ape") else 1.0].append(parameter)
    return [{"params": some, "weight_decay": decay, "factor": factor} for (decay, factor), some in groups.items()]


@dataclass
class Training:
    """Holds a model on its way through a recipe's curriculum. step: of the whole curriculum; first: of this process."""

    recipe: Recipe
    model: Model
    out: Path
    seed: int = 1
    step: int = 0
    losses: list[float] = field(default_factory=list)  # one a progress line

    def __post_init__(self) -> None:
        self.first, self.device = self.step, self.model.norm.weight.device
        fused = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            parameter_groups(self.model), lr=self.recipe.lr, betas=(0.9, 0.95), fused=fused
        )
        # Problems follow from seed and step, so that one that goes on does not see the first ones again.
        self.draw = torch.Generator(self.device).manual_seed(self.seed + self.step)
        self.dice = torch.Generator().manual_seed(self.seed + self.step)
        self.prompt = self.chain = 0
        self.topk = self.model.c.index_topk

    def one_step(self) -> tuple[Tensor, int]:
        """Trains on one batch; returns its loss and its tokens."""
        task, stage = self.recipe.task, self.recipe.stage(self.step)
        self.prompt = self._between(stage.prompt) // 4 * 4
        self.chain = min(self._between(stage.chain), task.longest(self.prompt))
        count = max(1, stage.tokens // (self.prompt + task.answer_length(self.chain)))
        ids, labels = task.batch(count, self.prompt, self.chain, self.draw)
        rate = self.recipe.rate(self.step, self.step - self.first)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        # Every other batch sees all rows: the indexer learns of those that it would leave out.
        self.model.c.index_topk = self.topk if self.step % 2 else 1 << 30
        logits = self.model(ids, slice(self.prompt - 1, -1), learn_index=True)
        self.model.c.index_topk = self.topk
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, self.prompt - 1 : -1].flatten())
        (loss + INDEX_SHARE * self.model.index_loss()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss.detach(), ids.numel()

    def _between(self, limits: tuple[int, int]) -> int:
        return int(torch.randint(limits[0], limits[1] + 1, (), generator=self.dice))

    def save(self) -> None:
        """Writes the checkpoint, whole or not at all."""
        part = self.out.with_suffix(".part")
        state = {name: tensor.cpu() for name, tensor in self.model.state_dict().items()}
        torch.save({"toy": self.recipe.is_toy, "step": self.step, "state": state}, part)
        part.replace(self.out)

    def run(self, seconds: float, until: int, every: int) -> None:
        """Trains until a step of the curriculum or out of time. Raises NotFound."""
        began = saved = time.monotonic()
        tokens, losses = 0, []
        while self.step < until and (self.step < self.first + STARTED or time.monotonic() - began < seconds):
            loss, count = self.one_step()
            losses.append(loss)
            tokens += count
            if self.step == self.first + STARTED:
                print(f"{time.monotonic() - began:.0f} s for the first {STARTED} steps", flush=True)
                began, tokens = time.monotonic(), 0
            if self.step % max(1, every // 5) == 0:
                spent = time.monotonic() - began
                self.losses.append(torch.stack(losses).mean().item())
                losses.clear()
                print(
                    f"{spent:6.0f} s step {self.step} of {self.recipe.steps} loss {self.losses[-1]:.4f} "
                    f"index {float(self.model.index_loss().detach()):.3f} prompt {self.prompt} chain {self.chain} "
                    f"{tokens / max(spent, 1e-9) / 1e3:.0f}K tokens/s",
                    flush=True,
                )
            if self.step % every == 0:
                found = examine(self.model, self.recipe.task, self.prompt, self.chain, 16, HELD_OUT + self.step)
                print(f"  {says(found)}", flush=True)
                if self.step == self.recipe.by_step and found["next"] < self.recipe.must_find:
                    self.save()
                    raise NotFound(
                        f'"next" is right in {found["next"]:.2f} of its tokens at step {self.step}, not in '
                        f"{self.recipe.must_find}: facts are not found by their key. Begin with another start "
                        "(--back, --gate, --sharp, --loud)"
                    )
            if time.monotonic() - saved > SAVE_EVERY:
                saved = time.monotonic()
                self.save()
        self.save()


def says(shares: dict[str, float]) -> str:
    return " ".join(f"{kind} {share:.3f}" for kind, share in shares.items())


def begin(arguments: argparse.Namespace) -> Training:
    """Returns a training at its start, or at the step of ``--init``."""
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    saved = recipe.read(arguments.init) if arguments.init else None
    chosen = recipe.of(saved) if saved else recipe.toy() if arguments.toy else recipe.full()
    given = {name: getattr(arguments, name) for name in asdict(Start()) if getattr(arguments, name) is not None}
    chosen = replace(chosen, start=replace(chosen.start, **given), lr=arguments.lr or chosen.lr)
    model = Model(chosen.config)
    if saved:
        model.load_state_dict(saved["state"])
    else:
        start.begin(model, chosen.task, chosen.start)
    if arguments.compile:
        compile_parts()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    training = Training(chosen, model, arguments.out, arguments.seed, saved["step"] if saved else 0)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(f"{millions:.1f}M parameters on {training.device}, {chosen.start}, step {training.step} of {chosen.steps}")
    return training


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("python3 -m benchmarks.exam.train", description=__doc__)
    parser.add_argument("out", type=Path, help="the file to save to")
    parser.add_argument("--init", type=readable_file, help="go on from this one")
    parser.add_argument("--seconds", type=SECONDS, default=900, help=f"to train, after {STARTED} steps (900)")
    parser.add_argument("--steps", type=COUNT, help="stop at this step of the curriculum")
    parser.add_argument("--every", type=COUNT, default=100, help="steps between examinations (100)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--toy", action="store_true", help="a scaled-down copy, for a CPU")
    parser.add_argument("--compile", action="store_true", help="fuse small functions: 40 s, then twice as fast")
    parser.add_argument("--lr", type=number(float, 0), help="the highest learning rate")
    for name, value in asdict(Start()).items():
        parser.add_argument(f"--{name}", type=float, help=f"of the start, see recipe.py ({value:.2g})")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, examines at several lengths, and returns exit status 0."""
    arguments = parse(argv)
    training = begin(arguments)
    chosen = training.recipe
    training.run(arguments.seconds, min(chosen.steps, arguments.steps or chosen.steps), arguments.every)
    for prompt, chain in chosen.lengths:
        found = examine(training.model, chosen.task, prompt, chain, 32, 2 * HELD_OUT)
        print(f"end: prompt {prompt} chain {chain}: {says(found)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(to_its_end("benchmarks.exam.train", main))
