"""Holds every constant of a training: sizes of model and task, where it starts, the curriculum, the rates."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.exam.model import Config
from benchmarks.exam.task import Task


@dataclass(frozen=True)
class Start:
    """Weighs the start; see start.py.

    sharp: weight of a row's norm, which decides how sharply the right row is found. gate: how much a c128 row prefers a
    chapter's name and operation to other words. back: share of its reading that a layer with rows writes. loud: factor
    of the part of a word that queries and rows read.
    """

    sharp: float = 3.0
    gate: float = 5.0
    back: float = 1 / 3
    loud: float = 1.4


@dataclass(frozen=True)
class Stage:
    """Describes steps of the curriculum: lengths are drawn evenly from (low, high)."""

    steps: int
    prompt: tuple[int, int]
    chain: tuple[int, int]  # steps round the ring
    tokens: int  # of a batch


@dataclass(frozen=True)
class Recipe:
    """Describes a training and its export.

    served: the sizes of the exported model that are not those of ``config``; the rest of it is zeros. lengths: prompts
    and chains of the last examination.
    """

    config: Config
    task: Task
    stages: tuple[Stage, ...]
    lr: float
    served: dict[str, int]
    lengths: tuple[tuple[int, int], ...]
    is_toy: bool = False
    start: Start = field(default_factory=Start)

    warm_up = 50  # steps, also after --init
    floor = 0.03  # of the rate, at the end
    # NEXT is the first that must be learned; a start that does not find it will not find it later.
    must_find, by_step = 0.5, 400

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    def stage(self, step: int) -> Stage:
        for stage in self.stages:
            if step < stage.steps:
                return stage
            step -= stage.steps
        return self.stages[-1]

    def rate(self, step: int, since: int) -> float:
        """Returns the learning rate: flat for half of the steps, then a cosine's fall. since: steps of this process."""
        gone = step / self.steps
        fall = 1 if gone < 0.5 else self.floor + (1 - self.floor) * math.cos((gone - 0.5) * math.pi) ** 2
        return self.lr * min(1, (since + 1) / self.warm_up) * fall


# 2,000 steps, 48M tokens. The start value is asked for 4 * chain + 8 tokens later: of a chain longer than 29 it has
# left the window, and was never found (it is one token of 300, and c4 rows are not learned for it).
STAGES = (
    Stage(200, (260, 520), (4, 16), 8192),
    Stage(300, (260, 1032), (6, 24), 12288),
    Stage(500, (260, 2052), (8, 29), 20480),
    Stage(1000, (516, 3800), (12, 29), 32768),
)
TOY_STAGES = (
    Stage(150, (68, 132), (3, 8), 2048),
    Stage(150, (68, 260), (3, 12), 2048),
    Stage(300, (132, 1100), (4, 14), 3072),
)
# The shapes whose kernels are known to run.
SERVED = {"dim": 4096, "heads": 64, "index_heads": 64, "q_rank": 1024, "o_rank": 1024}


def full() -> Recipe:
    lengths = (512, 24), (1024, 29), (2048, 29), (3600, 29)
    # Of a block four times as long, a chapter's two records get the share of the toy's gates.
    return Recipe(Config(), Task(), STAGES, 1e-3, SERVED, lengths, start=Start(gate=6.4))


def toy() -> Recipe:
    """Returns a scaled-down copy, as crowded with keys as the full one, for one core: ten minutes."""
    task = Task(keys=192, chapters=16, block=32, base=5)
    config = Config(
        vocab=len(task.words), dim=256, heads=4, head_dim=128, rope_dim=16, q_rank=64, groups=2, o_rank=128, window=32,
        ratios=(0, 4, 32, 0), index_heads=2, index_dim=32, index_topk=128, experts=1, topk=1, inner=512, hc=1,
        sinkhorn=1,
    )  # fmt: skip
    served = {"dim": 384, "heads": 8, "index_heads": 4, "q_rank": 128}
    return Recipe(config, task, TOY_STAGES, 2e-3, served, ((100, 6), (256, 10), (512, 12), (1024, 14)), is_toy=True)


def of(saved: dict[str, Any]) -> Recipe:
    return toy() if saved["toy"] else full()


def read(path: Any) -> dict[str, Any]:
    """Returns a saved training: toy, step, state (the model's)."""
    return torch.load(path, map_location="cpu", weights_only=True)
