"""Reads the launch arguments of one server, and reports its treatment of retracted requests and its reservation.

The engine parses and resolves the arguments itself; the reasons are those of the functions that refuse in the server.
Facts that only the built pools show (rows of another attention backend, no RAM for HiSparse rows) come at its start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

from sglang_dsv4.cache.page_major import is_covered
from sglang_dsv4.cache.units import Units
from sglang_dsv4.cli.launch_args import Launch, published
from sglang_dsv4.cli.launch_command import LaunchError
from sglang_dsv4.cli.launch_gpu import GPUS
from sglang_dsv4.cli.plan_config import Choices, Model
from sglang_dsv4.command_line import gpus
from sglang_dsv4.engine.hooks.table import left_out
from sglang_dsv4.errors import HostMemoryExhausted
from sglang_dsv4.hostmem.sizing import PoolSize, arena_size
from sglang_dsv4.settings import Settings

UNLIMITED_RAM = 1 << 62
KINDS = {"null": "plain", "decode": "decode", "prefill": "prefill"}
RANKS = ("--tp", "--tp-size", "--tensor-parallel-size")
MEASURED, NEWER = "sm90", "sm100"  # GPUs that a server is judged for where none is named and none is here
UNIFORM_ROWS = "uniform fp8 rows (--dsv4-attn-backend trtllm)"


@dataclass(frozen=True)
class Server:
    """Holds the facts that the launch arguments tell."""

    kind: str
    ranks: int  # of this machine, as arenas
    arenas: int
    refuses: str = ""  # why it will not start
    stock: str = ""  # why it keeps the engine's own behaviour
    more: tuple[str, ...] = ()  # sentences on other parts of this package that run in it
    stand_in: str = ""  # a sentence on the model that it was judged by, where its own is not here
    sends_by_nixl: bool = False  # prompts that it computed

    @property
    def name(self) -> str:
        """Returns the server, in a sentence."""
        return f"This server ({self.kind}, {self.ranks} {'rank' if self.ranks == 1 else 'ranks'} on this machine)"


def read(arguments: Sequence[str], tp: int | None, settings: Settings, gpu: str | None = None) -> Server:
    """Returns the plans of a server with ``arguments`` of the engine.

    tp: its ranks where they do not say. gpu: of ``GPUS``; None: this machine's, or where it has none the first that the
    engine does not refuse. Raises LaunchError.
    """
    words = list(arguments)
    if tp is not None and not any(word.partition("=")[0] in RANKS for word in words):
        words += ["--tp-size", str(tp)]
    if gpu is not None:
        return _read(words, settings, gpu, f"Judged for {gpu}.")
    if gpus():
        return _read(words, settings)
    try:
        return _read(words, settings, MEASURED, f"Judged for {MEASURED}, as no GPU is here (--gpu names another).")
    except LaunchError as error:
        try:
            return _read(words, settings, NEWER, f"Judged for {NEWER}: the engine refuses this on {MEASURED}.")
        except LaunchError:
            raise error from None


def _read(words: Sequence[str], settings: Settings, gpu: str | None = None, judged_for: str = "") -> Server:
    with published(words, gpu) as launch:
        server = _judge(launch, settings, gpu)
    notes = (*launch.notes, judged_for) if judged_for else launch.notes
    return replace(server, more=(*server.more, *notes), stand_in=launch.stand_in)


def _judge(launch: Launch, settings: Settings, gpu: str | None) -> Server:
    from sglang.srt.runtime_context import get_disagg  # noqa: PLC0415

    from sglang_dsv4.engine.coverage import launch as said  # noqa: PLC0415
    from sglang_dsv4.engine.ranks import arenas_a_machine, ranks_a_machine  # noqa: PLC0415

    args, model, disagg = launch.args, launch.model, get_disagg()
    mode = disagg.disaggregation_mode
    prefills = mode == "prefill" or disagg.enable_pd_role_switch
    server = Server(
        KINDS.get(mode, mode), ranks_a_machine(args), arenas_a_machine(args, settings.share),
        sends_by_nixl=prefills and disagg.disaggregation_transfer_backend == "nixl",
    )  # fmt: skip
    if not settings.enabled:
        return replace(server, stock="DSV4_ENABLED=0")
    if isinstance(model, str):
        return replace(server, stock=model)
    on = said(args=args, share=settings.share, sessions_asked=settings.sessions.asked)
    stock = _stock(on, server.kind, settings, model)
    more = (
        _plain_sentence(server.kind, stock),
        *_choices(on, stock, model),
        _sessions(on, stock, settings),
        _store(on, server.kind, stock, settings),
        _prep(on, settings, model),
        *_layout(settings),
        _hisparse(),
    )
    refuses = "; ".join(_page_major(model, gpu)) if settings.layout == "page-major" else ""
    if refuses:
        refuses = f"DSV4_LAYOUT=page-major does not go with {refuses}"
    elif not stock and args.pp_size == 1:  # a stage has fewer layers than the model
        refuses = _too_little(model, settings, server.arenas, _row_bytes(on, model))
    return replace(server, refuses=refuses, stock=stock, more=more)


def _too_little(model: Model, settings: Settings, arenas: int, row_bytes: int) -> str:
    """Returns why DSV4_HOST_GB would end the start of any server; empty where it does not."""
    from sglang.srt.environ import envs  # noqa: PLC0415

    if settings.host_gb is None:
        return ""
    if envs.SGLANG_OPT_USE_ONLINE_COMPRESS.get() or envs.SGLANG_DSV4_COMPRESS_STATE_DTYPE.get() != "float32":
        return ""  # states are smaller than a model's config tells
    try:  # that the RAM is there is checked apart
        arena_size(Units.of(model.geometry, row_bytes), PoolSize(1, 1), settings, UNLIMITED_RAM, arenas)
    except HostMemoryExhausted as error:
        return str(error)
    return ""


def _stock(on: Any, kind: str, settings: Settings, model: Model) -> str:
    """Returns why nothing is copied to the host; empty where retracted requests come back, or sessions are kept."""
    from sglang.srt.runtime_context import max_speculative_num_draft_tokens  # noqa: PLC0415

    from sglang_dsv4.engine.coverage import Part, refusal  # noqa: PLC0415
    from sglang_dsv4.engine.hisparse.reserve import server_keeps_rows  # noqa: PLC0415
    from sglang_dsv4.engine.plain import start  # noqa: PLC0415
    from sglang_dsv4.pools.describe import NO_KEPT_ROWS, drafts_refusal, environment_refusal  # noqa: PLC0415

    without_rows = on.hisparse and not server_keeps_rows()
    if kind == "prefill" and not settings.sessions.asked:
        return "a prefill server retracts nothing"
    if kind != "decode" and (reason := left_out("DSV4_PLAIN", settings.plain, version("sglang"))):
        return reason
    parts = {"decode": (Part.DECODE,), "prefill": (Part.PLAIN, Part.SESSIONS)}.get(kind, (Part.PLAIN,))
    if why := refusal(on, *parts):
        return why
    if kind != "decode" and without_rows:
        return start.NO_KEPT_ROWS
    drafts = max_speculative_num_draft_tokens() or 0
    beside = bool(drafts), on.hisparse, on.args.pp_size
    if why := environment_refusal(model.geometry.ratios, *beside) or drafts_refusal(drafts):
        return why
    if _has_uniform_rows():
        return UNIFORM_ROWS
    return refusal(on, Part.COPIES) or (NO_KEPT_ROWS if without_rows else "")


def _has_uniform_rows() -> bool:
    from sglang.srt.runtime_context import get_exec  # noqa: PLC0415

    return bool(get_exec().kernel.dsv4_attn_backend == "trtllm")


def _plain_sentence(kind: str, stock: str) -> str:
    if kind != "plain":
        return f"Plain serving: no, it is a {kind} server."
    return "Plain serving: no." if stock else "Plain serving: yes."


def _choices(on: Any, stock: str, model: Model) -> Iterator[str]:
    """Yields what a server does otherwise because requests may return their expert or indexer choices."""
    if not on.choices or stock:
        return
    if on.args.pp_size > 1:
        yield (
            "A request that returns its expert or indexer choices (return_routed_experts, return_indexer_topk) is left "
            "to the engine (ChoicesBySlot)."
        )
        return
    parts = [f"{one.layers} layers of {one.layer_bytes:,} for {one.argument}" for one in _recorded(on, model)]
    count = f"{_row_bytes(on, model):,} bytes a token of DSV4_HOST_GB ({', '.join(parts)})"
    yield f"Copies have the choices that requests may ask for: {count if parts else 'counted by DSV4_HOST_GB'}."


def _recorded(on: Any, model: Model) -> list[Choices]:
    """Returns what the engine records, as far as the model's config tells it."""
    return [choices for choices in model.choices if getattr(on.exec.features, choices.feature)]


