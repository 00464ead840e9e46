"""Bad settings: refused by name, before anything is served."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_dsv4.cli.main import main
from sglang_dsv4.livetest.faults.engine import a_new_process, attach, start_pool
from sglang_dsv4.livetest.faults.scene import Drill, Scene, environment, raised, refused_by, server_log
from sglang_dsv4.settings import Settings


def _play() -> Iterator[Scene]:
    with environment():
        yield Scene(
            "sglang-dsv4 serve --dsv4-verify 2 --model-path M", "terminal",
            refused_by(lambda: main(["serve", "--dsv4-verify", "2", "--model-path", "M"])),
            (r"DSV4_VERIFY='2': must be 0 or 1", r"exit status 2"),
        )  # fmt: skip
    for variable, text, reason in (
        ("DSV4_HOST_GB", "-8", r"DSV4_HOST_GB='-8': must be a positive number of GiB, or auto"),
        ("DSV4_HOST_GIB", "64", r"unknown setting DSV4_HOST_GIB: did you mean DSV4_HOST_GB\?"),
    ):
        with environment(**{variable: text}), server_log() as lines, a_new_process():
            ended = raised(start_pool)
        yield Scene(
            f"{variable}={text} python -m sglang.launch_server ...", "server log, then the scheduler's exception",
            "\n".join([*lines, ended]),
            (r"ERROR Failed to execute general plugin: sglang_dsv4", rf"HooksNotLanded: .*{reason}", r"DSV4_ENABLED=0"),
        )  # fmt: skip
    yield Scene(
        "DSV4_TRANSFER=staged on a machine without a GPU", "the scheduler's exception",
        raised(lambda: attach(Settings(host_gb=0.05, transfer="staged"))),
        (r"^SettingError: DSV4_TRANSFER=staged needs a GPU; use auto, triton or torch",),
    )  # fmt: skip


DRILL = Drill(
    "settings",
    "A setting has a bad value, or a name that does not exist",
    "Correct the variable that the message names; docs/settings.md has them all.",
    _play,
)
