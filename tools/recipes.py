"""Lists the public ways to serve these models: does a retracted request come back from a copy, and if not, why?

A group of recipes is told by what matters here: settings of the engine and variables of the environment. Models, sizes
and GPUs differ within it. The judge is that of `sglang-dsv4 doctor -- ARGUMENTS`, which asks the functions that refuse
in a server; test_recipes.py holds each group against its verdict, and docs/supported.md against the table.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from sglang_dsv4.testing.standalone import boot

DECODE = "--disaggregation-mode decode --disaggregation-transfer-backend"
DP = "--tp-size 8 --enable-dp-attention --dp-size 8"
EAGLE = "--speculative-algorithm EAGLE --speculative-eagle-topk 1 --speculative-num-steps"  # and the tokens but one
ONLINE = {"SGLANG_OPT_USE_ONLINE_COMPRESS": "1"}
UNIFIED = {"SGLANG_HACK_FLASHMLA_BACKEND": "unified_kv_triton"}
COVERED = "covered"


class Recipe(NamedTuple):
    """Describes a group of public recipes.

    number: of them; 0 for settings that are no recipe of their own. verdict: COVERED, or a part of the reason against.
    """

    name: str
    number: int
    words: str
    verdict: str = COVERED
    environ: dict[str, str] = {}  # noqa: RUF012 - read only
    model: str = "flash"


RECIPES = (
    Recipe("InferenceX, PD with MTP, TP", 34, f"{DECODE} mooncake --tp-size 8 {EAGLE} 3"),
    Recipe("the same, data-parallel attention", 0, f"{DECODE} nixl {DP} {EAGLE} 1"),
    Recipe("InferenceX, PD without MTP, data-parallel attention", 16, f"{DECODE} mooncake {DP}", environ=ONLINE),
    Recipe("InferenceX, PD without MTP, TP", 4, f"{DECODE} nixl --tp-size 8 --disable-radix-cache"),
    Recipe("InferenceX, agentic, plain", 4, f"--tp-size 8 --enable-hierarchical-cache --hicache-ratio 2 {EAGLE} 3"),
    Recipe("InferenceX, fixed lengths, plain", 4, f"--tp-size 8 {EAGLE} 3"),
    Recipe("one of its settings for B300", 0, "--tp-size 8", environ=ONLINE),
    Recipe("InferenceX, AMD, plain", 3, f"--tp-size 8 {EAGLE} 3", "unified_kv", UNIFIED),
    Recipe("InferenceX, AMD, PD", 2, f"{DECODE} mori --tp-size 8", "unified_kv", UNIFIED),
    Recipe("SGLang cookbook, NVIDIA, plain", 51, f"--tp-size 8 {EAGLE} 1"),
    Recipe("SGLang cookbook, AMD, plain", 15, f"--tp-size 8 {EAGLE} 3", "unified_kv", UNIFIED),
    Recipe("Dynamo, plain", 2, f"--tp-size 4 {EAGLE} 3"),
    Recipe("miles, plain", 2, DP),
    Recipe("no recipe: V4.1, plain, as it starts", 0, "--tp-size 8", model="v41-flash"),
    Recipe("no recipe: V4.1, decode", 0, f"{DECODE} nixl --tp-size 8", model="v41-flash"),
)  # fmt: skip


def verdict(recipe: Recipe) -> str:
    """Returns COVERED, or the reason why the engine alone treats retracted requests."""
    from sglang_dsv4.cli import doctor_server  # noqa: PLC0415 - it needs the engine
    from sglang_dsv4.cli.plan_config import EXAMPLES  # noqa: PLC0415
    from sglang_dsv4.settings import Settings  # noqa: PLC0415

    boot()
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, recipe.environ):
        shutil.copy(EXAMPLES / f"{recipe.model}.json", Path(folder) / "config.json")
        server = doctor_server.read(["--model-path", folder, *recipe.words.split()], None, Settings())
    return server.refuses or server.stock or COVERED


def table() -> list[str]:
    """Returns the lines of the table in docs/supported.md."""
    lines = ["| recipes | number | a retracted request |", "|---|---|---|"]
    for recipe in RECIPES:
        said = "comes back from its copy" if recipe.verdict == COVERED else f"as stock: {recipe.verdict}"
        lines.append(f"| {recipe.name} | {recipe.number or '–'} | {said} |")  # noqa: RUF001
    return lines