def _row_bytes(on: Any, model: Model) -> int:
    return sum(choices.token_bytes for choices in _recorded(on, model))


def _sessions(on: Any, stock: str, settings: Settings) -> str:
    from sglang_dsv4.engine.coverage import Part, refusal  # noqa: PLC0415

    reason = "" if settings.sessions.kept else "DSV4_SESSIONS=off"
    if not reason and stock:
        reason = "this server is as stock"
    if reason := reason or refusal(on, Part.SESSIONS) or "":
        return f"Sessions: no, and no memory for them: {reason}."
    most, asked = settings.sessions.most_gib, settings.sessions.asked
    if most is not None:
        return f"Sessions: yes, in at most {most:g} GiB of the host memory (DSV4_SESSIONS={most:g})."
    given = "auto" if asked else "plain, the default"
    return f"Sessions: yes, in all host memory that no retracted request holds (DSV4_SESSIONS={given})."


def _store(on: Any, kind: str, stock: str, settings: Settings) -> str:
    """Returns what goes between this server and a store, if it has one."""
    from sglang_dsv4.engine.coverage import Part, refusal  # noqa: PLC0415

    if not settings.store.backend:
        return ""
    reason = "this server is as stock" if stock else left_out("DSV4_PLAIN", settings.plain, version("sglang"))
    part = Part.ANSWERS if kind == "decode" else Part.SESSIONS
    off = kind != "decode" and not settings.sessions.kept
    reason = reason or ("DSV4_SESSIONS=off" if off else refusal(on, part, Part.STORE) or "")
    if reason:
        return f"Store: no: {reason}."
    if kind == "decode":
        return "Store: answers are written to it, for the prefill server's next turns."
    return "Store: sessions are written to it, and read from it."


