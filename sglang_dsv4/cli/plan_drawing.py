"""The packed blocks, the three groups and whole requests, drawn to scale. matplotlib is an optional extra."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_dsv4.cache.families import Geometry
from sglang_dsv4.cache.family import Group
from sglang_dsv4.cache.groups import KVCacheGroupSpec, init_groups
from sglang_dsv4.cache.packed import PackedBlock
from sglang_dsv4.cli.plan_config import Model
from sglang_dsv4.errors import HostCopyError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MIB = 1 << 20
COLOURS = {
    "c4_kv": "#0b5fa5", "c4_indexer": "#5aa9e6", "c128_kv": "#0a2f51",
    "c1_kv": "#0b5fa5", "c1_indexer": "#5aa9e6", "c2_kv": "#0a2f51", "c2_indexer": "#9fb8d0", "c2_state": "#1b8a5a",
    "swa_kv": "#d98200", "c4_state": "#f2c14e", "c4_indexer_state": "#a35200", "c128_state": "#1b8a5a",
    "draft_swa_kv": "#e8b06a", "padding": "#d0d0d0",
}  # fmt: skip
UNNAMED = "#8a6fb3"  # a family that has no colour of its own
GROUP_COLOURS = {Group.PAGED: "#0b5fa5", Group.WINDOW: "#d98200", Group.REQUEST: "#1b8a5a"}
INK = "#222222"
WIDTH = 11  # inches
PALE = ("c1_indexer", "c2_indexer", "c4_indexer", "c4_state")  # colours that need dark letters
BAR = 0.7  # height of a bar; bars are 1 apart
LEAST_PITCH = 1.2  # points between two cuts; closer ones would be one grey
ROOM = 0.13  # share of a block from which on a family's label fits into it
MARGIN = 1.2  # room for the label behind the longest bar


class PlotsMissing(HostCopyError, ImportError):
    """matplotlib is not installed; the message names the extra."""


@dataclass(frozen=True)
class Box:
    """A piece of a packed block, cut into equal parts: one a layer, or one a row where the layers' rows alternate."""

    name: str
    start: int
    nbytes: int
    parts: int


def boxes(packed: PackedBlock) -> list[Box]:
    """The families of a block and the padding between and behind them: together the whole block, without overlap."""
    found, end = [], 0
    for family, offset in zip(packed.families, packed.offsets, strict=True):
        nbytes = len(family.layers) * family.host_bytes
        if not nbytes:
            continue
        if offset > end:
            found.append(Box("padding", end, offset - end, 1))
        found.append(Box(family.name, offset, nbytes, family.host_rows if family.interleaved else len(family.layers)))
        end = offset + nbytes
    if packed.block_stride > end:
        found.append(Box("padding", end, packed.block_stride - end, 1))
    return found


def request_boxes(geometry: Geometry, tokens: int) -> list[tuple[Group, int, int]]:
    """(group, start, bytes) of the host blocks of a request of ``tokens`` tokens, all but the last saved."""
    found, end = [], 0
    for group, spec in init_groups(geometry).items():
        nbytes = spec.blocks_for(tokens - 1) * PackedBlock.of(spec).block_stride
        found.append((group, end, nbytes))
        end += nbytes
    return found


def draw(model: Model, lengths: Sequence[int], path: Path) -> None:
    """Write the picture to ``path``, an SVG. Raises PlotsMissing without matplotlib."""
    try:
        import matplotlib as mpl  # noqa: PLC0415
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise PlotsMissing("a picture needs matplotlib: pip install 'sglang-dsv4[plots]'") from error
    style: dict[Any, Any] = {
        "font.size": 9,
        "svg.fonttype": "none",
        "svg.hashsalt": "plan",
        "text.color": INK,
        "axes.edgecolor": INK,
    }
    with mpl.rc_context(style):
        figure = Figure(figsize=(WIDTH, 3 + 1.2 * len(Group) + 0.4 * len(lengths)), layout="constrained")
        _compose(figure, model, lengths)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _compose(figure: Figure, model: Model, lengths: Sequence[int]) -> None:
    groups = {group: spec for group, spec in init_groups(model.geometry).items() if not spec.empty}
    rows: list[Any] = [*groups, "scale", "requests"]
    heights = [0.8] * len(groups) + [0.3 * len(groups), 0.3 * len(lengths)]
    axes = dict(zip(rows, figure.subplots(len(rows), 1, height_ratios=heights), strict=True))
    figure.suptitle(
        f"DeepSeek-V4 {model.name}, {len(model.geometry.ratios)} layers: a saved request in host memory, to scale",
        fontsize=13, fontweight="bold",
    )  # fmt: skip
    for group, spec in groups.items():
        _packed_block(axes[group], spec)
    _one_scale(axes["scale"], groups)
    _requests(axes["requests"], model.geometry, lengths)


