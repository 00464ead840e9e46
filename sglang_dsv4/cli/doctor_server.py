"""Reads the launch arguments of one server, and reports its treatment of retracted requests and its reservation.

The engine parses and resolves the arguments itself; the reasons are those of the functions that refuse in the server.
Facts that only the built pools show (rows of another attention backend, no RAM for HiSparse rows) come at its start.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sglang_dsv4.cache.groups import init_groups
from sglang_dsv4.cache.page_major import is_covered
from sglang_dsv4.cli import serve
from sglang_dsv4.cli.plan_config import EXAMPLES, ConfigError, Model, Variant, read_model
from sglang_dsv4.cli.plan_figures import UNLIMITED_RAM
from sglang_dsv4.engine.hooks.table import left_out
from sglang_dsv4.errors import HostCopyError, HostMemoryExhausted
from sglang_dsv4.hostmem.sizing import PoolSize, block_counts, free_ram
from sglang_dsv4.settings import OFF, Settings

KINDS = {"null": "plain", "decode": "decode", "prefill": "prefill"}
RANKS = ("--tp", "--tp-size", "--tensor-parallel-size")
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)  # of a variable, in front of a command
LAUNCHERS = ("serve", "sglang.launch_server")
STAND_IN = "flash"  # whose config is taken where that of the model is not on this machine


class LaunchError(HostCopyError, ValueError):
    """Reports that the engine refuses the launch arguments; the message is the engine's."""


@dataclass(frozen=True)
class Server:
    """Holds the facts that the launch arguments tell.

    ranks, arenas: of this machine. refuses: why it will not start. stock: why it keeps the engine's own behaviour.
    more: sentences on other parts of this package that run in it.
    """

    kind: str
    ranks: int
    arenas: int
    refuses: str = ""
    stock: str = ""
    more: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Returns the server, in a sentence."""
        return f"This server ({self.kind}, {self.ranks} {'rank' if self.ranks == 1 else 'ranks'} on this machine)"


def split_command(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Returns (variables that it sets, the engine's arguments) of a command line, with or without its launcher."""
    found, words = dict[str, str](), list(words)
    while words and (words[0].rpartition("/")[2] == "env" or ASSIGNMENT.fullmatch(words[0])):
        name, _, value = words.pop(0).partition("=")
        found |= {name: value} if value else {}
    for launcher in LAUNCHERS:
        if launcher in words[:4]:
            if words[words.index(launcher) - 1] == "sglang-dsv4":
                found[serve.MODELS_VARIABLE] = serve.MODELS
            words = words[words.index(launcher) + 1 :]
    ours, engine = serve.split(words)
    return {**found, **serve.environment(serve.parser().parse_args(ours))}, engine


def read(arguments: Sequence[str], tp: int | None, settings: Settings) -> Server:
    """Returns the plans of a server with ``arguments`` of the engine. tp: its ranks where they do not say.

    Raises LaunchError.
    """
    words = list(arguments)
    if tp is not None and not any(word.partition("=")[0] in RANKS for word in words):
        words += ["--tp-size", str(tp)]
    with contextlib.ExitStack() as stack:
        args, model, note = stack.enter_context(published(words))
        return _judge(args, model, note, settings)


@contextlib.contextmanager
def published(words: list[str]) -> Iterator[tuple[Any, Model | str, str]]:
    """Yields the engine's configuration, in effect as in a scheduler on a CUDA machine; undone behind it.

    Yields (its raw arguments, the model or why it is not of this package, a note on the model).
    """
    from sglang.srt.runtime_context import create_context, get_platform, override_platform, use_context  # noqa: PLC0415

    with _undone(), tempfile.TemporaryDirectory() as folder, override_platform(is_cuda=not get_platform().is_hip):
        args, note = _parse(words), ""
        config = Path(args.model_path) / "config.json"
        if not config.is_file():
            note = f"No config.json in {args.model_path} here: taken for DeepSeek-V4."
            args.model_path = folder
            config = Path(shutil.copy(EXAMPLES / f"{STAND_IN}.json", Path(folder) / "config.json"))
        model: Model | str
        try:
            model = read_model(str(config), Variant())
        except ConfigError as error:
            model = str(error)
        if args.device is None:
            args.device = "cuda"
        try:
            context = create_context(args, role="scheduler")
        except (ValueError, AssertionError, RuntimeError, OSError, NotImplementedError) as error:
            raise LaunchError(f"the engine refuses these arguments: {_line(str(error))}") from error
        with use_context(context):
            yield args, model, note


