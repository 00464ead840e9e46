"""Bad settings: refused by name, before anything is served."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_dsv4.cli.main import main
from sglang_dsv4.livetest.faults.engine import a_new_process, start_pool
from sglang_dsv4.livetest.faults.scene import Drill, Scene, environment, raised, refused_by


def _play() -> Iterator[Scene]:
    with environment():
        yield Scene(
            "sglang-dsv4 serve --dsv4-verify 2 --model-path M", "terminal",
            refused_by(lambda: main(["serve", "--dsv4-verify", "2", "--model-path", "M"])),
            (r"DSV4_VERIFY='2': must be 0 or 1", r"exit status 2"),
        )  # fmt: skip
    for variable, text, reason in (
        ("DSV4_HOST_GB", "-8", r"DSV4_HOST_GB='-8': must be a positive number of GiB, or auto"),
        ("DSV4_TRANSFER", "staged", r"DSV4_TRANSFER='staged': must be one of auto, torch"),
        ("DSV4_HOST_GIB", "64", r"unknown setting DSV4_HOST_GIB: did you mean DSV4_HOST_GB\?"),
    ):
        with environment(**{variable: text}), a_new_process():
            ended = raised(start_pool)
        yield Scene(
            f"{variable}={text} python -m sglang.launch_server ...", "the scheduler's exception", ended,
            (rf"^HooksNotLanded: .*{reason}", r"DSV4_ENABLED=0"),
        )  # fmt: skip


DRILL = Drill(
    "settings",
    "A setting has a bad value, or a name that does not exist",
    "Correct the variable that the message names; docs/settings.md has them all.",
    _play,
)
