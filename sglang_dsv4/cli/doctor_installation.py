"""Checks each installed part: one finding for each, with the remedy."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from sglang_dsv4.cli.serve import MODELS, MODELS_VARIABLE, models_trouble, plugin_trouble
from sglang_dsv4.engine.early_send import switch as early_send_switch
from sglang_dsv4.engine.hooks.table import hooks_for
from sglang_dsv4.engine.releases import TESTED, engine_release, is_supported
from sglang_dsv4.errors import SettingError
from sglang_dsv4.settings import TABLE, Settings, read_settings, unknown_names

OK, WARN, FAIL = "ok", "warn", "fail"
NO_SERVER = "a DeepSeek-V4 server"  # such a finding's ``breaks`` begins with it
HOST_COPIES = "host copies"  # likewise
REFUSES = f"{NO_SERVER}: it refuses to start"
ENGINE_SAID = "see what the engine said, above"
OLDEST_PYTHON = (3, 11)
# What the suite and the live servers ran with: docs/supported.md.
TESTED_PYTHON = ("3.11", "3.12")
TESTED_TORCH = ("2.11",)  # of those with CUDA
TESTED_TRITON = {True: ("3.6",), False: ("3.4",)}  # with CUDA, without
REQUIREMENTS = f"install sglang {' or '.join(TESTED)}"


@dataclass(frozen=True)
class Check:
    """Holds one finding. todo: the remedy. breaks: the functions that do not work here because of it."""

    name: str
    status: str
    found: str
    todo: str = ""
    breaks: str = ""


Checks = Iterator[Check]


def python() -> Checks:
    """Checks the interpreter."""
    found = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info < OLDEST_PYTHON:
        yield Check("python", FAIL, found, f"use Python {'.'.join(map(str, OLDEST_PYTHON))} or later")
    else:
        yield _tested("python", platform.python_version(), found, TESTED_PYTHON)


def torch() -> Checks:
    """Checks torch, and whether it has CUDA."""
    import torch  # noqa: PLC0415

    if torch.version.hip is not None:
        yield Check("torch", WARN, f"{torch.__version__}, ROCm {torch.version.hip}", "tested live on NVIDIA GPUs alone")
    elif torch.version.cuda is None:
        yield Check("torch", WARN, f"{torch.__version__}, without CUDA", "install a CUDA build of torch to serve")
    else:
        yield _tested("torch", torch.__version__, f"{torch.__version__}, CUDA {torch.version.cuda}", TESTED_TORCH)


def triton() -> Checks:
    """Checks triton. Without CUDA its interpreter runs the kernels, in tests alone."""
    found = version("triton")
    import torch  # noqa: PLC0415

    yield _tested("triton", found, found, TESTED_TRITON[torch.version.cuda is not None])


def _tested(name: str, number: str, found: str, tested: Sequence[str]) -> Check:
    if any(f"{number}.".startswith(f"{prefix}.") for prefix in tested):
        return Check(name, OK, found)
    return Check(name, WARN, f"{found}, not tested", f"tested with {name} {' and '.join(tested)}")


def sglang() -> Checks:
    """Returns whether the installed release is supported, and whether it is tested."""
    found = version("sglang")
    tested = ", ".join(TESTED)
    if not is_supported(found):
        yield Check("sglang", FAIL, f"sglang {found} is not supported", REQUIREMENTS, REFUSES)
    elif found not in TESTED:
        yield Check("sglang", WARN, f"{found}, not tested", f"prefer a tested release ({tested})")
    else:
        yield Check("sglang", OK, f"{found}, tested")


def entry_point() -> Checks:
    """Returns whether the engine would load the plugin."""
    trouble = plugin_trouble(os.environ)
    if trouble is None:
        yield Check("entry point", OK, "the engine finds the plugin")
        return
    found, _, todo = trouble.partition("; ")
    yield Check("entry point", FAIL, found, todo, f"{HOST_COPIES}: the engine would serve without this package")


def settings() -> Checks:
    """Checks each setting, and each variable that looks like one."""
    for setting in TABLE.values():
        text = os.environ.get(setting.variable, setting.default)
        origin = "set" if setting.variable in os.environ else "default"
        try:
            read_settings({setting.variable: text})
        except SettingError as error:
            yield Check(setting.variable, FAIL, str(error), f"change or unset {setting.variable}", REFUSES)
        else:
            yield Check(setting.variable, OK, f"{text} ({origin})")
    for name, nearest in unknown_names(os.environ).items():
        if nearest:
            yield Check(name, FAIL, f"unknown setting {name}", f"rename it to {nearest} or unset it", REFUSES)
        else:
            yield Check(name, WARN, "no setting of this package: left alone", "unset it unless it is another program's")


def settings_or_defaults() -> Settings:
    """Returns a setting for checks that need a value; a bad one has its own finding."""
    try:
        return read_settings()
    except SettingError:
        return Settings()


def hooks() -> Checks:
    """Checks every hook, installed into this process as a server installs it."""
    installed = version("sglang")
    if not is_supported(installed):
        yield Check("hooks", FAIL, f"sglang {installed} is not supported", REQUIREMENTS)
        return
    try:
        settings = read_settings()
    except SettingError:  # which has its own finding
        return
    if not settings.enabled:
        yield Check("hooks", WARN, "DSV4_ENABLED=0: the engine stays as it is", "unset DSV4_ENABLED", HOST_COPIES)
        return
    from sglang_dsv4.engine.hooks.check import Installation  # noqa: PLC0415
    from sglang_dsv4.testing.standalone import boot, install_hooks  # noqa: PLC0415

    boot()
    install_hooks()
    installation = Installation(installed, hooks_for(settings, installed))
    todo = f"{REQUIREMENTS}, or serve with DSV4_ENABLED=0"
    if missing := list(dict.fromkeys(installation.missing())):
        yield Check("hooks", FAIL, "; ".join(missing), todo, REFUSES)
    else:
        yield Check("hooks", OK, f"{len(installation.hooks)} landed")


def early_send() -> Checks:
    """Checks whether a prefill server here may send over NIXL rows that its forward has not written yet."""
    from sglang_dsv4.testing.standalone import boot  # noqa: PLC0415

    if not is_supported(version("sglang")):
        return
    boot()
    switch = early_send_switch()
    if settings_or_defaults().enabled and engine_release().nixl_gets_the_event:
        found = f"with this package a prefill server sends over NIXL what is written; a stock one with {switch.name}=0"
        yield Check("early send", OK, found)
    elif not switch.get():
        yield Check("early send", OK, f"{switch.name}=0: what is sent has been written")
    else:
        found = f"{switch.name} is on: over NIXL a chunk may be sent before its forward has written it"
        todo = f"with NIXL, start prefill servers with {switch.name}=0, also those without this package"
        yield Check("early send", WARN, found, todo, "prompts of many chunks over NIXL: wrong bytes may arrive")


def models() -> Checks:
    """Checks the engine's place for a package of models."""
    trouble = models_trouble(os.environ)
    if trouble is not None:
        found, _, todo = trouble.partition("; ")
        yield Check(MODELS_VARIABLE, FAIL, found, todo, "sglang-dsv4 serve")
    elif os.environ.get(MODELS_VARIABLE):
        yield Check(MODELS_VARIABLE, OK, MODELS)
    else:
        todo = f"start with sglang-dsv4 serve, or set it to {MODELS}"
        yield Check(MODELS_VARIABLE, WARN, "not set", todo, "refusing to start when the engine did not load the plugin")


def prometheus() -> Checks:
    """Checks the package that --enable-metrics needs."""
    try:
        yield Check("prometheus_client", OK, version("prometheus_client"))
    except ImportError:
        yield Check("prometheus_client", WARN, "not installed", "pip install prometheus_client", "--enable-metrics")