def _parse(words: list[str]) -> Any:
    from sglang.srt.server_args import prepare_server_args  # noqa: PLC0415

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            return prepare_server_args(words)
    except SystemExit as error:
        raise LaunchError(f"the engine's parser says: {_line(said.getvalue())}") from error


def _line(text: str) -> str:
    """Returns the last line, where argparse and the engine put the reason."""
    return (text.strip().splitlines() or ["nothing"])[-1]


@contextlib.contextmanager
def _undone() -> Iterator[None]:
    """Yields parsing sets up the log, and resolving sets variables of the environment."""
    environ, root = dict(os.environ), logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environ)
        root.handlers[:] = handlers
        root.setLevel(level)


def _judge(args: Any, model: Model | str, note: str, settings: Settings) -> Server:
    from sglang.srt.runtime_context import get_disagg  # noqa: PLC0415

    from sglang_dsv4.engine.memory import arenas_a_machine, ranks_a_machine  # noqa: PLC0415

    mode = get_disagg().disaggregation_mode
    kind, ranks, arenas = KINDS.get(mode, mode), ranks_a_machine(args), arenas_a_machine(args, settings.share)
    if not settings.enabled:
        return Server(kind, ranks, arenas, stock="DSV4_ENABLED=0")
    if isinstance(model, str):
        return Server(kind, ranks, arenas, stock=model)
    notes = (note,) if note else ()
    stock = _stock(args, kind, settings, model)
    more = (
        _plain_sentence(kind, stock),
        _sessions(args, kind, stock, settings),
        _prep(settings, model),
        *_layout(settings),
        _hisparse(),
        *notes,
    )
    refuses = "; ".join(_page_major(model)) if settings.layout == "page-major" else ""
    if refuses:
        refuses = f"DSV4_LAYOUT=page-major does not go with {refuses}"
    elif not stock and args.pp_size == 1:  # a stage has fewer layers than the model
        refuses = _too_little(model, settings, arenas)
    return Server(kind, ranks, arenas, refuses, stock, more)


def _too_little(model: Model, settings: Settings, arenas: int) -> str:
    """Returns why DSV4_HOST_GB or DSV4_HOST_COPIES would end the start of any server; empty where they do not."""
    from sglang.srt.environ import envs  # noqa: PLC0415

    if settings.host_gb is None and settings.host_copies is None:
        return ""
    if envs.SGLANG_OPT_USE_ONLINE_COMPRESS.get() or envs.SGLANG_DSV4_COMPRESS_STATE_DTYPE.get() != "float32":
        return ""  # states are smaller than a model's config tells
    ram = free_ram() if settings.host_gb is None else UNLIMITED_RAM  # that it is there is checked apart
    try:
        block_counts(init_groups(model.geometry), PoolSize(1, 1), settings, ram, arenas)
    except HostMemoryExhausted as error:
        return str(error)
    return ""


def _stock(args: Any, kind: str, settings: Settings, model: Model) -> str:
    """Returns why nothing is copied to the host; empty where retracted requests come back, or sessions are kept."""
    from sglang.srt.runtime_context import (  # noqa: PLC0415
        get_context,
        get_disagg,
        get_memory,
        max_speculative_num_draft_tokens,
    )

    from sglang_dsv4.engine.hisparse.reserve import server_keeps_rows  # noqa: PLC0415
    from sglang_dsv4.engine.memory import backup_refusal  # noqa: PLC0415
    from sglang_dsv4.engine.plain.start import session_launch_reasons  # noqa: PLC0415
    from sglang_dsv4.pools.describe import NO_KEPT_ROWS, drafts_refusal, environment_refusal  # noqa: PLC0415

    if kind == "prefill" and settings.sessions == OFF:
        return "a prefill server retracts nothing"
    if kind != "decode" and (reason := next(_plain(settings), None)):
        return reason
    if kind == "prefill" and (reason := next(session_launch_reasons(args, settings.share), None)):
        return reason
    if kind == "decode" and (reason := backup_refusal(get_disagg().disaggregation_decode_retraction_backup)):
        return reason
    drafts, stages = max_speculative_num_draft_tokens() or 0, get_context().server_args.pp_size
    beside = bool(drafts), get_memory().enable_hisparse, stages
    if reason := environment_refusal(model.geometry.ratios, *beside) or drafts_refusal(drafts):
        return reason
    return NO_KEPT_ROWS if get_memory().enable_hisparse and not server_keeps_rows() else ""


