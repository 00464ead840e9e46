"""The pictures of docs/: SVG text from the cache layout and the recorded results. ``draw_docs.py`` writes them."""

from __future__ import annotations

from html import escape

from recorded import resumed

from sglang_dsv4.cache.families import Geometry
from sglang_dsv4.cache.family import Group
from sglang_dsv4.cache.groups import init_groups
from sglang_dsv4.cache.packed import PackedBlock

COLOURS = {
    "c4_kv": "#1b6ca8", "c4_indexer": "#7fb7e0", "c128_kv": "#0c3c5f", "swa_kv": "#d98a1f", "c4_state": "#f0c05a",
    "c4_indexer_state": "#a3621b", "c128_state": "#2c8f62",
}  # fmt: skip
GROUP_COLOURS = {Group.PAGED: "#1b6ca8", Group.WINDOW: "#d98a1f", Group.REQUEST: "#2c8f62"}
UNNAMED = "#8a6fb3"  # a family that has no colour of its own
INK, FAINT, OTHER, PAPER = "#1c2530", "#66717d", "#c7cdd4", "#ffffff"
ARROW = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    f'<path d="M0,0 L8,4 L0,8 z" fill="{INK}"/></marker></defs>'
)


class Drawing:
    """SVG elements, in order."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size = (width, height)
        self._parts = [f"<title>{escape(title)}</title>", ARROW]
        self.box(0, 0, width, height, PAPER)

    def box(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        """A filled rectangle."""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="3" '
            f'fill="{fill}" stroke="none"/>'
        )

    def text(
        self, x: float, y: float, words: str, fill: str = INK, size: int = 13, anchor: str = "start", bold: bool = False
    ) -> None:
        """One line; y is its baseline."""
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}" font-size="{size}" text-anchor="{anchor}"{weight}>'
            f"{escape(words)}</text>"
        )

    def lines(self, x: float, y: float, words: list[str], **style: object) -> None:
        """Several lines, 17 apart."""
        for number, line in enumerate(words):
            self.text(x, y + 17 * number, line, **style)

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """From the first point to the second."""
        self._parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{INK}" stroke-width="1.6" '
            'marker-end="url(#tip)"/>'
        )

    def rule(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """A thin line."""
        self._parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{OTHER}"/>')

    def svg(self) -> str:
        """The whole file."""
        width, height = self._size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="Helvetica, Arial, sans-serif">'
        )
        return "\n".join([head, *self._parts, "</svg>", ""])


def _pages(d: Drawing, x: float, y: float, numbers: list[str], fill: str, ink: str = PAPER) -> None:
    for place, number in enumerate(numbers):
        d.box(x + 33 * place, y, 30, 26, fill)
        d.text(x + 33 * place + 15, y + 18, number, ink, 12, "middle")


def _request(d: Drawing, x: float, y: float, full: list[str], swa: list[str], slot: str) -> None:
    """Where one request lies on the GPU."""
    for line, (what, numbers, group) in enumerate(
        (("full pages", full, Group.PAGED), ("SWA pages", swa, Group.WINDOW), ("slot", [slot], Group.REQUEST))
    ):
        d.text(x, y + 18 + 34 * line, what, FAINT, 12)
        _pages(d, x + 76, y + 34 * line, numbers, GROUP_COLOURS[group])


STEPS = (("runs", 120), ("retracted", 330), ("away", 545), ("resumed", 735), ("runs on", 940))


def retract() -> str:
    """One request through a retract and a resume: scheduler, GPU, host memory."""
    d = Drawing(1130, 520, "A retract and a resume: what the scheduler calls, and where the bytes are")
    for lane, top in (("scheduler", 60), ("GPU", 190), ("host memory", 385)):
        d.rule(0, top - 16, 1130, top - 16)
        d.text(14, top + 8, lane, INK, 14, bold=True)
    for name, x in STEPS:
        d.text(x, 28, name, INK, 15, bold=True)
    d.lines(
        330,
        68,
        ["retract_decode", "0.5.17  offload_kv_cache", "0.5.23  backup_kv_cache", "-> pool.get_cpu_copy"],
        size=12,
    )
    d.lines(545, 68, ["the copy waits in the", "request, which waits in", "the retracted queue"], size=12, fill=FAINT)
    d.lines(
        735, 68, ["resume_retracted_reqs", "_pre_alloc: new pages", "load_kv_cache", "-> pool.load_cpu_copy"], size=12
    )
    _request(d, 120, 200, ["3", "9", "4"], ["2", "7"], "2")
    d.text(120, 325, "request A, n tokens", INK, 13)
    for line, width in enumerate((3, 2, 1)):
        _pages(d, 545, 200 + 34 * line, ["B"] * width, OTHER, INK)
    d.text(545, 325, "the same pages, now B's", INK, 13)
    _request(d, 900, 200, ["11", "6", "8"], ["5", "1"], "0")
    d.text(900, 325, "request A, elsewhere", INK, 13)
    y = 400
    d.text(330, y + 18, "blocks", FAINT, 12)
    for place in range(3):
        d.box(400 + 62 * place, y, 58, 26, GROUP_COLOURS[Group.PAGED])
    d.box(400 + 3 * 62, y, 110, 26, GROUP_COLOURS[Group.WINDOW])
    d.box(514 + 3 * 62, y, 150, 26, GROUP_COLOURS[Group.REQUEST])
    for x, words in ((493, "paged, one a page"), (641, "window"), (775, "request")):
        d.text(x, y + 44, words, FAINT, 12, "middle")
    d.text(
        400,
        y + 74,
        "one pinned arena, cut once at start; blocks are taken all or none, and given back after the load",
        INK,
        13,
    )
    d.text(
        400,
        y + 94,
        "window: rows of the last 127 tokens, live tail of the c4 states.  request: pending rows of the c128 state",
        FAINT,
        12,
    )
    d.arrow(310, 300, 395, 395)
    d.text(368, 345, "save: returns when the bytes are on the host", INK, 12)
    d.arrow(855, 395, 920, 335)
    d.text(880, 348, "load: returns when enqueued;", INK, 12, "end")
    d.text(868, 365, "the next forward waits for its event", INK, 12, "end")
    return d.svg()


def blocks() -> str:
    """The packed block of each group of the Flash model, each to its own scale."""
    flash = Geometry((0, 0, *((4, 128) * 20), 4))
    d = Drawing(1130, 315, "The packed host blocks of the 43-layer model")
    left, width = 130, 970
    for number, (group, spec) in enumerate(init_groups(flash).items()):
        packed, y = PackedBlock.of(spec), 20 + 95 * number
        d.text(14, y + 24, group.value, GROUP_COLOURS[group], 15, bold=True)
        d.text(14, y + 42, f"{packed.block_stride:,} B", FAINT, 12)
        d.box(left, y, width, 46, OTHER)
        for family, offset in zip(packed.families, packed.offsets, strict=True):
            size = len(family.layers) * family.host_bytes
            start, wide = left + width * offset / packed.block_stride, width * size / packed.block_stride
            d.box(start, y, wide, 46, COLOURS.get(family.name, UNNAMED))
            what = f"{len(family.layers)} layers x {family.host_bytes:,} B"
            ink = INK if family.name in {"c4_indexer", "c4_state"} else PAPER
            if wide > 8 * max(len(what), len(family.name)):
                d.text(start + wide / 2, y + 19, family.name, ink, 13, "middle")
                d.text(start + wide / 2, y + 36, what, ink, 12, "middle")
            else:
                d.text(start + wide, y + 62, f"{family.name}: {what}", FAINT, 12, "end")
    d.text(
        left,
        300,
        "each bar to its own scale; grey is padding to 256 bytes (families) and 4096 bytes (blocks)",
        FAINT,
        12,
    )
    return d.svg()


STOCK, OURS, ENDS = "#d98a1f", "#1b6ca8", "#b3403a"


def timeline() -> str:
    """A request of 64K tokens on three servers: what follows its retract, to scale from where it has room again."""
    run = resumed(65536)
    d = Drawing(1130, 300, "A retracted request of 64K tokens: what stock servers do, and what this package does")
    left, room, right = 190, 490, 1110
    scale = (right - 30 - room) / run["recompute_ms"]
    d.text(14, 24, "One request of 64K tokens, retracted under memory pressure", INK, 15, bold=True)
    d.rule(room, 118, room, 252)
    d.text(room, 112, "memory is free again", FAINT, 12, "middle")
    recompute, resume = (room + scale * run[what] for what in ("recompute_ms", "to_token_ms"))
    for line, (who, away, fill) in enumerate((
        ("stock 0.5.17", "", ENDS), ("stock 0.5.23", "waits, cache gone", STOCK),
        ("with this package", "waits, cache in host memory", OURS),
    )):  # fmt: skip
        y = 62 + 68 * line
        d.text(14, y + 23, who, INK, 14, bold=True)
        d.box(left, y, 80, 36, GROUP_COLOURS[Group.REQUEST])
        d.text(left + 40, y + 23, "runs", PAPER, 13, "middle")
        if not away:
            d.box(left + 82, y, 14, 36, fill)
            d.text(left + 106, y + 23, "the scheduler stops: this request and every other one is lost", ENDS, 13)
            continue
        d.box(left + 82, y, room - left - 82, 36, OTHER)
        d.text((left + 82 + room) / 2, y + 23, away, INK, 13, "middle")
        end = recompute if fill is STOCK else resume
        d.box(room, y, end - room, 36, fill)
        d.box(end, y, right - end, 36, GROUP_COLOURS[Group.REQUEST])
    words = f"the prefill server computes the cache again: {run['recompute_ms'] / 1e3:.1f} s to the next token"
    d.text((room + recompute) / 2, 153, words, INK, 13, "middle")
    d.text(
        resume + 12, 221, f"the copy is loaded: {run['to_token_ms']:.0f} ms to the next token, then it runs", PAPER, 13
    )
    source = "Both times were measured on one H200 with sglang 0.5.17: docs/results/resume.json."
    d.text(14, 288, f"To scale from the moment when memory is free again. {source}", FAINT, 12)
    return d.svg()


PICTURES = {"timeline.svg": timeline, "retract.svg": retract, "blocks.svg": blocks}
