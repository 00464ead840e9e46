"""Computes what a DeepSeek-V4 model's cache costs, from its config: bytes on the GPU, host memory, retract times."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from sglang_dsv4 import __version__
from sglang_dsv4.cache.page_major import PieceFigures, piece_figures
from sglang_dsv4.cli import plan_figures as figures
from sglang_dsv4.cli.plan_config import KV_LAYOUTS, Choices, ConfigError, Model, Variant, example_names, read_model
from sglang_dsv4.cli.plan_store import STORE_GBS, StoreFigures, store_figures, store_table
from sglang_dsv4.cli.tables import duration, size, table
from sglang_dsv4.command_line import number
from sglang_dsv4.errors import HostCopyError

LINK_GBS = 55.0  # PCIe 5 x16, one way, as a pinned copy reaches it
LENGTHS = (4096, 16384, 65536, 262144)
SESSIONS = 64  # of --sessions without a number
RECORDED = {"enable_return_routed_experts": "their experts", "enable_return_indexer_topk": "their index rows"}
TRANSFERRED = 65536  # tokens of the request whose pieces are counted


@dataclass(frozen=True)
class Plan:
    """Holds all that is shown. command: starts a server with room for the longest.

    choices, sessions, store: empty unless asked for.
    """

    model: Model
    link_gbs: float
    ranks: int
    families: list[figures.FamilyFigures]
    groups: list[figures.GroupFigures]
    units: figures.UnitFigures
    choices: tuple[Choices, ...]
    requests: list[figures.LengthFigures]
    sessions: list[figures.SessionFigures]
    store_gbs: float
    store: list[StoreFigures]
    transfers: tuple[PieceFigures, ...]
    command: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``sglang-dsv4 plan``."""
    add = parser.add_argument
    add("config", metavar="CONFIG", help=f"config.json, the folder that holds it, or {' or '.join(example_names())}")
    add("--requests", type=number(int, 1), default=16, metavar="N", help="retracted at once (default: 16)")
    add(
        "--tokens", type=number(int, 2, 1e9), nargs="+", metavar="N",
        help=f"lengths of a retracted request (default: {' '.join(map(str, LENGTHS))})",
    )  # fmt: skip
    add(
        "--link-gbs", type=number(float, 0.001), default=LINK_GBS, metavar="GBS",
        help=f"speed between GPU and host, one way, 1e9 bytes a second (default: {LINK_GBS:g}, PCIe 5 x16)",
    )  # fmt: skip
    add(
        "--ranks", type=number(int, 1, 1024), default=1, metavar="N",
        help="ranks of a machine that hold the same cache, as --tp without data-parallel attention: they share an "
        "arena; with --hisparse each keeps rows of its own (default: 1)",
    )  # fmt: skip
    add(
        "--draft-tokens", type=int, metavar="N",
        help="draft tokens a step, of EAGLE; 0: a server without (default: one more than the config's "
        "num_nextn_predict_layers)",
    )  # fmt: skip
    add("--fp4-indexer", action="store_true", help="indexer rows in fp4")
    add("--bf16-states", action="store_true", help="compression states in bf16")
    add(
        "--kv-layout", choices=KV_LAYOUTS, default=KV_LAYOUTS[0],
        help=f"kv rows: {KV_LAYOUTS[0]} on an H200, v41 where a B200 serves V4.1 (default: {KV_LAYOUTS[0]})",
    )  # fmt: skip
    add("--hisparse", action="store_true", help="a HiSparse server, which keeps c4 rows where they lie")
    for feature, of in RECORDED.items():
        argument = f"--{feature.replace('_', '-')}"
        add(argument, action="store_true", help=f"requests may ask for {of}: copies have them, too")
    add(
        "--sessions", type=number(int, 1), nargs="?", const=SESSIONS, metavar="N",
        help="finished requests whose cache stays for their next turn (DSV4_SESSIONS), held at once "
        f"(without a number: {SESSIONS})",
    )  # fmt: skip
    add(
        "--store", type=number(int, 1, 1e9), nargs="?", const=SESSIONS, metavar="N",
        help=f"sessions of a store that outlives servers (DSV4_STORE) (without a number: {SESSIONS})",
    )  # fmt: skip
    add(
        "--store-rate", type=number(float, 0.001), default=STORE_GBS, metavar="GB/s",
        help=f"speed of the store, either way, 1e9 bytes a second (default: {STORE_GBS:g}; doctor --store measures it)",
    )  # fmt: skip
    add("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan; returns 2 when the config or a size cannot be used."""
    try:
        plan = make(arguments)
    except (HostCopyError, OSError) as error:
        print(f"sglang-dsv4 plan: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps({"version": __version__, **asdict(plan)}))
    else:
        _print(plan)
    return 0


def make(arguments: argparse.Namespace) -> Plan:
    """Returns the plan of parsed ``arguments``. Raises ConfigError."""
    variant = Variant(
        arguments.draft_tokens, arguments.fp4_indexer, arguments.bf16_states, arguments.kv_layout, arguments.hisparse
    )
    model = read_model(arguments.config, variant)
    geometry = model.geometry
    lengths, choices = _lengths(model, arguments.tokens), _choices(model, arguments)
    rows = sum(each.token_bytes for each in choices)
    requests = [
        figures.length_figures(geometry, tokens, arguments.requests, arguments.link_gbs, arguments.ranks, rows)
        for tokens in lengths
    ]
    sessions = _session_rows(model, arguments, lengths, rows)
    return Plan(
        model, arguments.link_gbs, arguments.ranks, figures.family_figures(geometry), figures.group_figures(geometry),
        figures.unit_figures(geometry, rows), choices, requests, sessions, arguments.store_rate,
        _store_rows(model, arguments, lengths), piece_figures(geometry),
        _command(model, arguments, sessions or requests),
    )  # fmt: skip


def _choices(model: Model, arguments: argparse.Namespace) -> tuple[Choices, ...]:
    wanted = [feature for feature in RECORDED if getattr(arguments, feature)]
    found = {choices.feature: choices for choices in model.choices}
    for feature in wanted:
        if feature not in found:
            raise ConfigError(f"--{feature.replace('_', '-')}: the config of {model.name} does not say how many")
    return tuple(found[feature] for feature in wanted)


def _session_rows(
    model: Model, arguments: argparse.Namespace, lengths: list[int], row_bytes: int
) -> list[figures.SessionFigures]:  # fmt: skip
    if arguments.sessions is None:
        return []
    _check_sessions("--sessions", model, arguments, lengths)
    return [
        figures.session_figures(model.geometry, tokens, arguments.sessions, arguments.requests, row_bytes)
        for tokens in lengths
    ]


def _store_rows(model: Model, arguments: argparse.Namespace, lengths: list[int]) -> list[StoreFigures]:
    if arguments.store is None:
        return []
    _check_sessions("--store", model, arguments, lengths)
    return [store_figures(model.geometry, tokens, arguments.store, arguments.store_rate) for tokens in lengths]


def _check_sessions(option: str, model: Model, arguments: argparse.Namespace, lengths: list[int]) -> None:
    """Raises ConfigError unless a server of ``model`` could keep sessions of ``lengths``. option: wants them."""
    if arguments.hisparse:
        raise ConfigError(f"{option} with --hisparse: such a server keeps no sessions")
    if not any(family.page_bytes_a_token for family in figures.family_figures(model.geometry)):
        raise ConfigError(f"{option}: no layer of {model.name} has a history that a session could keep")
    for tokens in lengths:
        if tokens < model.geometry.page_size:
            raise ConfigError(f"--tokens {tokens} with {option}: needed: at least a page, {model.geometry.page_size}")


def _command(
    model: Model,
    arguments: argparse.Namespace,
    rows: Sequence[figures.LengthFigures | figures.SessionFigures],
) -> str:
    """Returns the command line of a server that has room for the longest of ``rows``."""
    longest = max(rows, key=lambda row: row.tokens)
    words = ["sglang-dsv4", "serve"]
    store = {"DSV4_STORE": "/FOLDER"} if arguments.store else {}
    for variable, text in (longest.settings | store).items():
        words += [f"--{variable.lower().replace('_', '-')}", text]
    words += ["--model-path", model.path or "MODEL", "--tp", str(arguments.ranks)]
    words += [choices.argument for choices in _choices(model, arguments)]
    return shlex.join(words + ["--enable-hisparse"] * arguments.hisparse)


def _lengths(model: Model, wanted: list[int] | None) -> list[int]:
    longest = model.context
    if wanted is None:
        return [tokens for tokens in LENGTHS if longest is None or tokens <= longest] or [longest or LENGTHS[0]]
    for tokens in wanted:
        if longest is not None and tokens > longest:
            raise ConfigError(f"--tokens {tokens}: max_position_embeddings of {model.name} is {longest}")
    return wanted


def _print(plan: Plan) -> None:
    geometry = plan.model.geometry
    counts = ", ".join(f"{len(geometry.layers_of(ratio))} of ratio {ratio}" for ratio in sorted(set(geometry.ratios)))
    print(f"{plan.model.name}: {len(geometry.ratios)} layers, {counts}")
    print("every rank holds and loads this much; ranks of a machine with the same cache need the host memory")
    print(f"once, and each saves its part{f' ({plan.ranks} of them)' if plan.ranks > 1 else ''}")
    drafts = plan.model.draft_tokens
    print(f"with {drafts} draft tokens a step (--draft-tokens 0: without)\n" if drafts else "without drafts\n")
    held = [_recorded(plan)] if plan.choices else []
    held += [_sessions(plan)] if plan.sessions else []
    held += [store_table(plan.store, plan.store_gbs)] if plan.store else []
    print("\n\n".join([_families(plan), _groups(plan), _requests(plan), *held, _transfers(plan)]))
    room = f"{plan.requests[0].requests:,} retracted requests"
    room += f" and {plan.sessions[0].sessions:,} sessions" if plan.sessions else ""
    tokens = max(row.tokens for row in plan.requests)
    print(f"\na server with room for {room} of {tokens:,} tokens; add its own options:")
    print(plan.command)  # in one line, to be copied


def _families(plan: Plan) -> str:
    columns = ("family", "group", "layers", "row", "a token", "size", "of one")
    rows = []
    for family in plan.families:
        grows = f"{family.page_bytes_a_token:,.0f} B" if family.page_bytes_a_token else "-"
        rows.append((
            family.name, family.group, str(family.layers), f"{family.row_bytes:,} B", grows, size(family.unit_bytes),
            family.unit,
        ))  # fmt: skip
    rows.append(("all", "", "", "", f"{sum(f.page_bytes_a_token for f in plan.families):,.0f} B", "", ""))
    return table("The cache, all layers", columns, rows, left=(0, 1, 6))


def _groups(plan: Plan) -> str:
    rows = []
    for group in plan.groups:
        grows = f"with each {plan.model.geometry.page_size} tokens" if group.grows else "no, at most"
        rows.append((group.name, grows, size(group.payload_bytes)))
    unit = plan.units
    note = f"in units of {size(unit.nbytes)}: one for each page, at most {unit.most_tail} for window and request"
    return table("A saved request in host memory", ("group", "grows", "size"), rows, (0, 1), note)


def _transfers(plan: Plan) -> str:
    columns = ("DSV4_LAYOUT", "regions", f"pieces of {TRANSFERRED:,} tokens", "a piece", "a token more")
    rows = []
    for way in plan.transfers:
        mean = sum(way.piece_bytes) / max(1, way.regions)
        pieces = f"{way.pieces(TRANSFERRED, plan.model.geometry.page_size):,}"
        rows.append((way.layout, str(way.regions), pieces, size(mean), f"{way.extra_bytes:,.0f} B"))
    return table("The history of a request, from prefill to decode", columns, rows)


def _requests(plan: Plan) -> str:
    count = plan.requests[0].requests
    ways = ["save", "load"] if plan.ranks > 1 else ["save or load"]
    columns = ["tokens", "saved", f"{count:,} copies", "DSV4_HOST_GB", *ways]
    kept = plan.requests[0].kept_bytes
    if kept:
        columns += [f"kept rows, {count:,}"]
    speed = f"{plan.link_gbs * 1e9 / figures.GIB:.1f} GiB/s (--link-gbs {plan.link_gbs:g})"
    rows = []
    for row in plan.requests:
        cells = [f"{row.tokens:,}", size(row.moved_bytes), size(row.host_bytes), row.settings["DSV4_HOST_GB"]]
        cells += [duration(row.save_ms)] if plan.ranks > 1 else []
        cells += [duration(row.move_ms)]
        if kept:
            cells += [size(row.kept_bytes)]
        rows.append(cells)
    return table(f"Retracts at {speed}", columns, rows)


def _recorded(plan: Plan) -> str:
    columns = ("argument", "layers", "a token and layer", "a token")
    rows = [
        (each.argument, str(each.layers), f"{each.layer_bytes:,} B", f"{each.token_bytes:,} B") for each in plan.choices
    ]
    page, rest = plan.model.geometry.page_size, sum(each.token_bytes for each in plan.choices)
    note = f"of DSV4_HOST_GB: {size(page * rest)} of each unit's {size(plan.units.nbytes)}; they cross no link"
    return table("Choices that go with each copy", columns, rows, (0,), note)


def _sessions(plan: Plan) -> str:
    first = plan.sessions[0]
    more = f"{first.turn:,} tokens more"
    columns = ("tokens", "first save", "another point", more, "sessions a GiB", "DSV4_HOST_GB")
    rows = []
    for row in plan.sessions:
        saves = (size(row.first_bytes), size(row.point_bytes), size(row.turn_bytes))
        rows.append((f"{row.tokens:,}", *saves, f"{row.a_gib:,.1f}", row.settings["DSV4_HOST_GB"]))
    note = (
        f"DSV4_HOST_GB: {first.sessions:,} sessions of {first.points} points and {first.requests:,} retracted requests;"
        " a prefill server needs DSV4_SESSIONS=auto, too"
    )
    return table("Sessions: finished requests whose cache stays on the host", columns, rows, (), note)
