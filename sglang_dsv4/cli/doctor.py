"""Check what a server with this package needs, on this machine and in this environment."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from sglang_dsv4 import __version__
from sglang_dsv4.cli.serve import MODELS, MODELS_VARIABLE, models_trouble, plugin_trouble
from sglang_dsv4.engine.hooks import hooks_of, prep_wanted
from sglang_dsv4.engine.releases import TESTED, line_of
from sglang_dsv4.errors import HostCopyError, HostMemoryExhausted, SettingError
from sglang_dsv4.settings import TABLE, Settings, read_settings, unknown_names

OK, WARN, FAIL = "ok", "warn", "fail"
COLOURS = {OK: "green", WARN: "yellow", FAIL: "red"}
REQUIREMENTS = f"install sglang {' or '.join(TESTED)}"
PROBE_BYTES = 64 << 20


@dataclass(frozen=True)
class Check:
    """One finding. todo: what to do about it. breaks: what does not work here because of it."""

    name: str
    status: str
    found: str
    todo: str = ""
    breaks: str = ""


Checks = Iterator[Check]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``sglang-dsv4 doctor``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; 1 when any check fails."""
    with contextlib.redirect_stdout(sys.stderr):  # what the engine prints when it is imported
        checks = examine()
    failed = any(check.status == FAIL for check in checks)
    if arguments.json:
        print(json.dumps({"version": __version__, "ok": not failed, "checks": [asdict(c) for c in checks]}))
    else:
        _print(checks)
    return int(failed)


def examine() -> list[Check]:
    """Every finding, in order. The hooks are installed into this process."""
    checks: list[Check] = []
    for name, parts in PARTS.items():
        try:
            for check in parts():
                checks.append(check)  # one by one: what was found before an error stays
        except ImportError as error:
            checks.append(Check(name, FAIL, f"cannot be checked: {error}", f"{REQUIREMENTS} and what it requires"))
        except (HostCopyError, AttributeError, RuntimeError, OSError) as error:
            checks.append(Check(name, FAIL, f"{type(error).__name__}: {error}", "see the messages above"))
    return checks


def _python() -> Checks:
    found = f"{platform.python_version()} ({sys.executable})"
    good = sys.version_info >= (3, 10)
    yield Check("python", OK, found) if good else Check("python", FAIL, found, "use Python 3.10 or later")


def _torch() -> Checks:
    import torch  # noqa: PLC0415

    if torch.version.cuda is None:
        yield Check("torch", WARN, f"{torch.__version__}, without CUDA", "install a CUDA build of torch to serve")
    else:
        yield Check("torch", OK, f"{torch.__version__}, CUDA {torch.version.cuda}")


def _triton() -> Checks:
    yield Check("triton", OK, version("triton"))


def _sglang() -> Checks:
    found = version("sglang")
    line = line_of(found)
    tested = ", ".join(TESTED)
    if line is None:
        breaks = "a DeepSeek-V4 server: it refuses to start"
        yield Check("sglang", FAIL, f"{found}, which has no adapter", REQUIREMENTS, breaks)
    elif found not in TESTED:
        yield Check("sglang", WARN, f"{found}, adapter {line.first}, not tested", f"prefer a tested release ({tested})")
    else:
        yield Check("sglang", OK, f"{found}, adapter {line.first}, tested")


def _entry_point() -> Checks:
    trouble = plugin_trouble(os.environ)
    if trouble is None:
        yield Check("entry point", OK, "the engine finds the plugin")
        return
    found, _, todo = trouble.partition("; ")
    yield Check("entry point", FAIL, found, todo, "host copies: the engine would serve without this package")


def _settings() -> Checks:
    for setting in TABLE.values():
        text = os.environ.get(setting.variable, setting.default)
        origin = "set" if setting.variable in os.environ else "default"
        try:
            read_settings({setting.variable: text})
        except SettingError as error:
            yield Check(setting.variable, FAIL, str(error), f"change or unset {setting.variable}", "any server")
        else:
            yield Check(setting.variable, OK, f"{text} ({origin})")
    for name, nearest in unknown_names(os.environ).items():
        if nearest:
            yield Check(name, FAIL, "unknown setting", f"rename it to {nearest} or unset it", "any server")
        else:
            yield Check(name, WARN, "no setting of this package: left alone", "unset it unless it is another program's")


def _settings_or_defaults() -> Settings:
    """For checks that need a value; a bad one has its own finding."""
    try:
        return read_settings()
    except SettingError:
        return Settings()


def _hooks() -> Checks:
    installed = version("sglang")
    line = line_of(installed)
    if line is None:
        yield Check("hooks", FAIL, f"sglang {installed} has no adapter", REQUIREMENTS)
        return
    if not read_settings().enabled:
        yield Check("hooks", WARN, "DSV4_ENABLED=0: the engine stays as it is", "unset DSV4_ENABLED", "host copies")
        return
    from sglang_dsv4.engine.landed import Landing  # noqa: PLC0415
    from sglang_dsv4.engine.standalone import boot, install_hooks  # noqa: PLC0415

    boot()
    install_hooks()
    for hook in hooks_of(installed, prep=prep_wanted(read_settings().prep, installed)):
        owner, name = hook.target.split(".")[-2:]
        name = f"hook {hook.kind} {owner}.{name}" if owner[0].isupper() else f"hook {hook.kind} {name}"
        missing = Landing(installed, (hook,)).missing()
        if missing:
            todo = f"{REQUIREMENTS}, or serve with DSV4_ENABLED=0"
            yield Check(name, FAIL, f"missing: {missing[0]}", todo, "a DeepSeek-V4 server: it refuses to start")
        else:
            yield Check(name, OK, "landed")