def _prep(on: Any, settings: Settings, model: Model) -> str:
    from sglang_dsv4.engine.coverage import Part, refusal  # noqa: PLC0415
    from sglang_dsv4.engine.metadata.attach import ratios_refusal  # noqa: PLC0415

    reason = _other_backend(model) or refusal(on, Part.METADATA)
    reason = reason or ratios_refusal(model.geometry.ratios)
    reason = left_out("DSV4_PREP", settings.prep, version("sglang")) or reason
    if reason:
        return f"Metadata kernels of this package: off: {reason}."
    return f"Metadata kernels of this package: on, in decode graphs and eager steps (DSV4_PREP={settings.prep})."


def _other_backend(model: Model) -> str:
    """Returns the attention backend, where it is one that ``engine.metadata.attach`` refuses; else nothing."""
    from sglang.srt.runtime_context import get_platform  # noqa: PLC0415

    from sglang_dsv4.pools.describe import NO_WINDOWS, environment_refusal  # noqa: PLC0415

    if environment_refusal(model.geometry.ratios) == NO_WINDOWS:
        return NO_WINDOWS
    if get_platform().is_hip:
        return "the attention backend of ROCm"
    return UNIFORM_ROWS if _has_uniform_rows() else ""


def _layout(settings: Settings) -> Iterator[str]:
    page_major = settings.layout == "page-major"
    yield f"Page-major: {'yes' if page_major else 'no'} (DSV4_LAYOUT={settings.layout})."


def _page_major(model: Model, gpu: str | None) -> Iterator[str]:
    from sglang_dsv4.engine.page_major import READ, server_reasons  # noqa: PLC0415

    yield from server_reasons(gpu is None)
    if gpu and (capability := GPUS[gpu]["device_capability"]) != READ:
        yield f"a GPU of compute capability {capability} (whose kernels were read: {READ})"
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
    return " ".join(part for part in (server.stand_in, *_sentences(server, host_gb, most)) if part)


def _sentences(server: Server, host_gb: float | None, most: int) -> tuple[str, ...]:
    if server.refuses:
        return (f"{server.name} will refuse to start: {server.refuses}",)
    if server.stock:
        what = f"{server.name} will behave as stock and reserve no host memory: {server.stock}."
        return what, *server.more
    size = f"{host_gb:g} GiB" if host_gb is not None else f"at most {most / 2**30:.1f} GiB"
    if server.arenas == 1:
        share = f"{size}, reserved once" + (f" and shared by its {server.ranks} ranks" if server.ranks > 1 else "")
    else:
        total = (host_gb * 2**30 if host_gb is not None else most) * server.arenas / 2**30
        share = f"{size} for each of {server.arenas} arenas, {total:.1f} GiB together"
    kept = "finished prompts" if server.kind == "prefill" else "retracted requests"
    return f"{server.name} will keep {kept} in host memory: {share}.", *server.more