def _bar(axes: Axes, name: str, y: float, start: int, nbytes: int, colour: str) -> None:
    from matplotlib.patches import Rectangle  # noqa: PLC0415

    bar = Rectangle((start / MIB, y - BAR / 2), nbytes / MIB, BAR, facecolor=colour, edgecolor="none")
    bar.set_gid(f"bar.{name}")  # so that a reader of the SVG finds it
    axes.add_patch(bar)


def _frame(axes: Axes, nbytes: int, lowest: float, title: str) -> None:
    """A bare axis in MiB from 0 to ``nbytes``; bars lie at heights 0, 1, ... down to ``lowest``."""
    axes.set(xlim=(0, nbytes / MIB), ylim=(lowest - 0.55, 0.55), yticks=[])
    axes.set_title(title, loc="left", fontweight="bold", fontsize=10)
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} MiB" if value else "0")


def _packed_block(axes: Axes, spec: KVCacheGroupSpec) -> None:
    packed = PackedBlock.of(spec)
    many = f"for each {spec.block_size} tokens" if spec.max_blocks is None else "for a request"
    padding = packed.block_stride - packed.payload_bytes
    title = f"Group {packed.group.value}: one host block {many}, {packed.block_stride:,} B ({padding:,} B of padding)"
    _frame(axes, packed.block_stride, 0, title)
    members = {family.name: family for family in packed.families}
    above = 0
    for box in boxes(packed):
        _bar(
            axes,
            f"{packed.group.value}.{box.name}.{box.start}",
            0,
            box.start,
            box.nbytes,
            COLOURS.get(box.name, UNNAMED),
        )
        cuts = [(box.start + box.nbytes * part / box.parts) / MIB for part in range(1, box.parts)]
        pitch = WIDTH * 72 * box.nbytes / packed.block_stride / box.parts  # points
        if pitch >= LEAST_PITCH:
            axes.vlines(cuts, -BAR / 2, BAR / 2, color="white", lw=min(0.4, pitch / 6))
        if box.name == "padding":
            continue  # too thin for a label, and its bytes are in the title
        family = members[box.name]
        layers = f"{len(family.layers)} layers"
        rows = f"{family.host_rows} rows"
        cut = f"{rows} of {layers}, interleaved" if family.interleaved else f"{layers} of {rows}"
        middle, text = (box.start + box.nbytes / 2) / MIB, f"{cut}\n{box.nbytes:,} B"
        if box.nbytes >= ROOM * packed.block_stride:
            colour = INK if box.name in PALE else "white"
            face = {"boxstyle": "round,pad=0.25", "facecolor": COLOURS.get(box.name, UNNAMED), "edgecolor": "none"}
            axes.text(middle, 0, f"{box.name}\n{text}", ha="center", va="center", color=colour, fontsize=8, bbox=face)
        else:
            axes.annotate(
                f"{box.name}: {text}".replace("\n", ", "), (middle, BAR / 2), (0, 9 + 11 * above),
                textcoords="offset points", ha="right", va="bottom", fontsize=8,
                arrowprops={"arrowstyle": "-", "color": INK, "lw": 0.6, "shrinkA": 0, "shrinkB": 0},
            )  # fmt: skip
            above += 1


def _one_scale(axes: Axes, groups: dict[Group, KVCacheGroupSpec]) -> None:
    blocks = {group: PackedBlock.of(spec).block_stride for group, spec in groups.items()}
    _frame(axes, int(max(blocks.values()) * MARGIN), 1 - len(blocks), "The three groups' blocks on one scale")
    for y, (group, nbytes) in enumerate(blocks.items()):
        _bar(axes, f"scale.{group.value}", -y, 0, nbytes, GROUP_COLOURS[group])
        axes.text(nbytes / MIB, -y, f"  {group.value}: {nbytes / MIB:,.1f} MiB", va="center", fontsize=8)


def _requests(axes: Axes, geometry: Geometry, lengths: Sequence[int]) -> None:
    bars = {tokens: request_boxes(geometry, tokens) for tokens in lengths}
    longest = max(start + nbytes for found in bars.values() for _, start, nbytes in found)
    _frame(axes, int(longest * MARGIN), 1 - len(bars), "Saved requests on one scale: block, window and request blocks")
    for y, (tokens, found) in enumerate(bars.items()):
        for group, start, nbytes in found:
            _bar(axes, f"{tokens}.{group.value}", -y, start, nbytes, GROUP_COLOURS[group])
        end = sum(nbytes for _, _, nbytes in found)
        axes.text(end / MIB, -y, f"  {tokens:,} tokens: {end / MIB:,.1f} MiB", va="center", fontsize=8)