def _models() -> Checks:
    trouble = models_trouble(os.environ)
    if trouble is not None:
        found, _, todo = trouble.partition("; ")
        yield Check(MODELS_VARIABLE, FAIL, found, todo, "sglang-dsv4 serve")
    elif os.environ.get(MODELS_VARIABLE):
        yield Check(MODELS_VARIABLE, OK, MODELS)
    else:
        todo = f"start with sglang-dsv4 serve, or set it to {MODELS}"
        yield Check(MODELS_VARIABLE, WARN, "not set", todo, "refusing to start when the engine did not load the plugin")


def _host_memory() -> Checks:
    from sglang_dsv4.hostmem.sizing import RAM_SHARE, free_ram  # noqa: PLC0415

    free, wanted = free_ram(), _settings_or_defaults().host_gb
    found = f"{_size(free)} free; DSV4_HOST_GB=auto takes at most {_size(free // RAM_SHARE)}, all ranks together"
    if wanted is not None and wanted * 2**30 > free:
        yield Check("host memory", FAIL, f"{found}; wanted {wanted:g} GiB a rank", "lower DSV4_HOST_GB", "host copies")
    else:
        yield Check("host memory", OK, found)


def _locked_memory() -> Checks:
    import torch  # noqa: PLC0415

    from sglang_dsv4.hostmem.sizing import RAM_SHARE, free_ram  # noqa: PLC0415

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    host_gb = _settings_or_defaults().host_gb
    wanted = free_ram() // RAM_SHARE if host_gb is None else int(host_gb * 2**30)
    found = f"{'unlimited' if limit == resource.RLIM_INFINITY else _size(limit)}, arena up to {_size(wanted)}"
    if limit == resource.RLIM_INFINITY or limit >= wanted:
        yield Check("locked memory (ulimit -l)", OK, found)
    elif not torch.cuda.is_available():
        yield Check("locked memory (ulimit -l)", OK, f"{found}; without a GPU nothing is pinned")
    else:
        todo = "if pinning is refused: ulimit -l unlimited (docker: --ulimit memlock=-1), or lower DSV4_HOST_GB"
        yield Check("locked memory (ulimit -l)", WARN, found, todo)


def _gpu() -> Checks:
    import torch  # noqa: PLC0415

    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(number)
            yield Check(f"GPU {number}", OK, f"{properties.name}, {_size(properties.total_memory)}")
        yield _pinning()
    else:
        breaks = "a server; bench and demo move their bytes with torch, at its speed"
        yield Check("GPU", WARN, "none that torch sees", "run on a machine with an NVIDIA GPU to serve", breaks)


def _pinning() -> Check:
    """Pin as a server does, a little."""
    from sglang_dsv4.hostmem.arena import Arena  # noqa: PLC0415

    started = time.perf_counter()
    try:
        Arena(PROBE_BYTES, pin=True).close()
    except HostMemoryExhausted as error:
        return Check("pinning", FAIL, str(error), "raise the locked-memory limit (ulimit -l)", "host copies")
    return Check("pinning", OK, f"{_size(PROBE_BYTES)} in {(time.perf_counter() - started) * 1e3:.0f} ms")


def _prometheus() -> Checks:
    try:
        yield Check("prometheus_client", OK, version("prometheus_client"))
    except ImportError:
        yield Check("prometheus_client", WARN, "not installed", "pip install prometheus_client", "--enable-metrics")


PARTS: dict[str, Callable[[], Checks]] = {
    "python": _python,
    "torch": _torch,
    "triton": _triton,
    "sglang": _sglang,
    "entry point": _entry_point,
    "settings": _settings,
    "hooks": _hooks,
    MODELS_VARIABLE: _models,
    "host memory": _host_memory,
    "locked memory (ulimit -l)": _locked_memory,
    "GPU": _gpu,
    "prometheus_client": _prometheus,
}


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes / 2**20:.0f} MiB"


def shortened(checks: list[Check]) -> list[Check]:
    """``checks`` with one line for all hooks that landed; --json has each."""
    fine = [check for check in checks if check.name.startswith("hook ") and check.status == OK]
    hooks = [check for check in checks if check.name.startswith("hook ")]
    if not fine:
        return checks
    found = []
    for check in checks:
        if check is hooks[0]:
            found.append(Check("hooks", OK, f"{len(fine)} of {len(hooks)} landed"))
        if check not in fine:
            found.append(check)
    return found


def _print(checks: list[Check]) -> None:
    checks = shortened(checks)
    try:
        from rich.console import Console  # noqa: PLC0415
        from rich.table import Table  # noqa: PLC0415
    except ImportError:
        print(_plain(checks))
    else:
        _print_table(checks, Console(), Table(title=f"sglang-dsv4 {__version__}"))
    for check in checks:
        if check.breaks:
            print(f"does not work here: {check.breaks} ({check.name})")


def _print_table(checks: list[Check], console: Any, table: Any) -> None:
    from rich.text import Text  # noqa: PLC0415

    for column in ("check", "", "found -> what to do"):
        table.add_column(column, overflow="fold")
    for check in checks:
        found = f"{check.found}\n-> {check.todo}" if check.todo else check.found
        table.add_row(Text(check.name), Text(check.status, COLOURS[check.status]), Text(found))
    console.print(table)


def _plain(checks: list[Check]) -> str:
    lines = []
    for check in checks:
        lines.append(f"{check.status:4}  {check.name}: {check.found}")
        if check.todo:
            lines.append(textwrap.indent(check.todo, "      -> "))
    return "\n".join(lines)