def _plain(settings: Settings) -> Iterator[str]:
    """Yields why a plain server is left to the engine."""
    from sglang.srt.runtime_context import get_disagg, get_memory, get_spec  # noqa: PLC0415

    from sglang_dsv4.engine.hisparse.reserve import server_keeps_rows  # noqa: PLC0415
    from sglang_dsv4.engine.plain import start  # noqa: PLC0415

    if reason := left_out("DSV4_PLAIN", settings.plain, version("sglang")):
        yield reason
    yield from start.server_reasons()
    if get_memory().enable_hisparse and not server_keeps_rows():
        yield start.NO_KEPT_ROWS
    yield from start.feature_reasons(_drafts(), get_disagg().enable_pdmux, get_spec().enable_multi_layer_eagle)


def _drafts() -> Any:
    from sglang.srt.runtime_context import get_spec  # noqa: PLC0415
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: PLC0415

    return SpeculativeAlgorithm.from_string(get_spec().speculative_algorithm)


def _plain_sentence(kind: str, stock: str) -> str:
    if kind != "plain":
        return f"Plain serving: no, it is a {kind} server."
    return "Plain serving: no." if stock else "Plain serving: yes."


def _sessions(args: Any, kind: str, stock: str, settings: Settings) -> str:
    from sglang_dsv4.engine.plain.start import COMES_COMPUTED, session_launch_reasons  # noqa: PLC0415

    reason = "DSV4_SESSIONS=off" if settings.sessions == OFF else ""
    if not reason and kind == "decode":
        reason = COMES_COMPUTED
    if not reason and stock:
        reason = "this server is as stock"
    if reason := reason or next(session_launch_reasons(args, settings.share), ""):
        return f"Sessions: no, and no memory for them: {reason}."
    if settings.sessions is None:
        return "Sessions: yes, in all host memory that no retracted request holds (DSV4_SESSIONS=auto)."
    return (
        f"Sessions: yes, in at most {settings.sessions:g} GiB of the host memory (DSV4_SESSIONS={settings.sessions:g})."
    )


def _prep(settings: Settings, model: Model) -> str:
    from sglang.srt.runtime_context import get_memory  # noqa: PLC0415

    from sglang_dsv4.engine.metadata.attach import ratios_refusal, server_refusal  # noqa: PLC0415

    reason = server_refusal(get_memory().enable_hisparse, _drafts().is_dspark())
    reason = reason or ratios_refusal(model.geometry.ratios)
    reason = left_out("DSV4_PREP", settings.prep, version("sglang")) or reason
    if reason:
        return f"Metadata kernels of this package: off: {reason}."
    return f"Metadata kernels of this package: on, in decode graphs and eager steps (DSV4_PREP={settings.prep})."


def _layout(settings: Settings) -> Iterator[str]:
    page_major = settings.layout == "page-major"
    yield f"Page-major: {'yes' if page_major else 'no'} (DSV4_LAYOUT={settings.layout})."


def _page_major(model: Model) -> Iterator[str]:
    import torch  # noqa: PLC0415

    from sglang_dsv4.engine.page_major import server_reasons  # noqa: PLC0415

    yield from server_reasons(torch.cuda.is_available())
    if not is_covered(model.geometry.ratios):
        yield f"compression ratios {sorted(set(model.geometry.ratios))}"


def _hisparse() -> str:
    from sglang.srt.runtime_context import get_memory  # noqa: PLC0415

    from sglang_dsv4.engine.hisparse.reserve import server_keeps_rows  # noqa: PLC0415

    if not get_memory().enable_hisparse:
        return "HiSparse: no."
    return f"HiSparse: {'yes, rows are kept on the host' if server_keeps_rows() else 'as the engine has it'}."


def paragraph(server: Server, host_gb: float | None, most: int) -> str:
    """Returns the verdict. most: bytes of an arena at most with auto."""
    if server.refuses:
        return f"{server.name} will refuse to start: {server.refuses}"
    if server.stock:
        what = f"{server.name} will behave as stock and reserve no host memory: {server.stock}."
        return " ".join((what, *server.more))
    size = f"{host_gb:g} GiB" if host_gb is not None else f"at most {most / 2**30:.1f} GiB"
    if server.arenas == 1:
        share = f"{size}, reserved once" + (f" and shared by its {server.ranks} ranks" if server.ranks > 1 else "")
    else:
        total = (host_gb * 2**30 if host_gb is not None else most) * server.arenas / 2**30
        share = f"{size} for each of {server.arenas} arenas, {total:.1f} GiB together"
    kept = "finished prompts" if server.kind == "prefill" else "retracted requests"
    what = f"{server.name} will keep {kept} in host memory: {share}."
    return " ".join((what, *server.more))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments behind ``--``."""
    help_ = "behind --: the arguments of one server, or its command; the doctor ends with what that server will do"
    parser.add_argument("server", nargs="*", metavar="SERVER ARGUMENTS", help=help_)
